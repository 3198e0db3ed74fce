"""What a soak does to a run apart from injected faults; what a machine cannot do is left out, told.

A full disk under the ledgers, links that drop packets one way, links that are slow or lose some
packets, workers with wrong arguments.
"""

import os
import random
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from meshmend.config import CHIP
from meshmend.errors import MeshmendError
from meshmend.lab.testbed.bed import Testbed
from meshmend.lab.workloads.trainable import SampleSet
from meshmend.lab.workloads.workload import Workload
from meshmend.membership.faults.fault import Fault, FaultKind
from meshmend.topology.failures import Block, Chip, Link, SlowLink
from meshmend.topology.mesh import Mesh

_REST_S = 20.0  # without disturbances at the end
_LEDGER_DISK = "64m"
_SLOW_PROBABILITY = 0.7  # of a bad link; else it loses packets
_LOST_PART = 0.01
_WRONG_EVERY_S = 60.0
_WRONG_FOR_S = 4.0


@dataclass
class Disturbance:
    """Something that is wrong for `for_s`, again and again; `begin` returns it in words."""

    begin: Callable[[], str]
    end: Callable[[], None]
    first_s: float
    every_s: float
    for_s: float
    is_on: bool = False

    def tick(self, now_s: float, until_s: float) -> str:
        """Begin or end what is due; return in words what has begun."""
        since_s = (now_s - self.first_s) % self.every_s
        is_due = self.first_s <= now_s < until_s - _REST_S and since_s < self.for_s
        if is_due == self.is_on:
            return ""
        self.is_on = is_due
        if is_due:
            return self.begin()
        self.end()
        return ""


def full_disk(ledger: Path) -> Disturbance:
    """Return a disk that is full from time to time; the ledgers are moved to a disk of their own.

    Raises:
        OSError: this user may not mount one.
    """
    disk = ["mount", "-t", "tmpfs", "-o", f"size={_LEDGER_DISK}", "tmpfs", str(ledger)]
    done = subprocess.run(disk, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OSError(done.stderr.strip() or "mount failed")
    filler = ledger / "filler"

    def fill() -> str:
        try:
            with filler.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(1 << 20))
        except OSError:
            return "the disk of the ledgers is full"

    return Disturbance(fill, lambda: filler.unlink(missing_ok=True), 40.0, 90.0, 2.0)


def unmount(ledger: Path) -> None:
    """Take the disk of the ledgers away, if there is one."""
    if ledger.is_mount():
        subprocess.run(["umount", "--lazy", str(ledger)], check=False)


def one_way_drop(mesh: Mesh, seed: int) -> Disturbance:
    """Return a link of the testbed that loses all packets of one direction from time to time."""
    source = random.Random(seed)
    dropped: list[tuple[Testbed, Chip, Chip]] = []

    def begin() -> str:
        chip = source.choice(mesh.live)
        goal = source.choice(sorted(mesh.neighbors(chip)))
        try:
            bed = Testbed.attach()
            bed.drop(chip, goal)
        except MeshmendError as error:  # such as a link that is cut
            return f"no packets are dropped: {error}"
        dropped.append((bed, chip, goal))
        return f"packets from {chip} to {goal} are dropped"

    def end() -> None:
        while dropped:
            bed, chip, goal = dropped.pop()
            with suppress(MeshmendError):  # the run has ended, and its testbed with it
                bed.pass_again(chip, goal)

    return Disturbance(begin, end, 25.0, 35.0, 6.0)


def bad_link(mesh: Mesh, seed: int) -> Disturbance:
    """Return a link of the testbed that is slow, or loses some packets, from time to time.

    The job watches its links: it may find such a link, plan anew, and lose a chip meanwhile.
    """
    source = random.Random(seed)
    made_bad: list[tuple[Testbed, Link]] = []

    def begin() -> str:
        chip = source.choice(mesh.live)
        link = Link.between(chip, source.choice(sorted(mesh.neighbors(chip))))
        is_slow, speed = source.random() < _SLOW_PROBABILITY, source.choice((0.1, 0.25, 0.5))
        try:
            bed = Testbed.attach()
            if is_slow:
                bed.slow(SlowLink(link, speed))
            else:
                bed.lose(link, _LOST_PART)
        except MeshmendError as error:
            return f"no link is made slow: {error}"
        made_bad.append((bed, link))
        return f"{link} has {speed} of its rate" if is_slow else f"{link} loses packets"

    def end() -> None:
        while made_bad:
            bed, link = made_bad.pop()
            with suppress(MeshmendError):  # the run has ended, and its testbed with it
                bed.slow(SlowLink(link, 1.0))
                bed.lose(link, 0.0)

    return Disturbance(begin, end, 12.0, 30.0, 15.0)


class WrongInSomeWorkers:
    """A data set that is one sample longer in the worker of a chip that a file names."""

    def __init__(self, dataset: SampleSet, names_chip: Path) -> None:
        self._dataset, self._names_chip = dataset, names_chip
        self._lengths: dict[int, int] = {}  # by process: a worker stays right or wrong

    def __len__(self) -> int:
        if os.getpid() not in self._lengths:
            wrong = self._names_chip.read_text() if self._names_chip.exists() else ""
            is_wrong = bool(wrong) and wrong == CHIP.value_in(os.environ)
            self._lengths[os.getpid()] = len(self._dataset) + is_wrong
        return self._lengths[os.getpid()]

    def __getitem__(self, index: int, /) -> tuple[torch.Tensor, ...]:
        return self._dataset[index % len(self._dataset)]


@dataclass(frozen=True)
class WrongWorkers:
    """Workers that are started again, at first with wrong arguments, and are refused."""

    workload: Workload
    faults: tuple[Fault, ...]
    disturbances: tuple[Disturbance, ...]


def wrong_workers(
    workload: Workload, mesh: Mesh, names_chip: Path, *, for_s: float, seed: int
) -> WrongWorkers:
    """Return a workload and faults by which workers come back wrong, one a minute."""
    faults, disturbances = [], []
    for at_s, chip in _wrong_times(mesh, for_s, seed):
        block = Block((1,) * len(chip), chip)
        for time_s in (at_s, at_s + _WRONG_FOR_S):
            faults.append(Fault(FaultKind.REPAIR, block, at_s=time_s))
        words = ",".join(map(str, chip))

        def begin(words: str = words) -> str:
            names_chip.write_text(words)
            return f"the worker of {words} is started again with another data set"

        disturbances.append(
            Disturbance(begin, lambda: names_chip.unlink(missing_ok=True), at_s - 2, for_s, 5.0)
        )
    dataset = WrongInSomeWorkers(workload.dataset, names_chip)
    return WrongWorkers(replace(workload, dataset=dataset), tuple(faults), tuple(disturbances))


def _wrong_times(mesh: Mesh, for_s: float, seed: int) -> Iterator[tuple[float, tuple[int, ...]]]:
    source = random.Random(seed)
    at_s = _WRONG_EVERY_S / 2
    while at_s < for_s - _REST_S:
        yield at_s, source.choice(mesh.live)
        at_s += _WRONG_EVERY_S


def possible(makers: Iterable[tuple[str, Callable[[], Disturbance]]]) -> list[Disturbance]:
    """Return the disturbances that this machine can make; each other one is told in one line."""
    made = []
    for name, make in makers:
        try:
            made.append(make())
        except OSError as error:
            print(f"soak: without {name}: {error}", flush=True)
    return made

"""Chaos for a given time and seed: random faults on a training job, and a table of recoveries.

    python benchmarks/soak.py --minutes 10 --seed 1 [--testbed 200Mbit | --no-testbed]

Fails on the first divergence, lost or repeated sample, or pause without a step, the time before the
first step included; at the end also on a process that is left over, and on memory or descriptors
that grow. The chips are network namespaces of a testbed where this machine grants one, links drop
packets one way, and the job watches its links, of which some are slow or lose packets for a while;
elsewhere they are processes on loopback.

Samples are shared by speed, except in a job of tiles, and chips compute slowly for a while.

A pause counts by the time in which a process could have had a processor: on a machine that is busy
with other work, everything takes longer, and nothing stands still.
"""

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from meshmend.config import (
    JobConfig,
    LocalConfig,
    RunConfig,
    SavingConfig,
    ShardingConfig,
    SumConfig,
    Timing,
    TrainingConfig,
)
from meshmend.errors import TestbedError
from meshmend.lab.testbed.bed import Testbed
from meshmend.lab.workloads.registry import workload
from meshmend.launch.training import train
from meshmend.launch.worker import compute_in_one_thread
from meshmend.membership.events import (
    ChipRestored,
    ChipSlow,
    ChipsWaiting,
    FaultHappened,
    FaultRecovered,
    JobFailed,
    LinkRestored,
    LinkSlow,
    RunStarted,
    StateLost,
    StateRestored,
    StepFinished,
    TimedEvent,
    WorkerTurnedAway,
    WrongResult,
)
from meshmend.membership.faults.fault import Fault, parse_fault
from meshmend.membership.job_view import JobView
from meshmend.pages.report.event_words import event_words
from meshmend.planning.compile_once import compile_once
from meshmend.topology.failures import Chip, board_shape
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import mesh_config, parse_mesh
from meshmend.train.data.audit import audit
from meshmend.units import parse_bandwidth
from random_faults import random_faults
from record import record
from soak_disturbances import (
    Disturbance,
    bad_link,
    full_disk,
    one_way_drop,
    possible,
    unmount,
    wrong_workers,
)

# This and the next ones: seconds with a processor to be had. A job that lost its state waits for
# `_HOLDER_S`; if the coordinator dies meanwhile, the next one waits anew.
STALL_S = 23.0
_SAVE_EVERY = 200
_SAVE_EVERY_SHARED = 5  # two boards that die at once take a part of a shared state with them
_HOLDER_S = 8.0  # longer than any chip hangs
_FIRST_STEP_S = 60.0  # sixteen workers on a busy machine
_END_S = 60.0  # after the time that was asked for
_PROGRESS_S = 10
_SPIN_S = 0.005
_SHOWN = (
    *(FaultHappened, FaultRecovered, WorkerTurnedAway, ChipsWaiting),
    *(StateLost, StateRestored, JobFailed, WrongResult, LinkSlow, LinkRestored),
    *(ChipSlow, ChipRestored),
)
_FLIP_EVERY, _MOST_STEPS_PER_S = 5, 10
_FIRST_THROTTLE, _THROTTLE_EVERY, _THROTTLE_S = 5, (20, 60), 15.0  # steps, steps, seconds
_PAGE_MB = os.sysconf("SC_PAGESIZE") / 1e6
_WARM_S = 30.0
_MOST_NEW_FDS = 6
_MOST_NEW_MB = 30.0


@dataclass
class Watch:
    """What a second pair of eyes sees of a run: progress, memory, descriptors, bits."""

    folder: Path
    for_s: float
    disturbances: list[Disturbance] = field(default_factory=list)
    started_at: float = float("inf")
    last_step_at: float = float("inf")
    steps: int = 0
    n_chips: int = 0
    n_faults: int = 0
    longest_pause_s: float = 0.0
    paused_s: float = 0.0  # since the last step, with a processor to be had
    late_s: float = 0.0  # since the run should have ended
    faults: list[dict[str, object]] = field(default_factory=list)
    worker_samples: dict[int, list[tuple[float, int, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    names: dict[int, str] = field(default_factory=dict)
    is_over: bool = False
    flipped: frozenset[Chip] = frozenset()  # the chips that compute wrong numbers

    def hear(self, timed: TimedEvent) -> None:
        """Take up an event of the run."""
        event = timed.event
        if isinstance(event, StepFinished):
            now = time.monotonic()
            self.longest_pause_s = max(self.longest_pause_s, now - min(now, self.last_step_at))
            self.last_step_at, self.steps = now, self.steps + 1
            self.paused_s = 0.0
            self.n_chips = event.chips
        elif isinstance(event, RunStarted):
            self.disturbances += possible([("a full disk", lambda: full_disk(self.ledger))])
            self.started_at = time.monotonic()
        elif isinstance(event, WrongResult) and event.chip not in self.flipped:
            self._fail(f"it takes the wrong chip for one that is wrong: {event_words(event)}")
        elif isinstance(event, _SHOWN):
            self.n_faults += isinstance(event, FaultHappened)
            print(f"{timed.t:8.1f} s  {event_words(event)}", flush=True)

    @property
    def ledger(self) -> Path:
        return self.folder / "ledger"

    def disturb(self, view: JobView, elapsed_s: float) -> tuple[Fault, ...]:
        """Begin and end what is wrong for a while; return no faults.

        The launcher calls this. Workers that it forks while another thread starts a command would
        keep the pipes of that command, which that thread reads to their end.
        """
        del view, elapsed_s
        since_s = time.monotonic() - self.started_at
        for disturbance in self.disturbances:
            if words := disturbance.tick(since_s, self.for_s):
                self.n_faults += 1
                print(f"{since_s:8.1f} s  {words}", flush=True)
        return ()

    def look(self) -> None:
        """Look every second until the run is over; end the process when it goes wrong."""
        beat, seen = 0, set[str]()
        while not self.is_over:
            time.sleep(1.0)
            beat += 1
            elapsed_s = time.monotonic() - self.started_at
            self._check_progress(elapsed_s, processor_share())
            if beat % _PROGRESS_S == 0:
                self._print_progress(elapsed_s)
            if beat % 5 == 0:
                self._sample()
            if beat % 20 == 0:
                found = audit(self.ledger)
                # The last steps may still be under way: their lines come one by one. So a fault
                # of the history counts when the next look finds it too.
                if found.split or found.repeated or seen & set(found.faults):
                    self._fail(f"the ledgers say {found}")
                seen = set(found.faults)

    def _check_progress(self, elapsed_s: float, share: float) -> None:
        """End the process when nothing moves, before the first step too, or it does not end."""
        if self.is_over:
            return
        if elapsed_s > 0:
            self.paused_s += share
        if elapsed_s > self.for_s:
            self.late_s += share
        if self.paused_s > (STALL_S if self.steps else _FIRST_STEP_S):
            where = f"after step {self.steps}" if self.steps else "from the beginning on"
            self._fail(f"no step for {self.paused_s:.1f} s {where}")
        if self.late_s > _END_S:
            self._fail(f"it does not end: {elapsed_s:.1f} s of {self.for_s:.0f}")

    def _print_progress(self, elapsed_s: float) -> None:
        print(
            f"{max(0.0, elapsed_s):8.1f} s  step {self.steps}, {self.n_chips} chips, "
            f"{self.n_faults} faults, longest pause {self.longest_pause_s:.1f} s",
            flush=True,
        )

    def growth(self) -> list[str]:
        """Return which processes grew, in words."""
        found = []
        for pid, samples in self.worker_samples.items():
            # How many chips live changes all the time: what grows has a higher crest at the end.
            warm = [sample for sample in samples if sample[0] > samples[0][0] + _WARM_S]
            third = len(warm) // 3
            if third < 4:
                continue
            fds, last_fds = (
                max(each[1] for each in part) for part in (warm[:third], warm[-third:])
            )
            mb, last_mb = (max(each[2] for each in part) for part in (warm[:third], warm[-third:]))
            if last_fds > fds + _MOST_NEW_FDS:
                found.append(f"{self.names[pid]}: {fds} descriptors became {last_fds}")
            if last_mb > mb + _MOST_NEW_MB:
                found.append(f"{self.names[pid]}: {mb:.0f} MB became {last_mb:.0f}")
        return found

    def left_over(self) -> list[int]:
        """Return the processes that were seen and are still there."""
        return [pid for pid in self.worker_samples if Path(f"/proc/{pid}").exists()]

    def _sample(self) -> None:
        for pid in _children(os.getpid()):
            try:
                n_fds = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            except (OSError, IndexError):
                continue
            self.worker_samples[pid].append((time.monotonic(), n_fds, pages * _PAGE_MB))
            n_threads = sum(1 for _ in Path(f"/proc/{pid}/task").iterdir())
            self.names.setdefault(pid, f"process {pid} of {n_threads} threads")

    def _fail(self, why: str) -> None:
        print(f"soak: FAILED: {why}; the run is in {self.folder}", file=sys.stderr, flush=True)
        os._exit(1)  # the kernel ends the workers


def processor_share() -> float:
    """Return which share of a processor a process gets now, from 0 to 1."""
    began, used = time.monotonic(), time.thread_time()
    while time.thread_time() - used < _SPIN_S:
        pass
    return min(1.0, _SPIN_S / (time.monotonic() - began))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mesh", default="4x4")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument(
        "--shard-optimizer", action="store_true", help="the chips share the optimizer's state"
    )
    parser.add_argument("--tile", default="", help="of a replica, such as 2x2: trains a GPT")
    parser.add_argument(
        "--check-shares",
        type=int,
        default=0,
        metavar="K",
        help="compute all twice in one of K steps, and let chips compute wrong numbers",
    )
    parser.add_argument(
        "--testbed", metavar="BANDWIDTH", default="200Mbit", help="of each link (200Mbit)"
    )
    parser.add_argument(
        "--no-testbed",
        dest="testbed",
        action="store_const",
        const=None,
        help="train over loopback, where no link can drop packets one way",
    )
    options = parser.parse_args()
    link_bandwidth = _granted_bandwidth(options.testbed)
    compute_in_one_thread()
    compile_once(lambda: print("soak: compiling for the first use on this machine ...", flush=True))
    mesh = parse_mesh(options.mesh)
    for_s = options.minutes * 60
    faults = random_faults(mesh, board_shape(len(mesh.shape)), for_s=for_s, seed=options.seed)
    folder = Path(tempfile.mkdtemp(prefix="meshmend-soak-")) / "run"
    print(f"soak: {len(faults)} faults in {for_s:.0f} s on {mesh}, seed {options.seed}; {folder}")
    return _soak(options, mesh, faults=faults, folder=folder, link_bandwidth=link_bandwidth)


def wrong_numbers(mesh: Mesh, for_s: float, seed: int) -> Iterator[Fault]:
    """Yield flips of gradients on a quarter of the chips, in steps all over the run."""
    chance = random.Random(f"wrong numbers {seed}")
    chips = chance.sample(mesh.live, max(1, mesh.n_live // 4))
    for step in range(20, 20 + round(for_s * _MOST_STEPS_PER_S), _FLIP_EVERY):
        chip = ",".join(map(str, chance.choice(chips)))
        yield parse_fault(f"flip gradient {chip} at {step + chance.randrange(_FLIP_EVERY)}", mesh)


def slow_chips(mesh: Mesh, for_s: float, seed: int) -> Iterator[Fault]:
    """Yield chips that compute at a third of their speed for a while, one after the other."""
    chance = random.Random(f"slow chips {seed}")
    step = _FIRST_THROTTLE
    while step < for_s * _MOST_STEPS_PER_S:
        chip = ",".join(map(str, chance.choice(mesh.live)))
        yield parse_fault(f"throttle {chip} from {step} for {_THROTTLE_S:g}s", mesh)
        step += chance.randrange(*_THROTTLE_EVERY)


def _granted_bandwidth(text: str | None) -> float | None:
    """Return the bandwidth of the testbed's links, or None where there is to be no testbed."""
    if text is None:
        print("soak: without links that drop one way: they need a testbed")
        return None
    link_bandwidth = parse_bandwidth(text)
    try:
        Testbed.up(Mesh((1, 2)), link_bandwidth=link_bandwidth).down()
    except TestbedError as error:
        print(f"soak: without links that drop one way: {error}")
        return None
    return link_bandwidth


def _soak(
    options: argparse.Namespace,
    mesh: Mesh,
    *,
    faults: tuple[Fault, ...],
    folder: Path,
    link_bandwidth: float | None,
) -> int:
    for_s, seed = options.minutes * 60, options.seed
    has_parts = options.shard_optimizer or bool(options.tile)
    model = "gpt" if options.tile else "resnet"
    trained_on, watch = workload(model, "tiny", norm="group"), Watch(folder, for_s)
    wrong = wrong_workers(trained_on, mesh, folder.parent / "wrong", for_s=for_s, seed=seed)
    trained_on, faults = wrong.workload, faults + wrong.faults
    if options.check_shares:
        flips = tuple(wrong_numbers(mesh, for_s, seed))
        faults += flips
        watch.flipped = frozenset(chip for fault in flips for chip in fault.chips())
    # A job of tiles hands out its samples by tile: it knows no shares by speed.
    if not options.tile:
        faults += tuple(slow_chips(mesh, for_s, seed))
    watch.disturbances += wrong.disturbances
    if link_bandwidth is not None:
        watch.disturbances += [one_way_drop(mesh, seed), bad_link(mesh, seed)]
    threading.Thread(target=watch.look, daemon=True).start()
    trained = train(
        trained_on,
        JobConfig(
            mesh=mesh_config(mesh),
            job=RunConfig(
                run_dir=str(folder),
                check_every_step=True,
                check_shares=options.check_shares,
                shares="equal" if options.tile else "speed",
            ),
            sums=SumConfig(watch_links=link_bandwidth is not None and not options.tile),
            timing=Timing(holder_timeout_s=_HOLDER_S),
            training=TrainingConfig(steps=10**9, batch=options.batch, tile=options.tile),
            saving=SavingConfig(every=_SAVE_EVERY_SHARED if has_parts else _SAVE_EVERY),
            sharding=ShardingConfig(optimizer=options.shard_optimizer),
            local=LocalConfig(
                inject=tuple(fault.words for fault in faults),
                testbed=options.testbed if link_bandwidth is not None else "",
            ),
        ),
        watch.hear,
        for_s=for_s,
        more_faults=watch.disturb,
    )
    watch.is_over = True
    try:
        return _verdict(
            options, watch, trained.summary, "" if trained.is_finished else trained.failure
        )
    finally:
        unmount(watch.ledger)


def _verdict(
    options: argparse.Namespace, watch: Watch, answer: dict[str, object], failure: str
) -> int:
    found = audit(watch.ledger)
    rows = answer["faults"]
    assert isinstance(rows, tuple)
    by_kind: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row["recovered_s"] is not None:
            by_kind[row["fault"].split()[0]].append(row["recovered_s"])
    print(f"\n{'fault':10} {'count':>6} {'median s':>9} {'worst s':>9}")
    for kind, times in sorted(by_kind.items()):
        print(f"{kind:10} {len(times):6} {statistics.median(times):9.2f} {max(times):9.2f}")
    trouble = [failure] if failure else []
    # What the full disks of this soak left unwritten is not checked, and no trouble.
    trouble += [f"{found}"] if found.is_wrong else []
    trouble += watch.growth()
    trouble += [f"processes are left over: {pids}" for pids in [watch.left_over()] if pids]
    summary = {
        "minutes": options.minutes,
        "seed": options.seed,
        "mesh": options.mesh,
        "tile": options.tile,
        "faults": len(rows),
        "steps": found.steps,
        "samples": {"used": found.used, "lost": found.lost, "repeated": found.repeated},
        "steps_hashed": found.hashed,
        "steps_split": list(found.split),
        "steps_redone": found.redone,
        "restores": [restore._asdict() for restore in found.restores],
        "history_faults": list(found.faults),
        "unchecked": list(found.unchecked),
        "longest_pause_s": round(watch.longest_pause_s, 2),
        "recovered_s": {
            kind: {"count": len(times), "median": statistics.median(times), "worst": max(times)}
            for kind, times in sorted(by_kind.items())
        },
        "trouble": trouble,
    }
    print(json.dumps(summary, indent=2))
    record("soak", summary)
    print("soak: FAILED" if trouble else "soak: passed")
    return 1 if trouble else 0


def _children(parent: int) -> list[int]:
    path = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(pid) for pid in path.read_text().split()]


if __name__ == "__main__":
    raise SystemExit(main())

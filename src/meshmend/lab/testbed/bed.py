"""A testbed: make it, run commands on its chips, fail and repair them, and take it down.

    with Testbed.up(parse_mesh("4x4"), link_bandwidth=parse_bandwidth("50Mbit")) as bed:
        bed.run((0, 0), ["ping", "-c", "1", bed.address((3, 3))])
        bed.fail("2x2@0,2")

All state is in the kernel and in the record; this object only refers to them. So the command line
can change a testbed that another process made.
"""

import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshmend.errors import TestbedError, TopologyError
from meshmend.lab.testbed import kernel, records
from meshmend.lab.testbed.names import address_of, number_of
from meshmend.lab.testbed.records import Record
from meshmend.topology.failures import Chip, Failure, Link, SlowLink, parse_failure
from meshmend.topology.mesh import Mesh
from meshmend.units import format_bandwidth

MAX_CHIPS = 256  # routes grow with the square of the chips
MIN_BANDWIDTH, MAX_BANDWIDTH = 1e4, 1e11  # bytes/s: a packet a second, and far beyond any machine


@dataclass(frozen=True)
class Testbed:
    """A mesh network on this machine: a namespace per chip, a rate-limited link per two neighbours.

    As a context manager it takes the network down at the end. Only the process that opened it does
    so, not its forked children. A testbed that is not `persistent` is also taken down when the
    process that made it ends, however that ends.
    """

    __test__ = False  # its name looks like a test class to pytest

    name: str
    shape: tuple[int, ...]
    link_bandwidth: float
    holder: int
    is_user: bool
    process: int

    @classmethod
    def up(
        cls,
        mesh: Mesh,
        *,
        link_bandwidth: float,
        name: str | None = None,
        persistent: bool = False,
    ) -> "Testbed":
        """Make a testbed of this mesh, with `link_bandwidth` bytes/s per link and direction.

        Chips that have failed get a namespace too, so that they can be repaired.

        Raises:
            TestbedError: the name is taken, or this machine cannot make a testbed.
        """
        _check(mesh, link_bandwidth)
        for tool in ("ip", "tc", "nsenter"):
            kernel.command_path(tool)
        with records.locked():
            records.sweep()
            record = _new_record(mesh, link_bandwidth, name)
            try:
                records.save(record)
                _build(record, mesh)
                if persistent:
                    kernel.disown(record.holder)
                    record = replace(record, owner=None)
                records.save(record.with_mesh(mesh, settled=True))
            except BaseException:
                kernel.stop_holder(record.holder)
                raise
        return cls.of(record)

    @classmethod
    def attach(cls, name: str | None = None) -> "Testbed":
        """Return the testbed of this name; without a name, the only one that is up.

        Raises:
            TestbedError: there is none, or more than one and no name.
        """
        if name is not None:
            return cls.of(records.load(name))
        found = records.live_records()
        if len(found) != 1:
            raise TestbedError(
                "without a name exactly one testbed must be up, but there is "
                f"{records.listed(found)}; "
                + ("name one of them" if found else "make one with: meshmend testbed up")
            )
        return cls.of(found[0])

    @classmethod
    def of(cls, record: Record) -> "Testbed":
        """Return the testbed that a record describes."""
        return cls(
            name=record.name,
            shape=record.current_mesh().shape,
            link_bandwidth=record.link_bytes_per_s,
            holder=record.holder,
            is_user=record.is_user,
            process=os.getpid(),
        )

    def __enter__(self) -> "Testbed":
        return self

    def __exit__(self, *_: object) -> None:
        if os.getpid() == self.process:
            self.down()

    @property
    def record(self) -> Record:
        """The record as it is now.

        Raises:
            TestbedError: the testbed has been taken down.
        """
        record = records.load(self.name)
        if record.holder != self.holder:
            raise TestbedError(f"testbed {self.name!r} was taken down; another has its name now")
        return record

    @property
    def mesh(self) -> Mesh:
        """The mesh as it is now, after all failures and repairs."""
        return self.record.current_mesh()

    def address(self, chip: Chip) -> str:
        """Return the IPv4 address of a chip, alive or not."""
        return address_of(self._number(chip))

    def namespace(self, chip: Chip) -> str:
        """Return a path to the chip's network namespace, valid while the testbed is up."""
        return kernel.namespace_path(self.holder, self._number(chip))

    def enter(self, chip: Chip) -> None:
        """Move the calling process into a chip's network; call it in a child just forked.

        Unprivileged, the child becomes root of the testbed's user namespace, with the caller's
        own rights on files.

        Raises:
            TestbedError: the process has several threads, or the testbed is gone.
        """
        kernel.enter(self.holder, self._number(chip), is_user=self.is_user)

    def command(self, chip: Chip, argv: Sequence[str]) -> list[str]:
        """Return the command line that runs a command on a chip, for `subprocess`."""
        number = self._number(chip)
        return kernel.inside(self.holder, number, is_user=self.is_user, argv=argv)

    def run(
        self, chip: Chip, argv: Sequence[str], **options: Any
    ) -> subprocess.CompletedProcess[Any]:
        """Run a command on a chip as `subprocess.run` does, and return its result."""
        return subprocess.run(self.command(chip, argv), **options)

    def fail(self, *failures: Failure | str) -> Mesh:
        """Take chips, blocks or links out of the live network and return the mesh that is left.

        Links go down and every chip gets the routes around the hole. Processes on failed chips
        live on, cut off.

        Raises:
            TopologyError: a failure outside the mesh, or no chip would be left.
        """
        return self._change(lambda mesh: mesh.without(*failures))

    def repair(self, *failures: Failure | str) -> Mesh:
        """Bring chips, blocks or links back into the live network and return the mesh."""
        return self._change(lambda mesh: mesh.repaired(*failures))

    def slow(self, *links: SlowLink | str) -> Mesh:
        """Give links of the live network other speeds, 1 for the rate of all, and return the mesh.

        No chip is notified; what is on its way stays in the queues.

        Raises:
            TopologyError: a text that cannot be read, a speed that no link has, or no such link.
        """
        from meshmend.lab.testbed import network  # imports Numba, which takes a while

        with records.locked():
            record = self.record
            mesh = record.current_mesh().slowed(*links)
            rates = network.rate_commands(mesh, record.link_bytes_per_s)
            kernel.run_batches(self.holder, "tc", rates, is_user=self.is_user)
            records.save(record.with_mesh(mesh, settled=record.settled))
            return mesh

    def drop(self, source: Chip, goal: Chip) -> None:
        """Drop all packets that a chip sends over its link to a neighbour; the others pass.

        Links and routes stay as they are, so no chip is notified.

        Raises:
            TopologyError: no link joins the two.
        """
        self._lose(source, goal, 1.0)

    def pass_again(self, source: Chip, goal: Chip) -> None:
        """Undo `drop`: let the packets pass again."""
        self._lose(source, goal, 0.0)

    def lose(self, link: Link | str, part: float) -> None:
        """Drop this part of the packets on a link, at random, each way; 0: none.

        No chip is notified: TCP sends them again, and takes it for congestion.

        Raises:
            TopologyError: no such link, or a part that is not from 0 to 1.
        """
        found = parse_failure(link) if isinstance(link, str) else link
        if not isinstance(found, Link) or not 0 <= part <= 1:
            raise TopologyError(
                f"a testbed loses a part from 0 to 1 of the packets of a link such as "
                f"link:0,0-0,1, but got {part} of {found}"
            )
        for source, goal in ((found.first, found.second), (found.second, found.first)):
            self._lose(source, goal, part)

    def down(self) -> None:
        """Take the network down and end whatever runs in it; it may be down already."""
        with records.locked():
            if any(record.holder == self.holder for record in records.live_records()):
                kernel.stop_holder(self.holder)
            records.sweep()

    def _change(self, change: Callable[[Mesh], Mesh]) -> Mesh:
        from meshmend.lab.testbed import network  # imports Numba, which takes a while

        with records.locked():
            record = self.record
            before = record.current_mesh()
            after = change(before)
            if after == before and record.settled:
                return after
            records.save(record.with_mesh(before, settled=False))
            if record.settled:
                batches = network.change_commands(before, after)
                kernel.run_change(self.holder, batches, is_user=self.is_user)
            else:
                batches = network.change_commands(None, after)
                kernel.run_batches(self.holder, "ip", batches, is_user=self.is_user)
            records.save(record.with_mesh(after, settled=True))
            return after

    def _lose(self, source: Chip, goal: Chip, part: float) -> None:
        from meshmend.lab.testbed import network  # imports Numba, which takes a while

        mesh = self.mesh
        if not mesh.has_link(Link.between(source, goal)):
            raise TopologyError(f"testbed {self.name!r} has no link from {source} to {goal}")
        ends = self._number(source), self._number(goal)
        commands = network.loss_commands(mesh, *ends, part)
        with records.locked():
            kernel.run_batches(self.holder, "tc", commands, is_user=self.is_user)
            records.save(self.record.with_loss(source, goal, part))

    def _number(self, chip: Chip) -> int:
        mesh = Mesh(self.shape)
        if chip not in mesh:
            raise TopologyError(f"testbed {self.name!r} is a mesh {mesh}; it has no chip {chip}")
        return number_of(mesh, chip)


def _check(mesh: Mesh, link_bandwidth: float) -> None:
    if mesh.n_chips > MAX_CHIPS:
        raise TestbedError(f"a testbed needs at most {MAX_CHIPS} chips, but got {mesh}")
    if not MIN_BANDWIDTH <= link_bandwidth <= MAX_BANDWIDTH:
        raise TestbedError(
            f"a testbed needs links of {format_bandwidth(MIN_BANDWIDTH)} to "
            f"{format_bandwidth(MAX_BANDWIDTH)}, but got {format_bandwidth(link_bandwidth)}"
        )


def _new_record(mesh: Mesh, link_bandwidth: float, name: str | None) -> Record:
    """Start the holder of a new testbed and return its record; without a name, take a free one."""
    taken = {record.name for record in records.live_records()}
    free = (f"bed{k}" for k in range(1, len(taken) + 2) if f"bed{k}" not in taken)
    chosen = name or next(free)
    path = records.record_path(chosen)
    if chosen in taken:
        raise TestbedError(
            f"a testbed needs a name of its own, but {chosen!r} is up already; choose another, "
            f"or first run: meshmend testbed down {chosen}"
        )
    holder, is_user = kernel.start_holder(mesh.n_chips, path.absolute())
    start = records.start_time(holder)
    return records.record_of(
        mesh,
        name=chosen,
        link_bytes_per_s=link_bandwidth,
        holder=holder,
        holder_start=-1 if start is None else start,
        owner=os.getpid(),
        is_user=is_user,
    )


def _build(record: Record, mesh: Mesh) -> None:
    """Give the empty namespaces of a testbed their links, rates, addresses and routes."""
    from meshmend.lab.testbed import network  # imports Numba, which takes a while

    links = network.link_commands(mesh, lambda chip: kernel.namespace_path(record.holder, chip))
    kernel.run_batches(record.holder, "ip", {0: links}, is_user=record.is_user)
    rates = network.rate_commands(mesh, record.link_bytes_per_s)
    kernel.run_batches(record.holder, "tc", rates, is_user=record.is_user)
    changes = network.change_commands(None, mesh)
    chips = {chip: network.chip_commands(chip) + changes[chip] for chip in range(mesh.n_chips)}
    kernel.run_batches(record.holder, "ip", chips, is_user=record.is_user)

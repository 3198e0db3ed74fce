"""A machine of Wormhole chips: which cable leads where, where a mesh lies on it, and a run.

The host finds the cables as the vendor's software does: each Ethernet core's L1 says which chip and
channel its cable leads to. A mesh is laid on the chips so that all its links are there.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import product
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError, TransportError
from meshmend.planning.plan import Plan
from meshmend.topology.failures import Chip, Link, SlowLink
from meshmend.topology.mesh import Mesh
from meshmend.wormhole.bus import Bus, Clock, Read, Write
from meshmend.wormhole.compiler import Cable, End, Wiring
from meshmend.wormhole.payload import gathered, scattered
from meshmend.wormhole.table import (
    DATA_AT,
    DONE_MARK,
    DONE_MOVES_WORD,
    DONE_WORD,
    DRAM_AT,
    DRAM_PLACES,
    ETHERNET_PLACES,
    FIRST_CLOCK_WORD,
    HEADER_AT,
    KERNEL_AT,
    L1_BYTES,
    LAST_CLOCK_WORD,
    N_CHANNELS,
    SENT_BYTES_WORD,
    Core,
    Program,
)

# What the firmware of an Ethernet core says about its cable, and how it starts a kernel.
_TRAINED_AT: Final = 0x1104
_BOOT_RESULTS_AT: Final = 0x1EC0
_OWN_CHIP: Final = slice(64, 66)
_OTHER_CHIP: Final = slice(72, 74)
_OTHER_CHANNEL: Final = 76
_LAUNCH_NUMBER_AT: Final = 0x200C
_LAUNCH_AT: Final = 0x2010
_LAUNCH_BYTES: Final = 144
_GO_AT: Final = 0x2490
_GO: Final = 0x80000000
_RESET_AT: Final = 0xFFB121B0
_IN_RESET: Final = 0x800

_PATTERN_DRAM_BYTES: Final = 1 << 16
_POLL_CLOCKS: Final = 512
_MOST_TRIES: Final = 50_000  # to lay a mesh on a machine: less than a second
_STALLED_CLOCKS: Final = 200_000  # the longest move takes some ten thousand

Progress = Callable[[str, float | None], None]


@dataclass(frozen=True)
class Machine:
    """The chips behind a bus, by number, and the cables between them.

    `cables[chip, channel]` is the chip and the channel at the other end.
    """

    bus: Bus
    cables: Mapping[tuple[int, int], tuple[int, int]]

    def between(self, one: int, other: int) -> tuple[Cable, ...]:
        """Return the cables from one chip to another, in the same order from both ends."""
        first = min(one, other)
        found = sorted(
            (channel, peer)
            for (chip, channel), (there, peer) in self.cables.items()
            if chip == first and there == max(one, other)
        )
        return tuple(found if one == first else ((there, here) for here, there in found))


def discovered(bus: Bus) -> Machine:
    """Return the machine behind a bus.

    Raises:
        InputError: chips that no cable joins.
    """
    places = list(product(range(bus.n_chips), range(N_CHANNELS)))
    n_bytes = 4 * (_OTHER_CHANNEL + 1)
    read = bus.do(
        [
            request
            for chip, channel in places
            for request in (
                Read(chip, ETHERNET_PLACES[channel], _TRAINED_AT, 4),
                Read(chip, ETHERNET_PLACES[channel], _BOOT_RESULTS_AT, n_bytes),
            )
        ]
    )
    words = [np.frombuffer(data, dtype=np.uint32) for data in read]
    has_cable = [int(status[0]) == 1 for status in words[::2]]
    results = words[1::2]
    chip_of = {
        tuple(result[_OWN_CHIP].tolist()): chip
        for (chip, _), result, has in zip(places, results, has_cable, strict=True)
        if has
    }
    cables = {}
    for place, result, has in zip(places, results, has_cable, strict=True):
        other = chip_of.get(tuple(result[_OTHER_CHIP].tolist()))
        if has and other is not None:
            cables[place] = other, int(result[_OTHER_CHANNEL])
    cables = {here: there for here, there in cables.items() if cables.get(there) == here}
    if not cables:
        raise InputError(
            f"meshmend wormhole needs chips that cables join, but none of {bus.n_chips} has one"
        )
    return Machine(bus, cables)


def laid_out(machine: Machine, mesh: Mesh) -> dict[Chip, int]:
    """Return the number of the machine's chip at each place of a mesh, failed ones included.

    All axes of more than two chips wrap around if the machine has the cables, else those of the
    mesh. Deterministic: chips are tried in the order of their numbers.

    Raises:
        InputError: the machine has no such mesh.
    """
    joined = defaultdict(set)
    for (chip, _), (other, _) in machine.cables.items():
        joined[chip].add(other)
    for wrap in ((True,) * len(mesh.shape), mesh.wrap):
        found = _embedded(Mesh(mesh.shape, wrap), joined)
        if found is not None:
            return found
    raise InputError(
        f"the machine's {machine.bus.n_chips} chips have no mesh {Mesh(mesh.shape, mesh.wrap)} "
        "among their cables; ask for a smaller one"
    )


def _embedded(mesh: Mesh, joined: Mapping[int, Collection[int]]) -> dict[Chip, int] | None:
    """Return a chip for each place such that neighbours are joined, or None.

    It gives up after many tries: a grid is found, or excluded, in far fewer. A long line in a large
    machine may be missed.
    """
    if mesh.n_chips > len(joined):
        return None
    places = mesh.live
    before = [
        [each for each in mesh.neighbors(place) if mesh.rank_of[each] < rank]
        for rank, place in enumerate(places)
    ]
    laid: dict[Chip, int] = {}
    n_tries = 0

    def extend(rank: int) -> bool:
        nonlocal n_tries
        n_tries += 1
        if rank == len(places):
            return True
        if n_tries > _MOST_TRIES:
            return False
        near = before[rank]
        candidates = joined if not near else set(joined[laid[near[0]]])
        for chip in sorted(set(candidates) - set(laid.values())):
            if all(chip in joined[laid[each]] for each in near):
                laid[places[rank]] = chip
                if extend(rank + 1):
                    return True
                del laid[places[rank]]
        return False

    return laid if extend(0) else None


@dataclass(frozen=True)
class LostCable:
    """One cable of a link that is dead: its number among the link's cables."""

    link: Link
    number: int


def with_lost_cables(
    mesh: Mesh, machine: Machine, chips: Mapping[Chip, int], lost: Sequence[LostCable]
) -> Mesh:
    """Return a mesh whose links are as slow as the cables that they lost; without any, they failed.

    Raises:
        InputError: a lost cable that the machine does not have.
    """
    gone: dict[Link, set[int]] = defaultdict(set)
    for each in lost:
        ends = [chips.get(end) for end in (each.link.first, each.link.second)]
        n_cables = 0 if None in ends else len(machine.between(*ends))  # type: ignore[arg-type]
        if not 0 <= each.number < n_cables:
            raise InputError(
                f"{each.link} has {n_cables} cables on this machine, but got cable {each.number}"
            )
        gone[each.link].add(each.number)
    for link, numbers in sorted(gone.items()):
        n_cables = len(machine.between(chips[link.first], chips[link.second]))
        left = n_cables - len(numbers)
        mesh = mesh.slowed(SlowLink(link, left / n_cables)) if left else mesh.without(link)
    return mesh


def wiring_of(
    machine: Machine, plan: Plan, chips: Mapping[Chip, int], lost: Sequence[LostCable] = ()
) -> Wiring:
    """Return the live cables of each link end of a plan's mesh."""
    mesh = plan.placement.mesh
    gone = {(each.link, each.number) for each in lost}
    cables: dict[End, tuple[Cable, ...]] = {}
    for rank, port in zip(*np.nonzero(mesh.neighbor_ranks >= 0), strict=True):
        here, there = mesh.live[rank], mesh.live[mesh.neighbor_ranks[rank, port]]
        link = Link.between(here, there)
        found = machine.between(chips[here], chips[there])
        cables[int(rank), int(port)] = tuple(
            cable for number, cable in enumerate(found) if (link, number) not in gone
        )
    return Wiring(cables)


@dataclass(frozen=True, eq=False)
class Outcome:
    """What came of a run.

    `sent_bytes` is what each core sent over its cable. `n_untouched` cores had no part in the run:
    they were held in reset, and their memory, with that of dead chips, is as it was.
    """

    arrays: list[NDArray[Any]]
    clocks: int
    sent_bytes: dict[Core, int]
    n_untouched: int
    wall_s: float


@cache
def kernel_code() -> bytes:
    """Return the kernel as it is loaded."""
    return (files("meshmend.wormhole") / "kernel" / "kernel.bin").read_bytes()


def run(
    machine: Machine,
    program: Program,
    chips: Sequence[int],
    arrays: Sequence[NDArray[Any]],
    *,
    dead: Collection[int] = (),
    progress: Progress = lambda _step, _part: None,
) -> Outcome:
    """Run a program on a machine; `chips[rank]` is the chip of a rank.

    Every Ethernet core without a table is held in reset, and its whole L1 holds a pattern; so does
    a part of each DRAM of `dead` chips.

    Raises:
        TransportError: a core stopped, or memory that nobody may touch was changed.
    """
    bus, started = machine.bus, time.perf_counter()
    idle = _idle_cores(machine, program, chips)
    progress("loading", None)
    for start in range(0, len(idle), 16):  # some MB at a time
        requests: list[Read | Write] = []
        for chip, channel in idle[start : start + 16]:
            place = ETHERNET_PLACES[channel]
            requests.append(Write(chip, place, _RESET_AT, _words(_IN_RESET)))
            requests.append(Write(chip, place, 0, _pattern(chip, channel, L1_BYTES)))
        bus.do(requests)
    bus.do(
        [
            Write(chip, place, DRAM_AT, _pattern(chip, place, _PATTERN_DRAM_BYTES))
            for chip in dead
            for place in DRAM_PLACES
        ]
    )
    for region, data in scattered(program, arrays):
        bus.do([Write(chips[region.rank], region.place, region.address, data.tobytes())])
    for core in program.moves:
        bus.do(_loading(program, core, chips[core.rank]))
    bus.do(
        [
            Write(chips[core.rank], ETHERNET_PLACES[core.channel], _GO_AT, _words(_GO))
            for core in program.moves
        ]
    )
    _wait(bus, program, chips, progress)
    progress("reading", None)
    headers = _headers(bus, program.moves, chips)
    _check_untouched(bus, idle, dead)
    read = []
    for region in program.regions:
        n_bytes = region.stride * program.n_slices
        (found,) = bus.do([Read(chips[region.rank], region.place, region.address, n_bytes)])
        read.append((region, np.frombuffer(found, dtype=np.uint8)))
    first = min(int(header[FIRST_CLOCK_WORD]) for header in headers.values())
    last = max(int(header[LAST_CLOCK_WORD]) for header in headers.values())
    return Outcome(
        arrays=gathered(program, read, arrays[0].dtype),
        clocks=last - first,
        sent_bytes={core: int(header[SENT_BYTES_WORD]) for core, header in headers.items()},
        n_untouched=len(idle),
        wall_s=time.perf_counter() - started,
    )


def _words(*values: int) -> bytes:
    return np.array(values, dtype=np.uint32).tobytes()


def _pattern(chip: int, place: int, n_bytes: int) -> bytes:
    """Return bytes that differ from place to place and from one word to the next."""
    first = np.uint32((chip * 4099 + place + 1) * 2654435761 & 0xFFFFFFFF)
    return (np.arange(n_bytes // 4, dtype=np.uint32) * np.uint32(2246822519) ^ first).tobytes()


def _idle_cores(machine: Machine, program: Program, chips: Sequence[int]) -> list[tuple[int, int]]:
    busy = {(chips[core.rank], core.channel) for core in program.moves}
    places = product(range(machine.bus.n_chips), range(N_CHANNELS))
    return [place for place in places if place not in busy]


def _loading(program: Program, core: Core, chip: int) -> list[Read | Write]:
    """Return what brings kernel, header, table and launch message into a core's L1."""
    place = ETHERNET_PLACES[core.channel]
    table_at = program.table_at[core]
    launch = np.zeros(_LAUNCH_BYTES // 4, dtype=np.uint32)
    launch[52 // 4], launch[120 // 4] = KERNEL_AT, 1  # where its code is, and that it runs
    return [
        Write(chip, place, KERNEL_AT, kernel_code()),
        Write(chip, place, HEADER_AT, program.header(core).tobytes()),
        Write(chip, place, DATA_AT, bytes(table_at - DATA_AT)),
        Write(chip, place, table_at, program.moves[core].tobytes()),
        Write(chip, place, _LAUNCH_NUMBER_AT, _words(0)),
        Write(chip, place, _LAUNCH_AT, launch.tobytes()),
    ]


def _wait(bus: Bus, program: Program, chips: Sequence[int], progress: Progress) -> None:
    """Let time pass until every core has done its table."""
    pending = list(program.moves)
    total = program.n_moves * program.n_slices
    seen, idle_clocks = -1, 0
    while pending:
        progress("running", max(0.0, seen / total))
        bus.do([Clock(_POLL_CLOCKS)])
        headers = _headers(bus, pending, chips)
        left = sum(
            len(program.moves[core]) * program.n_slices - int(header[DONE_MOVES_WORD])
            for core, header in headers.items()
        )
        idle_clocks = 0 if total - left != seen else idle_clocks + _POLL_CLOCKS
        seen = total - left
        pending = [core for core, header in headers.items() if header[DONE_WORD] != DONE_MARK]
        if idle_clocks > _STALLED_CLOCKS:
            raise TransportError(
                f"{len(pending)} cores did nothing for {_STALLED_CLOCKS:,} clocks, {pending[0]} "
                "among them"
            )


def _headers(
    bus: Bus, cores: Collection[Core], chips: Sequence[int]
) -> dict[Core, NDArray[np.uint32]]:
    asked = [
        Read(chips[core.rank], ETHERNET_PLACES[core.channel], HEADER_AT, 4 * (DONE_WORD + 1))
        for core in cores
    ]
    read = [np.frombuffer(data, dtype=np.uint32) for data in bus.do(asked)]
    return dict(zip(cores, read, strict=True))


def _check_untouched(bus: Bus, idle: Sequence[tuple[int, int]], dead: Collection[int]) -> None:
    for chip, channel in idle:
        (data,) = bus.do([Read(chip, ETHERNET_PLACES[channel], 0, L1_BYTES)])
        if data != _pattern(chip, channel, L1_BYTES):
            raise TransportError(
                f"the memory of channel {channel} of chip {chip} changed, but it has no part in "
                "the plan"
            )
    for chip, place in product(dead, DRAM_PLACES):
        (data,) = bus.do([Read(chip, place, DRAM_AT, _PATTERN_DRAM_BYTES)])
        if data != _pattern(chip, place, _PATTERN_DRAM_BYTES):
            raise TransportError(f"the DRAM of the dead chip {chip} changed")

"""Runs a collective on Wormhole chips, and compares every bit with what it must be.

Plan, tables, run, comparison, and the figures of it: what `meshmend wormhole run` does.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.planning.plan import Plan, load_plan, plan, planned
from meshmend.planning.target import Target
from meshmend.schedule.spanning import broadcast
from meshmend.schedule.table import Collective
from meshmend.topology.fabric import Fabric
from meshmend.topology.failures import parse_link
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh
from meshmend.wormhole.bus import RemoteBus
from meshmend.wormhole.compiler import ADD_WORD_CLOCKS, compiled
from meshmend.wormhole.machine import (
    LostCable,
    Outcome,
    discovered,
    laid_out,
    run,
    wiring_of,
    with_lost_cables,
)
from meshmend.wormhole.payload import expected
from meshmend.wormhole.table import ITEM_BYTES, Program

BROADCAST: Final = "broadcast"
COLLECTIVES: Final = (
    Collective.ALLREDUCE.value,
    Collective.REDUCE_SCATTER.value,
    Collective.ALL_GATHER.value,
    BROADCAST,
)

_N_CORES: Final = 16
LARGEST_PAYLOAD: Final = 1 << 26


def fabric_of(type_name: str) -> Fabric:
    """Return the figures that a plan for Wormhole is chosen by: adding takes most of the time."""
    return Fabric(
        name=f"wormhole-{type_name}",
        link_bandwidth_bytes_per_s=50e9,
        hop_latency_s=0.3e-6,
        message_overhead_s=2e-6,
        chip_bandwidth_bytes_per_s=_N_CORES * 4e9 / ADD_WORD_CLOCKS[type_name],
        source="Four cables of 100 Gbit/s a link, from public descriptions. The rest is what our "
        "kernel takes under ttsim, at an assumed clock of 1 GHz.",
        usual_mesh="8x4 torus",
    )


@dataclass(frozen=True)
class Question:
    """What is to be run: a collective, or the plan of a file, which is one for the mesh."""

    mesh: Mesh
    payload_bytes: int
    type_name: str = "int32"
    collective: str = Collective.ALLREDUCE.value
    algorithm: str = "auto"
    slices: int | None = None
    lost_cables: tuple[LostCable, ...] = ()
    seed: int = 0
    plan_file: Path | None = None

    def __post_init__(self) -> None:
        if self.type_name not in ITEM_BYTES:
            raise InputError(
                f"Wormhole's kernel adds {', '.join(ITEM_BYTES)}, but got {self.type_name!r}"
            )
        if self.collective not in COLLECTIVES:
            raise InputError(
                f"a run on Wormhole needs one of {', '.join(COLLECTIVES)}, but got "
                f"{self.collective!r}"
            )
        if self.n_elements < 1:
            raise InputError(
                f"a run on Wormhole needs a payload of one {self.type_name} or more, but got "
                f"{self.payload_bytes} bytes"
            )
        if self.payload_bytes > LARGEST_PAYLOAD:
            raise InputError(
                f"a run on Wormhole needs a payload of at most {LARGEST_PAYLOAD:,} bytes, but got "
                f"{self.payload_bytes:,}; the simulator would take days"
            )

    @property
    def n_elements(self) -> int:
        return self.payload_bytes // ITEM_BYTES[self.type_name]


@dataclass(frozen=True, eq=False)
class Result:
    """A run and the comparison with what it must give.

    `n_wrong` counts elements of live chips that differ in some bit. `largest_error` is the largest
    distance from the sum in float64, in relation to the sum of all magnitudes.
    """

    question: Question
    plan: Plan
    program: Program
    chips: dict[tuple[int, ...], int]
    outcome: Outcome
    n_wrong: int
    largest_error: float

    @property
    def bytes_per_cable(self) -> dict[str, int]:
        """What went over each cable, both directions together, by its name."""
        live = self.plan.placement.mesh.live
        totals: dict[str, int] = {}
        for core, n_bytes in self.outcome.sent_bytes.items():
            peer = self.program.peer[core]
            ends = sorted((self.chips[live[each.rank]], each.channel) for each in (core, peer))
            name = "-".join(f"{chip}:{channel}" for chip, channel in ends)
            totals[name] = totals.get(name, 0) + n_bytes
        return totals

    @property
    def _collective(self) -> str:
        is_broadcast = self.question.collective == BROADCAST and self.question.plan_file is None
        return BROADCAST if is_broadcast else self.plan.schedule.collective.value

    def summary(self) -> dict[str, Any]:
        """Return the figures as a JSON value; the busiest cable is by one direction."""
        outcome, program = self.outcome, self.program
        busiest = max(outcome.sent_bytes, key=lambda core: (outcome.sent_bytes[core], core))
        per_cable = self.bytes_per_cable
        return {
            "mesh": str(self.question.mesh),
            "collective": self._collective,
            "algorithm": self.plan.schedule.algorithm,
            "type": self.question.type_name,
            "payload_bytes": self.question.payload_bytes,
            "ranks": program.n_ranks,
            "lanes": program.n_lanes,
            "slices": program.n_slices,
            "cores": len(program.moves),
            "moves": program.n_moves * program.n_slices,
            "right": self.n_wrong == 0,
            "wrong_elements": self.n_wrong,
            "largest_error": self.largest_error,
            "clocks": outcome.clocks,
            "cables": len(per_cable),
            "bytes_on_cables": sum(per_cable.values()),
            "busiest_cable": {
                "chip": list(self.plan.placement.mesh.live[busiest.rank]),
                "channel": busiest.channel,
                "bytes": outcome.sent_bytes[busiest],
            },
            "bytes_per_cable": per_cable,
            "untouched_cores": outcome.n_untouched,
            "wall_s": outcome.wall_s,
        }


def parse_lost_cable(text: str) -> LostCable:
    """Return the cable that a text such as `0,1-0,2:3` names.

    Raises:
        InputError: it names none.
    """
    link, colon, number = text.rpartition(":")
    if not colon or not number.isascii() or not number.isdecimal() or len(number) > 2:
        raise InputError(
            f"a lost cable is written 0,1-0,2:3 (the link's cable 3, from 0), but got {text!r}"
        )
    return LostCable(parse_link(f"link:{link.removeprefix('link:')}"), int(number))


def arrays_for(question: Question, n_ranks: int) -> list[NDArray[Any]]:
    """Return one array of random numbers for each rank; a float's magnitudes differ widely."""
    rng = np.random.default_rng(question.seed)
    n = question.n_elements
    if question.type_name == "int32":
        return [
            rng.integers(-(2**31), 2**31, n, dtype=np.int64).astype(np.int32)
            for _ in range(n_ranks)
        ]
    dtype = dtype_of(question.type_name)
    return [
        (rng.standard_normal(n) * 2.0 ** rng.integers(-8, 9, n)).astype(np.float32).astype(dtype)
        for _ in range(n_ranks)
    ]


def dtype_of(type_name: str) -> "np.dtype[Any]":
    """Return NumPy's type of this name.

    Raises:
        InputError: it needs a package that is not there.
    """
    if type_name != "bfloat16":
        return np.dtype(type_name)
    try:
        import ml_dtypes
    except ImportError:
        raise InputError(
            "bfloat16 needs the package ml_dtypes; install it, or use float32"
        ) from None
    found: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return found


def plan_for(question: Question, mesh: Mesh | None = None) -> Plan:
    """Return the plan of a question, proved; for its mesh as it is, if that is given."""
    mesh = question.mesh if mesh is None else mesh
    target = Target(float(question.payload_bytes), fabric_of(question.type_name))
    if question.plan_file is not None:
        return load_plan(question.plan_file, mesh=mesh)
    if question.collective == BROADCAST:
        if question.algorithm != "auto":
            raise InputError(
                f"a broadcast has no algorithms, but got {question.algorithm!r}; leave it out"
            )
        return planned(mesh, broadcast(largest_part(mesh), 0), target)
    return plan(
        mesh,
        question.algorithm,
        collective=question.collective,
        payload=target.payload_bytes,
        fabric=target.fabric,
    )


def run_experiment(
    question: Question,
    library: Path,
    progress: Callable[[str, float | None], None] = lambda _step, _part: None,
) -> Result:
    """Plan, load, run and compare.

    Raises:
        InputError: what is asked cannot be run on these chips.
        TransportError: the simulator ended, or memory that nobody may touch was changed.
    """
    dtype = dtype_of(question.type_name)
    with RemoteBus(library) as bus:
        machine = discovered(bus)
        chips = laid_out(machine, question.mesh)
        progress("planning", None)
        made = plan_for(
            question, with_lost_cables(question.mesh, machine, chips, question.lost_cables)
        )
        program = compiled(
            made,
            wiring_of(machine, made, chips, question.lost_cables),
            n_elements=question.n_elements,
            type_name=question.type_name,
            slices=question.slices,
        )
        arrays = arrays_for(question, program.n_ranks)
        live = made.placement.mesh.live
        outcome = run(
            machine,
            program,
            [chips[chip] for chip in live],
            arrays,
            dead=[number for chip, number in chips.items() if chip not in live],
            progress=progress,
        )
    n_wrong, largest = compared(made, program, arrays, outcome.arrays)
    assert arrays[0].dtype == dtype
    return Result(question, made, program, chips, outcome, n_wrong, largest)


def compared(
    made: Plan, program: Program, arrays: Sequence[NDArray[Any]], got: Sequence[NDArray[Any]]
) -> tuple[int, float]:
    """Return how many elements differ in some bit, and the largest error against NumPy's sum."""
    wanted, defined = expected(program, made.schedule, arrays)
    bits = np.dtype(f"u{arrays[0].dtype.itemsize}")
    n_wrong = sum(
        int(np.count_nonzero(one.view(bits)[where] != other.view(bits)[where]))
        for one, other, where in zip(got, wanted, defined, strict=True)
    )
    if made.schedule.collective is Collective.ALL_GATHER:
        return n_wrong, 0.0
    if arrays[0].dtype == np.int32:  # NumPy's own sum wraps around in the same way
        whole = np.add.reduce(np.stack(arrays), dtype=np.int32)
        off = sum(
            int(np.count_nonzero((one != whole) & where))
            for one, where in zip(got, defined, strict=True)
        )
        return max(n_wrong, off), 0.0
    wide = [array.astype(np.float64) for array in arrays]
    total, magnitude = np.sum(wide, axis=0), np.sum(np.abs(wide), axis=0)
    errors = [
        float(np.max(np.abs(one.astype(np.float64) - total)[where] / magnitude[where], initial=0))
        for one, where in zip(got, defined, strict=True)
    ]
    return n_wrong, max(errors)

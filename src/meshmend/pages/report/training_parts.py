"""The parts of a training run: its steps, its generations and its faults."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshmend.membership.faults.fault import FaultKind
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Steps:
    """The steps that count, in order; of a step that was done twice, only the last time counts."""

    step: Ints
    at_s: Floats
    loss: Floats
    samples: Ints
    chips: Ints

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True)
class RunGeneration:
    """The chips that train together from `step` on, and those alive but waiting.

    All other chips of `mesh` are failed.
    """

    number: int
    at_s: float
    step: int
    mesh: Mesh
    chips: frozenset[Chip]
    waiting: frozenset[Chip]
    why: str


@dataclass(frozen=True)
class RunFault:
    """One fault or repair of a run, when it was detected, and when the run had recovered.

    `kind` is None for a worker that died without an injected fault. `detected_s` and `recovered_s`
    are seconds since the fault, NaN if the run did not detect it or did not recover.
    """

    fault: str
    at_s: float
    at_step: int | None
    kind: FaultKind | None = None
    chips: tuple[Chip, ...] = ()
    detected_s: float = math.nan
    recovered_s: float = math.nan

    @property
    def kind_words(self) -> str:
        """The kind of the fault without its place: `kill`, `kill coordinator`, `not injected`."""
        if self.kind is None:
            return "not injected"
        return f"{self.kind.value} coordinator" if self.is_of_coordinator else self.kind.value

    @property
    def is_repair(self) -> bool:
        """Whether this is a repair, not a fault."""
        return self.kind is FaultKind.REPAIR

    @property
    def is_recovered(self) -> bool:
        """Whether the run recovered from this fault."""
        return math.isfinite(self.recovered_s)

    @property
    def is_of_coordinator(self) -> bool:
        """Whether this killed or froze the coordinator; training goes on without it."""
        return self.kind in (FaultKind.KILL, FaultKind.FREEZE) and not self.chips

"""What a training run is made of: its steps, generations, faults, and the ledger of samples."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

_INJECTED = frozenset({"kill", "hang", "slow", "cut", "repair"})


@dataclass(frozen=True, eq=False)
class Steps:
    """The steps that count, in order: each finished last at `at_s`, with this loss."""

    step: Ints
    at_s: Floats
    loss: Floats
    samples: Ints
    chips: Ints

    def __len__(self) -> int:
        return len(self.step)


@dataclass(frozen=True)
class RunGeneration:
    """A set of live chips that works together from `step` on; `mesh` has the rest as failed."""

    number: int
    at_s: float
    step: int
    mesh: Mesh
    chips: frozenset[Chip]
    waiting: frozenset[Chip]
    why: str


@dataclass(frozen=True)
class RunFault:
    """One fault or repair, and how long after it was noticed and made good (NaN: never)."""

    fault: str
    at_s: float
    at_step: int | None
    detected_s: float = math.nan
    recovered_s: float = math.nan

    @property
    def kind(self) -> str:
        """What happened, without where: `kill`, `hang`, `cut`, `kill coordinator`, `repair`."""
        first, _, rest = self.fault.partition(" ")
        if rest == "coordinator":
            return self.fault
        return first if first in _INJECTED else "not injected"

    @property
    def is_repair(self) -> bool:
        """Whether this gave something back instead of taking it away."""
        return self.kind == "repair"

    @property
    def is_recovered(self) -> bool:
        """Whether the run got over it."""
        return math.isfinite(self.recovered_s)

    @property
    def is_harmless(self) -> bool:
        """Whether training goes on without noticing: no chip works for the coordinator."""
        return self.kind == "kill coordinator"


@dataclass(frozen=True)
class SampleCounts:
    """How many samples counted, and how many of them too few or too often; `None`: not told."""

    used: int
    lost: int | None
    repeated: int | None

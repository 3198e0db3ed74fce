"""The machine of a scenario as arrays: its domains, what each takes down, and its units.

Domains of the mesh come first, kind by kind, then those of spare units. A **slot** is the place of
a unit in the mesh; where spares are used, an empty slot is a hole.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.forecast.records import Ints
from meshmend.forecast.scenario import (
    DAY_S,
    KINDS,
    SLOW_KINDS,
    SLOW_LINK,
    WRONG,
    YEAR_S,
    Scenario,
)
from meshmend.topology.failures import Block, Chip, Failure, Link, blocks_over

Life = tuple[float, float, int, int]

NS = 1e9  # in a second

_WARM_UP_REPAIRS = 20.0  # mean repair times; three times as many where repairs queue
_WARM_UP_SILENCES = 5.0  # mean times until a wrong chip is found, or something is slow no more
_LEAST_WARM_UP_S, _MOST_WARM_UP_S = 2 * DAY_S, 100 * YEAR_S  # 64 bits hold 292 years in ns
_MOST_FAILURES = 2_000_000  # of one year: half a gigabyte, and seconds for each answer


@dataclass(frozen=True)
class Domain:
    """What fails together: a block of chips or a link, and its kind."""

    kind: str
    failure: Failure


@dataclass(frozen=True, eq=False)
class Machine:
    """The domains, units and chips of a scenario; `kind_of` goes by domain number.

    `holes` are the domains of the mesh and then its slots.
    """

    scenario: Scenario
    domains: tuple[Domain, ...]
    slots: tuple[Block, ...]
    kind_of: NDArray[np.int32]
    lives: tuple[Life, ...]
    unit_first: Ints
    domain_units: Ints

    @property
    def n_slots(self) -> int:
        return len(self.slots)

    @property
    def n_units(self) -> int:
        return len(self.slots) + self.scenario.spares.n_units

    @property
    def holes(self) -> tuple[Failure, ...]:
        return (*(domain.failure for domain in self.domains), *self.slots)

    def number_of(self, kind: str) -> int:
        """Return which of the kinds in `kind_of` this is; -1 if it never fails."""
        failing = _failing(self.scenario)
        return failing.index(kind) if kind in failing else -1

    @property
    def failures_per_s(self) -> float:
        """How often anything of the mesh fails, while all of it is up; what is slow has not."""
        failures = self.scenario.failures
        kinds = [domain.kind for domain in self.domains if domain.kind not in SLOW_KINDS]
        return math.fsum(1.0 / failures.mean_up_s(k) / (1.0 - failures.burst) for k in kinds)

    def n_failures(self, time_s: float, *, with_spares: bool) -> float:
        """Return about how many failures to expect in a time; what is down does not fail."""
        repair_s, rates = self.scenario.repair.mean_s, self.scenario.failures.per_1000_days
        ends_s = dict.fromkeys(KINDS, repair_s)
        ends_s |= dict.fromkeys(SLOW_KINDS, self.scenario.slow.lasts_s)
        kinds = self.kind_of if with_spares else self.kind_of[: len(self.domains)]
        counts = zip(_failing(self.scenario), np.bincount(kinds), strict=False)
        return math.fsum(
            n * time_s / (1000 * DAY_S / rates[kind] + ends_s[kind]) for kind, n in counts
        )


def warm_up_s(scenario: Scenario) -> float:
    """Return for how long a machine runs before a year begins, so that it is as one of old."""
    repair, failures = scenario.repair, scenario.failures.per_1000_days
    repairs_s = _WARM_UP_REPAIRS * repair.mean_s * (3.0 if repair.crews else 1.0)
    silent_s = _WARM_UP_SILENCES * scenario.wrong.found_s if failures.get(WRONG) else 0.0
    slow_s = _WARM_UP_SILENCES * scenario.slow.lasts_s if scenario.has_slow_parts else 0.0
    return min(max(_LEAST_WARM_UP_S, repairs_s, silent_s, slow_s), _MOST_WARM_UP_S)


def check_failures(machine: Machine, *, year_s: float = YEAR_S) -> None:
    """Raise InputError if a year and its warm-up have more failures than can be simulated."""
    time_s = year_s + warm_up_s(machine.scenario)
    expected = machine.n_failures(time_s, with_spares=True)
    if expected > _MOST_FAILURES:
        raise InputError(
            f"forecast simulates at most {_MOST_FAILURES} failures a year, but these rates give "
            f"about {expected:.2g} with the warm-up; give lower rates or a smaller mesh"
        )


def machine_of(scenario: Scenario) -> Machine:
    """Return the machine of a scenario; kinds of domains that never fail are left out."""
    failing = _failing(scenario)
    by_kind = {kind: list(_domains(scenario, kind)) for kind in failing}
    domains = [domain for kind in failing for domain in by_kind[kind]]
    slots = tuple(blocks_over(scenario.mesh.shape, scenario.spares.unit))
    units = [_units_of(scenario, domain.failure) for domain in domains]
    in_first = [domain for domain, of in zip(domains, units, strict=True) if 0 in of]
    spare_kinds = [domain.kind for domain in in_first if domain.kind != "rack"]
    names = [domain.kind for domain in domains]
    for spare in range(scenario.spares.n_units):
        names += spare_kinds
        units += [[len(slots) + spare]] * len(spare_kinds)
    first = np.cumsum([0, *map(len, units)], dtype=np.int64)
    return Machine(
        scenario,
        tuple(domains),
        slots,
        np.array([failing.index(name) for name in names], dtype=np.int32),
        tuple(_lives(scenario, by_kind)),
        first,
        np.array([unit for of in units for unit in of], dtype=np.int64),
    )


def _failing(scenario: Scenario) -> list[str]:
    return [kind for kind in KINDS if scenario.failures.per_1000_days.get(kind, 0.0) > 0]


def _lives(scenario: Scenario, by_kind: Mapping[str, Sequence[Domain]]) -> Iterator[Life]:
    """Yield what `outages` wants of each kind: scale, shape, first domain, one past the last."""
    failures, first = scenario.failures, 0
    for kind, domains in by_kind.items():
        scale_ns = failures.mean_up_s(kind) * NS / math.gamma(1.0 + 1.0 / failures.shape)
        yield scale_ns, failures.shape, first, first + len(domains)
        first += len(domains)


def _domains(scenario: Scenario, kind: str) -> Iterator[Domain]:
    if kind in ("link", SLOW_LINK):
        yield from (Domain(kind, link) for link in _links(scenario))
    else:
        blocks = blocks_over(scenario.mesh.shape, scenario.shape_of(kind))
        yield from (Domain(kind, block) for block in blocks)


def _links(scenario: Scenario) -> Iterator[Link]:
    """Yield every link of the mesh, by its first chip and axis."""
    mesh = scenario.mesh
    for chip in itertools.product(*map(range, mesh.shape)):
        for axis, size in enumerate(mesh.shape):
            if chip[axis] + 1 < size:
                yield Link.between(chip, _moved(chip, axis, chip[axis] + 1))
            elif mesh.rings[axis]:
                yield Link.between(chip, _moved(chip, axis, 0))


def _moved(chip: Chip, axis: int, to: int) -> Chip:
    return (*chip[:axis], to, *chip[axis + 1 :])


def _units_of(scenario: Scenario, failure: Failure) -> list[int]:
    """Return the units that a failure takes down; a link counts for that of its first chip."""
    extents, unit = scenario.mesh.shape, scenario.spares.unit
    block = Block((1,) * len(extents), failure.first) if isinstance(failure, Link) else failure
    ranges = [
        range(at // part, (at + size - 1) // part + 1)
        for at, size, part in zip(block.origin, block.shape, unit, strict=True)
    ]
    counts = [size // part for size, part in zip(extents, unit, strict=True)]
    return [int(np.ravel_multi_index(at, counts)) for at in itertools.product(*ranges)]

"""What a forecast is asked: a machine, how it fails and is repaired, a job, and spares.

All of it are values; if one was constructed, it is valid. Times are in seconds, rates in failures
per 1000 days of one domain, because that is how they are published.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from meshmend.errors import InputError
from meshmend.topology.fabric import Fabric, fabric
from meshmend.topology.failures import board_shape, format_shape
from meshmend.topology.mesh import Mesh

DAY_S = 86400.0
YEAR_S = 365.25 * DAY_S
WRONG = "wrong"  # a chip that computes wrong numbers, which nobody sees until it is found
SLOW_CHIP, SLOW_LINK = SLOW_KINDS = ("slow-chip", "slow-link")  # they slow a job down for a while
KINDS = ("chip", "link", "board", "host", "rack", WRONG, *SLOW_KINDS)
SPREADS = ("fixed", "exponential", "lognormal")  # in the order of the constants in `outages`
YOUNG, DALY = "young", "daly"
TRUSTED_CHECKS = 5  # as `train.core.share_checks` has it

Shape = tuple[int, ...]


def _check(
    value: float, needed: str, what: str, *, low: float = 0.0, high: float = math.inf
) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise InputError(f"{what} needs {needed}, but got {value:g}")


@dataclass(frozen=True)
class FailureModel:
    """How often each kind of domain fails, per 1000 days of one such domain.

    Lives are Weibull of `shape`; 1 is exponential, less means that what was repaired lately fails
    sooner. With probability `burst` a failure pulls down another domain of its kind within a time
    of mean `burst_window_s`; the rates include these.
    """

    per_1000_days: Mapping[str, float] = field(default_factory=dict)
    shape: float = 1.0
    burst: float = 0.0
    burst_window_s: float = 3600.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "per_1000_days", MappingProxyType(dict(self.per_1000_days)))
        for kind, rate in self.per_1000_days.items():
            if kind not in KINDS:
                raise InputError(f"failures are of {', '.join(KINDS)}, but got {kind!r}")
            _check(rate, "zero or more", f"failures per 1000 {kind}-days")
        _check(self.shape, "a number from 0.2 to 10", "the Weibull shape", low=0.2, high=10.0)
        _check(self.burst, "a probability from 0 to 0.9", "a burst", high=0.9)
        _check(self.burst_window_s, "a positive time", "the window of a burst", low=1e-9)

    def mean_up_s(self, kind: str) -> float:
        """Return the mean time that a domain of this kind is up; infinite if it never fails."""
        rate = self.per_1000_days.get(kind, 0.0)
        of_bursts = 0.0 if kind in SLOW_KINDS else self.burst
        return 1000.0 * DAY_S / rate / (1.0 - of_bursts) if rate else math.inf


@dataclass(frozen=True)
class RepairModel:
    """How long repair takes: automatically first if that is set, then by hand.

    `crews` repairs by hand go on at the same time; 0 means any number.
    """

    manual_s: float
    spread: str = "lognormal"
    sigma: float = 1.0
    automatic_s: float = 0.0
    automatic_success: float = 0.0
    crews: int = 0

    def __post_init__(self) -> None:
        if self.spread not in SPREADS:
            raise InputError(f"repair times are {', '.join(SPREADS)}, but got {self.spread!r}")
        _check(self.manual_s, "zero or more", "the repair time")
        _check(self.sigma, "a number from 0 to 5", "the sigma of repair times", high=5.0)
        _check(self.automatic_s, "zero or more", "the time of automatic repair")
        _check(self.automatic_success, "a share from 0 to 1", "automatic repair", high=1.0)
        _check(self.crews, "zero or more", "the number of repair crews")

    @property
    def mean_s(self) -> float:
        """The mean time of a repair without the wait for a crew."""
        if not self.automatic_s:
            return self.manual_s
        return self.automatic_s + (1.0 - self.automatic_success) * self.manual_s


@dataclass(frozen=True)
class JobModel:
    """What the job does: its step, its checkpoints, and how long it takes to go on.

    A step computes and then sums `payload_bytes`. If `compute_s` is None, the sum takes
    `allreduce_share` of a step on the full mesh. With a `tile`, a replica is a tile of the mesh,
    whose chips hold it together: a chip in no whole tile does nothing. `checkpoint_every` is a time
    in seconds, `young` or `daly`. `recovery_s` is how long a job that goes on around a hole stands
    still after the failure was detected.
    """

    payload_bytes: int = 100_000_000
    fabric: Fabric = field(default_factory=lambda: fabric("reference"))
    algorithm: str = "auto"
    compute_s: float | None = None
    allreduce_share: float = 0.06
    keeps_batch: bool = True
    detection_s: float = 60.0
    restart_s: float = 1200.0
    recovery_s: float = 10.0
    checkpoint_every: float | str = YOUNG
    checkpoint_write_s: float = 60.0
    tile: Shape = ()

    def __post_init__(self) -> None:
        if self.tile and self.algorithm != "auto":
            raise InputError(f"tiles are summed by auto, but got {self.algorithm!r}")
        _check(self.payload_bytes, "one byte or more", "the payload", low=1)
        if self.compute_s is not None:
            _check(self.compute_s, "a positive time", "the compute time of a step", low=1e-12)
        _check(
            self.allreduce_share, "a share from 0.001 to 0.999", "allreduce", low=0.001, high=0.999
        )
        _check(self.detection_s, "zero or more", "the detection time")
        _check(self.restart_s, "zero or more", "the restart time")
        _check(self.recovery_s, "zero or more", "the recovery time")
        _check(self.checkpoint_write_s, "zero or more", "the time to write a checkpoint")
        if isinstance(self.checkpoint_every, str):
            if self.checkpoint_every not in (YOUNG, DALY):
                raise InputError(
                    "checkpoint-every needs a duration, young or daly, but got "
                    f"{self.checkpoint_every!r}"
                )
        else:
            _check(self.checkpoint_every, "a positive time", "checkpoint-every", low=1e-6)


@dataclass(frozen=True)
class WrongModel:
    """How chips that compute wrong numbers are found, and what looking for them costs.

    With checks, in one of `check_every` steps each chip computes the share of another one too; a
    wrong chip is wrong in `one_in` steps. Without them (0) it takes `found_s` in the mean until
    somebody finds it. All work since its first wrong number is then lost.
    """

    found_s: float = 7 * DAY_S
    one_in: float = 5.0
    check_every: int = 0

    def __post_init__(self) -> None:
        _check(self.found_s, "zero or more", "the time until a wrong chip is found")
        _check(self.one_in, "one step or more", "the steps in which a wrong chip is so", low=1)
        _check(self.check_every, "zero or more", "check-shares")

    @property
    def compute_share(self) -> float:
        """What the checks add to the compute of a step, in the mean."""
        return 1.0 / self.check_every if self.check_every else 0.0

    def silent_s(self, step_s: float) -> tuple[float, float]:
        """Return how long a wrong chip is silent in the mean, and the least that is then lost.

        A job that checks goes back to a step since which `TRUSTED_CHECKS` intervals have passed.
        """
        if not self.check_every:
            return self.found_s, 0.0
        between_s = self.check_every * step_s
        return self.one_in * between_s, TRUSTED_CHECKS * between_s


@dataclass(frozen=True)
class SlowModel:
    """How slow chips and links get, for how long in the mean, and whether a job knows it.

    One that does not waits for the slowest in each step: a slow chip computes as much as the
    others, and a slow link carries as much. If it is `known`, a slow chip gets a smaller share, and
    the sum has a plan for the slow link.
    """

    chip_speed: float = 0.33
    link_speed: float = 0.25
    lasts_s: float = DAY_S
    is_known: bool = False

    def __post_init__(self) -> None:
        for name, speed in (("chip", self.chip_speed), ("link", self.link_speed)):
            _check(speed, "a part of 1, at least 0.01", f"a slow {name}'s speed", low=0.01, high=1)
        _check(self.lasts_s, "a positive time", "how long something is slow", low=1e-6)


@dataclass(frozen=True)
class SpareModel:
    """Spare units: how many, of which shape, and how long one takes to be switched in."""

    n_units: int
    unit: Shape
    switch_in_s: float = 300.0

    def __post_init__(self) -> None:
        _check(self.n_units, "zero or more", "the number of spares")
        _check(self.switch_in_s, "zero or more", "the time to switch in a spare")


@dataclass(frozen=True)
class Scenario:
    """A machine, how it fails and is repaired, the job on it, and its spares."""

    mesh: Mesh
    failures: FailureModel
    repair: RepairModel
    job: JobModel
    spares: SpareModel
    host: Shape = ()
    board: Shape = ()
    rack: Shape = ()
    wrong: WrongModel = field(default_factory=WrongModel)
    slow: SlowModel = field(default_factory=SlowModel)

    def __post_init__(self) -> None:
        n_axes = len(self.mesh.shape)
        if n_axes > 3:
            raise InputError(f"forecast needs a mesh of at most 3 axes, but got {self.mesh}")
        if self.mesh.failures():
            raise InputError(f"forecast needs a mesh without failures, but got {self.mesh}")
        if self.mesh.n_chips < 2:
            raise InputError(f"forecast needs two chips or more, but got {self.mesh}")
        defaults = {
            "host": board_shape(n_axes, "host"),
            "board": board_shape(n_axes, "board"),
            "rack": self.mesh.shape,
        }
        for name, default in defaults.items():
            if not getattr(self, name):
                object.__setattr__(self, name, default)
            self._check_tiles(name, getattr(self, name))
        self._check_tiles("spare unit", self.spares.unit)
        if self.job.tile:
            self._check_tiles("tile", self.job.tile)
            if self.slow.is_known:
                raise InputError("slow-known needs a job without tiles, whose shares are equal")

    @property
    def has_slow_parts(self) -> bool:
        """Whether chips or links get slow."""
        return any(self.failures.per_1000_days.get(kind) for kind in SLOW_KINDS)

    def _check_tiles(self, name: str, shape: Shape) -> None:
        extents = self.mesh.shape
        is_used = name in ("spare unit", "tile") or self.failures.per_1000_days.get(name, 0.0) > 0
        fits = len(shape) == len(extents) and all(
            size % part == 0 for size, part in zip(extents, shape, strict=True)
        )
        if is_used and not fits:
            raise InputError(
                f"the {name} {format_shape(shape)} needs to tile the mesh {format_shape(extents)}, "
                "but its extents do not divide those of the mesh"
            )

    def shape_of(self, kind: str) -> Shape:
        """Return the shape of a kind of domain; a link has none."""
        if kind in ("chip", WRONG, SLOW_CHIP):
            return (1,) * len(self.mesh.shape)
        return {"host": self.host, "board": self.board, "rack": self.rack}[kind]

"""A job that survives, as a value: what to run on which mesh, and what is to happen to it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from meshmend.faults.fault import Fault
from meshmend.launch.recoveries import Recovery
from meshmend.membership.events import TimedEvent
from meshmend.membership.timing import Timing
from meshmend.planning.plan_request import SumSizes
from meshmend.planning.settings import Settings
from meshmend.topology.failures import Chip, Failure


@dataclass(frozen=True)
class ElasticJob:
    """What to run on every live chip of the settings' mesh, and what is to happen to it.

    `body()` is what a worker does; it returns its exit code. `sums` are what its steps sum, if
    that is known before the first: plans for what may fail next are made ahead. After `for_s` the
    job is ended, whatever step it is at. Each worker computes in `n_threads` threads. `in_network`
    puts the workers into a testbed.
    """

    settings: Settings
    body: Callable[[], int]
    run_dir: Path
    on_event: Callable[[TimedEvent], None]
    faults: tuple[Fault, ...] = ()
    timing: Timing = field(default_factory=Timing)
    board: tuple[int, ...] = ()
    sums: SumSizes = ()
    for_s: float | None = None
    checks: bool = False
    n_threads: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    enter: Callable[[Chip], None] | None = None
    address_of: Callable[[Chip], str] | None = None
    fail_network: Callable[[Failure], object] | None = None
    repair_network: Callable[[Failure], object] | None = None

    def in_network(
        self,
        enter: Callable[[Chip], None],
        address_of: Callable[[Chip], str],
        fail: Callable[[Failure], object],
        repair: Callable[[Failure], object],
    ) -> "ElasticJob":
        """Return this job with its workers in a network of their own.

        A worker calls `enter(chip)` first, and then listens on `address_of(chip)`. `fail` and
        `repair` break and mend the network when a fault does so.
        """
        return replace(
            self, enter=enter, address_of=address_of, fail_network=fail, repair_network=repair
        )


@dataclass(frozen=True)
class Outcome:
    """How a job ended: the first failure in words, if it did not finish, and its recoveries."""

    is_finished: bool
    why: str
    recoveries: tuple[Recovery, ...]
    chips: tuple[int, ...]

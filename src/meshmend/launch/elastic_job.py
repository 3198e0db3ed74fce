"""An elastic job as a value: what to run, on which mesh, with which faults, and how it ended."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from meshmend.config import Timing
from meshmend.launch.job_page import PageRequest
from meshmend.launch.recoveries import Recovery
from meshmend.membership.events import TimedEvent
from meshmend.membership.faults.fault import Fault
from meshmend.planning.plan_request import SumSizes
from meshmend.planning.settings import Settings
from meshmend.topology.failures import Chip, Failure
from meshmend.units import counted


@dataclass(frozen=True)
class ElasticJob:
    """What to run on every live chip of the settings' mesh, and the faults to inject.

    Each worker runs `body()`, which returns its exit code, and computes in `n_threads` threads.
    `sums` are the sizes of the sums of a step, if they are known before the first step: the
    launcher then plans ahead for the next failures. After `for_s` seconds the job is ended,
    whatever step it is at. `page` asks for a live page. `in_network` puts the workers into a
    testbed.
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
    page: PageRequest | None = None
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
        """Return this job with its workers in a separate network.

        A worker calls `enter(chip)` first, and then listens on `address_of(chip)`. The launcher
        calls `fail` and `repair` when it injects a fault into the network or repairs one.
        """
        return replace(
            self, enter=enter, address_of=address_of, fail_network=fail, repair_network=repair
        )


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    `why` is the first failure in words, and empty if the job finished. `chips` counts the chips of
    each generation. `never_trained` says of each chip that died, without an injected fault, before
    its first step, and did not come back, how it died: such a job ran on fewer chips than it was
    started on from its first step to its last, which is no success. `is_refused` says that no step
    was done because of bad input: the script asked for what cannot be done, or its arguments are
    wrong.
    """

    is_finished: bool
    why: str
    recoveries: tuple[Recovery, ...]
    chips: tuple[int, ...]
    never_trained: tuple[str, ...] = ()
    is_refused: bool = False

    @property
    def fewer_chips(self) -> str:
        """Return, in one line, that chips never trained and why; empty if all did."""
        if not self.never_trained:
            return ""
        n = len(self.never_trained)
        return (
            f"{counted(n, 'chip')} of this job died before the first step and never came back: "
            f"{self.never_trained[0]}{f', and {n - 1} more' if n > 1 else ''}"
        )

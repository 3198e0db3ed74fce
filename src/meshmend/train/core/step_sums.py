"""The sums of one step: started one by one, some while gradients are computed, all waited for.

Knows no generations. A sum that fails says so when the step ends. Sums that are not finite are seen
before any chip uses them, and all chips see the same: the job tells whose gradients they come from,
and the weights stay as they were after the step before.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Final

from meshmend.errors import NonFiniteError, TransportError
from meshmend.membership.events import NonFiniteSum
from meshmend.topology.failures import Chip
from meshmend.train.core.byte_gather import gather_values
from meshmend.train.core.exchange import Exchange, PendingSum, first_error
from meshmend.train.core.learner import Learner
from meshmend.train.core.worker_environment import WorkerEnvironment, coordinator_client
from meshmend.train.state.comparison import MOST_NAMES
from meshmend.train.state.state_tree import Bytes
from meshmend.units import counted

RAISE, SKIP = "raise", "skip"
NON_FINITE: Final = (RAISE, SKIP)
BUFFER: Final = "buffer "  # begins the name of a buffer, where parameters are named too
_MOST_SKIPPED: Final = 20  # steps in a row

Culprits = list[list[str]]  # by rank: the parameters whose gradients are not finite

_log = logging.getLogger(__name__)


class StepSums:
    """The sums of a step that are in flight; without an exchange there is only this chip.

    `before(number)` is called when what this chip puts into a sum is complete.
    """

    def __init__(
        self, learner: Learner, exchange: Exchange | None, before: Callable[[int], None]
    ) -> None:
        self._learner, self._exchange, self._before = learner, exchange, before
        self._pending: list[PendingSum] = []
        self._error: TransportError | None = None
        self._n_started = 0

    def start(self, number: int, *, wakes: bool = True) -> None:
        """Start a sum, unless the step is void already; all chips start theirs in one order.

        Unless it `wakes` another thread, this one waits for it next.
        """
        self._n_started += 1
        self._before(number)
        if self._error is None and self._exchange is not None:
            try:
                self._pending.append(self._exchange.start_sum(*self._sum_of(number), wakes=wakes))
            except TransportError as error:
                self.fail(error)

    def fail(self, error: TransportError) -> None:
        """Make the step void, because something else that it needs has failed."""
        self._error = self._error or error

    def complete(self) -> Culprits | None:
        """Sum all that is left; return whose gradients are not finite, or None if all are.

        Raises:
            TransportError: the step is void.
        """
        self._sum(range(self._n_started, len(self._learner.sums.sizes)))
        if numbers := self._learner.refill_stale():
            self._sum(numbers)
        return None if self._learner.is_finite() else self._culprits()

    def _sum_of(self, number: int) -> tuple[Bytes, int, str]:
        return self._learner.sums.payloads[number], *self._learner.sums.sizes[number]

    def _sum(self, numbers: Sequence[int]) -> None:
        """Make some sums, and wait for them and for all in flight: nothing is left to do beside."""
        for number in numbers:
            self.start(number, wakes=False)
        self._wait()

    def _wait(self) -> None:
        """Wait for all sums in flight; no payload is touched afterwards.

        Raises:
            TransportError: one has failed; this is the first error, which caused the others.
        """
        error = first_error(self._pending) or self._error
        self._pending, self._error, self._n_started = [], None, 0
        if error is not None:
            raise error

    def _culprits(self) -> Culprits:
        """Tell all chips which gradients of this chip are not finite; return those of all."""
        mine = list(self._learner.sums.non_finite())
        if self._exchange is None:
            return [mine]
        return gather_values(self._exchange, mine, list[str])


class NonFinite:
    """Reports sums that are not finite, and raises or lets the job skip the step."""

    def __init__(self, policy: str, environment: WorkerEnvironment) -> None:
        self._policy, self._environment = policy, environment
        self._n_in_a_row = 0

    def note_finite(self) -> None:
        """Note that the sums of a step are finite."""
        self._n_in_a_row = 0

    def report(self, step: int, chips: Sequence[Chip], culprits: Sequence[Sequence[str]]) -> None:
        """Report each chip that has something not finite; the list has one entry per chip.

        Raises:
            NonFiniteError: the policy is to raise, or too many steps in a row were skipped.
        """
        names = [name for each in culprits for name in each]
        buffers = [name for name in names if name.startswith(BUFFER)]
        what = "gradients" if len(buffers) < len(names) or not names else "buffers"
        words = [
            f"chip {chip}: {_names(names)}"
            for chip, names in zip(chips, culprits, strict=True)
            if names
        ]
        found = "; ".join(words) or "every chip's are, but their sum is too large"
        sentence = f"the {what} of step {step} are not finite: {found}"
        self._tell(step, dict(zip(chips, culprits, strict=True)))
        self._n_in_a_row += 1
        if what == "buffers":
            raise NonFiniteError(
                f"{sentence}; a change from or to a value that is not finite has no mean over the "
                "chips: buffers may hold such values, but a step must not change them"
            )
        if self._policy == RAISE:
            raise NonFiniteError(
                f"{sentence}; the weights are those after step {step - 1}. To go on without such "
                "steps, make the job with non_finite='skip'"
            )
        if self._n_in_a_row >= _MOST_SKIPPED:
            raise NonFiniteError(
                f"{sentence}; {self._n_in_a_row} steps in a row were skipped, so training stands "
                f"still: the weights are those after step {step - self._n_in_a_row}"
            )
        _log.warning("%s; the step changes no weights", sentence)

    def _tell(self, step: int, culprits: dict[Chip, Sequence[str]]) -> None:
        """Send the event of this chip, if it is to blame; if none is, the first chip sends one."""
        chip = self._environment.chip
        is_mine = bool(culprits[chip]) or (not any(culprits.values()) and chip == min(culprits))
        if is_mine and self._environment.identity is not None:
            names = tuple(culprits[chip][:MOST_NAMES])
            coordinator_client().report(NonFiniteSum(chip, step, names, len(culprits[chip])))


def _names(names: Sequence[str]) -> str:
    some = ", ".join(names[:MOST_NAMES])
    n_more = len(names) - MOST_NAMES
    return f"{some} and {counted(n_more, 'more')}" if n_more > 0 else some

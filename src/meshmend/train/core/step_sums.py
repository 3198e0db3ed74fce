"""The sums of one step: started one by one, some while gradients are computed, all waited for.

Knows no generations. A sum that fails says so when the step ends.
"""

import json
from collections.abc import Sequence

from meshmend.errors import TransportError
from meshmend.train.core.byte_gather import gather_bytes
from meshmend.train.core.exchange import Exchange
from meshmend.train.core.learner import Bytes, Learner
from meshmend.train.core.pending_sum import PendingSum
from meshmend.train.core.sum_waiting import first_error

Culprits = list[list[str]]  # by rank: the parameters whose gradients are not finite


class StepSums:
    """The sums of a step that are in flight; without an exchange there is only this chip."""

    def __init__(self, learner: Learner, exchange: Exchange | None) -> None:
        self._learner, self._exchange = learner, exchange
        self._pending: list[PendingSum] = []
        self._error: TransportError | None = None
        self._n_started = 0

    def start(self, number: int) -> None:
        """Start a sum, unless the step is void already; all chips start theirs in one order."""
        self._n_started += 1
        if self._error is None and self._exchange is not None:
            try:
                self._pending.append(self._exchange.start_sum(*self._sum_of(number)))
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
        self._sum(range(self._n_started, len(self._learner.sum_sizes())))
        if numbers := self._learner.take_again():
            self._sum(numbers)
        return None if self._learner.is_finite() else self._culprits()

    def _sum_of(self, number: int) -> tuple[Bytes, int, str]:
        return self._learner.payloads()[number], *self._learner.sum_sizes()[number]

    def _sum(self, numbers: Sequence[int]) -> None:
        """Make some sums, and wait for them and for all in flight.

        Nothing is left to do beside the last one, so this thread makes it, without waking another.
        """
        for number in numbers[:-1]:
            self.start(number)
        if self._error is None and self._exchange is not None:
            try:
                self._exchange.sum(*self._sum_of(numbers[-1]))
            except TransportError as error:
                self.fail(error)
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
        mine = json.dumps(list(self._learner.non_finite())).encode()
        found = [mine] if self._exchange is None else gather_bytes(self._exchange, mine)
        return [json.loads(each) for each in found]

"""The sums of one step: started one by one, some while gradients are computed, all waited for.

Knows no generations. A sum that fails says so when the step ends.
"""

import json

from meshmend.errors import TransportError
from meshmend.train.byte_gather import gather_bytes
from meshmend.train.exchange import Exchange
from meshmend.train.learner import Learner
from meshmend.train.pending_sum import PendingSum
from meshmend.train.sum_waiting import first_error

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
            n_elements, dtype = self._learner.sum_sizes()[number]
            payload = self._learner.payloads()[number]
            try:
                self._pending.append(self._exchange.start_sum(payload, n_elements, dtype))
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
        for number in range(self._n_started, len(self._learner.sum_sizes())):
            self.start(number)
        self._wait()
        if numbers := self._learner.take_again():
            for number in numbers:
                self.start(number)
            self._wait()
        return None if self._learner.is_finite() else self._culprits()

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

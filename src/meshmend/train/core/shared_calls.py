"""What a loop may ask of all chips besides steps: to gather values, and to share out work.

Within a step such a call is part of the step: if the mesh changes, the step does not count, and is
done again with all its calls. Between two steps a call is a round: it goes on with the chips that
are left, and all of them get the same result.
"""

from collections.abc import Callable
from typing import Protocol

from meshmend.errors import InputError, TransportError
from meshmend.train.core.byte_gather import gather_bytes
from meshmend.train.core.exchange import Exchange
from meshmend.train.core.learner import Learner
from meshmend.train.core.rounds import Round, Rounds
from meshmend.train.core.step_sums import StepSums
from meshmend.train.core.worker_loop import WorkerLoop
from meshmend.train.data.samples import Share


class JobPosition(Protocol):
    """Where a job is; `JobCore` is such."""

    @property
    def share(self) -> Share | None:
        """The samples of the step in flight; None if there is none."""

    @property
    def step_number(self) -> int:
        """The number of steps that are done."""

    @property
    def batch(self) -> int:
        """How many samples the next step uses."""


class SharedCalls:
    """One chip's calls to all chips of a job."""

    def __init__(
        self,
        position: JobPosition,
        learner: Learner,
        sums: StepSums,
        loop: WorkerLoop,
        exchange: Exchange,
    ) -> None:
        self._position, self._learner, self._sums = position, learner, sums
        self._loop, self._exchange = loop, exchange
        self._rounds = Rounds(loop, exchange)

    def settle(self) -> None:
        """Take part in the rounds that other chips are in, before the next step."""
        self._rounds.settle()

    def forget(self) -> None:
        """Forget all rounds, because a step was finished or taken from another chip."""
        self._rounds.forget()

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of each chip, in the order of their places in the mesh.

        Within a step, if the mesh changes, returns this chip's bytes, and the step will not count.

        Raises:
            InputError: the job does not run, or some chips have no samples.
        """
        self._check_all_are_here("gather")
        if self._position.share is None:
            mine = Round(0, _nothing, {self._exchange.seat: data})
            return list(self._rounds.hold(mine, lambda: self._position.step_number).values())
        self._learner.flush()
        try:
            return gather_bytes(self._exchange, data)
        except TransportError as error:
            self._sums.fail(error)
            return [data]

    def share_out(self, n_parts: int, compute: Callable[[int], bytes]) -> list[bytes]:
        """Return all parts of a piece of work that the chips share, the same on all chips.

        `compute(number)` returns a part. If chips die meanwhile, others compute their parts; those
        of living chips are not computed again. After the job, this chip computes all.

        Raises:
            InputError: a step is in flight, or some chips have no samples.
        """
        if self._position.share is not None:
            raise InputError("job.evaluate needs the step to be over; call it after job.step")
        if self._loop.is_over:
            return [compute(number) for number in range(n_parts)]
        self._check_all_are_here("evaluate")
        parts = self._rounds.hold(Round(n_parts, compute), lambda: self._position.step_number)
        return list(parts.values())

    def _check_all_are_here(self, call: str) -> None:
        """Raise InputError if some chips cannot make this call, so that the others would wait."""
        if self._loop.generation is None or self._loop.is_over:
            raise InputError(f"job.{call} needs a job that runs; call it in the loop over the job")
        batch, n_chips = self._position.batch, self._exchange.mesh.n_live
        if batch < n_chips:
            raise InputError(
                f"job.{call} needs all chips in the loop, but a batch of {batch} gives some of the "
                f"{n_chips} chips no samples; use a batch of at least {n_chips}"
            )


def _nothing(number: int) -> bytes:
    raise AssertionError(f"a gather has no part {number} to compute")

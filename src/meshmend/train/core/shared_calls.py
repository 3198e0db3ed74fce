"""What a loop may ask of all chips besides steps: to gather values, and to share out work.

Within a step such a call is part of the step: if the mesh changes, the step does not count, and is
done again with all its calls. Between two steps a call is a **round**: it goes on with the chips
that are left, and all of them get the same result.

A round has parts, each of which one chip computes; in the end all chips have all parts. The rounds
after a step are numbered. Chips that finished the step hold the same rounds. A chip that came
later, or that lost the step and got it from another chip, has not reached the round: it looks on,
and computes nothing. What the loop makes of a result, such as a lower learning rate, it has not
made; so before the next step it takes the state once more, from chips that have.

In a generation it is not clear at first who is in which round. So the chips **vote** before they do
anything else: each says which round it is in, and which rounds it has finished. The earliest round
that a chip is in comes first. If another chip has finished it, it hands over the parts. Else the
others are in this round too, or look on. They go on with it: parts that a living chip has computed
are not computed again. When no chip is in a round, the generation is **settled**, and no more votes
are needed: its chips do the same in the same order.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum

import msgspec

from meshmend.errors import InputError, TransportError
from meshmend.train.core.byte_gather import gather_bytes, gather_values
from meshmend.train.core.exchange import Exchange
from meshmend.train.core.learner import Learner
from meshmend.train.core.step_shares import StepShares
from meshmend.train.core.step_sums import StepSums
from meshmend.train.core.worker_loop import WorkerLoop

_ROUND = "a round after a change of the mesh"  # in which some chips only look on

Parts = dict[int, bytes]


@dataclass
class Round:
    """A piece of work for all chips: `compute(number)` returns the part of that number.

    `own` are the parts that this chip has. A round of no parts to compute only gathers those.
    """

    n_parts: int
    compute: Callable[[int], bytes]
    own: Parts = field(default_factory=dict)

    @property
    def topic(self) -> str:
        """The call that it is for, in words."""
        return f"evaluate in {self.n_parts} parts" if self.n_parts else "gather or all_reduce"


class _Came(IntEnum):
    """How a chip has come to the last step: the higher, the less its state is worth."""

    STEPPED = 0  # it holds all rounds, and its loop does what follows from them
    TOOK = 1  # from another chip
    LOOKED_ON = 2  # as TOOK, and then there was a round


class SharedCalls:
    """One chip's calls to all chips of a job."""

    def __init__(
        self,
        shares: StepShares,
        learner: Learner,
        sums: StepSums,
        loop: WorkerLoop,
        exchange: Exchange,
    ) -> None:
        self._shares, self._learner, self._sums = shares, learner, sums
        self._loop, self._exchange = loop, exchange
        self.waited_s = 0.0  # for other chips, within a step
        self._finished: list[Parts] = []  # the rounds after this step that this chip has parts of
        self._came = _Came.STEPPED
        self._settled = -1  # the last generation that was settled

    def gather(self, data: bytes) -> list[bytes]:
        """Return the bytes of each chip, in the order of their places in the mesh.

        Within a step, if the mesh changes, returns this chip's bytes for each chip, and the step
        will not count.

        Raises:
            InputError: the job does not run, or some chips have no samples.
        """
        self._check_all_are_here("gather")
        if self._shares.in_flight is None:
            return list(self.hold(Round(0, _nothing, {self._exchange.seat: data})).values())
        self._learner.flush()
        began = time.perf_counter()
        try:
            return gather_bytes(self._exchange, data, "gather or all_reduce")
        except TransportError as error:
            self._sums.fail(error)
            return [data] * self._exchange.mesh.n_live  # so that loops may pick those of a rank
        finally:
            self.waited_s += time.perf_counter() - began

    def share_out(self, n_parts: int, compute: Callable[[int], bytes]) -> list[bytes]:
        """Return all parts of a piece of work that the chips share, the same on all chips.

        `compute(number)` returns a part. If chips die meanwhile, others compute their parts; those
        of living chips are not computed again. After the job, this chip computes all.

        Raises:
            InputError: a step is in flight, or some chips have no samples.
        """
        if self._shares.in_flight is not None:
            raise InputError("job.evaluate needs the step to be over; call it after job.step")
        if self._loop.is_over:
            return [compute(number) for number in range(n_parts)]
        self._check_all_are_here("evaluate")
        return list(self.hold(Round(n_parts, compute)).values())

    def _check_all_are_here(self, call: str) -> None:
        """Raise InputError if some chips cannot make this call, so that the others would wait."""
        if self._loop.generation is None or self._loop.is_over:
            raise InputError(f"job.{call} needs a job that runs; call it in the loop over the job")
        n_chips = self._exchange.mesh.n_live
        batch = self._shares.batch(n_chips)
        if batch < n_chips:
            raise InputError(
                f"job.{call} needs all chips in the loop, but a batch of {batch} gives some of the "
                f"{n_chips} chips no samples; use a batch of at least {n_chips}"
            )

    def forget(self, *, is_own_step: bool) -> None:
        """Forget all rounds, because a step was finished here or taken from another chip."""
        self._finished = []
        self._came = _Came.STEPPED if is_own_step else _Came.TOOK

    def settle(self) -> None:
        """Look on until no chip of this generation is in a round."""
        while not self._loop.is_over and self._settled != self._loop.number:
            self._attempt(self._vote_and_look_on)

    def hold(self, mine: Round) -> Parts:
        """Take part in a round; return all of its parts, the same on all chips that are in it.

        If this chip was turned away and came back at a later step, or if the job is over, it
        completes the parts by itself.
        """
        step, results = self._shares.step, list[Parts]()
        number = len(self._finished) + 1

        def take_part() -> None:
            if self._settled == self._loop.number:
                parts = self._complete(mine, range(self._exchange.mesh.n_live), mine.topic)
                results.append(parts)
            else:
                voted, parts = self._vote(number, mine)
                if voted == number:
                    results.append(parts)

        while not results and not self._loop.is_over and self._shares.step == step:
            self._attempt(take_part)
        if not results:
            return {**{at: mine.compute(at) for at in _missing(mine, mine.own)}, **mine.own}
        self._finished.append(results[0])
        return results[0]

    def _attempt(self, run: Callable[[], None]) -> None:
        """Do something with all chips; if the mesh changes meanwhile, enter the new generation."""
        number = self._loop.number
        if not self._loop.attempt(run, is_step=False):
            self._loop.recover(after=number)

    def _vote_and_look_on(self) -> None:
        voted, _ = self._vote(0, None)
        if voted == 0:
            self._settled = self._loop.number
        elif voted > len(self._finished):
            self._came = _Came.LOOKED_ON

    def _vote(self, number: int, mine: Round | None) -> tuple[int, Parts]:
        """Vote, and do what is to do; return the earliest round that a chip is in, and its parts.

        The number is 0 if no chip is in a round.
        """
        votes = self._exchange.gather_numbers([number, len(self._finished), self._came])
        inside = [rank for rank, (is_in, _, _) in enumerate(votes) if is_in]
        if not inside:
            self._level([came for _, _, came in votes])
            return 0, {}
        wanted = min(votes[rank][0] for rank in inside)
        holders = [rank for rank, (_, n_finished, _) in enumerate(votes) if n_finished >= wanted]
        if holders:
            is_first = self._exchange.rank == holders[0]
            kept = self._finished[wanted - 1] if is_first else {}
            return wanted, _merged(
                gather_bytes(self._exchange, msgspec.msgpack.encode(kept), _ROUND)
            )
        return wanted, self._complete(mine, inside, _ROUND, is_again=True)

    def _level(self, came: list[int]) -> None:
        """Give a chip that has looked on the state once more: loops may have changed it since.

        One that only took it may have it from such a chip. If none has done the step itself, what
        their loops have made of the rounds is lost; all chips go on alike.
        """
        if _Came.LOOKED_ON in came:
            stepped = [rank for rank, each in enumerate(came) if each == _Came.STEPPED]
            holders = [self._exchange.members[rank] for rank in stepped or [0]]
            self._loop.give_state(self._shares.step, holders)
            self._came = _Came.STEPPED

    def _complete(
        self,
        mine: Round | None,
        inside: "range | list[int]",
        topic: str,
        *,
        is_again: bool = False,
    ) -> Parts:
        """Compute this chip's part of a round that some ranks are in; return all parts."""
        exchange, own = self._exchange, mine.own if mine else {}
        done = set(own)
        if is_again:
            told = gather_values(exchange, sorted(own), list[int])
            done = {number for each in told for number in each}
        if mine is not None:
            missing = _missing(mine, done)
            for number in missing[list(inside).index(exchange.rank) :: len(inside)]:
                exchange.transport.check()
                own[number] = mine.compute(number)
        return _merged(gather_bytes(exchange, msgspec.msgpack.encode(own), topic))


def _nothing(number: int) -> bytes:
    raise AssertionError(f"a gather has no part {number} to compute")


def _missing(work: Round, done: "set[int] | Parts") -> list[int]:
    return [number for number in range(work.n_parts) if number not in done]


def _merged(packed: list[bytes]) -> Parts:
    """Return the parts of all chips in the order of their numbers, each once."""
    found: Parts = {}
    for each in packed:
        found = msgspec.msgpack.decode(each, type=Parts) | found
    return dict(sorted(found.items()))

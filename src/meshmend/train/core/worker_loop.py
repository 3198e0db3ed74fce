"""What a worker does in a job: join, enter generations, send or receive the state, sum.

Knows no tensors, no sockets and no clock. It trains a `Replica`, and talks to the coordinator
through a `Coordination` and to other workers through its `Peers`. So the same code runs in a
training job and in a simulation of network and clock.

The worker treats every change of membership the same way. It stops waiting, drops the step in
flight, enters the new generation, gets the state that counts, and does the step again. If something
fails on the way, it starts over with the next generation.
"""

import logging
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from msgspec import structs

from meshmend.errors import (
    CheckpointDamageError,
    InputError,
    MismatchError,
    PeerLostError,
    RefusedError,
    StateLostError,
    StoppedError,
    TransportError,
    TurnedAwayError,
)
from meshmend.membership.client import News
from meshmend.membership.faults.fault import Moment
from meshmend.membership.faults.fault_injector import SelfInjection
from meshmend.membership.generation import Generation
from meshmend.membership.messages import FRESH, Go, Status
from meshmend.planning.plan_request import SumSizes
from meshmend.topology.failures import Chip
from meshmend.transport.listener import Address

Bytes = Any  # a flat array of bytes; NumPy's in a job

_log = logging.getLogger(__name__)


class Replica(Protocol):
    """What a worker trains: a state that advances step by step. `Job` is one."""

    @property
    def step_number(self) -> int:
        """The number of steps that are done."""

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done."""

    def sum_sizes(self) -> SumSizes:
        """Return the sizes of all sums and gathers of one step."""

    def newest_checkpoint(self) -> int | None:
        """Return the step of the newest complete checkpoint that this worker can read, or None."""

    def went_back(self, step: int, generation: int) -> None:
        """Write down that a generation restores an earlier step; later ones are lost."""

    def restore(self, step: int) -> None:
        """Replace this worker's state by the checkpoint of a step.

        Raises:
            CheckpointDamageError: it cannot be read.
        """


class Coordination(Protocol):
    """The connection to the coordinator; `CoordinatorClient` is one."""

    def join(
        self,
        address: Address,
        status: Status,
        *,
        on_change: Callable[[], None],
        on_sever: Callable[[Chip], None],
    ) -> None:
        """Offer this worker to the coordinator."""

    def tell(self, status: Status) -> None:
        """Send this worker's status to the coordinator now."""

    def note(self, status: Status) -> None:
        """Keep this worker's status, to send it when the coordinator asks."""

    def mark(self, generation: int, step: int) -> None:
        """Keep the generation and step that this worker's loop is in, for heartbeats."""

    def await_news(self, is_enough: Callable[[News], bool]) -> News:
        """Wait until `is_enough(news)` is true, and return the news."""

    def await_lease(self, generation: int) -> None:
        """Wait until this worker may step in a generation: nobody goes on without it.

        Raises:
            StoppedError: it has something else to do than to step.
        """


class Peers(Protocol):
    """The connections to the other workers of a generation; `Exchange` is one."""

    @property
    def address(self) -> Address:
        """Where this worker listens."""

    @property
    def generation_number(self) -> int:
        """The generation that was entered last."""

    def interrupt(self) -> None:
        """Stop waiting now."""

    def sever(self, chip: Chip) -> None:
        """Break the connection to a chip, as a cut link would."""

    def chip_of(self, seat: int) -> Chip:
        """Return the chip of a seat."""

    def enter(self, generation: Generation) -> None:
        """Begin a generation."""

    def plan(self, sums: SumSizes) -> None:
        """Plan sums and gathers of these sizes."""

    def plan_ahead(self, sums: SumSizes) -> None:
        """Plan sums for the failures that may come next."""

    def prepare(self) -> None:
        """Connect to all neighbours, and to all peers of the planned sums."""

    def sum(self, payload: Bytes, n_elements: int, dtype: str) -> None:
        """Replace the payload, on every chip, with the sum of all chips' payloads."""


# Gets a worker the state of the holders, never only a part of it: `StateTransfer.catch_up`. It may
# raise StateLostError if they do not have all of it.
CatchUp = Callable[[Go, Generation], None]


class WorkerLoop:
    """One worker in a job; call its methods from the worker's main thread only."""

    def __init__(
        self,
        chip: Chip,
        replica: Replica,
        coordination: Coordination,
        peers: Peers,
        self_injection: SelfInjection,
        *,
        catch_up: CatchUp,
        has_part: bool = False,
    ) -> None:
        self._chip = chip
        self._has_part = has_part  # this worker alone cannot hold all of the state
        self._replica = replica
        self._coordination = coordination
        self._peers = peers
        self._self_injection = self_injection
        self._catch_up = catch_up
        self.state_version = FRESH
        # The next step, while its state is held beside that of `step_number`: it is done here, but
        # may not be on all chips. Only where a chip holds a part of the state.
        self.also: int | None = None
        self.generation: Generation | None = None
        self.has_moved_state = False  # whether a chip got its state when the generation began
        self.is_over = False
        self.was_waiting = False  # whether this worker was not a member when the job ended

    @property
    def number(self) -> int:
        """The number of the last generation in which this worker was up to date, 0 at first."""
        return self.generation.number if self.generation else 0

    def start(self) -> None:
        """Join the job; return when this worker is up to date in its first generation."""
        self._join()
        self.recover(after=0)

    def try_sum(self, payloads: Iterable[tuple[Bytes, int, str]]) -> bool:
        """Sum payloads over all chips; return False if the mesh changed and the sums are void."""

        def sum_all() -> None:
            for payload, n_elements, dtype in payloads:
                self._peers.sum(payload, n_elements, dtype)

        return self.attempt(sum_all)

    def attempt(self, run: Callable[[], None], *, is_step: bool = True) -> bool:
        """Do something with all chips; return False if the mesh changed, and it is void.

        While this worker waits in it, workers that have not begun it are behind. If it is no step,
        they are level again afterwards. It counts only with a lease at its end: once the others may
        have gone on without this worker, nothing that it has done with its peers counts.
        """
        step = self._replica.step_number
        self._coordination.mark(self.number, step + 1)
        try:
            self._coordination.await_lease(self.number)
            run()
            self._coordination.await_lease(self.number)
        except TransportError as error:
            self._report_lost_peer(error)
            return False
        if not is_step:
            self._coordination.mark(self.number, step)
        return True

    def keep_lease(self) -> bool:
        """Wait until this worker may step; return False if the mesh has changed instead."""
        try:
            self._coordination.await_lease(self.number)
        except StoppedError:
            return False
        return True

    def give_state(self, step: int, holders: Iterable[Chip]) -> None:
        """Give the state of some members to all others of this generation, after a step.

        Raises:
            TransportError: the mesh has changed.
        """
        assert self.generation is not None
        self._catch_up(Go(self.number, step, tuple(holders)), self.generation)

    def note_step(self) -> None:
        """Update this worker's status after the replica has finished a step."""
        self._coordination.note(self._status(is_ready=True))

    def report_lost(self, lost: Chip, why: str) -> None:
        """Report to the coordinator that the connection to a chip broke."""
        _log.info("chip %s lost chip %s: %s", self._chip, lost, why)
        self._coordination.tell(self._status(is_ready=False, lost=[lost]))

    def accuse(self, wrong: Iterable[Chip], *, right_until: int | None = None) -> None:
        """Report to the coordinator that members of this generation compute wrong numbers.

        It turns them away if most members say so, and forms a generation without them. With
        `right_until` that begins with the newest checkpoint of at most this step, if there is one.
        """
        status = structs.replace(self._status(is_ready=True), wrong=tuple(wrong))
        if right_until is not None:
            checkpoint = self._replica.newest_checkpoint()
            status = structs.replace(status, right_until=right_until, checkpoint=checkpoint)
        self._coordination.tell(status)

    def recover(self, *, after: int) -> None:
        """Get up to date in a generation later than `after`; return early if the job is over.

        If something fails on the way, it starts over with the next generation.

        Raises:
            JobFailedError: neither a worker nor a checkpoint has a state to go on from.
            RefusedError: the coordinator refuses this worker.
        """
        while not self.is_over:
            try:
                news = self._news_after(after)
                if news.is_over:
                    self.is_over = True
                    self.was_waiting = bool(news.wait) or self.state_version == FRESH
                    if self.was_waiting:
                        self._tell_of_end(news.wait)
                elif news.generation is not None:
                    after = news.generation.number
                    if self._enter(news.generation):
                        return
            except TurnedAwayError as error:
                _log.warning("chip %s was turned away: %s", self._chip, error)
                self._join()
            except RefusedError:
                self.is_over = True  # for this worker
                raise

    def finish(self) -> None:
        """Wait until all chips have finished; if the mesh changes before that, recover."""
        self._coordination.tell(self._status(is_ready=True))
        self.recover(after=self.number)

    def _tell_of_end(self, why: str) -> None:
        """Tell the user that the job has ended without this worker: nobody else may look here.

        Its exit code is 0: what it did counts, or was done again by the others.
        """
        is_empty = self.state_version == FRESH
        held = "no state" if is_empty else f"the state after step {self._replica.step_number}"
        because = f": {why}" if why else ""
        _log.warning("the job ended without chip %s, which has %s%s", self._chip, held, because)

    def _status(self, *, is_ready: bool, lost: Iterable[Chip] = ()) -> Status:
        number = self._peers.generation_number
        is_up_to_date = self.state_version == number
        return Status(
            generation=number,
            ready=is_ready,
            state_version=self.state_version,
            step=self._replica.step_number,
            finished=self._replica.is_finished and is_up_to_date,
            lost=tuple(lost),
            checkpoint=None if is_ready and is_up_to_date else self._replica.newest_checkpoint(),
            term=self.generation.term if self.generation and self.state_version != FRESH else 0,
            also=None if self.state_version == FRESH else self.also,
        )

    def _join(self) -> None:
        """Offer this worker to the coordinator."""
        self._coordination.join(
            self._peers.address,
            self._status(is_ready=False),
            on_change=self._peers.interrupt,
            on_sever=self._peers.sever,
        )

    def _report_lost_peer(self, error: TransportError) -> None:
        """Report a lost peer to the coordinator.

        A stop is not reported: the coordinator has caused it. Raises any other error again.

        Raises:
            InputError: another chip makes another call, so no chip can go on with this script.
        """
        if isinstance(error, PeerLostError) and error.rank is not None:
            self.report_lost(self._peers.chip_of(error.rank), str(error))
        elif isinstance(error, StoppedError):
            self._coordination.note(self._status(is_ready=False))
        elif isinstance(error, MismatchError):
            self.is_over = True  # for this worker
            raise InputError(
                "all chips of a job must call step, gather, all_reduce and evaluate alike, after "
                f"the same backward passes, but {error}"
            ) from None
        else:
            raise error

    def _news_after(self, number: int) -> News:
        """Wait for a generation later than this number, or for the end; return the news.

        Where a worker has a part of the state, who is told to wait says which checkpoint it can
        read, and again when it waits for something else: chips with all parts may have to go back
        to a checkpoint together, and one that has waited from the beginning has seen none.
        """
        told: str | None = None

        def is_later(news: News) -> bool:
            return news.is_over or (news.generation is not None and news.generation.number > number)

        def is_new(news: News) -> bool:
            return is_later(news) or (self._has_part and bool(news.wait) and news.wait != told)

        while not is_later(news := self._coordination.await_news(is_new)):
            self._coordination.tell(self._status(is_ready=False))
            told = news.wait
        return news

    def _enter(self, generation: Generation) -> bool:
        """Become an up-to-date member of a generation; return False if that fails."""
        number = generation.number
        self._peers.enter(generation)
        self._coordination.mark(number, 0)
        self._coordination.tell(self._status(is_ready=True))
        self._self_injection.at(Moment.RECOVERY, self._replica.step_number)
        try:
            self._peers.plan(self._replica.sum_sizes())
            news = self._coordination.await_news(lambda news: _is_answered(news, number))
            if news.generation is None or news.generation.number != number or news.go is None:
                return False
            self._peers.prepare()
            self._get_up_to_date(news.go, generation)
        except TransportError as error:
            self._report_lost_peer(error)
            return False
        except CheckpointDamageError as error:
            _log.error("chip %s cannot restore a checkpoint: %s", self._chip, error)
            self._coordination.tell(self._status(is_ready=False))
            return False
        except StateLostError as error:
            _log.info("chip %s: %s", self._chip, error)
            self.state_version = FRESH  # so that the coordinator looks for a state to go back to
            self._coordination.tell(self._status(is_ready=False))
            return False
        self.generation, self.state_version, self.also = generation, number, None
        self._coordination.tell(self._status(is_ready=True))
        self._peers.plan_ahead(self._replica.sum_sizes())
        return True

    def _get_up_to_date(self, go: Go, generation: Generation) -> None:
        """Get the state that this generation begins with."""
        if go.lost is not None:
            self._replica.went_back(go.step, go.generation)
        if go.restores and self._chip in go.holders:
            self._replica.restore(go.step)
        self.has_moved_state = len(go.holders) < len(generation.seats)
        self._catch_up(go, generation)


def _is_answered(news: News, number: int) -> bool:
    """Whether the coordinator has started a generation, or replaced it by a later one."""
    is_later = news.generation is not None and news.generation.number > number
    return is_later or (news.go is not None and news.go.generation == number)

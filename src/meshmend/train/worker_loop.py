"""One worker's way through a job: joins, enters generations, takes or gives the state, sums.

Knows no tensors, no sockets and no clock: what it trains is a `Replica`, whom it talks to are a
`Coordination` and its `Peers`. So the same code runs in a training job and under a simulated
network and clock.

Every change of membership is one event for it: stop waiting, drop the step in flight, enter the
new generation, get up to date, take the step again. A failure on the way starts that over.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from meshmend.errors import (
    CheckpointDamageError,
    PeerLostError,
    StoppedError,
    TransportError,
    TurnedAwayError,
)
from meshmend.faults.fault import Moment
from meshmend.faults.self_injection import SelfInjection
from meshmend.membership.client import News
from meshmend.membership.events import Event
from meshmend.membership.generation import Generation
from meshmend.membership.messages import FRESH, Go, Status
from meshmend.net.listener import Address
from meshmend.topology.failures import Chip

Bytes = Any  # a flat array of bytes; NumPy's in a job
SumSizes = Sequence[tuple[int, str]]  # how many elements of which type

_log = logging.getLogger(__name__)


class Replica(Protocol):
    """What a worker trains: a state that grows by one step at a time."""

    @property
    def step_number(self) -> int:
        """How many steps are done."""

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done."""

    def sum_sizes(self) -> SumSizes:
        """Return what one step sums."""

    def packed_state(self) -> Bytes:
        """Return all that makes up the training at this step."""

    def take_over(self, state: Bytes) -> None:
        """Be where another worker is; nothing is lost half-way."""

    def newest_checkpoint(self) -> int | None:
        """Return the step of the newest whole checkpoint that this worker can read."""

    def went_back(self, step: int, generation: int) -> None:
        """Write down that a generation goes on after an earlier step: the later ones are lost."""

    def restore(self, step: int) -> None:
        """Be where the checkpoint of a step is.

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
        """Say how this worker stands."""

    def note(self, status: Status) -> None:
        """Keep how this worker stands for when the coordinator asks."""

    def mark(self, generation: int, step: int) -> None:
        """Keep where this worker's loop is."""

    def report(self, event: Event) -> None:
        """Tell those who watch the job of an event."""

    def await_news(self, is_enough: Callable[[News], bool]) -> News:
        """Return the news as soon as they are enough."""

    def close(self) -> None:
        """Say no more."""


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
        """Break the connection to a chip."""

    def chip_of(self, seat: int) -> Chip:
        """Return the chip of a seat."""

    def enter(self, generation: Generation) -> None:
        """Begin a generation."""

    def plan(self, sums: SumSizes) -> None:
        """Plan sums of these sizes."""

    def plan_ahead(self, sums: SumSizes) -> None:
        """Plan sums for what may fail next."""

    def prepare(self) -> None:
        """Connect to all whom the planned sums need."""

    def sum(self, payload: Bytes, n_elements: int, dtype: str) -> None:
        """Leave the sum of all chips' payloads in the payload of each."""

    def spread(self, payload: Bytes | None, holders: Sequence[Chip]) -> Bytes:
        """Return the payload that the holders have."""


class WorkerLoop:
    """One worker in a job; its methods are called from the worker's main thread alone."""

    def __init__(
        self,
        chip: Chip,
        replica: Replica,
        coordination: Coordination,
        peers: Peers,
        self_injection: SelfInjection,
    ) -> None:
        self._chip = chip
        self._replica = replica
        self._coordination = coordination
        self._peers = peers
        self._self_injection = self_injection
        self.state_version = FRESH
        self.generation: Generation | None = None
        self.is_over = False
        self.was_waiting = False  # when all was over, this worker was no member

    @property
    def number(self) -> int:
        """The number of the generation in which this worker is up to date."""
        return self.generation.number if self.generation else 0

    def start(self) -> None:
        """Join, and return when this worker is up to date in its first generation."""
        self._join()
        self.recover(after=0)

    def summed(self, payloads: Iterable[tuple[Bytes, int, str]]) -> bool:
        """Sum payloads over all chips; return False if the mesh changed: then nothing counts."""
        self._coordination.mark(self.number, self._replica.step_number + 1)
        try:
            for payload, n_elements, dtype in payloads:
                self._peers.sum(payload, n_elements, dtype)
        except TransportError as error:
            self._complain(error)
            return False
        return True

    def stepped(self) -> None:
        """Take in that the replica has finished a step."""
        self._coordination.note(self._status(is_ready=True))

    def recover(self, *, after: int) -> None:
        """Return when this worker is up to date in a generation later than one, or all is over.

        Whatever happens on the way starts it over with the next generation.

        Raises:
            JobFailedError: the state that counts is lost. RefusedError: nobody wants this worker.
        """
        while not self.is_over:
            try:
                news = self._news_after(after)
                if news.is_over:
                    self.is_over = True
                    self.was_waiting = bool(news.wait) or self.state_version == FRESH
                elif news.generation is not None:
                    after = news.generation.number
                    if self._enter(news.generation):
                        return
            except TurnedAwayError as error:
                _log.warning("chip %s was turned away: %s", self._chip, error)
                self._join()

    def finish(self) -> None:
        """Wait until all chips have finished; if the mesh changes instead, be in it again."""
        self._coordination.tell(self._status(is_ready=True))
        self.recover(after=self.number)

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
        )

    def _join(self) -> None:
        """Offer this worker to the coordinator."""
        self._coordination.join(
            self._peers.address,
            self._status(is_ready=False),
            on_change=self._peers.interrupt,
            on_sever=self._peers.sever,
        )

    def _complain(self, error: TransportError) -> None:
        """Tell the coordinator of a lost peer; a stop was its own word."""
        if isinstance(error, PeerLostError) and error.rank is not None:
            lost = self._peers.chip_of(error.rank)
            _log.info("chip %s lost chip %s: %s", self._chip, lost, error)
            self._coordination.tell(self._status(is_ready=False, lost=[lost]))
        elif isinstance(error, StoppedError):
            self._coordination.note(self._status(is_ready=False))
        else:
            raise error

    def _news_after(self, number: int) -> News:
        """Return the news as soon as there is a later generation, or all is over."""
        return self._coordination.await_news(
            lambda news: (
                news.is_over or (news.generation is not None and news.generation.number > number)
            )
        )

    def _enter(self, generation: Generation) -> bool:
        """Become an up-to-date member of a generation; return False if it is over before."""
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
            self._complain(error)
            return False
        except CheckpointDamageError as error:
            _log.error("chip %s cannot restore a checkpoint: %s", self._chip, error)
            self._coordination.tell(self._status(is_ready=False))
            return False
        self.generation, self.state_version = generation, number
        self._coordination.tell(self._status(is_ready=True))
        self._peers.plan_ahead(self._replica.sum_sizes())
        return True

    def _get_up_to_date(self, go: Go, generation: Generation) -> None:
        """Give or take the state of the step that all take up."""
        is_holder = self._chip in go.holders
        if go.lost is not None:
            self._replica.went_back(go.step, go.generation)
        if go.restores and is_holder:
            self._replica.restore(go.step)
        if len(go.holders) == len(generation.seats):
            return
        state = self._peers.spread(self._replica.packed_state() if is_holder else None, go.holders)
        if not is_holder:
            self._replica.take_over(state)


def _is_answered(news: News, number: int) -> bool:
    is_later = news.generation is not None and news.generation.number > number
    return is_later or (news.go is not None and news.go.generation == number)

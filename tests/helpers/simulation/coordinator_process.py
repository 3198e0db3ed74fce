"""A coordinator in a simulated process: what `coordinator_server` does, without sockets."""

from collections.abc import Callable
from typing import Any

from meshmend.errors import MessageError
from meshmend.membership.coordinator import Coordinator
from meshmend.membership.events import Event, GenerationBegan
from meshmend.membership.history import CoordinatorRecord, History
from meshmend.membership.job import JobSpec
from meshmend.membership.messages import (
    Message,
    NewGeneration,
    Observe,
    decode_message,
    encode_message,
)
from meshmend.membership.record_file import RecordSaver, history_of, record_text
from simulation.disk import Disk
from simulation.event_loop import EventLoop, Process
from simulation.invariants import Invariants
from simulation.network import End, Network

COORDINATOR_HOST = 0
COORDINATOR_PORT = 1
_OBSERVER = 0  # the number of the connection of whoever started the job
_CODEC_SHARE = 0.03  # of the messages go through the codec, which takes as long as all else


class CoordinatorProcess(Process):
    """One coordinator, from its start to its death."""

    def __init__(
        self,
        events: EventLoop,
        network: Network,
        disk: Disk,
        spec: JobSpec,
        rules: Invariants,
        *,
        number: int = 1,
        on_superseded: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(events, COORDINATOR_HOST, f"coordinator {number}")
        self._rules = rules
        self._on_superseded = on_superseded
        self._ends: dict[int, End] = {}
        self._ready: dict[int, None] = {}
        self._callers: list[End] = []
        self._n_opened = _OBSERVER
        self._is_due = False
        self.is_done = False
        history = history_of(disk.record, spec.job) if disk.record is not None else None
        if disk.is_record_outdated or (history is not None and history.is_unknown):
            rules.allow_forks("the coordinator's record is spoilt or out of date")
        disk.is_history_unknown |= disk.is_record_spoilt
        self._disk, self._is_history_unknown = disk, disk.is_history_unknown
        self._saver = RecordSaver(lambda record: disk.write_record(record_text(record)))
        self.coordinator = Coordinator(
            spec,
            self,
            history=history or History(CoordinatorRecord(spec.job)),
            token=777_777 * number,  # of two that count alike, either may have the higher term
            keep=self._saver.save,
            term_on_disk=lambda: disk.term,
            on_event=self._observe,
        )
        self._network = network
        self.listen()
        self.coordinator.opened(_OBSERVER, "launcher", events.now)
        self.coordinator.received(_OBSERVER, Observe(spec.job), events.now)
        self.soon(self._work)

    def _observe(self, clock: float, event: Event) -> None:
        if self._is_history_unknown and isinstance(event, GenerationBegan):
            self._is_history_unknown = self._disk.is_history_unknown = False
            self._rules.begins_after_spoilt_record(event.step)
        self._rules.observe(clock, event)

    def listen(self) -> None:
        """Be the one that is called at the coordinator's address from now on."""
        self._network.listen(self, COORDINATOR_PORT, self._admit)

    def never_give_way(self) -> None:
        """Be cut off from the record, and deaf to all that workers say of later terms."""
        self._saver.save = lambda record: None  # type: ignore[method-assign]
        self.coordinator._give_way = lambda later, *, is_on_disk=False: False  # type: ignore[method-assign]

    def hear_observer(self, message: Message) -> None:
        """Let whoever started the job say something."""

        def hear() -> None:
            self.coordinator.received(_OBSERVER, message, self.events.now)
            self._wake()

        self.soon(hear)

    def send(self, connection: int, message: Message) -> None:
        """Send a message to a worker."""
        if connection == _OBSERVER or connection not in self._ends:
            return
        self.events.tell(self.name, "to %s: %s", self._ends[connection].peer.owner.name, message)
        if isinstance(message, NewGeneration):
            self._rules.formed(message.generation)
        self._ends[connection].send(through_codec(self.events, message))

    def hang_up(self, connection: int) -> None:
        """Close a connection."""
        if (end := self._ends.pop(connection, None)) is not None:
            end.close()

    def _admit(self, end: End, request: Any) -> None:
        self._callers.append(end)
        self._wake()

    def _wake(self) -> None:
        if not self._is_due:
            self._is_due = True
            self.soon(self._turn)

    def _turn(self) -> None:
        """Hear everyone who has something to say, then let the callers in, then decide."""
        self._is_due = False
        ready, self._ready = list(self._ready), {}
        self.events.random.shuffle(ready)
        for number in ready:
            self._serve(number)
        callers, self._callers = self._callers, []
        for end in callers:
            self._open(end)
        self.coordinator.tick(self.events.now)
        self._saver.retry()
        self.is_done = self.coordinator.is_done and not self.coordinator.is_superseded
        if self.coordinator.is_superseded:
            self.is_alive = False
            self._on_superseded()

    def _work(self) -> None:
        """Look at the clock as often as the coordinator wants."""
        self._turn()
        wakeup = self.coordinator.next_wakeup(self.events.now)
        self.soon(self._work, max(0.001, wakeup - self.events.now))

    def _open(self, end: End) -> None:
        self._n_opened += 1
        number = self._n_opened
        self._ends[number] = end

        def ready() -> None:
            self._ready[number] = None
            self._wake()

        end.on_ready = ready
        self.coordinator.opened(number, f"host {end.peer.owner.host}", self.events.now)
        if end.inbox or end.is_lost:
            ready()

    def _serve(self, number: int) -> None:
        end = self._ends.get(number)
        while end is not None and end.inbox and number in self._ends:
            self._hear(number, end.inbox.popleft())
        if end is not None and end.is_lost and number in self._ends:
            self.hang_up(number)
            self.coordinator.closed(number, "the other end closed the connection", self.events.now)

    def _hear(self, number: int, item: Message | bytes) -> None:
        now = self.events.now
        try:
            message = decode_message(item) if isinstance(item, bytes) else item
        except MessageError as error:
            self.coordinator.refuse(number, str(error), now)
            return
        self.coordinator.received(number, message, now)


_read: dict[int, tuple[Message, Message]] = {}  # by identity, the last message that went to all


def through_codec(events: EventLoop, message: Message) -> Message:
    """Return a message as the other end will read it; some of them really go through the codec.

    One that is sent to many goes through it once, as the coordinator encodes it once.
    """
    is_rare = isinstance(message, NewGeneration)
    if not is_rare and events.random.random() > _CODEC_SHARE:
        return message
    if id(message) in _read:
        return _read[id(message)][1]
    read = decode_message(encode_message(message))
    assert read == message, f"the codec makes {read} of {message}"
    _read.clear()
    _read[id(message)] = message, read
    return read

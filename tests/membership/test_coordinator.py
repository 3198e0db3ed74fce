"""A real coordinator on loopback: whom it takes in, whom it refuses, and what it learns again."""

import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest
from msgspec import msgpack, structs

from forked_script import run_program
from meshmend.config import Timing
from meshmend.errors import ChannelError, RefusedError
from meshmend.lab.testbed.bed import Testbed
from meshmend.membership import coordinator_client
from meshmend.membership.client import News, WorkerIdentity
from meshmend.membership.coordinator_client import CoordinatorClient
from meshmend.membership.coordinator_server import CoordinatorServer
from meshmend.membership.events import (
    ConnectionRefused,
    GenerationBegan,
    GenerationForming,
    WorkerArrived,
    WorkerSaved,
    WorkerStepped,
    WorkerTurnedAway,
)
from meshmend.membership.job import JobSpec
from meshmend.membership.messages import (
    COORDINATOR,
    FRESH,
    OBSERVER,
    VERSION,
    Alive,
    CutLink,
    Finish,
    Heartbeat,
    Hello,
    MendLink,
    Message,
    Observe,
    Observed,
    Over,
    Refused,
    Report,
    Status,
    StatusChanged,
    TryLater,
    TurnedAway,
    Wait,
    Welcome,
    encode_message,
    received_messages,
    send_message,
)
from meshmend.topology.failures import Chip, parse_link
from meshmend.topology.text import parse_mesh
from meshmend.transport.channel import Channel
from meshmend.transport.handshake import ConnectRequest, Deadline, dial
from meshmend.transport.listener import Address, Listener, listening
from testbeds import BANDWIDTH, exit_code, on_chip, require_testbed
from waiting import HANG_S, until

SECRET = b"known to all of us"
MESH = parse_mesh("2x4")
# On a busy machine a worker that lives may be silent for long, or late to come back.
PATIENT = Timing(doubt_s=0.05, gather_s=HANG_S, recall_s=HANG_S, heartbeat_timeout_s=HANG_S)
LONG_LINKS = Timing(link_timeout_s=HANG_S)
IMPATIENT = structs.replace(PATIENT, heartbeat_timeout_s=4.0)


Kind = TypeVar("Kind")


class Served:
    """A coordinator in a thread, and what it tells who watches."""

    def __init__(self, address: Address = ("127.0.0.1", 0), *, timing: Timing = PATIENT) -> None:
        listener = listening(*address)
        self.address: Address = listener.getsockname()[:2]
        self._server = CoordinatorServer(listener, SECRET, JobSpec("ours", MESH, (2, 2), timing))
        self._thread = threading.Thread(target=self._server.serve, daemon=True)
        self._thread.start()
        self._watcher = connected(self.address, OBSERVER)
        send_message(self._watcher, Observe("ours"))
        self.events: list[Observed] = []
        self._is_closed = False

    def until(self, kind: type[Kind], within_s: float = HANG_S) -> tuple[float, Kind]:
        """Return the first event of a kind, heard of since the last, and when it was."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            for message in received_messages(self._watcher):
                assert isinstance(message, Observed | Alive)
                if isinstance(message, Observed):
                    self.events.append(message)
            while self.events:
                observed = self.events.pop(0)
                if isinstance(observed.event, kind):
                    return observed.clock, observed.event
            time.sleep(0.005)
        raise AssertionError("it never happened")

    def event(self, kind: type[Kind]) -> Kind:
        """Return the first event of a kind, heard of since the last."""
        return self.until(kind)[1]

    def ask(self, message: Message) -> None:
        """Ask something of the coordinator, as an observer."""
        send_message(self._watcher, message)

    @property
    def n_workers(self) -> int:
        return len(self._server._coordinator._worker_of)

    @property
    def n_connections(self) -> int:
        return len(self._server._channels)

    @property
    def is_serving(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> None:
        """Return when it has served the job to its end."""
        self._thread.join(HANG_S)
        assert not self.is_serving

    def close(self) -> None:
        """Hang up on everyone, as a coordinator that is killed does; again does nothing."""
        if not self._is_closed:
            self._is_closed = True
            self._server.stop()
            self._thread.join(HANG_S)
            self._watcher.close()
            self._server.close()


def connected(address: Address, caller: int = 0) -> Channel:
    deadline = Deadline(time.monotonic() + HANG_S)
    return Channel(dial(address, SECRET, ConnectRequest(caller, COORDINATOR), deadline))


def hello(chip: Chip, *, status: Status | None = None, **changes: Any) -> Hello:
    """What a new worker says first."""
    said = Hello("ours", MESH.shape, chip, ("127.0.0.1", 1), status or Status())
    return structs.replace(said, **changes)


def answer_to(address: Address, *frames: bytes) -> list[Message]:
    """Return all that the coordinator answers to a stranger until it hangs up."""
    channel = connected(address)
    came: list[Message] = []
    deadline = time.monotonic() + HANG_S
    try:
        for frame in frames:
            channel.send(frame)
        while time.monotonic() < deadline:
            came += received_messages(channel)
            time.sleep(0.005)
    except ChannelError:
        return came
    finally:
        channel.close()
    raise AssertionError(f"it did not hang up, and said {came}")


class Hand:
    """A worker without training: enters every generation, and is up to date once told to begin."""

    def __init__(
        self,
        chip: Chip,
        coordinator: Address,
        secret: bytes = SECRET,
        timing: Timing = LONG_LINKS,
    ) -> None:
        seat = MESH.rank_of[chip]
        self.chip = chip
        self.client = CoordinatorClient(
            WorkerIdentity("ours", MESH.shape, chip, seat, coordinator, secret, timing)
        )
        self.severed: list[Chip] = []
        self.error: Exception | None = None
        self._is_closed = False
        self.status = Status()
        self._join()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    @property
    def news(self) -> News:
        return self.client.news

    def tell(self, **changes: Any) -> None:
        self.status = structs.replace(self.status, **changes)
        self.client.tell(self.status)

    def close(self) -> None:
        self._is_closed = True
        self.client.close()
        self._thread.join(HANG_S)

    def _join(self) -> None:
        self.client.join(
            ("127.0.0.1", 1000 + MESH.rank_of[self.chip]),
            self.status,
            on_change=lambda: None,
            on_sever=self.severed.append,
        )

    def _work(self) -> None:
        while not self._is_closed:
            news = self.client.news
            if isinstance(news.end, Refused):
                self.error = RefusedError(news.end.why)
                return
            if isinstance(news.end, TurnedAway):
                self.status = structs.replace(self.status, state_version=FRESH, ready=False)
                self._join()
            elif news.generation and news.generation.number > self.status.generation:
                self.tell(generation=news.generation.number, ready=True, lost=())
            elif (
                news.go
                and self.status.state_version != news.go.generation == self.status.generation
            ):
                self.tell(state_version=news.go.generation, step=max(news.go.step, 1))
            time.sleep(0.005)


@contextmanager
def hands(served: Served, chips: tuple[Chip, ...] = MESH.live) -> Iterator[dict[Chip, Hand]]:
    made = {chip: Hand(chip, served.address) for chip in chips}
    try:
        yield made
    finally:
        for hand in made.values():
            hand.close()


@pytest.fixture
def served() -> Iterator[Served]:
    """A coordinator that gives its workers all the time they need."""
    with closing(Served()) as coordinator:
        yield coordinator


@pytest.fixture
def impatient() -> Iterator[Served]:
    """A coordinator that soon takes a silent worker for dead."""
    with closing(Served(timing=IMPATIENT)) as coordinator:
        yield coordinator


def test_strangers_are_refused_and_change_nothing(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever shows the job tells it by the event; a line of the coordinator would say it twice."""
    with caplog.at_level(logging.WARNING), hands(served) as made:
        first = served.event(GenerationBegan)
        refused = [
            (encode_message(hello((0, 0), job="theirs")), "it belongs to job 'theirs', but this"),
            (encode_message(hello((0, 0), shape=(4, 4))), "not in this job's mesh"),
            (encode_message(hello((7, 7))), "not in this job's mesh"),
            (encode_message(StatusChanged(Status())), "an unexpected message 'status'"),
            (
                bytes([VERSION]) + msgpack.encode({"kind": "hello", "job": "ours"}),
                "a message is not valid: Object missing required field `shape`",
            ),
            (bytes([VERSION]) + msgpack.encode({"kind": "dance"}), "Invalid value 'dance'"),
            (b'{"v":2,"kind":"over"}', f"this end speaks version {VERSION} of the protocol"),
            (bytes([VERSION]) + b"\x91" * 60_000, "Expected `object`, got `array`"),
        ]
        for frame, why in refused:
            (answer,) = answer_to(served.address, frame)
            assert isinstance(answer, Refused)
            assert why in answer.why
            assert why in served.event(ConnectionRefused).why
            assert why not in caplog.text
        (answer,) = answer_to(served.address, encode_message(hello((0, 0))))
        assert answer == TryLater("chip (0, 0) has another worker", is_chip_taken=True)

        assert first.chips == MESH.live
        numbers = {hand.news.generation.number for hand in made.values() if hand.news.generation}
        assert numbers == {first.number}
        assert served.is_serving


def test_garbage_and_silence_on_the_port_harm_nobody(
    impatient: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), hands(impatient):
        impatient.event(GenerationBegan)
        stranger = socket.create_connection(impatient.address)
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: somewhere.example.org\r\nAccept: */*\r\n\r\n")
        with suppress(ConnectionResetError):
            assert stranger.recv(10) == b""
        stranger.close()
        channel = connected(impatient.address)  # knows the secret, and says nothing sensible
        channel.send(b"hello")
        silent = answer_to(impatient.address)
        channel.close()

        assert silent == [TryLater("it sent no hello in time")]
        assert "this is not a meshmend handshake: its first bytes are b'GET / HTTP'" in caplog.text
        assert impatient.is_serving


def test_a_worker_with_a_wrong_secret_is_refused_on_both_sides(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        hand = Hand((0, 0), served.address, b"something else")
        until(lambda: hand.error is not None and "refused a connection" in caplog.text)

    assert isinstance(hand.error, RefusedError)
    assert "does not know the secret" in str(hand.error)
    assert "the coordinator refused a connection" in caplog.text
    hand.close()


def test_a_worker_that_stops_beating_is_turned_away_and_may_come_back(
    impatient: Served, caplog: pytest.LogCaptureFixture
) -> None:
    others = tuple(chip for chip in MESH.live if chip != (0, 0))
    silent = connected(impatient.address)
    send_message(silent, hello((0, 0)))
    beats = threading.Event()

    def beat() -> None:
        while not beats.wait(0.05):
            send_message(silent, Heartbeat(0, 0))

    threading.Thread(target=beat, daemon=True).start()
    with hands(impatient, others):
        assert len(impatient.event(GenerationForming).chips) == 8
        beats.set()
        event = impatient.event(WorkerTurnedAway)

        assert (event.chip, "silent for" in event.why) == ((0, 0), True)
        assert "silent for" not in caplog.text
        assert impatient.event(GenerationBegan).chips == others
        with hands(impatient, ((0, 0),)):
            assert len(impatient.event(GenerationBegan).chips) == 8
    silent.close()


def test_a_coordinator_that_is_started_again_learns_the_job(served: Served) -> None:
    with hands(served) as made:
        before = served.event(GenerationBegan)
        served.close()
        again = Served(served.address)
        # Some may have come before there was anyone to watch.
        until(lambda: again.n_workers == MESH.n_live)
        assert again.n_workers == MESH.n_live
        time.sleep(0.1)
        numbers = {hand.news.generation.number for hand in made.values() if hand.news.generation}
        assert numbers == {before.number}  # nothing has changed, nobody is disturbed

        made[0, 3].close()
        after = again.event(GenerationBegan)
        assert after.chips == tuple(chip for chip in MESH.live if chip != (0, 3))
        assert after.number > before.number
        assert after.step == 1
        again.close()


def test_a_lost_link_is_cut_and_chips_that_it_cuts_off_wait_and_know_why(served: Served) -> None:
    with hands(served) as made:
        served.event(GenerationBegan)
        made[0, 1].tell(ready=False, lost=((0, 2),))
        event = served.event(GenerationBegan)
        assert (len(event.chips), event.cut) == (8, ("link:0,1-0,2",))
        time.sleep(0.1)
        made[1, 2].tell(ready=False, lost=((1, 1),))
        event = served.event(GenerationBegan)

        waiting = event.waiting
        assert len(event.chips) == len(waiting) == 4
        until(lambda: all(made[chip].news.wait for chip in waiting))
        for chip in waiting:
            assert made[chip].news.wait == "it is cut off from the largest live part of the mesh"
        served.ask(MendLink(parse_link("link:1,1-1,2")))
        assert len(served.event(GenerationBegan).chips) == 8


def test_a_cut_that_is_asked_for_reaches_both_ends(served: Served) -> None:
    with hands(served) as made:
        served.event(GenerationBegan)
        served.ask(CutLink(parse_link("link:0,1-0,2")))
        until(lambda: bool(made[0, 1].severed and made[0, 2].severed))

        assert made[0, 1].severed == [(0, 2)]
        assert made[0, 2].severed == [(0, 1)]


def test_half_a_board_waits_for_the_rest_of_it(served: Served) -> None:
    with hands(served) as made:
        served.event(GenerationBegan)
        for chip in ((0, 3), (1, 3)):
            made.pop(chip).close()
        while len(served.event(GenerationBegan).chips) != 6:
            pass
        with hands(served, ((0, 3),)) as back:
            served.event(WorkerArrived)
            until(lambda: bool(back[0, 3].news.wait))
            assert "its board must be complete, but (1, 3) is missing" in back[0, 3].news.wait
            with hands(served, ((1, 3),)):
                assert len(served.event(GenerationBegan).chips) == 8


def test_what_workers_report_reaches_who_watches(served: Served) -> None:
    with hands(served) as made:
        served.event(GenerationBegan)
        stepped = WorkerStepped((1, 1), 1, 1, 2.5, leads=True, first=True, loss=0.5, samples=8)
        made[1, 1].client.report(stepped)

        assert served.event(WorkerStepped) == stepped


def test_when_all_have_finished_all_are_told_and_it_ends(served: Served) -> None:
    with hands(served) as made:
        served.event(GenerationBegan)
        time.sleep(0.1)
        for hand in made.values():
            hand.tell(finished=True)
        for hand in made.values():
            hand.client.await_news(lambda news: news.is_over)
    served.wait()


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (StatusChanged(Status(generation=2, lost=((0, 3),))), "lost (0, 3), which is not its peer"),
        (StatusChanged(Status(generation=2, lost=((9, 9),))), "lost (9, 9), which is not its peer"),
        (hello((0, 3)), "an unexpected message 'hello'"),
        (Observe("ours"), "an unexpected message 'observe'"),
        (
            Report(WorkerStepped((0, 0), 1, 1, 2.5, leads=True, first=True, loss=None, samples=8)),
            "an unexpected message 'report'",
        ),
        (Finish(), "an unexpected message 'finish'"),
        (CutLink(parse_link("link:0,1-0,2")), "an unexpected message 'cut'"),
        (StatusChanged(Status(generation=1 << 30)), "it reports generation 1073741824, but"),
        (StatusChanged(Status(generation=1, state_version=9)), "it reports generation 9, but"),
    ],
    ids=[
        *("lost itself", "lost nobody", "two hellos", "turns observer", "reports for another"),
        *("ends the job", "cuts a link", "the last generation", "a state that nobody has"),
    ],
)
def test_a_worker_that_talks_nonsense_is_refused_and_its_chip_is_free_again(
    served: Served, message: Message, why: str
) -> None:
    with hands(served) as made:
        served.event(GenerationBegan)
        made.pop((0, 3)).close()
        served.event(GenerationBegan)
        frames = (encode_message(hello((0, 3))), encode_message(message))
        answer = answer_to(served.address, *frames)[-1]

        assert isinstance(answer, Refused)
        assert why in answer.why
        with hands(served, ((0, 3),)):
            while len(served.event(GenerationBegan).chips) != MESH.n_live:
                pass


def test_a_coordinator_gives_signs_of_life_to_workers_and_observers() -> None:
    served = Served(timing=IMPATIENT)
    lines = [connected(served.address), connected(served.address, OBSERVER)]
    send_message(lines[0], hello((0, 0)))
    send_message(lines[1], Observe("ours"))

    def has_heard(line: Channel) -> bool:
        send_message(lines[0], Heartbeat(0, 0))
        return any(isinstance(message, Alive) for message in received_messages(line))

    until(lambda: has_heard(lines[0]))
    until(lambda: has_heard(lines[1]))
    for line in lines:
        line.close()
    served.close()


def test_a_worker_stays_with_a_coordinator_that_is_held_up() -> None:
    calls: list[Channel] = []

    def admit(connection: socket.socket, request: ConnectRequest) -> None:
        calls.append(Channel(connection))
        send_message(calls[-1], Welcome(0.2, 45.0))  # and not a word after it; its kernel answers

    listener = Listener(
        listening("127.0.0.1"), SECRET, COORDINATOR, name="the coordinator", admit=admit
    )
    hand = Hand((0, 0), listener.address, timing=Timing(link_timeout_s=0.2))
    until(lambda: calls)
    time.sleep(1.0)

    assert len(calls) == 1
    hand.close()
    listener.close()
    calls[0].close()


def test_a_worker_whose_coordinator_cannot_be_reached_any_more_hangs_up_and_calls_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_testbed()
    monkeypatch.setenv("MESHMEND_TESTBED_DIR", str(tmp_path / "run"))
    said, calls = tmp_path / "said", tmp_path / "calls"

    def coordinate() -> None:
        def admit(connection: socket.socket, request: ConnectRequest) -> None:
            kept.append(connection)
            calls.write_text(str(len(kept)))

        kept: list[socket.socket] = []
        listener = Listener(
            listening(bed.address((0, 0))), SECRET, COORDINATOR, name="it", admit=admit
        )
        said.with_suffix(".new").write_text(str(listener.address[1]))
        said.with_suffix(".new").rename(said)
        until(lambda: len(kept) > 1)

    def work() -> None:
        until(said.exists)
        address = bed.address((0, 0)), int(said.read_text())
        Hand((0, 0), address, timing=Timing(link_timeout_s=1.0))
        time.sleep(HANG_S)

    with Testbed.up(parse_mesh("1x2"), link_bandwidth=BANDWIDTH) as bed:
        coordinator, _ = on_chip(bed, (0, 0), coordinate), on_chip(bed, (0, 1), work)
        until(calls.exists)
        while calls.read_text() == "1":  # on a busy machine once may be too short
            bed.drop((0, 1), (0, 0))
            time.sleep(3.0)
            bed.pass_again((0, 1), (0, 0))
            time.sleep(3.0)

        assert exit_code(coordinator) == 0


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (
            encode_message(hello((0, 3), status=Status(generation=1 << 40))),
            "Expected `int` <= 1073741824 - at `$.status.generation`",
        ),
        (
            encode_message(hello((0, 3), status=Status(1, True, 5, 10**6))),
            "it reports generation 5, but the highest so far is 2; "
            "start its worker again, without that state",
        ),
        (
            encode_message(hello((0, 3), status=Status(2, True, 2, 10**6))),
            "it holds the state of generation 2, but was not a member of it; "
            "start its worker again, without that state",
        ),
    ],
    ids=["generation 2^40", "a state that nobody has", "a state that others have"],
)
def test_a_newcomer_that_claims_too_much_is_refused_and_the_others_go_on(
    served: Served, frame: bytes, why: str
) -> None:
    with hands(served) as made:
        served.event(GenerationBegan)
        made.pop((0, 3)).close()
        assert served.event(GenerationBegan).number == 2
        (answer,) = answer_to(served.address, frame)

        assert isinstance(answer, Refused)
        assert why in answer.why
        with hands(served, ((0, 3),)):
            while (began := served.event(GenerationBegan)).chips != MESH.live:
                pass
            assert began.number < 10
            assert began.step == 1


def test_a_message_that_no_worker_needs_so_long_ends_its_connection_only(served: Served) -> None:
    with hands(served) as made:
        first = served.event(GenerationBegan)

        assert answer_to(served.address, b"[" * 200_000) == []
        assert served.n_workers == MESH.n_live
        assert made[0, 0].news.generation is not None
        assert made[0, 0].news.generation.number == first.number


def test_a_worker_that_never_stops_talking_holds_up_nobody(served: Served) -> None:
    stepped = WorkerStepped((0, 3), 1, 1, 2.5, leads=True, first=False, loss=0.5, samples=8)
    said: tuple[Message, ...] = (Heartbeat(0, 0), StatusChanged(Status()), Report(stepped))
    frames = [encode_message(message) for message in said]
    is_over = threading.Event()
    with hands(served) as made:
        served.event(GenerationBegan)
        for chip in ((0, 3), (1, 3)):
            made.pop(chip).close()
        while len(served.event(GenerationBegan).chips) != 6:
            pass
        flooder = connected(served.address)
        flooder.send(encode_message(hello((0, 3))))  # half a board: it waits
        flooding = threading.Thread(target=flood, args=(flooder, frames, is_over))
        flooding.start()
        served.event(WorkerStepped)
        made.pop((0, 0)).close()

        assert len(served.event(GenerationBegan).chips) == 5
        assert flooding.is_alive()
        is_over.set()
        flooding.join()
        flooder.close()


def flood(channel: Channel, frames: list[bytes], is_over: threading.Event) -> None:
    """Send frames over and over, as fast as the other end takes them."""
    while not is_over.is_set():
        if channel.has_unsent:
            channel.flush()
        else:
            for frame in frames * 100:
                channel.send(frame)


def test_an_observer_that_does_not_read_is_hung_up_on_before_memory_is_full(
    served: Served,
) -> None:
    with hands(served) as made:
        served.event(GenerationBegan)
        before = served.n_connections
        silent = connected(served.address, OBSERVER)
        send_message(silent, Observe("ours"))
        until(lambda: served.n_connections == before + 1)
        saved = WorkerSaved((1, 1), 1, 2.5, "x" * 60_000)
        for _ in range(800):  # 48 MB, and at most 32 MiB are kept for one that does not read
            made[1, 1].client.report(saved)
            assert served.event(WorkerSaved) == saved

        until(lambda: served.n_connections == before)
        assert served.n_workers == MESH.n_live
        silent.close()


def test_the_number_of_observers_has_a_limit(served: Served) -> None:
    watching = [connected(served.address, OBSERVER) for _ in range(31)]
    for observer in watching:
        send_message(observer, Observe("ours"))
    with hands(served, ((0, 0),)):  # its hello is heard after theirs
        served.event(WorkerArrived)
        (answer,) = answer_to(served.address, encode_message(Observe("ours")))

    assert answer == Refused("the coordinator already has 32 observers")
    for observer in watching:
        observer.close()


def test_one_that_beats_and_never_says_who_it_is_is_refused(impatient: Served) -> None:
    stranger = connected(impatient.address)
    came: list[Message] = []

    def hung_up() -> bool:
        try:
            send_message(stranger, Heartbeat(0, 0))
            came.extend(received_messages(stranger))
        except ChannelError:
            return True
        return bool(came)

    until(hung_up)
    stranger.close()
    assert impatient.is_serving


def test_connections_that_say_nothing_make_room_for_others(served: Served) -> None:
    silent = [connected(served.address) for _ in range(140)]

    until(lambda: served.n_connections <= 130)
    with hands(served, ((0, 0),)):
        assert served.event(WorkerArrived).chip == (0, 0)
    for stranger in silent:
        stranger.close()


def test_a_flood_of_refusals_is_told_in_few_events(served: Served) -> None:
    began = time.monotonic()
    for _ in range(60):
        answer_to(served.address, encode_message(hello((0, 0), job="theirs")))
    took_s = time.monotonic() - began

    with hands(served):  # whose arrival is told after all refusals
        events = list(iter(lambda: type(served.event(object)), WorkerArrived))
    assert 0 < events.count(ConnectionRefused) <= 10 * (took_s + 1)


def test_who_comes_when_all_is_over_is_told_so_and_is_not_waited_for(served: Served) -> None:
    with hands(served):
        served.event(GenerationBegan)
        served.ask(Finish())
        until(lambda: served._server._coordinator._membership.is_over)

        answers = answer_to(served.address, encode_message(hello((0, 0))))
        assert answers == [Wait("the job was over before it came back"), Over()]
    served.wait()


def test_a_second_worker_of_a_chip_asks_less_and_less_often_and_gives_up(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    identity = WorkerIdentity(
        "ours", MESH.shape, (0, 0), 0, served.address, SECRET, Timing(wait_for_chip_s=1.0)
    )
    with hands(served), caplog.at_level(logging.WARNING):
        served.event(GenerationBegan)
        second = CoordinatorClient(identity)
        second.join(("127.0.0.1", 1), Status(), on_change=lambda: None, on_sever=lambda chip: None)
        with pytest.raises(RefusedError, match=r"chip \(0, 0\) has another worker, still there"):
            second.await_news(lambda news: False)
        second.close()

        assert served.event(ConnectionRefused).why == "chip (0, 0) has another worker"
        assert caplog.text.count("has another worker") == 1


def test_a_new_worker_that_finds_no_coordinator_gives_up() -> None:
    listener = listening("127.0.0.1")
    address = listener.getsockname()[:2]
    listener.close()
    identity = WorkerIdentity(
        "ours", MESH.shape, (0, 0), 0, address, SECRET, Timing(join_timeout_s=0.3)
    )
    client = CoordinatorClient(identity)
    client.join(("127.0.0.1", 1), Status(), on_change=lambda: None, on_sever=lambda chip: None)

    with pytest.raises(
        RefusedError, match=r"chip \(0, 0\) found no coordinator at 127.*within 0.3 s"
    ):
        client.await_news(lambda news: False)
    client.close()


def test_a_worker_that_holds_a_state_gives_up_a_coordinator_that_stays_away() -> None:
    listener = listening("127.0.0.1")
    address = listener.getsockname()[:2]
    listener.close()
    timing = Timing(join_timeout_s=0.0, alone_s=1.0)
    client = CoordinatorClient(
        WorkerIdentity("ours", MESH.shape, (0, 0), 0, address, SECRET, timing)
    )
    held = Status(state_version=3, step=7)
    client.join(("127.0.0.1", 1), held, on_change=lambda: None, on_sever=lambda chip: None)

    with pytest.raises(
        RefusedError, match=r"no word from its coordinator at 127.*for 1 s: the job"
    ):
        client.await_news(lambda news: False)
    client.close()


def test_a_worker_says_once_that_its_coordinator_gives_no_word_and_once_that_it_does(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(coordinator_client, "_QUIET_S", 2.5)
    listener = listening("127.0.0.1")
    address = listener.getsockname()[:2]
    listener.close()
    with caplog.at_level(logging.WARNING):
        hand = Hand((0, 0), address)
        until(lambda: "no word" in caplog.text)
        served = Served(address)
        try:
            until(lambda: "again" in caplog.text, why=lambda: caplog.text)
        finally:
            hand.close()
            served.close()

    assert [record.getMessage() for record in caplog.records] == [
        f"chip (0, 0) has had no word from its coordinator at 127.0.0.1:{address[1]} for 2.5 s, "
        f"and gives up after 300 s: cannot connect to 127.0.0.1:{address[1]}: Connection refused",
        "chip (0, 0) has word from its coordinator again",
    ]


def test_a_caller_whom_a_coordinator_admits_while_it_ends_is_hung_up_on() -> None:
    listener = listening("127.0.0.1", 0)
    server = CoordinatorServer(listener, SECRET, JobSpec("ours", MESH, (2, 2)))
    deadline = Deadline(time.monotonic() + HANG_S)
    caller = dial(listener.getsockname(), SECRET, ConnectRequest(0, COORDINATOR), deadline)

    server.close()  # it has never served

    with caller:
        caller.settimeout(HANG_S)
        assert caller.recv(1) == b""


def test_a_coordinator_that_has_ended_may_be_stopped_again() -> None:
    mesh = parse_mesh("2x2")
    coordinator = CoordinatorServer(listening("127.0.0.1"), SECRET, JobSpec("ours", mesh, (1, 1)))
    coordinator.close()

    coordinator.stop()
    with pytest.raises(TimeoutError, match="does not answer"):
        coordinator.snapshot()


LIMITED = """
import resource, socket, time
from meshmend.membership.coordinator_server import CoordinatorServer
from meshmend.membership.job import JobSpec
from meshmend.topology.mesh import Mesh
from meshmend.transport.handshake import ConnectRequest, Deadline, dial
from meshmend.transport.listener import listening
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (200, MOST))
server = CoordinatorServer(listening("127.0.0.1"), b"ours", JobSpec("ours", Mesh((16, 16)), (1, 1)))
"""


def test_all_chips_may_call_in_one_moment_also_where_few_files_may_be_open() -> None:
    program = LIMITED.replace("MOST", "most") + (
        "address = server._listener.address\n"
        "callers = [socket.create_connection(address) for _ in range(255)]\n"
        "for caller in callers:\n"
        "    caller.sendall(b'mesh')  # the beginning of a hello\n"
        "deadline = Deadline(time.monotonic() + 60)\n"
        "dial(address, b'ours', ConnectRequest(1, 0xFFFFFFFF), deadline)  # the last\n"
        "def is_open(caller):\n"
        "    try:\n"
        "        return caller.recv(1, socket.MSG_DONTWAIT) != b''\n"
        "    except BlockingIOError:\n"
        "        return True\n"
        "print(sum(map(is_open, callers)))\n"
    )
    done = run_program(program)

    assert (done.stdout, done.stderr) == ("255\n", "")


def test_a_coordinator_of_more_chips_than_files_that_may_be_open_is_refused() -> None:
    done = run_program(LIMITED.replace("MOST", "200"))

    assert done.stderr.splitlines()[-1].endswith(
        "a coordinator of 256 chips needs 640 open files, but this machine allows a process 200; "
        "raise its hard limit (ulimit -Hn, or LimitNOFILE of a service)"
    )

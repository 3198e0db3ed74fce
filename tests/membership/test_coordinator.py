"""A real coordinator on loopback: whom it takes in, whom it refuses, and what it learns again."""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest

from meshmend.errors import ChannelError, RefusedError
from meshmend.membership.client import Member, News, WorkerIdentity
from meshmend.membership.coordinator import COORDINATOR, OBSERVER, Coordinator, JobSpec
from meshmend.membership.membership import FRESH, Status, Timing
from meshmend.net.channel import Channel, Message
from meshmend.net.handshake import ConnectRequest, Deadline, dial
from meshmend.net.listener import Address, listening
from meshmend.topology.failures import Chip
from meshmend.topology.text import parse_mesh
from waiting import HANG_S, until

SECRET = b"known to all of us"
MESH = parse_mesh("2x4")
# On a busy machine a worker that lives may be silent for long, or late to come back.
PATIENT = Timing(doubt_s=0.05, gather_s=HANG_S, recall_s=HANG_S, heartbeat_timeout_s=HANG_S)
IMPATIENT = replace(PATIENT, heartbeat_timeout_s=1.2)


class KilledError(Exception):
    """Ends the thread of a coordinator as a signal ends a process."""


def die(timeout_s: float) -> None:
    raise KilledError


class Served:
    """A coordinator in a thread, and what it tells who watches."""

    def __init__(self, address: Address = ("127.0.0.1", 0), *, timing: Timing = PATIENT) -> None:
        listener = listening(*address)
        self.address: Address = listener.getsockname()[:2]
        spec = JobSpec("ours", MESH, (2, 2), timing)
        self._coordinator = Coordinator(listener, SECRET, spec)
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self._watcher = line_to(self.address, OBSERVER)
        self._watcher.send({"kind": "observe", "job": "ours"})
        self.events: list[Message] = []
        self._is_closed = False

    def until(self, is_enough: Callable[[Message], bool]) -> Message:
        """Return the first event that is enough, heard of since the last."""
        found: list[Message] = []

        def is_heard() -> bool:
            self.events += self._watcher.receive()
            while self.events and not found:
                event = self.events.pop(0)
                found.extend([event] if is_enough(event) else [])
            return bool(found)

        until(is_heard)
        return found[0]

    def until_event(self, kind: str) -> Message:
        return self.until(lambda event: event["event"] == kind)

    def until_generation_of(self, chips: tuple[Chip, ...]) -> Message:
        return self.until(
            lambda event: event["event"] == "generation" and chips_of(event) == list(chips)
        )

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
            setattr(self._coordinator, "_handle", die)  # noqa: B010  # mypy forbids it otherwise
            os.eventfd_write(self._coordinator._wake_fd, 1)
            self._thread.join(HANG_S)
            self._watcher.close()
            self._coordinator.close()

    def _serve(self) -> None:
        with suppress(KilledError):
            self._coordinator.serve()


def line_to(address: Address, caller: int = 0, secret: bytes = SECRET) -> Channel:
    deadline = Deadline(time.monotonic() + HANG_S)
    return Channel(dial(address, secret, ConnectRequest(caller, COORDINATOR), deadline))


def hello(chip: Chip, **changes: Any) -> Message:
    """What a new worker says first."""
    return {
        "kind": "hello",
        "job": "ours",
        "shape": MESH.shape,
        "chip": chip,
        "address": ("127.0.0.1", 1),
        "memory": None,
        "generation": 0,
        "ready": False,
        "state_version": FRESH,
        "step": 0,
        "finished": False,
        "lost": (),
        **changes,
    }


def answer_to(address: Address, *messages: Message) -> list[Message]:
    """Return all that the coordinator answers to a stranger until it hangs up."""
    channel = line_to(address)
    came: list[Message] = []

    def has_hung_up() -> bool:
        try:
            came.extend(channel.receive())
        except ChannelError:
            return True
        return False

    with closing(channel):
        with suppress(ChannelError):  # it may hang up before it was told all
            for message in messages:
                channel.send(message)
        until(has_hung_up, why=lambda: f"it did not hang up, and said {came}")
    return came


class Hand:
    """A worker without training: enters every generation, and is up to date once told to begin."""

    def __init__(self, chip: Chip, coordinator: Address, secret: bytes = SECRET) -> None:
        seat = MESH.rank_of[chip]
        self.chip = chip
        self.member = Member(WorkerIdentity("ours", MESH.shape, chip, seat, coordinator, secret))
        self.severed: list[Chip] = []
        self.error: Exception | None = None
        self._is_closed = False
        self.status = Status()
        self._join()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    @property
    def news(self) -> News:
        return self.member.news

    def tell(self, **changes: Any) -> None:
        self.status = replace(self.status, **changes)
        self.member.tell(self.status)

    def close(self) -> None:
        self._is_closed = True
        self.member.close()
        self._thread.join(HANG_S)

    def _join(self) -> None:
        self.member.join(
            ("127.0.0.1", 1000 + MESH.rank_of[self.chip]),
            self.status,
            on_change=lambda: None,
            on_sever=self.severed.append,
        )

    def _work(self) -> None:
        while not self._is_closed:
            news = self.member.news
            if news.refused:
                self.error = RefusedError(news.refused)
                return
            if news.turned_away:
                self.status = replace(self.status, state_version=FRESH, ready=False)
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


def until_all_hold(made: dict[Chip, Hand], generation: Message) -> None:
    """Wait until all workers have the state of a generation: from then on they say nothing."""
    number = generation["number"]
    until(lambda: all(hand.status.state_version == number for hand in made.values()))


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


def chips_of(event: Message) -> list[Chip]:
    return [tuple(chip) for chip in event["chips"]]


def test_strangers_are_refused_and_change_nothing(
    served: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), hands(served) as made:
        first = served.until_event("generation")
        refused = [
            (hello((0, 0), job="theirs"), "it belongs to job 'theirs', this is 'ours'"),
            (hello((0, 0), shape=(4, 4)), r"not of this mesh"),
            (hello((7, 7)), "not of this mesh"),
            ({"kind": "status"}, "an unexpected message 'status'"),
            ({"kind": "hello", "job": "ours"}, "a message that makes no sense"),
            ({**hello((0, 0)), "chip": 7}, "a message that makes no sense"),
        ]
        for message, why in refused:
            (answer,) = answer_to(served.address, message)
            assert answer["kind"] == "refused"
            assert why in answer["why"]
            assert why in caplog.text
        (answer,) = answer_to(served.address, hello((0, 0)))
        assert answer == {"kind": "later", "why": "chip (0, 0) is taken by another worker"}

        assert chips_of(first) == list(MESH.live)
        numbers = {hand.news.generation.number for hand in made.values() if hand.news.generation}
        assert numbers == {first["number"]}
        assert served.is_serving


def test_garbage_and_silence_on_the_port_harm_nobody(
    impatient: Served, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), hands(impatient):
        impatient.until_event("generation")
        stranger = socket.create_connection(impatient.address)
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: somewhere.example.org\r\nAccept: */*\r\n\r\n")
        with suppress(ConnectionResetError):
            assert stranger.recv(10) == b""
        stranger.close()
        channel = line_to(impatient.address)  # knows the secret, and says nothing sensible
        channel._connection.sendall(b"\x00\x00\x00\x05hello")
        silent = answer_to(impatient.address)
        channel.close()

        assert silent == [{"kind": "refused", "why": "it does not say who it is"}]
        assert "a stranger, whose first bytes are b'GET / HTTP'" in caplog.text
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


def test_a_worker_that_stops_beating_is_turned_away_and_may_come_back(impatient: Served) -> None:
    others = tuple(chip for chip in MESH.live if chip != (0, 0))
    silent = line_to(impatient.address)
    silent.send(hello((0, 0)))
    beats = threading.Event()

    def beat() -> None:
        while not beats.wait(0.05):
            silent.send({"kind": "beat", "turn": (0, 0)})

    threading.Thread(target=beat, daemon=True).start()
    # On a busy machine others may be turned away too, and come back by themselves.
    with hands(impatient, others):
        impatient.until(lambda event: event["event"] == "forming" and len(event["chips"]) == 8)
        beats.set()
        event = impatient.until(
            lambda event: event["event"] == "turned away" and tuple(event["chip"]) == (0, 0)
        )
        assert "silent for" in event["why"]
        impatient.until_generation_of(others)
        with hands(impatient, ((0, 0),)):
            impatient.until_generation_of(MESH.live)
    silent.close()


def test_a_coordinator_that_is_started_again_learns_the_job(served: Served) -> None:
    with hands(served) as made:
        before = served.until_event("generation")
        served.close()
        again = Served(served.address)
        # Some may have come before there was anyone to watch.
        until(lambda: len(again._coordinator._line_of) == MESH.n_live)
        numbers = {hand.news.generation.number for hand in made.values() if hand.news.generation}
        assert numbers == {before["number"]}  # nothing has changed, nobody is disturbed

        made[0, 3].close()
        after = again.until_event("generation")
        assert chips_of(after) == [chip for chip in MESH.live if chip != (0, 3)]
        assert after["number"] > before["number"]
        assert after["step"] == 1
        again.close()


def test_a_lost_link_is_cut_and_chips_that_it_cuts_off_wait_and_know_why(served: Served) -> None:
    with hands(served) as made:
        until_all_hold(made, served.until_event("generation"))
        made[0, 1].tell(ready=False, lost=((0, 2),))
        event = served.until_event("generation")
        assert (len(chips_of(event)), event["cut"]) == (8, ["link:0,1-0,2"])
        until_all_hold(made, event)
        made[1, 2].tell(ready=False, lost=((1, 1),))
        event = served.until_event("generation")

        waiting = [tuple(chip) for chip in event["waiting"]]
        assert len(chips_of(event)) == len(waiting) == 4
        until(lambda: all(made[chip].news.wait for chip in waiting))
        for chip in waiting:
            assert made[chip].news.wait == "it is cut off from the largest live part of the mesh"
        served._watcher.send({"kind": "mend", "link": "link:1,1-1,2"})
        assert len(chips_of(served.until_event("generation"))) == 8


def test_a_cut_that_is_asked_for_reaches_both_ends(served: Served) -> None:
    with hands(served) as made:
        served.until_event("generation")
        served._watcher.send({"kind": "cut", "link": "link:0,1-0,2"})
        until(lambda: bool(made[0, 1].severed and made[0, 2].severed))

        assert made[0, 1].severed == [(0, 2)]
        assert made[0, 2].severed == [(0, 1)]


def test_half_a_board_waits_for_the_rest_of_it(served: Served) -> None:
    with hands(served) as made:
        served.until_event("generation")
        for chip in ((0, 3), (1, 3)):
            made.pop(chip).close()
        while len(chips_of(served.until_event("generation"))) != 6:
            pass
        with hands(served, ((0, 3),)) as back:
            served.until_event("arrived")
            until(lambda: bool(back[0, 3].news.wait))
            assert "its board joins whole, and (1, 3) is missing" in back[0, 3].news.wait
            with hands(served, ((1, 3),)):
                assert len(chips_of(served.until_event("generation"))) == 8


def test_what_workers_report_reaches_who_watches(served: Served) -> None:
    with hands(served) as made:
        served.until_event("generation")
        made[1, 1].member.report(step=1, loss=0.5)
        event = served.until_event("done")

        assert (tuple(event["chip"]), event["step"], event["loss"]) == ((1, 1), 1, 0.5)


def test_when_all_have_finished_all_are_told_and_it_ends(served: Served) -> None:
    with hands(served) as made:
        until_all_hold(made, served.until_event("generation"))
        for hand in made.values():
            hand.tell(finished=True)
        for hand in made.values():
            hand.member.await_news(lambda news: news.is_over)
    served.wait()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize(
    "message",
    [
        hello((0, 3), memory={"number": 1, "seats": [], "cut": ["nonsense"], "mended": []}),
        hello((0, 3), memory={"number": 1, "seats": [], "cut": ["0,1"], "mended": []}),
        hello((0, 3), generation=float("inf")),
        {**hello((0, 3), generation=2, lost=[(0, 3)]), "kind": "status"},
    ],
    ids=["no link", "a chip for a link", "no number", "lost itself"],
)
def test_a_worker_that_talks_nonsense_does_not_end_the_coordinator(
    served: Served, message: Message
) -> None:
    with hands(served) as made:
        served.until_event("generation")
        made.pop((0, 3)).close()
        served.until_event("generation")
        before = [] if message["kind"] == "hello" else [hello((0, 3))]
        answers = answer_to(served.address, *before, message)

        assert answers[-1]["kind"] == "refused"
        assert served.is_serving

"""Asking a job for its status: the coordinator, else its workers, over real connections."""

import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from dataclasses import replace

import pytest

from meshmend.errors import InputError, NobodyAnswersError
from meshmend.membership.generation import Generation, Seat
from meshmend.membership.job_status import JobPhase, JobStatus, WorkerSummary
from meshmend.membership.messages import (
    ASKER,
    AskStatus,
    Heartbeat,
    Message,
    Refused,
    StatusAnswer,
    received_messages,
    send_message,
)
from meshmend.membership.status_client import StatusQuestion, ask_job
from meshmend.membership.status_responder import StatusResponder
from meshmend.topology.text import parse_mesh
from meshmend.transport.channel import Channel
from meshmend.transport.event_fd import clear
from meshmend.transport.handshake import ANYONE, ConnectRequest, Deadline, dial
from meshmend.transport.listener import Address
from meshmend.transport.peer_connections import PeerConnections
from served_coordinator import served_coordinator
from waiting import HANG_S, until

SECRET = b"known to all of us"
MESH = parse_mesh("2x2")


def coordinator() -> AbstractContextManager[Address]:
    """Return the address of a coordinator without workers."""
    return served_coordinator("2x2", SECRET)


class FakeWorker:
    """What a worker's listener does with those who ask; `seats` are those of its generation."""

    def __init__(self, rank: int, stop_fd: int) -> None:
        self.chip = MESH.live[rank]
        self.seats: tuple[Seat, ...] = ()
        self.step = 7
        self.questions: list[AskStatus] = []
        labels = [f"chip {chip}" for chip in MESH.live]
        self.connections = PeerConnections(rank, labels, SECRET, bind="127.0.0.1", stop_fd=stop_fd)
        self.connections.on_asker = StatusResponder(self.answer).take
        self.address = self.connections.address

    def answer(self, question: AskStatus) -> Message:
        self.questions.append(question)
        if question.job not in (None, "ours"):
            return Refused(f"no job {question.job}")
        summary = WorkerSummary(
            self.chip, self.address, 3, self.step, begun=self.step + 1, still_s=5.0
        )
        generation = None if question.is_brief else Generation(3, self.seats)
        return StatusAnswer(
            JobStatus(
                "ours",
                "0.1",
                MESH.shape,
                JobPhase.TRAINING,
                1.0,
                self.step,
                answered_by=self.chip,
                generation=generation,
                workers=(summary,),
            )
        )

    def close(self) -> None:
        self.connections.close()


@pytest.fixture
def workers() -> Iterator[list[FakeWorker]]:
    """Four workers that know each other."""
    stop_fd = os.eventfd(0, os.EFD_NONBLOCK)
    with ExitStack() as stack:
        made = [stack.enter_context(closing(FakeWorker(rank, stop_fd))) for rank in range(4)]
        seats = tuple(Seat(worker.chip, worker.address, 1) for worker in made)
        for worker in made:
            worker.seats = seats
        yield made
    clear(stop_fd)
    os.close(stop_fd)


def nobody() -> Address:
    """Return an address at which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address: Address = server.getsockname()[:2]
        return address


@contextmanager
def hung() -> Iterator[Address]:
    """Yield an address that accepts connections and says nothing, as a stopped process does."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[:2]


@contextmanager
def web_server() -> Iterator[Address]:
    """Yield the address of something else, which answers whatever it is told with an error."""

    def serve() -> None:
        with suppress(OSError):
            while True:
                caller, _ = server.accept()
                with caller:
                    caller.recv(1)
                    caller.sendall(b"HTTP/1.1 400 Bad Request\r\nConnection: close\r\n\r\n" * 2)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield server.getsockname()[:2]
        server.shutdown(socket.SHUT_RDWR)
        thread.join(HANG_S)


def asked(where: Address | None, *others: Address, job: str | None = None) -> StatusQuestion:
    return StatusQuestion(where, others, SECRET, job, timeout_s=120.0, gather_s=120.0)


def test_a_coordinator_that_lives_answers() -> None:
    with coordinator() as address:
        status = ask_job(asked(address, job="ours"))

        assert (status.answered_by, status.job, status.phase) == (None, "ours", JobPhase.GATHERING)


def test_a_job_of_another_name_is_refused() -> None:
    with coordinator() as address:
        match = "refuses to answer: it belongs to job 'theirs', but this coordinator serves"
        with pytest.raises(InputError, match=match):
            ask_job(asked(address, job="theirs"))


def test_a_dead_coordinator_costs_nothing_where_a_worker_is_known(
    workers: list[FakeWorker],
) -> None:
    workers[2].step = 6

    status = ask_job(asked(nobody(), workers[1].address))

    assert status.answered_by == workers[1].chip
    assert [each.chip for each in status.workers] == list(MESH.live)
    (wait,) = status.waits
    assert wait.awaited == (workers[2].chip,)
    assert [each.questions[-1].is_brief for each in workers] == [True, False, True, True]


def test_a_coordinator_that_hangs_is_not_waited_for(workers: list[FakeWorker]) -> None:
    with hung() as address:
        status = ask_job(asked(address, nobody(), workers[0].address))

        assert status.answered_by == workers[0].chip


def test_workers_that_died_are_left_out(workers: list[FakeWorker]) -> None:
    workers[3].close()

    status = ask_job(asked(None, workers[3].address, workers[0].address))

    assert [each.chip for each in status.workers] == list(MESH.live[:3])


def test_something_else_at_the_address_is_named_and_workers_are_asked(
    workers: list[FakeWorker],
) -> None:
    with web_server() as address:
        match = f"nobody answers: what listens at 127.0.0.1:{address[1]} does not know the job's"
        with pytest.raises(NobodyAnswersError, match=match):
            ask_job(asked(address))
        assert ask_job(asked(address, workers[0].address)).answered_by == workers[0].chip


def test_who_does_not_know_the_secret_gets_nothing(workers: list[FakeWorker]) -> None:
    with coordinator() as address:
        stranger = replace(asked(address, workers[0].address), secret=b"some other secret")

        with pytest.raises(NobodyAnswersError, match="does not know the job's secret"):
            ask_job(stranger)
    assert workers[0].questions == []


def test_nobody_at_all_is_said_with_the_reason() -> None:
    where = nobody()

    with pytest.raises(NobodyAnswersError, match=f"127.0.0.1:{where[1]}: Connection refused"):
        ask_job(asked(where))
    # Whichever sees first that the time is over, the handshake or who asks, says so.
    too_late = r"within 0\.2 s|the other end does not answer"
    with hung() as silent, pytest.raises(NobodyAnswersError, match=too_late):
        ask_job(replace(asked(silent), timeout_s=0.2))
    with pytest.raises(NobodyAnswersError, match=r"no-such-host\.invalid:7000: "):
        ask_job(asked(("no-such-host.invalid", 7000)))


def asker(address: Address) -> Channel:
    """Connect as one who asks."""
    deadline = Deadline(time.monotonic() + HANG_S)
    return Channel(dial(address, SECRET, ConnectRequest(ASKER, ANYONE), deadline))


@pytest.mark.parametrize("of", ["coordinator", "worker"])
def test_hundreds_of_questions_at_once_are_answered(of: str, workers: list[FakeWorker]) -> None:
    """Forty at a time, more than may be connected at once; each asks again when it is cut off."""
    with coordinator() as address:
        question = asked(address) if of == "coordinator" else asked(None, workers[0].address)
        answers: list[JobStatus] = []

        def ask() -> None:
            for _ in range(10):
                answers.append(ask_job(question))

        askers = [threading.Thread(target=ask) for _ in range(40)]
        for each in askers:
            each.start()
        for each in askers:
            each.join(HANG_S)

        assert len(answers) == 400


@pytest.mark.parametrize("of", ["coordinator", "worker"])
def test_askers_that_never_read_or_never_ask_hold_up_nobody(
    of: str, workers: list[FakeWorker]
) -> None:
    with coordinator() as served, ExitStack() as stack:
        address = served if of == "coordinator" else workers[0].address
        for number in range(80):
            channel = stack.enter_context(closing(asker(address)))
            if number % 2:
                send_message(channel, AskStatus())

        assert ask_job(asked(address)).job == "ours"


def test_a_worker_refuses_what_is_no_question(workers: list[FakeWorker]) -> None:
    with closing(asker(workers[0].address)) as channel:
        send_message(channel, Heartbeat(1, 1))
        came: list[Message] = []

        def has_come() -> bool:
            came.extend(received_messages(channel))
            return bool(came)

        until(has_come)
        assert isinstance(came[0], Refused)


def test_the_thread_that_answers_ends_when_nobody_asks(workers: list[FakeWorker]) -> None:
    ask_job(asked(None, workers[0].address))

    until(lambda: all(each.name != "meshmend-status" for each in threading.enumerate()))


def test_a_rank_without_anyone_to_answer_refuses_askers() -> None:
    stop_fd = os.eventfd(0, os.EFD_NONBLOCK)
    with closing(
        PeerConnections(0, ["rank 0", "rank 1"], SECRET, bind="127.0.0.1", stop_fd=stop_fd)
    ) as rank:
        with pytest.raises(NobodyAnswersError):
            ask_job(replace(asked(rank.address), timeout_s=0.5))
        assert rank.choose_old(1, 0), "a question is no call of a rank"
    os.close(stop_fd)

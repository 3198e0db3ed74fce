"""Two histories never step at once, over real sockets: leases, and coordinators of later terms."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from msgspec import structs

from meshmend.config import Timing
from meshmend.errors import InputError
from meshmend.membership.client import WorkerIdentity
from meshmend.membership.coordinator_client import CoordinatorClient
from meshmend.membership.coordinator_server import CoordinatorServer
from meshmend.membership.events import CoordinatorSuperseded, Event, HistoryDropped
from meshmend.membership.generation import Generation, Seat, term_after
from meshmend.membership.job import JobSpec
from meshmend.membership.messages import COORDINATOR, Hello, Status, send_message
from meshmend.membership.record_file import RecordFile
from meshmend.topology.text import parse_mesh
from meshmend.transport.channel import Channel
from meshmend.transport.handshake import ConnectRequest, Deadline, dial
from meshmend.transport.listener import Address, listening
from ports import free_port
from waiting import HANG_S, until

SECRET = b"known to all of us"
TIMING = Timing(gather_s=HANG_S, recall_s=0.1, heartbeat_timeout_s=HANG_S, holder_timeout_s=0.8)
SPEC = JobSpec("ours", parse_mesh("1x1"), (1, 1), TIMING)


class Served:
    """A coordinator in a thread."""

    def __init__(self, address: Address = ("127.0.0.1", 0), record: Path | None = None) -> None:
        listener = listening(*address)
        self.address: Address = listener.getsockname()[:2]
        self.events: list[Event] = []
        self.server = CoordinatorServer(
            listener,
            SECRET,
            SPEC,
            record_file=record,
            on_event=lambda clock, event: self.events.append(event),
        )
        self.thread = threading.Thread(target=self.server.serve, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.stop()
        self.thread.join(HANG_S)
        self.server.close()


@contextmanager
def client_of(address: Address) -> Iterator[CoordinatorClient]:
    """Yield the connection of a worker that is up to date in the first generation."""
    client = CoordinatorClient(WorkerIdentity("ours", (1, 1), (0, 0), 0, address, SECRET))
    client.join(("127.0.0.1", 9), Status(), on_change=lambda: None, on_sever=lambda chip: None)
    try:
        generation = client.await_news(lambda news: news.generation is not None).generation
        assert generation is not None
        number, term = generation.number, generation.term
        client.mark(number, 0)
        client.tell(Status(number, ready=True))
        client.await_news(lambda news: news.go is not None)
        client.tell(Status(number, ready=True, state_version=number, step=7, term=term))
        yield client
    finally:
        client.close()


def test_a_worker_without_word_from_its_coordinator_stops_until_there_is_one_again(
    tmp_path: Path,
) -> None:
    """Its connection may be dead or its coordinator: it counts from what it sent itself."""
    first = Served(("127.0.0.1", free_port()), tmp_path / "record.json")
    with client_of(first.address) as client:
        number = client.status.generation
        client.await_lease(number)
        first.close()
        has_lease = client._client.has_lease
        until(lambda: not has_lease(number))
        waiter = threading.Thread(target=client.await_lease, args=(number,), daemon=True)
        waiter.start()
        waiter.join(0.2)
        is_stopped = waiter.is_alive()
        second = Served(first.address, tmp_path / "record.json")
        waiter.join(HANG_S)

        assert is_stopped
        assert not waiter.is_alive(), "it goes on, in the same generation"
        second.close()


def test_a_coordinator_gives_way_to_one_that_is_started_with_its_record(tmp_path: Path) -> None:
    first = Served(record=tmp_path / "record.json")
    with client_of(first.address):
        second = Served(record=tmp_path / "record.json")
        first.thread.join(HANG_S)

        assert first.server.is_superseded
        assert any(isinstance(event, CoordinatorSuperseded) for event in first.events)
        later = next(each for each in first.events if isinstance(each, CoordinatorSuperseded)).later
        assert RecordFile(tmp_path / "record.json").term() == later
    first.server.close()
    second.close()


def test_steps_that_another_coordinator_led_are_dropped_with_an_event() -> None:
    """Neither had the other's record; this one has begun its own history."""
    served, address = Served(), ("127.0.0.1", 10)
    with client_of(served.address) as client:
        theirs = client.status.term - 1
    status = Status(1, state_version=1, step=433, term=theirs)
    memory = Generation(1, (Seat((0, 0), address, 1),), term=theirs)
    deadline = Deadline(time.monotonic() + HANG_S, link_timeout_s=HANG_S)
    line = Channel(dial(served.address, SECRET, ConnectRequest(0, COORDINATOR), deadline))

    send_message(line, Hello("ours", (1, 1), (0, 0), address, status, memory, term=theirs))

    until(lambda: HistoryDropped(theirs, 433, (0, 0)) in served.events)
    line.close()
    served.close()


def test_terms_grow_and_those_of_two_coordinators_that_count_alike_differ() -> None:
    assert term_after(0, 5) < term_after(0, 6) < term_after(term_after(0, 6), 0)


def test_a_holder_timeout_that_leaves_no_time_to_stop_is_refused() -> None:
    with pytest.raises(InputError, match=r"holder timeout of at least 0\.2 s, but got 0"):
        Timing(holder_timeout_s=0.0)


def test_a_job_that_is_over_is_over_though_its_record_cannot_be_deleted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = tmp_path / "record.json"
    served = Served(record=record)
    with client_of(served.address) as client:
        record.unlink()
        record.mkdir()
        client.tell(structs.replace(client.status, finished=True))
        client.await_news(lambda news: news.is_over)
    served.thread.join(HANG_S)
    caplog.clear()

    served.server.close()

    (line,) = [each.getMessage() for each in caplog.records]
    assert "the job is over, but its record" in line
    assert "Is a directory; delete it, or begin the next job with --new" in line

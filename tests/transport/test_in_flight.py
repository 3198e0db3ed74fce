"""Several runs in flight on the socket transport: they do not wait for each other, and fail as one.

Ranks are threads of this process. They start runs in one order, but each at its own pace.
"""

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from local_ranks import connected, programs_of, run_all, task_for, together
from meshmend.errors import (
    InputError,
    MismatchError,
    PeerLostError,
    StalledError,
    StoppedError,
    TransportError,
)
from meshmend.schedule.algorithms import algorithm
from meshmend.schedule.spanning import tree_sum
from meshmend.schedule.table import Collective
from meshmend.topology.text import parse_mesh
from meshmend.transport import event_loop, in_flight
from meshmend.transport.event_loop import empty_loop, next_run
from meshmend.transport.in_flight import PendingRun
from meshmend.transport.sockets import SocketTransport
from meshmend.transport.tasks import RankProgram
from waiting import HANG_S, until

HOLE = parse_mesh("4x4", fail=["2x2@0,2"])
SQUARE = parse_mesh("2x2")
LINE = parse_mesh("1x3")
Bed = tuple[list[RankProgram], list[SocketTransport]]

Alarm = Callable[[Callable[[], object]], None]

# What one rank does between two starts: waits for the run so many before this one (None: for none),
# and sleeps.
Pauses = list[tuple[int | None, float]]


@pytest.fixture(scope="module", params=["ring-1d", "ft-two-d", "trees", "one-tree"])
def bed(request: pytest.FixtureRequest) -> Iterator[Bed]:
    if request.param == "one-tree":
        schedule = tree_sum(LINE)
    else:
        schedule = algorithm(request.param).build(HOLE, Collective.ALLREDUCE)
    programs = programs_of(schedule)
    with connected(programs) as made:
        yield programs, made


@contextmanager
def squared(*, reports_failures: bool = False, link_timeout_s: float = 0.0) -> Iterator[Bed]:
    programs = programs_of(algorithm("ring-1d").build(SQUARE, Collective.ALLREDUCE))
    with connected(
        programs, reports_failures=reports_failures, link_timeout_s=link_timeout_s
    ) as made:
        yield programs, made


def start(bed: Bed, rank: int, array: np.ndarray, *, n_slices: int = 1) -> PendingRun:
    programs, made = bed
    task = task_for(programs[rank], array, n_slices=n_slices)
    return made[rank].start(task, array.view(np.uint8))


def n_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def errors_of(runs: list[PendingRun]) -> list[TransportError | None]:
    found: list[TransportError | None] = []
    for run in runs:
        try:
            run.wait()
        except TransportError as error:
            found.append(error)
        else:
            found.append(None)
    return found


@st.composite
def paces(draw: st.DrawFn) -> tuple[list[tuple[int, int]], list[Pauses]]:
    """Draw the sizes and slices of some runs, and the pauses of 12 ranks before and after each."""
    n_runs = draw(st.integers(2, 8))
    # The largest is more than the kernel keeps for a connection, so ranks also block each other.
    sizes = st.sampled_from([0, 1, 40, 1000, 30_000, 400_000])
    runs = draw(st.lists(st.tuples(sizes, st.integers(1, 4)), min_size=n_runs, max_size=n_runs))
    pause = st.tuples(st.none() | st.integers(0, 3), st.sampled_from([0.0, 0.0, 0.0, 0.001, 0.01]))
    pauses = st.lists(pause, min_size=n_runs, max_size=n_runs)
    return runs, draw(st.lists(pauses, min_size=12, max_size=12))


@settings(max_examples=25, deadline=None)
@given(paces())
def test_runs_end_with_the_right_sums_whenever_each_rank_starts_and_waits_for_them(
    bed: Bed, drawn: tuple[list[tuple[int, int]], list[Pauses]]
) -> None:
    """One rank may wait for a run before it starts the next, while another starts them all."""
    runs, pauses = drawn
    _, made = bed
    arrays = [
        [np.full(size, rank + 1, dtype=np.int64) for size, _ in runs] for rank in range(len(made))
    ]

    def work(rank: int) -> None:
        pending: list[PendingRun] = []
        for array, (_, n_slices), (before, sleep_s) in zip(
            arrays[rank], runs, pauses[rank], strict=True
        ):
            pending.append(start(bed, rank, array, n_slices=n_slices))
            if before is not None:
                pending[max(0, len(pending) - 1 - before)].wait()
            time.sleep(sleep_s)
        for run in pending:
            run.wait()

    assert together(work, len(made)) == [None] * len(made)
    right = len(made) * (len(made) + 1) // 2
    assert all((array == right).all() for each in arrays for array in each)


def test_a_rank_that_waits_before_it_starts_the_next_is_not_blocked_by_one_that_does_not(
    bed: Bed,
) -> None:
    """A frame of the second run must not lie before frames of the first that come later."""
    _, made = bed
    arrays = [[np.ones(1 << 18, dtype=np.float32) for _ in range(4)] for _ in made]

    def work(rank: int) -> None:
        pending = []
        for array in arrays[rank]:
            pending.append(start(bed, rank, array, n_slices=3))
            if rank % 2:
                pending[-1].wait()
        assert errors_of(pending) == [None] * 4

    assert together(work, len(made)) == [None] * len(made)
    assert all((array == len(made)).all() for each in arrays for array in each)


def test_more_runs_than_there_is_room_for_take_their_turn() -> None:
    n_runs = 2 * event_loop.MOST_RUNS + 3
    with squared() as bed:
        arrays = [np.ones((n_runs, 50), dtype=np.float32) for _ in range(4)]

        def work(rank: int) -> None:
            runs = [start(bed, rank, array) for array in arrays[rank]]
            assert errors_of(runs) == [None] * n_runs

        assert together(work, 4) == [None] * 4
    assert all((array == 4).all() for array in arrays)


def test_runs_end_without_anyone_who_waits_and_leave_no_descriptor_open() -> None:
    with squared() as bed:
        arrays = [[np.ones(5000, dtype=np.float32) for _ in range(40)] for _ in range(4)]
        gc.collect()  # what earlier tests left must not be closed meanwhile
        n_open = n_open_files()
        runs = [[start(bed, rank, array) for array in arrays[rank]] for rank in range(4)]

        until(lambda: all(run.is_done for each in runs for run in each))
        for rank in range(4):
            assert errors_of(runs[rank]) == [None] * 40
            bed[1][rank]._runs.peers_in_use()  # settles what has ended
        assert n_open_files() == n_open
    assert all((array == 4).all() for each in arrays for array in each)


def test_a_run_that_is_waited_for_at_once_goes_together_with_those_in_flight(bed: Bed) -> None:
    programs, made = bed
    arrays = [[np.ones(20_000, dtype=np.float32) for _ in range(3)] for _ in made]

    def work(rank: int) -> None:
        first, second, third = arrays[rank]
        early = start(bed, rank, first)
        made[rank].run(task_for(programs[rank], second), second.view(np.uint8))
        late = start(bed, rank, third)
        assert errors_of([late, early]) == [None, None]

    assert together(work, len(made)) == [None] * len(made)
    assert all((array == len(made)).all() for each in arrays for array in each)


def test_two_threads_may_wait_for_the_same_run() -> None:
    with squared() as bed:
        arrays = [np.ones(1000, dtype=np.float32) for _ in range(4)]
        first = start(bed, 0, arrays[0])
        waiting = [threading.Thread(target=first.wait) for _ in range(3)]
        for thread in waiting:
            thread.start()

        assert errors_of([start(bed, rank, arrays[rank]) for rank in (1, 2, 3)]) == [None] * 3
        for thread in waiting:
            thread.join()
    assert all((array == 4).all() for array in arrays)


def test_one_run_at_a_time_sends_no_word_about_what_has_started(bed: Bed) -> None:
    programs, made = bed
    for transport in made:
        transport.renew(transport.generation + 1)
        transport._links[:, event_loop.ANNOUNCED] = 0
        transport._links[:, event_loop.TO_ANNOUNCE] = 0
    arrays = [np.ones(3000, dtype=np.float32) for _ in made]

    for _ in range(3):
        run_all(made, programs, arrays, n_slices=2)

    assert not any(transport._links[:, event_loop.TO_ANNOUNCE].any() for transport in made)


@pytest.mark.parametrize(
    ("ready", "unsent", "peer_started", "expected"),
    [
        ([1, 1, 1], [1, 1, 1], 0, 1),  # the oldest goes first
        ([0, 1, 1], [0, 1, 1], 0, 2),  # it has sent all: the next may go, and wait at the peer
        ([0, 1, 1], [2, 1, 1], 0, event_loop.NONE),  # it has not: what it sends later must not wait
        ([0, 1, 1], [2, 1, 1], 2, 2),  # but the peer has started the second
        ([0, 0, 1], [2, 1, 1], 2, event_loop.NONE),  # though not the third
        ([0, 0, 0], [2, 1, 1], 3, event_loop.NONE),
    ],
)
def test_a_link_takes_the_oldest_run_that_cannot_block_what_its_peer_waits_for(
    ready: list[int], unsent: list[int], peer_started: int, expected: int
) -> None:
    loop = empty_loop(2)
    loop.numbers[[event_loop.LAST_STARTED, event_loop.LAST_BEGUN]] = 3
    for number in (1, 2, 3):
        loop.runs[number, event_loop.CALL] = number
        loop.ports[number, 1, event_loop.HEAP_SIZE] = ready[number - 1]
        loop.ports[number, 1, event_loop.UNSENT] = unsent[number - 1]
    loop.links[1, event_loop.N_READY] = sum(ready)
    loop.links[1, event_loop.PEER_STARTED] = peer_started

    assert next_run(loop, 1) == expected


def test_an_interrupt_fails_all_in_flight_and_nothing_of_them_leaks_into_the_next_generation(
    bed: Bed,
) -> None:
    """All but one rank fill the wires with several runs, are stopped, and go on."""
    programs, made = bed
    before = dict(made[0]._sockets)
    scraps = [[np.full(1 << 18, 1e6, dtype=np.float32) for _ in range(5)] for _ in made]
    arrays = [np.full(1 << 18, rank, dtype=np.float32) for rank in range(len(made))]

    def start_and_stop(rank: int) -> None:
        n_runs = 0 if rank == 1 else 2 + rank % 4  # each rank is at another place
        runs = [start(bed, rank, scrap, n_slices=2) for scrap in scraps[rank][:n_runs]]
        time.sleep(0.2)
        made[rank].interrupt()
        errors = errors_of(runs)
        assert all(isinstance(error, StoppedError) for error in errors), errors

    assert together(start_and_stop, len(made)) == [None] * len(made)
    for transport in made:
        transport.renew(transport.generation + 1)
    results = run_all(made, programs, arrays, n_slices=2)
    right = sum(range(len(made)))
    assert all((result == right).all() for result in results)
    assert made[0]._sockets == before


def test_a_new_generation_stops_what_is_still_in_flight(bed: Bed) -> None:
    programs, made = bed
    scraps = [[np.full(1 << 18, 1e6, dtype=np.float32) for _ in range(3)] for _ in made]
    runs = [start(bed, rank, scrap) for rank in range(1, len(made)) for scrap in scraps[rank]]

    for transport in made:
        transport.renew(transport.generation + 1)

    assert all(isinstance(error, StoppedError) for error in errors_of(runs))
    arrays = [np.full(1000, rank, dtype=np.float32) for rank in range(len(made))]
    results = run_all(made, programs, arrays)
    assert all((result == sum(range(len(made)))).all() for result in results)


def test_a_peer_that_dies_fails_all_in_flight_on_every_rank() -> None:
    with squared(reports_failures=True) as bed:
        arrays = np.ones((4, 3, 1 << 18), dtype=np.float32)
        runs = [[start(bed, rank, array) for array in arrays[rank]] for rank in range(3)]

        bed[1][3].close()

        found = [error for rank in range(3) for error in errors_of(runs[rank])]
    assert all("rank 3 hung up on rank" in str(error) for error in found)
    assert any(isinstance(error, PeerLostError) and error.rank == 3 for error in found)


def test_ranks_that_disagree_in_the_second_run_all_get_an_error() -> None:
    with squared(reports_failures=True) as bed:

        def work(rank: int) -> list[TransportError | None]:
            runs: list[PendingRun] = []
            for size in (500, 400 if rank == 1 else 500, 500):
                try:
                    runs.append(start(bed, rank, np.zeros(size, dtype=np.float32)))
                except TransportError as error:  # the rank heard of the failure before
                    return [*errors_of(runs), error]
            return errors_of(runs)

        outcome = together(work, 4)
    errors = [each for each in outcome if isinstance(each, list)]
    assert len(errors) == 4, outcome
    assert all("ranks disagree" in str(each[-1]) for each in errors)
    assert any(isinstance(error, MismatchError) for each in errors for error in each)


def test_a_failed_run_fails_the_next_start_until_the_transport_is_renewed() -> None:
    with squared() as bed:
        array = np.zeros(100, dtype=np.float32)
        programs, made = bed
        task = task_for(programs[0], array)
        stalled = made[0].start(task, array.view(np.uint8), timeout_s=0.1)
        with pytest.raises(StalledError, match=r"rank 0 saw nothing move for 0.1 s"):
            stalled.wait()
        with pytest.raises(StalledError, match="nothing move"):  # and again
            stalled.wait()
        with pytest.raises(TransportError, match="nothing move"):
            made[0].start(task, array.view(np.uint8))
        for transport in made:
            transport.renew(1)

        results = run_all(made, programs, [array] * 4)
    assert all((result == 0).all() for result in results)


def test_a_short_timeout_counts_also_while_a_longer_run_is_in_flight() -> None:
    with squared() as bed:
        programs, made = bed
        array = np.zeros(100, dtype=np.float32)
        task = task_for(programs[0], array)
        patient = made[0].start(task, array.view(np.uint8), timeout_s=500.0)
        time.sleep(0.05)
        hasty = made[0].start(task, array.copy().view(np.uint8), timeout_s=0.2)

        assert all(isinstance(error, StalledError) for error in errors_of([hasty, patient]))


def test_closing_the_transport_ends_what_is_in_flight_and_its_thread() -> None:
    with squared() as bed:
        runs = [start(bed, 0, np.zeros(1000, dtype=np.float32)) for _ in range(3)]
        bed[1][0].close()

        assert all(isinstance(error, StoppedError) for error in errors_of(runs))
        assert bed[1][0]._runs._thread is not None
        assert not bed[1][0]._runs._thread.is_alive()
        bed[1][0].close()  # a second time does nothing


def test_closing_the_transport_ends_a_run_that_nobody_waits_for_yet() -> None:
    with squared() as bed:
        programs, made = bed
        array = np.ones(64)
        run = made[0].start(
            task_for(programs[0], array), array.view(np.uint8), timeout_s=600, wakes=False
        )
        made[0].close()

        with pytest.raises(StoppedError):
            run.wait()


@pytest.fixture
def alarm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Alarm]:
    """Yield what calls a function in the handler of a signal, 50 ms later and then every 50 ms."""
    monkeypatch.setattr(in_flight, "_LONGEST_INTERVAL_S", 10 * HANG_S)
    before = signal.getsignal(signal.SIGALRM)

    def call_soon(function: Callable[[], object]) -> None:
        signal.signal(signal.SIGALRM, lambda *_: function())
        signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)

    yield call_soon
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def test_signals_are_handled_while_nothing_moves_and_do_not_put_off_the_end(alarm: Alarm) -> None:
    handled: list[float] = []

    with squared() as bed:
        programs, made = bed
        array = np.zeros(1000, dtype=np.float32)
        task = task_for(programs[0], array)
        alarm(lambda: handled.append(time.monotonic()))
        with pytest.raises(StalledError):
            made[0].run(task, array.view(np.uint8), timeout_s=1.0)

    assert handled


def test_the_handler_of_a_signal_may_close_the_transport(alarm: Alarm) -> None:
    with squared() as bed:
        programs, made = bed
        array = np.zeros(1000, dtype=np.float32)
        task = task_for(programs[0], array)
        alarm(made[0].close)

        with pytest.raises(StoppedError, match="by the handler of a signal"):
            made[0].run(task, array.view(np.uint8), timeout_s=10 * HANG_S)


@pytest.mark.parametrize("is_started_before", [False, True])
def test_a_run_in_the_handler_of_a_signal_that_interrupts_another_is_refused(
    alarm: Alarm, is_started_before: bool
) -> None:
    """It would wait for itself: the loop that it needs rests below it."""
    with squared() as bed:
        programs, made = bed
        array, other = (np.zeros(1000, dtype=np.float32) for _ in range(2))
        task = task_for(programs[0], array)

        def started() -> in_flight.PendingRun:
            return made[0].start(task, other.view(np.uint8), timeout_s=10 * HANG_S, wakes=False)

        before = started() if is_started_before else None
        alarm(lambda: (before or started()).wait())

        with pytest.raises(InputError, match="in the handler of a signal that interrupted another"):
            made[0].run(task, array.view(np.uint8), timeout_s=10 * HANG_S)


def test_a_payload_in_flight_is_kept_alive_although_its_owner_forgets_it() -> None:
    with squared() as bed:
        for rank in range(4):
            start(bed, rank, np.ones(200_000, dtype=np.float32))
        last = [np.ones(10, dtype=np.float32) for _ in range(4)]
        runs = [start(bed, rank, last[rank]) for rank in range(4)]

        assert errors_of(runs) == [None] * 4
    assert all((array == 4).all() for array in last)

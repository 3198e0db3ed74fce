"""The socket transport: what it moves, whom it lets in, and how it stops."""

import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from local_ranks import (
    SECRET,
    connected,
    programs_of,
    run_all,
    task_for,
    together,
    transports,
)
from meshmend.errors import (
    HandshakeError,
    InputError,
    MismatchError,
    PeerLostError,
    StalledError,
    StoppedError,
    TransportError,
)
from meshmend.lab.testbed.bed import Testbed
from meshmend.schedule.algorithms import algorithm
from meshmend.schedule.spanning import tree_sum
from meshmend.schedule.table import Collective, Schedule
from meshmend.topology.text import parse_mesh
from meshmend.transport import reference
from meshmend.transport.sockets import SocketTransport
from meshmend.transport.tasks import RankProgram
from testbeds import BANDWIDTH, exit_code, on_chip, require_testbed
from waiting import HANG_S, until

HOLE = parse_mesh("4x4", fail=["2x2@0,2"])
TORUS = parse_mesh("4x4", wrap="all", fail=["2x2@0,2"])
SQUARE = parse_mesh("2x2")
Bed = tuple[Schedule, list[RankProgram], list[SocketTransport]]


def allreduce(name: str) -> Schedule:
    if name == "one-tree":
        return tree_sum(HOLE)
    if name.startswith("exchange"):
        return algorithm(name).build(TORUS, Collective.ALLREDUCE)
    return algorithm(name).build(HOLE, Collective.ALLREDUCE)


@pytest.fixture(
    scope="module",
    params=[
        "ring-1d",
        "ft-two-d over TCP",
        "rings-nd",
        "one-tree over TCP",
        "exchange",
        "exchange-1 over TCP",
    ],
)
def bed(request: pytest.FixtureRequest) -> Iterator[Bed]:
    name, _, network = request.param.partition(" over ")
    schedule = allreduce(name)
    programs = programs_of(schedule)
    with connected(programs, over_tcp=network == "TCP") as made:
        yield schedule, programs, made


@pytest.fixture(params=["in the host", "over TCP"])
def square(request: pytest.FixtureRequest) -> Iterator[Bed]:
    schedule = algorithm("ring-1d").build(SQUARE, Collective.ALLREDUCE)
    programs = programs_of(schedule)
    with connected(programs, reports_failures=True, over_tcp=request.param == "over TCP") as made:
        yield schedule, programs, made


@settings(max_examples=12, deadline=None)
@given(
    n_elements=st.integers(0, 3000),
    n_slices=st.integers(1, 5),
    op=st.sampled_from(["sum", "product", "min", "max"]),
    dtype=st.sampled_from(["float32", "float64", "int32", "int64", "float16"]),
)
def test_every_rank_ends_with_the_same_and_right_bits(
    bed: Bed, n_elements: int, n_slices: int, op: str, dtype: str
) -> None:
    schedule, programs, made = bed
    rng = np.random.default_rng(n_elements)
    # The product of twelve numbers stays in the range of float16.
    largest = 2 if op == "product" else 3
    arrays = [rng.integers(1, largest, n_elements, endpoint=True).astype(dtype) for _ in made]

    results = run_all(made, programs, arrays, n_slices=n_slices, op=op)

    ufunc = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum}[op]
    expected = reference.run(schedule, arrays, combine=ufunc)[0]
    for result in results:
        np.testing.assert_array_equal(result, results[0])
    np.testing.assert_allclose(results[0], expected, rtol=1e-2)


@pytest.mark.parametrize("n_slices", [1, 4])
def test_sums_are_bitwise_the_references_and_the_same_every_time(bed: Bed, n_slices: int) -> None:
    schedule, programs, made = bed
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(100_003).astype(np.float32) for _ in made]

    first, again = (run_all(made, programs, arrays, n_slices=n_slices) for _ in range(2))

    for one, other in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, other)
    if n_slices == 1:
        np.testing.assert_array_equal(first[0], reference.run(schedule, arrays)[0])


def test_the_bytes_that_went_to_each_peer_are_counted_also_over_closed_connections(
    square: Bed,
) -> None:
    """A ring sum of 4 ranks sends each rank's successor one and a half times the payload."""
    _, programs, made = square
    arrays = [np.ones(100_000, dtype=np.float32) for _ in made]
    run_all(made, programs, arrays)

    def counts() -> list[int]:
        return [sum(transport.sent_bytes().values()) for transport in made]

    n_bytes = 600_000
    until(lambda: all(each >= n_bytes for each in counts()), why=lambda: str(counts()))
    assert all(each < 1.01 * n_bytes for each in counts())
    before = [transport.sent_bytes() for transport in made]
    for transport in made:
        transport.drop(range(4))
    assert [transport.sent_bytes() for transport in made] == before


def test_collectives_may_follow_each_other_without_waiting_for_the_slowest(bed: Bed) -> None:
    _, programs, made = bed
    arrays = [np.full(500, rank, dtype=np.int64) for rank in range(len(made))]

    def three_times(rank: int) -> None:
        for _ in range(3):
            task = task_for(programs[rank], arrays[rank])
            made[rank].run(task, arrays[rank].view(np.uint8))

    assert together(three_times, len(made)) == [None] * len(made)
    assert all((array == 66 * 12 * 12).all() for array in arrays)


def test_a_dialler_with_the_wrong_secret_is_refused_and_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    labels = ["rank 0", "rank 1"]
    with (
        SocketTransport(0, labels, b"wrong") as stranger,
        SocketTransport(1, labels, SECRET) as good,
        caplog.at_level(logging.WARNING),
    ):
        with pytest.raises(HandshakeError, match="rank 0 cannot reach rank 1: the listener does"):
            stranger.connect({1: good.address}, timeout_s=HANG_S)
        until(lambda: "refused a connection" in caplog.text)


@pytest.mark.parametrize(
    ("garbage", "reason"),
    [
        (b"GET / HTTP/1.1\r\nHost: example\r\n\r\n" + bytes(60), "not a meshmend handshake"),
        (b"x", "closed the connection during the handshake"),
        (b"meshmend/5" + bytes(16) + bytes(32), "wants rank 0, but this is rank 1"),
        (b"meshmend/5" + bytes(4) + bytes([0, 0, 0, 1]) + bytes(72), "does not know the secret"),
    ],
)
def test_garbage_on_the_port_is_refused_and_a_peer_still_gets_in(
    garbage: bytes, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    with transports(2) as (low, high), caplog.at_level(logging.WARNING):
        with socket.create_connection(high.address) as stranger:
            stranger.sendall(garbage)
            with suppress(OSError):  # it may have been shown out already
                stranger.shutdown(socket.SHUT_WR)
            until(lambda: reason in caplog.text)

        addresses = {0: low.address, 1: high.address}
        both = (low, high)
        outcome = together(lambda rank: both[rank].connect({1 - rank: addresses[1 - rank]}), 2)
        assert outcome == [None, None]


def test_nothing_listens_beyond_loopback_unless_asked() -> None:
    with transports(1) as (only,):
        assert only.address[0] == "127.0.0.1"


def test_transports_that_are_closed_leave_no_descriptor_behind() -> None:
    """A process that makes and destroys groups for months must not run out of them."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with transports(4):
            pass
    gc.collect()

    assert len(list(Path("/proc/self/fd").iterdir())) <= before


def test_an_interrupt_ends_a_run_that_waits_for_others(square: Bed) -> None:
    _, programs, made = square
    payload = np.zeros(1000, dtype=np.float32)

    threading.Timer(0.2, made[0].interrupt).start()
    with pytest.raises(StoppedError, match="rank 0 was told to stop"):
        made[0].run(task_for(programs[0], payload), payload.view(np.uint8))


def test_an_interrupt_ends_the_wait_for_a_connection() -> None:
    with transports(2) as (low, high):
        threading.Timer(0.2, high.interrupt).start()
        with pytest.raises(StoppedError, match="told to stop waiting for a connection"):
            high.connect({0: low.address}, timeout_s=HANG_S)


def test_connections_are_kept_over_an_interruption_in_the_middle_of_frames(bed: Bed) -> None:
    """All but one rank start, fill the wires, are stopped, and go on in a new generation."""
    _, programs, made = bed
    arrays = [np.full(1 << 20, rank, dtype=np.float32) for rank in range(len(made))]
    before = dict(made[0]._sockets)

    def start_and_stop(rank: int) -> None:
        if rank == 5:
            return
        threading.Timer(0.4, made[rank].interrupt).start()
        scrap = arrays[rank].copy()
        with pytest.raises(StoppedError, match=f"rank {rank} was told to stop"):
            made[rank].run(task_for(programs[rank], scrap, n_slices=2), scrap.view(np.uint8))

    assert together(start_and_stop, len(made)) == [None] * len(made)
    for transport in made:
        transport.renew(transport.generation + 1)
    results = run_all(made, programs, arrays, n_slices=2)
    assert all((result == 66).all() for result in results)
    assert made[0]._sockets == before


def test_a_peer_that_dies_is_named_on_every_rank(square: Bed) -> None:
    _, programs, made = square
    arrays = [np.zeros(1 << 20, dtype=np.float32) for _ in made]

    def run(rank: int) -> None:
        if rank == 3:
            made[3].close()
            return
        made[rank].run(task_for(programs[rank], arrays[rank]), arrays[rank].view(np.uint8))

    outcome = together(run, 4)
    assert all(isinstance(error, TransportError) for error in outcome[:3])
    assert all("rank 3 hung up on rank" in str(error) for error in outcome[:3])
    assert any(isinstance(error, PeerLostError) and error.rank == 3 for error in outcome[:3])


@pytest.mark.parametrize(
    ("odd", "op"), [(np.zeros(400, dtype=np.float32), "sum"), (np.zeros(500, np.float32), "max")]
)
def test_ranks_that_disagree_all_get_an_error(square: Bed, odd: np.ndarray, op: str) -> None:
    _, programs, made = square
    arrays = [np.zeros(500, dtype=np.float32), odd, *np.zeros((2, 500), dtype=np.float32)]

    def run(rank: int) -> None:
        task = task_for(programs[rank], arrays[rank], op=op if rank == 1 else "sum")
        made[rank].run(task, arrays[rank].view(np.uint8))

    outcome = together(run, 4)
    assert all("ranks disagree" in str(error) for error in outcome)
    assert any(isinstance(error, MismatchError) for error in outcome)


def test_a_failed_transport_says_so_until_it_is_renewed(square: Bed) -> None:
    _, programs, made = square
    payload = np.zeros(100, dtype=np.float32)
    task = task_for(programs[0], payload)

    with pytest.raises(StalledError, match=r"rank 0 saw nothing move for 0.1 s"):
        made[0].run(task, payload.view(np.uint8), timeout_s=0.1)
    with pytest.raises(TransportError, match="nothing move"):
        made[0].run(task, payload.view(np.uint8))


@pytest.mark.parametrize(
    ("action", "match"),
    [
        (lambda t, p: t.run(task_for(p, np.zeros(4)), np.zeros(3, np.uint8)), "needs 32 bytes"),
        (lambda t, p: t.renew(0), "renew needs a generation above 0, but got 0"),
        (lambda t, p: SocketTransport(0, ["a"], b"", bind="203.0.113.1"), "cannot listen on"),
    ],
)
def test_bad_input_is_refused(square: Bed, action: object, match: str) -> None:
    _, programs, made = square
    assert callable(action)
    with pytest.raises(InputError, match=match):
        action(made[0], programs[0])


def test_connections_of_another_epoch_are_made_anew_and_an_old_call_is_never_taken() -> None:
    with transports(2) as (low, high):
        both = (low, high)
        addresses = {0: low.address, 1: high.address}

        def meet(rank: int, epoch: int) -> None:
            both[rank].connect(
                {1 - rank: addresses[1 - rank]}, epochs={1 - rank: epoch}, timeout_s=HANG_S
            )

        meet(0, 1)  # a call that the other end does not take up in its time
        assert together(lambda rank: meet(rank, 2), 2) == [None, None]
        before = [transport._sockets[1 - transport.rank] for transport in both]
        assert together(lambda rank: meet(rank, 2), 2) == [None, None]
        assert before == [transport._sockets[1 - transport.rank] for transport in both]
        assert together(lambda rank: meet(rank, 3), 2) == [None, None]
        assert all(connection.fileno() < 0 for connection in before)


def sums_of(both: Sequence[SocketTransport]) -> list[object]:
    """Return what each of two ranks gets for the sum of two ones, or why it gets none."""
    programs = programs_of(algorithm("ring-1d").build(parse_mesh("1x2"), Collective.ALLREDUCE))

    def run(rank: int) -> float:
        ones = np.ones(2, dtype=np.float32)
        both[rank].run(task_for(programs[rank], ones), ones.view(np.uint8))
        return float(ones[0])

    return together(run, 2)


def test_a_rank_that_hung_up_and_called_again_in_the_same_epoch_gets_its_new_connection() -> None:
    """As one does that was told to stop while it called."""
    with transports(2) as (low, high):
        both = (low, high)

        def meet(rank: int) -> None:
            peer = both[1 - rank]
            both[rank].connect({peer.rank: peer.address}, epochs={peer.rank: 7}, timeout_s=HANG_S)

        assert together(meet, 2) == [None, None]
        low.renew(2)
        high.renew(2)
        low.drop([1])
        meet(0)
        assert together(meet, 2) == [None, None]

        assert sums_of(both) == [2, 2]


def test_a_rank_that_calls_again_after_the_other_chose_the_old_connection_finds_out() -> None:
    """Else it waits for ever for what the other end has sent over the old one."""
    with transports(2) as (low, high):
        both = (low, high)

        def meet(rank: int) -> None:
            peer = both[1 - rank]
            both[rank].connect({peer.rank: peer.address}, epochs={peer.rank: 7}, timeout_s=HANG_S)

        def renew_and_meet(rank: int) -> None:
            both[rank].renew(3)
            meet(rank)

        assert together(meet, 2) == [None, None]
        low.renew(2)
        high.renew(2)
        meet(1)
        low.drop([1])
        meet(0)

        assert {type(error) for error in sums_of(both)} == {PeerLostError}
        assert together(renew_and_meet, 2) == [None, None]
        assert sums_of(both) == [2, 2]


def test_a_call_of_a_later_generation_is_kept_for_that_one() -> None:
    with transports(2) as (low, high):
        both = (low, high)

        def meet(rank: int) -> None:
            peer = both[1 - rank]
            both[rank].connect({peer.rank: peer.address}, epochs={peer.rank: 7}, timeout_s=HANG_S)

        low.renew(2)
        high.renew(2)
        assert together(meet, 2) == [None, None]
        low.drop([1])
        low.renew(3)
        meet(0)
        high.renew(3)
        meet(1)

        assert sums_of(both) == [2, 2]


def test_a_severed_connection_is_a_lost_peer_at_both_ends(square: Bed) -> None:
    _, programs, made = square
    payloads = np.zeros((4, 1000), dtype=np.float32)

    made[0].sever(1)

    def run(rank: int) -> None:
        task = task_for(programs[rank], payloads[rank])
        made[rank].run(task, payloads[rank].view(np.uint8))

    assert all(isinstance(error, TransportError) for error in together(run, 4)[:2])


def test_a_connection_that_breaks_between_two_sums_is_made_again_in_the_next_generation_only() -> (
    None
):
    programs = programs_of(algorithm("ring-1d").build(parse_mesh("1x2"), Collective.ALLREDUCE))
    payloads = np.ones((2, 1000), dtype=np.float32)
    with connected(programs) as made:
        addresses = [each.address for each in made]

        def run(rank: int) -> None:
            made[rank].connect({1 - rank: addresses[1 - rank]}, timeout_s=HANG_S)
            made[rank].run(task_for(programs[rank], payloads[rank]), payloads[rank].view(np.uint8))

        assert together(run, 2) == [None, None]
        made[0].sever(1)
        assert all(isinstance(error, PeerLostError) for error in together(run, 2))

        payloads[:] = 1
        for transport in made:
            transport.renew(1)
        assert together(run, 2) == [None, None]
        assert (payloads == 2).all()


def test_a_peer_that_is_busy_for_longer_than_the_link_timeout_is_not_lost() -> None:
    schedule = algorithm("ring-1d").build(parse_mesh("1x2"), Collective.ALLREDUCE)
    programs = programs_of(schedule)
    arrays = [np.ones(1 << 23, dtype=np.float32) for _ in programs]  # more than the kernels hold

    with connected(programs, link_timeout_s=0.2) as made:

        def run(rank: int) -> None:
            if rank == 1:
                time.sleep(1.5)  # does not read: its kernel has to say that there is no room
            made[rank].run(task_for(programs[rank], arrays[rank]), arrays[rank].view(np.uint8))

        assert together(run, 2) == [None, None]
    assert all((array == 2).all() for array in arrays)


def test_a_task_that_waits_for_longer_than_many_looks_still_stalls_in_its_own_time() -> None:
    schedule = algorithm("ring-1d").build(parse_mesh("1x2"), Collective.ALLREDUCE)
    programs = programs_of(schedule)
    payload = np.zeros(100, dtype=np.float32)

    with (
        connected(programs, link_timeout_s=0.2) as made,
        pytest.raises(StalledError, match=r"rank 0 saw nothing move for 0.5 s"),
    ):
        made[0].run(task_for(programs[0], payload), payload.view(np.uint8), timeout_s=0.5)


@contextmanager
def on_network(
    network: Testbed,
    rank: int,
    folder: Path,
    *,
    link_timeout_s: float = 0.0,
    window_bytes: int = 0,
) -> Iterator[SocketTransport]:
    """Yield one of two ranks, on its chip and connected; files tell the other one its port."""
    chips, other = network.mesh.live, 1 - rank
    bind = network.address(chips[rank])
    labels = ["rank 0", "rank 1"]
    with SocketTransport(
        rank,
        labels,
        SECRET,
        bind=bind,
        window_bytes=window_bytes,
        link_timeout_s=link_timeout_s,
    ) as transport:
        (folder / f"port{rank}.new").write_text(str(transport.address[1]))
        (folder / f"port{rank}.new").rename(folder / f"port{rank}")
        until((folder / f"port{other}").exists)
        peer = network.address(chips[other]), int((folder / f"port{other}").read_text())
        transport.connect({other: peer}, timeout_s=HANG_S)
        yield transport


def kernel_count(network: Testbed, chip: tuple[int, ...], name: str) -> int:
    """Return a count of a chip's kernel by its name in /proc/net/netstat; 0 if it has none."""
    read = network.run(chip, ["cat", "/proc/self/net/netstat"], capture_output=True, text=True)
    lines = [line.split() for line in read.stdout.splitlines()]
    counts: dict[str, str] = {}
    for names, numbers in zip(lines[::2], lines[1::2], strict=True):
        counts |= dict(zip(names, numbers, strict=True))
    return int(counts.get(name, 0))


def test_the_kernel_of_a_rank_that_does_not_read_drops_nothing_that_it_has_promised_to_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When both ends have done so, each drops the other's acknowledgements for good."""
    require_testbed()
    monkeypatch.setenv("MESHMEND_TESTBED_DIR", str(tmp_path / "run"))
    mesh = parse_mesh("1x2")
    programs = programs_of(algorithm("ring-1d").build(mesh, Collective.ALLREDUCE))

    def sum_once(rank: int) -> None:
        array = np.ones(200_000, dtype=np.float32)
        with on_network(network, rank, tmp_path, window_bytes=20_000) as transport:
            if rank == 1:
                os.kill(os.getpid(), signal.SIGSTOP)
            transport.run(task_for(programs[rank], array), array.view(np.uint8))
            assert (array == 2).all()

    with Testbed.up(mesh, link_bandwidth=BANDWIDTH) as network:
        reads, sleeps = mesh.live
        children = [on_chip(network, mesh.live[rank], partial(sum_once, rank)) for rank in (0, 1)]
        os.waitpid(children[1], os.WUNTRACED)
        until(lambda: kernel_count(network, sleeps, "InOctets") > 10_000)
        time.sleep(0.2)  # for all that the other rank may send ahead
        os.kill(children[1], signal.SIGCONT)

        assert [exit_code(child) for child in children] == [0, 0]
        assert [kernel_count(network, chip, "TCPRcvQDrop") for chip in (reads, sleeps)] == [0, 0]


@pytest.mark.parametrize("direction", [(0, 1), (1, 0)])
def test_a_link_that_drops_one_way_is_a_lost_peer_within_the_link_timeout(
    direction: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_testbed()
    monkeypatch.setenv("MESHMEND_TESTBED_DIR", str(tmp_path / "run"))
    mesh = parse_mesh("1x2")
    programs = programs_of(algorithm("ring-1d").build(mesh, Collective.ALLREDUCE))

    def sum_for_ever(rank: int) -> None:
        array = np.ones(1000, dtype=np.float32)
        with on_network(network, rank, tmp_path, link_timeout_s=1.0) as transport:
            try:
                while True:
                    transport.run(task_for(programs[rank], array), array.view(np.uint8))
                    (tmp_path / f"done{rank}").touch()
            except PeerLostError as error:
                (tmp_path / f"lost{rank}").write_text(str(error))

    with Testbed.up(mesh, link_bandwidth=BANDWIDTH) as network:
        children = [
            on_chip(network, mesh.live[rank], partial(sum_for_ever, rank)) for rank in (0, 1)
        ]
        until(lambda: (tmp_path / "done0").exists() and (tmp_path / "done1").exists())
        network.drop(mesh.live[direction[0]], mesh.live[direction[1]])

        assert [exit_code(child) for child in children] == [0, 0]
    words = [(tmp_path / f"lost{rank}").read_text() for rank in (0, 1)]
    assert any("has answered nothing that rank" in each and "for 1 s" in each for each in words)

"""What a peer that knows the secret sends cannot kill a rank, nor make it stand still.

A frame that cannot be right is a lost link, whose reason names the peer. The receiver is a process
of its own: an overwritten memory is a signal that ends it.
"""

import json
import random
import select
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import pytest

from local_ranks import SECRET, programs_of, task_for, together, transports
from meshmend.errors import PeerLostError, TransportError
from meshmend.schedule.algorithms import algorithm
from meshmend.schedule.table import Collective
from meshmend.topology.text import parse_mesh
from meshmend.transport import event_loop
from meshmend.transport.event_loop import bind_checksum, header_checksum, load_event_loop
from meshmend.transport.handshake import ConnectRequest, Deadline, dial
from meshmend.transport.sockets import SocketTransport
from meshmend.transport.tasks import ADD, SEND
from waiting import HANG_S

LINK_TIMEOUT_S = 2.0
STANDSTILL_S = 60.0  # a rank that waits for what never comes waits for 1800 s; a busy machine less
PROGRAMS = programs_of(algorithm("ring-1d").build(parse_mesh("1x2"), Collective.ALLREDUCE))
LABELS = ["rank 0", "rank 1"]
WORD = 1 << 32
N_SLICES = 3
N_RUNS = 2  # in flight in each round
EXTREMES = (-(1 << 63), -WORD, -3, -2, -1, 0, 1, 2, 1 << 31, WORD - 1, WORD, 1 << 39, (1 << 63) - 1)

# The receiver: in each round, a connection of its own, two sums at once, and what became of them.
RECEIVER = f"""
import faulthandler, json, sys, time
faulthandler.enable()
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[1] / "helpers")]!r}
from test_bad_frames import receive
receive(json.loads(sys.argv[1]))
"""


def size_of(round_number: int) -> int:
    """Return the number of elements in a round: seldom so many that frames have many blocks."""
    return 150_000 if round_number % 64 == 63 else 1000


def arrays(round_number: int) -> list[np.ndarray[Any, Any]]:
    return [np.full(size_of(round_number), 1.0, dtype=np.float32) for _ in range(N_RUNS)]


def receive(options: dict[str, Any]) -> None:
    """Be rank 1: for each line on standard input, a round; write a line about how it ended."""
    load_event_loop()  # compiling it is no standstill
    with SocketTransport(1, LABELS, SECRET, link_timeout_s=LINK_TIMEOUT_S, **options) as transport:
        print(transport.address[1], flush=True)
        guard = 4096
        tasks: dict[int, Any] = {}
        for line in sys.stdin:
            number = int(line)
            transport.renew(number)
            transport.connect({0: ("", 0)}, epochs={0: number}, timeout_s=HANG_S)
            if (n_elements := size_of(number)) not in tasks:
                tasks[n_elements] = task_for(PROGRAMS[1], arrays(number)[0], n_slices=N_SLICES)
            wide = [np.full(2 * guard + each.nbytes, 0xA5, np.uint8) for each in arrays(number)]
            began = time.monotonic()
            outcome, what = "done", ""
            try:
                runs = []
                for each, array in zip(wide, arrays(number), strict=True):
                    each[guard:-guard] = array.view(np.uint8)
                    runs.append(transport.start(tasks[n_elements], each[guard:-guard]))
                for run in runs:
                    run.wait()
                if not all((each[guard:-guard].view(np.float32) == 2).all() for each in wide):
                    outcome = "wrong"
            except TransportError as error:
                outcome, what = type(error).__name__, str(error)
            took_s = time.monotonic() - began
            if not all(
                (each[:guard] == 0xA5).all() and (each[-guard:] == 0xA5).all() for each in wide
            ):
                outcome = "overwritten"
            print(json.dumps([outcome, what, took_s]), flush=True)


def is_ready(file: IO[str] | socket.socket, timeout_s: float, *, for_writing: bool = False) -> bool:
    """Wait until there is something to read, or room to write, for at most so long."""
    poll = select.poll()  # select knows no descriptor above 1023, and a test run may have them
    poll.register(file, select.POLLIN | (select.POLLOUT if for_writing else 0))
    return bool(poll.poll(timeout_s * 1000))


class Receiver:
    """The process that receives, and what it says."""

    def __init__(self, **options: bool) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", RECEIVER, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.address = "127.0.0.1", int(self._line())
        self.number = 0

    def begin(self) -> socket.socket:
        """Begin a round; return its authenticated connection."""
        self.number += 1
        assert self.process.stdin is not None
        self.process.stdin.write(f"{self.number}\n")
        self.process.stdin.flush()
        request = ConnectRequest(0, 1, self.number, self.number)
        return dial(self.address, SECRET, request, Deadline(time.monotonic() + HANG_S))

    def outcome(self) -> tuple[str, str, float]:
        kind, what, took_s = json.loads(self._line())
        return kind, what, took_s

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline() if is_ready(self.process.stdout, HANG_S) else ""
        assert line, f"the receiver ended with {self.process.poll()}"
        return line

    def end(self) -> int:
        assert self.process.stdin is not None
        self.process.stdin.close()
        return self.process.wait(HANG_S)


@contextmanager
def receiving(**options: bool) -> Iterator[Receiver]:
    receiver = Receiver(**options)
    with receiver.process:
        try:
            yield receiver
            assert receiver.end() == 0
        finally:
            receiver.process.kill()


def sealed(words: list[int]) -> list[int]:
    """Return the words of a header with the right checksum."""
    header = np.array([np.array(each, dtype=np.uint64).view(np.int64) for each in unsigned(words)])
    return [*words[: event_loop.CHECK_WORD], int(header_checksum(header))]


def unsigned(words: list[int]) -> list[int]:
    return [each % (1 << 64) for each in words]


def payload_checksum_of(data: bytes) -> int:
    array = np.frombuffer(data, dtype=np.uint8)
    return int(bind_checksum().ctypes(array.ctypes.data, len(array), 0)) or 1


@dataclass
class Frame:
    words: list[int]
    payload: bytes

    def pack(self) -> bytes:
        return struct.pack("=6Q", *unsigned(self.words)) + self.payload


def honest_frames(generation: int) -> list[Frame]:
    """Return what rank 0 sends in a round, with all ones as data."""
    program = PROGRAMS[0]
    task = task_for(program, arrays(generation)[0], n_slices=N_SLICES)
    found = []
    for number in range(1, N_RUNS + 1):
        for key, n_bytes in enumerate(task.layout.size.tolist()):
            move, call = key % program.n_moves, generation * WORD + number
            if program.kind[move] != SEND or not n_bytes:
                continue
            row = key // program.n_moves * WORD + int(program.row[move])
            other = PROGRAMS[1].row.tolist().index(int(program.row[move]))
            value = 1.0 if PROGRAMS[1].kind[other] == ADD else 2.0  # a part, or the sum
            data = np.full(n_bytes // 4, value, dtype=np.float32).tobytes()
            checksum = payload_checksum_of(data) if generation % 8 else 0
            found.append(Frame(sealed([call, row, n_bytes, task.fingerprint, checksum, 0]), data))
    return found


class Fuzzer:
    """Makes the bytes of rounds: frames that are read and dropped, and at the end a wild one."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._old: list[Frame] = []

    def stream(self, generation: int, n_frames: int) -> bytes:
        rng, honest = self._rng, honest_frames(generation)
        self._old = (self._old + rng.sample(honest, 1))[-50:]
        made = [self._mild(generation, honest) for _ in range(n_frames - 1)]
        if rng.random() < 0.3:
            rng.shuffle(made)
        data = b"".join(each.pack() for each in made) + self._wild(generation, honest)
        return data if rng.random() < 0.9 else data[: rng.randrange(len(data))]

    def _mild(self, generation: int, honest: list[Frame]) -> Frame:
        """Return a frame after which a receiver may go on reading."""
        rng = self._rng
        kind = rng.randrange(8)
        if kind == 0 and honest:
            return honest.pop(0)
        if kind == 1:
            call = rng.choice([generation * WORD + rng.randrange(200), rng.getrandbits(63)])
            return Frame(sealed([call, event_loop.STARTED, 0, rng.getrandbits(64), 0, 0]), b"")
        if kind == 2:
            old = rng.choice(self._old)
            if old.words[event_loop.CALL_WORD] // WORD < generation:
                return old
        n_bytes = rng.randrange(1, 300_000 if rng.random() < 0.002 else 1500)
        call = rng.randrange(generation) * WORD + rng.getrandbits(32)
        row = rng.choice([rng.getrandbits(63), rng.getrandbits(10)])
        words = [call, row, n_bytes, rng.getrandbits(64), rng.getrandbits(64), 0]
        return Frame(sealed(words), rng.randbytes(n_bytes))

    def _wild(self, generation: int, honest: list[Frame]) -> bytes:
        """Return bytes that are wrong in one of many ways."""
        rng = self._rng
        frame = rng.choice([*honest[:3], *self._old])
        if generation % 400 == 399:  # seldom: who is told of a later generation waits a while
            words = [(generation + rng.randrange(1, 1000)) * WORD + 1, *frame.words[1:]]
            return Frame(sealed(words), frame.payload).pack()
        words = list(frame.words)
        kind = rng.randrange(9)
        if kind == 0:
            return rng.randbytes(rng.randrange(1, 400))
        if kind == 1:  # a flipped bit, and the old checksum
            bit = rng.randrange(8 * event_loop.HEADER_BYTES)
            words[bit // 64] = words[bit // 64] % (1 << 64) ^ 1 << bit % 64
            return Frame(words, frame.payload).pack()
        if kind == 2:  # a flipped bit, and the right checksum
            bit = rng.randrange(8 * 8 * event_loop.CHECK_WORD)
            words[bit // 64] = words[bit // 64] % (1 << 64) ^ 1 << bit % 64
        elif kind == 3:
            near = (
                event_loop.BLOCK_BYTES - 1,
                event_loop.BLOCK_BYTES + 1,
                words[2] - 1,
                words[2] + 1,
            )
            words[event_loop.LENGTH_WORD] = rng.choice(EXTREMES + near)
        elif kind == 4:  # of an older generation
            words[event_loop.CALL_WORD] -= rng.randrange(1, generation + 2) * WORD
            words[event_loop.LENGTH_WORD] = rng.choice(EXTREMES)
        elif kind == 5:
            words[rng.randrange(event_loop.CHECK_WORD)] = rng.choice(EXTREMES)
        elif kind == 6:
            words[event_loop.ROW_WORD] = rng.choice([event_loop.GAVE_UP, event_loop.STARTED, -3])
            words[event_loop.LENGTH_WORD] = rng.choice([0, len(frame.payload), *EXTREMES])
        elif kind == 7:
            number = rng.choice([0, 1, 2, 3, 127, 128, 129, WORD - 1])
            words[event_loop.CALL_WORD] = generation * WORD + number
        else:
            return frame.pack() * 2  # twice
        if words[event_loop.CALL_WORD] // WORD > generation:  # see above
            words[event_loop.CALL_WORD] = generation * WORD + words[event_loop.CALL_WORD] % WORD
        return Frame(sealed(words), frame.payload).pack()


def play(receiver: Receiver, data: bytes, *, hangs_up: bool = True) -> tuple[str, str, float]:
    """Send the bytes of a round, read what comes meanwhile, hang up; return how the round ended."""
    assert receiver.process.stdout is not None
    with receiver.begin() as connection:
        connection.setblocking(False)
        rest, is_open = memoryview(data), True
        while not is_ready(receiver.process.stdout, 0 if is_open else HANG_S):
            if not is_open:
                break
            with suppress(BlockingIOError):
                try:
                    is_ready(connection, 0.01, for_writing=bool(rest))
                    rest = rest[connection.send(rest) :] if rest else rest
                    if hangs_up and not rest:
                        connection.shutdown(socket.SHUT_WR)
                    is_open = bool(connection.recv(1 << 20))
                except OSError as error:  # the other end has closed
                    is_open = isinstance(error, BlockingIOError)
        return receiver.outcome()


def fuzz(
    receiver: Receiver,
    n_frames: int,
    *,
    seed: int,
    allowed: frozenset[str],
    most_in_round: int = 24,
    longest_s: float = STANDSTILL_S,
) -> dict[str, int]:
    """Send so many frames; check how each round ends; return how often each end was seen."""
    fuzzer, counts, n_sent = Fuzzer(seed), dict[str, int](), 0
    while n_sent < n_frames:
        n_in_round = 1 + receiver.number % most_in_round
        data = fuzzer.stream(receiver.number + 1, n_in_round)
        kind, what, took_s = play(receiver, data)
        assert kind in allowed, (kind, what)
        # With reports of failures, a peer may send any text as its reason.
        assert kind == "done" or "rank 0" in what or kind == "TransportError", what
        assert took_s < longest_s, (kind, what, took_s)
        reason = what if kind == "PeerLostError" else kind
        reason = reason.partition("gave up")[0].partition("generation")[0]
        counts[reason] = counts.get(reason, 0) + 1
        n_sent += n_in_round
    return counts


MODES = [{}, {"reports_failures": True}, {"sums_payloads": True}]


def allowed_in(options: dict[str, bool]) -> frozenset[str]:
    """Return how rounds may end; only ranks that report failures believe such reports."""
    kinds = frozenset({"done", "PeerLostError", "MismatchError"})
    return kinds | {"TransportError"} if options.get("reports_failures") else kinds


def check_after(receiver: Receiver) -> None:
    """The receiver still sums right with an honest peer."""
    receiver.number += 8 - receiver.number % 8  # the next round has checksums of payloads
    honest = honest_frames(receiver.number + 1)
    assert play(receiver, b"".join(each.pack() for each in honest), hangs_up=False)[0] == "done"


@pytest.mark.parametrize("options", MODES, ids=["train", "backend", "payloads"])
def test_no_frame_of_a_peer_that_knows_the_secret_kills_a_rank_or_makes_it_stand_still(
    options: dict[str, bool],
) -> None:
    with receiving(**options) as receiver:
        counts = fuzz(receiver, 2500, seed=27, allowed=allowed_in(options))
        check_after(receiver)

    for fault in (event_loop.BAD_HEADER, event_loop.BAD_LENGTH, event_loop.BAD_CALL):
        assert counts.get(f"rank 0 sent rank 1 {event_loop.FAULTS[fault]}"), counts


@pytest.mark.slow
@pytest.mark.parametrize("options", MODES, ids=["train", "backend", "payloads"])
def test_a_million_frames(options: dict[str, bool]) -> None:
    with receiving(**options) as receiver:
        counts = fuzz(
            receiver,
            1_000_000 // len(MODES) + 1,
            seed=1_000_000,
            allowed=allowed_in(options),
            most_in_round=128,
            longest_s=2 * LINK_TIMEOUT_S,
        )

    print(receiver.number, "rounds", counts)


class Proxy:
    """Stands between rank 0, which dials, and rank 1; flips one bit of what one of them sends.

    `direction` 0 is what rank 0 sends. The bit is counted from the end of the handshake.
    """

    _HANDSHAKE_BYTES = (58 + 32, 64 + 1)  # hello and proof; nonce, proof and welcome

    def __init__(self, target: tuple[str, int], direction: int, bit: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = self._listener.getsockname()[:2]
        self._target = target
        self._flips = {direction: 8 * self._HANDSHAKE_BYTES[direction] + bit}
        self.has_flipped = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        with suppress(OSError):
            near, _ = self._listener.accept()
            far = socket.create_connection(self._target)
            with near, far:
                ends = [near, far]
                for end in ends:
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                ways = [
                    threading.Thread(target=self._pass_on, args=(way, *ends[:: 1 - 2 * way]))
                    for way in (0, 1)
                ]
                for each in ways:
                    each.start()
                for each in ways:
                    each.join()

    def _pass_on(self, way: int, source: socket.socket, target: socket.socket) -> None:
        n_passed = 0
        with suppress(OSError):
            while data := bytearray(source.recv(1 << 16)):
                at, bit = divmod(self._flips.get(way, -1), 8)
                if n_passed <= at < n_passed + len(data):
                    data[at - n_passed] ^= 1 << bit
                    self.has_flipped = True
                n_passed += len(data)
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(HANG_S)
        self._listener.close()


def outcomes_of_a_flip(direction: int, bit: int, *, sums_payloads: bool) -> list[str]:
    """Return how a sum of two honest ranks ends if a bit is flipped between them.

    Each ends "right", "wrong" or "lost".
    """
    load_event_loop()
    with transports(2, link_timeout_s=LINK_TIMEOUT_S, sums_payloads=sums_payloads) as both:
        proxy = Proxy(both[1].address, direction, bit)
        payloads = [np.arange(100, dtype=np.float32) for _ in both]

        def work(rank: int) -> str:
            both[rank].connect({1 - rank: proxy.address}, timeout_s=HANG_S)
            task = task_for(PROGRAMS[rank], payloads[rank], n_slices=N_SLICES)
            began = time.monotonic()
            try:
                both[rank].run(task, payloads[rank].view(np.uint8))
            except PeerLostError as error:
                return "lost" if error.rank == 1 - rank else "blames another"
            finally:
                both[rank].drop([1 - rank])
                assert time.monotonic() - began < STANDSTILL_S
            return "right" if (payloads[rank] == 2 * np.arange(100)).all() else "wrong"

        try:
            outcome = together(work, 2)
        finally:
            proxy.close()
        assert proxy.has_flipped, (direction, bit)
    return outcome


def n_bits_sent() -> int:
    return 8 * sum(len(each.pack()) for each in flip_frames())


def flip_frames() -> list[Frame]:
    """Return frames as long as those of a sum of 100 elements, in the order of the stream."""
    task = task_for(PROGRAMS[0], np.zeros(100, dtype=np.float32), n_slices=N_SLICES)
    is_send = np.tile(PROGRAMS[0].kind == SEND, N_SLICES)
    return [Frame([0] * 6, bytes(size)) for size in task.layout.size[is_send].tolist() if size]


@pytest.mark.parametrize("direction", [0, 1])
def test_a_flipped_bit_between_honest_ranks_is_a_lost_link_at_both_ends_never_a_wrong_sum(
    direction: int,
) -> None:
    rng = random.Random(direction)
    # The last frame may arrive when the sender has ended: then only the receiver has lost a link.
    for bit in rng.sample(range(n_bits_sent()), 12):
        outcome = outcomes_of_a_flip(direction, bit, sums_payloads=True)

        assert outcome[1 - direction] == "lost", (bit, outcome)
        assert outcome[direction] in ("lost", "right"), (bit, outcome)


def test_without_checksums_of_payloads_a_flipped_bit_of_a_header_is_still_a_lost_link() -> None:
    rng = random.Random(3)
    for _ in range(12):
        outcome = outcomes_of_a_flip(
            0, rng.randrange(8 * event_loop.HEADER_BYTES), sums_payloads=False
        )

        assert outcome == ["lost", "lost"]


def test_ranks_of_which_one_makes_no_checksums_of_payloads_lose_each_other() -> None:
    labels = ["rank 0", "rank 1"]
    with (
        SocketTransport(0, labels, SECRET, sums_payloads=True) as one,
        SocketTransport(1, labels, SECRET) as other,
    ):
        both = (one, other)

        def work(rank: int) -> None:
            both[rank].connect({1 - rank: both[1 - rank].address}, timeout_s=HANG_S)
            array = np.ones(10, dtype=np.float32)
            both[rank].run(task_for(PROGRAMS[rank], array), array.view(np.uint8))

        outcome = together(work, 2)

    assert "rank 1 sent rank 0 a frame without a checksum of its payload; switch" in str(outcome[0])
    assert isinstance(outcome[0], PeerLostError)


@pytest.mark.parametrize("sums", ["asked for", "switched on", "ended", "none"])
def test_a_link_that_changes_bytes_is_named_if_payloads_have_checksums(
    sums: str,
) -> None:
    """Also if only the sender has switched them on, until the generation ends."""
    load_event_loop()
    is_asked = sums == "asked for"
    with transports(2, link_timeout_s=LINK_TIMEOUT_S, sums_payloads=is_asked) as both:
        payloads = [np.arange(1000, dtype=np.float32) for _ in both]

        def work(rank: int) -> str:
            both[rank].connect({1 - rank: both[1 - rank].address}, timeout_s=HANG_S)
            if rank == 1 and sums in ("switched on", "ended"):
                both[rank].sum_payloads()
            if sums == "ended":
                both[rank].renew(1)
            if rank == 0:
                both[rank].corrupt(1)
            task = task_for(PROGRAMS[rank], payloads[rank], n_slices=N_SLICES)
            try:
                both[rank].run(task, payloads[rank].view(np.uint8))
            except PeerLostError as error:
                return str(error)
            finally:
                both[rank].drop([1 - rank])
            return "right" if (payloads[rank] == 2 * np.arange(1000)).all() else "wrong"

        first, second = together(work, 2)

    if sums in ("asked for", "switched on"):
        assert first == "rank 1 sent rank 0 a frame whose payload does not match its checksum"
        assert second != "wrong"
    else:
        assert first == "wrong"

"""What goes first over a link: the smallest slice + delay, then the first row, as simulated."""

import socket
import time

import numpy as np

from local_ranks import SECRET, together
from meshmend.schedule.hazards import hazards_of
from meshmend.schedule.table import COPY, Collective, Rows, schedule_of
from meshmend.transport.event_loop import HEADER_BYTES, LENGTH_WORD, ROW_WORD
from meshmend.transport.handshake import ConnectRequest, Deadline, dial
from meshmend.transport.sockets import SocketTransport
from meshmend.transport.tasks import rank_program, task_of
from waiting import HANG_S

N_SLICES = 4


def sent_by_rank_1(delays: list[float] | None) -> list[tuple[int, int]]:
    """Return slice and row of what rank 1 sends to rank 0, which can all be sent at once."""
    one, zero, chunk = np.array([1, 1]), np.array([0, 0]), np.array([0, 1])
    schedule = schedule_of(
        [("copy", Rows(src=one, dst=zero, lo=chunk, hi=chunk + 1, op=COPY))],
        algorithm="two rows",
        collective=Collective.ALL_GATHER,
        owners=np.array([1, 1]),
        n_ranks=2,
    )
    program = rank_program(schedule, hazards_of(schedule), 1)
    given = None if delays is None else np.array(delays)
    task = task_of(program, 64, n_slices=N_SLICES, delays=given)
    with SocketTransport(1, ["rank 0", "rank 1"], SECRET) as transport:
        address, links = ("127.0.0.1", transport.address[1]), list[socket.socket]()

        def connect(rank: int) -> None:
            if rank == 1:
                transport.connect({0: ("", 0)}, epochs={0: 1}, timeout_s=HANG_S)
            else:
                request = ConnectRequest(0, 1, 1, 1)
                links.append(dial(address, SECRET, request, Deadline(time.monotonic() + HANG_S)))

        transport.renew(1)
        assert together(connect, 2) == [None, None]
        with links[0] as link, link.makefile("rb") as stream:
            link.settimeout(HANG_S)
            run = transport.start(task, np.zeros(task.n_bytes, dtype=np.uint8))
            found = []
            for _ in range(2 * N_SLICES):
                words = np.frombuffer(stream.read(HEADER_BYTES), dtype=np.int64)
                stream.read(int(words[LENGTH_WORD]))
                found.append(divmod(int(words[ROW_WORD]), 1 << 32))
            run.wait()
            return found


def test_what_is_ready_goes_by_slice_plus_delay_then_by_row() -> None:
    by_slices = [(part, row) for part in range(N_SLICES) for row in (0, 1)]
    later = [(0, 1), (1, 1), (0, 0), (2, 1), (1, 0), (3, 1), (2, 0), (3, 0)]

    assert sent_by_rank_1(None) == by_slices
    assert sent_by_rank_1([2.0, 0.0]) == later
    assert sent_by_rank_1([0.0, 0.25]) == by_slices
    assert sent_by_rank_1([100.0, 0.0]) == sorted(by_slices, key=lambda each: (-each[1], each[0]))

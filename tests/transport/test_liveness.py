"""Who is silent, and for how long to wait before the next call."""

import socket

from hypothesis import given
from hypothesis import strategies as st

from meshmend.transport.liveness import Silence, is_unanswered, keep_alive, limit_unacknowledged
from meshmend.transport.pacing import Backoff


def test_waits_double_up_to_a_second_and_begin_again_after_a_reset() -> None:
    backoff = Backoff(seed=1)

    waits = [backoff.wait_s() for _ in range(8)]
    backoff.reset()

    limits = [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    assert all(limit / 2 <= wait <= limit for wait, limit in zip(waits, limits, strict=True))
    assert backoff.wait_s() <= limits[0]


@given(st.integers(0, 10_000))
def test_neighbours_do_not_wait_equally_long(seed: int) -> None:
    one, other = Backoff(seed), Backoff(seed + 1)

    assert [one.wait_s() for _ in range(4)] != [other.wait_s() for _ in range(4)]


def test_only_silence_that_was_listened_to_counts() -> None:
    silence = Silence(0.0)

    assert not any(silence.is_too_long(now, 2.0, has_heard=False) for now in (0.5, 1.0, 1.5, 2.0))
    assert silence.is_too_long(2.5, 2.0, has_heard=False)
    assert not silence.is_too_long(2.6, 2.0, has_heard=True)
    assert not silence.is_too_long(9.0, 2.0, has_heard=False)  # this process was held up
    assert not silence.is_too_long(9.5, 2.0, has_heard=False)


def test_an_idle_connection_is_asked_every_second_and_is_not_silent_on_loopback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as one:
            other, _ = server.accept()
            keep_alive(one, 2.0)
            limit_unacknowledged(one, 2.5)

            options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_USER_TIMEOUT)
            asked = [one.getsockopt(socket.IPPROTO_TCP, option) for option in options]
            assert asked == [1, 1, 2500]
            assert not is_unanswered(one, 0.0)
            other.close()
        assert not is_unanswered(one, 0.0)  # closed: whoever reads will see

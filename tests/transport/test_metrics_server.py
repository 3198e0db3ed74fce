"""One text over HTTP: right callers get it, and wrong callers hold up nobody."""

import http.client
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, closing

import pytest

from meshmend.transport.listener import Address, listening
from meshmend.transport.metrics_server import MetricsServer
from waiting import HANG_S


@pytest.fixture
def address() -> Iterator[Address]:
    listener = listening("127.0.0.1")
    where: Address = listener.getsockname()[:2]
    with closing(MetricsServer(listener, lambda: "meshmend_step 7\n", "text/plain")):
        yield where


def scraped(address: Address, path: str = "/metrics") -> str:
    url = f"http://{address[0]}:{address[1]}{path}"
    with urllib.request.urlopen(url, timeout=HANG_S) as answer:
        assert answer.headers["Content-Type"] == "text/plain"
        text: str = answer.read().decode()
        return text


def test_the_text_is_at_metrics_and_nowhere_else(address: Address) -> None:
    assert scraped(address) == "meshmend_step 7\n"
    assert scraped(address, "/metrics?name=x") == "meshmend_step 7\n"
    with pytest.raises(urllib.error.HTTPError, match="the metrics are at /metrics"):
        scraped(address, "/")


def test_only_get_is_understood(address: Address) -> None:
    with closing(http.client.HTTPConnection(*address, timeout=HANG_S)) as caller:
        caller.request("POST", "/metrics")

        assert caller.getresponse().status == 501


def test_callers_that_say_nothing_hold_up_nobody(address: Address) -> None:
    with ExitStack() as stack:
        for number in range(100):
            caller = stack.enter_context(socket.create_connection(address))
            if number % 3 == 0:
                caller.sendall(b"GET /metrics HTTP/1.1\r\n" if number % 2 else b"\xff\x00")

        assert scraped(address) == "meshmend_step 7\n"


def test_a_text_that_cannot_be_read_is_an_error_of_the_server() -> None:
    def read() -> str:
        raise TimeoutError("the coordinator does not answer")

    listener = listening("127.0.0.1")
    where: Address = listener.getsockname()[:2]
    with (
        closing(MetricsServer(listener, read, "text/plain")),
        pytest.raises(urllib.error.HTTPError, match="503"),
    ):
        scraped(where)


def test_nobody_is_left_after_close(address: Address) -> None:
    listener = listening("127.0.0.1")
    where: Address = listener.getsockname()[:2]
    MetricsServer(listener, lambda: "", "text/plain").close()

    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(where)

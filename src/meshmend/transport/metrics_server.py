"""Serves one text over HTTP, for a program that scrapes it; knows nothing of what the text says.

Anyone who reaches the address may read: scrapers know no secret of ours. A caller that sends
nothing or reads nothing delays no other. When there are too many, the oldest is cut off; a scrape
takes milliseconds, so it gets through.
"""

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from logging import getLogger
from typing import Any, Final

_log = getLogger(__name__)

_MOST_CALLERS: Final = 16
_PATIENCE_S: Final = 5.0
_LOOK_UP_S: Final = 0.1  # how soon `close` is noticed
_PATH: Final = "/metrics"


class MetricsServer:
    """Serves what `read` returns, at `/metrics`; `read` is called in the server's threads."""

    def __init__(self, listener: socket.socket, read: Callable[[], str], content_type: str) -> None:
        self._server = _Server(listener, read, content_type)
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            args=(_LOOK_UP_S,),
            name="meshmend-metrics",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Stop serving."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, read: Callable[[], str], content_type: str) -> None:
        super().__init__(listener.getsockname(), _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        self.read, self.content_type = read, content_type
        self._callers: list[socket.socket] = []
        self._lock = threading.Lock()

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            if len(self._callers) >= _MOST_CALLERS:
                oldest = self._callers.pop(0)
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread then ends
            self._callers.append(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock, suppress(ValueError):
            self._callers.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        _log.debug("a scrape of %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = _PATIENCE_S

    def do_GET(self) -> None:  # the name that http.server calls
        if self.path.partition("?")[0] != _PATH:
            self.send_error(HTTPStatus.NOT_FOUND, f"the metrics are at {_PATH}")
            return
        try:
            text = self.server.read().encode()
        except Exception as error:
            _log.warning("the metrics cannot be read: %r", error)
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE)
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", self.server.content_type)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # its own name
        _log.debug(format, *args)

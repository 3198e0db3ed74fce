"""One TCP transfer between two chips, timed where it arrives.

Run by path on a chip, so it imports the standard library only:

    python -I -S transfer.py receive ADDRESS        prints its port, then bytes and seconds
    python -I -S transfer.py send ADDRESS PORT BYTES
"""

import socket
import sys
import time

_PIECE_BYTES = 1 << 16
_WAIT_S = 10.0


def receive(address: str) -> None:
    """Receive one transfer; print its bytes and seconds, counted after the first piece."""
    with socket.create_server((address, 0)) as server:
        server.settimeout(_WAIT_S)
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
    with connection:
        connection.settimeout(_WAIT_S)
        connection.recv(_PIECE_BYTES)
        start, received = time.perf_counter(), 0
        while piece := connection.recv(_PIECE_BYTES):
            received += len(piece)
            stop = time.perf_counter()
        print(received, stop - start if received else 0.0, flush=True)


def send(address: str, port: int, size_bytes: int) -> None:
    """Send `size_bytes` zero bytes."""
    with socket.create_connection((address, port), timeout=_WAIT_S) as connection:
        piece = bytes(_PIECE_BYTES)
        while size_bytes > 0:
            size_bytes -= connection.send(piece[: min(size_bytes, _PIECE_BYTES)])


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        receive(sys.argv[2])
    else:
        send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))

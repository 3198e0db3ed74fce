"""Sets links up or down and replaces routes on many chips, from one thread.

`ip -batch` takes a process per chip; on a machine that is busy training, 64 of those take most
of a second. This module enters one namespace after another and sends netlink messages
(rtnetlink(7)) in each. It knows only the commands that change a live network, as `ip` reads them:

    link set dev NAME up|down
    route replace ADDRESS/32 via ADDRESS dev NAME onlink src ADDRESS
    route del ADDRESS/32

For root it runs in a thread. Other users must first enter a user namespace, which only a process
with one thread may do. For them this file is run by its path, so it imports the standard library
only. Standard input is one JSON object that maps paths of namespaces to commands. The exit code is
1 if the kernel refused a command.

    python -I -S agent.py
"""

import ctypes
import json
import os
import socket
import struct
import sys
from collections.abc import Mapping

_NEWLINK, _NEWROUTE, _DELROUTE = 16, 24, 25
_REQUEST, _ACK, _REPLACE, _CREATE, _ERROR = 0x1, 0x4, 0x100, 0x400, 2
_DST, _OIF, _GATEWAY, _PREFSRC = 1, 4, 5, 7
_MAIN_TABLE, _BOOT, _UNICAST, _NOWHERE, _ONLINK, _UP = 254, 3, 1, 255, 4, 1
_HEADER = struct.Struct("=IHHII")  # length, type, flags, sequence, port


def change(commands: list[str]) -> None:
    """Run these commands in the network namespace of the calling thread.

    Raises:
        OSError: the kernel refused a command; the others were run.
    """
    messages = [_message(line.split()) for line in commands]
    batch = b""
    for number, (kind, flags, body) in enumerate(messages):
        # The kernel always reports failures; only the last command needs to report success.
        flags |= _REQUEST | (_ACK if number == len(messages) - 1 else 0)
        batch += _HEADER.pack(_HEADER.size + len(body), kind, flags, number, 0) + body
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel:
        kernel.bind((0, 0))
        kernel.settimeout(5)
        kernel.send(batch)
        _await_answers(kernel, commands)


def _await_answers(kernel: socket.socket, commands: list[str]) -> None:
    refused: list[OSError] = []
    number = -1
    while number < len(commands) - 1:
        answer = kernel.recv(1 << 16)
        while answer:
            length, kind, _, number, _ = _HEADER.unpack_from(answer)
            code = -struct.unpack_from("=i", answer, _HEADER.size)[0]
            if kind == _ERROR and code:
                refused.append(OSError(code, os.strerror(code), commands[number]))
            answer = answer[(length + 3) & ~3 :]
    if refused:
        raise refused[0]


def _message(words: list[str]) -> tuple[int, int, bytes]:
    """Return the type, the flags and the body of the netlink message for a command."""
    match words:
        case ["link", "set", "dev", name, state]:
            is_up = _UP if state == "up" else 0
            return (
                _NEWLINK,
                0,
                struct.pack("=BxHiII", 0, 0, socket.if_nametoindex(name), is_up, _UP),
            )
        case ["route", "del", goal]:
            return _DELROUTE, 0, _route(0, 0, _NOWHERE, 0) + _attribute(_DST, _packed(goal))
        case ["route", "replace", goal, "via", gateway, "dev", name, "onlink", "src", source]:
            body = _route(_BOOT, _UNICAST, 0, _ONLINK)
            body += _attribute(_DST, _packed(goal)) + _attribute(_GATEWAY, _packed(gateway))
            body += _attribute(_OIF, struct.pack("=i", socket.if_nametoindex(name)))
            return _NEWROUTE, _REPLACE | _CREATE, body + _attribute(_PREFSRC, _packed(source))
        case _:
            raise AssertionError(words)


def _route(protocol: int, kind: int, scope: int, flags: int) -> bytes:
    ends = (socket.AF_INET, 32, 0, 0)
    return struct.pack("=8BI", *ends, _MAIN_TABLE, protocol, scope, kind, flags)


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value


def _packed(address: str) -> bytes:
    return socket.inet_aton(address.removesuffix("/32"))


def change_all(work: Mapping[str, str]) -> list[str]:
    """Run each batch in its namespace and return the errors; the thread stays in the last one."""
    libc = ctypes.CDLL(None, use_errno=True)
    errors = []
    for path, batch in work.items():
        try:
            namespace = os.open(path, os.O_RDONLY)
            if libc.setns(namespace, 0):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
            os.close(namespace)
            change(batch.splitlines())
        except OSError as error:
            errors.append(f"{error.filename}: {error.strerror or error}")
    return errors


if __name__ == "__main__":
    sys.exit("\n".join(change_all(json.load(sys.stdin))) or None)

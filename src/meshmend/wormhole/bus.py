"""The way to the chips: reads and writes through their PCIe windows, one process away.

`Bus` is all that the host side needs of a machine. `SimulatedBus` is the 32 chips of `libttsim.so`,
by its C interface. On silicon the same three calls go to `/dev/tenstorrent/N`: its BAR0 is mapped
into memory, and a window is aimed in the same way; time passes by itself.

The simulator ends its process when a program does what the hardware does not define. So it runs in
a child process, `python -m meshmend.wormhole.bus LIBRARY`, and `RemoteBus` speaks to it.
"""

import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Final, Protocol

import msgspec

from meshmend.errors import InputError, TransportError
from meshmend.processes import die_with_parent

_WORMHOLE: Final = 0x401E1E52  # device and vendor
_BLACKHOLE: Final = 0xB1401E52
_NO_DEVICE: Final = 0xFFFFFFFF
_MOST_CHIPS: Final = 32  # that the numbers of a PCI bus can tell apart
_CHIP_STRIDE: Final = 1 << 36
_BAR0: Final = 1 << 32
_WINDOW_AIM: Final = 0x1FC00000
_WINDOW_BITS: Final = 20
_LENGTH_BYTES: Final = 8


class Read(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Read bytes of a core, or of a DRAM, of a chip."""

    chip: int
    place: int
    address: int
    n_bytes: int


class Write(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Write bytes there."""

    chip: int
    place: int
    address: int
    data: bytes


class Clock(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Let time pass."""

    n_clocks: int


Request = Read | Write | Clock


class Bus(Protocol):
    """What the host can do with the chips of a machine."""

    @property
    def n_chips(self) -> int:
        """How many chips have a window."""
        ...

    def do(self, requests: Sequence[Request]) -> list[bytes]:
        """Do all requests, one after another, and return what was read."""
        ...


class SimulatedBus:
    """The chips of a library of ttsim, in this process.

    Raises:
        InputError: the library cannot be loaded, or simulates other chips.
    """

    def __init__(self, library: str) -> None:
        try:
            self._lib = ctypes.CDLL(library)
            self._lib.libttsim_pci_config_rd32.restype = ctypes.c_uint32
            self._lib.libttsim_init.restype = None
        except (OSError, AttributeError) as error:
            raise InputError(f"cannot use {library} as a library of ttsim: {error}") from None
        self._lib.libttsim_init()
        ids = []
        for chip in range(_MOST_CHIPS):
            ids.append(self._lib.libttsim_pci_config_rd32(chip << 3, 0))
            if ids[-1] == _NO_DEVICE:
                ids.pop()
                break
        if any(each != _WORMHOLE for each in ids):
            name = "Blackhole" if _BLACKHOLE in ids else f"device {ids[0]:#x}"
            raise InputError(
                f"meshmend wormhole needs a library of Wormhole chips, but {library} has {name}"
            )
        self.n_chips = len(ids)

    def do(self, requests: Sequence[Request]) -> list[bytes]:
        """Do all requests, one after another, and return what was read."""
        results = []
        for request in requests:
            if isinstance(request, Clock):
                self._lib.libttsim_clock(ctypes.c_uint32(request.n_clocks))
            elif isinstance(request, Write):
                self._access(request, len(request.data), request.data)
            else:
                data = ctypes.create_string_buffer(request.n_bytes)
                self._access(request, request.n_bytes, data)
                results.append(data.raw)
        return results

    def _access(self, request: Read | Write, n_bytes: int, data: Any) -> None:
        """Move bytes through window 0, which shows one MiB of a core or a DRAM at a time."""
        base = request.chip * _CHIP_STRIDE + _BAR0
        done = 0
        while done < n_bytes:
            address = request.address + done
            offset = address & (1 << _WINDOW_BITS) - 1
            part = min(n_bytes - done, (1 << _WINDOW_BITS) - offset)
            aim = address >> _WINDOW_BITS | request.place << (36 - _WINDOW_BITS)
            self._lib.libttsim_pci_mem_wr_bytes(
                ctypes.c_uint64(base + _WINDOW_AIM), aim.to_bytes(8, "little"), ctypes.c_uint32(8)
            )
            where, size = ctypes.c_uint64(base + offset), ctypes.c_uint32(part)
            if isinstance(request, Write):
                self._lib.libttsim_pci_mem_wr_bytes(where, data[done : done + part], size)
            else:
                self._lib.libttsim_pci_mem_rd_bytes(where, ctypes.byref(data, done), size)
            done += part


class RemoteBus:
    """A library of ttsim in a child process; a context manager, which ends it.

    Raises:
        InputError: the library cannot be used.
        TransportError: the simulator ended; the message has its last words.
    """

    def __init__(self, library: Path) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed in __exit__
        self._process = subprocess.Popen(
            [sys.executable, "-m", "meshmend.wormhole.bus", str(library)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        try:
            hello = self._received(str | int)
        except BaseException:
            self._end()
            raise
        if isinstance(hello, str):
            self._end()
            raise InputError(hello)
        self.n_chips: int = hello

    def do(self, requests: Sequence[Request]) -> list[bytes]:
        """Do all requests, one after another, and return what was read."""
        with suppress(BrokenPipeError):  # the reply that is missing then has the child's last words
            _write(self._to, msgspec.msgpack.encode(list(requests)))
        reply: list[bytes] = self._received(list[bytes])
        return reply

    def _received(self, kind: Any) -> Any:
        data = _read(self._from)
        if data is None:
            self._process.wait()
            self._said.seek(0)
            lines = self._said.read().decode(errors="replace").strip().splitlines()
            raise TransportError(
                "the simulator ended: " + (lines[-1] if lines else "it left no word")
            )
        return msgspec.msgpack.decode(data, type=kind)

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        for each in (self._to, self._from, self._said):
            with suppress(BrokenPipeError):
                each.close()

    def __enter__(self) -> "RemoteBus":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()


def _write(file: IO[bytes], data: bytes) -> None:
    file.write(len(data).to_bytes(_LENGTH_BYTES, "little") + data)
    file.flush()


def _read(file: IO[bytes]) -> bytes | None:
    """Return one message, or None if there is no more."""
    length = file.read(_LENGTH_BYTES)
    if len(length) < _LENGTH_BYTES:
        return None
    n_bytes = int.from_bytes(length, "little")
    data = file.read(n_bytes)
    return data if len(data) == n_bytes else None


def _serve(library: str) -> None:
    """Answer requests on standard input until it ends; the simulator prints on standard error."""
    die_with_parent(os.getppid())
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    try:
        bus = SimulatedBus(library)
    except InputError as error:
        _write(out, msgspec.msgpack.encode(str(error)))
        return
    _write(out, msgspec.msgpack.encode(bus.n_chips))
    while (data := _read(sys.stdin.buffer)) is not None:
        requests = msgspec.msgpack.decode(data, type=list[Request])
        _write(out, msgspec.msgpack.encode(bus.do(requests)))


if __name__ == "__main__":
    _serve(sys.argv[1])

"""The live page of a local job: `meshmend explore` in a process of its own.

The launcher's loop reads two pipes: the page's address comes through one, and faults that a user
clicks through the other. The process dies with the launcher. Training does not depend on it.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from meshmend.config import SECRET
from meshmend.topology.mesh import Mesh, format_wrap
from meshmend.transport.listener import Address

_END_S: Final = 2.0
_MOST_BYTES: Final = 1 << 16  # of unread lines


@dataclass(frozen=True)
class PageRequest:
    """A live page that a user wants: who shows its address, and whether it may inject faults."""

    show: Callable[[str], None]
    allow_faults: bool = False


class LineReader:
    """Reads lines from a pipe without waiting, and passes each one on."""

    def __init__(self, fd: int, take: Callable[[str], None]) -> None:
        self.fd = fd
        self._take = take
        self._text = b""

    def read(self) -> bool:
        """Pass on the lines that have come; return False at the end of the pipe."""
        part = os.read(self.fd, _MOST_BYTES)
        *lines, self._text = (self._text + part).split(b"\n")
        for line in lines:
            self._take(line.decode(errors="replace"))
        return bool(part)


class JobPage:
    """The running process of a live page; `close` ends it.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(
        self,
        request: PageRequest,
        coordinator: Address,
        secret: str,
        mesh: Mesh,
        on_fault: Callable[[str], None],
    ) -> None:
        faults, faults_end = os.pipe()
        out, out_end = os.pipe()
        command = [sys.executable, "-P", "-m", "meshmend", "explore"]
        command += ["--coordinator", f"{coordinator[0]}:{coordinator[1]}"]
        command += ["--wrap", format_wrap(mesh.wrap), "--parent", str(os.getpid())]
        if request.allow_faults:
            command += ["--faults-to", str(faults_end)]
        try:
            # A process group of its own, so that Ctrl-C ends the launcher, which ends this.
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out_end,
                env={**os.environ, SECRET.name: secret},
                pass_fds=(faults_end,),
                process_group=0,
            )
        finally:
            os.close(faults_end)
            os.close(out_end)
        self.readers = (
            LineReader(out, lambda line: request.show(line.removeprefix("explorer").strip())),
            LineReader(faults, on_fault),
        )

    def close(self) -> None:
        """End the process."""
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

"""Prints the output of many workers on one terminal: whole lines, each prefixed by its chip."""

import os
import sys
from typing import IO

_LONGEST_LINE = 1 << 16
_READ_BYTES = 1 << 16


class OutputLines:
    """Copies one worker's output from a pipe to a stream of the launcher, line by line."""

    def __init__(self, fd: int, prefix: str, target: IO[str]) -> None:
        self.fd = fd
        self._prefix = prefix
        self._target = target
        self._rest = b""

    def read(self) -> bool:
        """Read the pipe once and print the whole lines; return False at the end of the pipe."""
        data = os.read(self.fd, _READ_BYTES)
        *lines, self._rest = (self._rest + data).split(b"\n")
        if self._rest and (not data or len(self._rest) > _LONGEST_LINE):
            lines, self._rest = [*lines, self._rest], b""
        for line in lines:
            self._target.write(f"{self._prefix}{line.decode(errors='replace')}\n")
        if lines:
            self._target.flush()
        return bool(data)


def say(line: str) -> None:
    """Print a line of meshmend itself on standard error."""
    sys.stderr.write(f"meshmend: {line}\n")  # in one piece: several threads print
    sys.stderr.flush()

"""The lines by which an agent tells its supervisor that it lives, and how it ended."""

import os
import re
import sys
from dataclasses import dataclass
from typing import Final

ALIVE_EVERY_S: Final = 1.0
_LINE: Final = re.compile(rb"meshmend-agent (?:alive|ended (\d{1,3}))\r?")


@dataclass(frozen=True)
class AgentLine:
    """An agent lives; if it has an exit code, it has ended with it."""

    exit_code: int | None = None


def read_agent_line(line: bytes) -> AgentLine | None:
    """Return what a line says about the agent that printed it; None for any other line."""
    found = _LINE.fullmatch(line)
    if found is None:
        return None
    return AgentLine(int(found[1]) if found[1] else None)


def print_agent_line(exit_code: int | None = None) -> None:
    """Print that this agent lives, or its exit code; a supervisor that is gone does not matter."""
    words = "alive" if exit_code is None else f"ended {exit_code}"
    sys.stdout.flush()
    try:
        os.write(sys.stdout.fileno(), f"meshmend-agent {words}\n".encode())
    except OSError:
        return

"""The live page of a local job: `meshmend explore` in a process of its own.

It prints the page's address, and the faults that a user clicks there. The process dies with the
launcher. Training does not depend on it.
"""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass

from meshmend.config import SECRET
from meshmend.launch.supervisor import Supervisor
from meshmend.topology.mesh import Mesh, format_wrap
from meshmend.transport.listener import Address


@dataclass(frozen=True)
class PageRequest:
    """A live page that a user wants: who shows its address, and whether it may inject faults."""

    show: Callable[[str], None]
    allow_faults: bool = False


def start_page(
    request: PageRequest,
    supervisor: Supervisor,
    coordinator: Address,
    secret: str,
    mesh: Mesh,
    on_fault: Callable[[str], None],
) -> None:
    """Start the process of a live page.

    Raises:
        OSError: it cannot be started.
    """

    def take(line: bytes) -> bool:
        what, _, words = line.decode(errors="replace").partition(" ")
        if what == "explorer":
            request.show(words.strip())
        elif what == "fault" and request.allow_faults:
            on_fault(words)
        return True

    command = [sys.executable, "-P", "-m", "meshmend", "explore"]
    command += ["--coordinator", f"{coordinator[0]}:{coordinator[1]}"]
    command += ["--wrap", format_wrap(mesh.wrap), "--parent", str(os.getpid())]
    command += ["--faults"] if request.allow_faults else []
    environment = {**os.environ, SECRET.name: secret}
    # A process group of its own, so that Ctrl-C ends the launcher, which ends this.
    supervisor.spawn(command, environment, take=take, has_group=True)

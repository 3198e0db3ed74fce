"""What to plan before it is needed: a request, and the task of the process that makes the plans.

Imports little, because the process reads its task before it imports the planner.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

from meshmend.errors import MessageError
from meshmend.topology.failures import Link, parse_failure
from meshmend.topology.mesh import Mesh
from meshmend.transport.codec import Codec, Count, Within

# Of each sum the number of elements, and their type; of each gather the bytes, and GATHER.
SumSizes = Sequence[tuple[int, str]]
GATHER: Final = "all-gather"


@dataclass(frozen=True)
class PlanRequest:
    """Sums and gathers that may be needed next: on what is left when a board of a mesh fails."""

    mesh: Mesh
    board: tuple[int, ...]
    algorithm: str
    sums: tuple[tuple[Count, str], ...]


@dataclass(frozen=True)
class PlanTask:
    """A request, the folder of its plans, and where in the list of losses to begin, 0 to 1."""

    folder: str
    request: PlanRequest
    begin: Annotated[float, Within(0.0, 1.0)] = 0.0

    @property
    def path(self) -> Path:
        """The folder of the plans."""
        return Path(self.folder)


def _link(text: str) -> Link:
    link = parse_failure(text)
    if not isinstance(link, Link):
        raise ValueError(text)
    return link


_CODEC: Final = Codec("a task to plan ahead", {"plan": PlanTask}, texts={Link: _link})


def encode_task(task: PlanTask) -> bytes:
    """Return a task as bytes that `decode_task` reads back."""
    return json.dumps(_CODEC.encode(task)).encode()


def decode_task(data: bytes) -> PlanTask:
    """Return the task that `encode_task` wrote.

    Raises:
        MessageError: the bytes are not a task.
    """
    try:
        document = json.loads(data)
    except ValueError as error:
        raise MessageError(f"a task to plan ahead needs to be JSON, but: {error}") from None
    task: PlanTask = _CODEC.decode(document)
    return task

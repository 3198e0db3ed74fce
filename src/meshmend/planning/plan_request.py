"""What to plan before it is needed: a request, and the task of the process that makes the plans.

Imports little, because the process reads its task before it imports the planner.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec

from meshmend.topology.failures import format_shape
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_tile
from meshmend.transport.codec import Count, Value, checked

# Of each sum the number of elements, and their type; of each gather the bytes, and GATHER; of each
# sum between tiles the bytes of a tile, and what `tile_sum` returns.
SumSizes = Sequence[tuple[int, str]]
GATHER: Final = "all-gather"
_TILES: Final = "tiles "


def tile_sum(n_bytes: int, tile: tuple[int, ...]) -> tuple[int, str]:
    """Return the size of a sum between tiles."""
    return n_bytes, _TILES + format_shape(tile)


def tile_of(dtype: str) -> tuple[int, ...]:
    """Return the tile of a sum between tiles, () of other sums."""
    return parse_tile(dtype.removeprefix(_TILES)) if dtype.startswith(_TILES) else ()


class PlanRequest(Value, frozen=True):
    """Sums and gathers that may be needed next: on what is left when a board of a mesh fails."""

    mesh: Mesh
    board: tuple[int, ...]
    algorithm: str
    sums: tuple[tuple[Count, str], ...]


class PlanTask(Value, frozen=True):
    """A request, the folder of its plans, and where in the list of losses to begin, 0 to 1."""

    folder: str
    request: PlanRequest
    begin: Annotated[float, msgspec.Meta(ge=0.0, le=1.0)] = 0.0

    @property
    def path(self) -> Path:
        """The folder of the plans."""
        return Path(self.folder)


def encode_task(task: PlanTask) -> bytes:
    """Return a task as bytes that `decode_task` reads back."""
    return msgspec.json.encode(task)


def decode_task(data: bytes) -> PlanTask:
    """Return the task that `encode_task` wrote.

    Raises:
        MessageError: the bytes are not a task.
    """
    task: PlanTask = checked(
        lambda: msgspec.json.decode(data, type=PlanTask), "a task to plan ahead"
    )
    return task

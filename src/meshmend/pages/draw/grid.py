"""Where things lie in the picture of a mesh: chips, layers, and the ends of links.

The last axis runs to the right, the one before it downwards; every choice of the axes before
those is a layer of its own, drawn side by side. Knows places, not marks.
"""

import math
from dataclasses import dataclass
from enum import Enum

from meshmend.pages.draw.svg import Point
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh

_LAYER_GAP = 14.0
_LAYER_LABEL = 16.0
_ROW_WIDTH = 900.0  # a row of layers is filled up to this before the next begins


class Reach(Enum):
    """How a hop between two chips lies in the picture."""

    NEAR = "neighbours on a line"
    WRAP = "neighbours over the border"
    LAYER = "neighbours in different layers"
    SKIP = "on a line, past other chips"
    FAR = "anything else"


@dataclass(frozen=True)
class Grid:
    """The places of a mesh's chips when neighbours are `pitch` apart.

    `fill` is a chip's side over the pitch; `numbered` leaves room for row and column numbers.
    """

    mesh: Mesh
    pitch: float
    fill: float = 0.6
    numbered: bool = True

    @property
    def side(self) -> float:
        """The side of a chip's square."""
        return self.pitch * self.fill

    @property
    def n_rows(self) -> int:
        """Rows of one layer; a 1-D mesh is one row."""
        return self.mesh.shape[-2] if len(self.mesh.shape) > 1 else 1

    @property
    def n_columns(self) -> int:
        """Columns of one layer."""
        return self.mesh.shape[-1]

    @property
    def layer_shape(self) -> tuple[int, ...]:
        """The axes that number the layers; empty for one and two axes."""
        return self.mesh.shape[:-2]

    @property
    def n_layers(self) -> int:
        """How many layers are drawn side by side."""
        return math.prod(self.layer_shape)

    @property
    def border(self) -> float:
        """Room around the cells of a layer, for the stubs of wrap links."""
        return 0.3 * self.pitch if any(self.mesh.wrap) else 0.05 * self.pitch

    @property
    def number_size(self) -> float:
        """The font size of row and column numbers."""
        return min(11.0, max(8.0, 0.36 * self.pitch))

    @property
    def margin(self) -> Point:
        """Room left of and above a layer's cells, for numbers and the layer's name."""
        if not self.numbered:
            return self.border, self.border
        digits = len(str(self.n_rows - 1))
        left = 4 + 0.6 * self.number_size * digits if len(self.mesh.shape) > 1 else 0.0
        name = _LAYER_LABEL if self.layer_shape else 0.0
        return left + self.border, 1.3 * self.number_size + name + self.border

    @property
    def layer_size(self) -> Point:
        """The width and height of one layer with its numbers."""
        left, top = self.margin
        width = left + self.n_columns * self.pitch + self.border
        return width, top + self.n_rows * self.pitch + self.border

    @property
    def layers_per_row(self) -> int:
        """How many layers stand side by side: the last layer axis, or rows of equal length."""
        if len(self.layer_shape) > 1:
            return self.layer_shape[-1]
        width, height = self.layer_size
        square = round(math.sqrt(1.8 * self.n_layers * height / width))
        n_most = max(1, square, int(_ROW_WIDTH / (width + _LAYER_GAP)))
        n_rows = math.ceil(self.n_layers / n_most)
        return math.ceil(self.n_layers / n_rows)

    @property
    def size(self) -> Point:
        """The width and height of the whole picture."""
        width, height = self.layer_size
        across = self.layers_per_row
        down = math.ceil(self.n_layers / across)
        return across * (width + _LAYER_GAP) - _LAYER_GAP, down * (height + _LAYER_GAP) - _LAYER_GAP

    def layer_origin(self, layer: tuple[int, ...]) -> Point:
        """Return the upper left corner of a layer's box, its numbers included."""
        number = 0
        for at, size in zip(layer, self.layer_shape, strict=True):
            number = number * size + at
        down, across = divmod(number, self.layers_per_row)
        width, height = self.layer_size
        return across * (width + _LAYER_GAP), down * (height + _LAYER_GAP)

    def centre(self, chip: Chip) -> Point:
        """Return the middle of a chip."""
        left, top = self.layer_origin(chip[:-2])
        row = chip[-2] if len(chip) > 1 else 0
        return (
            left + self.margin[0] + (chip[-1] + 0.5) * self.pitch,
            top + self.margin[1] + (row + 0.5) * self.pitch,
        )

    def heading(self, chip: Chip, port: int) -> Point:
        """Return the unit vector in which a link leaves a chip; between layers it is slanted."""
        up = 1.0 if port % 2 else -1.0
        axis = port // 2 - len(self.mesh.shape)
        if axis == -1:
            return up, 0.0
        if axis == -2:
            return 0.0, up
        return (0.7 * up, -0.7 * up) if axis % 2 else (-0.7 * up, -0.7 * up)

    def stub(self, chip: Chip, port: int) -> tuple[Point, Point]:
        """Return the two ends of the short line that stands for a link that cannot be drawn."""
        x, y = self.centre(chip)
        dx, dy = self.heading(chip, port)
        # A slanted stub starts at the corner of the chip and stays between it and its neighbours.
        far = 0.5 * self.pitch + self.border if 0.0 in (dx, dy) else 0.62 * self.pitch
        near = 0.5 * self.side if 0.0 in (dx, dy) else 0.66 * self.side
        return (x + dx * near, y + dy * near), (x + dx * far, y + dy * far)


def drawn_apart(mesh: Mesh, chip: Chip, port: int) -> bool:
    """Whether the link behind a port leads over the border or to another layer."""
    axis, up = divmod(port, 2)
    if axis < len(mesh.shape) - 2:
        return True
    return chip[axis] == (mesh.shape[axis] - 1 if up else 0)


def reach(mesh: Mesh, source: Chip, target: Chip) -> tuple[Reach, int]:
    """Return how a hop lies in the picture, and the port by which it leaves its source."""
    apart = [axis for axis in range(len(mesh.shape)) if source[axis] != target[axis]]
    if len(apart) != 1:
        return Reach.FAR, 0
    (axis,) = apart
    step, size = target[axis] - source[axis], mesh.shape[axis]
    over_border = mesh.wrap[axis] and size > 2 and abs(step) == size - 1
    port = 2 * axis + int((step > 0) != over_border)
    if abs(step) != 1 and not over_border:
        return (Reach.SKIP if axis >= len(mesh.shape) - 2 else Reach.FAR), port
    if axis < len(mesh.shape) - 2:
        return Reach.LAYER, port
    return (Reach.WRAP if over_border else Reach.NEAR), port


def fitting_grid(mesh: Mesh, *, fill: float = 0.6, roomy: bool = False) -> Grid:
    """Return a grid whose cells shrink as the mesh grows, from 44 (or 60) down to 10."""
    longest = max(mesh.shape[-2:])
    n_layers = math.prod(mesh.shape[:-2])
    widest = 60.0 if roomy else 44.0
    room = 720.0 if n_layers == 1 else 420.0
    pitch = min(widest, max(10.0, room / max(longest, 1)))
    return Grid(mesh, round(pitch), fill)

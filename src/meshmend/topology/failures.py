"""What can fail or be slow, as a value and as text: a block of chips, or one link.

Knows the grammar of `--fail` and `--slow` and nothing of any mesh: the mesh checks whether a block
lies inside it.

    4x2@6,8        the block of shape 4x2 whose first chip is (6, 8)
    3,4            one chip
    link:3,4-3,5   one link, both directions
    board:3,4      the 2x2 board that holds chip (3, 4)
    host:3,4       the 4x2 host that holds chip (3, 4)

    link:3,4-3,5=0.25   of `--slow`: a link with a quarter of the others' bandwidth
"""

import itertools
import math
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from meshmend.errors import TopologyError

Chip = tuple[int, ...]  # coordinates, one per axis

# The parts that fail together on TPU-like machines; further axes have extent 1.
REGION_SHAPES: dict[str, tuple[int, int]] = {"board": (2, 2), "host": (4, 2)}

LEAST_SPEED = 0.001  # of a link, as a part of the others' bandwidth

_HOW_TO_WRITE = "write 4x2@6,8 (block), 3,4 (chip), link:3,4-3,5, board:3,4 or host:3,4"


@dataclass(frozen=True, order=True)
class Block:
    """A box of chips: `shape` chips from `origin` on, axis by axis."""

    shape: tuple[int, ...]
    origin: Chip

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.origin) or min(self.shape, default=0) < 1:
            raise TopologyError(
                f"Block needs a positive extent and a start for each axis, but got shape "
                f"{self.shape} at {self.origin}"
            )

    def chips(self) -> Iterator[Chip]:
        """Yield the chips of the block in row-major order."""
        spans = zip(self.origin, self.shape, strict=True)
        return itertools.product(*(range(first, first + size) for first, size in spans))

    def __str__(self) -> str:
        at = format_chip(self.origin)
        return at if math.prod(self.shape) == 1 else f"{format_shape(self.shape)}@{at}"


@dataclass(frozen=True, order=True)
class Link:
    """The link between two chips, both directions; `first` sorts before `second`."""

    first: Chip
    second: Chip

    def __post_init__(self) -> None:
        if not self.first < self.second:
            raise TopologyError(
                f"Link needs two different chips in order, but got {self.first} and {self.second}; "
                "use Link.between"
            )

    @classmethod
    def between(cls, one: Chip, other: Chip) -> "Link":
        """Return the link between two chips named in any order."""
        return cls(min(one, other), max(one, other))

    def __str__(self) -> str:
        return f"link:{format_chip(self.first)}-{format_chip(self.second)}"


Failure = Block | Link


@dataclass(frozen=True, order=True)
class SlowLink:
    """A link and its speed: the part of the fabric's bandwidth that it has, each way."""

    link: Link
    speed: float

    def __post_init__(self) -> None:
        if not LEAST_SPEED <= self.speed <= 1:
            raise TopologyError(
                f"{self.link} needs a speed from {LEAST_SPEED} to 1, but got {self.speed}; 1 is "
                "the full bandwidth, and a link below the least is left out with --fail"
            )

    def __str__(self) -> str:
        return f"{self.link}={self.speed!r}"


def blocks_over(extents: tuple[int, ...], shape: tuple[int, ...]) -> Iterator[Block]:
    """Yield the blocks of a shape that cover a mesh, in row-major order from chip 0 on.

    Where the shape does not divide an extent, the last ones reach beyond the mesh.
    """
    starts = (range(0, extent, size) for extent, size in zip(extents, shape, strict=True))
    return (Block(shape, origin) for origin in itertools.product(*starts))


def region(kind: str, chip: Chip) -> Block:
    """Return the board or host that holds a chip; regions tile the mesh from chip 0 on.

    Raises:
        TopologyError: an unknown kind, or a chip with fewer than two axes.
    """
    if kind not in REGION_SHAPES:
        known = " or ".join(sorted(REGION_SHAPES))
        raise TopologyError(f"a region needs to be a {known}, but got {kind!r}; {_HOW_TO_WRITE}")
    if len(chip) < 2:
        raise TopologyError(f"a {kind} needs a mesh of two axes or more, but got chip {chip}")
    shape = board_shape(len(chip), kind)
    return Block(shape, tuple(at - at % size for at, size in zip(chip, shape, strict=True)))


def board_shape(n_axes: int, kind: str = "board") -> tuple[int, ...]:
    """Return the shape of a board or host on so many axes; on one axis it is a single chip."""
    return REGION_SHAPES[kind] + (1,) * (n_axes - 2) if n_axes > 1 else (1,)


def parse_failure(text: str) -> Failure:
    """Return the failure that a `--fail` argument names.

    Raises:
        TopologyError: the text follows none of the forms above.
    """
    word = text.strip()
    try:
        if word.startswith("link:"):
            one, other = word.removeprefix("link:").split("-")
            return Link.between(_chip(one), _chip(other))
        kind, colon, at = word.partition(":")
        if colon and kind.isalpha():
            return region(kind, _chip(at))
        shape, at_sign, origin = word.rpartition("@")
        chip = _chip(origin)
        extents = parse_shape(shape) if at_sign else (1,) * len(chip)
        if len(extents) != len(chip):
            raise TopologyError(
                f"--fail needs a block and its start with as many axes, but the block {shape} has "
                f"{len(extents)} and its start {origin} has {len(chip)}; {_HOW_TO_WRITE}"
            )
        return Block(extents, chip)
    except ValueError:
        raise TopologyError(f"--fail cannot read {text!r}; {_HOW_TO_WRITE}") from None


def parse_link(text: str) -> Link:
    """Return the link that a text such as `link:0,1-0,2` names.

    Raises:
        TopologyError: it names no link.
    """
    link = parse_failure(text)
    if not isinstance(link, Link):
        raise TopologyError(f"a link is written link:0,1-0,2, but got {text!r}")
    return link


def parse_slow(text: str) -> SlowLink:
    """Return the link and its speed that a `--slow` argument such as `link:0,1-0,2=0.25` names.

    Raises:
        TopologyError: it names no link, or no speed that a link may have.
    """
    link, _, speed = text.strip().rpartition("=")
    try:
        one, other = link.removeprefix("link:").split("-")
        if not link.startswith("link:"):
            raise ValueError(text)
        return SlowLink(Link.between(_chip(one), _chip(other)), float(speed))
    except ValueError:
        raise TopologyError(
            f"--slow cannot read {text!r}; write link:3,4-3,5=0.25 for a link with a quarter of "
            "the bandwidth"
        ) from None


def parse_shape(text: str) -> tuple[int, ...]:
    """Return the extents that `16x32` names.

    Raises:
        ValueError: not positive whole numbers joined by `x`.
    """
    if not re.fullmatch(r"[0-9]+(x[0-9]+)*", text.strip()):
        raise ValueError(text)
    shape = tuple(int(part) for part in text.strip().split("x"))
    if 0 in shape:
        raise ValueError(text)
    return shape


def format_chip(chip: Chip) -> str:
    """Return a chip as options and files have it: `0,3`."""
    return ",".join(map(str, chip))


def format_shape(shape: tuple[int, ...]) -> str:
    """Return a shape as `--mesh` writes it: `16x32`."""
    return "x".join(map(str, shape))


def blocks_of(chips: Collection[Chip]) -> tuple[Block, ...]:
    """Return disjoint blocks that cover exactly these chips, each grown as far as it goes.

    Grows from the first chip that is not covered yet, along the last axis first. So a single
    failed block comes back as itself.
    """
    uncovered = set(chips)
    blocks = []
    for chip in sorted(chips):
        if chip not in uncovered:
            continue
        block = Block((1,) * len(chip), chip)
        for axis in reversed(range(len(chip))):
            while uncovered.issuperset(_beyond(block, axis).chips()):
                block = _longer(block, axis)
        uncovered.difference_update(block.chips())
        blocks.append(block)
    return tuple(blocks)


def _longer(block: Block, axis: int) -> Block:
    shape = block.shape
    return Block((*shape[:axis], shape[axis] + 1, *shape[axis + 1 :]), block.origin)


def _beyond(block: Block, axis: int) -> Block:
    """Return the chips that a block gains where it grows by one along an axis."""
    shape, at = block.shape, block.origin
    return Block(
        (*shape[:axis], 1, *shape[axis + 1 :]),
        (*at[:axis], at[axis] + shape[axis], *at[axis + 1 :]),
    )


def _chip(text: str) -> Chip:
    if not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", text):
        raise ValueError(text)
    return tuple(int(part) for part in text.split(","))

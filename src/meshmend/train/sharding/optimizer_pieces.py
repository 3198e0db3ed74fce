"""The state of a sharded optimizer in a checkpoint: each chip saves the pieces that it owns.

In the tree of plain values a **marker** stands where the state of an optimizer belongs. A reader
puts the state together from the pieces of all shards; so nothing is gathered to save it, and what
is read looks as if the optimizer had not been sharded.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from meshmend.errors import CheckpointDamageError
from meshmend.train.sharding.piece_states import copied, merged_states

_MARK: Final = "pieces of optimizer"
_SHAPES: Final = "shapes"

SavedPiece = tuple[int, int, int, dict[str, Any]]  # optimizer, parameter, first element, state


@dataclass(frozen=True)
class OptimizerPieces:
    """In place of the `state` of an optimizer: this chip's pieces of it.

    `shapes` are those of all parameters. A piece is (number of the parameter, its first element,
    state by name).
    """

    shapes: list[tuple[int, ...]]
    pieces: list[tuple[int, int, dict[str, Any]]]


def take_pieces(state: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[SavedPiece] | None]:
    """Return a state with markers in place of pieces, and copies of these; None if it has none."""
    found: list[OptimizerPieces] = []

    def mark(value: Any) -> Any:
        if not isinstance(value, OptimizerPieces):
            return value
        found.append(value)
        return {_MARK: len(found) - 1, _SHAPES: value.shapes}

    if "optimizer" in state:
        state = {**state, "optimizer": _mapped(mark, state["optimizer"])}
    saved = [
        (number, parameter, start, copied(values, device="cpu"))
        for number, each in enumerate(found)
        for parameter, start, values in each.pieces
    ]
    return state, saved if found else None


def put_pieces(state: dict[str, Any], pieces: Iterable[SavedPiece]) -> dict[str, Any]:
    """Return a state with whole states in place of markers.

    Raises:
        CheckpointDamageError: a part is missing.
    """
    known = list(pieces)

    def restore(value: Any) -> Any:
        if not (isinstance(value, dict) and _MARK in value):
            return value
        mine = [each[1:] for each in known if each[0] == value[_MARK]]
        shapes = dict(enumerate(map(tuple, value[_SHAPES])))
        try:
            return merged_states(mine, shapes)
        except ValueError as error:
            raise CheckpointDamageError(str(error)) from None

    return {**state, "optimizer": _mapped(restore, state["optimizer"])}


def _mapped(change: Callable[[Any], Any], state: Any) -> Any:
    """Return the state of one or several optimizers with `change(value)` for each value in it."""
    changed = change(state)
    if changed is state and isinstance(state, dict):
        return {key: _mapped(change, value) for key, value in state.items()}
    return changed

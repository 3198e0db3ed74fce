"""Pieces of parameters, and the states that an optimizer keeps for them: cut, joined, saved.

Parameters lie end to end in a row of bytes. Every parameter begins at a multiple of the alignment
of shares. So a cut between shares never divides what vector instructions handle at once, and an
element gets the same bits in every piece.

A state has tensors with one entry for each element, such as a momentum, and values for the whole
parameter, such as the number of its steps. In a checkpoint each chip saves the pieces that it owns:
in the tree of plain values a **marker** stands where the state of an optimizer belongs. A reader
puts the state together from the pieces of all shards; so nothing is gathered to save it, and what
is read looks as if the optimizer had not been sharded. Knows no optimizer and no chips.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

from meshmend.errors import CheckpointDamageError
from meshmend.train.sharding.update_shares import Span, aligned

State = dict[str, Any]
SavedPiece = tuple[int, int, int, dict[str, Any]]  # optimizer, parameter, first element, state

# Values for the whole parameter; their tensors look like those of a parameter without axes.
_WHOLE: Final = frozenset({"step", "eta", "mu", "mu_product"})

_MARK: Final = "pieces of optimizer"
_SHAPES: Final = "shapes"


class Piece(NamedTuple):
    """Elements of one parameter, given by its number, from `start` to before `stop`."""

    number: int
    start: int
    stop: int


class FlatParameters:
    """The row of some parameters, in their order."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = list(parameters)
        self._begins: list[int] = []
        at = 0
        for parameter in self.parameters:
            self._begins.append(at)
            at += aligned(parameter.nbytes)
        self.n_bytes = at

    def pieces(self, span: Span) -> list[Piece]:
        """Return the pieces of parameters that begin in a span, in order; cuts are aligned."""
        low, high = span
        found = []
        number = max(0, bisect_right(self._begins, low) - 1)
        while number < len(self._begins) and self._begins[number] < high:
            begin, parameter = self._begins[number], self.parameters[number]
            size = parameter.element_size()
            start = max(0, low - begin) // size
            stop = min(parameter.numel(), (high - begin) // size)
            if start < stop:
                found.append(Piece(number, start, stop))
            number += 1
        return found

    def values(self, piece: Piece) -> torch.Tensor:
        """Return a view of the elements of a piece."""
        flat = self.parameters[piece.number].detach().view(-1)
        return flat[piece.start : piece.stop]

    def gradient(self, piece: Piece) -> torch.Tensor | None:
        """Return the gradients of a piece, or None if its parameter has none."""
        gradient = self.parameters[piece.number].grad
        return None if gradient is None else gradient.reshape(-1)[piece.start : piece.stop]

    def bytes_in(self, payload: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Return the place of a piece in a payload of the whole row, as its elements."""
        parameter = self.parameters[piece.number]
        size, begin = parameter.element_size(), self._begins[piece.number]
        part = payload[begin + piece.start * size : begin + piece.stop * size]
        return part.view(parameter.dtype)


def whole_state(state: Mapping[str, Any], parameter: torch.Tensor) -> State:
    """Return the state of a whole parameter as that of a piece, on the parameter's device."""
    return {
        key: value.reshape(-1).to(parameter.device)
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape and key not in _WHOLE
        else value
        for key, value in state.items()
    }


def copied(state: Mapping[str, Any], device: str | None = None) -> State:
    """Return a copy that shares no memory with the state, on another device if one is given."""
    return {
        key: value.to(device, copy=True) if isinstance(value, torch.Tensor) else value
        for key, value in state.items()
    }


def n_bytes_of(states: Iterable[Mapping[str, Any]]) -> int:
    """Return the bytes of all tensors."""
    values = (value for state in states for value in state.values())
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))


def cut_state(states: Mapping[Piece, State], wanted: Piece) -> State:
    """Return the state of a piece, made of the states of pieces that contain its elements.

    The result shares no memory with a longer tensor.
    """
    if wanted in states:
        return states[wanted]
    parts = sorted(
        piece
        for piece in states
        if piece.number == wanted.number and piece.start < wanted.stop and wanted.start < piece.stop
    )
    at, joined = wanted.start, dict[str, Any]()
    for piece in parts:
        first, last = max(piece.start, at), min(piece.stop, wanted.stop)
        if first >= last:
            continue
        assert first == at, f"no state for elements {at} to {first} of parameter {wanted.number}"
        for key, value in states[piece].items():
            if is_by_element(value):
                joined.setdefault(key, []).append(value[first - piece.start : last - piece.start])
            else:
                joined[key] = value.clone() if isinstance(value, torch.Tensor) else value
        at = last
    assert at == wanted.stop, f"no state for elements from {at} of parameter {wanted.number}"
    return {
        key: torch.cat(value) if isinstance(value, list) else value for key, value in joined.items()
    }


def merged_states(
    pieces: Iterable[tuple[int, int, Mapping[str, Any]]], shapes: Mapping[int, tuple[int, ...]]
) -> dict[int, State]:
    """Return the states of whole parameters, given pieces as (number, first element, state).

    Raises:
        ValueError: an element is missing, or is there twice.
    """
    merged: dict[int, State] = {}
    n_found: dict[tuple[int, str], int] = {}
    for number, start, state in pieces:
        shape = torch.Size(shapes[number])
        for key, value in state.items():
            target = merged.setdefault(number, {})
            if not is_by_element(value):
                target[key] = value
                continue
            if key not in target:
                target[key] = torch.empty(shape.numel(), dtype=value.dtype)
            target[key][start : start + len(value)] = value
            n_found[number, key] = n_found.get((number, key), 0) + len(value)
    for (number, key), count in n_found.items():
        if count != torch.Size(shapes[number]).numel():
            raise ValueError(f"its pieces lack a part of {key} of parameter {number}")
        merged[number][key] = merged[number][key].reshape(shapes[number])
    return dict(sorted(merged.items()))


def is_by_element(value: Any) -> bool:
    """Whether a value of a piece's state has one entry for each element."""
    return isinstance(value, torch.Tensor) and value.dim() == 1


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

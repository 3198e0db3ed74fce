"""Pieces of parameters, and the states that an optimizer keeps for them: cut and joined.

Parameters lie end to end in a row of bytes. Every parameter begins at a multiple of the alignment
of shares. So a cut between shares never divides what vector instructions handle at once, and an
element gets the same bits in every piece.

A state has tensors with one entry for each element, such as a momentum, and values for the whole
parameter, such as the number of its steps. Knows no optimizer and no chips.
"""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch

from meshmend.train.sharding.update_shares import Span, aligned
from meshmend.train.torch.local_tensors import first_element, local_of

State = dict[str, Any]

# Values for the whole parameter; their tensors look like those of a parameter without axes.
WHOLE: Final = frozenset({"step", "eta", "mu", "mu_product"})


class Piece(NamedTuple):
    """Elements of one parameter, given by its number, from `start` to before `stop`."""

    number: int
    start: int
    stop: int


class FlatParameters:
    """The row of some parameters, in their order; of a `DTensor`, of what this chip holds."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        self.parameters = list(parameters)
        self._begins: list[int] = []
        at = 0
        for parameter in self.parameters:
            self._begins.append(at)
            at += aligned(local_of(parameter).nbytes)
        self.n_bytes = at

    def pieces(self, span: Span) -> list[Piece]:
        """Return the pieces of parameters that begin in a span, in order; cuts are aligned."""
        low, high = span
        found = []
        number = max(0, bisect_right(self._begins, low) - 1)
        while number < len(self._begins) and self._begins[number] < high:
            begin, parameter = self._begins[number], local_of(self.parameters[number])
            size = parameter.element_size()
            start = max(0, low - begin) // size
            stop = min(parameter.numel(), (high - begin) // size)
            if start < stop:
                found.append(Piece(number, start, stop))
            number += 1
        return found

    def values(self, piece: Piece) -> torch.Tensor:
        """Return a view of the elements of a piece."""
        flat = local_of(self.parameters[piece.number]).view(-1)
        return flat[piece.start : piece.stop]

    def first(self, piece: Piece) -> int:
        """Return the number of the first element of a piece in its whole parameter."""
        return first_element(self.parameters[piece.number]) + piece.start

    def gradient(self, piece: Piece) -> torch.Tensor | None:
        """Return the gradients of a piece, or None if its parameter has none."""
        gradient = self.parameters[piece.number].grad
        if gradient is None:
            return None
        return local_of(gradient).reshape(-1)[piece.start : piece.stop]

    def bytes_in(self, payload: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Return the place of a piece in a payload of the whole row, as its elements."""
        parameter = self.parameters[piece.number]
        size, begin = parameter.element_size(), self._begins[piece.number]
        part = payload[begin + piece.start * size : begin + piece.stop * size]
        return part.view(parameter.dtype)


def whole_state(state: Mapping[str, Any], parameter: torch.Tensor) -> State:
    """Return the state of a whole parameter as that of a piece, on the parameter's device."""
    return {
        key: local_of(value).reshape(-1).to(parameter.device)
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape and key not in WHOLE
        else value
        for key, value in state.items()
    }


def copied(state: Mapping[str, Any]) -> State:
    """Return a copy that shares no memory with the state."""
    return {
        key: value.clone() if isinstance(value, torch.Tensor) else value
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


def is_by_element(value: Any) -> bool:
    """Whether a value of a piece's state has one entry for each element."""
    return isinstance(value, torch.Tensor) and value.dim() == 1

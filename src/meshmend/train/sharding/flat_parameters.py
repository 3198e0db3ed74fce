"""Parameters end to end in a row of bytes, and the pieces of parameters in a span of the row.

Every parameter begins at a multiple of the alignment of shares. So a cut between shares never
divides what vector instructions handle at once, and an element gets the same bits in every piece.
"""

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

import torch

from meshmend.train.sharding.update_shares import Span, aligned


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

"""The states that an optimizer keeps for pieces of parameters: cut, joined, sent and received.

A state has tensors with one entry for each element, such as a momentum, and values for the whole
parameter, such as the number of its steps. Knows no optimizer and no chips.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

from meshmend.train.sharding.flat_parameters import Piece

State = dict[str, Any]

# Values for the whole parameter; their tensors look like those of a parameter without axes.
_WHOLE: Final = frozenset({"step", "eta", "mu", "mu_product"})


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

"""Draws the map of a mesh in a terminal: a coloured cell per chip, or counts if it is too large."""

import itertools
import math

from rich.console import Group, RenderableType
from rich.style import Style
from rich.table import Table
from rich.text import Text

from meshmend.membership.job_view import ChipState, ChipStates
from meshmend.topology.failures import Chip, format_shape

_CELL_WIDTHS = (4, 3, 2, 1)  # columns a chip takes, its gap included, the widest that fits
_LAYER_GAP = 3
_BLOCK = "▇"  # leaves a thin gap above it, between the chips of a column


def mesh_map(states: ChipStates, width: int, height: int) -> RenderableType:
    """Return the map in at most `width` columns and `height` rows, with a legend of its states.

    A mesh of more than two axes is shown layer by layer, side by side. A mesh that does not
    fit even with one column per chip becomes a line with the number of chips in each state.
    """
    for cell in _CELL_WIDTHS:
        per_row = _layers_per_row(states, width, cell)
        if per_row and _n_lines(states, per_row) + 2 <= height:
            return Group(_layers(states, per_row, cell), "", _legend(states))
    shape = format_shape(states.shape)
    return Group(Text(f"{shape}, too large for this terminal to map"), "", _legend(states))


def _sizes(states: ChipStates) -> tuple[int, int, int]:
    """Return layers, rows and columns."""
    rows, columns = (1, *states.shape)[-2:]
    return math.prod(states.shape[:-2]), rows, columns


def _layers_per_row(states: ChipStates, width: int, cell: int) -> int:
    n_layers, _, columns = _sizes(states)
    return min(n_layers, (width + _LAYER_GAP) // (columns * cell + _LAYER_GAP))


def _n_lines(states: ChipStates, per_row: int) -> int:
    n_layers, rows, _ = _sizes(states)
    each = rows if n_layers == 1 else rows + 2
    return each * math.ceil(n_layers / per_row)


def _layers(states: ChipStates, per_row: int, cell: int) -> RenderableType:
    layers = [
        _layer(states, layer, cell) for layer in itertools.product(*map(range, states.shape[:-2]))
    ]
    grid = Table.grid(padding=(0, _LAYER_GAP, 0, 0))
    for at in range(0, len(layers), per_row):
        grid.add_row(*layers[at : at + per_row])
    return grid


def _layer(states: ChipStates, layer: Chip, cell: int) -> Text:
    _, rows, columns = _sizes(states)
    text = Text(no_wrap=True)
    if layer:
        text.append(f"{','.join(map(str, layer))}\n", style="dim")
    for row in range(rows):
        for column in range(columns):
            chip = (*layer, row, column)[-len(states.shape) :]
            _append_cell(text, states[chip], cell)
        text.append("\n" if row + 1 < rows or layer else "")
    return text


def _append_cell(text: Text, state: ChipState, cell: int) -> None:
    """Append a live chip as a block if there is room for one, and any other chip as its sign."""
    style = Style(color=state.colour, bold=True)
    if cell < 3:
        text.append(state.sign.ljust(cell), style=style)
        return
    block = state is ChipState.ALIVE
    text.append(_BLOCK * (cell - 1) if block else state.sign.center(cell - 1), style=style)
    text.append(" ")


def _legend(states: ChipStates) -> Text:
    text = Text()
    for state in ChipState:
        if n_chips := states.count(state):
            text.append(f"{state.sign} {n_chips} {state.title}  ", style=state.colour)
    return text

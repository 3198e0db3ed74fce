"""`meshmend simulate --save-trace`: which bars are written, and how large the file will be."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from meshmend.cli.console import note
from meshmend.errors import InputError, TopologyError

if TYPE_CHECKING:
    from meshmend.planning.comparison import Comparison
    from meshmend.simulator.trace import TraceFilter
    from meshmend.topology.mesh import Mesh


def trace_filter(
    path: Path | None,
    slices: str | None,
    chips: list[str] | None,
    payloads: Sequence[int],
    mesh: "Mesh",
) -> "TraceFilter":
    """Return what the options of a trace ask for.

    Raises:
        InputError: they cannot be read, or do not go together.
    """
    from meshmend.simulator.trace import TraceFilter

    if path is None:
        for name, value in (("--trace-slices", slices), ("--trace-chips", chips)):
            if value:
                raise InputError(f"{name} needs --save-trace FILE: it says what is written there")
        return TraceFilter()
    if len(payloads) > 1:
        raise InputError("--save-trace needs one payload, but got a sweep")
    if path.suffix not in {".json", ".gz"}:
        raise InputError(
            f"--save-trace writes JSON, compressed or not, so it needs a name such as "
            f"trace.json.gz or trace.json, but got {path.name}"
        )
    return TraceFilter(
        slices=_slices(slices) if slices not in {None, "all"} else None,
        every_slice=slices == "all",
        chips=frozenset(chip for text in chips for chip in _chips(text, mesh)) if chips else None,
    )


def _slices(text: str | None) -> frozenset[int]:
    found: set[int] = set()
    for word in (text or "").split(","):
        match = re.fullmatch(r"(\d{1,6})(?:\.\.(\d{1,6}))?", word.strip())
        if match is None:
            raise InputError(f"--trace-slices needs 0..9, 0,50,100 or all, but got {text!r}")
        found |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    if not found:
        raise InputError(f"--trace-slices needs a range that rises, but got {text!r}")
    return frozenset(found)


def _chips(text: str, mesh: "Mesh") -> frozenset[tuple[int, ...]]:
    """Return the live chips of a chip or a block, which are written as failures are."""
    from meshmend.topology.failures import Link, parse_failure

    try:
        place = parse_failure(text)
    except TopologyError:
        place = None
    if place is None or isinstance(place, Link):
        raise InputError(f"--trace-chips needs chips such as 3,4 or 2x2@2,2, but got {text!r}")
    chips = frozenset(place.chips()) & frozenset(mesh.live)
    if not chips:
        raise InputError(f"--trace-chips needs a live chip of {mesh}, but got {text!r}")
    return chips


def write_trace(result: "Comparison", path: Path, wanted: "TraceFilter") -> None:
    """Write the trace of the fastest algorithm; before that, say what is left out and its size."""
    from meshmend.simulator.trace import USUAL_BYTES, chosen_bars, save_trace
    from meshmend.units import format_bytes

    traced = result.traced()
    chosen = chosen_bars(traced, result.part, wanted)
    size = chosen.size_bytes(compressed=path.suffix == ".gz")
    words = f"{len(chosen.bars):,} bars, about {format_bytes(size)}"
    if chosen.n_slices < traced.slices:
        words = f"{chosen.n_slices} of {traced.slices} slices, {words}"
        if wanted.slices is None:
            words += "; --trace-slices chooses others"
    if chosen.n_slices < traced.slices or size > USUAL_BYTES:
        note(f"meshmend: the trace of {result.prices[0].name} has {words}")
    try:
        save_trace(traced, result.part, path, chosen)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from None

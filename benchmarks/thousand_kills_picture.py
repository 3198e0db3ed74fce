"""The picture of `thousand_kills.py`: two losses over each other, their distance, chips at work."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from meshmend.pages.draw.chart import (
    LEFT,
    RIGHT,
    WIDTH,
    Span,
    across_axis,
    box,
    curve,
    value_axis,
)
from meshmend.pages.draw.svg import (
    AMBER,
    BLUE,
    GREEN,
    RED,
    SERIES,
    SOFT_INK,
    Attributes,
    Key,
    Panel,
    framed,
    lighter,
)

PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "thousand-kills.svg"
_CALM, _BAND, _FEWEST = lighter(AMBER, 0.35), lighter(GREEN, 0.86), lighter(GREEN, 0.55)
_TORCHFT = SERIES[7]
_GAP = 40.0

Figures = dict[str, Any]
Floats = NDArray[np.float64]


def picture(results: Figures) -> str:
    """Return the loss with faults over that without, their distance in percent, the chips."""
    ours, curves = results["ours"], results["curves"]
    across = Span(0, max(ours["steps"], max(each["step"][-1] for each in curves.values())))
    losses = [value for each in curves.values() for value in each["loss"]]
    down = Span(min(losses), max(losses), 230)
    top = 18.0
    marks = value_axis(down, top, "loss, running mean of 100 steps")
    keys = [Key(BLUE, "with faults", "line")]
    looks = {"calm": (_CALM, 5.0), "torchft": (_TORCHFT, 1.6), "kills": (BLUE, 1.6)}
    for name, (colour, width) in looks.items():
        if name in curves:
            marks.append(
                _drawn(curves[name]["step"], curves[name]["loss"], across, down, top, colour, width)
            )
    if "calm" in curves:
        keys.append(Key(_CALM, "the same seed undisturbed", "line"))
    if "torchft" in curves:
        keys.append(Key(_TORCHFT, f"torchft, {results['torchft']['faults']} faults", "line"))
    top += down.length + _GAP
    if "calm" in curves:
        marks += _distance(curves, across, Span(-1.25, 1.25, 90), top)
        keys.append(Key(RED, "distance", "line"))
        keys.append(Key(SOFT_INK, "1 % is allowed", fill=_BAND))
        top += 90 + _GAP
    marks += _chips(curves["kills"], across, Span(0, 16, 80), top)
    keys.append(Key(GREEN, "chips at work, mean", "line"))
    keys.append(Key(SOFT_INK, "fewest", fill=_FEWEST))
    bottom = top + 80
    marks += across_axis(across, bottom, "step", lambda value: f"{value:,.10g}")
    panel = Panel(LEFT + WIDTH + RIGHT, bottom + 44, tuple(marks))
    return framed(panel, title=_title(ours), keys=keys, caption=_caption(results))


def _title(ours: Figures) -> str:
    return (
        f"{ours['faults']:,} kills, hangs, cuts and slow chips, {ours['repairs']:,} repairs: "
        "one job, one loss curve"
    )


def _caption(results: Figures) -> str:
    ours, seed = results["ours"], results["seed"]
    samples = ours["samples"]
    goodput = f", goodput {ours['goodput']:.0%}" if ours.get("goodput") else ""
    return (
        f"A small GPT on 4x4 processes, seed {seed}: {ours['workers_killed']:,} workers killed in "
        f"{ours['took_s'] / 60:.0f} minutes, {samples['lost']} samples lost, {samples['repeated']} "
        f"repeated; a fault costs {ours['lost_median_s']:.2f} s (median), at most "
        f"{ours['lost_worst_s']:.1f} s{goodput}."
    )


def _drawn(
    step: list[int],
    values: list[float],
    across: Span,
    down: Span,
    top: float,
    colour: str,
    width: float,
) -> str:
    x = LEFT + np.array(step) / across.high * WIDTH
    y = top + down.length - (np.array(values) - down.low) / (down.high - down.low) * down.length
    look: Attributes = {"stroke": colour, "stroke-width": width, "stroke-linejoin": "round"}
    return curve(x, y, look)


def _distance(curves: Figures, across: Span, down: Span, top: float) -> list[str]:
    """Return the distance of the running means in percent, over the band that is allowed."""
    ours, calm = curves["kills"], curves["calm"]
    step = np.array([each for each in ours["step"] if each <= calm["step"][-1]])
    calm_loss = np.interp(step, calm["step"], calm["loss"])
    off = 100 * (np.array(ours["loss"][: len(step)]) / calm_loss - 1)
    off = np.clip(off, down.low, down.high)
    height = down.at(1) - down.at(-1)
    band = box(0, WIDTH, top + down.length - down.at(1), height, {"class": "band", "fill": _BAND})
    line = _drawn(step.tolist(), off.tolist(), across, down, top, RED, 1.4)
    return [band, *value_axis(down, top, "distance from the undisturbed run, %", (-1, 0, 1)), line]


def _chips(own: Figures, across: Span, down: Span, top: float) -> list[str]:
    """Return the chips at work: the fewest of each stretch as boxes, the mean as a line."""
    marks = value_axis(down, top, "chips at work", (0, 8, 16))
    step = [0, *own["step"]]
    for low, high, least in zip(step, step[1:], own["chips_least"], strict=False):
        height = down.at(least)
        place = top + down.length - height
        look = {"class": "fewest", "fill": _FEWEST}
        marks.append(box(across.at(low), across.at(high), place, height, look))
    mean: Floats = np.array(own["chips_mean"])
    width = max(1, len(mean) // 100)
    smooth = np.convolve(mean, np.ones(width) / width, mode="same") if width > 1 else mean
    edge = width // 2 + 1  # where the window is cut off
    chosen = slice(edge, len(mean) - edge) if width > 1 else slice(None)
    marks.append(
        _drawn(own["step"][chosen], smooth[chosen].tolist(), across, down, top, GREEN, 1.8)
    )
    return marks

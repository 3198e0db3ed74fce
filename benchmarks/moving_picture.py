"""A training run as a moving picture: chips die and come back, trees re-form, the loss goes on.

    python benchmarks/moving_picture.py [-o docs/pictures/moving.svg]

Runs the command at the top of the README and draws its recorded events, played faster or slower
than they were: one SVG file without scripts, which a README shows as any picture.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Final
from xml.sax.saxutils import escape

from meshmend.pages.draw.svg import (
    BLUE,
    FAILED_FILL,
    GREEN,
    LINK,
    LIVE_EDGE,
    LIVE_FILL,
    RED,
    series,
)
from meshmend.pages.explore.explorer_answers import flows_of
from meshmend.pages.report.training_run import RunGeneration, TrainingRun, training_run
from meshmend.planning.quick_plan import quick_plan
from meshmend.planning.target import Target
from meshmend.topology.mesh import Mesh

PICTURE: Final = Path(__file__).parents[1] / "docs/pictures/moving.svg"
FAULTS: Final = ("kill 2x2@0,2 at 30", "repair 2x2@0,2 at 60")
_PLAYS_S: Final = 12.0
_PITCH, _SIDE, _LEFT, _TOP = 62, 34, 56, 92
_CURVE: Final = (360, 96, 380, 178)  # left, top, width, height
_HOLD: Final = 0.12  # of the time: the end stands still
_TREES: Final = 2


def moving_svg(run: TrainingRun) -> str:
    """Return the picture of a run on a mesh of two axes, with a caption for each generation."""
    height = max(_TOP + run.mesh.shape[0] * _PITCH, _CURVE[1] + _CURVE[3] + 50)
    ends = [*(each.at_s for each in run.generations[1:]), run.duration_s]
    times = [0.0, *(_share(run, end) for end in ends[:-1])]
    marks = [*_links(run.mesh)]
    for place, generation in enumerate(run.generations):
        shown = [str(int(each == place)) for each in range(len(run.generations))]
        marks += [_shown(_trees(generation), times, shown)]
        caption = _caption(run, place)
        marks += [_shown(_text(24, 48, caption, 30, bold=True), times, shown)]
    for chip in Mesh(run.mesh.shape).live:
        fills = [LIVE_FILL if chip in each.chips else FAILED_FILL for each in run.generations]
        marks.append(_chip(chip, times, fills))
    marks += _loss(run)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 780 {height}" width="780" '
        f'height="{height}" font-family="Helvetica, Arial, sans-serif" role="img">'
        f"<title>{escape(_title(run))}</title>"
        f'<rect width="780" height="{height}" rx="10" fill="#ffffff"/>{"".join(marks)}</svg>\n'
    )


def _title(run: TrainingRun) -> str:
    chips = ", then ".join(str(len(each.chips)) for each in run.generations)
    return f"A training job on a mesh: {chips} chips train, and the loss goes on falling"


def _share(run: TrainingRun, at_s: float) -> float:
    return (1 - _HOLD) * at_s / (run.duration_s or 1.0)


def _caption(run: TrainingRun, place: int) -> str:
    generation = run.generations[place]
    count = len(generation.chips)
    if place == 0:
        return f"{count} chips train together."
    before = len(run.generations[place - 1].chips)
    if count < before:
        recovered = [each.recovered_s for each in run.faults if not each.is_repair]
        took = f" after {recovered[0]:.2f} s" if recovered else ""
        return f"Step {generation.step}: {before - count} chips die. {count} go on{took}."
    return f"Step {generation.step}: repaired. {count} chips train again."


def _animated(attribute: str, times: list[float], values: list[str]) -> str:
    return (
        f'<animate attributeName="{attribute}" calcMode="discrete" dur="{_PLAYS_S:g}s" '
        f'repeatCount="indefinite" keyTimes="{";".join(f"{time:.4f}" for time in times)}" '
        f'values="{";".join(values)}"/>'
    )


def _shown(marks: str, times: list[float], values: list[str]) -> str:
    """Return marks that are seen while their value is 1; the first ones where nothing moves."""
    return f'<g opacity="{values[0]}">{marks}{_animated("opacity", times, values)}</g>'


def _centre(chip: tuple[int, ...]) -> tuple[float, float]:
    return _LEFT + chip[1] * _PITCH, _TOP + chip[0] * _PITCH + _SIDE / 2


def _line(one: tuple[int, ...], other: tuple[int, ...], aside: float = 0.0) -> str:
    (x, y), (u, v) = _centre(one), _centre(other)
    length = abs(u - x) + abs(v - y)
    dx, dy = (u - x) / length, (v - y) / length
    near, far = _SIDE / 2 + 2, length - _SIDE / 2 - 2
    sx, sy = -dy * aside, dx * aside
    return (
        f"M{x + dx * near + sx:g} {y + dy * near + sy:g}L{x + dx * far + sx:g} "
        f"{y + dy * far + sy:g}"
    )


def _links(mesh: Mesh) -> list[str]:
    full = Mesh(mesh.shape)
    ways = "".join(_line(full.live[one], full.live[other]) for one, other in full.links.tolist())
    return [f'<path d="{ways}" stroke="{LINK}" stroke-width="2"/>']


def _trees(generation: RunGeneration) -> str:
    """Return two trees of a plan for the chips of a generation, with arrows towards their roots."""
    full = Mesh(generation.mesh.shape)
    mesh = replace(full, failed=frozenset(full.live) - generation.chips)
    (flow, *_) = flows_of(quick_plan(mesh, Target()).plan)
    n_ports, marks = 2 * len(mesh.shape), []
    for place, part in enumerate(flow.parts[:_TREES]):
        ways = heads = ""
        for channel in part:
            chip = full.live[channel // n_ports]
            there = full.live[full.neighbor_ranks[channel // n_ports][channel % n_ports]]
            ways += _line(chip, there, 5.0 * (2 * place - 1))
            heads += _head(chip, there, 5.0 * (2 * place - 1))
        colour = series(place)
        marks.append(f'<path d="{ways}" stroke="{colour}" stroke-width="3" fill="none"/>')
        marks.append(f'<path d="{heads}" fill="{colour}"/>')
    return "".join(marks)


def _head(one: tuple[int, ...], other: tuple[int, ...], aside: float) -> str:
    (x, y), (u, v) = _centre(one), _centre(other)
    length = abs(u - x) + abs(v - y)
    dx, dy = (u - x) / length, (v - y) / length
    far = length - _SIDE / 2
    x, y = x + dx * far - dy * aside, y + dy * far + dx * aside
    return (
        f"M{x:g} {y:g}L{x - 8 * dx - 4.5 * dy:g} {y - 8 * dy + 4.5 * dx:g}"
        f"L{x - 8 * dx + 4.5 * dy:g} {y - 8 * dy - 4.5 * dx:g}z"
    )


def _chip(chip: tuple[int, ...], times: list[float], fills: list[str]) -> str:
    x, y = _centre(chip)
    box = (
        f'<rect x="{x - _SIDE / 2:g}" y="{y - _SIDE / 2:g}" width="{_SIDE}" height="{_SIDE}" '
        f'rx="4" fill="{fills[0]}" stroke="{LIVE_EDGE}" stroke-width="1.5">'
        f"{_animated('fill', times, fills) if len(set(fills)) > 1 else ''}</rect>"
    )
    if len(set(fills)) == 1:
        return box
    cross = (
        f'<path d="M{x - 9:g} {y - 9:g}l18 18M{x - 9:g} {y + 9:g}l18 -18" stroke="{RED}" '
        'stroke-width="4"/>'
    )
    dead = [str(int(fill == FAILED_FILL)) for fill in fills]
    return box + _shown(cross, times, dead)


def _text(x: float, y: float, words: str, size: int, *, bold: bool = False) -> str:
    weight = ' font-weight="700"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size}"{weight} fill="#1c242d">'
        f"{escape(words)}</text>"
    )


def _loss(run: TrainingRun) -> list[str]:
    """Return the loss as a curve that is uncovered as the run goes on."""
    left, top, width, height = _CURVE
    steps, end_s = run.steps, run.duration_s or 1.0
    most = float(steps.loss.max())
    points = " ".join(
        f"{left + width * at / end_s:.1f},{top + height * (1 - loss / most):.1f}"
        for at, loss in zip(steps.at_s.tolist(), steps.loss.tolist(), strict=True)
    )
    flags = []
    for each in run.faults:
        x, colour = left + width * each.at_s / end_s, GREEN if each.is_repair else RED
        words = "repair" if each.is_repair else "kill"
        flags.append(
            f'<path d="M{x:.1f} {top}V{top + height}" stroke="{colour}" stroke-dasharray="5 4"/>'
            + _text(x + 5, top + 18, words, 20)
        )
    cover = (
        f'<rect x="{left}" y="{top - 4}" width="0" height="{height + 8}" fill="#ffffff">'
        f'<animate attributeName="x" dur="{_PLAYS_S:g}s" repeatCount="indefinite" '
        f'keyTimes="0;{1 - _HOLD:g};1" values="{left};{left + width};{left + width}"/>'
        f'<animate attributeName="width" dur="{_PLAYS_S:g}s" repeatCount="indefinite" '
        f'keyTimes="0;{1 - _HOLD:g};1" values="{width};0;0"/></rect>'
    )
    last = float(steps.loss[-1])
    lost = f"; samples lost: {run.samples.lost}" if run.end and run.end.samples else ""
    return [
        *flags,
        f'<polyline points="{points}" fill="none" stroke="{BLUE}" stroke-width="2.5"/>',
        cover,
        f'<path d="M{left} {top}V{top + height}H{left + width}" fill="none" stroke="{LIVE_EDGE}"/>',
        _text(left, top - 12, f"loss, from {most:.2f} to {last:.2f}", 22),
        _text(left, top + height + 28, f"{len(steps)} steps in {end_s:.0f} s{lost}", 22),
    ]


def main() -> None:
    """Train, and write the picture."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, default=PICTURE)
    output = parser.parse_args().output
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        command = [sys.executable, "-m", "meshmend", "train", "--run-dir", str(folder), "--json"]
        command += [word for fault in FAULTS for word in ("--inject", fault)]
        summary = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    output.write_text(moving_svg(training_run(lines)), encoding="utf-8")
    print(f"written {output}: replicas equal {summary['replicas_equal']}")


if __name__ == "__main__":
    main()

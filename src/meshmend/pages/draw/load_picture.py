"""What a simulation found: how busy each link is, and the times of a sweep over payloads.

Links are drawn over a mesh, with one coloured lane per direction.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.pages.draw.chart import Axis, Series, chart_svg, limit_series
from meshmend.pages.draw.grid import Grid, drawn_apart, fitting_grid
from meshmend.pages.draw.mesh_picture import ground_keys, mesh_panel
from meshmend.pages.draw.svg import (
    Attributes,
    Point,
    colour_bar,
    framed,
    heat,
    line_path,
    mark,
    stacked,
)
from meshmend.topology.mesh import Mesh
from meshmend.units import format_bytes

if TYPE_CHECKING:
    from meshmend.planning.comparison import Comparison

_SHADES = 24


def link_load_svg(
    mesh: Mesh,
    load_per_channel: NDArray[np.float64],
    *,
    unit: str = "× the payload",
    title: str = "",
    caption: str = "",
    darkest: float | None = None,
) -> str:
    """Return a mesh whose directed links are coloured by load, traffic keeping to the right.

    `load_per_channel[rank * n_ports + port]` is the load of the link that leaves a rank by a port,
    in units of the payload unless `unit` names another. `darkest` is the load of the darkest
    colour: give two pictures the same to compare them. By default it is `usual_darkest`.

    Raises:
        InputError: not one finite load of at least 0 per channel, or load on a dead channel.
    """
    load = _checked(mesh, load_per_channel)
    most = usual_darkest(load) if darkest is None else darkest
    if not most > 0:
        raise InputError(f"link_load_svg needs a darkest load above 0, but got {darkest}")
    grid = fitting_grid(mesh, fill=0.5)
    beyond = " and more" if load.max() > most else ""
    bar = colour_bar(f"{most:.3g}{beyond}", f"{unit}, per directed link")
    panel = stacked([mesh_panel(grid).plus(load_marks(grid, load, most)), bar], gap=10)
    return framed(
        panel,
        title=title or f"Link load on {mesh}",
        keys=ground_keys(mesh),
        caption=caption or _summary(mesh, load, unit),
    )


def usual_darkest(load: NDArray[np.float64]) -> float:
    """Return the least of 1, 2, 5, 10, 20, ... that no load exceeds.

    So pictures of most algorithms have one scale: theirs is a load from 0 to 1.
    """
    most = float(load.max(initial=0.0)) * (1 - 1e-9)
    decade = 10.0 ** math.floor(math.log10(max(1.0, most)))
    return next(step * decade for step in (1.0, 2.0, 5.0, 10.0) if most <= step * decade)


def load_marks(grid: Grid, load: NDArray[np.float64], most: float) -> list[str]:
    """Return the lanes of all live channels, one `load` mark for each shade that occurs.

    A load of `most` has the darkest shade, and so has a higher one.
    """
    mesh = grid.mesh
    by_shade: dict[int, list[str]] = defaultdict(list)
    for rank, port in zip(*np.nonzero(mesh.neighbor_ranks >= 0), strict=True):
        shade = round(min(1.0, float(load[rank, port]) / most) * (_SHADES - 1))
        by_shade[shade].append(line_path(_lane(grid, int(rank), int(port))))
    look: Attributes = {"fill": "none", "stroke-width": max(1.2, 0.13 * grid.pitch)}
    return [
        mark(
            "path",
            {"class": "load", "d": "".join(data), "stroke": heat(shade / (_SHADES - 1)), **look},
        )
        for shade, data in sorted(by_shade.items())
    ]


def _lane(grid: Grid, rank: int, port: int) -> tuple[Point, Point]:
    """Return the line of a channel, to the right of its way."""
    chip = grid.mesh.live[rank]
    dx, dy = grid.heading(chip, port)
    aside = 0.085 * grid.pitch
    shift = -dy * aside, dx * aside
    if drawn_apart(grid.mesh, chip, port):
        start, stop = grid.stub(chip, port)
    else:
        x, y = grid.centre(chip)
        near, far = 0.5 * grid.side, grid.pitch - 0.5 * grid.side
        start, stop = (x + dx * near, y + dy * near), (x + dx * far, y + dy * far)
    return (start[0] + shift[0], start[1] + shift[1]), (stop[0] + shift[0], stop[1] + shift[1])


def _checked(mesh: Mesh, load_per_channel: NDArray[np.float64]) -> NDArray[np.float64]:
    ports = mesh.neighbor_ranks
    if load_per_channel.shape != (ports.size,):
        raise InputError(
            f"link_load_svg needs one load for each of {ports.size} channels of {mesh}, but got "
            f"an array of shape {load_per_channel.shape}"
        )
    load = np.asarray(load_per_channel, dtype=np.float64).reshape(ports.shape)
    if not (np.isfinite(load).all() and (load >= 0).all()):
        raise InputError("link_load_svg needs finite loads of at least 0")
    if (dead := np.argwhere((load > 0) & (ports < 0))).size:
        rank, port = dead[0].tolist()
        raise InputError(
            f"link_load_svg needs load on live links only, but port {port} of chip "
            f"{mesh.live[rank]} leads nowhere and carries {load[rank, port]:.3g}"
        )
    return load


def _summary(mesh: Mesh, load: NDArray[np.float64], unit: str) -> str:
    if not load.max() > 0:
        return "No link carries anything."
    rank, port = np.unravel_index(int(load.argmax()), load.shape)
    there = mesh.live[mesh.neighbor_ranks[rank, port]]
    live = load[mesh.neighbor_ranks >= 0]
    n_busiest = int(np.isclose(live, load.max()).sum())
    which = f"{mesh.live[rank]} to {there}"
    if n_busiest > 1:
        which = f"{n_busiest} of {live.size} directed links"
    return f"Busiest: {which} with {load.max():.3g} {unit}; mean {live.mean():.3g}."


def sweep_svg(results: "Sequence[Comparison]") -> str:
    """Return the chart of a sweep over payloads; the limit is the line at 1."""
    names = {price.name: None for result in results for price in result.prices}
    curves = []
    for name in names:
        points = [
            (result.payload_bytes, result.ratio(price))
            for result in results
            for price in result.prices
            if price.name == name
        ]
        curves.append(Series(name, [x for x, _ in points], [y for _, y in points]))
    payloads = [result.payload_bytes for result in results]
    curves.append(limit_series(payloads, [1.0] * len(payloads)))
    first = results[0]
    return chart_svg(
        curves,
        x=Axis("payload", write=format_bytes),
        y=Axis("time over the physical limit"),
        title=f"Allreduce on {first.mesh}",
        caption=f"Simulated on the fabric {first.fabric}. Lower is better; nothing can be below 1.",
    )

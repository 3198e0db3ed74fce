"""The curve "payload against ratio to the limit", one line for each algorithm."""

from collections.abc import Sequence

from meshmend.pages.draw.chart import Axis, Series, chart_svg, limit_series
from meshmend.planning.comparison import Comparison
from meshmend.units import format_bytes


def sweep_svg(results: Sequence[Comparison]) -> str:
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

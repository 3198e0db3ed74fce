"""The tables of `meshmend simulate`: one payload, a sweep as one matrix, several sums in flight.

None is wider than 60 columns; what does not fit stands below it.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from meshmend.cli.console import note

if TYPE_CHECKING:
    from meshmend.planning.bucket_comparison import BucketComparison
    from meshmend.planning.comparison import Comparison

_PAYLOADS_ABREAST = 7


def print_head(result: "Comparison") -> None:
    """Print the mesh, the fabric and the collective, and why algorithms were left out."""
    print(f"mesh         {result.mesh}")
    print(f"fabric       {result.fabric}")
    if result.limit.collective != "allreduce":
        print(f"collective   {result.limit.collective}")
    for name, reason in result.refused.items():
        note(f"meshmend: {name} left out: {reason}")


def print_comparison(result: "Comparison") -> None:
    """Print what each algorithm costs for one payload; a star marks the best on all chips."""
    from meshmend.planning.crossovers import winner
    from meshmend.units import format_bytes, format_time

    limit, best = result.limit, winner(result)
    print(f"\n{format_bytes(result.payload_bytes)}: {limit.describe()}")
    alone = f"hops alone {format_time(limit.latency_s)}"
    print(f"bandwidth limit {format_time(limit.bandwidth_s)}, {alone}")
    head = ("algorithm", "time", "of limit", "slices", "busiest", "chips")
    print("  {:<11} {:>9} {:>9} {:>7} {:>8} {:>6}".format(*head))
    for price in result.prices:
        figures = price.figures
        print(
            f"{'*' if price is best else ' '} {price.name:<11} {format_time(price.time_s):>9} "
            f"{result.ratio(price):>8.3f}x {figures.slices:>7} "
            f"{figures.max_link_utilisation:>8.1%} {price.n_chips:>6}"
        )
    print("busiest: the share of the time for which the busiest link is busy")
    for price in result.prices:
        if price.detail:
            print(f"{price.name}: {price.detail}")


def print_sweep(results: "Sequence[Comparison]") -> None:
    """Print times over the limit, an algorithm a row, and where the fastest one changes."""
    from meshmend.planning.crossovers import crossovers
    from meshmend.units import format_bytes

    names = list(dict.fromkeys(price.name for result in results for price in result.prices))
    names.sort(key=lambda name: min(_ratios(results, name)))
    print("\ntime over the limit; a star marks the fastest on all chips")
    for start in range(0, len(results), _PAYLOADS_ABREAST):
        _print_block(results[start : start + _PAYLOADS_ABREAST], names)
        print()
    for each in crossovers(results):
        print(f"from about {format_bytes(each.payload_bytes)} on {each.after} beats {each.before}")


def _print_block(results: "Sequence[Comparison]", names: list[str]) -> None:
    from meshmend.planning.crossovers import winner
    from meshmend.units import format_bytes, format_time

    best = [winner(result).name for result in results]
    sizes = "".join(f"{format_bytes(result.payload_bytes):>7}" for result in results)
    print(f"{'payload':<11}{sizes}")
    for name in names:
        cells = []
        for result, fastest in zip(results, best, strict=True):
            price = next((price for price in result.prices if price.name == name), None)
            star = "*" if name == fastest else " "
            cells.append("" if price is None else f"{_short(result.ratio(price))}{star}")
        print((f"{name:<11}" + "".join(f"{cell:>7}" for cell in cells)).rstrip())
    limits = "".join(f"{format_time(each.limit.time_s).replace(' ', ''):>7}" for each in results)
    print(f"{'limit':<11}{limits}")


def _short(ratio: float) -> str:
    """Return a ratio in at most six characters."""
    return f"{ratio:.3f}" if ratio < 10 else f"{ratio:.1f}" if ratio < 1000 else f"{ratio:.0f}"


def _ratios(results: "Sequence[Comparison]", name: str) -> list[float]:
    return [
        result.ratio(price) for result in results for price in result.prices if price.name == name
    ]


def print_buckets(result: "BucketComparison") -> None:
    """Print what several sums cost: one at a time, in flight together, and as one sum."""
    from meshmend.units import format_bytes, format_time

    buckets, whole = result.buckets, result.whole
    print_head(whole)
    sizes = f"{buckets.n} x {format_bytes(buckets.size_bytes)}"
    print(f"\n{sizes}, in all {format_bytes(buckets.total_bytes)}: {whole.limit.describe()}")
    print(f"{'':<11} {'one sum':>9} {'one at a time':>18} {'all in flight':>18}")
    head = ("algorithm", "time", "time", "of one", "time", "of one")
    print("{:<11} {:>9} {:>9} {:>8} {:>9} {:>8}".format(*head))
    for price in result.prices:
        in_turn_s, in_flight_s = price.one_at_a_time_s, price.together.time_s
        print(
            f"{price.name:<11} {format_time(price.whole.time_s):>9} "
            f"{format_time(in_turn_s):>9} {price.ratio(in_turn_s):>7.3f}x "
            f"{format_time(in_flight_s):>9} {price.ratio(in_flight_s):>7.3f}x"
        )

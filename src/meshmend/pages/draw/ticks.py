"""Where the numbers of an axis stand: inside a range or around it, evenly or by decades."""

import math

_MOST_AROUND = 8


def ticks_inside(low: float, high: float, n_most: int) -> list[float]:
    """Return at most `n_most` multiples of 1, 2 or 5 times a power of ten inside a range."""
    step = _step((high - low) or 1.0, n_most)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [step * k for k in range(first, last + 1)]


def ticks_around(low: float, high: float) -> list[float]:
    """Return round numbers around a range, three to eight steps apart by 1, 2 or 5."""
    if low == high:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    step = _step(high - low, _MOST_AROUND)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [step * k for k in range(first, max(last, first + 1) + 1)]


def decades_around(low: float, high: float) -> list[float]:
    """Return the decades around a range, with 2 and 5 between them where it is short."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last = max(last, first + 1)
    if last - first > 3:
        return [10.0**k for k in range(first, last + 1)]
    steps = [float(f"{m}e{k}") for k in range(first, last + 1) for m in (1, 2, 5)]
    start = max(i for i, step in enumerate(steps) if step <= low * (1 + 1e-9) or i == 0)
    stop = next((i for i, s in enumerate(steps) if s >= high * (1 - 1e-9)), len(steps) - 1)
    return steps[start : max(stop, start + 1) + 1]


def _step(span: float, n_most: int) -> float:
    """Return the least of 1, 2 or 5 times a power of ten of which `n_most` cover a span."""
    unit = 10.0 ** math.floor(math.log10(span / n_most))
    return next(unit * m for m in (1, 2, 5, 10, 20) if span / (unit * m) <= n_most - 1)

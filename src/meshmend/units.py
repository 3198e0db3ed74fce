"""Reads and writes quantities with units: bytes, bandwidths and times; counts things.

Knows units, not what is measured. Decimal units count in thousands (`KB`, `MB`),
binary ones in 1024 (`KiB`, `MiB`), `bit` is an eighth of a byte. Upper and lower case matter
where they would change the meaning: `Mb` is refused, because it may be read as bits or bytes. A
number alone is a size, never a time or a bandwidth: `5` could be 5 us or 5 s.

    102.4MB   64KiB   4 MiB   1e6                  bytes
    70GB/s    50Mbit/s   50Mbit   400Gbps          bytes a second; never without a unit
    0.5us     50ns   1ms   2s   0                  seconds; only zero needs no unit
    90s   20min   24h   2d   3weeks                seconds, of what takes longer
    1KB..1GB                                       payloads for a sweep: 1 KB, 10 KB, ..., 1 GB
    1KB..1GB:3                                     the same with three payloads a decade
    4x25MB                                         four buckets of 25 MB
"""

import math
import re
from collections.abc import Collection, Mapping
from decimal import Decimal
from fractions import Fraction
from itertools import islice
from typing import Final

from meshmend.errors import UnitError

_NUMBER_AND_UNIT = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)\s*(\D*)", re.ASCII)
_BITS_IN_LETTERS = re.compile(r"(?P<prefix>[kKmMgGtTpP]?)(?P<binary>i?)b(?:ps|/s)?")
_MAX_EXPONENT = 30  # refuse 1e999999999 instead of computing it
_MAX_PER_DECADE = 100
_MAX_PAYLOADS = 1000

_BYTES: Mapping[str, Fraction] = {
    "": Fraction(1),
    "B": Fraction(1),
    "kB": Fraction(1000),
    **{f"{prefix}B": Fraction(1000**power) for power, prefix in enumerate("KMGTP", 1)},
    **{f"{prefix}iB": Fraction(1024**power) for power, prefix in enumerate("KMGTP", 1)},
}
_BITS: Mapping[str, Fraction] = {
    "bit": Fraction(1, 8),
    **{f"{prefix}bit": Fraction(1000**power, 8) for power, prefix in enumerate("kMGT", 1)},
    "Kbit": Fraction(1000, 8),
}
_BANDWIDTHS: Mapping[str, Fraction] = {
    **{unit: factor for unit, factor in _BYTES.items() if unit},
    **_BITS,
    **{f"{unit}/s": factor for unit, factor in {**_BYTES, **_BITS}.items() if unit},
    **{f"{prefix}bps": Fraction(1000**power, 8) for power, prefix in enumerate("kMGT", 1)},
}
_TIMES: Mapping[str, Fraction] = {
    "s": Fraction(1),
    "ms": Fraction(1, 10**3),
    "us": Fraction(1, 10**6),
    "µs": Fraction(1, 10**6),  # micro sign
    "μs": Fraction(1, 10**6),  # Greek mu
    "ns": Fraction(1, 10**9),
}
_DURATIONS: Mapping[str, Fraction] = {
    "ms": Fraction(1, 10**3),
    "s": Fraction(1),
    "min": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
    "weeks": Fraction(7 * 86400),
    "years": Fraction(36525 * 864),  # of 365.25 days
}


# Those that an error names, of the many that are read.
_FEW_UNITS: Final = (
    *("MB/s", "GB/s", "GiB/s", "Mbit/s", "Gbit/s"),
    *("B", "KB", "MB", "GB", "GiB"),
    *("ns", "us", "ms", "s", "min", "h", "d"),
)


def parse_bytes(text: str) -> int:
    """Return the whole number of bytes nearest to what `102.4MB`, `64KiB` or `1e6` names.

    Raises:
        UnitError: no number, an unknown unit, or a negative one.
    """
    return round(_quantity(text, _BYTES, "a size", "102.4MB, 64KiB or 1e6"))


def parse_bandwidth(text: str) -> float:
    """Return the bytes a second that `70GB/s`, `50Mbit/s` or `50Mbit` names.

    Raises:
        UnitError: no number, no unit or an unknown one, or zero.
    """
    example = "70GB/s or 50Mbit/s"
    value = float(_quantity(text, _BANDWIDTHS, "a bandwidth", example))
    if value == 0:
        raise UnitError(f"a bandwidth needs to be positive, but got {text!r}; write {example}")
    return value


def parse_time(text: str) -> float:
    """Return the seconds that `0.5us`, `50ns`, `1ms` or `2s` names; only zero needs no unit.

    Raises:
        UnitError: no number, no unit or an unknown one, or a negative number.
    """
    return float(_quantity(text, _TIMES, "a time", "0.5us, 50ns or 2s"))


def parse_duration(text: str) -> float:
    """Return the seconds that `20min`, `24h`, `2d` or `90s` names; a unit is needed.

    Raises:
        UnitError: no number, no unit or an unknown one, or a negative number.
    """
    return float(_quantity(text, _DURATIONS, "a duration", "90s, 20min, 24h or 2d"))


def parse_payloads(text: str) -> tuple[int, ...]:
    """Return the payloads in bytes, rising, that one payload or a range such as `1KB..1GB` names.

    A range starts at its first payload and always ends with its last. Between them it goes up in
    factors of ten; with `:3` at its end it has three payloads a decade, at equal ratios.

    Raises:
        UnitError: a payload that cannot be read, or a range that does not rise from above zero.
    """
    span, colon, per_decade = text.partition(":")
    low_text, dots, high_text = span.partition("..")
    if not dots and not colon:
        return (parse_bytes(text),)
    low, high = parse_bytes(low_text), parse_bytes(high_text)
    steps = _steps_per_decade(per_decade, text) if colon else 1
    if not 0 < low < high:
        raise UnitError(
            f"a payload range needs to rise from above zero, but got {text!r}; write 1KB..1GB"
        )
    n_steps = math.ceil(steps * math.log10(high / low)) + 1
    if n_steps > _MAX_PAYLOADS:
        raise UnitError(
            f"a payload range needs at most {_MAX_PAYLOADS} payloads, but got {text!r}; "
            "write fewer a decade"
        )
    # Whole decades stay exact; only the payloads between them are rounded.
    grid = (
        round(low * 10 ** (step // steps) * 10 ** (step % steps / steps)) for step in range(n_steps)
    )
    return (*sorted({payload for payload in grid if payload < high}), high)


def parse_buckets(text: str) -> tuple[int, int]:
    """Return how many buckets of how many bytes `4x25MB` names.

    Raises:
        UnitError: no whole number, no `x`, or a size that cannot be read.
    """
    count, cross, size = text.partition("x")
    if not cross or not count.strip().isdecimal():
        raise UnitError(f"buckets need a number and a size, but got {text!r}; write 4x25MB")
    return int(count), parse_bytes(size)


def format_bytes(size_bytes: float) -> str:
    """Return a size with three significant digits and a decimal unit: `102 MB`."""
    return _format(size_bytes, ((1.0, "B"), (1e3, "KB"), (1e6, "MB"), (1e9, "GB"), (1e12, "TB")))


def format_bandwidth(bandwidth_bytes_per_s: float) -> str:
    """Return a bandwidth with three significant digits and a decimal unit: `70 GB/s`."""
    return f"{format_bytes(bandwidth_bytes_per_s)}/s"


def format_time(time_s: float) -> str:
    """Return a time with three significant digits, in ns, us, ms or s: `1.86 ms`."""
    return _format(time_s, ((1e-9, "ns"), (1e-6, "us"), (1e-3, "ms"), (1.0, "s")))


def format_duration(time_s: float) -> str:
    """Return a time with three significant digits, in ms, s, min, h or days: `24 h`, `2 days`."""
    units = ((1e-3, "ms"), (1.0, "s"), (60.0, "min"), (3600.0, "h"), (2 * 86400.0, "days"))
    shown = _format(time_s, units)
    return f"{float(f'{time_s / 86400:.3g}'):g} days" if shown.endswith("days") else shown


def _quantity(text: str, units: Mapping[str, Fraction], what: str, example: str) -> Fraction:
    """Return the exact value in the base unit; decimals are never rounded to a float."""
    match = _NUMBER_AND_UNIT.fullmatch(text.strip())
    if match is None:
        raise UnitError(f"{what} needs a number and a unit, but got {text!r}; write {example}")
    number, unit = Decimal(match[1]), match[2].strip()
    if not unit and number.is_zero() and units is _TIMES:
        return Fraction(0)
    if unit not in units:
        few = [unit for unit in _FEW_UNITS if unit in units]
        hint = _hint(match[1], unit, units)
        raise UnitError(
            f"{what} needs a unit such as {', '.join(few[:5])}, but got {text!r}"
            f"{hint or f'; write {example}'}"
        )
    if number < 0 or abs(number.adjusted()) > _MAX_EXPONENT:
        raise UnitError(
            f"{what} needs a number from zero to 1e{_MAX_EXPONENT}, but got {text!r}; "
            f"write {example}"
        )
    return Fraction(number) * units[unit]


def _hint(number: str, unit: str, units: Mapping[str, Fraction]) -> str:
    """Return what may have been meant: the unit in other cases, finished, or a usual one.

    Bits are never taken for bytes: whoever writes `70Gb/s` means 8.75 GB/s.
    """
    if not unit:
        usual = "us" if units is _TIMES else "GB/s" if units is _BANDWIDTHS else ""
        return f"; write {number}{usual} if you mean that" if usual else ""
    bits = _BITS_IN_LETTERS.fullmatch(unit)
    if bits is not None and (units is _BANDWIDTHS or bits["prefix"].isupper()):
        return _bits_hint(number, bits, units)
    wanted = unit.lower().replace("ps", "/s") if unit.endswith("Bps") else unit.lower()
    meant = [known for known in units if known and known.lower() in {wanted, f"{wanted}b"}]
    return f"; did you mean {' or '.join(number + known for known in meant)}?" if meant else ""


def _bits_hint(number: str, bits: re.Match[str], units: Mapping[str, Fraction]) -> str:
    prefix, is_binary = bits["prefix"], bool(bits["binary"])
    power = " KMGTP".index(prefix.upper() or " ")
    if abs(Decimal(number).adjusted()) > _MAX_EXPONENT:
        return ""
    n_bytes = float(Fraction(Decimal(number)) * (1024 if is_binary else 1000) ** power / 8)
    shown = (format_bandwidth if units is _BANDWIDTHS else format_bytes)(n_bytes).replace(" ", "")
    per_s = "/s" if units is _BANDWIDTHS else ""
    whole = f"{number}{prefix.upper()}{'i' if is_binary else ''}B{per_s}"
    return f"; {number}{bits.string} in bits is {shown}; write that, or {whole} if you mean bytes"


def _steps_per_decade(word: str, text: str) -> int:
    if not re.fullmatch(r"\d{1,3}", word) or not 1 <= int(word) <= _MAX_PER_DECADE:
        raise UnitError(
            f"a payload range needs 1 to {_MAX_PER_DECADE} payloads a decade after its colon, but "
            f"got {text!r}; write 1KB..1GB:3"
        )
    return int(word)


def _format(value: float, units: tuple[tuple[float, str], ...]) -> str:
    """Return the value in the largest unit in which it is one or more, else in the smallest."""
    rounded = float(f"{value:.3g}")
    # Dividing before comparing would call 1e-6 s less than one microsecond.
    size, unit = next(
        ((size, unit) for size, unit in reversed(units) if abs(rounded) >= size), units[0]
    )
    if rounded == 0:
        size, unit = units[0] if units[0][0] == 1.0 else units[-1]
    digits = f"{Decimal(f'{rounded / size:.3g}').normalize():f}"
    return f"{digits} {unit}"


def counted(n: int, noun: str) -> str:
    """Return a number with its noun: `1 ring`, `4 rings`."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def some(values: Collection[object], n_most: int = 4, *, between: str = ", ") -> str:
    """Return the first values, and how many more there are: `a, b, c, d and 2 more`."""
    shown = between.join(map(str, islice(values, n_most)))
    return shown if len(values) <= n_most else f"{shown} and {len(values) - n_most} more"

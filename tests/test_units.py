"""Quantities: what people write is read, what is printed can be read back."""

import re
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend.errors import UnitError
from meshmend.units import (
    format_bandwidth,
    format_bytes,
    format_duration,
    format_time,
    parse_bandwidth,
    parse_bytes,
    parse_duration,
    parse_payloads,
    parse_time,
    some,
)


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("102.4MB", 102_400_000),
        ("64KiB", 65_536),
        ("1e6", 1_000_000),
        ("1GB", 10**9),
        ("4 MiB", 4 * 2**20),
        (" 1kB ", 1000),
        ("0", 0),
        (".5KB", 500),
        ("1.3KiB", 1331),
        ("7B", 7),
    ],
)
def test_sizes_are_read_in_decimal_and_binary_units(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize(
    ("text", "bytes_per_s"),
    [
        ("70GB/s", 70e9),
        ("50Mbit/s", 6.25e6),
        ("50Mbit", 6.25e6),
        ("400Gbps", 50e9),
        ("1GiB/s", 2.0**30),
    ],
)
def test_bandwidths_are_read_in_bytes_and_bits(text: str, bytes_per_s: float) -> None:
    assert parse_bandwidth(text) == bytes_per_s


@pytest.mark.parametrize(
    ("text", "time_s"),
    [("0.5us", 5e-7), ("50ns", 5e-8), ("1ms", 1e-3), ("2s", 2.0), ("3 µs", 3e-6), ("0", 0)],
)
def test_times_are_read_from_nanoseconds_to_seconds(text: str, time_s: float) -> None:
    assert parse_time(text) == time_s


def test_a_payload_range_goes_up_in_decades_and_ends_where_it_says() -> None:
    assert parse_payloads("1KB..1MB") == (10**3, 10**4, 10**5, 10**6)
    assert parse_payloads("1KiB..64KiB") == (1024, 10240, 65536)
    assert parse_payloads("1KB..10KB:3") == (1000, 2154, 4642, 10_000)
    assert parse_payloads("4MiB") == (4 * 2**20,)


@given(low=st.integers(1, 10**9), ratio=st.floats(1.5, 1e9), per_decade=st.integers(1, 9))
def test_a_payload_range_rises_from_its_first_payload_to_its_last(
    low: int, ratio: float, per_decade: int
) -> None:
    high = max(int(low * ratio), low + 1)

    payloads = parse_payloads(f"{low}..{high}:{per_decade}")

    assert payloads[0] == low
    assert payloads[-1] == high
    assert list(payloads) == sorted(set(payloads))


SHOWN = [
    (format_bytes, parse_bytes),
    (format_bandwidth, parse_bandwidth),
    (format_time, parse_time),
]


@pytest.mark.parametrize(("show", "read"), SHOWN)
@given(value=st.floats(1.0, 1e15))
def test_what_is_printed_reads_back_to_three_digits(
    show: Callable[[float], str], read: Callable[[str], float], value: float
) -> None:
    if show is format_time:
        value *= 1e-11
    elif show is format_bytes:
        value = round(value)

    assert read(show(value)) == pytest.approx(value, rel=0.0051)
    assert show(read(show(value))) == show(value)


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (format_bytes(102_400_000), "102 MB"),
        (format_bytes(999), "999 B"),
        (format_bytes(999_600), "1 MB"),
        (format_bytes(0), "0 B"),
        (format_bandwidth(70e9), "70 GB/s"),
        (format_time(1.857e-3), "1.86 ms"),
        (format_time(1e-6), "1 us"),
        (format_time(0), "0 s"),
        (format_time(3600), "3600 s"),
        (format_time(-3e-6), "-3 us"),
    ],
)
def test_three_significant_digits_in_the_largest_unit_that_fits(shown: str, wanted: str) -> None:
    assert shown == wanted


@pytest.mark.parametrize(
    ("read", "text", "message"),
    [
        (parse_bytes, "many", r"a size needs a number and a unit, but got 'many'; write 102.4MB"),
        (parse_bytes, "", "a size needs a number and a unit"),
        (parse_bytes, "1Mb", r"a size needs a unit such as B, KB, MB, GB, GiB, but got '1Mb'"),
        (parse_bytes, "-1KB", "a size needs a number from zero to 1e30, but got '-1KB'"),
        (parse_bytes, "1e999999999", "a size needs a number from zero to 1e30"),
        (parse_bytes, "nan", "a size needs a number"),
        (parse_bytes, "1KB2", "a size needs a number and a unit, but got '1KB2'"),
        (parse_bandwidth, "0GB/s", "a bandwidth needs to be positive, but got '0GB/s'"),
        (
            parse_bandwidth,
            "1GB/h",
            "a bandwidth needs a unit such as MB/s, GB/s, GiB/s, Mbit/s, Gbit/s, but",
        ),
        (parse_time, "5 minutes", "a time needs a unit such as ns, us, ms, s, but"),
        (parse_time, "-1us", "a time needs a number from zero"),
        (parse_payloads, "1GB..1KB", "a payload range needs to rise from above zero"),
        (parse_payloads, "0..1KB", "a payload range needs to rise from above zero"),
        (parse_payloads, "1KB..1GB:0", "needs 1 to 100 payloads a decade after its colon"),
        (parse_payloads, "1KB..1GB:x", "needs 1 to 100 payloads a decade after its colon"),
        (parse_payloads, "1..1e20:99", "a payload range needs at most 1000 payloads"),
        (parse_payloads, "1KB:3", "a size needs a number and a unit, but got ''"),
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(
    read: Callable[[str], object], text: str, message: str
) -> None:
    with pytest.raises(UnitError, match=message) as caught:
        read(text)

    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "meant"),
    [("10mb", "10MB"), ("10M", "10MB"), ("1.5g", "1.5GB"), ("4mib", "4MiB"), ("3k", "3kB or 3KB")],
)
def test_a_unit_in_the_wrong_letters_gets_a_hint(text: str, meant: str) -> None:
    with pytest.raises(UnitError, match=f"; did you mean {re.escape(meant)}\\?$"):
        parse_bytes(text)


def test_a_bandwidth_without_a_unit_is_asked_for_one() -> None:
    with pytest.raises(
        UnitError, match=r"a bandwidth needs a unit such as .*, but got '70'; write 70GB/s if"
    ):
        parse_bandwidth("70")


@pytest.mark.parametrize("text", ["5", "1e-6", "0.5"])
def test_a_time_without_a_unit_is_asked_for_one(text: str) -> None:
    with pytest.raises(
        UnitError, match=f"a time needs a unit such as .*, but got '{text}'; write {text}us"
    ):
        parse_time(text)


@pytest.mark.parametrize(
    ("read", "text", "meant"),
    [
        (parse_bandwidth, "70Gb/s", "70Gb/s in bits is 8.75GB/s; write that, or 70GB/s if"),
        (parse_bandwidth, "70gb/s", "70gb/s in bits is 8.75GB/s; write that, or 70GB/s if"),
        (parse_bandwidth, "8Mb", "8Mb in bits is 1MB/s; write that, or 8MB/s if"),
        (parse_bandwidth, "8Gib/s", "8Gib/s in bits is 1.07GB/s; write that, or 8GiB/s if"),
        (parse_bandwidth, "70GBps", "did you mean 70GB/s?"),
        (parse_bytes, "8Mb", "8Mb in bits is 1MB; write that, or 8MB if you mean bytes"),
    ],
)
def test_bits_are_never_taken_for_bytes(
    read: Callable[[str], float], text: str, meant: str
) -> None:
    with pytest.raises(UnitError, match=re.escape(f"; {meant}")):
        read(text)


@pytest.mark.parametrize(
    ("text", "time_s"),
    [("90s", 90), ("20min", 1200), ("24h", 86400), ("2d", 172800), ("0.5 weeks", 302400)],
)
def test_a_duration_is_read(text: str, time_s: float) -> None:
    assert parse_duration(text) == time_s


@pytest.mark.parametrize("text", ["24", "24 hours", "-1h", "soon", "1e99h"])
def test_a_duration_without_a_known_unit_or_below_zero_is_refused(text: str) -> None:
    with pytest.raises(UnitError, match="a duration needs"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("time_s", "words"),
    [(0.5, "500 ms"), (90, "1.5 min"), (86400, "24 h"), (3 * 86400, "3 days")],
)
def test_a_duration_is_written_in_the_unit_that_fits(time_s: float, words: str) -> None:
    assert format_duration(time_s) == words


def test_of_many_values_the_first_are_named_and_the_others_counted() -> None:
    assert some("abcd") == "a, b, c, d"
    assert some("abcdef") == "a, b, c, d and 2 more"
    assert some([(0, 1), (2, 3)], 1) == "(0, 1) and 1 more"

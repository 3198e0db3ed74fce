"""The fabric: how fast the links of a machine are, and presets for known machines.

A fabric has a few figures and knows nothing of meshes or schedules. A preset's `source` says where
its figures come from and how far to trust them. Machines differ most in latency and overhead,
which are rarely published; where a preset assumes them, its `source` says so. Replace a preset's
figures with your own measurements: `fabric("tpu-v3").with_(...)`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Any

from meshmend.errors import InputError, check_kind
from meshmend.units import (
    format_bandwidth,
    format_bytes,
    format_time,
    parse_bandwidth,
    parse_bytes,
    parse_time,
)

# Beyond these, times of a whole sum no longer fit a table, and no machine is so slow.
_SLOWEST_BYTES_PER_S, _LONGEST_S = 1.0, 1e6
_MOST_PROCESSORS = 1 << 20
_LARGEST = 1e18  # of seconds and of bytes a second: beyond it times are no longer whole ticks


@dataclass(frozen=True)
class Processors:
    """The processors of one host, if all chips are processes of it.

    Each chip keeps one busy for `start_s` before anything else. A message keeps one busy at its
    source, and again at its destination, for `message_s` and the time of its bytes at
    `bytes_per_s`. No chip keeps two busy at once.
    """

    n: int
    message_s: float
    bytes_per_s: float
    start_s: float = 0.0

    def __post_init__(self) -> None:
        times = {"message_s": self.message_s, "start_s": self.start_s}
        for name, value in times.items():
            if not 0 <= value <= _LARGEST:
                raise InputError(f"processors need zero or a positive {name}, but got {value}")
        if type(self.n) is not int or not 1 <= self.n <= _MOST_PROCESSORS:
            raise InputError(
                f"a host needs from one to {_MOST_PROCESSORS} processors, but got {self.n!s:.40}"
            )
        if not 0 < self.bytes_per_s <= _LARGEST:
            raise InputError(f"processors need a positive bytes_per_s, but got {self.bytes_per_s}")

    def __str__(self) -> str:
        return (
            f"{self.n} processor{'s' if self.n > 1 else ''} ({format_time(self.start_s)} a chip, "
            f"{format_time(self.message_s)} a message, {format_bandwidth(self.bytes_per_s)})"
        )


@dataclass(frozen=True)
class Fabric:
    """What a link and a chip can do.

    A link carries `link_bandwidth_bytes_per_s` in each direction at once, a message's head
    takes `hop_latency_s` over a link, and each message holds a link for `message_overhead_s`
    beyond its bytes. A link takes up to `queue_bytes` before it can carry them, as a kernel does;
    nothing overtakes these. A chip adds up `chip_bandwidth_bytes_per_s`; None: adding takes no
    time. In a sharded update a chip turns `update_bytes_per_s` of its sums into weights; None: no
    time. Where chips are processes of one host, they share its `processors`.
    """

    name: str
    link_bandwidth_bytes_per_s: float
    hop_latency_s: float
    message_overhead_s: float
    chip_bandwidth_bytes_per_s: float | None = None
    source: str = "given by the caller"
    usual_mesh: str = ""  # for the reader, such as "16x16 torus"
    update_bytes_per_s: float | None = None
    processors: Processors | None = None
    queue_bytes: float = 0.0

    def __post_init__(self) -> None:
        if not self.name:
            raise InputError("Fabric needs a name, but got an empty one; results show it")
        self._check("link_bandwidth_bytes_per_s", self.link_bandwidth_bytes_per_s, "a positive")
        self._check("hop_latency_s", self.hop_latency_s, "zero or a positive")
        self._check("message_overhead_s", self.message_overhead_s, "zero or a positive")
        self._check("queue_bytes", self.queue_bytes, "zero or a positive")
        if self.chip_bandwidth_bytes_per_s is not None:
            self._check("chip_bandwidth_bytes_per_s", self.chip_bandwidth_bytes_per_s, "a positive")
        if self.update_bytes_per_s is not None:
            self._check("update_bytes_per_s", self.update_bytes_per_s, "a positive")
        if self.processors is not None:
            check_kind("Fabric", "its processors as Processors", self.processors, Processors)

    def with_(
        self,
        *,
        link_bandwidth_bytes_per_s: float | None = None,
        hop_latency_s: float | None = None,
        message_overhead_s: float | None = None,
        chip_bandwidth_bytes_per_s: float | None = None,
        update_bytes_per_s: float | None = None,
    ) -> "Fabric":
        """Return this fabric with the figures that are given, its name starred if any changes.

        The star, `tpu-v3*`, marks printed times that are not those of the preset.
        """
        given = {
            "link_bandwidth_bytes_per_s": link_bandwidth_bytes_per_s,
            "hop_latency_s": hop_latency_s,
            "message_overhead_s": message_overhead_s,
            "chip_bandwidth_bytes_per_s": chip_bandwidth_bytes_per_s,
            "update_bytes_per_s": update_bytes_per_s,
        }
        changes: dict[str, float] = {
            figure: value
            for figure, value in given.items()
            if value is not None and value != getattr(self, figure)
        }
        if not changes:
            return self
        starred = self.name.removesuffix("*") + "*"
        changed = replace(self, name=starred, **changes)  # type: ignore[arg-type]  # floats only
        return _checked(changed)

    def __str__(self) -> str:
        parts = [
            f"{self.name}: {format_bandwidth(self.link_bandwidth_bytes_per_s)} a link",
            f"{format_time(self.hop_latency_s)} a hop",
            f"{format_time(self.message_overhead_s)} a message",
        ]
        if self.queue_bytes:
            parts.append(f"{format_bytes(self.queue_bytes)} queued")
        if self.chip_bandwidth_bytes_per_s is not None:
            parts.append(f"{format_bandwidth(self.chip_bandwidth_bytes_per_s)} a chip")
        if self.update_bytes_per_s is not None:
            parts.append(f"{format_bandwidth(self.update_bytes_per_s)} an update")
        if self.processors is not None:
            parts.append(str(self.processors))
        return ", ".join(parts)

    @property
    def figures(self) -> str:
        """The figures of links, queues and processors as `fabric` reads them, three digits each."""
        words = [
            figures_text(
                self.link_bandwidth_bytes_per_s, self.hop_latency_s, self.message_overhead_s
            )
        ]
        if self.queue_bytes:
            words.append(format_bytes(self.queue_bytes))
        if (processors := self.processors) is not None:
            words += [
                str(processors.n),
                format_time(processors.message_s),
                format_bandwidth(processors.bytes_per_s),
                format_time(processors.start_s),
            ]
        return ",".join(words).replace(" ", "")

    def summary(self) -> dict[str, Any]:
        """Return the figures as a JSON value; without processors or queues it names none."""
        figures = asdict(self)
        if self.processors is None:
            del figures["processors"]
        if not self.queue_bytes:
            del figures["queue_bytes"]
        return figures

    def _check(self, figure: str, value: float, needed: str) -> None:
        # Others, such as NumPy's of 32 bits, would take their precision into all that is computed.
        is_one = isinstance(value, int | float) and (
            0 < value <= _LARGEST or (value == 0 and "zero" in needed)
        )
        if not is_one:
            raise InputError(f"fabric {self.name} needs {needed} {figure}, but got {value!r:.40}")


_PUBLIC = "Link bandwidth from public descriptions of the machine, not measured by us."
_ASSUMED = "Hop latency and message overhead are assumed."


def _tpu(version: str, link_gb_per_s: float, usual_mesh: str, source: str) -> Fabric:
    return Fabric(
        name=f"tpu-{version}",
        link_bandwidth_bytes_per_s=link_gb_per_s * 1e9,
        hop_latency_s=1e-6,
        message_overhead_s=50e-9,
        source=source,
        usual_mesh=usual_mesh,
    )


def _other(name: str, link_gb_per_s: float, usual_mesh: str, source: str) -> Fabric:
    return Fabric(
        name=name,
        link_bandwidth_bytes_per_s=link_gb_per_s * 1e9,
        hop_latency_s=0.5e-6,
        message_overhead_s=50e-9,
        source=source,
        usual_mesh=usual_mesh,
    )


_LIKE_V3 = f"{_PUBLIC} Hop latency (as for tpu-v3) and message overhead are assumed."

_PRESETS = (
    _other(
        "reference",
        70,
        "any mesh",
        "No machine: round figures near a TPU v3, to compare algorithms.",
    ),
    _tpu("v2", 62, "16x16 torus", _LIKE_V3),
    _tpu(
        "v3",
        82,
        "32x32 torus, slices are meshes; 2x2 boards, 4x2 hosts",
        "Public descriptions differ, from 70 to 100 GB/s a link. 82 GB/s and 1 us a hop fit the "
        "all-reduce times that published training tables imply for 512 and 1024 chips. Message "
        "overhead is assumed.",
    ),
    _tpu("v4", 45, "3-D torus of 4x4x4 cubes", _LIKE_V3),
    _tpu(
        "v5e",
        50,
        "16x16, a torus only along full sides; 4x2 hosts",
        f"{_PUBLIC} 1 us a hop fits public texts. Message overhead is assumed.",
    ),
    _tpu(
        "v5p",
        100,
        "3-D torus",
        "Cloud TPU documentation, page v5p: 1200 GB/s a chip, both directions of six links. "
        "Hop latency (as for tpu-v3) and message overhead are assumed.",
    ),
    _tpu("v6e", 90, "16x16", f"Low confidence: sources range from 90 to 100 GB/s. {_ASSUMED}"),
    _tpu("v7", 100, "3-D torus", _LIKE_V3),
    _other("trainium2", 160, "4x4 torus", f"Low confidence: about 160 GB/s. {_ASSUMED}"),
    _other("wormhole-galaxy", 50, "4x8 mesh", f"{_PUBLIC} {_ASSUMED}"),
    _other("dojo", 1000, "mesh of D1 dies", f"Low confidence: about 1 TB/s an edge. {_ASSUMED}"),
    Fabric(
        "dgx-spark",
        link_bandwidth_bytes_per_s=12.5e9,
        hop_latency_s=2e-6,
        message_overhead_s=500e-9,
        source="Public descriptions: two cables of 200 Gbit/s behind two PCIe links of about 100 "
        f"Gbit/s, so half of that a cable while both are busy; not measured by us. {_ASSUMED}",
        usual_mesh="ring of 3",
    ),
    Fabric(
        "testbed-50mbit",
        link_bandwidth_bytes_per_s=6.15e6,
        hop_latency_s=44e-6,
        message_overhead_s=12e-6,
        source="Measured by `meshmend bench --mesh 4x4 --testbed 50Mbit`, headers left out.",
        usual_mesh="4x4, made by `meshmend testbed up --link 50Mbit`",
        queue_bytes=18_000,
    ),
)
FABRICS: Mapping[str, Fabric] = MappingProxyType({preset.name: preset for preset in _PRESETS})


def figures_text(
    link_bandwidth_bytes_per_s: float, hop_latency_s: float, message_overhead_s: float
) -> str:
    """Return the figures of links as `fabric` reads them, with three digits each."""
    times = format_time(hop_latency_s), format_time(message_overhead_s)
    return ",".join((format_bandwidth(link_bandwidth_bytes_per_s), *times)).replace(" ", "")


def fabric(text: str) -> Fabric:
    """Return the preset of a name, or a fabric of your own figures: `6.15MB/s,44us,12us`.

    Those are the bandwidth of a link, the latency of a hop and the overhead of a message. A fourth
    may follow, how many bytes a link takes before it can carry them: `18KB`. Of chips that share
    the processors of a host four more may follow: how many these are, what a message and its bytes
    take of them, and what a chip's start does: `2,3us,865MB/s,250us`.

    Raises:
        InputError: there is no such preset, the figures cannot be read, or no machine is so slow.
    """
    if "," not in text:
        if text not in FABRICS:
            raise InputError(
                f"--fabric needs one of {', '.join(FABRICS)}, or figures such as "
                f"6.15MB/s,44us,12us, but got {text!r}"
            )
        return FABRICS[text]
    figures = text.split(",")
    if len(figures) not in (3, 4, 7, 8):
        raise InputError(
            "--fabric needs a link's bandwidth, a hop's latency and a message's overhead, such as "
            "6.15MB/s,44us,12us, perhaps what a link takes ahead: 18KB, and perhaps the number of "
            "processors that chips share, what a message and its bytes take of them, and a start: "
            f"2,3us,1GB/s,250us, but got {text!r}"
        )
    bandwidth, latency, overhead, *more = figures
    queue = more.pop(0) if len(figures) % 4 == 0 else "0B"
    found = Fabric(
        name=text,
        link_bandwidth_bytes_per_s=parse_bandwidth(bandwidth),
        hop_latency_s=parse_time(latency),
        message_overhead_s=parse_time(overhead),
        processors=_parse_processors(*more) if more else None,
        queue_bytes=parse_bytes(queue),
    )
    return _checked(found)


def _checked(found: Fabric) -> Fabric:
    """Return a fabric of somebody's own figures, unless no machine is so slow."""
    if found.link_bandwidth_bytes_per_s < _SLOWEST_BYTES_PER_S:
        raise InputError(
            "a fabric needs links of 1 byte/s or more, but got "
            f"{found.link_bandwidth_bytes_per_s:g} byte/s"
        )
    slowest_s = max(found.hop_latency_s, found.message_overhead_s)
    if slowest_s > _LONGEST_S:
        raise InputError(f"a fabric needs times up to {_LONGEST_S:g} s, but got {slowest_s:g} s")
    return found


def _parse_processors(number: str, message: str, bandwidth: str, start: str) -> Processors:
    if not number.strip().isdecimal():
        raise InputError(f"--fabric needs a whole number of processors, but got {number!r}")
    return Processors(
        int(number), parse_time(message), parse_bandwidth(bandwidth), parse_time(start)
    )

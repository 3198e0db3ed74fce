"""The metrics of a job in the text format that Prometheus reads.

A pure function of the job's status. The format is a few rules about lines, so it needs no library:
a name, labels, a value; a HELP and a TYPE line before each family; counters that end in `_total`.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from meshmend.membership.job_status import (
    BEHIND_S,
    RECOVERY_BUCKETS_S,
    JobPhase,
    JobStatus,
)
from meshmend.topology.failures import Chip, format_chip, format_shape

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"

SentBytes = Mapping[Chip, Mapping[Chip, int]]  # bytes by sender and receiver

_MOST_LINKS: Final = 5000  # series of one family that a scrape still carries easily
_SENT: Final = (
    "Payload of the TCP connections between workers, sent and acknowledged, as the senders' "
    "kernels count it; workers report it every 5 seconds."
)


@dataclass(frozen=True)
class Family:
    """Samples of one metric: a suffix of its name, its labels, and its value."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    samples: tuple[tuple[str, Mapping[str, str], float], ...]


def metrics_text(status: JobStatus, sent: SentBytes) -> str:
    """Return all metrics of a job as text."""
    return "".join(itertools.chain.from_iterable(map(_lines, families(status, sent))))


def families(status: JobStatus, sent: SentBytes) -> Iterator[Family]:
    """Yield all metrics of a job; gauges without a known value are left out."""
    yield from _about_the_job(status)
    yield from _about_chips(status)
    yield from _about_faults(status)
    yield from _about_links(sent)


def _about_the_job(status: JobStatus) -> Iterator[Family]:
    labels = {"name": status.job, "mesh": format_shape(status.shape), "version": status.version}
    yield Family("meshmend_info", "gauge", "The job; its value is 1.", (("", labels, 1),))
    yield _gauge("uptime_seconds", "Since this coordinator began.", status.uptime_s)
    phases = tuple(("", {"phase": each.value}, float(each is status.phase)) for each in JobPhase)
    yield Family("meshmend_phase", "gauge", "1 for what the job does now, else 0.", phases)
    yield _gauge("step", "The last step that is known to be finished.", status.step)
    if status.n_steps is not None:
        yield _gauge("target_steps", "How many steps make up the job.", status.n_steps)
    if status.step_ago_s is not None:
        yield _gauge("last_step_age_seconds", "Since the last step.", status.step_ago_s)
    if status.planned is not None:
        n_planned, n_boards = status.planned
        yield _gauge("boards", "Boards that may be lost next.", n_boards)
        yield _gauge("planned_boards", "Boards whose loss has plans made ahead.", n_planned)
    counts = status.counts
    since = "since this coordinator began"
    yield _counter("steps_total", f"Steps finished {since}.", counts.steps)
    yield _counter("samples_total", f"Samples of the steps finished {since}.", counts.samples)


def _about_chips(status: JobStatus) -> Iterator[Family]:
    connected = {each.chip for each in status.workers}
    n_live = len(connected & set(status.members))
    number = status.generation.number if status.generation else 0
    yield _gauge("chips", "Chips of the mesh, alive or not.", math.prod(status.shape))
    yield _gauge("live_chips", "Chips that train: connected members of the generation.", n_live)
    waiting = "Chips whose workers are connected but do not train."
    yield _gauge("waiting_chips", waiting, len(status.waiting))
    yield _gauge("generation", "The number of the latest generation.", number)
    behind = [each for each in status.workers if (each.behind_s or 0.0) >= BEHIND_S]
    help_text = f"Chips that have kept the others waiting for {BEHIND_S:g} s or more."
    yield _gauge("behind_chips", help_text, len(behind))
    if status.slow:
        slow = [("", {"part": each.what}, each.speed) for each in status.slow]
        help_text = "The speed of each chip or link that is slower than the others, in theirs."
        yield Family("meshmend_slow_speed", "gauge", help_text, tuple(slow))
    if (measured := status.fabric) is not None:
        for name, what, value in (
            (
                "fabric_bandwidth_bytes",
                "Bytes a second of a link",
                measured.link_bandwidth_bytes_per_s,
            ),
            ("fabric_hop_seconds", "The latency of a hop", measured.hop_latency_s),
            ("fabric_message_seconds", "The overhead of a message", measured.message_overhead_s),
        ):
            yield _gauge(name, f"{what}, as the chips have measured it.", value)
    longest_s = max((wait.since_s or 0.0 for wait in status.waits), default=0.0)
    yield _gauge("longest_wait_seconds", "The longest wait of a chip for another.", longest_s)


def _about_faults(status: JobStatus) -> Iterator[Family]:
    counts = status.counts
    for name, help_text, value in (
        ("worker_arrivals_total", "Workers that connected.", counts.arrivals),
        ("worker_departures_total", "Workers whose connection was lost.", counts.departures),
        ("workers_turned_away_total", "Workers that counted as dead.", counts.turned_away),
        ("refusals_total", "Refused connections, at most 10 a second.", counts.refusals),
        ("states_lost_total", "Losses of all chips that held the state.", counts.states_lost),
        ("restores_total", "Returns to an earlier state after such a loss.", counts.restores),
        ("redone_steps_total", "Steps to do again after such a loss.", counts.redone_steps),
    ):
        yield _counter(name, help_text, value)
    yield _recoveries(counts.recoveries, counts.recovery_s)


def _recoveries(counts: Iterable[int], total_s: float) -> Family:
    limits = [f"{each:g}" for each in RECOVERY_BUCKETS_S] + ["+Inf"]
    reached = list(itertools.accumulate(counts))
    buckets = [
        ("_bucket", {"le": limit}, float(count))
        for limit, count in zip(limits, reached, strict=True)
    ]
    help_text = "From the first worker that left until all chips of the new generation had stepped."
    buckets += [("_sum", {}, total_s), ("_count", {}, float(reached[-1]))]
    return Family("meshmend_recovery_seconds", "histogram", help_text, tuple(buckets))


def _about_links(sent: SentBytes) -> Iterator[Family]:
    pairs = [
        ("", {"chip": format_chip(chip), "peer": format_chip(peer)}, float(n_bytes))
        for chip, by_peer in sorted(sent.items())
        for peer, n_bytes in sorted(by_peer.items())
    ]
    total = sum(value for _, _, value in pairs)
    yield _counter("sent_bytes_total", _SENT, total)
    if pairs and len(pairs) <= _MOST_LINKS:
        yield Family("meshmend_link_sent_bytes_total", "counter", _SENT, tuple(pairs))


def _gauge(name: str, help_text: str, value: float) -> Family:
    return Family(f"meshmend_{name}", "gauge", help_text, (("", {}, value),))


def _counter(name: str, help_text: str, value: float) -> Family:
    return Family(f"meshmend_{name}", "counter", help_text, (("", {}, value),))


def _lines(family: Family) -> Iterator[str]:
    yield f"# HELP {family.name} {family.help}\n"
    yield f"# TYPE {family.name} {family.kind}\n"
    for suffix, labels, value in family.samples:
        inner = ",".join(f'{name}="{_escaped(text)}"' for name, text in labels.items())
        labelled = f"{family.name}{suffix}{{{inner}}}" if inner else f"{family.name}{suffix}"
        yield f"{labelled} {value:.17g}\n"


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")

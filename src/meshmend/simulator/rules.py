"""How long a schedule takes on a fabric: the rules, and the result.

These rules determine every simulated time:

- A **message** is one row of one slice: `payload x (cuts[hi] - cuts[lo]) / slices` bytes. It
  holds a channel for `message_overhead + bytes / link_bandwidth`, of a link of speed s for
  `message_overhead + bytes / (s x link_bandwidth)`, and no shorter any channel after that one. It
  may start on its next channel one `hop_latency` after it started on this one, and it arrives one
  `hop_latency` and one holding time after it started on its last. Chips buffer what waits: a
  message that waits for its next channel keeps none of the earlier ones.
- It waits for its first channel from the moment when all rows of its `send` hazards are in
  place, in the same slice.
- It may be written when it has arrived and its `write` hazards are over: rows that read at its
  destination have left (their first channel is free again), and the others are in place.
- If the fabric has `processors`, all ranks share them. A message keeps one busy for `message_s +
  bytes / bytes_per_s` at its source, before it waits for its first channel, and again at its
  destination, before it counts as arrived. First of all each rank keeps one busy for `start_s`. A
  rank keeps no two busy at once. Free processors begin with the starts, by rank; then they take
  messages by priority, of those whose rank keeps none busy. Local rows and updates take none.
- It is in place when it is written. If it reduces and `chip_bandwidth` is set, it is in place when
  the chip has added it up, which takes `bytes / chip_bandwidth`. A chip adds up one message after
  another, first come first served, and by priority among those that come at the same time.
- In a sharded update the owner updates each chunk of each slice when all that the first copy of it
  waits for is in place, and rows that copy the chunk from the owner wait for that. If
  `update_rate` is set, an update takes `bytes / update_rate`, one after another at each owner.
- A local row, between two buffers of one chip, takes no link and no time; if it reduces and
  `chip_bandwidth` is set, it is added up like a message that has arrived. A chip takes its local
  rows one after another by priority, as a channel does, and so are updates that take no time.
- A channel that is free takes at once the message with the highest priority of those that wait for
  it. It takes more while those that it has, with the one that it carries, are less than the
  fabric's `queue_bytes`, a message's overhead counted as the bytes of its time. It carries them in
  the order in which it took them: nothing overtakes what a link has taken.
- Of two messages that wait, the one with the smaller (slice + delay, row) has priority. A row's
  delay, in slices and rounded to 64ths, is zero unless it is given: a row with a delay of 3 lets
  rows without delay go first until they are three slices ahead. Of one row the earlier slice goes
  first.
- Everything that happens at one time happens before any channel or chip chooses. What a choice
  causes at that same time (where latency or holding time is zero) makes another round.

Time runs in whole ticks. A tick is a power of two of a second, far below 10^-9 of the longest
delay. The same delays in another order add up to exactly the same time, so the rules decide ties,
not rounding.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.schedule.priority import LEVELS_PER_SLICE, in_levels
from meshmend.schedule.table import Schedule
from meshmend.simulator import discrete_events as events
from meshmend.simulator import nodes
from meshmend.simulator.discrete_events import State
from meshmend.simulator.network_program import SIZE_CLASS, Program
from meshmend.topology.fabric import Fabric

Progress = Callable[[float], None]  # called with the part that is done, from 0 to 1

_TICKS_PER_DELAY = 2.0**44  # of the longest delay, as far as ...
_TICKS_IN_ALL = 1 << 62  # ... all delays one after another stay below this
_MOST_MESSAGES = 1 << 28  # a minute; of more nobody would see the end
_MESSAGES_PER_REPORT = 1 << 19


@dataclass(frozen=True)
class PhaseTime:
    """When a phase's first message started and its last was in place."""

    name: str
    start_s: float
    end_s: float


@dataclass(frozen=True, eq=False)
class Trace:
    """When each message held each of its channels, in order of start."""

    row: NDArray[np.int32]
    slice: NDArray[np.int32]
    channel: NDArray[np.int32]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Simulation:
    """What a schedule costs: when its last message is in place, and how busy each channel was."""

    schedule: Schedule
    fabric: Fabric
    payload_bytes: float
    slices: int
    time_s: float
    phases: tuple[PhaseTime, ...]
    channel_busy_s: NDArray[np.float64]
    delay_slices: NDArray[np.float64] | None
    trace: Trace | None = None

    @property
    def n_messages(self) -> int:
        """How many messages were sent: rows times slices."""
        return self.schedule.n_rows * self.slices

    @property
    def max_link_utilisation(self) -> float:
        """The part of the time for which the busiest channel was busy."""
        return float(self.channel_busy_s.max(initial=0.0)) / self.time_s if self.time_s else 0.0


def simulate(
    program: Program,
    fabric: Fabric,
    *,
    payload_bytes: float,
    slices: int,
    delay_slices: NDArray[np.float64] | None = None,
    trace: bool = False,
    progress: Progress | None = None,
) -> Simulation:
    """Return when each phase of a schedule ends and how busy its channels are, by the rules above.

    Takes time about linear in rows x slices. A trace costs 28 bytes a message and hop.

    Raises:
        InputError: a payload that is negative or not finite, slices below one or so many that it
            would not end, or delays that are negative or not one for each row.
    """
    if not (math.isfinite(payload_bytes) and payload_bytes >= 0):
        raise InputError(f"simulate needs a payload of 0 bytes or more, but got {payload_bytes}")
    if slices < 1:
        raise InputError(f"simulate needs one slice or more, but got {slices}")
    if slices > max(1, _MOST_MESSAGES // max(1, program.n_rows)):
        raise InputError(
            f"simulate needs at most {_MOST_MESSAGES} messages, rows x slices, but got "
            f"{program.n_rows} rows and {slices} slices; use fewer slices"
        )
    levels = _levels(program, delay_slices)
    delays, tick_s = _delays(program, fabric, payload_bytes, slices)
    ahead_s = fabric.queue_bytes / fabric.link_bandwidth_bytes_per_s
    ahead = int(min(ahead_s / tick_s, _TICKS_IN_ALL))
    n_traced = program.n_hops * slices * trace
    state = _start_state(program, delays, slices, fabric, ahead=ahead, n_traced=n_traced)
    _run(program, levels, state, slices, progress)
    return Simulation(
        schedule=program.schedule,
        fabric=fabric,
        payload_bytes=payload_bytes,
        slices=slices,
        time_s=float(state.phases[:, 1].max() * tick_s),
        phases=_phase_times(program.schedule, state, tick_s),
        channel_busy_s=np.multiply(
            state.channels[: program.n_channels, events.BUSY_TICKS], tick_s, dtype=np.float64
        ),
        delay_slices=delay_slices,
        trace=_trace_of(program, levels, state, tick_s) if trace else None,
    )


def _delays(
    program: Program, fabric: Fabric, payload_bytes: float, slices: int
) -> tuple[NDArray[np.int64], float]:
    """Return the delays of the event loop in ticks, and a tick in seconds.

    There are four for each speed and size, then four of which one is a rank's start, if messages
    take processors, and a hop's.
    """
    sizes = program.fractions * (payload_bytes / slices)
    first_own = len(sizes) - program.n_own_classes
    rate = None if program.schedule.has_scratch else fabric.update_bytes_per_s
    bandwidths = program.speeds[:, None] * fabric.link_bandwidth_bytes_per_s
    hold_s = fabric.message_overhead_s + sizes / bandwidths
    hold_s[:, first_own:] = sizes[first_own:] / (rate or math.inf)
    add_s = sizes / (fabric.chip_bandwidth_bytes_per_s or math.inf)
    processors, n_starts = fabric.processors, 0
    work_s, start_s = np.zeros(len(sizes)), 0.0
    if processors is not None:
        work_s, start_s = processors.message_s + sizes / processors.bytes_per_s, processors.start_s
        n_starts = program.schedule.n_ranks
    longest_s = max(
        *(delays_s.max(initial=0.0) for delays_s in (hold_s, add_s, work_s)),
        fabric.hop_latency_s,
        start_s,
    )
    n_works = 2 if processors is not None else 0
    in_all_s = longest_s * slices * (2 * program.n_hops + (1 + n_works) * program.n_rows)
    in_all_s += n_starts * start_s
    least_s = max(longest_s / _TICKS_PER_DELAY, in_all_s / _TICKS_IN_ALL)
    # A power of two: halves and quarters of a second stay what they are.
    tick_s = 2.0 ** math.ceil(math.log2(least_s)) if least_s > 0 else 1.0
    delays = np.empty((*hold_s.shape, events.N_KINDS), dtype=np.int64)
    hop = round(fabric.hop_latency_s / tick_s)
    delays[..., events.RELEASE] = np.rint(hold_s / tick_s)
    delays[..., events.ARRIVE] = hop + delays[..., events.RELEASE]
    delays[:, first_own:, events.ARRIVE] -= hop
    delays[..., events.ADDED] = np.rint(add_s / tick_s)
    delays[..., events.WORKED] = np.rint(work_s / tick_s)
    starts = np.zeros(0 if processors is None else events.N_KINDS, dtype=np.int64)
    starts[events.WORKED :][:1] = round(start_s / tick_s)
    return np.concatenate([delays.reshape(-1), starts, [hop]]), tick_s


def _start_state(
    program: Program,
    delays: NDArray[np.int64],
    slices: int,
    fabric: Fabric,
    *,
    ahead: int,
    n_traced: int,
) -> State:
    """Return the state at time 0: every channel is free, and nothing waits yet."""
    clock = np.zeros(nodes.N_CLOCK, dtype=np.int64)
    clock[nodes.N_SLICES] = slices
    # After the channels come those of the chips' own, for updates and local rows.
    n_queues = program.n_channels + (program.schedule.n_ranks if program.n_own_classes else 0)
    clock[nodes.N_NODES] = n_queues
    clock[[nodes.FREE_NODES, nodes.IN_PLACE, nodes.TO_ADD, nodes.TO_WORK]] = nodes.NOTHING
    clock[nodes.CHIPS_LIMIT] = fabric.chip_bandwidth_bytes_per_s is not None
    ends = np.empty((0, 2), dtype=np.int32)
    if fabric.processors is not None:
        clock[nodes.HAS_WORK], clock[nodes.N_IDLE] = 1, fabric.processors.n
        ends = _ends(program)
    channels = np.zeros((n_queues, events.N_CHANNEL_COLUMNS), dtype=np.int64)
    channels[:, [events.WAITING, events.FIRST_TAKEN]] = nodes.NOTHING
    channels[: program.n_channels, events.AHEAD] = ahead
    queues = np.full((delays.size, nodes.N_DELAY_COLUMNS), nodes.NOTHING, dtype=np.int64)
    queues[:, nodes.TICKS] = delays
    chips = np.full((program.schedule.n_ranks, 4), nodes.NOTHING, dtype=np.int64)
    chips[:, events.ADDING] = 0
    ranks = np.full((program.schedule.n_ranks, 2), nodes.NOTHING, dtype=np.int64)
    ranks[:, events.WORKING] = 0
    return State(
        clock=clock,
        # Every message may be in flight at once, few ever are: pages never used cost nothing.
        nodes=np.empty((n_queues + program.n_rows * slices + len(ends), 4), dtype=np.int64),
        delays=queues,
        channels=channels,
        chips=chips,
        counters=np.concatenate([program.tables.slot_needs] * slices),
        phases=np.tile(np.array([nodes.NOTHING, 0]), (len(program.schedule.phases) + 1, 1)),
        trace=np.empty((n_traced, 3), dtype=np.int64),
        ends=ends,
        ranks=ranks,
    )


def _ends(program: Program) -> NDArray[np.int32]:
    """Return source and destination of each row, -1 where it takes no link; then each rank."""
    schedule = program.schedule
    ends = np.full((program.n_rows + schedule.n_ranks, 2), -1, dtype=np.int32)
    ends[program.n_rows :] = np.arange(schedule.n_ranks)[:, None]
    is_sent = ~schedule.is_local if schedule.has_scratch else np.ones(schedule.n_rows, dtype=bool)
    ends[: schedule.n_rows][is_sent] = np.stack([schedule.src, schedule.dst], axis=1)[is_sent]
    return ends


def _levels(program: Program, delay_slices: NDArray[np.float64] | None) -> NDArray[np.int32]:
    """Return the delays in levels."""
    if delay_slices is None:
        return np.zeros(program.n_rows, dtype=np.int32)
    least, most = delay_slices.min(initial=0), delay_slices.max(initial=0)
    n_rows = program.schedule.n_rows
    if delay_slices.shape != (n_rows,) or not 0 <= least <= most < 1e6:
        raise InputError(
            f"simulate needs a delay from 0 to 10^6 slices for each of {n_rows} rows, but "
            f"got {delay_slices.size} from {least} to {most}"
        )
    levels = np.zeros(program.n_rows, dtype=np.int32)  # updates have no delay
    levels[:n_rows] = in_levels(delay_slices)
    return levels


def _run(
    program: Program,
    levels: NDArray[np.int32],
    state: State,
    slices: int,
    progress: Progress | None,
) -> None:
    n_messages = program.n_rows * slices
    done = 0
    events.begin(program.tables, levels, state)
    while done < n_messages:
        step = n_messages if progress is None else _MESSAGES_PER_REPORT
        before, done = done, events.run(program.tables, levels, state, min(done + step, n_messages))
        assert done > before, "hazards name earlier rows only, so some message can always go on"
        if progress is not None:
            progress(done / n_messages)


def _phase_times(schedule: Schedule, state: State, tick_s: float) -> tuple[PhaseTime, ...]:
    return tuple(
        PhaseTime(phase.name, float(first * tick_s), float(last * tick_s))
        for phase, (first, last) in zip(schedule.phases, state.phases[:-1], strict=True)
    )


def _trace_of(program: Program, levels: NDArray[np.int32], state: State, tick_s: float) -> Trace:
    channels = program.tables.hops[state.trace[:, 1]]
    channels = np.where(channels < 0, ~channels, channels)
    is_link = channels < program.n_channels
    channel, (key, hop, start) = channels[is_link], state.trace[is_link].T
    row = (key & 0xFFFFFFFF).astype(np.int32)
    size_class = program.tables.rows[row, SIZE_CLASS] + program.tables.hop_delay[hop]
    release = events.N_KINDS * size_class + events.RELEASE
    held = state.delays[release, nodes.TICKS]
    return Trace(
        row=row,
        slice=((key >> 32).astype(np.int32) - levels[row]) // LEVELS_PER_SLICE,
        channel=channel.astype(np.int32),
        start_s=start * tick_s,
        end_s=(start + held) * tick_s,
    )

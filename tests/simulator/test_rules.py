"""The fast simulator against closed forms, and against the slow one on random schedules."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.schedule.algorithms import algorithm
from meshmend.schedule.hazards import Hazards, hazards_of
from meshmend.schedule.placement import placed
from meshmend.schedule.table import COPY, REDUCE, Collective, Phase, Schedule, even_cuts
from meshmend.simulator.discrete_events import ADDED, N_KINDS, RELEASE
from meshmend.simulator.network_program import SIZE_CLASS, Program, program_of
from meshmend.simulator.rules import Simulation, _delays, simulate
from meshmend.topology.fabric import Fabric, Processors, fabric
from meshmend.topology.failures import Link, SlowLink
from meshmend.topology.mesh import Mesh
from meshmend.topology.routes import Routes, routes_for
from meshmend.topology.text import parse_mesh
from slow_simulator import Figures, Message, Row, SlowSimulation, busy_of

# One byte a second, half a second a hop, a quarter a message: times can be added in the head.
UNIT = Fabric("unit", link_bandwidth_bytes_per_s=1.0, hop_latency_s=0.5, message_overhead_s=0.25)

Rows = list[tuple[int, int, int, int, int]]  # src, dst, lo, hi, op


def schedule_with(
    rows: Rows, n_ranks: int, n_chunks: int, *, cuts: list[float] | None = None
) -> Schedule:
    """Return a schedule of any rows, a correct collective or not, in two phases."""
    src, dst, lo, hi, op = np.array(rows, dtype=np.uint16).reshape(-1, 5).T
    half = len(rows) // 2
    spans = [("first", 0, half), ("second", half, len(rows))]
    return Schedule(
        algorithm="made up",
        collective=Collective.ALLREDUCE,
        n_ranks=n_ranks,
        cuts=even_cuts(n_chunks) if cuts is None else np.array(cuts),
        owners=np.zeros(n_chunks, dtype=np.int32),
        src=src.copy(),
        dst=dst.copy(),
        lo=lo.copy(),
        hi=hi.copy(),
        op=op.astype(np.uint8),
        phases=tuple(Phase(*span) for span in spans if span[1] < span[2]),
    )


def program_on(mesh: Mesh, schedule: Schedule) -> Program:
    routes = routes_for(mesh, schedule.src, schedule.dst)
    return program_of(schedule, hazards_of(schedule), routes)


def program_named(name: str, mesh: Mesh) -> Program:
    return program_on(mesh, algorithm(name).build(mesh, Collective.ALLREDUCE))


def unit_time(
    rows: Rows, shape: str, *, n_chunks: int = 1, slices: int = 1, chip: float | None = None
) -> float:
    """Return how long rows take on the unit fabric, one byte to each chunk."""
    mesh = parse_mesh(shape)
    program = program_on(mesh, schedule_with(rows, mesh.n_live, n_chunks))
    figures = UNIT if chip is None else UNIT.with_(chip_bandwidth_bytes_per_s=chip)
    return simulate(program, figures, payload_bytes=n_chunks, slices=slices).time_s


def test_one_message_travels_and_its_tail_follows_its_head() -> None:
    assert unit_time([(0, 1, 0, 1, COPY)], "1x2") == 0.5 + 1.25
    assert unit_time([(0, 4, 0, 1, COPY)], "1x5") == 4 * 0.5 + 1.25


def test_a_chain_of_copies_pays_every_hop_and_slices_follow_one_another() -> None:
    chain: Rows = [(i, i + 1, 0, 1, COPY) for i in range(4)]

    assert unit_time(chain, "1x5") == 4 * (0.5 + 1.25)
    assert unit_time(chain, "1x5", slices=2) == 4 * (0.5 + 0.75) + 0.75


@pytest.mark.parametrize(
    ("n", "time_s"),
    [(1, 2 + 2 + 1.5 + 1.75 + 1.5), (2, 2 + 1.5 + 1.75 + 1.5)],  # starts, source, link, destination
)
def test_processors_work_at_both_ends_after_all_chips_have_started(n: int, time_s: float) -> None:
    mesh = parse_mesh("1x2")
    program = program_on(mesh, schedule_with([(0, 1, 0, 1, COPY)], 2, 1))
    shared = replace(UNIT, processors=Processors(n, 0.5, 1.0, start_s=2.0))

    assert simulate(program, shared, payload_bytes=1, slices=1).time_s == time_s


def test_a_chip_keeps_one_processor_busy_at_a_time_and_a_host_all_it_has() -> None:
    """Two messages of a chip follow one another; those of two chips only if they share one."""
    mesh = parse_mesh("2x2")
    of_one = program_on(mesh, schedule_with([(0, 1, 0, 1, COPY), (0, 2, 1, 2, COPY)], 4, 2))
    of_two = program_on(mesh, schedule_with([(0, 1, 0, 1, COPY), (3, 2, 1, 2, COPY)], 4, 2))

    def time_s(program: Program, n: int) -> float:
        free = Fabric("free", 1e15, 0.0, 0.0, processors=Processors(n, 1.0, 1e15))
        return simulate(program, free, payload_bytes=2, slices=1).time_s

    assert [time_s(of_one, n) for n in (1, 2, 4)] == near([4.0, 3.0, 3.0])
    assert [time_s(of_two, n) for n in (1, 2, 4)] == near([4.0, 2.0, 2.0])


@pytest.mark.parametrize(("queue_bytes", "start_s"), [(0.0, 2.5), (1.25, 2.5), (1.26, 3.75)])
def test_nothing_overtakes_what_a_link_has_taken(queue_bytes: float, start_s: float) -> None:
    """Row 1 has priority on 1 -> 2, but comes at 1.75; a message holds the link for 1.25."""
    others: Rows = [(1, 2, chunk, chunk + 1, COPY) for chunk in (1, 2, 3)]
    rows: Rows = [(0, 1, 0, 1, COPY), (1, 2, 0, 1, COPY), *others]
    program = program_on(parse_mesh("1x3"), schedule_with(rows, 3, 4))
    figures = replace(UNIT, queue_bytes=queue_bytes)

    trace = simulate(program, figures, payload_bytes=4, slices=1, trace=True).trace

    assert trace is not None
    assert trace.start_s[trace.row == 1] == [start_s]


def test_messages_on_one_channel_follow_one_another_in_row_order() -> None:
    rows: Rows = [(0, 1, 0, 1, COPY), (0, 1, 1, 2, COPY), (0, 1, 2, 3, COPY)]

    assert unit_time(rows, "1x2", n_chunks=3) == 3 * 1.25 + 0.5


def test_both_directions_of_a_link_work_at_once() -> None:
    assert unit_time([(0, 1, 0, 1, COPY), (1, 0, 1, 2, COPY)], "1x2", n_chunks=2) == 1.75


def test_a_message_held_up_ahead_keeps_no_channel_behind_it() -> None:
    """Row 0 takes 1 -> 2; row 1 waits for it at rank 1; row 2 follows row 1 on 0 -> 1."""
    rows: Rows = [(1, 2, 0, 4, COPY), (0, 2, 4, 5, COPY), (0, 1, 5, 6, COPY)]
    mesh = parse_mesh("1x3")
    program = program_on(mesh, schedule_with(rows, 3, 6))

    result = simulate(program, UNIT, payload_bytes=6, slices=1, trace=True)

    assert result.trace is not None
    started = dict(
        zip(
            zip(result.trace.row.tolist(), result.trace.channel.tolist(), strict=True),
            result.trace.start_s.tolist(),
            strict=True,
        )
    )
    right = [rank * 4 + 3 for rank in range(2)]
    assert started == {
        (0, right[1]): 0.0,
        (1, right[0]): 0.0,
        (1, right[1]): 4.25,
        (2, right[0]): 1.25,
    }
    assert result.time_s == 4.25 + 1.25 + 0.5


def test_a_message_on_a_slow_link_takes_as_much_longer_and_goes_on_at_that_speed() -> None:
    near, far = ("link:0,0-0,1=0.25",), ("link:0,2-0,3=0.25",)

    assert slow_unit_time([(0, 1, 0, 1, COPY)], "1x2", near) == 0.5 + 0.25 + 4
    assert slow_unit_time([(1, 0, 0, 1, COPY)], "1x2", near) == 0.5 + 0.25 + 4
    assert slow_unit_time([(0, 3, 0, 1, COPY)], "1x4", near) == 3 * 0.5 + 0.25 + 4
    assert slow_unit_time([(0, 3, 0, 1, COPY)], "1x4", far) == 3 * 0.5 + 0.25 + 4
    assert slow_unit_time([(1, 2, 0, 1, COPY)], "1x4", near + far) == 0.5 + 1.25


def test_the_trace_of_a_message_shows_how_long_it_holds_a_slow_link() -> None:
    mesh = parse_mesh("1x3", slow=["link:0,1-0,2=0.5"])
    program = program_on(mesh, schedule_with([(0, 2, 0, 1, COPY)], 3, 1))

    result = simulate(program, UNIT, payload_bytes=1, slices=1, trace=True)

    assert result.trace is not None
    assert (result.trace.end_s - result.trace.start_s).tolist() == [1.25, 2.25]
    assert program.channel_loads[1].tolist()[3] == 1
    assert program.channel_loads[1].tolist()[7] == 2


def slow_unit_time(rows: Rows, shape: str, slow: Sequence[str]) -> float:
    mesh = parse_mesh(shape, slow=slow)
    program = program_on(mesh, schedule_with(rows, mesh.n_live, 1))
    return simulate(program, UNIT, payload_bytes=1, slices=1).time_s


def test_a_write_waits_until_what_it_overwrites_has_left() -> None:
    """Chunk 0 leaves rank 1 behind chunk 1, at 5.5; only then may row 2 overwrite it there."""
    rows: Rows = [(1, 2, 1, 5, COPY), (1, 2, 0, 1, COPY), (0, 1, 0, 1, COPY), (1, 0, 0, 1, COPY)]

    assert unit_time(rows, "1x3", n_chunks=5) == (4.25 + 1.25) + 0.5 + 1.25


def test_a_chip_adds_up_one_message_after_another() -> None:
    """The centre of a cross hears four neighbours at 1.75 and adds one byte in two seconds."""
    star: Rows = [(rank, 4, 0, 1, REDUCE) for rank in (1, 3, 5, 7)]

    assert unit_time(star, "3x3") == 1.75
    assert unit_time(star, "3x3", chip=0.5) == 1.75 + 4 * 2
    assert unit_time([(s, d, lo, hi, COPY) for s, d, lo, hi, _ in star], "3x3", chip=0.5) == 1.75


@pytest.mark.parametrize(("shape", "n"), [("2x2", 4), ("4x4", 16), ("6x5", 30)])
@pytest.mark.parametrize("slices", [1, 2, 3, 8])
def test_a_ring_takes_what_its_closed_form_says(shape: str, n: int, slices: int) -> None:
    """A ring sends 2 (n - 1) times, and a slice is through before the first comes round again."""
    reference, payload = fabric("reference"), 3e4

    result = simulate(
        program_named("ring-1d", parse_mesh(shape)), reference, payload_bytes=payload, slices=slices
    )

    hold = 50e-9 + payload / (2 * n * slices) / 70e9
    assert slices * hold < 0.5e-6 + hold
    expected = 2 * (n - 1) * (0.5e-6 + hold) + (slices - 1) * hold
    assert result.time_s == pytest.approx(expected, rel=1e-9)
    assert result.channel_busy_s.max() == pytest.approx(2 * (n - 1) * slices * hold, rel=1e-9)
    assert result.n_messages == 4 * n * (n - 1) * slices


@given(n=st.integers(2, 12), slices=st.integers(1, 5), size=st.floats(1, 1e9))
def test_summing_up_a_chain_and_back_takes_what_its_closed_form_says(
    n: int, slices: int, size: float
) -> None:
    rows: Rows = [(i, i + 1, 0, 1, REDUCE) for i in range(n - 1)]
    rows += [(i + 1, i, 0, 1, COPY) for i in reversed(range(n - 1))]
    mesh, reference = parse_mesh(f"1x{n}"), fabric("reference")

    result = simulate(
        program_on(mesh, schedule_with(rows, n, 1)), reference, payload_bytes=size, slices=slices
    )

    hold = 50e-9 + size / slices / 70e9
    expected = 2 * (n - 1) * (0.5e-6 + hold) + (slices - 1) * hold
    assert result.time_s == pytest.approx(expected, rel=1e-9)


SHAPES = ("1x4", "2x3", "3x3", "2x2x2")


def random_rows(rng: np.random.Generator, n_ranks: int, n_chunks: int) -> Rows:
    rows: Rows = []
    for _ in range(int(rng.integers(1, 20))):
        src, dst = rng.choice(n_ranks, 2, replace=False).tolist()
        lo, hi = sorted(rng.choice(n_chunks + 1, 2, replace=False).tolist())
        rows.append((src, dst, lo, hi, int(rng.integers(2))))
    return rows


def random_case(seed: int) -> tuple[Mesh, Schedule, Fabric, float, int]:
    """Return rows of random ends and chunks, a random fabric, payload and number of slices.

    One half has all figures whole or halved, so that many things happen at once; the other has
    figures that nothing but the same delays make equal.
    """
    rng = np.random.default_rng(seed)
    mesh = parse_mesh(SHAPES[seed % 4], wrap=str(rng.choice(["none", "all"])))
    if rng.random() < 0.5:
        n_chunks = int(rng.choice([1, 2, 4, 8]))
        inner = (np.arange(1, n_chunks) / n_chunks).tolist()
        bandwidth, chip = rng.choice([0.5, 1.0, 4.0], 2).tolist()
        latency, overhead = rng.choice([0.0, 0.25, 1.0], 2).tolist()
        payload, slices = float(rng.choice([0.0, 1.0, 12.0])), int(rng.choice([1, 2, 4]))
    else:
        n_chunks = int(rng.integers(1, 8))
        inner = sorted(rng.random(n_chunks - 1).tolist())
        bandwidth, chip, latency, overhead = rng.uniform(0.1, 3.0, 4).tolist()
        payload, slices = float(rng.uniform(0, 50)), int(rng.integers(1, 5))
    rows = random_rows(rng, mesh.n_live, n_chunks)
    schedule = schedule_with(rows, mesh.n_live, n_chunks, cuts=[0.0, *inner, 1.0])
    limited = chip if rng.random() < 0.5 else None
    mesh = mesh.slowed(*random_speeds(mesh, seed))
    figures = Fabric("random", bandwidth, latency, overhead, limited)
    queue = float(np.random.default_rng((seed, 64)).choice([0, 0, 0.25, 1, 3])) * payload
    figures = replace(figures, processors=random_processors(seed), queue_bytes=queue)
    return mesh, schedule, figures, payload, slices


def random_processors(seed: int) -> Processors | None:
    """Return a few processors for every third seed."""
    rng = np.random.default_rng((seed, 16))
    if seed % 3:
        return None
    if seed % 2:
        figures = rng.uniform(0.0, 1.0), rng.uniform(0.1, 4.0), rng.uniform(0.0, 2.0)
    else:
        figures = (int(rng.integers(0, 5)) / 8, 2.0 ** int(rng.integers(-2, 4)), seed % 5 / 2)
    return Processors(int(rng.integers(1, 5)), *figures)


def random_speeds(mesh: Mesh, seed: int) -> list[SlowLink]:
    """Return speeds for a few links, and for every other seed none."""
    rng = np.random.default_rng((seed, 32))
    n_slow = seed % 2 * int(rng.integers(1, 4))
    return [
        SlowLink(Link(mesh.live[one], mesh.live[other]), float(rng.choice([0.25, 0.5])))
        for one, other in mesh.links[rng.choice(len(mesh.links), n_slow, replace=False)].tolist()
    ]


def slow_rows(schedule: Schedule, hazards: Hazards, routes: Routes) -> list[Row]:
    cuts = [Fraction(cut) for cut in schedule.cuts.tolist()]
    rows = []
    for row, (src, dst) in enumerate(zip(schedule.src, schedule.dst, strict=True)):
        if src == dst:  # it holds a channel of its chip's own, which comes after those of links
            path, speeds = [routes.n_ranks * routes.n_ports + int(src)], map(Fraction, ())
        else:
            pair = routes.pair_of(int(src), int(dst))
            path = routes.channels[routes.hop_ptr[pair] : routes.hop_ptr[pair + 1]].tolist()
            speeds = map(Fraction, () if routes.speeds is None else routes.speeds[path].tolist())
        rows.append(
            Row(
                src=int(src),
                dst=int(dst),
                fraction=cuts[schedule.hi[row]] - cuts[schedule.lo[row]],
                reduces=bool(schedule.op[row] == REDUCE),
                path=path,
                speeds=tuple(speeds),
                is_local=bool(src == dst),
                before_send=hazards.before_send(row),
                before_write=hazards.before_write(row),
            )
        )
    return rows


def both(seed: int) -> tuple[Simulation, SlowSimulation]:
    mesh, schedule, figures, payload, slices = random_case(seed)
    hazards, routes = hazards_of(schedule), routes_for(mesh, schedule.src, schedule.dst)
    chip = figures.chip_bandwidth_bytes_per_s
    exact = Figures(
        bandwidth=Fraction(figures.link_bandwidth_bytes_per_s),
        latency=Fraction(figures.hop_latency_s),
        overhead=Fraction(figures.message_overhead_s),
        chip_bandwidth=None if chip is None else Fraction(chip),
        payload=Fraction(payload),
        processors=exact_processors(figures),
        queue=Fraction(figures.queue_bytes),
    )
    program = program_of(schedule, hazards, routes)
    delay_slices = random_delays(seed, schedule.n_rows)
    fast = simulate(
        program,
        figures,
        payload_bytes=payload,
        slices=slices,
        delay_slices=delay_slices,
        trace=True,
    )
    slow = SlowSimulation(
        slow_rows(schedule, hazards, routes), exact, slices, delay_slices.tolist()
    )
    slow.n_ranks = mesh.n_live
    return fast, slow.run()


def exact_processors(figures: Fabric) -> tuple[int, Fraction, Fraction, Fraction] | None:
    if (processors := figures.processors) is None:
        return None
    message_s, start_s = Fraction(processors.message_s), Fraction(processors.start_s)
    return processors.n, message_s, Fraction(processors.bytes_per_s), start_s


def random_delays(seed: int, n_rows: int) -> NDArray[np.float64]:
    """Return delay_slices in quarters of a slice, and none at all for every other seed."""
    rng = np.random.default_rng((seed, n_rows))
    return rng.integers(0, 1 + seed % 2 * int(rng.integers(1, 16)), n_rows) / 4.0


def near(value: object) -> object:
    return pytest.approx(value, rel=1e-9, abs=1e-12)


def check_agreement(seed: int) -> None:
    fast, slow = both(seed)

    assert fast.time_s == near(float(slow.time))
    busy = busy_of(slow)
    for channel, busy_s in enumerate(fast.channel_busy_s.tolist()):
        assert busy_s == near(float(busy.get(channel, 0)))
    for phase, time in zip(fast.schedule.phases, fast.phases, strict=True):
        mine = [m for m in slow.starts if phase.start <= m[1] < phase.stop]
        first = min(slow.starts[message][0] for message in mine)
        last = max(slow.in_place[message] for message in mine)
        assert (time.start_s, time.end_s) == near((float(first), float(last)))
    assert fast.trace is not None
    traced = zip(fast.trace.slice, fast.trace.row, fast.trace.channel, strict=True)
    starts = dict(zip(traced, fast.trace.start_s.tolist(), strict=True))
    assert starts == near(
        {
            (*message, channel): float(start)
            for message, at in slow.starts.items()
            for channel, start in zip(slow.rows[message[1]].path, at, strict=True)
        },
    )


@pytest.mark.parametrize("batch", range(4))
def test_it_agrees_with_the_slow_simulator_on_random_schedules(batch: int) -> None:
    """Total, phases, busy times and the start of every hop, with contention, routes and slices."""
    for seed in range(20 * batch, 20 * batch + 20):
        check_agreement(seed)


@pytest.mark.slow
@pytest.mark.parametrize(
    "seeds",
    [range(80, 200), *(range(start, start + 100) for start in range(1000, 2000, 100))],
    ids=str,
)
def test_it_agrees_with_the_slow_simulator_on_many_more(seeds: range) -> None:
    for seed in seeds:
        check_agreement(seed)


@dataclass
class InTicks(SlowSimulation):
    """The slow simulator with the delays that the fast one rounded to ticks."""

    delays: list[int] = field(default_factory=list)
    size_class: list[int] = field(default_factory=list)

    def _hold(self, message: Message, hop: int) -> Fraction:
        return Fraction(self.delays[N_KINDS * self.size_class[message[1]] + RELEASE])

    def _add_time(self, message: Message) -> Fraction:
        return Fraction(self.delays[N_KINDS * self.size_class[message[1]] + ADDED])


@pytest.mark.parametrize("n_chunks", [3, 5, 6, 7])
@pytest.mark.parametrize(
    "seeds", [range(8), pytest.param(range(8, 20), marks=pytest.mark.slow)], ids=str
)
def test_on_thirds_and_fifths_it_agrees_exactly_with_the_slow_simulator_in_ticks(
    n_chunks: int, seeds: range
) -> None:
    """Here one time can be reached by different delays, and ticks may part what arithmetic ties.

    Ticks then decide the order, so exact fractions can differ; the same ticks must not.
    """
    for seed in seeds:
        rng = np.random.default_rng(100 * n_chunks + seed)
        mesh, slices = parse_mesh(SHAPES[seed % 4]), 1 + seed % 4
        schedule = schedule_with(random_rows(rng, mesh.n_live, n_chunks), mesh.n_live, n_chunks)
        figures = Fabric("thirds", 3.0, 0.5, 0.25, (None, 1.0)[seed % 2])
        hazards, routes = hazards_of(schedule), routes_for(mesh, schedule.src, schedule.dst)
        program = program_of(schedule, hazards, routes)
        delays, tick_s = _delays(program, figures, 12.0, slices)
        latency, chip = Fraction(int(delays[-1])), Fraction(1) if seed % 2 else None
        exact = Figures(Fraction(3), latency, Fraction(1, 4), chip, Fraction(12))
        rows = slow_rows(schedule, hazards, routes)

        fast = simulate(program, figures, payload_bytes=12.0, slices=slices)
        slow = InTicks(rows, exact, slices)
        slow.delays, slow.size_class = delays.tolist(), program.tables.rows[:, SIZE_CLASS].tolist()

        assert fast.time_s == float(slow.run().time) * tick_s


@pytest.mark.parametrize("name", ["ring-1d", "two-d", "row-pair", "ft-two-d", "rank-ring"])
def test_every_algorithm_agrees_with_the_slow_simulator(name: str) -> None:
    mesh = parse_mesh("2x4")
    schedule = algorithm(name).build(mesh, Collective.ALLREDUCE)
    hazards, routes = hazards_of(schedule), routes_for(mesh, schedule.src, schedule.dst)
    figures = Figures(Fraction(1), Fraction(1, 2), Fraction(1, 4), None, Fraction(96))

    slow = SlowSimulation(slow_rows(schedule, hazards, routes), figures, 2).run()
    fast = simulate(program_of(schedule, hazards, routes), UNIT, payload_bytes=96, slices=2)

    assert fast.time_s == pytest.approx(float(slow.time), rel=1e-9)


@pytest.mark.parametrize("chip", [None, 2.0])
@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("exchange", parse_mesh("2x3", wrap="all", fail=["1,0", "link:0,2-1,2"])),
        ("exchange-1", parse_mesh("2x3")),
        ("direct", parse_mesh("2x3", wrap="all")),
        ("flood", parse_mesh("5", wrap="all")),
    ],
)
def test_tables_with_scratch_agree_with_the_slow_simulator(
    name: str, mesh: Mesh, chip: float | None
) -> None:
    """Whose local rows take no time, but come after all that happens at the same time."""
    schedule = algorithm(name).build(mesh, Collective.ALLREDUCE)
    assert schedule.has_scratch
    hazards, routes = hazards_of(schedule), placed(mesh, schedule).routes
    limited = None if chip is None else Fraction(chip)
    figures = Figures(Fraction(1), Fraction(1, 2), Fraction(1, 4), limited, Fraction(4))

    for slices in (1, 2):
        slow = SlowSimulation(slow_rows(schedule, hazards, routes), figures, slices).run()
        fast = simulate(
            program_of(schedule, hazards, routes),
            UNIT.with_(chip_bandwidth_bytes_per_s=chip),
            payload_bytes=4,
            slices=slices,
        )

        assert fast.time_s == pytest.approx(float(slow.time), rel=1e-9)


@settings(max_examples=20)
@given(st.integers(0, 10_000))
def test_the_same_input_gives_the_same_output_and_progress_changes_nothing(seed: int) -> None:
    mesh, schedule, figures, payload, slices = random_case(seed)
    program = program_on(mesh, schedule)
    told: list[float] = []

    one = simulate(program, figures, payload_bytes=payload, slices=slices)
    other = simulate(program, figures, payload_bytes=payload, slices=slices, progress=told.append)

    assert one.time_s == other.time_s
    assert np.array_equal(one.channel_busy_s, other.channel_busy_s)
    assert told[-1] == 1.0
    assert 0 <= one.max_link_utilisation <= 1 + 1e-12


def test_a_schedule_of_no_rows_takes_no_time() -> None:
    result = simulate(
        program_on(parse_mesh("1x2"), schedule_with([], 2, 1)), UNIT, payload_bytes=1, slices=1
    )

    assert (result.time_s, result.n_messages, result.max_link_utilisation) == (0.0, 0, 0.0)


@pytest.mark.parametrize(
    ("payload", "slices", "needed"),
    [
        (-1.0, 1, "simulate needs a payload of 0 bytes or more, but got -1"),
        (float("nan"), 1, "simulate needs a payload of 0 bytes or more, but got nan"),
        (1.0, 0, "simulate needs one slice or more, but got 0"),
    ],
)
def test_it_refuses_what_makes_no_sense(payload: float, slices: int, needed: str) -> None:
    program = program_on(parse_mesh("1x2"), schedule_with([(0, 1, 0, 1, COPY)], 2, 1))

    with pytest.raises(InputError, match=needed):
        simulate(program, UNIT, payload_bytes=payload, slices=slices)


@pytest.mark.parametrize("delay_slices", [[0], [0, 0, 0], [0, -1], [0, float("nan")]])
def test_it_refuses_delays_that_are_not_one_for_each_row_from_zero_on(
    delay_slices: list[int],
) -> None:
    rows: Rows = [(0, 1, 0, 1, COPY), (1, 0, 0, 1, COPY)]
    program = program_on(parse_mesh("1x2"), schedule_with(rows, 2, 1))

    with pytest.raises(InputError, match=r"needs a delay from 0 to 10\^6 slices for each of 2"):
        simulate(
            program,
            UNIT,
            payload_bytes=1,
            slices=1,
            delay_slices=np.array(delay_slices, dtype=np.float64),
        )


def test_a_row_with_a_delay_yields_to_later_slices_of_rows_without() -> None:
    rows: Rows = [(0, 1, 0, 1, COPY), (0, 1, 1, 2, COPY)]
    program = program_on(parse_mesh("1x2"), schedule_with(rows, 2, 2))

    result = simulate(
        program,
        UNIT,
        payload_bytes=6,
        slices=3,
        delay_slices=np.array([1.0, 0.0]),
        trace=True,
    )

    assert result.trace is not None
    order = list(zip(result.trace.slice.tolist(), result.trace.row.tolist(), strict=True))
    assert order == [(0, 1), (0, 0), (1, 1), (1, 0), (2, 1), (2, 0)]


def test_it_refuses_rows_without_a_route_and_hazards_of_another_schedule() -> None:
    mesh = parse_mesh("1x3")
    one = schedule_with([(0, 1, 0, 1, COPY)], 3, 1)
    two = schedule_with([(0, 1, 0, 1, COPY), (1, 2, 0, 1, COPY)], 3, 1)
    routes = routes_for(mesh, one.src, one.dst)

    with pytest.raises(InputError, match=r"there is none for row 1, .*; name its ranks"):
        program_of(two, hazards_of(two), routes)
    with pytest.raises(InputError, match="needs hazards of 2 rows and routes of 3 ranks"):
        program_of(two, hazards_of(one), routes)

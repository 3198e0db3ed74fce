"""One answer through one year, simulated slowly and plainly; the compiled walk must agree with it.

Written from docs/design/0008-forecast.md with sets of chips and a list of moments, and with the
project's own meshes. Shares no code with the walk but the transitions that it is given.
"""

import itertools
import math
from dataclasses import dataclass, field
from functools import cache

from forecasts import prices_of
from meshmend.forecast.forecasting import Answer, YearRunner
from meshmend.forecast.hole_prices import StepPrices
from meshmend.forecast.machine import Machine
from meshmend.forecast.records import Ints
from meshmend.forecast.scenario import KINDS, Scenario, Shape
from meshmend.forecast.walk_arrays import GO_ON, WAIT
from meshmend.topology.failures import Block, Chip, Failure, Link
from meshmend.topology.graph import components
from meshmend.topology.mesh import Mesh

CAUSES = (
    *("useful", "detection", "restart", "lost", "slow", "missing", "waiting", "checkpoints"),
    *("checks", "slow parts"),
)
DOWN, UP, WRONG, SLOW, FAST = range(5)


@dataclass
class SlowJob:
    """A job that takes transitions one at a time; times are whole nanoseconds."""

    machine: Machine
    prices: StepPrices
    answer: Answer
    times: dict[str, int]  # by the names of `YearRunner.rules_of`
    now: int = 0
    phase: str = "run"
    until: int | None = None
    where: str = "mesh"
    used: frozenset[Chip] = frozenset()
    inside: frozenset[Link] = frozenset()
    rates: tuple[float, float, float, float] = (1.0, 1.0, 1.0, 1.0)
    since_save: int = 0
    unsaved: int = 0
    recheck: bool = False
    spent: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    trained: int = 0  # useful time since ever
    saves: list[tuple[int, int]] = field(default_factory=lambda: [(0, 0)])  # when, and how much

    def __post_init__(self) -> None:
        self.mesh = self.machine.scenario.mesh
        self.down: set[int] = set()
        self.slow: set[int] = set()
        self.wrong_at: dict[int, int] = {}
        self.found_wrong: int | None = None  # since when the domain that goes down was wrong
        self.unit_of_slot: dict[int, int | None] = {i: i for i in range(self.machine.n_slots)}
        self._choose()

    # What is broken.

    def _domain_units(self, domain: int) -> list[int]:
        first = self.machine.unit_first
        return [int(u) for u in self.machine.domain_units[first[domain] : first[domain + 1]]]

    def _sick_units(self) -> set[int]:
        return {unit for domain in self.down for unit in self._domain_units(domain)}

    def _idle(self) -> list[int]:
        at_work = set(self.unit_of_slot.values())
        sick = self._sick_units()
        return [u for u in range(self.machine.n_units) if u not in at_work and u not in sick]

    def _holes(self) -> list[tuple[int, Failure]]:
        n_mesh = len(self.machine.domains)
        if self.answer.uses_spares:
            empty = [slot for slot, unit in self.unit_of_slot.items() if unit is None]
            return [(n_mesh + slot, self.machine.slots[slot]) for slot in empty]
        return [(d, self.machine.domains[d].failure) for d in sorted(self.down) if d < n_mesh]

    def _dead(self) -> set[Chip]:
        holes = self._holes()
        return {c for _, hole in holes if isinstance(hole, Block) for c in hole.chips()}

    def _cut_links(self) -> set[Link]:
        return {hole for _, hole in self._holes() if isinstance(hole, Link)}

    # Where the job runs.

    def _choose(self) -> None:
        n, dead, links = self.mesh.n_chips, self._dead(), self._cut_links()
        compute, full = self.prices.compute_s, self.prices.full_s
        chips, total = 0, full
        on_mesh = self._on_mesh()
        if self.answer.on_holes == WAIT:
            self.where, chips = ("full", n) if not self._holes() else ("nowhere", 0)
        elif on_mesh:
            self.where, chips = "mesh", on_mesh
            total = full + sum(self.prices.extra_s[number] for number, _ in self._holes())
        else:
            chips, spanned = self._choose_box(dead, links)
            self.where = "box" if chips else "nowhere"
            total = max(full, self.prices.box_s[spanned])
        self.chips, self.total = chips, total
        self.rates = self._rates(chips, n, compute, full, total)

    def _on_mesh(self) -> int:
        """How many chips go on around the holes; none if the answer does not."""
        dead, mesh = frozenset(self._dead()), self.mesh
        goes_on = self.answer.on_holes == GO_ON and self._is_supported()
        if not goes_on or len(dead) == mesh.n_chips:
            return 0
        broken = Mesh(mesh.shape, mesh.wrap, dead, frozenset(self._cut_links()))
        chips, tile = len(components(broken)[0]), self.machine.scenario.job.tile
        if tile:
            n_colours = math.prod(tile)
            chips = min(chips // n_colours, tiles_in_bands(mesh.shape, tile, dead)) * n_colours
        return chips

    def _slow_parts(self) -> list[str]:
        """Return the kinds of the slow chips and links that the job uses."""
        kinds = self.machine.scenario.failures.per_1000_days
        names = [kind for kind in KINDS if kinds.get(kind)]
        kind_of = {domain: names[self.machine.kind_of[domain]] for domain in self.slow}
        if self.answer.uses_spares:
            at_work = set(self.unit_of_slot.values())
            return [kind_of[d] for d in self.slow if self._domain_units(d)[0] in at_work]
        dead, cut = self._dead(), self._cut_links()

        def is_used(part: Failure) -> bool:
            if self.where == "box":
                return part in self.inside if isinstance(part, Link) else part.origin in self.used
            if isinstance(part, Link):
                return part not in cut and not {part.first, part.second} & dead
            return part.origin not in dead

        domains = [d for d in self.slow if d < len(self.machine.domains)]
        return [kind_of[d] for d in domains if is_used(self.machine.domains[d].failure)]

    def _is_supported(self) -> bool:
        return all(self.prices.is_supported[number] for number, _ in self._holes())

    def _rates(
        self, chips: int, n: int, compute: float, full: float, total: float
    ) -> tuple[float, float, float, float]:
        if not chips:
            return 0.0, 0.0, 0.0, 0.0
        every = self.machine.scenario.wrong.check_every
        whole, part = compute + full, chips / n
        if self.machine.scenario.job.keeps_batch:
            longer = compute * n / chips
            checks = longer / every if every else 0.0
            slow = self._slow_step(chips, longer, checks, total)
            times = longer + full, longer + total, longer + checks + total, slow
            return whole / times[0], whole / times[1], whole / times[2], whole / times[3]
        checks = compute / every if every else 0.0
        slow = self._slow_step(chips, compute, checks, total)
        times = compute + full, compute + total, compute + checks + total, slow
        return (part, *(part * whole / each for each in times[1:]))  # type: ignore[return-value]

    def _slow_step(self, chips: int, compute: float, checks: float, total: float) -> float:
        """Return how long a step takes with what is slow."""
        parts, slow = self._slow_parts(), self.machine.scenario.slow
        n_chips, n_links = parts.count("slow-chip"), parts.count("slow-link")
        worst = total / slow.link_speed if n_links else total
        if not slow.is_known:
            return (compute + checks) / (slow.chip_speed if n_chips else 1.0) + worst
        n_slow = min(n_chips, chips)
        sum_of_speeds = chips - n_slow + n_slow * slow.chip_speed
        planned = total + n_links * self.prices.slow_link_s
        return (compute + checks) * chips / sum_of_speeds + min(worst, planned)

    def _choose_box(self, dead: set[Chip], links: set[Link]) -> tuple[int, int]:
        size, self.used, self.inside, spanned = self._best_box(dead, links)
        return self._in_tiles(size, self.used), spanned

    def _in_tiles(self, size: int, box: frozenset[Chip]) -> int:
        """How many of the chips of a box are in tiles."""
        tile = self.machine.scenario.job.tile
        if not tile or not box:
            return size
        lengths = [len(set(line)) for line in zip(*box, strict=True)]
        return math.prod(k // part * part for k, part in zip(lengths, tile, strict=True))

    def _best_box(
        self, dead: set[Chip], links: set[Link]
    ) -> tuple[int, frozenset[Chip], frozenset[Link], int]:
        """Try every box; of equals the one whose first chip comes first, then smaller lengths."""
        for chips, inside, closed, spanned in _boxes(self.mesh.shape, self.mesh.wrap):
            if not (chips & dead or inside & links):
                return len(chips), chips, closed, spanned
        return 0, frozenset(), frozenset(), 0

    # What happens.

    def take(self, at: int, domain: int, what: int) -> None:
        self.advance(at)
        if what == WRONG:
            self.wrong_at[domain] = at
            return
        if what in (SLOW, FAST):
            (self.slow.add if what == SLOW else self.slow.discard)(domain)
            prices = self.prices
            self.rates = self._rates(
                self.chips, self.mesh.n_chips, prices.compute_s, prices.full_s, self.total
            )
            return
        self.found_wrong, up = self.wrong_at.pop(domain, None), what == UP
        before_dead, before_links = self._dead(), self._cut_links()
        sick_before = self._sick_units()
        (self.down.discard if up else self.down.add)(domain)
        if self.answer.uses_spares:
            for unit in sorted(self._sick_units() ^ sick_before):
                self._unit_changed(unit, up)
        elif domain < len(self.machine.domains):
            if up:
                self._repaired()
            else:
                self._lost(self._dead() - before_dead, self._cut_links() - before_links)

    def _unit_changed(self, unit: int, up: bool) -> None:
        if up:
            if self.unit_of_slot.get(unit, 0) is None:
                self.unit_of_slot[unit] = unit
            self._repaired()
            return
        for slot, own in self.unit_of_slot.items():
            if own == unit:
                self.unit_of_slot[slot] = None
                self._lost(set(self.machine.slots[slot].chips()), set())
                return

    def _lost(self, chips: set[Chip], links: set[Link]) -> None:
        hit = bool(chips or links)
        if self.where == "box":
            hit = bool(chips & self.used or links & self.inside)
        if hit and self.found_wrong is not None:
            self._go_back(self.found_wrong)
        if self.phase in ("detect", "stopped") or not hit:
            return
        if self.where != "mesh":
            self._fall_back()
        self._begin("detect", self.times["detection_ns"])

    def _go_back(self, moment: int) -> None:
        """Go back to the last checkpoint from before a moment."""
        while self.saves[-1][0] > moment:
            self.saves.pop()
        lost = self.trained - self.saves[-1][1]
        self.spent["lost"] += lost
        self.spent["useful"] -= lost
        self.trained -= lost
        if lost:
            self.since_save = self.unsaved = 0

    def _save(self) -> None:
        self.since_save = self.unsaved = 0
        self.saves.append((self.now, self.trained))

    def _repaired(self) -> None:
        if self.phase == "stopped":
            self._react()
        elif self.phase == "run":
            self._after_repair()
        elif self.phase != "detect":
            self.recheck = True

    def _switch_in(self) -> bool:
        idle, filled = self._idle(), False
        for slot in sorted(self.unit_of_slot):
            if self.unit_of_slot[slot] is None and idle:
                self.unit_of_slot[slot] = idle.pop(0)
                filled = True
        return filled

    def _has_too_many_holes(self) -> bool:
        answer = self.answer
        return answer.uses_spares and len(self._holes()) > answer.holes_before_spares

    def _react(self) -> None:
        before = self.where
        switched = self._has_too_many_holes() and self._switch_in()
        pause = self.times["restart_ns"] + (self.times["switch_in_ns"] if switched else 0)
        self._choose()
        self.recheck = False
        if self.where == "nowhere":
            self._fall_back()
            self._begin("stopped", None)
        elif before == self.where == "mesh" and not switched:
            self._begin("recover", self.times["recovery_ns"])
        elif before == "mesh" and switched:
            self._save()
            self._begin("start", pause + self.times["write_ns"])
        else:
            self._fall_back()
            self._begin("start", pause)

    def _after_repair(self) -> None:
        fills = self._has_too_many_holes() and bool(self._idle())
        if self.where == "full":
            return
        if self.where == "mesh" and not fills:
            self._choose()
            self._begin("recover", self.times["recovery_ns"])
            return
        usable = self.mesh.n_chips
        if not fills:
            box = self._best_box(self._dead(), self._cut_links())
            usable = max(1, self._on_mesh() or self._in_tiles(box[0], box[1]))
        pause = self.times["write_ns"] + self.times["restart_ns"]
        pause += self.times["switch_in_ns"] if fills else 0
        if (1 - self.chips / usable) * self.times["between_failures_ns"] > pause:
            if fills:
                self._switch_in()
            self._save()
            self._choose()
            self._begin("start", pause)

    # Time.

    def _begin(self, phase: str, for_ns: int | None) -> None:
        self.phase = phase
        self.until = None if for_ns is None else self.now + for_ns

    def _fall_back(self) -> None:
        self.spent["lost"] += self.unsaved
        self.spent["useful"] -= self.unsaved
        self.trained -= self.unsaved
        self.since_save = self.unsaved = 0

    def advance(self, to: int) -> None:
        """Let time pass, phase by phase."""
        while self.until is not None and self.until <= to:
            self._pass(self.until)
            if self.phase == "detect":
                self._react()
                continue
            self._begin("run", None)
            if self.recheck:
                self.recheck = False
                self._after_repair()
        self._pass(to)

    def _pass(self, to: int) -> None:
        cause = {"detect": "detection", "stopped": "waiting", "start": "restart"}
        cause["recover"] = "restart"
        if self.phase != "run":
            self.spent[cause[self.phase]] += to - self.now
            self.now = to
            return
        every, write = self.times["interval_ns"], self.times["write_ns"]
        while self.now < to:  # one part of a cycle after another
            trains = self.since_save < every
            end = every if trains else every + write
            dt = min(to - self.now, end - self.since_save)
            if trains:
                self._train(dt)
            else:
                self.spent["checkpoints"] += dt
            self.now += dt
            self.since_save += dt
            if self.since_save == every + write:
                self._save()

    def _train(self, dt: int) -> None:
        with_chips = min(dt, round(dt * self.rates[0]))
        with_sum = min(with_chips, round(dt * self.rates[1]))
        with_checks = min(with_sum, round(dt * self.rates[2]))
        useful = min(with_checks, round(dt * self.rates[3]))
        self.spent["missing"] += dt - with_chips
        self.spent["slow"] += with_chips - with_sum
        self.spent["checks"] += with_sum - with_checks
        self.spent["slow parts"] += with_checks - useful
        self.spent["useful"] += useful
        self.trained += useful
        self.unsaved += useful


@cache
def tiles_in_bands(shape: Shape, tile: Shape, dead: frozenset[Chip]) -> int:
    """Return the most tiles in bands: all orders of axes, all places of bands are tried."""

    @cache
    def most(axes: tuple[int, ...], begin: int, taken: tuple[tuple[int, int], ...]) -> int:
        if not axes:
            box = dict(taken)
            lines = [range(box[axis], box[axis] + tile[axis]) for axis in range(len(shape))]
            return int(not any(chip in dead for chip in itertools.product(*lines)))
        axis, *rest = axes
        if begin + tile[axis] > shape[axis]:
            return 0
        here = most(tuple(rest), 0, (*taken, (axis, begin)))
        return max(most(axes, begin + 1, taken), here + most(axes, begin + tile[axis], taken))

    return max(most(axes, 0, ()) for axes in itertools.permutations(range(len(shape))))


@cache
def _boxes(
    shape: tuple[int, ...], wrap: tuple[bool, ...]
) -> list[tuple[frozenset[Chip], frozenset[Link], frozenset[Link], int]]:
    """Return every box, the best first: chips, links, links with those that close rings, axes."""
    ranges = [
        [(a, k) for a in range(s) for k in range(1, (s if w and s > 2 else s - a) + 1)]
        for s, w in zip(shape, wrap, strict=True)
    ]

    def order(box: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
        return (-math.prod(k for _, k in box), *(a for a, _ in box), *(k for _, k in box))

    boxes = []
    for box in sorted(itertools.product(*ranges), key=order):
        lines = [[(a + i) % s for i in range(k)] for (a, k), s in zip(box, shape, strict=True)]
        front = 3 - len(shape)
        spanned = (1 << front) - 1  # the axes of extent 1 in front
        for axis, (_, k) in enumerate(box):
            spanned |= (k == shape[axis]) << (front + axis)
        rings = [
            [*line, line[0]] if w and 2 < s == len(line) else line
            for line, s, w in zip(lines, shape, wrap, strict=True)
        ]
        inside, closed = _links_inside(lines), _links_inside(lines, rings)
        chips = frozenset(itertools.product(*lines))
        boxes.append((chips, frozenset(inside), frozenset(closed), spanned))
    return boxes


def _links_inside(lines: list[list[int]], rings: list[list[int]] | None = None) -> list[Link]:
    """Return the links between neighbours of a box; with rings, those that close them as well."""
    found = []
    for axis, line in enumerate(rings or lines):
        others = [[None] if i == axis else other for i, other in enumerate(lines)]
        for one, two in itertools.pairwise(line):
            for at in itertools.product(*others):
                first = tuple(one if i == axis else a for i, a in enumerate(at))
                second = tuple(two if i == axis else a for i, a in enumerate(at))
                found.append(Link.between(first, second))  # type: ignore[arg-type]  # no None left
    return found


def slow_walk(job: SlowJob, events: Ints, start: int, end: int) -> list[int]:
    """Return where the time between two moments went, by cause."""
    moments = [tuple(map(int, row)) for row in events.reshape(-1, 3)]
    for at, domain, what in (m for m in moments if m[0] < start):
        job.take(at, domain, what)
    job.advance(start)
    job.spent = dict.fromkeys(CAUSES, 0)
    job.unsaved = 0
    job.saves.append((start, job.trained))
    for at, domain, what in (m for m in moments if start <= m[0] < end):
        job.take(at, domain, what)
    job.advance(end)
    return [job.spent[cause] for cause in CAUSES]


def slow_totals(
    runner: YearRunner, asked: Scenario, answer: Answer, events: Ints, start: int, end: int
) -> list[int]:
    """Return what the slow simulator says of an answer, with the times of a runner."""
    rules = runner.rules_of(answer)
    job = SlowJob(runner.machine, prices_of(asked, extra_s=0.002), answer, rules)
    return slow_walk(job, events, start, end)

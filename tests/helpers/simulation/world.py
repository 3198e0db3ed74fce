"""One job in a world that can break: its processes, its network, its disk, and their faults."""

import math
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from random import Random

from meshmend.config import Timing
from meshmend.membership.job import JobSpec
from meshmend.membership.messages import FRESH, CutLink, MendLink
from meshmend.topology.failures import Chip, Link
from meshmend.topology.graph import components
from meshmend.topology.text import parse_mesh, parse_tile
from meshmend.topology.tiles import box_colour, box_tiling, upright_boxes
from simulation.coordinator_process import COORDINATOR_HOST, CoordinatorProcess
from simulation.disk import Disk, State
from simulation.event_loop import EventLoop, Process
from simulation.invariants import WRONG, Invariants, ProtocolError
from simulation.network import Network
from simulation.simulated_worker import BATCH, SimulatedWorker
from simulation.worker_process import WorkerProcess

MESHES = ("1x2", "1x3", "2x2", "2x3")
TILED = (("1x4", "1x2"), ("2x2", "1x2"), ("1x5", "1x2"), ("2x3", "2x1"), ("1x3", "1x1"))
SHAPED = (  # sides of three, tiles that are lines, tiles that are blocks
    *(("3x3", "1x3"), ("3x3", "3x1"), ("3x2", "1x2"), ("2x3", "1x3"), ("3x4", "1x2")),
    *(("2x4", "1x4"), ("2x4", "2x2"), ("4x3", "2x2"), ("3x3", "2x2"), ("4x4", "2x2")),
)
FEW_TILES = (("1x4", "1x2"), ("2x2", "1x2"), ("1x3", "1x2"), ("1x3", "1x1"))
MOMENTS = ("update", "await", "recovery", "catch up", "meet", "step", "save", "restore")
CALM_AFTER_KILLS_S = 12.0  # by then all that can go on without a repair has ended
LARGE = "32x32"
mesh_of = cache(parse_mesh)
LINK_TIMEOUT_S = 0.4
TIMING = Timing(
    settle_s=0.02,
    doubt_s=0.06,
    gather_s=1.0,
    recall_s=0.3,
    heartbeat_timeout_s=0.4,
    straggler_timeout_s=1.5,
    holder_timeout_s=1.5,
)


@dataclass(frozen=True)
class MomentKill:
    """Kills a chip at a moment of its loop, the first time that it has done so many steps."""

    chip: Chip
    step: int
    moment: str


@dataclass(frozen=True)
class Scenario:
    """What one seed plays: which mesh, how many steps, and how much goes wrong until when."""

    mesh: str
    board: tuple[int, ...]
    n_steps: int
    policy: str
    n_faults: int
    calm_at: float
    switch_fault_share: float
    is_split: bool = False
    tile: str = ""
    wrong: Chip | None = None  # a chip that computes wrong numbers
    wrong_rate: float = 0.0
    goes_back: bool = False
    kills: tuple[MomentKill, ...] = ()  # the only faults, and nobody is repaired before it is calm

    @classmethod
    def of_moments(cls, seed: int) -> "Scenario":
        """Return the scenario of a seed in which chips of tiles die at the worst moments."""
        random = Random(seed + 8_000_009)
        mesh, tile = random.choice(SHAPED)
        n_steps = random.randint(5, 9)
        first = random.randrange(n_steps)
        chips = random.sample(mesh_of(mesh).live, random.randint(1, 4))
        kills = (
            MomentKill(chip, min(n_steps, first + random.choice([0, 0, 0, 1])), moment)
            for chip in chips
            for moment in [random.choice(MOMENTS)]
        )
        return replace(
            cls.of(seed),
            mesh=mesh,
            tile=tile,
            board=(1, 1),
            n_steps=n_steps,
            policy="constant",
            n_faults=0,
            calm_at=CALM_AFTER_KILLS_S,
            switch_fault_share=0.0,
            kills=tuple(kills),
        )

    @classmethod
    def of_tiles(cls, seed: int) -> "Scenario":
        """Return the scenario of a seed in which a replica is a tile of several chips."""
        random = Random(seed + 4_000_037)
        mesh, tile = random.choice(TILED)
        return replace(
            cls.of_split(seed) if seed % 4 == 0 else cls.of(seed),
            mesh=mesh,
            tile=tile,
            board=random.choice([(1, 1), (1, 1), (1, 1), parse_tile(tile)]),
            n_steps=random.randint(8, 16),
            policy="constant",
        )

    @classmethod
    def of_few_tiles(cls, seed: int) -> "Scenario":
        """Return a short scenario with few chips: more happens in each step, and it costs less."""
        random = Random(seed + 7_000_003)
        mesh, tile = random.choice(FEW_TILES)
        return replace(
            cls.of_tiles(seed),
            mesh=mesh,
            tile=tile,
            board=random.choice([(1, 1), (1, 1), (1, 1), parse_tile(tile)]),
            n_steps=random.randint(2, 4),
            n_faults=random.randint(1, 3),
            calm_at=random.uniform(0.4, 0.8),
        )

    @classmethod
    def of_wrong(cls, seed: int) -> "Scenario":
        """Return the scenario of a seed in which a chip computes wrong numbers."""
        random = Random(seed + 5_000_011)
        mesh = random.choice(["1x3", "1x4", "2x2", "2x3", "3x3"])
        return replace(
            cls.of(seed),
            mesh=mesh,
            board=(1, 1),
            n_steps=random.randint(20, 50),
            n_faults=random.choice([0, 0, 1, 2, 4]),
            policy="constant",
            wrong=random.choice(mesh_of(mesh).live),
            wrong_rate=random.choice([0.02, 0.1, 0.3, 1.0]),
            goes_back=random.choice([True, False]),
        )

    @classmethod
    def of_split(cls, seed: int) -> "Scenario":
        """Return the scenario of a seed in which both sides of what breaks live on."""
        random = Random(seed + 2_000_003)
        scenario = cls.of(seed)
        return replace(
            scenario,
            board=random.choice([(1, 1), (1, 1), (1, 1), scenario.board]),
            n_steps=random.randint(30, 60),
            n_faults=random.randint(1, 4),
            calm_at=random.uniform(4.0, 6.0),
            switch_fault_share=random.choice([0.0, 0.0, 0.001]),
            is_split=True,
        )

    @classmethod
    def of_large(cls, seed: int) -> "Scenario":
        """Return the scenario of a seed on the paper's mesh, with boards of four by two chips."""
        random = Random(seed + 3_000_017)
        return replace(
            cls.of(seed),
            mesh=LARGE,
            board=random.choice([(1, 1), (4, 2)]),
            n_steps=random.randint(8, 14),
            n_faults=random.randint(4, 8),
            calm_at=random.uniform(2.0, 3.0),
            switch_fault_share=0.0,
        )

    @classmethod
    def of(cls, seed: int) -> "Scenario":
        """Return the scenario of a seed."""
        random = Random(seed + 1_000_003)
        mesh = random.choice(MESHES)
        return cls(
            mesh=mesh,
            board=random.choice([(1, 1), (1, 1), mesh_of(mesh).shape, (2, 1)]),
            n_steps=random.randint(10, 24),
            policy=random.choice(["constant", "shrink"]),
            n_faults=random.randint(1, 7),
            calm_at=random.uniform(2.0, 4.0),
            switch_fault_share=random.choice([0.0, 0.0, 0.003, 0.01]),
        )


class World:
    """A job, and the hands that break it. A fault that makes no sense now does nothing."""

    def __init__(
        self,
        events: EventLoop,
        scenario: Scenario,
        *,
        is_sharded: bool = False,
        swaps_plans: bool = False,
        watches_links: bool = False,
    ) -> None:
        self.events = events
        self._watches_links = watches_links
        self._swaps_plans = swaps_plans
        self.scenario = scenario
        self._is_sharded = is_sharded
        self.mesh = mesh_of(scenario.mesh)
        self.rules = Invariants(events)
        self.rules.on_restored = self._check_restored
        self.network = Network(events, LINK_TIMEOUT_S)
        self.disk = Disk()
        self.workers: dict[Chip, SimulatedWorker] = {}
        self.frozen_for_good: list[Process] = []
        self._n_ports = 0
        self._kills_left = list(scenario.kills)
        self.is_calm = False
        self.is_over = False
        self.undisturbed_since = 0.0
        self._spec = JobSpec("job", self.mesh, scenario.board, TIMING)
        self._n_coordinators = 0
        self._deaf: CoordinatorProcess | None = None
        self._replaced: list[CoordinatorProcess] = []  # they and their successors share no record
        self._record_disk = self.disk
        self.coordinator = self._new_coordinator()
        for chip in self.mesh.live:
            self.start_worker(chip)

    @property
    def links(self) -> list[Link]:
        """All links of the mesh."""
        live = self.mesh.live
        return [Link.between(live[one], live[other]) for one, other in self.mesh.links]

    def is_done(self) -> bool:
        """Whether the job has ended, well or not."""
        return self.is_over

    def _worker_ended(self, worker: SimulatedWorker) -> None:
        # A worker whose state is of a history that a full disk has lost cannot take part: it ends,
        # and a new one is started.
        if WRONG in worker.refusal:
            self.rules.check(worker.process.chip in self.rules.wrong, "the wrong chip is out")
        elif worker.refusal and (worker.is_wrong or self.rules.is_forgiving):
            self.events.after(0.1, lambda: self.start_worker(worker.process.chip))
        elif worker.refusal:
            raise ProtocolError(f"{worker.process.name} was refused: {worker.refusal}")
        self.is_over |= worker.is_over or bool(self.rules.failure)

    def start_worker(self, chip: Chip, *, batch: int = BATCH) -> None:
        """Start a worker where there is none; with another batch it is one that does not fit."""
        old = self.workers.get(chip)
        if old is not None and old.process.is_alive:
            return
        self._n_ports += 1
        self.events.tell("world", "starts worker %s", chip)
        self.workers[chip] = SimulatedWorker(
            self.events,
            self.network,
            self.disk,
            self.rules,
            whole=self.mesh,
            chip=chip,
            port=self._n_ports,
            n_steps=self.scenario.n_steps,
            policy=self.scenario.policy,
            batch=batch,
            on_switch=self._at_switch_point,
            on_end=self._worker_ended,
            board=self.scenario.board if self._is_sharded else None,
            swaps_plans=self._swaps_plans,
            watches_links=self._watches_links,
            tile=self.scenario.tile,
            wrong_rate=self._wrong_rate(chip),
            goes_back=self.scenario.goes_back,
            on_moment=self._at_moment if self.scenario.kills else None,
        )

    def _wrong_rate(self, chip: Chip) -> float | None:
        """Return how often a chip is wrong; None if nothing is checked."""
        scenario = self.scenario
        if scenario.wrong is None:
            return None
        return scenario.wrong_rate if chip == scenario.wrong else 0.0

    def kill_worker(self, chip: Chip, *, how: str = "kill", back_s: float | None = None) -> None:
        """End a worker: by a signal, with what it sent last, or with its host."""
        self.disturb(f"{how} of {chip}")
        worker = self.workers.get(chip)
        if worker is not None and worker.process.is_alive:
            self._kill(worker.process, how)
            self.events.after(0.0, worker.process.reap)
            if back_s is None:
                back_s = self.events.random.choice([0.05, 0.3, 1.0, 2.0])
            self.events.after(back_s, lambda: self.start_worker(chip))

    def kill_coordinator(self, *, how: str = "kill") -> None:
        """End the coordinator; another is started later."""
        self.disturb(f"{how} of the coordinator")
        if self.coordinator.is_alive and not self.coordinator.is_done:
            self._kill(self.coordinator, how)
            back_s = self.events.random.choice([0.02, 0.2, 1.0])
            self.events.after(back_s, self.start_coordinator)

    def start_coordinator(self) -> None:
        """Start a coordinator if there is none."""
        if not self.coordinator.is_alive and not self.is_over:
            self.events.tell("world", "starts the coordinator")
            self.coordinator = self._new_coordinator()

    def start_second_coordinator(self, *, has_record: bool) -> None:
        """Start another coordinator at the same address while the first one serves its workers.

        Nobody starts one for a job that has failed.
        """
        if self.is_over or self.coordinator.is_done or self.rules.failure:
            return
        self.disturb(f"a second coordinator, {'with' if has_record else 'without'} the record")
        if not has_record:
            self._record_disk = Disk()
            self.rules.allow_forks("two coordinators do not know of each other")
            self._replaced.append(self.coordinator)
        self.coordinator = self._new_coordinator()

    def lend_address(self, seconds: float) -> None:
        """Give a second coordinator the address of one that never gives way, and it back later.

        Its workers have heard of the later term by then, and must not go back.
        """
        if self.is_over or self.coordinator.is_done or not self.coordinator.is_alive or self._deaf:
            return
        self.disturb(f"a deaf coordinator, which gets its address back after {seconds:.2f} s")
        self.rules.allow_forks("a coordinator does not give way")
        self._deaf = self.coordinator
        self._deaf.never_give_way()
        self.coordinator = self._new_coordinator()
        self._break_connections(self._deaf)
        self.events.after(seconds, self._give_address_back)

    def _give_address_back(self) -> None:
        if self._deaf is not None:
            self.events.tell("world", "gives the address back to the deaf coordinator")
            self._deaf.listen()
            self._break_connections(self.coordinator)
            self.events.after(1.0, self._end_deaf_coordinator)

    def _end_deaf_coordinator(self) -> None:
        if self._deaf is not None:
            self._kill(self._deaf, "kill")
            self._deaf = None
            self.coordinator.listen()

    def _end_replaced_coordinators(self) -> None:
        """End those that another one has replaced, if neither may have whole tiles.

        Each keeps the workers that it has, and nobody but an operator knows of both.
        """
        for coordinator in self._replaced if self.scenario.tile else ():
            if coordinator.is_alive and not coordinator.is_done:
                self.events.tell("world", "ends a coordinator that was replaced")
                self._kill(coordinator, "kill")

    def _break_connections(self, process: Process) -> None:
        for end in self.network.ends_of(process):
            end.reset()

    def spoil_record(self, how: str) -> None:
        """Make of the coordinator's record what a bad disk does."""
        self.disturb(f"a {how} record")
        self._record_disk.spoil_record(how, self.events.random)

    def freeze(self, process: Process, seconds: float) -> None:
        """Stop a process for a while; its kernel answers, it does not."""
        self.disturb(f"freeze of {process.name} for {seconds:.2f} s")
        process.freeze(seconds)

    def stick(self, chip: Chip, seconds: float) -> None:
        """Stop only the main thread of a worker for a while."""
        self.disturb(f"stuck loop of {chip} for {seconds:.2f} s")
        if chip in self.workers:
            self.workers[chip].process.stuck_until = self.events.now + seconds

    def block(self, source: int, target: int, seconds: float) -> None:
        """Drop all that one host sends to another for a while."""
        self.disturb(f"drop from host {source} to {target} for {seconds:.2f} s")
        until = self.events.now + seconds
        self.undisturbed_since = max(self.undisturbed_since, until)
        self.network.block([(source, target)], until)

    def partition(self, hosts: set[int], seconds: float) -> None:
        """Cut some hosts off from the others for a while."""
        self.disturb(f"partition of {sorted(hosts)} for {seconds:.2f} s")
        every = set(range(1 + self.mesh.n_live))
        self._block_both_ways(hosts, every - hosts, seconds)

    def strand(self, hosts: set[int], seconds: float) -> None:
        """Cut some hosts off from the coordinator only; they still reach each other."""
        self.disturb(f"no coordinator for {sorted(hosts)} for {seconds:.2f} s")
        self._block_both_ways(hosts, {COORDINATOR_HOST}, seconds)

    def _block_both_ways(self, some: set[int], others: set[int], seconds: float) -> None:
        until = self.events.now + seconds
        self.undisturbed_since = max(self.undisturbed_since, until)
        pairs = product(sorted(some), sorted(others))
        self.network.block((path for pair in pairs for path in (pair, pair[::-1])), until)

    def reset_connections(self, process: Process) -> None:
        """Break a random connection of a process."""
        if ends := self.network.ends_of(process):
            self.disturb(f"reset of a connection of {process.name}")
            self.events.random.choice(ends).reset()

    def cut(self, link: Link) -> None:
        """Have a link cut, as the launcher does."""
        self.disturb(f"cut of {link}")
        self.coordinator.hear_observer(CutLink(link))

    def disturb(self, what: str) -> None:
        """Write down that something went wrong."""
        self.undisturbed_since = max(self.undisturbed_since, self.events.now)
        self.events.tell("fault", what)

    def calm(self) -> None:
        """Let nothing more go wrong, and repair all that can be."""
        if not self.is_over:
            self._check_held("stands still")
        self.disturb("no more: everything is repaired")
        self.undisturbed_since = self.events.now
        self.is_calm = True
        self.network.unblock_all()
        self.network.slow_until = 0.0
        self.disk.is_full = self.disk.is_slow = False
        self._end_deaf_coordinator()
        self._end_replaced_coordinators()
        self.coordinator.thaw()
        for worker in self.workers.values():
            worker.process.stuck_until = self.events.now
            if worker.process not in self.frozen_for_good:
                worker.process.thaw()
        self.start_coordinator()
        for chip in self.mesh.live:
            self.start_worker(chip)
        for link in self.links:
            self.coordinator.hear_observer(MendLink(link))

    def _check_held(self, what: str) -> None:
        """Raise ProtocolError if whole tiles of live chips hold the state that counts."""
        if self.rules.is_in_doubt or not self.scenario.kills:
            return
        if holders := self.whole_tiles_with(self.rules.settled[-1]):
            raise ProtocolError(f"the job {what} although {holders} hold the state")

    def _check_restored(self) -> None:
        self._check_held("has waited")
        self.check_lost()

    def check_lost(self) -> None:
        """Raise ProtocolError if a state was lost with the one chip that has died so far."""
        if not self.scenario.kills:
            return
        n_killed = len(self.scenario.kills) - len(self._kills_left)
        n_tiles = box_tiling(self.mesh, parse_tile(self.scenario.tile)).n_tiles
        if n_killed == 1 and n_tiles > 1:
            raise ProtocolError("a state was lost with a single chip")

    def whole_tiles_with(self, state: State) -> list[Chip]:
        """Return live chips in connected tiles that hold all parts of a state; [] if none do."""
        tile = parse_tile(self.scenario.tile)
        live = {chip for chip, worker in self.workers.items() if worker.process.is_alive}
        holders = {
            chip
            for chip in live
            for worker in [self.workers[chip]]
            if worker.loop.state_version != FRESH
            if state in (worker.replica.state, worker.replica.also)
        }
        mesh = replace(self.mesh, failed=frozenset(self.mesh.live) - live)
        boxes = list(upright_boxes(mesh, tile)) if live else []
        for n_boxes in range(1, len(boxes) + 1):
            for chosen in combinations(boxes, n_boxes):
                chips = set().union(*chosen)
                if len(chips) < n_boxes * math.prod(tile):
                    continue
                if len({box_colour(tile, chip) for chip in chips & holders}) < math.prod(tile):
                    continue
                rest = replace(mesh, failed=frozenset(self.mesh.live) - chips)
                if len(list(components(rest))) == 1:
                    return sorted(chips & holders)
        return []

    def close(self) -> None:
        """End everything that still waits."""
        for worker in self.workers.values():
            worker.process.is_alive = False
            worker.process.reap()

    def _new_coordinator(self) -> CoordinatorProcess:
        self._n_coordinators += 1
        return CoordinatorProcess(
            self.events,
            self.network,
            self._record_disk,
            self._spec,
            self.rules,
            number=self._n_coordinators,
            on_superseded=lambda: self.events.after(0.2, self.start_coordinator),
        )

    def _kill(self, process: Process, how: str) -> None:
        process.is_alive = False
        for end in self.network.ends_of(process):
            if how == "kill":
                end.close()
            elif how == "reset":
                end.reset()
                end.is_open = False
            else:
                end.vanish()

    def _at_moment(self, process: WorkerProcess, moment: str, step: int) -> None:
        """End a worker if it is to die at this moment, for as long as nothing is repaired."""
        due = [
            kill
            for kill in self._kills_left
            if (kill.chip, kill.moment) == (process.chip, moment) and step >= kill.step
        ]
        if due and not self.is_calm:
            self._kills_left.remove(due[0])
            self.disturb(f"kill of {process.chip} in {moment} at {step}")
            self._kill(process, self.events.random.choice(["kill", "kill", "reset"]))
            self.events.after(0.0, process.reap)
            process.block()

    def _at_switch_point(self, process: WorkerProcess) -> None:
        """Let something happen exactly where a worker waits."""
        random = self.events.random
        if self.is_calm or random.random() >= self.scenario.switch_fault_share:
            return
        match random.choice(["kill", "coordinator", "freeze", "reset"]):
            case "kill":
                self.kill_worker(process.chip, how=random.choice(["kill", "reset", "power loss"]))
            case "coordinator":
                self.kill_coordinator()
            case "freeze":
                self.freeze(process, random.uniform(0.1, 1.2))
            case "reset":
                self.reset_connections(process)

"""A worker that trains: the loop of `train.job` over a replica that is no more than a digest."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING

from meshmend.errors import (
    CheckpointDamageError,
    InputError,
    JobFailedError,
    RefusedError,
    WrongResultError,
)
from meshmend.membership.client import WorkerIdentity
from meshmend.membership.events import WorkerStepped
from meshmend.membership.faults.fault import Moment
from meshmend.membership.faults.fault_injector import SelfInjection
from meshmend.membership.generation import Generation
from meshmend.membership.job import JobFingerprint
from meshmend.membership.messages import Go
from meshmend.planning.plan_request import SumSizes
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_tile
from meshmend.topology.tiles import box_colour, box_tiling
from meshmend.train.core.share_checks import Finding
from meshmend.train.core.worker_environment import WorkerEnvironment
from meshmend.train.core.worker_loop import WorkerLoop
from meshmend.train.data.samples import batch_of, share_of
from simulation.coordination import SimulatedCoordination
from simulation.disk import Disk, State
from simulation.event_loop import EventLoop
from simulation.invariants import Contribution, Invariants, digest_after
from simulation.link_speeds import SimulatedLinkSpeeds
from simulation.network import Network
from simulation.peers import SimulatedPeers
from simulation.share_checks import SimulatedChecks
from simulation.worker_process import WorkerProcess

if TYPE_CHECKING:
    from meshmend.train.sharding.sharded_update import ShardedUpdate
    from simulation.shards import SimulatedShards

BATCH = 12
SAVE_EVERY = 4
_SIZES: SumSizes = ((1, "float32"),)

_tiling_of = cache(box_tiling)  # all chips of a generation ask in each of its steps


class SimulatedReplica:
    """The state of a worker, as far as `WorkerLoop` asks for it."""

    is_overwritten = False

    def __init__(self, disk: Disk, n_steps: int) -> None:
        self._disk = disk
        self._n_steps = n_steps
        self._unreadable: set[int] = set()
        self.state = State(0, 0, 0)
        self.right_until: int | None = None  # set while the state may hold wrong numbers
        self.also: State | None = None  # with tiles: of a step that others may not have done
        self.shards: SimulatedShards | None = None  # of a sharded optimizer
        self.on_replaced: Callable[[State, State], None] = lambda before, after: None

    @property
    def step_number(self) -> int:
        """How many steps are done."""
        return self.state.step

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done."""
        return self.state.step >= self._n_steps

    def sum_sizes(self) -> SumSizes:
        """Return what one step sums."""
        return _SIZES

    def take_state(self, state: State) -> None:
        """Be where another worker is."""
        self.on_replaced(self.state, state)
        self.state, self.also = state, None

    def settle(self, step: int) -> bool:
        """Keep one of the states that this worker holds; return whether it is of this step."""
        if self.also is not None and self.also.step == step:
            self.state = self.also
        self.also = None
        return self.state.step == step

    def inject(self, moment: Moment) -> None:
        """Inject nothing: faults come at any time."""

    def newest_checkpoint(self) -> int | None:
        """Return the step of the newest whole checkpoint that this worker can read."""
        steps = self._disk.complete_steps()
        if self.right_until is not None:
            steps = [step for step in steps if step <= self.right_until]
        return max((step for step in steps if step not in self._unreadable), default=None)

    def went_back(self, step: int, generation: int) -> None:
        """Write nothing down: the invariants hear of it from the coordinator."""

    def restore(self, step: int) -> None:
        """Be where the checkpoint of a step is."""
        state = self._disk.load(step)
        if state is None:
            self._unreadable.add(step)
            raise CheckpointDamageError(f"the checkpoint of step {step} cannot be read")
        self.on_replaced(self.state, state)
        self.state, self.also = state, None
        if self.right_until is not None:
            self._disk.set_aside(step)
        if self.shards is not None:
            self.shards.adopt(state.digest)


class Moments(SelfInjection):
    """Calls `is_at(moment, step)` at the moments in which a worker may kill itself."""

    def __init__(self, is_at: Callable[[str, int], None]) -> None:
        self._is_at = is_at

    def at(self, moment: Moment, step: int, *, bucket: int | None = None) -> None:
        self._is_at(moment, step)


class SimulatedWorker:
    """One worker process and all that is in it; `on_end` is called when it has ended."""

    def __init__(
        self,
        events: EventLoop,
        network: Network,
        disk: Disk,
        rules: Invariants,
        *,
        whole: Mesh,
        chip: Chip,
        port: int,
        n_steps: int,
        policy: str,
        batch: int,
        on_switch: Callable[[WorkerProcess], None],
        on_end: Callable[["SimulatedWorker"], None],
        board: tuple[int, ...] | None = None,
        swaps_plans: bool = False,
        watches_links: bool = False,
        tile: str = "",
        wrong_rate: float | None = None,
        goes_back: bool = False,
        on_moment: Callable[[WorkerProcess, str, int], None] | None = None,
    ) -> None:
        host = 1 + whole.live.index(chip)
        self.process = WorkerProcess(events, host, chip, port, on_switch=on_switch)
        self._events, self._disk, self._rules = events, disk, rules
        self._on_moment = on_moment
        self._met = 0  # the generation whose members have met
        self._n_whole, self._policy, self._batch = len(whole.live), policy, batch
        identity = WorkerIdentity("job", whole.shape, chip, host - 1, ("host-0", 1), b"")
        self.replica = SimulatedReplica(disk, n_steps)
        self.replica.on_replaced = partial(rules.replaced, chip)
        self.peers = SimulatedPeers(self.process, network, whole, port, swaps_plans=swaps_plans)
        self.coordination = SimulatedCoordination(
            self.process, network, identity, _fingerprint(n_steps, batch, policy, tile)
        )
        self.links: SimulatedLinkSpeeds | None = None
        if watches_links:
            self.links = SimulatedLinkSpeeds(self.peers, whole, chip, events)
        self._whole, self.tile = whole, parse_tile(tile) if tile else None
        self._sharding = self._new_sharding(whole, board) if board else None
        self.loop = WorkerLoop(
            chip,
            self.replica,
            self.coordination,
            self.peers,
            Moments(self._is_at),
            catch_up=self._sharding.catch_up if self._sharding else self.catch_up,
            has_part=bool(tile),
        )
        self.checks: SimulatedChecks | None = None
        if wrong_rate is not None:
            self.checks = SimulatedChecks(self.peers, rules, chip, events.random, wrong_rate)
        self._goes_back = goes_back
        self._reported = 0
        self._on_end = on_end
        self.is_wrong = batch != BATCH
        self.is_over = False
        self.refusal = ""
        self.process.start(self._main)

    def _is_at(self, moment: str, step: int | None = None) -> None:
        """Let something happen exactly now."""
        if self._on_moment is not None:
            done = self.replica.step_number if step is None else step
            self._on_moment(self.process, moment, done)

    def _new_sharding(self, whole: Mesh, board: tuple[int, ...]) -> "ShardedUpdate":
        from simulation.shards import SimulatedShards, sharded_update  # they need torch

        self.replica.shards = SimulatedShards(self._rules.check)
        environment = WorkerEnvironment(whole=whole, chip=self.process.chip, board=board)
        return sharded_update(
            self.replica.shards, self.replica, self.peers, self.exchange_state, environment
        )

    def catch_up(self, go: Go, generation: Generation) -> None:
        """Get the state that a generation begins with, or send it to those that lack it."""
        self._is_at("catch up")
        if (state := self.exchange_state(go, generation)) is not None:
            self.replica.take_state(state)

    def exchange_state(self, go: Go, generation: Generation) -> State | None:
        """Send or receive the state; return the one to take, None if this worker has it."""
        if self.tile is not None:
            return self._exchange_part(go, generation, self.tile)
        if len(go.holders) == len(generation.seats):
            return None
        is_holder = self.process.chip in go.holders
        found: State = self.peers.spread(self.replica.state if is_holder else None, go.holders)
        return None if is_holder else found

    def _exchange_part(self, go: Go, generation: Generation, tile: tuple[int, ...]) -> State | None:
        """Do the same with the state of each colour that some chip lacks; all forward."""
        chip, replica = self.process.chip, self.replica
        is_holder, taken = chip in go.holders, None
        if is_holder:
            self._rules.check(replica.settle(go.step), f"{chip} is to send what it does not hold")
            self.loop.also = None
        for colour in sorted({box_colour(tile, each) for each in generation.chips}):
            of_it = [each for each in generation.chips if box_colour(tile, each) == colour]
            holders = [each for each in of_it if each in go.holders]
            self._rules.check(bool(holders), f"nobody holds colour {colour} in {generation.number}")
            if len(holders) < len(of_it):
                mine = replica.state if chip in holders else None
                found: State = self.peers.spread(mine, holders)
                taken = found if chip in of_it and not is_holder else taken
        return taken

    def _main(self) -> None:
        try:
            self.loop.start()
            while not self.loop.is_over:
                if self.replica.is_finished:
                    self.loop.finish()
                else:
                    self._attempt()
            self.is_over = True
        except RefusedError as error:
            self.refusal = str(error)
        except JobFailedError:
            pass
        except WrongResultError as error:
            self._rules.check(self.peers.n_members == 2, f"a third chip could decide: {error}")
            self._rules.is_undecided = self.is_over = True
        self._events.tell(self.process.name, "ends %s", self.refusal)
        self.coordination.close()
        self.peers.close()
        self.process.is_alive = False
        self._on_end(self)

    def _attempt(self) -> None:
        """Take part in a step, or come to terms with the others."""
        process, number, before = self.process, self.loop.number, self.replica.state
        if self.peers.is_provisional and not self.loop.attempt(
            self.peers.swap_plans, is_step=False
        ):
            self.loop.recover(after=number)
            return
        if self.links is not None and self.links.is_due():
            look = partial(self.links.look, before.links)
            if not self.loop.attempt(look, is_step=False):
                self.loop.recover(after=number)
                return
        if self._on_moment is not None and self._met != number:
            # An elastic group makes its process group and its objects now.
            self._is_at("meet")
            if not self.loop.attempt(self.await_all, is_step=False):
                self.loop.recover(after=number)
                return
            self._met = number
        rank, n_members = self.peers.rank, self.peers.n_members
        if self.tile is not None:
            self._attempt_in_tile(self.tile, number, before)
            return
        batch = batch_of(self._policy, self._batch, n_members, self._n_whole)
        share = share_of(before.position, batch, rank, n_members)
        self._rules.attempts(process.chip, number, before)
        process.sleep(0.03 + 0.05 * self._events.random.random())
        parts: list[Contribution] = [(share.start, share.stop, share.batch, before.digest)]
        findings: list[Finding] = []
        if self.checks is not None:
            self.checks.begin(before.step)

        def sum_and_compare() -> None:
            self._sum(parts, before, number)
            if self.checks is not None and (found := self.checks.compare(before.step)):
                findings.append(found)

        if not self.loop.attempt(sum_and_compare):
            self.loop.recover(after=number)
            return
        if findings:
            self._act_on(findings[0], number)
            return
        self.replica.right_until = None
        if self.replica.shards is not None:
            self.replica.shards.step()
        after = self._rules.finishes(process.chip, number, before, parts)
        links = self.links.found(before.links) if self.links is not None else ""
        self.replica.state = replace(after, links=links)
        self._events.tell(
            process.name, "finished step %d in generation %d", before.step + 1, number
        )
        self.loop.note_step()
        if rank == 0 or self._reported != number:
            self._report(number, batch, leads=rank == 0)
        if self.replica.state.step % SAVE_EVERY == 0:
            self._save(rank, n_members)

    def _act_on(self, finding: Finding, number: int) -> None:
        """Do what `JobCore` does when shares differ."""
        assert self.checks is not None
        if not finding.wrong:
            return
        if self._goes_back:
            self.replica.right_until = self.checks.checks.right_until
        chips = [self.peers.generation.chips[rank] for rank in finding.wrong]
        self.loop.accuse(chips, right_until=self.replica.right_until)
        self.loop.recover(after=number)

    def _attempt_in_tile(self, tile: tuple[int, ...], number: int, before: State) -> None:
        """Take part in a step that counts once all chips have done it: each has a part of it."""
        chip, generation = self.process.chip, self.peers.generation
        tiling = _tiling_of(generation.mesh_of(self._whole), tile)
        self._rules.check(not tiling.spares, f"generation {number} has chips in no tile")
        at = next(at for at, chips in enumerate(tiling.tiles) if chip in chips)
        batch = self._batch
        share = share_of(before.position, batch, at, tiling.n_tiles)
        self._rules.attempts(chip, number, before)
        self._is_at("step")
        self.process.sleep(0.03 + 0.05 * self._events.random.random())
        colour = box_colour(tile, chip)
        sums: list[tuple[int, Contribution]] = [
            (colour, (share.start, share.stop, share.batch, before.digest))
        ]

        def step() -> None:
            self.peers.sum(sums, 1, "float32")
            by_colour = [[part for of, part in sums if of == each] for each, _ in sums]
            self._is_at("update")
            self._rules.check(all(each == by_colour[0] for each in by_colour), "colours differ")
            self.replica.also = self._rules.tries(chip, number, before, by_colour[0])
            self.loop.also = before.step + 1
            self._events.tell(self.process.name, "tries step %d", before.step + 1)
            self._is_at("await")
            self.await_all()

        if not self.loop.attempt(step):
            self.loop.recover(after=number)
            return
        parts = [part for of, part in sums if of == colour]
        self.replica.state = self._rules.finishes(chip, number, before, parts)
        self.replica.also = self.loop.also = None
        self._events.tell(
            self.process.name, "finished step %d in generation %d", before.step + 1, number
        )
        self.loop.note_step()
        if self.peers.rank == 0 or self._reported != number:
            self._report(number, batch, leads=self.peers.rank == 0)
        if self.replica.state.step % SAVE_EVERY == 0:
            self._save(self.peers.rank, self.peers.n_members)

    def await_all(self) -> None:
        """Return when all chips have done what this one has done."""
        self.peers.sum([(0, (self.peers.rank,))], 1, "float32")

    def _sum(self, parts: list[Contribution], before: State, number: int) -> None:
        """Sum what all put into a step; with a sharded optimizer, gather the new weights."""
        shards = self.replica.shards
        if shards is not None:
            shards.check_kept(before.digest)
        self.peers.sum(parts, 1, "float32")
        if shards is not None and self._sharding is not None:
            shards.begin(before.digest, digest_after(before, number, parts))
            self._sharding.gather()

    def _report(self, number: int, batch: int, *, leads: bool) -> None:
        is_first, self._reported = self._reported != number, number
        stepped = WorkerStepped(
            chip=self.process.chip,
            step=self.replica.state.step,
            generation=number,
            at=self._events.now,
            leads=leads,
            first=is_first,
            loss=None,
            samples=batch,
        )
        self.coordination.report(stepped)

    def _save(self, rank: int, n_members: int) -> None:
        """Write this worker's part of a checkpoint; training goes on if that fails."""
        self._is_at("save")
        if self._disk.is_slow:
            self.process.sleep(0.3)
        try:
            self._disk.save(self.replica.state, shard=rank, n_shards=n_members)
        except InputError:
            self._events.tell(self.process.name, "cannot save step %d", self.replica.state.step)


def _fingerprint(n_steps: int, batch: int, policy: str, tile: str) -> JobFingerprint:
    return JobFingerprint(
        version="1",
        steps=n_steps,
        batch=batch,
        seed=0,
        policy=policy,
        model="digest",
        optimizer="none",
        dataset_length=1000,
        samples="1",
        tile=tile,
    )

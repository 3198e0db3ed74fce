"""A process group that outlives its chips, for scripts that keep their own DDP loop.

    dist.init_process_group("meshmend")
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    meshmend.torch.reconfigure(model, optimizer)
    for step in meshmend.torch.steps(1000):
        with meshmend.torch.retrying():
            ...  # forward, backward, optimizer.step()

Each chip begins with a group of its own. `reconfigure` joins the job: the default process group is
then that of all live chips, and a chip that comes late has the state of the others. When a chip
dies or comes back, every collective under way fails, and `retrying` calls `reconfigure` again.

`ElasticGroup` is one chip's part in it: its generations, and which steps count. `WorkerLoop` knows
the protocol, `PresentGroup` how a group is made, `GroupState` the objects of a script,
`StepInFlight` how a step is undone, `JobRecord` what is written down. That is all of a plain DDP
loop. `BuiltObjects` is for objects that are made anew with each group, `TileReplica` for replicas
of several chips.
"""

import functools
import gc
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, ParamSpec, TypeVar

from msgspec.structs import replace

from meshmend import __version__
from meshmend.config import CHECK_SHARES, SHARES
from meshmend.errors import InputError, PeerLostError, TransportError
from meshmend.membership.events import WorkerStepped
from meshmend.membership.faults.fault_injector import SelfInjection
from meshmend.membership.generation import Generation
from meshmend.membership.job import NOT_COMPARED, JobFingerprint
from meshmend.membership.messages import FRESH, Go
from meshmend.planning.plan_request import SumSizes
from meshmend.topology.failures import format_shape
from meshmend.train.core.exchange import Exchange
from meshmend.train.core.link_watch import LinkWatch
from meshmend.train.core.state_transfer import StateTransfer
from meshmend.train.core.worker_environment import (
    WorkerEnvironment,
    coordinator_client,
    exchange_of,
    worker_environment,
)
from meshmend.train.core.worker_loop import WorkerLoop
from meshmend.train.data.random_numbers import RandomNumbers
from meshmend.train.data.samples import Indices, Share
from meshmend.train.state.torch_state import TORCH
from meshmend.train.torch.built_objects import Build, BuiltObjects
from meshmend.train.torch.group_meeting import MEETING_SUM, PresentGroup, groups_of_ours
from meshmend.train.torch.group_state import GroupState
from meshmend.train.torch.job_record import JobRecord
from meshmend.train.torch.loop_state import Stateful
from meshmend.train.torch.step_in_flight import StepInFlight
from meshmend.train.torch.tile_replica import LOSS_SUM, TileReplica, sums_between_tiles

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_log = logging.getLogger(__name__)

_NEEDS_TILE: Final = (
    "reconfigure(shard_optimizer=True) needs tile=, whose twins share the optimizer's state, but "
    "did not get it; without tiles use meshmend.train.Job"
)
_NEEDS_ALL: Final = (
    "reconfigure needs all objects in its first call, which is the one that gets a chip that joins "
    "the state of the others, but got other ones in a later call; pass them all at once, as in "
    "reconfigure(model, optimizer, scheduler)"
)
_NEWS_S: Final = 3.0  # beyond the link timeout: for the coordinator to tell of a change


def reconfigure(
    *state: Stateful,
    build: Build | None = None,
    tile: str | None = None,
    shard_optimizer: bool = False,
) -> None:
    """Make the default process group one of all live chips, and the state the same on all.

    The first call joins the job. `state` is what changes from step to step: the model, the
    optimizer, a scheduler. A `DistributedDataParallel` among it uses the new group from then on.
    What PyTorch cannot move to another group, such as a model of `fully_shard`, is made anew:
    `build()` makes the group's objects and returns those with a state.

    With `tile`, such as "2x2", a replica is a tile of several chips, and each holds a part of the
    state: `build` shards its model over `meshmend.torch.tiles(tile)`. Chips that are in no tile
    wait. A chip that comes into a tile gets its part from a chip that has the same one. With
    `shard_optimizer`, chips with the same part share the states of its optimizers, each kept twice.

    A later call needs no arguments. It returns at once if the group is as it should be, and waits
    for the coordinator's next generation if it is not.

    Raises:
        InputError: an object has no state, or no chip holds all of it.
        JobFailedError: no chip has a state to go on from.
        RefusedError: the coordinator refuses this worker.
    """
    group = elastic_group()
    if state and build is not None:
        raise InputError(
            "reconfigure needs objects or build=, but got both; let build return the objects"
        )
    if build is not None:
        group.use_built(build, tile, shard_optimizer=shard_optimizer)
    elif state or not group.makes_objects:
        _check_without_build(tile, shard_optimizer=shard_optimizer)
    if state:
        group.use(state)
    group.enter()


def steps(n_steps: int) -> Iterator[int]:
    """Yield the number of the step to do, from the steps done so far up to `n_steps`.

    A step whose `retrying` block failed is yielded again. The end waits until all chips are done.

    Raises:
        InputError: `reconfigure` was not called before.
    """
    return elastic_group().steps(n_steps)


@contextmanager
def retrying() -> Iterator[tuple[Stateful, ...]]:
    """Do one step; if the mesh changes meanwhile, reconfigure, and the step is to be done again.

    Yields the objects of `reconfigure`. The step counts once the optimizer has stepped.
    """
    group = elastic_group()
    group.is_in_block = True
    group.begin_step()
    try:
        yield group.objects
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        group.handle_failure(error)
    else:
        group.complete_step()
    group.is_in_block = False


def elastic_step(
    function: Callable[Arguments, Result],
) -> Callable[Arguments, Result | None]:
    """Return the function as one step that is called again until the step counts.

    It returns None if another chip did the step and this one took over its state.
    """

    @functools.wraps(function)
    def step(*arguments: Arguments.args, **named: Arguments.kwargs) -> Result | None:
        group = elastic_group()
        done, result = group.step_number, None
        while group.is_to_do(done):
            with retrying():
                result = function(*arguments, **named)
        return result

    return step


@functools.cache
def elastic_group() -> "ElasticGroup":
    """Return the elastic group of this process."""
    return ElasticGroup(worker_environment())


@dataclass(frozen=True)
class _JoinedJob:
    """What a chip has of the job that it has joined."""

    loop: WorkerLoop
    exchange: Exchange
    transfer: StateTransfer
    watch: LinkWatch


class ElasticGroup:
    """One chip's part in an elastic process group; call its methods from the main thread only.

    Outside an elastic job it leaves the process group alone, and steps only count.
    """

    def __init__(self, environment: WorkerEnvironment) -> None:
        _check_environment(environment)
        self._environment = environment
        self._joined: _JoinedJob | None = None  # None outside a job, and before the first group
        self._present = PresentGroup()
        self._record = JobRecord(environment)
        self._n_steps: int | None = None
        self._has_ended = False  # a loop over all steps
        self.is_in_block = False  # of a step; who raises an error there says enough
        self._reported = 0  # the last generation in which this chip reported a step
        self._planned: tuple[int, int] | None = None  # before which step of which generation

        # The state of the job, as far as this chip has it.
        self.step_number = 0  # steps done
        self._random = RandomNumbers()
        self._links = ""  # speeds of links that were found, as of the last step
        self._has_joined_late = False  # with the state of chips that have done steps
        self._is_equal = False  # whether the chips have agreed on their first state
        self.is_overwritten = False  # the state is a part of this chip's and a part of others'

        self._injection = SelfInjection(environment.chip, environment.faults)
        self._step = StepInFlight(self._injection, self._random)

        # None of them is there in a plain loop over objects that stay.
        self._asked: tuple[Build, str | None, bool] | None = None  # of `reconfigure`
        self._built: BuiltObjects | None = None  # if the script makes its objects for each group
        self._tile: TileReplica | None = None  # if a replica is several chips

    @property
    def _loop(self) -> WorkerLoop | None:
        return self._joined.loop if self._joined else None

    @property
    def _is_fresh(self) -> bool:
        """Whether this chip has never been up to date in its job."""
        return self._loop is not None and self._loop.state_version == FRESH

    @property
    def objects(self) -> tuple[Stateful, ...]:
        """The objects whose state is that of the group."""
        return self._step.state.objects

    @property
    def makes_objects(self) -> bool:
        """Whether the objects are made anew for each group."""
        return self._built is not None

    @property
    def is_over(self) -> bool:
        """Whether the job is over."""
        return self._loop is not None and self._loop.is_over

    def use(self, objects: Sequence[Stateful]) -> None:
        """Make these the objects of the group; they stay when the group changes.

        Raises:
            InputError: this chip has joined with others.
        """
        if self._joined is not None:
            if [*map(id, objects)] != [*map(id, self.objects)] or self._built is not None:
                raise InputError(_NEEDS_ALL)
            return
        self._built = None
        self._step.watch(GroupState(objects))

    def use_built(
        self,
        build: Build,
        tile: str | None = None,
        *,
        shard_optimizer: bool = False,
        record: JobRecord | None = None,
    ) -> None:
        """Make the objects of the group with `build`, each time that the group changes.

        `record` is that of a job that hands out samples, and may begin with a checkpoint.

        Raises:
            InputError, TopologyError: there can be no such tiles, or this chip has joined with
                others.
            ResumeError: the checkpoint cannot be read, or is of another job.
        """
        if shard_optimizer and tile is None:
            raise InputError(_NEEDS_TILE)
        asked = build, tile, shard_optimizer
        if self._joined is not None:
            if asked != self._asked:
                raise InputError(_NEEDS_ALL)
            return
        self._asked = asked
        if tile is not None:
            self._tile = TileReplica(tile, self._environment, shares_optimizers=shard_optimizer)
        self._record = record or self._record
        whole = self._record.resumed()
        if whole is not None:
            self.step_number = self._record.saved_step
        self._built = BuiltObjects(build, self._tile, whole)
        self._step.watch(GroupState(()))

    def use_samples(self, share: Share, samples: Indices) -> None:
        """Write down this chip's share of the samples of a step that has begun."""
        number = self._loop.number if self._loop is not None else 0
        self._record.ledger.write_try(self.step_number + 1, number, share, samples)

    def enter(self) -> None:
        """Join the job, or the next generation if there is one."""
        if self._environment.identity is None:
            self._tie()
            if self._tile is not None:
                self._tile.keep_shares()
        elif self._loop is None:
            self._random.see("join")
            self._regroup(self._join().start)
            if self._has_joined_late:
                self._step.keep_joined()
        else:
            has_only_joined = not self._step.is_kept
            was_undone = self._step.forget_rest()  # others may take this state
            self.keep_up()
            if was_undone and not self.is_over:
                keep = self._step.keep_joined if has_only_joined else self._step.fail
                keep()

    def steps(self, n_steps: int) -> Iterator[int]:
        """Yield the number of the next step until all chips have done `n_steps`."""
        if self._environment.identity is not None and self._loop is None:
            raise InputError("steps needs the process group of a job; call reconfigure before")
        if self._has_ended:
            raise InputError(
                "the job has ended with its first loop over steps; give that loop all steps"
            )
        self._n_steps, process = n_steps, os.getpid()
        while not self.is_over:
            was_undone = self._step.forget_rest()
            self.keep_up()
            if self._tile is not None and self._loop is not None and not self.is_over:
                self._save(self._tile, self._loop)
            if self.step_number < n_steps:
                if not self._take_better_plans():
                    continue
                if not (was_undone and self._step.is_kept):  # else all is as it was kept
                    self._step.keep()
                self._step.is_due = True
                try:
                    yield self.step_number
                except GeneratorExit:
                    if os.getpid() == process:  # a child that the loop has forked ends, not it
                        self._tell_of_early_end(n_steps)
                    raise
                if self._step.is_due:
                    raise InputError(
                        "steps needs a block for each step, or the same step comes for ever; put "
                        "it into 'with meshmend.torch.retrying():'"
                    )
            elif self._loop is None:
                break
            elif not self.is_over:
                self._record.writer.wait()
                self._present.is_for_the_rest = True
                self._regroup(self._loop.finish)
                self._present.is_for_the_rest = False
        self._has_ended = self._loop is not None
        self._close()

    def _tell_of_early_end(self, n_steps: int) -> None:
        """Tell that the loop over steps was left before its end.

        An exception cannot be raised here: Python drops those of a loop that is given up.
        """
        if self._joined is None or self.is_over or self.is_in_block:
            return
        chip = self._environment.chip
        sys.stderr.write(  # on a line of its own, whatever the loop has begun to print
            f"\nmeshmend: chip {chip} has left its loop after step {self.step_number} of "
            f"{n_steps}, by a break or an exception; the chips that stay train on without it. To "
            "end a job early, let all chips do nothing in the steps that are left\n"
        )

    def keep_up(self) -> None:
        """Enter the next generation if there is one, or if the group is broken."""
        if self._loop is None or self.is_over:
            return
        if self._is_outdated() or self._present.is_broken or not self._loop.keep_lease():
            self._fail_over()

    def is_to_do(self, step: int) -> bool:
        """Whether this step is the next one, in the newest generation."""
        self._step.forget_rest()
        self.keep_up()
        if self.step_number == step and not self.is_over:
            self._take_better_plans()
        self._step.is_due = self.step_number == step and not self.is_over
        return self._step.is_due

    def _take_better_plans(self) -> bool:
        """Look at links and swap plans, once before a step; return False if the mesh changed."""
        if self._joined is None or self._tile is not None:
            return True
        before, self._planned = self._planned, (self._joined.loop.number, self.step_number)
        if self._planned == before:
            return True
        if self._joined.watch.take_better_plans(self._links, self.step_number):
            return True
        self._fail_over()
        return False

    def begin_step(self) -> None:
        """Prepare for a step that may fail."""
        self._step.begin(self.step_number)
        self._record.own_loss = 0.0
        if self._loop is not None:
            coordinator_client().mark(self._loop.number, self.step_number + 1)

    def complete_step(self) -> None:
        """Count a step that has ended without an error."""
        if self._joined is None:
            self.step_number += 1
            self._record.loss = self._record.own_loss
            return
        loop, exchange = self._joined.loop, self._joined.exchange
        for group in groups_of_ours():
            if group.failure is not None:  # and the script has caught the error
                self.handle_failure(group.failure)
                return
        self._step.end()
        if self._tile is not None and not self._await_all(self._tile, loop, exchange):
            return
        self._links = self._joined.watch.found(self._links)
        self._count(self.step_number + 1, loop.number)
        loop.note_step()
        is_first, self._reported = self._reported != loop.number, loop.number
        if is_first or exchange.rank == 0:
            self._report(loop.number, is_first=is_first, leads=exchange.rank == 0)
        if is_first and self._tile is not None:
            # Only now the sums between tiles are known, and they go around what may fail next.
            exchange.plan_ahead((*self.sum_sizes(), *sums_between_tiles()))
        if is_first and self._built is not None:
            # The modules of `fully_shard` refer to each other, so those before this generation
            # stay, with their parameters and groups, until they are collected. Up to now, the loss
            # of an earlier step may have referred to them as well.
            gc.collect()

    def _count(self, step: int, generation: int) -> None:
        """Let the step in flight count."""
        self._step.count()
        self.step_number = step
        self._record.ledger.write_done(step, generation, self._record.position(step))
        # The last state is hashed at the end: the loop may change it after the block.
        if self._environment.settings.check_every_step and step != self._n_steps:
            self._write_state_hash()

    def _report(self, generation: int, *, is_first: bool, leads: bool) -> None:
        """Report a step to the observers."""
        record, terms = self._record, self._record.terms
        stepped = WorkerStepped(
            chip=self._environment.chip,
            step=self.step_number,
            generation=generation,
            at=time.monotonic(),
            leads=leads,
            first=is_first,
            loss=None if terms is None else record.loss,
            samples=0 if terms is None else terms.batch,
            sums=(MEETING_SUM, *sums_between_tiles()) if is_first else (),
            saves_to=record.writer.folder if is_first else "",
        )
        coordinator_client().report(stepped)

    def handle_failure(self, error: BaseException) -> None:
        """Reconfigure after a step that failed because the mesh changed; else raise its error.

        The state is what it was before the step, or that of a chip that has done the step.
        """
        if self._joined is None:
            raise error
        self._report_lost(self._joined)
        self._expect_change(error)
        _log.info("chip %s: step %d failed: %s", self._environment.chip, self.step_number, error)
        _forget_frames(error)
        self._drop()  # so that nothing writes any more
        self._step.undo()
        self._fail_over()
        if not self.is_over:
            self._step.fail()
        elif self._built is not None:
            self._built.is_halfway = True

    def _join(self) -> WorkerLoop:
        self._record.open(self.step_number)
        client = coordinator_client()
        client.set_fingerprint(self._fingerprint())
        exchange = exchange_of(self._environment)
        exchange.on_interrupt = self._present.interrupt
        tile = None if self._tile is None else self._tile.shape
        transfer = StateTransfer(self, exchange, TORCH, tile=tile)
        loop = WorkerLoop(
            self._environment.chip,
            self,
            client,
            exchange,
            self._injection,
            catch_up=functools.partial(self._catch_up, exchange, transfer),
            has_part=self._tile is not None,
        )
        watch = LinkWatch(loop, exchange, is_on=self._environment.sums.watch_links)
        self._joined, self._step.is_in_job = _JoinedJob(loop, exchange, transfer, watch), True
        return loop

    def _fingerprint(self) -> JobFingerprint:
        parameters, classes = self._step.state.words()
        terms, tile = self._record.terms, self._tile
        is_shared = tile is not None and tile.shares is not None
        return JobFingerprint(
            version=__version__,
            steps=terms.steps if terms else 0,
            batch=terms.batch if terms else 0,
            seed=terms.order.seed if terms else 0,
            policy="",
            model=parameters,
            optimizer=f"{classes}, shared between twins" if is_shared else classes,
            dataset_length=terms.order.n_samples if terms else 0,
            samples=terms.samples() if terms else NOT_COMPARED,
            framework="torch, with a process group",
            tile="" if tile is None else format_shape(tile.shape),
            **self._environment.sums_in_words(),
        )

    def _is_outdated(self) -> bool:
        """Whether the coordinator has told of something else than the present generation."""
        news, loop = coordinator_client().news, self._loop
        assert loop is not None
        is_same = news.generation is not None and news.generation.number == loop.number
        return not is_same or bool(news.wait) or news.end is not None

    def _report_lost(self, joined: _JoinedJob) -> None:
        """Report the peer that the first failed collective lost, if it knows one."""
        for group in groups_of_ours() if self._present.group is not None else ():
            failure = group.failure
            if isinstance(failure, PeerLostError) and failure.rank is not None:
                lost = joined.exchange.mesh.live[group.world_rank(failure.rank)]
                joined.loop.report_lost(lost, str(failure))
                return

    def _expect_change(self, error: BaseException) -> None:
        """Wait for the coordinator to tell of a change; raise the error if it does not.

        Only an error that a collective may have raised is worth a wait.
        """
        is_of_script = isinstance(error, Exception) and not isinstance(
            error, RuntimeError | TransportError | OSError
        )
        link_timeout_s = self._environment.sums.link_timeout_s
        timeout_s = 0.0 if is_of_script else _NEWS_S + link_timeout_s
        if not coordinator_client().await_change(self._is_outdated, timeout_s):
            raise error

    def _fail_over(self) -> None:
        """Leave the present group, and join the next generation."""
        loop = self._loop
        assert loop is not None
        self._step.is_kept = False
        self._drop()
        self._regroup(functools.partial(loop.recover, after=loop.number))

    def _regroup(self, enter: Callable[[], None]) -> None:
        """Enter a generation and make its process group; try again with the next if that fails."""
        joined = self._joined
        assert joined is not None
        loop = joined.loop
        enter()
        while not loop.is_over:
            self._drop()
            try:
                if self._form(joined):
                    return
            except (RuntimeError, TransportError) as error:
                self._expect_change(error)
            loop.recover(after=loop.number)
        if loop.was_waiting:
            self._close()
            sys.exit(0)

    def _drop(self) -> None:
        if self._joined is not None:
            self._joined.exchange.beside = None
        self._present.drop()

    def _form(self, joined: _JoinedJob) -> bool:
        """Make the process group of the present generation; return False if it is over."""
        loop, exchange = joined.loop, joined.exchange
        settings = replace(self._environment.sums, mesh=exchange.mesh)
        n_new = self._present.make(
            settings,
            exchange.rank,
            lambda payload: loop.try_sum([(payload, *MEETING_SUM)]),
            is_new=not self._is_equal,
        )
        if n_new is None:
            return False
        if self._tile is None:
            exchange.beside = self._present.group
        else:
            self._present.group.tile, self._present.group.plans = self._tile.shape, exchange.plans
        if self._is_outdated():  # while there was no group to interrupt
            return False
        self._tie()
        if self._tile is not None:
            self._tile.check(self.objects, exchange.mesh)
        if self._is_outdated():  # before there were the groups that `build` has made
            return False
        take = functools.partial(self._take_first_state, joined)
        if n_new and not loop.attempt(take, is_step=False):
            return False
        self._is_equal = True
        if self._tile is not None:
            self._tile.keep_shares()
        return True

    def _take_first_state(self, joined: _JoinedJob) -> None:
        """Take the state of the first chip: objects that `build` has made may differ."""
        generation = joined.loop.generation
        assert generation is not None
        state = joined.transfer.first_state(generation, self.step_number)
        if state is not None:
            self._step.state.load(state)

    def _tie(self) -> None:
        """Tie the objects to the present group: make them anew, or give them the group."""
        if self._built is not None:
            held = self.state()
            self._step.watch(self._built.made())
            self._random.see("build")
            if held["objects"] and "random" in held:  # else it is the first time in this job
                self._random.take(held["random"])  # `build` may draw some, now as often as here
            self._built.fill(self._step.state, held)
        elif self._present.group is not None:
            self._step.state.use_default_group()

    def _write_state_hash(self) -> None:
        assert self._loop is not None
        digest = self._step.state.digest()
        if self._tile is not None:
            digest = self._tile.part_of(digest)
        self._record.ledger.write_hold(self.step_number, self._loop.number, digest)

    def _close(self) -> None:
        """Leave the job; the process group stays until the script ends or destroys it."""
        is_whole = self._built is None or not self._built.is_halfway
        if self._loop is not None and not self._loop.was_waiting and is_whole:
            self._write_state_hash()
        self._record.ledger.close()
        self._record.writer.wait()
        if self._joined is not None:
            coordinator_client().close()
            self._joined.exchange.close()
        self._present.release()

    # What only replicas that are tiles need.

    def _await_all(self, tile: TileReplica, loop: WorkerLoop, exchange: Exchange) -> bool:
        """Wait until all chips have done this step; return False if it is not known to count.

        If the mesh changes meanwhile, the chips of the next generation say whether it does.
        """
        own_loss = self._record.own_loss
        loss = tile.sum_losses(loop, exchange, self.step_number + 1, own_loss)
        if loss is not None:
            self._record.loss = loss
            return True
        self._fail_over()
        if self.is_over:  # nobody will say any more whether the step counts
            self.settle(self.step_number)
        elif not tile.has_settled:  # else it counts, and so does what the loop does after it
            self._step.fail()
        return False

    def settle(self, step: int) -> None:
        """Keep the state of one of two steps: before the step that was tried last, or after it."""
        assert self._loop is not None
        assert self._tile is not None
        if self._tile.settle(self._loop, self._step, step):
            self._count(step, self._loop.number)
        assert self.step_number == step, f"this chip has no state of step {step}"

    def _save(self, tile: TileReplica, loop: WorkerLoop) -> None:
        assert loop.generation is not None
        is_shared = tile.shares is not None
        held, step = self._step.state, self.step_number
        self._record.save(held, step, tile.shape, loop.generation, is_shared=is_shared)

    def _catch_up(
        self, exchange: Exchange, transfer: StateTransfer, go: Go, generation: Generation
    ) -> None:
        """Get the state that a generation begins with, or send it to those that lack it.

        Raises:
            TransportError: the mesh has changed; a chip that had a state of the job has it still.
            StateLostError: a part of the state is lost.
        """
        if self._tile is not None and exchange.chip in go.holders:
            self.settle(go.step)
        state = transfer.exchanged(go, generation)
        if self._tile is not None and self._tile.shares is not None:
            assert self._built is not None
            coming = self._built.coming(self.step_number) if state is None else state
            self._tile.shares.receive(exchange, generation, self.step_number, coming)
        if state is not None:
            self.take_state(state)

    # The methods that `StateTransfer` calls: this class is its `TransferredReplica`.

    def state(self) -> dict[str, Any]:
        """Return the states of all objects at this step; their tensors are those of the objects."""
        if self._built is not None and (coming := self._built.coming(self.step_number)) is not None:
            return coming
        return {
            **self._step.state.state(self.step_number),
            "random": self._random.state(),
            "saved": self._record.saved_step,
            "loss": self._record.loss,
            "links": self._links,
        }

    def begin_overwriting(self, step: int) -> bool:
        """Whether the state that comes may be written over this chip's own, before all has come.

        It may if this chip has never been up to date, and the job has done steps: then nobody goes
        on from what it has. From now on it says so: it has done steps, and has no state.
        """
        if not self._is_fresh or step == 0 or self._built is not None:
            return False
        self.is_overwritten, self.step_number = True, step
        return True

    def take_state(self, state: dict[str, Any]) -> None:
        """Replace all of this chip's state by that of another chip."""
        if self._built is None:
            self._step.state.load(state)
        else:
            self._built.take(state, self._record.load_first)
        self.step_number = int(state["step"])
        self.is_overwritten, self._is_equal = False, True
        self._links = str(state.get("links", ""))
        if self._built is None:  # else when they are made: `build` may seed, or draw some
            self._random.take(state["random"])
        self._record.saved_step = int(state.get("saved", state["step"]))
        self._record.loss = float(state.get("loss", self._record.loss))
        self._has_joined_late |= self._is_fresh and self.step_number > 0
        self._forget_tried()

    def _forget_tried(self) -> None:
        """Forget the step that was tried last: the state is another one."""
        if self._tile is not None:
            self._tile.has_settled = False
        if self._loop is not None:
            self._loop.also = None

    # The methods that `WorkerLoop` calls: this class is its `Replica`.

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done."""
        return self._n_steps is not None and self.step_number >= self._n_steps

    def sum_sizes(self) -> SumSizes:
        """Return the one sum that a generation makes beside its process group."""
        return (MEETING_SUM,) if self._tile is None else (MEETING_SUM, LOSS_SUM)

    def newest_checkpoint(self) -> int | None:
        """Return the step of the newest checkpoint; a script's own are not known."""
        return self._record.writer.newest()

    def went_back(self, step: int, generation: int) -> None:
        """Write to the ledger that a generation restores an earlier step; later ones are lost."""
        self._record.writer.wait()  # or a part of what is lost could replace one of what comes
        self._record.ledger.write_restore(step, generation)

    def restore(self, step: int) -> None:
        """Go back to the checkpoint of a step; to the beginning of a job if there is none.

        Raises:
            CheckpointDamageError: it cannot be read.
        """
        is_lost = self._tile is not None and self._tile.has_lost_state
        is_here = step == self.step_number and not is_lost
        if is_here and (self._is_fresh or self._record.terms is None):
            return
        assert self._built is not None
        self._built.go_back(self._record.load(step))
        self.step_number, self._is_equal, self._record.saved_step = step, True, step
        self._forget_tried()


def _check_without_build(tile: str | None, *, shard_optimizer: bool) -> None:
    """Raise InputError if a script asks for tiles of objects that it makes only once."""
    if tile is not None:
        raise InputError(
            f"reconfigure(tile={tile!r}) needs build=, which makes the model anew when the tiles "
            "change, but did not get it; let build shard the model over "
            f"meshmend.torch.tiles({tile!r}) and return it"
        )
    if shard_optimizer:
        raise InputError(_NEEDS_TILE)


def _forget_frames(error: BaseException | None) -> None:
    """Free what the frames of an error hold: the step that failed, and with it all of its model.

    The error itself lives on in the handle of a collective, which these frames hold.
    """
    while error is not None:
        error.__traceback__, error = None, error.__context__


def _check_environment(environment: WorkerEnvironment) -> None:
    """Raise InputError if a job was asked for what an elastic group cannot do."""
    if found := [fault for fault in environment.faults if fault.is_in_loop]:
        raise InputError(
            f"--inject {found[0].words!r} needs a job of meshmend.train.Job or JaxJob; an "
            "elastic group knows nothing of what its loop computes"
        )
    if environment.settings.shares != "equal":
        raise InputError(
            f"{SHARES.name}={environment.settings.shares} needs a meshmend.train.Job or a JaxJob; "
            "the loop of an elastic group, or of a job of tiles, chooses its own samples"
        )
    if environment.settings.check_shares:
        raise InputError(
            f"{CHECK_SHARES.name} needs a meshmend.train.Job or a JaxJob, whose chips hold "
            "the whole model; an elastic group, or a job of tiles, cannot compute shares twice"
        )

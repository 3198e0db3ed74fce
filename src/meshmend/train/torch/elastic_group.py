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

`ElasticGroup` is one chip's part in it: its generations, its steps, its objects. `WorkerLoop` knows
the protocol, `group_state.py` the objects of a script, `group_meeting.py` how a group is made.
"""

import functools
import gc
import inspect
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, ParamSpec, TypeVar, cast

import numpy as np
import torch
from msgspec.structs import replace
from torch.optim.optimizer import register_optimizer_step_pre_hook

from meshmend import __version__
from meshmend.config import CHECK_SHARES, LEAVES, SHARES
from meshmend.errors import (
    InputError,
    PeerLostError,
    ResumeError,
    StateLostError,
    TransportError,
)
from meshmend.membership.events import WorkerStepped
from meshmend.membership.faults.fault import Moment
from meshmend.membership.faults.fault_injector import SelfInjection
from meshmend.membership.generation import Generation
from meshmend.membership.job import NOT_COMPARED, JobFingerprint
from meshmend.membership.messages import FRESH, Go
from meshmend.planning.catalogue import fabric_in
from meshmend.topology.failures import Chip, format_shape
from meshmend.topology.text import parse_tile
from meshmend.topology.tiles import box_colour, box_tiling
from meshmend.torch.call_arguments import dist
from meshmend.torch.group import MeshmendGroup
from meshmend.torch.tile_groups import TwinGroup
from meshmend.train.core.exchange import Exchange
from meshmend.train.core.link_watch import take_better_plans
from meshmend.train.core.part_transfer import PartTransfer
from meshmend.train.core.state_transfer import StateTransfer
from meshmend.train.core.worker_environment import (
    WorkerEnvironment,
    coordinator_client,
    exchange_of,
    worker_environment,
)
from meshmend.train.core.worker_loop import SumSizes, WorkerLoop
from meshmend.train.data.ledger import Ledger
from meshmend.train.data.samples import Indices, Order, Share
from meshmend.train.state.checkpoint_writer import WriteFailures
from meshmend.train.state.resume import check_progress
from meshmend.train.state.state_tree import Framework
from meshmend.train.state.torch_state import TORCH
from meshmend.train.torch.group_meeting import (
    MEETING_SUM,
    drop_group,
    groups_of_ours,
    init_group,
    meet,
)
from meshmend.train.torch.group_state import GroupState, RandomNumbers
from meshmend.train.torch.local_steps import LocalSteps
from meshmend.train.torch.loop_state import Stateful
from meshmend.train.torch.tile_checkpoints import TileCheckpoints, load_whole, whole_state
from meshmend.train.torch.twin_shares import (
    Holding,
    Received,
    TwinShares,
    receive_shares,
)

Build = Callable[[], Sequence[Stateful]]
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

_log = logging.getLogger(__name__)

_NEWS_S: Final = 3.0  # beyond the link timeout: for the coordinator to tell of a change
_READ: Final = "checkpoint"  # in a state: it is that of the checkpoint of its step
_LOSS_SUM: Final = (1, "float64")  # of a step of tiles, which all chips end together


@dataclass(frozen=True)
class SampleTerms:
    """What all chips of a job that hands out samples agree on."""

    order: Order
    batch: int
    steps: int
    samples: Callable[[], str]  # returns a digest of a few samples

    @property
    def progress(self) -> dict[str, int]:
        """What a checkpoint must have in common with the job."""
        return {"seed": self.order.seed, "n_samples": self.order.n_samples}


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
    elastic_group().reconfigure(state, build, tile, shard_optimizer=shard_optimizer)


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
    group.begin_step()
    try:
        yield group.objects
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # torch's CheckpointException is no Exception
        group.handle_failure(error)
    else:
        group.complete_step()


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
    parts: PartTransfer | None  # in a job with tiles


class ElasticGroup:
    """One chip's part in an elastic process group; call its methods from the main thread only.

    Outside an elastic job it leaves the process group alone, and steps only count.
    """

    def __init__(self, environment: WorkerEnvironment) -> None:
        _check_environment(environment)
        self._environment = environment
        self._self_injection = SelfInjection(environment.chip, environment.faults)
        self._ledger = Ledger(None, environment.chip)
        self._joined: _JoinedJob | None = None  # None outside a job, and before the first group
        self.step_number = 0  # steps done
        self._n_steps: int | None = None
        self._links = ""  # speeds of links that were found, as of the last step
        self._reported = 0  # the last generation in which this chip reported a step
        self._has_ended = False  # a loop over all steps

        # What the script has given, and the state that its objects are to have.
        self._state = GroupState(())
        self._random = RandomNumbers()
        self._hooks: list[Any] = []
        self._build: Build | None = None
        self._tile: tuple[int, ...] | None = None
        self._shards_optimizer = False
        self._shares: TwinShares | None = None  # of the objects' optimizers, if twins share them
        self._mirror_of: tuple[int, ...] = ()  # of the twins of this generation
        self._received: list[Received] = []  # of these shares, for the objects of the next group
        self._has_lost_state = False  # so that a checkpoint of this very step must be read
        self._taken: dict[str, Any] | None = None  # for the objects that `build` will make
        self._whole: dict[str, Any] | None = None  # a checkpoint, for the objects of the next group
        self._is_equal = False  # whether the chips have agreed on their first state
        self.is_overwritten = False  # the state is a part of this chip's and a part of others'

        # A job that hands out samples and saves checkpoints.
        self._samples: SampleTerms | None = None
        self._has_settled = False  # whether a step came to count when the next generation began
        self._checkpoints: TileCheckpoints | None = None
        self._saved_step = 0  # the last step of which a checkpoint was begun
        self._begin = (0, 0)  # its first step, and the position of that in the row of samples
        self._loss = 0.0  # this chip's part of the loss of the step in flight
        self.loss = 0.0  # of the last step; with tiles, what all chips have added up

        # The step in flight.
        self._is_due = False  # it was yielded, and no block has begun it
        self._is_checked = False  # whether the objects are known to hold all that steps change
        self._has_captured = False  # whether the state before the next step is kept
        self._n_stepped = 0  # optimizers that have stepped in this step
        self._has_stepped = False  # whether an optimizer has stepped in a step that counts
        self._has_failed = False  # whether the last step was undone, and its code may still run
        # The job ended in the middle of a step, which `fully_shard` leaves with its parts together.
        self._is_halfway = False

        self._planned: tuple[int, int] | None = None  # before which step of which generation

        # The process group of the present generation.
        self._group: Any = None
        self._store: Any = None  # of the group: what C++ code holds of it does not keep it alive
        self._is_interrupted = False
        self._is_finishing = False

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
        return self._state.objects

    @property
    def is_over(self) -> bool:
        """Whether the job is over."""
        return self._loop is not None and self._loop.is_over

    def count_samples(self, terms: "SampleTerms", checkpoints: TileCheckpoints) -> None:
        """Write down which samples are used, and save checkpoints; before the first `reconfigure`.

        Raises:
            ResumeError: the checkpoint to begin with cannot be read, or is of another job.
        """
        self._samples, self._checkpoints = terms, checkpoints
        if checkpoints.resume is None:
            return
        whole = checkpoints.resumed(checkpoints.resume)
        progress = whole["progress"]
        check_progress(progress, terms.progress)
        self._whole = whole
        self.step_number, self.loss = int(progress["step"]), progress["loss"] or 0.0
        self._saved_step = self.step_number
        self._begin = self.step_number, int(progress["position"])
        if self.step_number > terms.steps:
            raise ResumeError(
                f"the checkpoint is at step {self.step_number}, but the job ends at step "
                f"{terms.steps}; set steps to at least {self.step_number}"
            )

    def use_samples(self, share: Share, samples: Indices) -> None:
        """Write down this chip's share of the samples of a step that has begun."""
        assert self._loop is None or self._samples is not None
        number = self._loop.number if self._loop is not None else 0
        self._ledger.write_try(self.step_number + 1, number, share, samples)

    def add_loss(self, loss: float) -> None:
        """Add to this chip's part of the loss of the step in flight."""
        self._loss += loss

    def position(self, step: int) -> int:
        """Return how many samples are used when a step is done."""
        begin, used = self._begin
        return 0 if self._samples is None else used + (step - begin) * self._samples.batch

    def reconfigure(
        self,
        state: Sequence[Stateful],
        build: Build | None,
        tile: str | None = None,
        *,
        shard_optimizer: bool = False,
    ) -> None:
        """Join the job, or the next generation; see `reconfigure` of this module."""
        if state and build is not None:
            raise InputError(
                "reconfigure needs objects or build=, but got both; let build return the objects"
            )
        if tile is not None:
            if build is None and self._build is None:
                raise InputError(
                    f"reconfigure(tile={tile!r}) needs build=, which makes the model anew when the "
                    "tiles change, but did not get it; let build shard the model over "
                    f"meshmend.torch.tiles({tile!r}) and return it"
                )
            if self._environment.sums.watch_links:
                raise InputError(
                    f"{LEAVES['sums.watch_links'].variable} needs a job whose chips hold the whole "
                    f"model, but got tiles of {tile}; leave it out, and name slow links with --slow"
                )
            self._tile = parse_tile(tile)
        if shard_optimizer and self._tile is None:
            raise InputError(
                "reconfigure(shard_optimizer=True) needs tile=, whose twins share the optimizer's "
                "state, but did not get it; without tiles use meshmend.train.Job"
            )
        self._shards_optimizer = self._shards_optimizer or shard_optimizer
        if state or build is not None:
            self._adopt(state)
            self._build = build
        if self._environment.identity is None:
            self._rebuild()
            self._keep_shares()
        elif self._loop is None:
            self._random.see("join")
            self._regroup(self._join().start)
        else:
            self.keep_up()

    def steps(self, n_steps: int) -> Iterator[int]:
        """Yield the number of the next step until all chips have done `n_steps`."""
        if self._environment.identity is not None and self._loop is None:
            raise InputError("steps needs the process group of a job; call reconfigure before")
        if self._has_ended:
            raise InputError(
                "the job has ended with its first loop over steps; give that loop all steps"
            )
        self._n_steps = n_steps
        while not self.is_over:
            was_undone = self._forget_rest()
            self.keep_up()
            self._save()
            if self.step_number < n_steps:
                if not self._take_better_plans():
                    continue
                if not (was_undone and self._has_captured):  # else all is as it was captured
                    self._capture()
                self._is_due = True
                yield self.step_number
                if self._is_due:
                    raise InputError(
                        "steps needs a block for each step, or the same step comes for ever; put "
                        "it into 'with meshmend.torch.retrying():'"
                    )
            elif self._loop is None:
                break
            elif not self.is_over:
                if self._checkpoints is not None:
                    self._checkpoints.finish()
                self._is_finishing = True
                self._regroup(self._loop.finish)
                self._is_finishing = False
        self._has_ended = self._loop is not None
        self._close()

    def keep_up(self) -> None:
        """Enter the next generation if there is one, or if the group is broken."""
        if self._loop is None or self.is_over:
            return
        is_broken = self._group is None or self._group.failure is not None
        if self._is_outdated() or is_broken or not self._loop.keep_lease():
            self._fail_over()

    def is_to_do(self, step: int) -> bool:
        """Whether this step is the next one, in the newest generation."""
        self._forget_rest()
        self.keep_up()
        if self.step_number == step and not self.is_over:
            self._take_better_plans()
        self._is_due = self.step_number == step and not self.is_over
        return self._is_due

    def _take_better_plans(self) -> bool:
        """Look at links and swap plans, once before a step; return False if the mesh changed."""
        if self._joined is None or self._tile is not None:
            return True
        loop, exchange = self._joined.loop, self._joined.exchange
        before, self._planned = self._planned, (loop.number, self.step_number)
        if self._planned == before:
            return True
        if take_better_plans(loop, exchange, self._links, self.step_number):
            return True
        self._fail_over()
        return False

    def begin_step(self) -> None:
        """Prepare for a step that may fail."""
        if not self._is_due:
            raise InputError(
                "retrying needs a step of its own, because each block counts as one; put all of a "
                "step that meshmend.torch.steps yields into one block"
            )
        self._is_due = False
        self._n_stepped, self._loss = 0, 0.0
        self._has_failed = False
        self._self_injection.at(Moment.FORWARD, self.step_number)
        if self._loop is not None:
            if not self._is_checked:
                self._state.check_comparable()
                self._is_checked = True
            if not self._has_captured:  # else since `steps` has yielded it
                self._capture()
            coordinator_client().mark(self._loop.number, self.step_number + 1)

    def complete_step(self) -> None:
        """Count a step that has ended without an error."""
        if self._joined is None:
            self.step_number += 1
            self.loss = self._loss
            return
        loop, exchange = self._joined.loop, self._joined.exchange
        for group in groups_of_ours():
            if group.failure is not None:  # and the script has caught the error
                self.handle_failure(group.failure)
                return
        self._refuse_half_step()
        self._state.note_moving()
        if self._tile is not None and not self._await_all(loop, exchange):
            return
        self._has_stepped = self._has_stepped or self._n_stepped > 0
        self.step_number += 1
        self._links = exchange.found_speeds(self._links)
        self._has_captured = False
        self._ledger.write_done(self.step_number, loop.number, self.position(self.step_number))
        if self._environment.settings.check_every_step:
            self._write_state_hash()
        loop.note_step()
        is_first, self._reported = self._reported != loop.number, loop.number
        if is_first or exchange.rank == 0:
            self._report(loop.number, is_first=is_first, leads=exchange.rank == 0)
        if is_first and self._tile is not None:
            # Only now the sums between tiles are known, and they go around what may fail next.
            exchange.plan_ahead((*self.sum_sizes(), *self._tile_sums()))
        if is_first and self._build is not None:
            # The modules of `fully_shard` refer to each other, so those before this generation
            # stay, with their parameters and groups, until they are collected. Up to now, the loss
            # of an earlier step may have referred to them as well.
            gc.collect()

    def _report(self, generation: int, *, is_first: bool, leads: bool) -> None:
        """Report a step to the observers."""
        stepped = WorkerStepped(
            chip=self._environment.chip,
            step=self.step_number,
            generation=generation,
            at=time.monotonic(),
            leads=leads,
            first=is_first,
            loss=None if self._samples is None else self.loss,
            samples=0 if self._samples is None else self._samples.batch,
            sums=(MEETING_SUM, *self._tile_sums()) if is_first else (),
            saves_to=self._checkpoints.folder if self._checkpoints and is_first else "",
        )
        coordinator_client().report(stepped)

    def _save(self) -> None:
        """Begin to write this chip's part of a checkpoint of the last step, if one is due.

        That is done at the top of the next turn of the loop: what the loop has changed after the
        step, such as a learning rate by what it evaluated, belongs to it.
        """
        loop = self._loop
        if self._checkpoints is None or self._tile is None or loop is None or loop.is_over:
            return
        if self._saved_step == self.step_number:
            return
        self._saved_step = self.step_number
        assert loop.generation is not None
        self._checkpoints.save(
            self._whole_state,
            step=self.step_number,
            tile=self._tile,
            generation=loop.generation,
            mark=f"loss {self.loss.hex()}",
            is_last=self.is_finished,
            is_shared=self._shares is not None,
        )

    def _whole_state(self, is_writer: bool) -> dict[str, Any]:
        assert self._samples is not None
        progress = {
            "step": self.step_number,
            "position": self.position(self.step_number),
            "loss": self.loss,
            "stopped": False,
        }
        state = whole_state(self._state, has_parts=is_writer)
        return {**state, "progress": progress | self._samples.progress}

    def _tile_sums(self) -> SumSizes:
        """Return the sums between tiles of a step that is done."""
        twins = (group for group in groups_of_ours() if isinstance(group, TwinGroup))
        return tuple(dict.fromkeys(size for group in twins for size in group.sum_sizes))

    def _await_all(self, loop: WorkerLoop, exchange: Exchange) -> bool:
        """Wait until all chips have done this step; return False if the mesh changed meanwhile.

        Others hold the rest of the state after it. If one of them has not done it, the step does
        not count, and so this chip keeps both states until the next generation begins.
        """
        numbers = np.array([self._loss])
        loop.also = self.step_number + 1
        if loop.attempt(functools.partial(exchange.sum, numbers.view(np.uint8), *_LOSS_SUM)):
            loop.also, self.loss = None, float(numbers[0])
            return True
        self._has_settled = False
        self._fail_over()
        if self.is_over:  # nobody will say any more whether the step counts
            self.settle(self.step_number)
        elif not self._has_settled:  # else it counts, and so does what the loop does after it
            self._capture()
            self._has_failed = True
        return False

    def settle(self, step: int) -> None:
        """Keep the state of one of two steps: before the step that was tried last, or after it."""
        loop = self._loop
        assert loop is not None
        if loop.also is not None and step == loop.also:
            self.step_number = step
            self._has_stepped = self._has_settled = True
            self._ledger.write_done(step, loop.number, self.position(step))
        elif loop.also is not None:
            self._state.before.restore()
        loop.also = None
        assert self.step_number == step, f"chip {self.chip} has no state of step {step}"

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
        self._state.before.restore()
        self._fail_over()
        if self.is_over:
            self._is_halfway = self._build is not None
        else:
            self._capture()
            self._has_failed = True

    def _capture(self) -> None:
        """Keep the state before a step: what fails from here on is undone."""
        if self._loop is not None:
            self._random.see("step")
            self._state.before.capture()
            self._has_captured = True

    def _forget_rest(self) -> bool:
        """Undo what the rest of the loop's body has changed, if a step failed; return whether."""
        has_failed, self._has_failed = self._has_failed, False
        if has_failed:
            self._state.before.restore()
        return has_failed

    def _refuse_half_step(self) -> None:
        """Raise InputError after a block that makes gradients but leaves the step to a later one.

        They are in no other chip's state: a chip that dies takes its part of them along.
        """
        before = self._state.before
        if (
            self._n_stepped == 0
            and self._state.optimizers
            and before.has_new_gradients()
            and not before.has_updated_scaler()
        ):
            raise InputError(
                "retrying needs a whole step in its block, but got gradients without "
                "optimizer.step(); put all backward passes of an accumulation into one block"
            )

    def _adopt(self, objects: Sequence[Stateful]) -> None:
        """Make these the objects of the group, and watch when their optimizers step."""
        for hook in self._hooks:
            hook.remove()
        self._state = GroupState(objects, is_part=self._tile is not None)
        self._hooks = [register_optimizer_step_pre_hook(self._check_update)]
        self._has_captured = self._has_failed = self._is_checked = False
        for optimizer in self._state.optimizers:
            self._hooks += [
                optimizer.register_step_pre_hook(self._before_update),
                optimizer.register_step_post_hook(self._after_update),
            ]
        if self._tile is not None and not self._shards_optimizer:
            self._hooks.append(LocalSteps(self._state.optimizers))

    def _check_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Refuse, before it steps, what changes the model but is not in the state."""
        if self._loop is None or self._has_stepped:
            return
        self._state.check_optimizer(optimizer)
        frame = inspect.currentframe()
        while frame is not None:
            self._state.check_scaler(frame.f_locals.get("self"))
            frame = frame.f_back

    def _before_update(self, *_: object) -> None:
        self._self_injection.at(Moment.UPDATE, self.step_number)

    def _after_update(self, *_: object) -> None:
        self._n_stepped += 1

    def _join(self) -> WorkerLoop:
        self._ledger = self._new_ledger()
        if self.step_number:
            self._ledger.write_resume(*self._begin)
        client = coordinator_client()
        client.set_fingerprint(self._fingerprint())
        exchange = exchange_of(self._environment)
        exchange.on_interrupt = self._interrupt
        transfer, parts = StateTransfer(self, exchange), None
        if self._tile is not None:
            parts = PartTransfer(
                self.chip,
                self._tile,
                transfer,
                settle=self.settle,
                take=self.take_state,
                share=functools.partial(self._receive_shares, exchange)
                if self._shards_optimizer
                else None,
            )
        loop = WorkerLoop(
            self._environment.chip,
            self,
            client,
            exchange,
            self._self_injection,
            catch_up=(parts or transfer).catch_up,
            has_part=parts is not None,
        )
        self._joined = _JoinedJob(loop, exchange, transfer, parts)
        return loop

    def _new_ledger(self) -> Ledger:
        environment, failures = self._environment, WriteFailures(self._environment)
        return Ledger(
            environment.run_dir / "ledger" if environment.run_dir else None,
            environment.chip,
            self._samples.order if self._samples is not None else None,
            on_failure=lambda why: failures.report("its ledger", why),
        )

    def _fingerprint(self) -> JobFingerprint:
        parameters, classes = self._state.words()
        terms = self._samples
        fabric = fabric_in(self._environment.sums.planned_algorithm)
        return JobFingerprint(
            version=__version__,
            steps=terms.steps if terms else 0,
            batch=terms.batch if terms else 0,
            seed=terms.order.seed if terms else 0,
            policy="",
            model=parameters,
            optimizer=f"{classes}, shared between twins" if self._shards_optimizer else classes,
            dataset_length=terms.order.n_samples if terms else 0,
            samples=terms.samples() if terms else NOT_COMPARED,
            framework="torch, with a process group",
            tile="" if self._tile is None else format_shape(self._tile),
            fabric=fabric.name if fabric else "",
            watch_links=self._environment.sums.watch_links,
        )

    def _interrupt(self) -> None:
        """Make the collectives under way fail; the client's thread calls this."""
        self._is_interrupted = True
        # Who has done all steps waits in no collective, and may use the group after the job.
        if self._group is not None and not self._is_finishing:
            for group in groups_of_ours():
                group.interrupt()

    def _is_outdated(self) -> bool:
        """Whether the coordinator has told of something else than the present generation."""
        news, loop = coordinator_client().news, self._loop
        assert loop is not None
        is_same = news.generation is not None and news.generation.number == loop.number
        is_away = news.turned_away or news.refused or news.failed or news.is_over
        return not is_same or bool(news.wait or is_away)

    def _report_lost(self, joined: _JoinedJob) -> None:
        """Report the peer that the first failed collective lost, if it knows one."""
        if self._group is None:
            return
        for group in groups_of_ours():
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
        self._has_captured = False
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
            _log.info("chip %s has no part in the end of the job", self._environment.chip)
            self._close()
            sys.exit(0)

    def _drop(self) -> None:
        self._group = None
        if self._joined is not None:
            self._joined.exchange.beside = None
        drop_group()
        self._store = None

    def _form(self, joined: _JoinedJob) -> bool:
        """Make the process group of the present generation; return False if it is over."""
        loop, exchange = joined.loop, joined.exchange
        self._is_interrupted = False
        settings = replace(self._environment.sums, mesh=exchange.mesh)
        met = meet(
            settings,
            exchange.rank,
            lambda payload: loop.try_sum([(payload, *MEETING_SUM)]),
            lambda: self._is_interrupted,
            is_new=not self._is_equal,
        )
        if met is None:
            return False
        self._store, n_new = met
        self._group = init_group(settings, self._store, exchange.rank)
        if self._tile is not None:
            self._group.tile = self._tile
            self._group.plans = exchange.plans
        else:
            exchange.beside = self._group
        if self._is_outdated():  # while there was no group to interrupt
            return False
        self._rebuild()
        if self._tile is not None:
            self._check_in_tile(self._tile, exchange)
        if self._is_outdated():  # before there were the groups that `build` has made
            return False
        take = functools.partial(self._take_first_state, joined)
        if n_new and not loop.attempt(take, is_step=False):
            return False
        self._is_equal = True
        self._keep_shares()
        return True

    def _check_in_tile(self, tile: tuple[int, ...], exchange: Exchange) -> None:
        mesh = exchange.mesh
        mine = next(each for each in box_tiling(mesh, tile).tiles if self.chip in each)
        self._state.check_in_tile([mesh.rank_of[chip] for chip in mine], format_shape(tile))

    def _take_first_state(self, joined: _JoinedJob) -> None:
        """Take the state of the first chip: objects that `build` has made may differ."""
        generation = joined.loop.generation
        assert generation is not None
        if joined.parts is not None:
            state = joined.parts.first_states(generation, self.step_number)
        else:
            go = Go(generation.number, self.step_number, generation.chips[:1])
            state = joined.transfer.exchanged(go, generation)
        if state is not None:
            self._state.load(state)

    def _receive_shares(
        self, exchange: Exchange, generation: Generation, state: dict[str, Any] | None
    ) -> None:
        """Get the states that this chip lacks of what it shares with its twins.

        `state` is what it will take; None if it has that. What the beginning of a job is made of,
        and what is read from a checkpoint, each chip makes or reads by itself.
        """
        tile = self._tile
        assert tile is not None
        will_take = self._taken if state is None else state
        if self._whole is not None and state is None:
            mine = Holding(is_all=True)
        elif will_take is not None:
            mine = Holding(is_all=bool(will_take.get(_READ)) or not will_take["objects"])
        else:
            mine = Holding(is_all=True) if self._shares is None else self._shares.holding
        board = self._environment.board
        try:
            self._received, self._mirror_of = receive_shares(
                exchange, generation, tile=tile, board=board, mine=mine, shares=self._shares
            )
        except StateLostError as lost:
            if exchange.rank == 0:
                _log.error("after step %d %s", self.step_number, lost)
            self._has_lost_state = True
            raise

    def _take_shares(self, before: TwinShares | None, *, has_begun: bool) -> None:
        """Let twins share the optimizers of new objects; a job that `has_begun` has their states.

        Chips keep what they have until `_keep_shares`.
        """
        self._shares = TwinShares(self._state.optimizers)
        self._state.share(self._shares.of)
        if has_begun:
            self._shares.take(before, self._received)
        self._received, self._has_lost_state = [], False

    def _keep_shares(self) -> None:
        """Keep this chip's shares alone, once all chips have made their objects.

        Raises:
            RuntimeError, TransportError: the mesh has changed.
        """
        shares, world = self._shares, dist.group.WORLD if dist.is_initialized() else None
        if shares is None or not isinstance(world, MeshmendGroup):
            return
        rows = [n_bytes for n_bytes, _ in shares.holding.rows]
        told = torch.zeros((dist.get_world_size(), len(rows)), dtype=torch.int64)
        told[dist.get_rank()] = torch.tensor(rows)
        dist.all_reduce(told)
        mesh = world.meshes[-1]
        _, *inside = cast("tuple[int, ...]", mesh.get_coordinate())
        line: Any = (slice(None), *inside)
        twins = sorted(mesh.mesh[line].tolist())
        # Without failures there are no mirrors.
        mirror_of = self._mirror_of or tuple(range(len(twins)))
        place = twins.index(dist.get_rank())
        shares.keep(place, mirror_of, mesh.get_group(0), told.max(0).values.tolist())

    def _rebuild(self) -> None:
        """Tie the objects to the present group: make them anew, or give them the group."""
        if self._build is None:
            if self._group is not None:
                self._state.use_default_group()
            return
        held, before = self.state(), self._shares if self._taken is None else None
        self._adopt(tuple(self._build()))
        if self._whole is not None:
            load_whole(self._state.objects, self._whole)
        else:
            self._state.load(held)
        if self._shards_optimizer:
            self._take_shares(before, has_begun=bool(held["objects"]))
        self._taken = self._whole = None

    def _write_state_hash(self) -> None:
        assert self._loop is not None
        digest = self._state.digest()
        if self._tile is not None:  # only twins hold the same
            digest = f"{box_colour(self._tile, self.chip)}.{digest}"
        self._ledger.write_hold(self.step_number, self._loop.number, digest)

    def _close(self) -> None:
        """Leave the job; the process group stays until the script ends or destroys it."""
        if self._loop is not None and not self._loop.was_waiting and not self._is_halfway:
            self._write_state_hash()
        self._ledger.close()
        if self._checkpoints is not None:
            self._checkpoints.finish()
        if self._joined is not None:
            coordinator_client().close()
            self._joined.exchange.close()
        self._is_interrupted = False  # the group and its store may be used after the job

    # The methods that `StateTransfer` calls: this class is its `TransferredReplica`.

    @property
    def chip(self) -> Chip:
        """The chip of this worker."""
        return self._environment.chip

    @property
    def framework(self) -> Framework:
        """How the state becomes bytes."""
        return TORCH

    def state(self) -> dict[str, Any]:
        """Return the states of all objects at this step; their tensors are those of the objects.

        Who takes the state of a checkpoint reads it: chips hold different parts.
        """
        if self._whole is not None:
            return {"step": self.step_number, "objects": [], "moving": [], _READ: True}
        if self._taken is not None:
            return self._taken
        return {
            **self._state.state(self.step_number),
            "random": self._random.state(),
            "saved": self._saved_step,
            "links": self._links,
        }

    def begin_overwriting(self, step: int) -> bool:
        """Whether the state that comes may be written over this chip's own, before all has come.

        It may if this chip has never been up to date, and the job has done steps: then nobody goes
        on from what it has. From now on it says so: it has done steps, and has no state.
        """
        if not self._is_fresh or step == 0 or self._build is not None:
            return False
        self.is_overwritten, self.step_number = True, step
        return True

    def take_state(self, state: dict[str, Any]) -> None:
        """Replace all of this chip's state by that of another chip."""
        self.is_overwritten, self._is_equal, self._has_settled = False, True, False
        self._saved_step = int(state.get("saved", state["step"]))
        self._links = str(state.get("links", ""))
        if self._loop is not None:
            self._loop.also = None
        if "random" in state:  # not in that of a chip that reads a checkpoint
            self._random.take(state["random"])
        if self._build is None:
            self.step_number = self._state.load(state)
        else:
            self._taken = state  # for the objects that are made for the next group
            self._whole = None
            if state.get(_READ) and self._checkpoints is not None:
                self._whole = self._checkpoints.load(int(state["step"]))
            self.step_number = int(state["step"])

    # The methods that `WorkerLoop` calls: this class is its `Replica`.

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done."""
        return self._n_steps is not None and self.step_number >= self._n_steps

    def sum_sizes(self) -> SumSizes:
        """Return the one sum that a generation makes beside its process group."""
        return (MEETING_SUM,) if self._tile is None else (MEETING_SUM, _LOSS_SUM)

    def newest_checkpoint(self) -> int | None:
        """Return the step of the newest checkpoint; a script's own are not known."""
        return None if self._checkpoints is None else self._checkpoints.newest()

    def went_back(self, step: int, generation: int) -> None:
        """Write to the ledger that a generation restores an earlier step; later ones are lost."""
        if self._checkpoints is not None:
            self._checkpoints.finish()  # or a part of what is lost could replace one of what comes
        self._ledger.write_restore(step, generation)

    def restore(self, step: int) -> None:
        """Go back to the checkpoint of a step; to the beginning of a job if there is none.

        Raises:
            CheckpointDamageError: it cannot be read.
        """
        has_it = step == self.step_number and not self._has_lost_state
        if has_it and (self._is_fresh or self._checkpoints is None):
            return
        assert self._checkpoints is not None, "no checkpoint was announced"
        self._whole = self._checkpoints.load(step)
        self.step_number, self._taken, self._is_equal = step, None, True
        self._saved_step = step
        if self._loop is not None:
            self._loop.also = None


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

"""A training job that survives: five lines changed in a plain PyTorch loop.

    job = Job(model, optimizer, dataset, batch=64, steps=1000)
    for inputs, labels in job:
        loss = cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        job.step(loss)

The job hands out this chip's share of each step's samples. `step` sums the gradients over all
chips and steps the optimizer. If the mesh changed meanwhile, the step does not count: the job
comes to terms with the others, and hands out its new share of the same step.
"""

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.utils.data import default_collate

from meshmend.errors import InputError, PeerLostError, StoppedError, TransportError, TurnedAwayError
from meshmend.faults.fault import Moment
from meshmend.faults.self_injection import SelfInjection
from meshmend.membership.client import News
from meshmend.membership.events import WorkerSaved, WorkerStepped
from meshmend.membership.generation import Generation
from meshmend.membership.messages import FRESH, Go, Status
from meshmend.topology.failures import Chip
from meshmend.train import checkpoint
from meshmend.train.checkpoint import Saving
from meshmend.train.exchange import Exchange
from meshmend.train.gradients import Gradients
from meshmend.train.ledger import Ledger
from meshmend.train.samples import Order, Share, batch_of, share_of
from meshmend.train.state import digest, packed, tensors_of, unpacked
from meshmend.train.worker_environment import (
    WorkerEnvironment,
    coordinator_client,
    worker_environment,
)

_log = logging.getLogger(__name__)


class Stateful(Protocol):
    """Anything whose state is part of the training, such as a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, numbers and text."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Take over a state."""


class Job:
    """One chip's part in training a model on the samples of a data set.

    `batch` samples make a step, over all chips together; `policy="shrink"` makes it smaller while
    chips are missing. `also` are further objects with a state, such as schedulers. `resume` names
    a folder of checkpoints: the newest that is whole is taken up.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Any,
        *,
        batch: int,
        steps: int,
        seed: int = 0,
        policy: str = "constant",
        collate: Callable[[list[Any]], Any] = default_collate,
        also: Sequence[Stateful] = (),
        saving: Saving | None = None,
        resume: Path | None = None,
    ) -> None:
        if batch < 1 or steps < 0:
            raise InputError(
                f"Job needs a batch of at least 1 and no fewer than 0 steps, but got batch={batch} "
                f"and steps={steps}"
            )
        self._environment: WorkerEnvironment = worker_environment()
        batch_of(policy, batch, 1, 1)
        self.model, self.optimizer = model, optimizer
        self._dataset, self._collate, self._also = dataset, collate, tuple(also)
        self._order = Order(len(dataset), seed)
        self._batch, self._policy, self._seed = batch, policy, seed
        self.steps = steps
        self._saving = saving
        self._gradients = Gradients(model)
        self._ledger = Ledger(
            self._environment.run_dir / "ledger" if self._environment.run_dir else None,
            self._environment.chip,
        )
        self.step_number = 0  # steps done
        self.loss: float | None = None  # of the last step, over all its samples
        self._position = 0
        self._state_version = FRESH
        self._generation: Generation | None = None
        self._share: Share | None = None
        self._is_first = True
        self._is_over = False
        self._waits = False  # when all was over, this chip was no member
        self._self_injection = SelfInjection(self._environment.chip, self._environment.faults)
        if resume is not None:
            self._resume(resume)
        self._exchange: Exchange | None = None
        if self._environment.identity is not None:
            coordinator_client()
            self._exchange = Exchange(
                self._environment.whole, self._environment.chip, self._environment.exchange_settings
            )

    @property
    def chips(self) -> tuple[Chip, ...]:
        """The chips that train now."""
        return self._generation.chips if self._generation else (self._environment.chip,)

    @property
    def is_leader(self) -> bool:
        """Whether this chip is the first of those that train now: one to print or to plot."""
        return self._exchange is None or (self._exchange.rank == 0 and not self._waits)

    @property
    def _place(self) -> tuple[int, int]:
        """The rank of this chip, and how many there are."""
        return (self._exchange.rank, self._exchange.mesh.n_live) if self._exchange else (0, 1)

    def __iter__(self) -> Iterator[Any]:
        """Yield this chip's samples, step by step, until all steps are done on all chips."""
        if self._exchange is not None:
            self._join()
            self._recover(after=0)
        while not self._is_over:
            if self.step_number < self.steps:
                yield from self._attempt()
            else:
                self._finish()
        self._close()

    def step(self, loss: torch.Tensor, *, weight: float | None = None) -> bool:
        """Sum the gradients over all chips and step the optimizer; return whether it counted.

        The loss is a mean over this chip's samples. If it is a mean over something else, such as
        masked words, `weight` says over how many.
        """
        share = self._share
        if share is None:
            raise InputError("Job.step needs samples that the job handed out, once each")
        scale = (share.n_samples if weight is None else weight) / share.batch
        self._gradients.gather(float(loss.detach()), scale, normalise=weight is not None)
        return self._settle(share)

    def state(self) -> dict[str, Any]:
        """Return all that makes up the training at this step."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "also": [part.state_dict() for part in self._also],
            "progress": {
                "step": self.step_number,
                "position": self._position,
                "seed": self._seed,
                "loss": self.loss,
            },
        }

    def _attempt(self) -> Iterator[Any]:
        """Yield this chip's samples of the next step; who has none takes part without."""
        rank, n_live = self._place
        batch = batch_of(self._policy, self._batch, n_live, self._environment.n_first)
        share = share_of(self._position, batch, rank, n_live)
        _seed(hash((self._seed, self.step_number, rank)) & 0x7FFFFFFF)
        self._self_injection.at(Moment.FORWARD, self.step_number)
        if share.n_samples == 0:
            self._gradients.clear()
            self._settle(share)
            return
        self._share = share
        indices = self._order.samples(share.start, share.stop).tolist()
        yield self._collate([self._dataset[index] for index in indices])
        if self._share is not None:
            raise InputError("the loop over a Job needs to call job.step(loss) for all samples")

    def _settle(self, share: Share) -> bool:
        """Make the step real, or come to terms with the others; return whether it is real."""
        self._share = None
        number = self._generation.number if self._generation else 0
        self._ledger.tries(self.step_number + 1, number, share)
        self._self_injection.at(Moment.REDUCE, self.step_number)
        if self._exchange is not None:
            coordinator_client().mark(number, self.step_number + 1)
            try:
                sizes = zip(self._gradients.payloads(), self._gradients.sizes(), strict=True)
                for payload, (n_elements, dtype) in sizes:
                    self._exchange.sum(payload, n_elements, dtype)
            except TransportError as error:
                self._gradients.restore()
                self._complain(error)
                self._recover(after=number)
                return False
        self._self_injection.at(Moment.UPDATE, self.step_number)
        self.loss = self._gradients.scatter()
        self.optimizer.step()
        self.step_number += 1
        self._position += share.batch
        self._ledger.did(self.step_number, number, self._position)
        self._conclude(share.batch)
        return True

    def _conclude(self, batch: int) -> None:
        """Tell of a step that is done, and save it if its time has come."""
        if self._environment.checks:
            self._note_bits()
        rank, n_live = self._place
        if self._exchange is not None:
            coordinator_client().note(self._status(is_ready=True))
            if rank == 0 or self._is_first:
                self._report(batch)
        self._is_first = False
        saving = self._saving
        if saving and self.step_number % saving.every == 0:
            self._save(saving, rank, n_live)

    def _report(self, batch: int) -> None:
        """Tell who watches of the last step: the first chip of every one, all of their first."""
        assert self._exchange is not None
        stepped = WorkerStepped(
            chip=self._environment.chip,
            step=self.step_number,
            generation=self._state_version,
            at=time.monotonic(),
            leads=self._exchange.rank == 0,
            first=self._is_first,
            loss=self.loss,
            samples=batch,
            sums=tuple(self._gradients.sizes()) if self._is_first else (),
        )
        coordinator_client().report(stepped)

    def _save(self, saving: Saving, rank: int, n_live: int) -> None:
        """Write this chip's part of a checkpoint; training goes on if that fails."""
        try:
            checkpoint.save_shard(
                saving.folder, self.state(), step=self.step_number, shard=rank, n_shards=n_live
            )
            if rank == 0:
                checkpoint.prune(saving.folder, keep=saving.keep)
        except InputError as error:
            _log.error(
                "chip %s saved nothing at step %d: %s",
                self._environment.chip,
                self.step_number,
                error,
            )
            return
        if rank == 0 and self._exchange is not None:
            saved = WorkerSaved(
                self._environment.chip, self.step_number, time.monotonic(), str(saving.folder)
            )
            coordinator_client().report(saved)

    def _note_bits(self) -> None:
        state = self.state()
        bits = digest(tensors_of([state["model"], state["optimizer"], state["also"]]))
        self._ledger.holds(self.step_number, max(self._state_version, 0), bits)

    def _resume(self, folder: Path) -> None:
        def tell(path: Path, why: str) -> None:
            _log.warning("checkpoint %s is not used: %s", path, why)

        loaded = checkpoint.load(folder, on_damage=tell)
        if loaded is None:
            raise InputError(
                f"resume needs a checkpoint, but there is none that is whole in {folder}"
            )
        self._take_over(loaded.state)

    def _take_over(self, state: dict[str, Any]) -> None:
        """Be where another chip, or a checkpoint, is."""
        self.model.load_state_dict(state["model"])
        self._gradients.remember()
        self.optimizer.load_state_dict(state["optimizer"])
        for part, theirs in zip(self._also, state["also"], strict=True):
            part.load_state_dict(theirs)
        self.step_number = int(state["progress"]["step"])
        self._position = int(state["progress"]["position"])
        self.loss = state["progress"]["loss"]

    def _status(self, *, is_ready: bool, lost: Iterable[Chip] = ()) -> Status:
        assert self._exchange is not None
        return Status(
            generation=self._exchange.transport.generation,
            ready=is_ready,
            state_version=self._state_version,
            step=self.step_number,
            finished=self.step_number == self.steps and self._state_version != FRESH,
            lost=tuple(lost),
        )

    def _join(self) -> None:
        """Offer this chip to the coordinator."""
        exchange = self._exchange
        assert exchange is not None
        coordinator_client().join(
            exchange.address,
            self._status(is_ready=False),
            on_change=exchange.transport.interrupt,
            on_sever=exchange.sever,
        )

    def _complain(self, error: TransportError) -> None:
        """Tell the coordinator of a lost peer; a stop was its own word."""
        if isinstance(error, PeerLostError) and error.rank is not None:
            assert self._exchange is not None
            lost = self._exchange.chip_of(error.rank)
            _log.info("chip %s lost chip %s: %s", self._environment.chip, lost, error)
            coordinator_client().tell(self._status(is_ready=False, lost=[lost]))
        elif isinstance(error, StoppedError):
            coordinator_client().note(self._status(is_ready=False))
        else:
            raise error

    def _recover(self, *, after: int) -> None:
        """Return when this chip is up to date in a generation later than one, or all is over.

        Whatever happens on the way starts it over with the next generation.
        """
        while not self._is_over:
            try:
                news = self._news_after(after)
                if news.is_over:
                    self._is_over, self._waits = True, bool(news.wait)
                elif news.generation is not None:
                    after = news.generation.number
                    if self._enter(news.generation):
                        return
            except TurnedAwayError as error:
                _log.warning("chip %s was turned away: %s", self._environment.chip, error)
                if error.is_stale:
                    self._state_version = FRESH
                self._join()

    def _news_after(self, number: int) -> News:
        """Return the news as soon as there is a later generation, or all is over."""
        return coordinator_client().await_news(
            lambda news: (
                news.is_over or (news.generation is not None and news.generation.number > number)
            )
        )

    def _enter(self, generation: Generation) -> bool:
        """Become a member of a generation that is up to date; return False if it is over."""
        exchange, line = self._exchange, coordinator_client()
        assert exchange is not None
        exchange.enter(generation)
        line.mark(generation.number, 0)
        line.tell(self._status(is_ready=True))
        self._self_injection.at(Moment.RECOVERY, self.step_number)
        number = generation.number
        try:
            exchange.plan(self._gradients.sizes())
            news = line.await_news(lambda news: _is_answered(news.generation, news.go, number))
            if news.generation is None or news.generation.number != number or news.go is None:
                return False
            exchange.prepare()
            if len(news.go.holders) < len(generation.seats):
                self._heal(news.go)
        except TransportError as error:
            self._complain(error)
            return False
        self._generation, self._state_version, self._is_first = generation, number, True
        line.tell(self._status(is_ready=True))
        exchange.plan_ahead(self._gradients.sizes())
        return True

    def _heal(self, go: Go) -> None:
        """Give or take the state of the step that all take up. Nothing is lost half-way."""
        exchange = self._exchange
        assert exchange is not None
        is_holder = self._environment.chip in go.holders
        state = exchange.spread(packed(self.state()) if is_holder else None, go.holders)
        if not is_holder:
            self._take_over(unpacked(state))

    def _finish(self) -> None:
        """Wait until all chips have finished; if the mesh changes instead, be in it again."""
        if self._exchange is None or self._generation is None:
            self._is_over = True
            return
        coordinator_client().tell(self._status(is_ready=True))
        self._recover(after=self._generation.number)

    def _close(self) -> None:
        if self._exchange is None or self._state_version != FRESH:
            self._note_bits()
        self._ledger.close()
        if self._exchange is not None:
            coordinator_client().close()
            self._exchange.close()


def _is_answered(generation: Generation | None, go: Go | None, number: int) -> bool:
    is_later = generation is not None and generation.number > number
    return is_later or (go is not None and go.generation == number)


def _seed(number: int) -> None:
    """Seed torch's random numbers, those of a GPU only where one is in use.

    `torch.manual_seed` looks for every kind of device, which takes longer than a small step should
    wait.
    """
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's stubs
        torch.cuda.manual_seed_all(number)

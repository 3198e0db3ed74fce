"""A PyTorch workload: a model, its optimizer, its samples and its loss, as one value; and variants.

Knows nothing about chips. `torch.utils.data.default_collate` turns samples into a batch.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from typing import Any, Final

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import default_collate

from meshmend.config import JobConfig, TrainingConfig
from meshmend.errors import InputError
from meshmend.lab.workloads.trainable import SampleSet, n_notes_of, resume_of, saving_of
from meshmend.planning.plan_request import SumSizes, tile_sum
from meshmend.processes import without_garbage
from meshmend.topology.text import parse_tile
from meshmend.train.data.samples import batch_of as step_batch
from meshmend.train.data.samples import share_of
from meshmend.train.sharding.layerwise import LAMB, LARS, layerwise_groups
from meshmend.train.sharding.sharded_optimizers import ShardedOptimizers
from meshmend.train.sharding.update_shares import DEFAULT_DOMAINS
from meshmend.train.state.state_tree import Framework
from meshmend.train.state.torch_state import TORCH
from meshmend.train.torch.gradients import Gradients
from meshmend.train.torch.job import Job
from meshmend.train.torch.learner import TorchLearner
from meshmend.train.torch.tile_job import TILE_AXES, TileJob

Batch = Sequence[torch.Tensor]
Shard = Callable[[torch.nn.Module, DeviceMesh], torch.nn.Module]
# The scores of a batch by name, such as "loss" and "accuracy"; each is a mean over its samples.
Scores = Mapping[str, torch.Tensor]

MAX_EVALUATED = 1024  # held-out samples; enough for the figures at the end of a run
_EVALUATION_BATCH = 64
_MOST_PRELOADED = 2_000_000  # parameters of a model whose first step a launcher computes


@dataclass(frozen=True)
class Workload:
    """A model to train on samples; `loss` and `scores` are means over the samples of a batch."""

    name: str
    dataset: SampleSet
    held_out: SampleSet
    new_model: Callable[[], torch.nn.Module]
    optimizer: Callable[[torch.nn.Module], torch.optim.Optimizer]
    scores: Callable[[torch.nn.Module, Batch], Scores]
    seed: int = 0
    shard: Shard | None = None  # spreads the model over the chips of a tile

    def model(self) -> torch.nn.Module:
        """Return a new model; every call, in every process, returns the same bits."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return self.new_model()

    def loss(self, model: torch.nn.Module, batch: Batch) -> torch.Tensor:
        """Return the loss that training minimises: a mean over the batch's samples."""
        return self.scores(model, batch)["loss"]

    def evaluate(self, model: torch.nn.Module) -> dict[str, float]:
        """Return the means of all scores over held-out samples; does not change the model."""
        n_samples = min(len(self.held_out), MAX_EVALUATED)
        totals: dict[str, float] = {}
        was_training = model.training
        model.eval()
        with torch.no_grad():
            for start in range(0, n_samples, _EVALUATION_BATCH):
                chosen = range(start, min(start + _EVALUATION_BATCH, n_samples))
                for name, mean in self.scores(model, batch_of(self.held_out, chosen)).items():
                    totals[name] = totals.get(name, 0.0) + mean.item() * len(chosen)
        model.train(was_training)
        return {name: total / n_samples for name, total in totals.items()}

    # What makes it a `Trainable`.

    @property
    def n_samples(self) -> int:
        """The number of samples to train on."""
        return len(self.dataset)

    @property
    def n_parameters(self) -> int:
        """The number of elements of all parameters."""
        return sum(parameter.numel() for parameter in self._inherited.parameters())

    @property
    def framework(self) -> Framework:
        """How its states become bytes."""
        return TORCH

    def preload(self, config: JobConfig, n_chips: Sequence[int]) -> None:
        """Import all that workers need; compute the first step of a small model.

        What PyTorch makes at its first use takes longer than a step, and again for each size of a
        share; workers inherit it. After a loss shares are larger, and 12 of 16 workers of a tiny
        ResNet would spend 8 ms each. A PyTorch that knows accelerators starts threads in a backward
        pass, which no fork inherits.
        """
        preload()
        if config.training.tile:
            preload_tiles()
        has_threads = any((torch.version.cuda, torch.version.hip, torch.version.xpu))
        if self.n_parameters > _MOST_PRELOADED or has_threads:
            return
        model = copy.deepcopy(self._inherited)
        for size in _share_sizes(config.training, n_chips, self.n_samples):
            batch = batch_of(self.dataset, range(size))
            torch.autograd.backward(self.loss(model, batch))
        self.optimizer(model).step()

    def sum_sizes(self, config: JobConfig, n_chips: int) -> SumSizes:
        """Return the sizes of the sums and gathers of a step of so many chips."""
        if config.training.tile:
            tile = parse_tile(config.training.tile)
            return self._tile_sums(tile, is_shared=config.sharding.optimizer)
        sums = Gradients(self._inherited, n_notes=n_notes_of(config)).sizes
        if not config.sharding.optimizer:
            return sums
        shared = ShardedOptimizers({"": self.optimizer(self._inherited)})
        return (*sums, *shared.sum_sizes(n_chips))

    def _tile_sums(self, tile: tuple[int, ...], *, is_shared: bool) -> SumSizes:
        """Return the sums between tiles: one for each block of the model, one for the rest.

        Where twins share the optimizer there is one more, by which they gather all new weights.
        """
        blocks = self._inherited.get_submodule("blocks").children()
        sizes = [sum(each.nbytes for each in block.parameters()) for block in blocks]
        rest = sum(each.nbytes for each in self._inherited.parameters()) - sum(sizes)
        gathered = [sum(sizes) + rest] if is_shared else []
        return tuple(dict.fromkeys(tile_sum(size, tile) for size in (*sizes, rest, *gathered)))

    def fresh_state(self) -> dict[str, Any]:
        """Return the training state before the first step, without its progress."""
        return TorchLearner(self._inherited, self.optimizer(self._inherited)).state()

    def train(self, config: JobConfig) -> Mapping[str, float]:
        """Run the loop of one worker; return the evaluation on the leader, and nothing elsewhere.

        Raises:
            InputError: the settings, or the checkpoint to resume, do not fit.
        """
        if config.training.tile:
            return self._train_on_tiles(config)
        what, model = config.training, self._inherited
        optimizer = self.optimizer(model)
        job = Job(
            model,
            optimizer,
            self.dataset,
            batch=what.batch,
            steps=what.steps,
            seed=what.seed,
            policy=what.batch_policy,
            saving=saving_of(config),
            resume=resume_of(config),
            shard_optimizer=config.sharding.optimizer,
            mirror_domains=config.sharding.mirror_domain or DEFAULT_DOMAINS,
            master_weights=what.master_weights,
        )
        if what.lr is not None:
            for group in optimizer.param_groups:
                group["lr"] = what.lr
        for batch in job:
            loss = self.loss(model, batch)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch's stubs
            job.step(loss)
        return self.evaluate(model) if job.is_leader else {}

    def _train_on_tiles(self, config: JobConfig) -> Mapping[str, float]:
        """Run the loop of one worker whose replica is a tile; its loss is all that is evaluated."""
        what, shard = config.training, self.shard
        assert shard is not None, f"{self.name} has no tiles"

        def build(mesh: DeviceMesh) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
            model = shard(copy.deepcopy(self._inherited), mesh)
            optimizer = self.optimizer(model)
            if what.lr is not None:
                for group in optimizer.param_groups:
                    group["lr"] = what.lr
            return model, optimizer

        job = TileJob(
            build,
            self.dataset,
            tile=what.tile,
            batch=what.batch,
            steps=what.steps,
            seed=what.seed,
            axes=("replicate", "shard", "tensor") if what.tensor_parallel else TILE_AXES,
            saving=saving_of(config),
            resume=resume_of(config),
            shard_optimizer=config.sharding.optimizer,
        )
        for step in job:
            with step as batch:
                loss = self.loss(job.model, batch)
                job.optimizer.zero_grad()
                step.backward(loss)
                job.optimizer.step()
        return {}

    @cached_property
    def _inherited(self) -> torch.nn.Module:
        """The model that the launcher makes once, and each worker inherits."""
        return self.model()


def _share_sizes(what: TrainingConfig, n_chips: Sequence[int], n_samples: int) -> list[int]:
    """Return how many samples the shares of a step may have; there are so many chips at times."""
    sizes = set()
    for n_live in n_chips:
        batch = step_batch(what.batch_policy, what.batch, n_live, n_chips[0])
        sizes |= {share_of(0, batch, rank, n_live).n_samples for rank in range(n_live)}
    return sorted({min(size, n_samples) for size in sizes} - {0})


@without_garbage()
def preload() -> None:
    """Import all that workloads need, so that processes forked from this one start faster.

    The first optimizer of a process imports torch's compiler, which takes 1.5 s. Without this
    function each forked process would spend that time again.

    Raises:
        InputError: a package is missing, or does not load beside the others.
    """
    for name in ("resnet.modeling_resnet", "bert.modeling_bert"):
        _import(f"transformers.models.{name}")
    _import("sklearn.datasets")
    torch.optim.SGD([torch.zeros(1)])


def _import(name: str) -> None:
    try:
        import_module(name)
    except Exception as error:  # packages that do not fit each other raise whatever they find
        package = name.partition(".")[0]
        raise InputError(
            f"the workloads need {package}, but it does not load here: {type(error).__name__}: "
            f"{' '.join(str(error).split())}; try: python -c 'import {name}'"
        ) from error


def preload_tiles() -> None:
    """Import what spreads a model over the chips of a tile, so that workers need not."""
    for name in ("fsdp", "tensor.parallel"):
        import_module(f"torch.distributed.{name}")


def batch_of(samples: SampleSet, indices: Sequence[int]) -> Batch:
    """Return the samples with these indices, stacked."""
    batch: Batch = default_collate([samples[index] for index in indices])
    return batch


_IN_FLOAT32: Final = (torch.nn.BatchNorm2d, torch.nn.GroupNorm, torch.nn.LayerNorm)


def with_bfloat16(workload: Workload) -> Workload:
    """Return a workload with its model's weights, and the samples that it sees, in bfloat16.

    It takes half of the memory, and of the bytes to gather. Normalisations keep float32: their
    statistics need it, and PyTorch computes them so.
    """

    def model() -> torch.nn.Module:
        made = workload.new_model()
        for module in made.modules():
            if not isinstance(module, _IN_FLOAT32):
                for parameter in module.parameters(recurse=False):
                    parameter.data = parameter.data.bfloat16()
        return made

    return replace(
        workload,
        name=f"{workload.name}, in bfloat16",
        new_model=model,
        scores=_on_bfloat16(workload.scores),
    )


def _on_bfloat16(
    scores: Callable[[torch.nn.Module, Batch], Scores],
) -> Callable[[torch.nn.Module, Batch], Scores]:
    def on_bfloat16(model: torch.nn.Module, batch: Batch) -> Scores:
        return scores(
            model, [each.bfloat16() if each.is_floating_point() else each for each in batch]
        )

    return on_bfloat16


# The optimizers of `meshmend train --optimizer`, with usual learning rates.
_MAKERS: Final[dict[str, Callable[[torch.nn.Module], torch.optim.Optimizer]]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3),
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3),
    "lars": lambda model: LARS(layerwise_groups(model), lr=1.0),
    "lamb": lambda model: LAMB(layerwise_groups(model), lr=1e-2),
}


def with_optimizer(workload: Workload, name: str) -> Workload:
    """Return a workload with another optimizer; it keeps its own if that has this name."""
    own = workload.optimizer

    def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        mine: Any = own(model)
        is_own = type(mine).__name__.lower() == name
        return mine if is_own else _MAKERS[name](model)

    return replace(workload, optimizer=optimizer)

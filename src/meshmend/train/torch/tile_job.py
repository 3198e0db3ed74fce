"""A training job whose replicas are tiles of several chips, each with a part of the model.

    def build(mesh):  # axes: "replicate", from tile to tile, and "shard", inside a tile
        model = fully_shard(GPT(), mesh=mesh)
        return model, torch.optim.AdamW(model.parameters())

    job = TileJob(build, dataset, tile="2x2", batch=64, steps=1000)
    for step in job:
        with step as (inputs, labels):
            loss = cross_entropy(job.model(inputs), labels)
            job.optimizer.zero_grad()
            step.backward(loss)
            job.optimizer.step()

It is the elastic process group with samples: each chip gets its share of a step's samples, and no
sample is lost or used twice. If the mesh changes in a step, what the step did is undone, the model
is made anew on other tiles, and the next turn of the loop hands out the new share of the same step.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from types import TracebackType
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh

from meshmend.errors import InputError, hides_frames
from meshmend.torch.call_arguments import dist
from meshmend.torch.tile_groups import tiles
from meshmend.train.core.worker_environment import worker_environment
from meshmend.train.data.sample_source import JobData
from meshmend.train.data.samples import Indices, Order, Share, share_of
from meshmend.train.state.checkpoint import Saving
from meshmend.train.state.fingerprint import sample_words
from meshmend.train.state.resume import Resume
from meshmend.train.state.torch_state import TORCH
from meshmend.train.torch.elastic_group import ElasticGroup, elastic_group, retrying
from meshmend.train.torch.job import seed_step
from meshmend.train.torch.job_record import JobRecord, SampleTerms
from meshmend.train.torch.loop_state import Stateful

TILE_AXES = ("replicate", "shard")
BuildOn = Callable[[DeviceMesh], Sequence[Stateful]]


class TileJob:
    """One chip's part in training a model that is spread over the chips of a tile.

    `build(mesh)` makes the model on the tiles of the present generation, and returns it, its
    optimizer, and what else changes from step to step. The data set has `len()` and `[]`, or is a
    `DataLoader` around one. A step uses `batch` samples over all chips together. They are shared
    along the first two axes of the mesh; chips along a third one, such as "tensor", see the same.
    `saving` writes checkpoints of the whole model, each part once. With `resume`, a folder of them
    or "auto", the job begins with the newest one, whatever tiles it was written with. With
    `shard_optimizer`, chips with the same part share the optimizer's state of it, each kept twice.
    """

    @hides_frames
    def __init__(
        self,
        build: BuildOn,
        dataset: Any,
        *,
        tile: str,
        steps: int,
        batch: int | None = None,
        seed: int = 0,
        policy: str = "constant",
        axes: Sequence[str] = TILE_AXES,
        collate: Callable[[list[Any]], Any] | None = None,
        saving: Saving | None = None,
        resume: Resume = None,
        shard_optimizer: bool = False,
    ) -> None:
        if policy != "constant":
            raise InputError(
                f'a job with tiles needs policy="constant", but got {policy!r}: chips that leave '
                "and return would change the batch by whole tiles; leave it out"
            )
        data = JobData(dataset, collate)
        if data.n_samples is None:
            raise InputError("TileJob needs a data set with len() and [], but got a stream")
        if shard_optimizer and saving is not None and len(axes) > len(TILE_AXES):
            raise InputError(
                "a job with tiles that saves what shard_optimizer shares needs two axes, but got "
                f"{list(axes)}; leave out saving, shard_optimizer or the third axis"
            )
        self._make, self._tile, self._axes = build, tile, tuple(axes)
        self._shards_optimizer = shard_optimizer
        self._saving, self._resume = saving, resume
        self._record: JobRecord | None = None
        self.steps, self.batch, self.seed = steps, data.batch_size(batch), seed
        self._order = Order(data.n_samples, seed)
        self._source = data.source(self._order)
        self._sample_words = partial(sample_words, self._source, TORCH.packed)
        self.mesh: DeviceMesh | None = None

    @property
    def model(self) -> Any:
        """The model of the present generation: the first object that `build` has returned."""
        return elastic_group().objects[0]

    @property
    def optimizer(self) -> Any:
        """Its optimizer: the second one."""
        return elastic_group().objects[1]

    @property
    def step_number(self) -> int:
        """The number of steps done."""
        return elastic_group().step_number

    @property
    def is_leader(self) -> bool:
        """Whether this chip has rank 0 now: one chip of those that train."""
        return not dist.is_initialized() or bool(dist.get_rank() == 0)

    @property
    def loss(self) -> float:
        """The mean loss of the last step over the samples of all chips."""
        return self._record.loss if self._record is not None else 0.0

    def __iter__(self) -> Iterator["TileStep"]:
        """Yield one step after another, until all are done on all chips.

        Raises:
            InputError: a model does not fit its tile, or there are fewer samples than chips.
            JobFailedError: no chips have all parts of a state to go on from.
        """
        if self._saving is not None and worker_environment().identity is None:
            raise InputError(
                "TileJob(saving=...) needs a job of meshmend run --elastic, but this process was "
                "started without it; add --elastic, or save with torch.distributed.checkpoint"
            )
        if not dist.is_initialized():
            dist.init_process_group("meshmend")
        group = elastic_group()
        terms = SampleTerms(self._order, self.batch, self.steps, self._sample_words)
        record = self._record = JobRecord(worker_environment(), terms, self._saving, self._resume)
        shares = self._shards_optimizer
        group.use_built(self._build, self._tile, shard_optimizer=shares, record=record)
        group.enter()
        try:
            for _ in group.steps(self.steps):
                step = TileStep(self, group, record)
                yield step
                if not step.is_begun:
                    raise InputError(
                        "the loop over a TileJob needs 'with step as batch' in each turn"
                    )
        finally:
            self._source.close()

    def samples(self, share: Share) -> tuple[Indices, Any]:
        """Return which samples a share has, and their batch."""
        n_left = self.steps - self.step_number
        return self._order.samples(share.start, share.stop), self._source.batch(share, n_left)

    def _build(self) -> Sequence[Stateful]:
        self.mesh = tiles(self._tile, self._axes)
        made = self._make(self.mesh)
        for each in made:
            if isinstance(each, torch.nn.Module):
                check_on_all_tiles(each, self.mesh)
        return made

    def share(self) -> tuple[Share, int, bool]:
        """Return this chip's share, how many there are, and whether this chip answers for it."""
        mesh = self.mesh
        assert mesh is not None
        at, inside, *others = cast("tuple[int, ...]", mesh.get_coordinate())
        n_shares = mesh.size(0) * mesh.size(1)
        if self.batch < n_shares:
            raise InputError(
                f"a job with tiles needs a sample for each chip, but got batch={self.batch} for "
                f"{n_shares} chips; take a larger batch"
            )
        assert self._record is not None
        place, position = at * mesh.size(1) + inside, self._record.position(self.step_number)
        return share_of(position, self.batch, place, n_shares), n_shares, not any(others)


class TileStep(AbstractContextManager[Any]):
    """One step of a `TileJob`: `with step as batch` gives this chip's samples.

    If the mesh changes in the block, nothing is raised: the step is undone and comes again.
    """

    def __init__(self, job: TileJob, group: ElasticGroup, record: JobRecord) -> None:
        self._job, self._group, self._record = job, group, record
        self._share, self._n_shares, self._is_first = Share(0, 0), 1, True
        self._trying = retrying()
        self.is_begun = False

    def __enter__(self) -> Any:
        self.is_begun = True
        self._trying.__enter__()
        share, self._n_shares, self._is_first = self._job.share()
        samples, batch = self._job.samples(share)
        self._share = share
        if not self._is_first:  # another chip has the same samples, and answers for them
            share, samples = Share(share.start, share.start, share.batch), samples[:0]
        self._group.use_samples(share, samples)
        seed_step(hash((self._job.seed, self._group.step_number, share.start)) & 0x7FFFFFFF)
        return batch

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        return self._trying.__exit__(kind, error, traceback)

    def backward(self, loss: torch.Tensor) -> None:
        """Compute gradients; the loss is a mean over this chip's samples.

        Chips have shares of different sizes, of which PyTorch knows nothing when it takes the mean
        over them. So each loss is weighed by its share here, before gradients are summed.
        """
        share = self._share
        part = share.n_samples / share.batch
        if self._is_first:
            self._record.own_loss += loss.item() * part
        (loss * (part * self._n_shares)).backward()  # type: ignore[no-untyped-call]  # torch's stubs


def check_on_all_tiles(model: torch.nn.Module, mesh: DeviceMesh) -> None:
    """Raise InputError if gradients of a parameter would not be summed between the tiles."""
    between = (mesh.mesh_dim_names or ("",))[0]
    for name, parameter in model.named_parameters():
        where = getattr(parameter, "device_mesh", None)
        axes = () if where is None else where.mesh_dim_names or ()
        if parameter.requires_grad and between not in axes:
            what = "on each chip" if where is None else f"on {where.size()} chips"
            raise InputError(
                f"a job with tiles needs every parameter on the mesh of all tiles, but {name} is "
                f"{what}, and its gradients would not be summed; use fully_shard(model, mesh=mesh) "
                "with the mesh that build gets"
            )

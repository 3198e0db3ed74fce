"""The process group: collectives on our schedules, everything else through an inner Gloo group.

Rank i is the i-th live chip of the mesh. What the schedules do not support goes to Gloo as well:
tensors on a device that the transport does not serve, and uncommon element types and operations. A
group over only some of the ranks is a plain Gloo group.
"""

import os
from dataclasses import replace
from typing import Any

import torch
import torch.distributed

from meshmend.errors import InputError, TransportError
from meshmend.execute.combine import DTYPES
from meshmend.execute.transport import Task
from meshmend.planning.catalogue import Catalogue, CollectiveCall
from meshmend.planning.environment import settings_from
from meshmend.planning.settings import Settings
from meshmend.topology.mesh import Mesh
from meshmend.torch.progress_thread import Progress
from meshmend.torch.transports import transport_of
from meshmend.variables import COORDINATOR, FAIL, MESH

# torch's stubs lack half of what c10d offers to a backend, so it is untyped here.
dist: Any = torch.distributed

ALLREDUCE, REDUCE_SCATTER, ALL_GATHER = (
    CollectiveCall("allreduce"),
    CollectiveCall("reduce-scatter"),
    CollectiveCall("all-gather"),
)

_FINISH_S = 1.0

# A ReduceOp compares equal to these, but has another hash.
_OP_NAMES = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "sum"),
    (dist.ReduceOp.PRODUCT, "product"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
)


def create_group(options: Any, settings: Settings | None = None) -> Any:
    """Return the backend that `init_process_group("meshmend")` asks for.

    Raises:
        InputError: the mesh is not known, or has more or fewer live chips than there are ranks.
    """
    settings = settings or settings_from(os.environ)
    inner = dist.ProcessGroupGloo(
        dist.PrefixStore("gloo", options.store),
        options.group_rank,
        options.group_size,
        options.timeout,
    )
    if dist.is_initialized() and options.group_size != dist.get_world_size():
        return inner
    if options.group_size == 1 and COORDINATOR.value_in(os.environ):
        settings = replace(settings, mesh=Mesh((1,)))  # a worker that has not joined its job yet
    check_world(settings.mesh, options.group_size)
    return MeshmendGroup(options, settings, inner)


def check_world(mesh: Mesh, world_size: int) -> None:
    """Raise InputError unless there is one worker for each live chip."""
    if mesh.n_live != world_size:
        raise InputError(
            f"the backend meshmend needs one worker for each of the {mesh.n_live} live chips of "
            f"{mesh}, but the world size is {world_size}; start {mesh.n_live} workers or describe "
            f"another mesh in {MESH.name} and {FAIL.name}"
        )


class MeshmendGroup(dist.ProcessGroup):  # type: ignore[misc]  # untyped
    """One rank of a process group over a mesh."""

    def __init__(self, options: Any, settings: Settings, inner: Any) -> None:
        mesh, rank = settings.mesh, options.group_rank
        super().__init__(rank, mesh.n_live)
        self.settings = settings
        self._timeout_s = options.timeout.total_seconds()
        self.failure: TransportError | None = None  # of the first collective that failed
        self._gloo = inner
        # c10d sends every collective that is not overridden below to this Gloo group.
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, inner)
        self._transport = transport_of(options, settings)
        self._catalogue = Catalogue(mesh, settings.algorithm, settings.n_slices, rank)
        self._progress = Progress(f"meshmend-rank-{rank}")

    def getBackendName(self) -> str:  # noqa: N802  # c10d's name
        """Return the name that `init_process_group` was given."""
        return "meshmend"

    def allreduce(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """Replace each rank's tensor by the sum (mean, product, minimum, maximum) over ranks."""
        opts = opts or dist.AllreduceOptions()
        if not self._supports(tensors, opts.reduceOp):
            return self._gloo.allreduce(tensors, opts)

        def run() -> None:
            for tensor in tensors:
                flat = tensor.contiguous().view(-1)
                self._sum(ALLREDUCE, flat, opts.reduceOp)
                _average(flat, opts.reduceOp, self.size())
                _copy_back(tensor, flat)

        return self._progress.submit(run, tensors)

    def allreduce_coalesced(self, tensors: list[torch.Tensor], opts: Any = None) -> Any:
        """Do what `allreduce` does, for several tensors."""
        plain = dist.AllreduceOptions()
        plain.reduceOp = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        if not self._supports(tensors, plain.reduceOp):
            return self._gloo.allreduce_coalesced(tensors, opts)
        return self.allreduce(tensors, plain)

    def broadcast(self, tensors: list[torch.Tensor], opts: Any) -> Any:
        """Replace each rank's tensor by that of the root."""
        if not self._supports(tensors):
            return self._gloo.broadcast(tensors, opts)
        kind = CollectiveCall("broadcast", opts.rootRank)

        def run() -> None:
            for tensor in tensors:
                flat = tensor.contiguous().view(-1)
                self._move(kind, flat)
                _copy_back(tensor, flat)

        return self._progress.submit(run, tensors)

    def barrier(self, opts: Any = None, **_: Any) -> Any:
        """Return a handle that is done when every rank has called this."""
        device = self._transport.device_type
        return self.allreduce([torch.zeros(1, dtype=torch.uint8, device=device)])

    def allgather(
        self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        """Write the input of rank i to `outputs[0][i]`."""
        if not self._supports(inputs) or not _are_alike(outputs[0], inputs[0]):
            return self._gloo.allgather(outputs, inputs, opts or dist.AllgatherOptions())

        def run() -> None:
            gathered = inputs[0].new_empty(self.size() * inputs[0].numel())
            self._gather(gathered, inputs[0])
            for part, output in zip(gathered.chunk(self.size()), outputs[0], strict=False):
                output.copy_(part.view(output.shape))

        return self._progress.submit(run, outputs)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:  # noqa: A002  # c10d's name
        """Write the input of rank i to part i of `output`."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        """Do what `all_gather_single` does, for several tensors."""
        opts = opts or dist.AllgatherOptions()
        if not self._supports([*inputs, *outputs]):
            return self._gloo.all_gather_single_coalesced(outputs, inputs, opts)
        _check_parts(outputs, inputs, self.size())

        def run() -> None:
            for output, mine in zip(outputs, inputs, strict=True):
                flat = output.contiguous().view(-1)
                self._gather(flat, mine)
                _copy_back(output, flat)

        return self._progress.submit(run, outputs)

    def reduce_scatter(
        self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]], opts: Any = None
    ) -> Any:
        """Write to `outputs[0]` the sum over all ranks of their inputs for this rank."""
        opts = opts or dist.ReduceScatterOptions()
        if not self._supports([*outputs, *inputs[0]], opts.reduceOp) or not _are_alike(
            inputs[0], outputs[0]
        ):
            return self._gloo.reduce_scatter(outputs, inputs, opts)

        def run() -> None:
            given = torch.cat([part.reshape(-1) for part in inputs[0]])
            self._scatter(outputs[0], given, opts.reduceOp)

        return self._progress.submit(run, outputs)

    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002  # c10d's name
        opts: Any = None,
    ) -> Any:
        """Write to `output` the sum over all ranks of this rank's part of their inputs."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], opts: Any = None
    ) -> Any:
        """Do what `reduce_scatter_single` does, for several tensors."""
        opts = opts or dist.ReduceScatterOptions()
        if not self._supports([*inputs, *outputs], opts.reduceOp):
            return self._gloo.reduce_scatter_single_coalesced(outputs, inputs, opts)
        _check_parts(inputs, outputs, self.size())

        def run() -> None:
            for output, given in zip(outputs, inputs, strict=True):
                self._scatter(output, given.flatten().clone(), opts.reduceOp)

        return self._progress.submit(run, outputs)

    # The names of these methods before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def shutdown(self) -> None:
        """Wait a second for running collectives, interrupt the rest, and close all connections."""
        if not self._progress.finish(_FINISH_S):
            self._transport.interrupt()
            self._progress.finish(_FINISH_S)
        self._transport.close()

    def abort(self) -> None:
        """Interrupt every collective under way: each ends with an error."""
        self._transport.interrupt()

    def _supports(self, tensors: list[torch.Tensor], op: Any = None) -> bool:
        """Whether our schedules support this operation on these tensors.

        Without an operation the tensors are only copied, so any element type is supported.
        """
        return all(
            tensor.device.type == self._transport.device_type
            and tensor.layout is torch.strided
            and (op is None or (_op_name(op) and _dtype_name(tensor) in DTYPES))
            for tensor in tensors
        )

    def _gather(self, gathered: torch.Tensor, mine: torch.Tensor) -> None:
        """Fill a flat tensor with the parts of all ranks; `mine` is the part of this rank."""
        gathered.view(self.size(), -1)[self.rank()].copy_(mine.reshape(-1))
        self._move(ALL_GATHER, gathered)

    def _scatter(self, output: torch.Tensor, given: torch.Tensor, op: Any) -> None:
        """Sum the flat tensors of all ranks into `given`; copy this rank's part to `output`."""
        self._sum(REDUCE_SCATTER, given, op)
        mine = given.view(self.size(), -1)[self.rank()]
        _average(mine, op, self.size())
        output.copy_(mine.view(output.shape))

    def _sum(self, kind: CollectiveCall, flat: torch.Tensor, op: Any) -> None:
        task = self._catalogue.task(kind, flat.numel(), _dtype_name(flat), _op_name(op))
        self._run(task, flat.detach())

    def _move(self, kind: CollectiveCall, flat: torch.Tensor) -> None:
        """Run a collective that only copies: it treats elements of any type as bytes."""
        raw = flat.detach().view(torch.uint8)
        task = self._catalogue.task(kind, raw.numel(), "uint8")
        self._run(task, raw)

    def _run(self, task: Task, flat: torch.Tensor) -> None:
        try:
            self._transport.run(task, flat, timeout_s=self._timeout_s)
        except TransportError as error:
            self.failure = self.failure or error
            raise


def _are_alike(tensors: list[torch.Tensor], like: torch.Tensor) -> bool:
    return all(part.shape == like.shape and part.dtype == like.dtype for part in tensors)


def _check_parts(wholes: list[torch.Tensor], parts: list[torch.Tensor], n_ranks: int) -> None:
    for whole, part in zip(wholes, parts, strict=True):
        if whole.numel() != n_ranks * part.numel() or whole.dtype != part.dtype:
            raise InputError(
                f"a tensor that is shared out over {n_ranks} ranks needs {n_ranks} times the "
                f"elements of a part, but got {tuple(whole.shape)} of {whole.dtype} and "
                f"{tuple(part.shape)} of {part.dtype}"
            )


def _op_name(op: Any) -> str:
    """Return the name of an operation in `combine`, or an empty text if it has none."""
    return next((name for known, name in _OP_NAMES if op == known), "")


def _dtype_name(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _average(flat: torch.Tensor, op: Any, n_ranks: int) -> None:
    if op == dist.ReduceOp.AVG:
        flat.div_(n_ranks, rounding_mode=None if flat.is_floating_point() else "trunc")


def _copy_back(tensor: torch.Tensor, flat: torch.Tensor) -> None:
    if flat.data_ptr() != tensor.data_ptr():
        tensor.copy_(flat.view(tensor.shape))

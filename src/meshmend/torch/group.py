"""The process group: collectives on our schedules, everything else through an inner Gloo group.

Rank i is the i-th live chip of the mesh. What the schedules do not support goes to Gloo as well:
tensors on a device that the transport does not serve, and uncommon element types and operations.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.compiler
import torch.distributed

from meshmend.errors import TransportError
from meshmend.execute.transport import Task
from meshmend.planning.catalogue import Catalogue, CollectiveCall
from meshmend.planning.settings import Settings
from meshmend.topology.failures import Chip
from meshmend.torch.call_arguments import (
    are_alike,
    as_list,
    average,
    c10d,
    can_combine,
    check_parts,
    copy_back,
    dist,
    dtype_name,
    op_name,
    options_of,
)
from meshmend.torch.profiler_range import begin_range
from meshmend.torch.progress_thread import Progress, Rest, Starter
from meshmend.torch.transports import transport_of

ALLREDUCE, REDUCE_SCATTER, ALL_GATHER = (
    CollectiveCall("allreduce"),
    CollectiveCall("reduce-scatter"),
    CollectiveCall("all-gather"),
)

_FINISH_S = 1.0

Tensors = list[torch.Tensor]

# Dynamo cannot trace methods of a process group that are written in Python, so it calls them.
_untraced: Any = torch.compiler.disable


class MeshmendGroup(dist.ProcessGroup):  # type: ignore[misc]  # untyped
    """One rank of a process group over a mesh.

    Messages call rank i by the chip `chips[i]`, which may have another place in the settings' mesh.
    """

    def __init__(self, options: Any, settings: Settings, inner: Any, chips: Sequence[Chip]) -> None:
        mesh, rank = settings.mesh, options.group_rank
        super().__init__(rank, mesh.n_live)  # c10d gives only its own class a store
        self.settings = settings
        self._store = options.store
        self.failure: TransportError | None = None  # of the first collective that failed
        self._gloo = inner
        # A group that is all Gloo: it has every method in every form.
        self._fallback = dist.ProcessGroup(options.store, rank, mesh.n_live)
        for group in (self, self._fallback):
            # c10d sends what is not overridden below to this Gloo group.
            for device in ("cpu", "cuda"):
                group._register_backend(
                    torch.device(device), dist.ProcessGroup.BackendType.GLOO, inner
                )
            group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._n_submitted = 0
        self._transport = transport_of(options, settings, chips)
        self._catalogue = Catalogue(mesh, settings.planned_algorithm, settings.n_slices, rank)
        self._progress = Progress(f"meshmend-rank-{rank}")

    def getBackendName(self) -> str:  # noqa: N802  # c10d's name
        """Return the name that `init_process_group` was given."""
        return "meshmend"

    def get_group_store(self) -> Any:
        """Return the store of this group's ranks."""
        return self._store

    @_untraced
    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> Any:
        """Replace each rank's tensor by the sum (mean, product, minimum, maximum) over ranks."""
        given = op if opts is None else opts
        tensors, opts = as_list(tensors), options_of(dist.AllreduceOptions, given, timeout)
        if not self._supports(tensors, opts.reduceOp):
            return self._fallback.allreduce(tensors, opts)
        return self._all_reduce("all_reduce", tensors, opts)

    @_untraced
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        """Do what `allreduce` does, for several tensors."""
        opts = options_of(dist.AllreduceCoalescedOptions, opts)
        if not self._supports(tensors, opts.reduceOp):
            return self._fallback.allreduce_coalesced(tensors, opts)
        return self._all_reduce("all_reduce", tensors, opts)

    @_untraced
    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, root: int = 0
    ) -> Any:
        """Replace each rank's tensor by that of the root."""
        given = root if opts is None else opts
        tensors, opts = as_list(tensors), options_of(dist.BroadcastOptions, given, timeout)
        if not self._supports(tensors):
            return self._fallback.broadcast(tensors, opts)
        kind = CollectiveCall("broadcast", opts.rootRank)

        def run() -> None:
            for tensor in tensors:
                flat = tensor.contiguous().view(-1)
                self._move(kind, flat, opts)
                copy_back(tensor, flat)

        return self._submit("broadcast", kind, run, tensors, tensors)

    @_untraced
    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Return a handle that is done when every rank has called this."""
        opts = options_of(dist.BarrierOptions, opts, timeout)
        sum_opts = options_of(dist.AllreduceOptions, None, opts.timeout)
        token = torch.zeros(1, dtype=torch.uint8, device=self._transport.device_type)
        return self._all_reduce("barrier", [token], sum_opts)

    @_untraced
    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Any:
        """Write the input of rank i to `outputs[0][i]`."""
        opts = options_of(c10d.AllgatherOptions, opts, timeout)
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        if not self._supports(inputs) or not are_alike(outputs[0], inputs[0]):
            return self._fallback.allgather(outputs, inputs, opts)
        mine, parts = inputs[0], outputs[0]

        def run() -> None:
            gathered = mine.new_empty(self.size() * mine.numel())
            self._gather(gathered, mine, opts)
            for part, output in zip(gathered.chunk(self.size()), parts, strict=False):
                output.copy_(part.view(output.shape))

        return self._submit("all_gather", ALL_GATHER, run, inputs, parts)

    @_untraced
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:  # noqa: A002  # c10d's name
        """Write the input of rank i to part i of `output`."""
        return self._all_gather_single("_allgather_base", [output], [input], opts)

    @_untraced
    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        """Do what `all_gather_single` does, for several tensors."""
        return self._all_gather_single("allgather_into_tensor_coalesced", outputs, inputs, opts)

    @_untraced
    def reduce_scatter(
        self,
        outputs: Any,
        inputs: Any,
        opts: Any = None,
        timeout: timedelta | None = None,
        *,
        op: Any = None,
    ) -> Any:
        """Write to `outputs[0]` the sum over all ranks of their inputs for this rank."""
        given = op if opts is None else opts
        opts = options_of(dist.ReduceScatterOptions, given, timeout)
        if isinstance(outputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        mine, parts = outputs[0], inputs[0]
        if not self._supports([mine, *parts], opts.reduceOp) or not are_alike(parts, mine):
            return self._fallback.reduce_scatter(outputs, inputs, opts)

        def run() -> None:
            given = torch.cat([part.reshape(-1) for part in parts])
            self._scatter(mine, given, opts)

        return self._submit("reduce_scatter", REDUCE_SCATTER, run, parts, outputs)

    @_untraced
    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002  # c10d's name
        opts: Any = None,
    ) -> Any:
        """Write to `output` the sum over all ranks of this rank's part of their inputs."""
        return self._reduce_scatter_single("_reduce_scatter_base", [output], [input], opts)

    @_untraced
    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        """Do what `reduce_scatter_single` does, for several tensors."""
        return self._reduce_scatter_single("reduce_scatter_tensor_coalesced", outputs, inputs, opts)

    # c10d would send these to Gloo itself, but with the interpreter's lock held. Gloo's threads may
    # then wait for that lock while they hold one that Gloo needs to start a collective.
    @_untraced
    def all_to_all_single(self, *arguments: Any, **options: Any) -> Any:
        """Send part i of the input to rank i, through Gloo."""
        return self._fallback.all_to_all_single(*arguments, **options)

    @_untraced
    def send(self, *arguments: Any, **options: Any) -> Any:
        """Send tensors to one rank, through Gloo."""
        return self._fallback.send(*arguments, **options)

    @_untraced
    def recv(self, *arguments: Any, **options: Any) -> Any:
        """Receive tensors from one rank, through Gloo."""
        return self._fallback.recv(*arguments, **options)

    # The names of these methods before torch 2.13.
    _allgather_base = all_gather_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    def _set_sequence_number_for_group(self) -> None:
        """Do nothing: as with Gloo, sequence numbers begin at 0 on every rank."""

    def _get_sequence_number_for_group(self) -> int:
        """Return how many collectives this rank has called, on our schedules or on Gloo."""
        return self._n_submitted + int(self._gloo._get_sequence_number_for_group())

    def shutdown(self) -> None:
        """Wait a second for running collectives, interrupt the rest, and close all connections."""
        if not self._progress.finish(_FINISH_S):
            self._transport.interrupt()
            self._progress.finish(_FINISH_S)
        self._transport.close()

    def abort(self) -> None:
        """Interrupt every collective under way: each ends with an error."""
        self._transport.interrupt()

    def _all_reduce(self, name: str, tensors: Tensors, opts: Any) -> Any:
        def start() -> Rest:
            flats = [tensor.contiguous().view(-1) for tensor in tensors]
            waits = [self._start_sum(ALLREDUCE, flat, opts) for flat in flats]

            def rest() -> None:
                for tensor, flat, wait in zip(tensors, flats, waits, strict=True):
                    wait()
                    average(flat, opts.reduceOp, self.size())
                    copy_back(tensor, flat)

            return rest

        return self._submit(name, ALLREDUCE, start, tensors, tensors)

    def _all_gather_single(self, name: str, outputs: Tensors, inputs: Tensors, opts: Any) -> Any:
        opts = options_of(c10d.AllgatherOptions, opts)
        if not self._supports([*inputs, *outputs]):
            return self._fallback.all_gather_single_coalesced(outputs, inputs, opts)
        check_parts(outputs, inputs, self.size())

        def run() -> None:
            for output, mine in zip(outputs, inputs, strict=True):
                flat = output.contiguous().view(-1)
                self._gather(flat, mine, opts)
                copy_back(output, flat)

        return self._submit(name, ALL_GATHER, run, inputs, outputs)

    def _reduce_scatter_single(
        self, name: str, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> Any:
        opts = options_of(dist.ReduceScatterOptions, opts)
        if not self._supports([*inputs, *outputs], opts.reduceOp):
            return self._fallback.reduce_scatter_single_coalesced(outputs, inputs, opts)
        check_parts(inputs, outputs, self.size())

        def run() -> None:
            for output, given in zip(outputs, inputs, strict=True):
                self._scatter(output, given.flatten().clone(), opts)

        return self._submit(name, REDUCE_SCATTER, run, inputs, outputs)

    def _submit(
        self,
        name: str,
        kind: CollectiveCall,
        run: Starter,
        inputs: Tensors,
        result: Tensors,
    ) -> Any:
        """Run a collective in the progress thread; return its handle."""
        self._n_submitted += 1

        def algorithm() -> str:
            n_bytes = sum(tensor.nbytes for tensor in inputs)
            n_parts = self.size() if kind == ALL_GATHER else 1
            return self._catalogue.algorithm(kind, n_bytes * n_parts)

        end_with = begin_range(name, inputs, algorithm)
        return self._progress.submit(f"{name} on rank {self.rank()}", run, result, end_with)

    def _supports(self, tensors: Tensors, op: Any = None) -> bool:
        """Whether our schedules support this operation on these tensors.

        Without an operation the tensors are only copied, so any element type is supported.
        """
        return all(
            tensor.device.type == self._transport.device_type
            and tensor.layout is torch.strided
            and (op is None or can_combine(tensor, op))
            for tensor in tensors
        )

    def _gather(self, gathered: torch.Tensor, mine: torch.Tensor, opts: Any) -> None:
        """Fill a flat tensor with the parts of all ranks; `mine` is the part of this rank."""
        gathered.view(self.size(), -1)[self.rank()].copy_(mine.reshape(-1))
        self._move(ALL_GATHER, gathered, opts)

    def _scatter(self, output: torch.Tensor, given: torch.Tensor, opts: Any) -> None:
        """Sum the flat tensors of all ranks into `given`; copy this rank's part to `output`."""
        self._start_sum(REDUCE_SCATTER, given, opts)()
        mine = given.view(self.size(), -1)[self.rank()]
        average(mine, opts.reduceOp, self.size())
        output.copy_(mine.view(output.shape))

    def _start_sum(self, kind: CollectiveCall, flat: torch.Tensor, opts: Any) -> Rest:
        op = op_name(opts.reduceOp)
        task = self._catalogue.task(kind, flat.numel(), dtype_name(flat), op)
        return self._start(task, flat.detach(), opts.timeout)

    def _move(self, kind: CollectiveCall, flat: torch.Tensor, opts: Any) -> None:
        """Run a collective that only copies: it treats elements of any type as bytes."""
        raw = flat.detach().view(torch.uint8)
        self._start(self._catalogue.task(kind, raw.numel(), "uint8"), raw, opts.timeout)()

    def _start(self, task: Task, flat: torch.Tensor, timeout: timedelta) -> Rest:
        """Start a task in place; without a timeout of its own, that of the group applies."""
        if timeout <= timedelta(0):
            timeout = self._gloo.options._timeout
        timeout_s = timeout.total_seconds()
        began = time.monotonic()
        with self._noted_failure(began, timeout_s):
            wait = self._transport.start(task, flat, timeout_s=timeout_s)

        def rest() -> None:
            with self._noted_failure(began, timeout_s):
                wait()

        return rest

    @contextmanager
    def _noted_failure(self, began: float, timeout_s: float) -> Iterator[None]:
        """Note the first failure; say in an error that the timeout is over, if it is."""
        try:
            yield
        except TransportError as error:
            self.failure = self.failure or error
            if time.monotonic() - began < timeout_s:
                raise
            raise type(error)(
                f"{error}: the timeout of {timeout_s:g} s is over", error.rank
            ) from None

"""The process group: collectives on our schedules, everything else through an inner Gloo group.

Rank i is the i-th live chip of the mesh. What the schedules do not support goes to Gloo as well:
tensors on a device that the transport does not serve, uncommon element types and operations,
several tensors on one rank, and arguments that do not fit, which Gloo refuses.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.autograd
import torch.compiler
import torch.distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

from meshmend.errors import ReconfigureError, StoppedError, TransportError
from meshmend.planning.catalogue import AUTO_ON_ONE_HOST, Catalogue, CollectiveCall
from meshmend.planning.plan_request import SumSizes
from meshmend.planning.settings import Settings
from meshmend.topology.mesh import Mesh
from meshmend.torch.call_arguments import (
    are_alike,
    are_of_one_type,
    as_list,
    average,
    c10d,
    can_combine,
    check_parts,
    copy_back,
    dist,
    dtype_name,
    flat_tensors,
    op_name,
    options_of,
)
from meshmend.torch.late_gloo import LateGloo, group_on, run_on
from meshmend.torch.progress_thread import Progress, Rest, Starter
from meshmend.torch.transports import NO_DEVICE, TensorTransport
from meshmend.transport.tasks import Task

Future = torch.futures.Future[Any]


def begin_range(
    name: str, tensors: list[torch.Tensor], algorithm: Callable[[], str]
) -> Callable[[Future], None] | None:
    """Begin a range if this thread is profiled; return what ends it together with a future."""
    if not torch.autograd._profiler_enabled():  # type: ignore[attr-defined]  # not in the stubs
        return None
    profiler: Any = torch.ops.profiler
    began = profiler._record_function_enter_new(f"meshmend:{name}")
    details = {"bytes": sum(tensor.nbytes for tensor in tensors), "algorithm": algorithm()}
    call = f"meshmend call: {name}, {details['bytes']} bytes, {details['algorithm']}"
    with torch._C._profiler._RecordFunctionFast(call, tensors, details):
        pass

    def end_with(future: Future) -> None:
        # The profiler knows the threads that it watches, and ours is none of them. This callback
        # takes the state of the calling thread along.
        profiler._call_end_callbacks_on_jit_fut(began, future)

    return end_with


ALLREDUCE, REDUCE_SCATTER, ALL_GATHER, ALL_TO_ALL = (
    CollectiveCall("allreduce"),
    CollectiveCall("reduce-scatter"),
    CollectiveCall("all-gather"),
    CollectiveCall("all-to-all"),
)

FINISH_S = 1.0

Tensors = list[torch.Tensor]

# Dynamo cannot trace methods of a process group that are written in Python, so it calls them.
untraced: Any = torch.compiler.disable


def _with_checks(inner: Any, options: Any) -> tuple[Any, Any]:
    """Return Gloo with c10d's checks of each call, and a group of one that has the same checks.

    Both compare the calls of ranks by the same third group. So ranks are told, too, if some of them
    call what runs on our schedules and others what runs on Gloo.
    """
    rank, n_ranks = options.group_rank, options.group_size
    store = dist.PrefixStore("checks", options.store)
    comparing = dist.ProcessGroupGloo(store, rank, n_ranks, options.timeout)
    alone = _gloo_alone(options.timeout)
    checker = dist.ProcessGroup(dist.HashStore(), 0, 1)
    run_on(checker, c10d._ProcessGroupWrapper(alone, comparing))
    return c10d._ProcessGroupWrapper(inner, comparing), checker


def _gloo_alone(timeout: timedelta) -> Any:
    return dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout)


# c10d keeps the name of a group in its backend, also of one whose Gloo connects later. Each Gloo
# has threads, and groups that were left live on for a while: so the next group gets theirs.
_idle_gloos: list[Any] = []


class MeshmendGroup(dist.ProcessGroup):  # type: ignore[misc]  # untyped
    """One rank of a process group over a mesh; `inner` is Gloo, or one that connects later."""

    # c10d asks a group for this; a `ReconfigurableGroup` answers otherwise.
    supports_reconfigure = False
    # Of the default group of an elastic job whose replicas are tiles: their shape.
    tile: tuple[int, ...] | None = None
    plans: Path | None = None  # and the folder of plans that are made ahead

    def __init__(
        self,
        options: Any,
        settings: Settings,
        inner: Any,
        transport: TensorTransport,
        *,
        places: list[int] | None = None,
    ) -> None:
        rank, n_ranks = int(options.group_rank), int(options.group_size)
        self._rank, self._size = rank, n_ranks
        super().__init__(rank, n_ranks)  # c10d gives only its own class a store
        self._store = options.store
        self._late: LateGloo | None = inner if isinstance(inner, LateGloo) else None
        self._inner, self._idle = inner, None
        if self._late is not None:
            self._idle = _idle_gloos.pop() if _idle_gloos else _gloo_alone(options.timeout)
            self._inner = self._idle
        self._checker = None
        # The wrapper that checks cannot change its rank.
        if dist.get_debug_level() == dist.DebugLevel.DETAIL and not self.supports_reconfigure:
            self._inner, self._checker = _with_checks(inner, options)
        self._inner_group = group_on(self._inner, options.store)
        run_on(self, self._inner)  # c10d sends what is not overridden below there
        self._progress = Progress(f"meshmend-rank-{rank}")
        # In each thread that starts a collective: what it runs over, and the plans for that. The
        # group may be made again in the middle of it.
        self._begun_on = threading.local()
        self.meshes: list[DeviceMesh] = []  # that `tiles` has made, on all ranks in the same order
        self._places = places  # of each rank among the chips in row-major order, if another
        self._use(settings, transport, self._place(rank))

    @property
    def _gloo(self) -> Any:
        """Gloo itself, once it is connected."""
        return self._inner if self._late is None else self._late.backend

    @property
    def _fallback(self) -> Any:
        """A group that is all Gloo: it has every method in every form."""
        return self._inner_group if self._late is None else self._late.group

    def _use(self, settings: Settings, transport: TensorTransport, rank: int) -> None:
        """Run the collectives from here on over this transport, as this rank of a mesh.

        In row-major order of the chips; c10d's ranks may have another (`_places`).
        """
        self.settings = settings
        self.failure: TransportError | None = None  # of the first collective that failed
        self._is_aborted = False
        self._n_submitted = 0
        self._transport = transport
        transport.on_abort = partial(self._note_abort, transport)
        self._mesh_rank = rank
        self.plan_for(settings.mesh)

    def plan_for(self, mesh: Mesh) -> None:
        """Plan collectives from here on for a mesh of the same chips; all ranks call this alike."""
        settings = self.settings
        self._catalogue = Catalogue(
            mesh, settings.planned_algorithm, settings.slices, self._mesh_rank
        )

    @property
    def sum_sizes(self) -> SumSizes:
        """The sums so far."""
        return self._catalogue.sum_sizes

    def work_done(self) -> Mapping[int, tuple[int, int]]:
        """Return what the links to other ranks have done, as far as the transport knows it."""
        return self._transport.work_done()

    def getRank(self) -> int:  # noqa: N802  # c10d's name
        """Return the rank in the present group; torch 2.15 would ask Gloo, which may be idle."""
        return self._rank

    def getSize(self) -> int:  # noqa: N802  # c10d's name
        """Return the number of ranks of the present group."""
        return self._size

    def getBackendName(self) -> str:  # noqa: N802  # c10d's name
        """Return the name that `init_process_group` was given."""
        return "meshmend"

    def get_group_store(self) -> Any:
        """Return the store of this group's ranks."""
        return self._store

    @untraced
    def allreduce(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, op: Any = None
    ) -> Any:
        """Replace each rank's tensor by the sum (mean, product, minimum, maximum) over ranks."""
        given = op if opts is None else opts
        tensors, opts = as_list(tensors), options_of(dist.AllreduceOptions, given, timeout)
        if len(tensors) != 1 or not self._can_sum(tensors, opts.reduceOp):
            return self._gloo_for(tensors).allreduce(tensors, opts)
        self._check("allreduce", tensors)
        return self._all_reduce("all_reduce", tensors, opts)

    @untraced
    def allreduce_coalesced(self, tensors: Tensors, opts: Any = None) -> Any:
        """Do what `allreduce` does, for several tensors."""
        opts = options_of(dist.AllreduceCoalescedOptions, opts)
        if not (self._can_sum(tensors, opts.reduceOp) and are_of_one_type(tensors)):
            return self._gloo_for(tensors).allreduce_coalesced(tensors, opts)
        self._check("allreduce_coalesced", tensors)
        return self._all_reduce("all_reduce", tensors, opts)

    @untraced
    def broadcast(
        self, tensors: Any, opts: Any = None, timeout: timedelta | None = None, *, root: int = 0
    ) -> Any:
        """Replace each rank's tensor by that of the root."""
        given = root if opts is None else opts
        tensors, opts = as_list(tensors), options_of(dist.BroadcastOptions, given, timeout)
        has_root = 0 <= opts.rootRank < self.size() and opts.rootTensor == 0
        if len(tensors) != 1 or not has_root or not self._supports(tensors):
            return self._gloo_for(tensors).broadcast(tensors, opts)
        self._check("broadcast", tensors)
        kind = CollectiveCall("broadcast", self._place(opts.rootRank))

        def run() -> None:
            flat = tensors[0].contiguous().view(-1)
            self._move(kind, flat, opts)
            copy_back(tensors[0], flat)

        return self._submit("broadcast", kind, run, tensors, tensors, opts)

    @untraced
    def barrier(self, opts: Any = None, timeout: timedelta | None = None) -> Any:
        """Return a handle that is done when every rank has called this."""
        opts = options_of(dist.BarrierOptions, opts, timeout)
        if self._transport.device_type == NO_DEVICE:
            return self._fallback.barrier(opts)
        self._check("barrier")
        sum_opts = options_of(dist.AllreduceOptions, None, opts.timeout)
        sum_opts.asyncOp = opts.asyncOp
        token = torch.zeros(1, dtype=torch.uint8, device=self._transport.device_type)
        return self._all_reduce("barrier", [token], sum_opts)

    @untraced
    def allgather(
        self, outputs: Any, inputs: Any, opts: Any = None, timeout: timedelta | None = None
    ) -> Any:
        """Write the input of rank i to `outputs[0][i]`."""
        opts = options_of(c10d.AllgatherOptions, opts, timeout)
        if isinstance(inputs, torch.Tensor):
            outputs, inputs = [outputs], [inputs]
        is_single = len(inputs) == len(outputs) == 1 and len(outputs[0]) == self.size()
        if not (
            is_single
            and self._supports([*inputs, *outputs[0]])
            and are_alike(outputs[0], inputs[0])
        ):
            return self._gloo_for(inputs).allgather(outputs, inputs, opts)
        self._check("allgather", [inputs], inputs)
        mine, parts = inputs[0], outputs[0]

        def run() -> None:
            gathered = mine.new_empty(self.size() * mine.numel())
            self._gather(gathered, mine, opts)
            for part, output in zip(gathered.view(self.size(), -1), parts, strict=True):
                output.copy_(part.view(output.shape))

        return self._submit("all_gather", ALL_GATHER, run, inputs, parts, opts)

    @untraced
    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> Any:  # noqa: A002  # c10d's name
        """Write the input of rank i to part i of `output`."""
        return self._all_gather_single("_allgather_base", [output], [input], opts)

    @untraced
    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        """Do what `all_gather_single` does, for several tensors."""
        return self._all_gather_single("allgather_into_tensor_coalesced", outputs, inputs, opts)

    @untraced
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
        is_single = len(inputs) == len(outputs) == 1 and len(inputs[0]) == self.size()
        if not (
            is_single
            and self._supports([*outputs, *inputs[0]], opts.reduceOp)
            and are_alike(inputs[0], outputs[0])
        ):
            return self._gloo_for(outputs).reduce_scatter(outputs, inputs, opts)
        self._check("reduce_scatter", outputs, [outputs])
        mine, parts = outputs[0], inputs[0]

        def run() -> None:
            given = torch.cat([part.reshape(-1) for part in parts])
            self._scatter(mine, given, opts)

        return self._submit("reduce_scatter", REDUCE_SCATTER, run, parts, outputs, opts)

    @untraced
    def reduce_scatter_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002  # c10d's name
        opts: Any = None,
    ) -> Any:
        """Write to `output` the sum over all ranks of this rank's part of their inputs."""
        return self._reduce_scatter_single("_reduce_scatter_base", [output], [input], opts)

    @untraced
    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> Any:
        """Do what `reduce_scatter_single` does, for several tensors."""
        return self._reduce_scatter_single("reduce_scatter_tensor_coalesced", outputs, inputs, opts)

    @untraced
    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,  # noqa: A002  # c10d's name
        output_split_sizes: Sequence[int] = (),
        input_split_sizes: Sequence[int] = (),
        opts: Any = None,
        timeout: timedelta | None = None,
    ) -> Any:
        """Send part i of the input to rank i; parts of given sizes, and on one host, through Gloo.

        A rank whose parts are equal does not know whether those of all others are. So a caller who
        gives sizes gets Gloo on every rank. On one host no link is busy, and Gloo copies less: our
        blocks go through a place that sender and receiver agree on.
        """
        opts = options_of(dist.AllToAllOptions, opts, timeout)
        splits = list(output_split_sizes), list(input_split_sizes)
        are_whole = input.shape == output.shape and input.dtype == output.dtype
        has_parts = input.numel() > 0 and input.dim() > 0 and input.shape[0] % self.size() == 0
        is_planned = are_whole and has_parts and not any(splits) and self._plans_pairs
        if not (is_planned and self._supports([input, output])):
            return self._fallback.all_to_all_single(output, input, *splits, opts)
        self._check("all_to_all_single", output, input, *splits)

        def run() -> None:
            me = self._place(self.rank())
            places = [(self._place(rank) + me) % self.size() for rank in range(self.size())]
            flat = input.new_empty(input.numel())
            flat.view(self.size(), -1)[places] = input.reshape(self.size(), -1)
            self._move(ALL_TO_ALL, flat, opts)
            output.copy_(flat.view(self.size(), -1)[places].view(output.shape))

        return self._submit("all_to_all", ALL_TO_ALL, run, [input], [output], opts)

    @property
    def _plans_pairs(self) -> bool:
        """Whether ranks are on a network, and any two may send to each other.

        Two that lost the link between them must not be joined again.
        """
        is_network = self.settings.planned_algorithm != AUTO_ON_ONE_HOST
        return is_network and not self.settings.mesh.failed_links

    # c10d would send these to Gloo itself, but with the interpreter's lock held. Gloo's threads may
    # then wait for that lock while they hold one that Gloo needs to start a collective.
    @untraced
    def send(self, *arguments: Any, **options: Any) -> Any:
        """Send tensors to one rank, through Gloo."""
        return self._fallback.send(*arguments, **options)

    @untraced
    def recv(self, *arguments: Any, **options: Any) -> Any:
        """Receive tensors from one rank, through Gloo."""
        return self._fallback.recv(*arguments, **options)

    @untraced
    def recv_anysource(self, *arguments: Any, **options: Any) -> Any:
        """Receive tensors from whichever rank sends them, through Gloo."""
        return self._fallback.recv_anysource(*arguments, **options)

    @untraced
    def reduce(self, tensors: Any, *arguments: Any, **options: Any) -> Any:
        """Replace one rank's tensor by the sum over ranks, through Gloo."""
        return self._gloo_for(tensors).reduce(tensors, *arguments, **options)

    @untraced
    def alltoall(self, *arguments: Any, **options: Any) -> Any:
        """Send input i to rank i, through Gloo."""
        return self._fallback.alltoall(*arguments, **options)

    @untraced
    def gather(self, outputs: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        """Write the input of each rank to the outputs of one rank, through Gloo."""
        return self._gloo_for(inputs).gather(outputs, inputs, *arguments, **options)

    @untraced
    def scatter(self, outputs: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        """Write input i of one rank to the output of rank i, through Gloo."""
        return self._gloo_for(outputs).scatter(outputs, inputs, *arguments, **options)

    @untraced
    def allgather_coalesced(self, *arguments: Any, **options: Any) -> Any:
        """Do what `allgather` does, for several tensors, through Gloo."""
        return self._fallback.allgather_coalesced(*arguments, **options)

    def monitored_barrier(self, *arguments: Any, **options: Any) -> None:
        """Wait for all ranks, through Gloo; name one that does not come."""
        self._fallback.monitored_barrier(*arguments, **options)

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
        if self._late is not None:
            return self._n_submitted + self._late.n_called
        return self._n_submitted + int(self._inner._get_sequence_number_for_group())

    @property
    def options(self) -> Any:
        """Return Gloo's options; their timeout is that of all collectives."""
        return self._inner.options if self._late is None else self._late.options

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of all collectives."""
        if self._late is None:
            super().set_timeout(timeout)
        else:
            self._late.set_timeout(timeout)

    _set_default_timeout = set_timeout

    def get_reconfigure_handle(self) -> str:
        """Refuse: c10d would give that of the Gloo inside."""
        raise ReconfigureError(
            "reconfigure needs a process group that was made for it, but this one was not; make "
            "the default group with init_process_group(..., enable_reconfigure=True)"
        )

    def reconfigure(self, opts: Any) -> Any:
        """Refuse: c10d would make the Gloo inside again, and leave our schedules as they were."""
        self.get_reconfigure_handle()

    def shutdown(self) -> None:
        """Wait a second for running collectives, interrupt the rest, and close all connections."""
        if not self._progress.finish(FINISH_S):
            self._transport.interrupt()
            self._progress.finish(FINISH_S)
        self._transport.close()
        for mesh in self.meshes:
            # DTensor keeps every mesh that it has seen in its caches, and a mesh keeps its groups
            # with their connections here. They are destroyed; what is needed goes by their names.
            getattr(mesh, "_pg_registry", {}).clear()
        if self._late is not None:
            self._late.close()
        if self._idle is not None:
            _idle_gloos.append(self._idle)
            self._idle = None

    def interrupt(self) -> None:
        """Make every collective under way on this rank fail; the other ranks are not told.

        What runs on Gloo already ends when its timeout is over; what waits for Gloo ends too.
        """
        self._transport.interrupt()
        if self._late is not None:
            self._late.leave()

    def abort(self) -> None:
        """Make every collective under way fail at once, on every rank; no other can begin.

        What runs on Gloo ends when its timeout is over: Gloo has no way to abort.
        """
        self._is_aborted = True
        self._transport.abort()

    def _all_reduce(self, name: str, tensors: Tensors, opts: Any) -> Any:
        def start() -> Rest:
            flats = flat_tensors(tensors)
            waits = [self._start_sum(ALLREDUCE, flat, opts) for flat in flats]

            def rest() -> None:
                for tensor, flat, wait in zip(tensors, flats, waits, strict=True):
                    wait()
                    average(flat, opts.reduceOp, self._size)
                    copy_back(tensor, flat)

            return rest

        return self._submit(name, ALLREDUCE, start, tensors, tensors, opts)

    def _all_gather_single(self, name: str, outputs: Tensors, inputs: Tensors, opts: Any) -> Any:
        opts = options_of(c10d.AllgatherOptions, opts)
        check_parts(outputs, inputs, self.size())
        if not self._supports([*inputs, *outputs]):
            return self._fallback.all_gather_single_coalesced(outputs, inputs, opts)
        if name == "_allgather_base":  # as with Gloo, the coalesced form is not checked
            self._check(name, inputs[0], inputs[0])

        def run() -> None:
            for output, mine in zip(outputs, inputs, strict=True):
                flat = output.contiguous().view(-1)
                self._gather(flat, mine, opts)
                copy_back(output, flat)

        return self._submit(name, ALL_GATHER, run, inputs, outputs, opts)

    def _reduce_scatter_single(
        self, name: str, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> Any:
        opts = options_of(dist.ReduceScatterOptions, opts)
        check_parts(inputs, outputs, self.size())
        if not self._supports([*inputs, *outputs], opts.reduceOp):
            return self._fallback.reduce_scatter_single_coalesced(outputs, inputs, opts)
        part = outputs[0] if name == "_reduce_scatter_base" else outputs
        self._check(name, part, part)

        def run() -> None:
            # An output may share memory with another's input, so all are copied first.
            copies = [each.clone(memory_format=torch.contiguous_format) for each in inputs]
            for output, given in zip(outputs, copies, strict=True):
                self._scatter(output, given.view(-1), opts)

        return self._submit(name, REDUCE_SCATTER, run, inputs, outputs, opts)

    def _submit(
        self,
        name: str,
        kind: CollectiveCall,
        run: Starter,
        inputs: Tensors,
        result: Tensors,
        opts: Any,
    ) -> Any:
        """Run a collective, in the progress thread unless the caller waits; return its handle."""
        self._n_submitted += 1

        def algorithm() -> str:
            n_bytes = sum(tensor.nbytes for tensor in inputs)
            n_parts = self.size() if kind == ALL_GATHER else 1
            return self._catalogue.algorithm(kind, n_bytes * n_parts)

        transport, catalogue = self._transport, self._catalogue

        def start() -> Rest | None:
            if transport is not self._transport:  # the group was made again before its turn came
                raise self._aborted()
            self._begun_on.transport, self._begun_on.catalogue = transport, catalogue
            return run()

        end_with = begin_range(name, inputs, algorithm)
        return self._progress.submit(
            f"{name} on rank {self._rank}", start, result, end_with, waits=not opts.asyncOp
        )

    def _check(self, collective: str, *arguments: Any) -> None:
        """If the debug level is DETAIL, raise unless all ranks call this with tensors alike.

        After the check, a group of one runs the collective: so it gets tensors of its own, and
        where there is one for each rank, just one.
        """
        if self._checker is not None:
            getattr(self._checker, collective)(
                *tree_map_only(torch.Tensor, torch.empty_like, arguments)
            )

    def _gloo_for(self, tensors: Any) -> Any:
        """Return what runs a call on Gloo.

        c10d cannot dispatch a call without tensors, nor every call with sparse ones.
        """
        dense = [tensor.layout is torch.strided for tensor in as_list(tensors)]
        return self._fallback if dense and all(dense) else self._gloo

    def _supports(self, tensors: Tensors, op: Any = None) -> bool:
        """Whether our schedules support this operation on these tensors, of which there are some.

        Without an operation the tensors are only copied, so any element type is supported.
        """
        return bool(tensors) and all(
            tensor.device.type == self._transport.device_type
            and tensor.layout is torch.strided
            and (op is None or can_combine(tensor, op))
            for tensor in tensors
        )

    def _can_sum(self, tensors: Tensors, op: Any) -> bool:
        """Whether our schedules sum these tensors over all ranks."""
        return self._supports(tensors, op)

    @property
    def device_type(self) -> str:
        """The kind of device whose tensors run on our schedules."""
        return self._transport.device_type

    def world_rank(self, place: int) -> int:
        """Return the rank in the default group of a rank of this group's mesh."""
        return int(sorted(dist.get_process_group_ranks(self))[place])

    def _place(self, rank: int) -> int:
        """Return which rank of the mesh a rank of c10d is."""
        return rank if self._places is None else self._places[rank]

    def _gather(self, gathered: torch.Tensor, mine: torch.Tensor, opts: Any) -> None:
        """Fill a flat tensor with the parts of all ranks; `mine` is the part of this rank."""
        parts = gathered.view(self.size(), -1)
        parts[self._place(self.rank())].copy_(mine.reshape(-1))
        self._move(ALL_GATHER, gathered, opts)
        if self._places is not None:
            parts.copy_(parts[self._places])

    def _scatter(self, output: torch.Tensor, given: torch.Tensor, opts: Any) -> None:
        """Sum the flat tensors of all ranks into `given`; copy this rank's part to `output`."""
        if self._places is not None:
            parts = given.view(self.size(), -1)
            given = torch.empty_like(given)
            given.view(self.size(), -1)[self._places] = parts
        self._start_sum(REDUCE_SCATTER, given, opts)()
        mine = given.view(self.size(), -1)[self._place(self.rank())]
        average(mine, opts.reduceOp, self.size())
        output.copy_(mine.view(output.shape))

    def _start_sum(self, kind: CollectiveCall, flat: torch.Tensor, opts: Any) -> Rest:
        op = op_name(opts.reduceOp)
        task = self._begun_on.catalogue.task(kind, flat.numel(), dtype_name(flat), op)
        return self._start(task, flat.detach(), opts.timeout)

    def _move(self, kind: CollectiveCall, flat: torch.Tensor, opts: Any) -> None:
        """Run a collective that only copies: it treats elements of any type as bytes."""
        raw = flat.detach().view(torch.uint8)
        task = self._begun_on.catalogue.task(kind, raw.numel(), "uint8")
        self._start(task, raw, opts.timeout)()

    def _start(self, task: Task, flat: torch.Tensor, timeout: timedelta) -> Rest:
        """Start a task in place; without a timeout of its own, that of the group applies."""
        if timeout <= timedelta(0):
            timeout = self.options._timeout
        timeout_s = timeout.total_seconds()
        began, transport = time.monotonic(), self._begun_on.transport
        try:
            if self._is_aborted:
                raise self._aborted()
            wait = transport.start(task, flat, timeout_s=timeout_s)
        except TransportError as raised:
            raise self._noted(raised, transport, began, timeout_s) from None

        def rest() -> None:
            try:
                wait()
            except TransportError as raised:
                raise self._noted(raised, transport, began, timeout_s) from None

        return rest

    def _noted(
        self, raised: TransportError, transport: TensorTransport, began: float, timeout_s: float
    ) -> TransportError:
        """Note the first failure; return an error that says that the timeout is over, if it is."""
        if transport is not self._transport:  # the group was made again meanwhile
            return self._aborted()
        # After an abort peers leave, and seem lost.
        error = self._aborted() if self._is_aborted else raised
        self.failure = self.failure or error
        if self._is_aborted or time.monotonic() - began < timeout_s:
            return error
        # The words of Gloo, which some programs look for, and ours.
        return type(error)(
            f"{error}: Timed out waiting {timeout_s * 1e3:.0f}ms: the timeout of "
            f"{timeout_s:g} s is over",
            error.rank,
        )

    def _note_abort(self, transport: TensorTransport) -> None:
        """Let nothing begin any more, unless the group has left this transport already."""
        if transport is self._transport:
            self._is_aborted = True

    def _aborted(self) -> StoppedError:
        return StoppedError(f"the process group of rank {self.rank()} was aborted; make it anew")

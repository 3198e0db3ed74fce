"""Our group as torch's `Backend` of one kind of device, as in `cpu:meshmend,cuda:nccl`.

c10d then keeps its own process group, which sends tensors on CPUs here and tensors on GPUs to the
other backend. Every call goes on to a `MeshmendGroup`. Needs torch 2.14.
"""

from datetime import timedelta
from typing import Any, Final

import torch

from meshmend.torch.group import MeshmendGroup
from meshmend.torch.versions import bindings

_FORWARDED: Final = (
    "abort",
    "all_gather_single",
    "all_gather_single_coalesced",
    "all_to_all_single",
    "allgather",
    "allgather_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "barrier",
    "broadcast",
    "gather",
    "get_reconfigure_handle",
    "rank",
    "reconfigure",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "register_abort_hook",
    "scatter",
    "send",
    "set_timeout",
    "shutdown",
    "size",
    "unregister_abort_hook",
    "_get_sequence_number_for_group",
    "_set_default_timeout",
    "_set_sequence_number_for_group",
)


class MeshmendBackend(bindings.Backend):  # type: ignore[misc]  # untyped
    """The backend of one kind of device; `group` does all of its work."""

    def __init__(self, group: MeshmendGroup) -> None:
        super().__init__(group.rank(), group.size())
        self.group = group

    def getBackendName(self) -> str:  # noqa: N802  # c10d's name
        """Return the name that `init_process_group` was given."""
        return self.group.getBackendName()

    @property
    def options(self) -> Any:
        """Return Gloo's options; their timeout is that of all collectives."""
        return self.group.options

    @property
    def supports_reconfigure(self) -> bool:
        """Whether the group can be made again on other chips."""
        return bool(self.group.supports_reconfigure)

    @property
    def supports_abort_hooks(self) -> bool:
        """Whether `abort` calls hooks first."""
        return self.supports_reconfigure

    def allreduce_sparse(self, tensors: Any, opts: Any = None) -> Any:
        """Sum sparse tensors over ranks."""
        return self.group.allreduce(tensors, opts)

    def monitored_barrier(
        self, opts: Any = None, wait_all_ranks: bool = False, timeout: timedelta | None = None
    ) -> None:
        """Wait for all ranks; name one that does not come."""
        given = timeout if timeout is not None else opts.timeout
        self.group.monitored_barrier(given, wait_all_ranks=wait_all_ranks)


def _forward(name: str) -> Any:
    def call(self: MeshmendBackend, *arguments: Any, **options: Any) -> Any:
        return getattr(self.group, name)(*arguments, **options)

    call.__name__ = name
    call.__doc__ = f"Do what the group's `{name}` does."
    return call


for _name in _FORWARDED:
    setattr(MeshmendBackend, _name, _forward(_name))


def our_group(group: Any) -> MeshmendGroup | None:
    """Return the group of ours that serves a process group's tensors on CPUs, or None."""
    if isinstance(group, MeshmendGroup):
        return group
    cpu = torch.device("cpu")
    if group is None or cpu not in group._device_types:
        return None
    backend = group._get_backend(cpu)
    backend = getattr(backend, "wrapped_pg", backend)  # at the debug level DETAIL
    return backend.group if isinstance(backend, MeshmendBackend) else None

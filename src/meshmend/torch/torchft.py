"""torchft's `Manager` on our schedules: each of its replicas is one chip of a mesh.

    group = MeshmendReplicas(mesh, chip, timeout=timedelta(seconds=10))
    manager = torchft.Manager(pg=group, replica_id=group.replica_id, ...)

torchft decides who takes part, and heals who comes back. With each quorum it calls `configure`: the
replicas then tell each other their chips, and sum on schedules around the holes that the others
leave. Needs `pip install torchft`, with the torch that it was built for.
"""

import logging
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from typing import Any

import msgspec

from meshmend.errors import InputError, MissingPackageError
from meshmend.planning.compile_once import compile_once
from meshmend.planning.settings import Settings
from meshmend.topology.failures import Chip
from meshmend.topology.figures import mesh_figures
from meshmend.topology.mesh import Mesh
from meshmend.torch.call_arguments import c10d, dist
from meshmend.torch.group_factory import create_group
from meshmend.torch.late_gloo import group_on

try:
    Wrapper: Any = import_module("torchft.process_group").ProcessGroupWrapper
except ModuleNotFoundError as error:
    raise MissingPackageError(
        f"meshmend.torch.torchft needs torchft, but got: {error}; run: pip install torchft"
    ) from None

_log = logging.getLogger("meshmend.torch")


class MeshmendReplicas(Wrapper):  # type: ignore[misc]  # untyped
    """The process group of a `Manager` whose replica is one chip of a mesh.

    `settings` are those of the mesh with all of its chips, or without those that never come.
    """

    def __init__(
        self, settings: Settings | Mesh, chip: Chip, timeout: timedelta = timedelta(seconds=60)
    ) -> None:
        super().__init__(timeout)
        self._pg: Any
        self._settings = Settings(settings) if isinstance(settings, Mesh) else settings
        if chip not in self._settings.mesh.rank_of:
            raise InputError(
                f"a replica needs a live chip of the mesh {self._settings.mesh}, but got {chip}"
            )
        self._chip = chip
        compile_once()  # else in the first quorum, while the other replicas wait

    @property
    def replica_id(self) -> str:
        """A name for this replica: torchft gives ranks in the order of names."""
        return f"chip-{self._settings.mesh.rank_of[self._chip]:06d}"

    def getBackendName(self) -> str:  # noqa: N802  # c10d's name
        """Return a name for torchft's log."""
        return "torchft-meshmend"

    def abort(self, errored: bool = True) -> None:
        """Leave the group; after an error, make what is under way fail on every rank of it."""
        group, self._pg = self._pg, None
        if group is not None:
            if errored:
                group.abort()
            group.shutdown()

    def shutdown(self) -> None:
        """Leave the group."""
        self.abort(errored=False)

    def _create_pg(self, store: Any, rank: int, world_size: int) -> Any:
        """Make the group of a quorum: of the chips that its replicas say they are."""
        whole = self._settings.mesh
        store.set(f"chip-{rank}", str(whole.rank_of[self._chip]))
        chips = tuple(whole.live[int(store.get(f"chip-{peer}"))] for peer in range(world_size))
        mesh = replace(whole, failed=whole.failed | set(whole.live) - set(chips))
        if chips != mesh.live or not mesh_figures(mesh).is_connected:
            if rank == 0:
                _log.warning(
                    "a quorum runs on Gloo: its %d chips are not connected, or its ranks are not "
                    "in their order: %s",
                    world_size,
                    mesh,
                )
            gloo = dist.ProcessGroupGloo(
                dist.PrefixStore("gloo", store), rank, world_size, timeout=self._timeout
            )
            return group_on(gloo, store)
        options = c10d._DistributedBackendOptions()
        options.store, options.timeout = store, self._timeout
        options.group_rank, options.group_size = rank, world_size
        return create_group(options, msgspec.structs.replace(self._settings, mesh=mesh))

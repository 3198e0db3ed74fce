"""Replicas that are tiles, on an elastic process group: what one chip has to know of the others.

A chip holds a part of the state, so a step counts when all chips have done it, and not before.
Knows neither what the state is nor how it is sent: see `built_objects.py` and `StateTransfer`.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, Final, cast

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from meshmend.config import LEAVES
from meshmend.errors import InputError
from meshmend.planning.plan_request import SumSizes
from meshmend.topology.failures import format_shape
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_tile
from meshmend.topology.tiles import box_colour, box_tiling
from meshmend.torch.tile_groups import TwinGroup
from meshmend.train.core.exchange import Exchange
from meshmend.train.core.worker_environment import WorkerEnvironment
from meshmend.train.core.worker_loop import WorkerLoop
from meshmend.train.torch.group_meeting import groups_of_ours
from meshmend.train.torch.local_tensors import is_dtensor
from meshmend.train.torch.loop_state import Stateful
from meshmend.train.torch.step_in_flight import StepInFlight
from meshmend.train.torch.twin_shares import HeldShares

LOSS_SUM: Final = (1, "float64")  # of a step of tiles, which all chips end together


class TileReplica:
    """One chip's part in replicas of several chips.

    Raises:
        InputError: the chips are to watch links.
        TopologyError: the tile cannot be read.
    """

    def __init__(
        self, tile: str, environment: WorkerEnvironment, *, shares_optimizers: bool
    ) -> None:
        if environment.sums.watch_links:
            raise InputError(
                f"{LEAVES['sums.watch_links'].variable} needs a job whose chips hold the whole "
                f"model, but got tiles of {tile}; leave it out, and name slow links with --slow"
            )
        self.shape, self._chip = parse_tile(tile), environment.chip
        self.shares = HeldShares(self.shape, environment.board) if shares_optimizers else None
        self.has_settled = False  # whether a step came to count when the next generation began

    @property
    def has_lost_state(self) -> bool:
        """Whether the state of this very step must be read again."""
        return self.shares is not None and self.shares.has_lost_state

    def keep_shares(self) -> None:
        """Keep this chip's own shares alone, if twins share optimizers and all have theirs."""
        if self.shares is not None:
            self.shares.keep()

    def part_of(self, digest: str) -> str:
        """Return the digest of this chip's part with its colour: only twins hold the same."""
        return f"{box_colour(self.shape, self._chip)}.{digest}"

    def check(self, objects: Sequence[Stateful], mesh: Mesh) -> None:
        """Raise InputError if an object is spread over other chips than those of one tile."""
        in_mine = next(each for each in box_tiling(mesh, self.shape).tiles if self._chip in each)
        ranks, tile = {mesh.rank_of[chip] for chip in in_mine}, format_shape(self.shape)
        modules = [each for each in objects if isinstance(each, torch.nn.Module)]
        inside = (each for module in modules for each in module.modules())
        if any(isinstance(each, DistributedDataParallel) for each in inside):
            raise InputError(
                f"reconfigure(tile={tile!r}) needs a model whose parts are on the chips of a tile, "
                "but got a DistributedDataParallel, which has all of it on each chip; leave out "
                "tile, or use fully_shard(model, mesh=meshmend.torch.tiles(...))"
            )
        ranks_with_parts = functools.cache(_ranks_with_parts)  # few layouts, and many parameters
        for module in modules:
            for name, parameter in cast("Iterator[tuple[str, Any]]", module.named_parameters()):
                if not is_dtensor(parameter):
                    continue
                together = ranks_with_parts(parameter.device_mesh, parameter.placements)
                if outside := [at for at in together if at not in ranks]:
                    raise InputError(
                        f"reconfigure(tile={tile!r}) needs each parameter whole in one tile, but "
                        f"{name} is sharded over ranks such as {outside[0]} of another; make its "
                        "mesh with meshmend.torch.tiles"
                    )

    def sum_losses(
        self, loop: WorkerLoop, exchange: Exchange, step: int, loss: float
    ) -> float | None:
        """Wait until all chips have done a step; return the sum of all losses.

        Others hold the rest of the state after it. If one of them has not done it because the mesh
        has changed, this returns None: the step does not count yet, and so this chip keeps both
        states until the next generation begins.
        """
        numbers = np.array([loss])
        loop.also = step
        if loop.attempt(functools.partial(exchange.sum, numbers.view(np.uint8), *LOSS_SUM)):
            loop.also = None
            return float(numbers[0])
        self.has_settled = False
        return None

    def settle(self, loop: WorkerLoop, tried: StepInFlight, step: int) -> bool:
        """Keep the state of one of two steps: before the step that was tried last, or after it.

        Return whether it is the one after it, if both were kept.
        """
        also, loop.also = loop.also, None
        if also is not None and also == step:
            self.has_settled = True
            return True
        if also is not None:
            tried.undo()
        return False


def sums_between_tiles() -> SumSizes:
    """Return the sums between tiles of a step that is done."""
    twins = (group for group in groups_of_ours() if isinstance(group, TwinGroup))
    return tuple(dict.fromkeys(size for group in twins for size in group.sum_sizes))


def _ranks_with_parts(mesh: DeviceMesh, placements: tuple[Any, ...]) -> set[int]:
    """Return the ranks that hold a `DTensor` together with this one."""
    at = mesh.get_coordinate()
    assert at is not None
    line = tuple(
        here if placement.is_replicate() else slice(None)
        for placement, here in zip(placements, at, strict=True)
    )
    return set(mesh.mesh[line].flatten().tolist())

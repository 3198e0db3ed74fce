"""Objects that a script makes anew for each group, because PyTorch cannot move them to another.

`build` makes them on the present group. A state that has come for them before, from other chips or
from a checkpoint, lies here until then. Knows no generation and nothing of when a step counts.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

from meshmend.train.torch.group_state import GroupState
from meshmend.train.torch.local_steps import LocalSteps
from meshmend.train.torch.loop_state import Stateful
from meshmend.train.torch.tile_checkpoints import load_whole
from meshmend.train.torch.tile_replica import TileReplica

Build = Callable[[], Sequence[Stateful]]
_READ: Final = "checkpoint"  # in a state: it is that of the checkpoint of its step


class BuiltObjects:
    """What a chip has of objects that it makes with `build`, between two groups.

    With a `tile` they are a part of a replica. `whole` is a checkpoint that the job begins with.
    """

    def __init__(
        self, build: Build, tile: TileReplica | None = None, whole: dict[str, Any] | None = None
    ) -> None:
        self._build, self._is_part = build, tile is not None
        self._shares = None if tile is None else tile.shares
        self._local_steps = LocalSteps(())
        # The state that the next objects are to have, if it is not that of the present ones.
        self._whole = whole  # of a checkpoint
        self._taken: dict[str, Any] | None = None  # of another chip; then there is no checkpoint
        # The job ended in the middle of a step, which `fully_shard` leaves with its parts together.
        self.is_halfway = False

    def made(self) -> GroupState:
        """Make the objects of the present group, with a state of their own."""
        objects = GroupState(tuple(self._build()), is_part=self._is_part)
        if self._is_part and self._shares is None:
            self._local_steps.remove()
            self._local_steps = LocalSteps(objects.optimizers)
        return objects

    def fill(self, objects: GroupState, held: dict[str, Any]) -> None:
        """Give new objects the state that this chip held before them."""
        if self._whole is not None:
            load_whole(objects.objects, self._whole)
        else:
            objects.load(held)
        if self._shares is not None:
            is_own = self._taken is None
            self._shares.share(objects, has_begun=bool(held["objects"]), keeps_own=is_own)
        self._taken = self._whole = None

    def coming(self, step: int) -> dict[str, Any] | None:
        """Return the state that the next objects are to have; None: that of the present ones.

        Who takes the state of a checkpoint reads it: chips hold different parts.
        """
        if self._whole is not None:
            return {"step": step, "objects": [], "moving": [], _READ: True}
        return self._taken

    def take(self, state: dict[str, Any], read: Callable[[int], dict[str, Any]]) -> None:
        """Keep another chip's state for the next objects; `read` returns that of a checkpoint."""
        if state.get(_READ):
            self.go_back(read(int(state["step"])))
        else:
            self._taken, self._whole = state, None

    def go_back(self, whole: dict[str, Any]) -> None:
        """Keep the state of a checkpoint for the next objects."""
        self._taken, self._whole = None, whole

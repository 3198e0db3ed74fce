"""What a job needs of an update whose work and state the chips share. Imports no framework."""

from collections.abc import Callable
from typing import Protocol

from meshmend.membership.faults.fault import Moment
from meshmend.membership.generation import Generation
from meshmend.membership.messages import Go
from meshmend.planning.plan_request import SumSizes
from meshmend.train.core.exchange import Bytes, Exchange


class ShardedReplica(Protocol):
    """What a sharded update needs of its job; `JobCore` is such."""

    @property
    def step_number(self) -> int:
        """The number of steps that are done."""

    def packed_state(self) -> Bytes:
        """Return the state that all chips have, without that of the shares."""

    def take_over(self, state: Bytes) -> None:
        """Replace that state by the one of another chip."""

    def inject(self, moment: Moment) -> None:
        """Inject the fault that is due at a moment, if there is one."""


class Sharding(Protocol):
    """One chip's part in a sharded update; `ShardedUpdate` is such."""

    @property
    def has_lost_state(self) -> bool:
        """Whether a part of the state is lost, so that this chip must read a checkpoint."""

    def sum_sizes(self) -> SumSizes:
        """Return the sizes of the sums and gathers of an update on the chips that train now."""

    def gather(self) -> None:
        """Compute this chip's share of the new weights, and gather those of all chips."""

    def catch_up(self, go: Go, generation: Generation) -> None:
        """Get the state that a generation begins with, and this chip's share of it."""


MakeSharding = Callable[[ShardedReplica, Exchange], Sharding]

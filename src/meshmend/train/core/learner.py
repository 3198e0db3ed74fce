"""What a framework contributes to a job: parameters, gradients, an optimizer, and their state.

`JobCore` knows chips, steps, samples and checkpoints, but no framework. It trains a `Learner`. A
`Sharding` shares out the work and the state of the update among the chips.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from meshmend.membership.faults.fault import Moment
from meshmend.membership.generation import Generation
from meshmend.membership.messages import Go
from meshmend.planning.plan_request import SumSizes
from meshmend.train.core.exchange import Exchange
from meshmend.train.state.digest import BegunDigests
from meshmend.train.state.state_tree import Bytes, Framework


class LearnerSums(Protocol):
    """What one chip puts into the sums of a step; `Gradients` and `JaxLearner` are such."""

    @property
    def sizes(self) -> SumSizes:
        """The number of elements and the type of each sum."""

    @property
    def payloads(self) -> Sequence[Bytes]:
        """What this chip puts into each sum; the sums replace it in place."""

    @property
    def notes(self) -> NDArray[Any]:
        """The elements of a sum, one for each chip of the mesh, that are the job's own.

        That sum begins when the step ends. Without shares by speed there are none.
        """

    def payload_hashes(self, number: int) -> dict[str, int]:
        """Return a hash of what the samples of this step have put into a sum, by parameter."""

    def refill_changed(self) -> None:
        """Fill the payloads again whose gradients have changed since they were filled."""

    @property
    def is_last(self) -> bool:
        """Whether a chip said that this step is the last; known after the sum."""

    def non_finite(self) -> Sequence[str]:
        """Return the names of the parameters whose gradients on this chip are not finite."""


class Learner(Protocol):
    """The model and the optimizer of one replica; `TorchLearner` and `JaxLearner` are such."""

    @property
    def framework(self) -> Framework:
        """How its states become bytes."""

    @property
    def sums(self) -> LearnerSums:
        """What it sums in a step."""

    def clear(self, *, is_last: bool) -> None:
        """Put zeros into the payloads, because this chip has no samples."""

    def flush(self) -> None:
        """Start all sums that may begin, so that something else can follow them."""

    def refill_stale(self) -> Sequence[int]:
        """Fill the payloads again that some chip changed after their sum began.

        Returns their numbers, the same on all chips; known after the sum.
        """

    def is_finite(self) -> bool:
        """Whether the sums are finite numbers, or the learner looks after those that are not."""

    def undo(self) -> None:
        """Undo what the step has changed so far, because it does not count."""

    def update(self) -> float:
        """Step the optimizer with the sums; return the mean loss over all samples."""

    def skip(self) -> float:
        """Leave parameters and optimizer as they are; return the mean loss over all samples."""

    def state(self) -> dict[str, Any]:
        """Return the parts `model`, `optimizer` and `also` of the training state."""

    def saved_state(self) -> dict[str, Any]:
        """Return these parts as a checkpoint gets them: of what is sharded, this chip's share."""

    def free(self) -> None:
        """Free these parts if another state cannot be written over them: one will be loaded."""

    def load(self, state: dict[str, Any]) -> None:
        """Replace these parts by those of another chip or of a checkpoint; may use them up."""

    def begun_digest(self) -> BegunDigests:
        """Begin to hash each array of `state` by its name; plain values are in words."""

    def part_name(self, name: str) -> str:
        """Return the name of a part of `state` in words that its user knows."""

    def share_digests(self) -> dict[str, str]:
        """Return a digest of each share of a sharded optimizer that this chip keeps, by place."""


class ShardedReplica(Protocol):
    """What a sharded update needs of its job; `JobCore` is such."""

    @property
    def step_number(self) -> int:
        """The number of steps that are done."""

    @property
    def is_overwritten(self) -> bool:
        """Whether a part of the state was overwritten, so that this chip has none."""

    def take_state(self, state: Any) -> None:
        """Replace the state that all chips have, without that of the shares."""

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


# Sends or receives the state that all chips have; returns what this chip is to take, None if it
# has it. `StateTransfer.exchanged` is such.
ExchangeState = Callable[[Go, Generation], Any]
MakeSharding = Callable[[ShardedReplica, Exchange, ExchangeState], Sharding]

"""A workload as a launcher sees it, whatever framework trains it. Imports no framework."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from meshmend.train.core.worker_loop import SumSizes
from meshmend.train.sharding.update_shares import DEFAULT_DOMAINS
from meshmend.train.state.checkpoint import Saving
from meshmend.train.state.resume import Resume
from meshmend.train.state.shards import State
from meshmend.train.state.state_tree import Framework


class SampleSet(Protocol):
    """A data set: its samples are tuples of arrays, all of the same shapes."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Any, ...]: ...


@dataclass(frozen=True)
class TrainingArguments:
    """What a worker's loop needs besides its workload; a rate of None is the workload's own."""

    batch: int
    steps: int
    seed: int = 0
    policy: str = "constant"
    rate: float | None = None
    saving: Saving | None = None
    resume: Resume = None
    shard_optimizer: bool = False
    mirror_domains: tuple[str, ...] = DEFAULT_DOMAINS
    master_weights: bool = False


class Trainable(Protocol):
    """A model, its data and its optimizer; `Workload` and `JaxWorkload` are such.

    A launcher asks for all but `train` before it forks the workers, so that they inherit what was
    made for the answers.
    """

    @property
    def name(self) -> str:
        """What is trained, and on which data."""

    @property
    def n_samples(self) -> int:
        """The number of samples to train on."""

    @property
    def n_parameters(self) -> int:
        """The number of elements of all parameters."""

    @property
    def framework(self) -> Framework:
        """How its states become bytes."""

    def preload(self, arguments: TrainingArguments, n_chips: int) -> None:
        """Import and prepare all that the workers of so many chips need."""

    def sum_sizes(self, arguments: TrainingArguments, n_chips: int) -> SumSizes:
        """Return the sizes of the sums and gathers of a step of so many chips."""

    def fresh_state(self) -> State:
        """Return the training state before the first step, without its progress."""

    def train(self, arguments: TrainingArguments) -> Mapping[str, float]:
        """Run the loop of one worker; return the evaluation on the leader, and nothing elsewhere.

        Raises:
            InputError: the arguments, or the checkpoint to resume, do not fit.
        """

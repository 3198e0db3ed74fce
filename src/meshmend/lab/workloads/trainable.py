"""A workload as a launcher sees it, whatever framework trains it. Imports no framework."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from meshmend.config import JobConfig
from meshmend.planning.plan_request import SumSizes
from meshmend.topology.text import parse_mesh
from meshmend.train.core.chip_speeds import BY_SPEED
from meshmend.train.state.checkpoint import Saving
from meshmend.train.state.resume import Resume
from meshmend.train.state.shards import State
from meshmend.train.state.state_tree import Framework


class SampleSet(Protocol):
    """A data set: its samples are tuples of arrays, all of the same shapes."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Any, ...]: ...


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

    def preload(self, config: JobConfig, n_chips: Sequence[int]) -> None:
        """Import and prepare all that workers need.

        `n_chips` says how many they are at first, and then how many they may be after a loss.
        """

    def sum_sizes(self, config: JobConfig, n_chips: int) -> SumSizes:
        """Return the sizes of the sums and gathers of a step of so many chips."""

    def fresh_state(self) -> State:
        """Return the training state before the first step, without its progress."""

    def train(self, config: JobConfig) -> Mapping[str, float]:
        """Run the loop of one worker; return the evaluation on the leader, and nothing elsewhere.

        Raises:
            InputError: the settings, or the checkpoint to resume, do not fit.
        """


def n_notes_of(config: JobConfig) -> int:
    """Return how many numbers of its own a job of these settings has in its sums."""
    return parse_mesh(config.mesh.shape).n_live if config.job.shares == BY_SPEED else 0


def saving_of(config: JobConfig) -> Saving | None:
    """Return when and where a job of these settings writes checkpoints; None if it writes none."""
    folder, every = Path(config.job.run_dir) / "checkpoints", config.saving.every
    return Saving(folder, every) if every else None


def resume_of(config: JobConfig) -> Resume:
    """Return where a job of these settings looks for its first state."""
    return config.saving.resume or None

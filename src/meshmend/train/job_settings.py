"""The arguments of a job that no framework changes."""

from dataclasses import dataclass
from pathlib import Path

from meshmend.errors import InputError
from meshmend.train.checkpoint import Saving
from meshmend.train.non_finite import RAISE, check_policy
from meshmend.train.samples import batch_of


@dataclass(frozen=True)
class JobSettings:
    """How many samples a step uses, how many steps there are, and where checkpoints are.

    `batch` counts the samples of a step over all chips. `n_samples` is the length of the data set.
    `resume` is a folder of checkpoints: the job begins with the newest one that can be read.
    `non_finite` says what happens to a step whose sums are not finite: "raise" or "skip".
    """

    n_samples: int
    batch: int
    steps: int
    seed: int = 0
    policy: str = "constant"
    saving: Saving | None = None
    resume: Path | None = None
    non_finite: str = RAISE

    def __post_init__(self) -> None:
        if self.batch < 1 or self.steps < 0:
            raise InputError(
                f"Job needs a batch of at least 1 and at least 0 steps, but got "
                f"batch={self.batch} and steps={self.steps}"
            )
        batch_of(self.policy, self.batch, 1, 1)  # refuses an unknown policy
        check_policy(self.non_finite)

"""The arguments of a job that no framework changes."""

from dataclasses import dataclass

from meshmend.errors import InputError
from meshmend.train.core.non_finite import RAISE, check_policy
from meshmend.train.data.samples import Order, StreamOrder, batch_of
from meshmend.train.state.checkpoint import Saving
from meshmend.train.state.comparison import COMPARE_EVERY
from meshmend.train.state.resume import Resume


@dataclass(frozen=True)
class JobSettings:
    """How many samples a step uses, how many steps there are, and where checkpoints are.

    `batch` counts the samples of a step over all chips. `n_samples` is the length of the data set,
    or None if that is a stream, whose samples are used in the order in which they come.
    `resume` is a folder of checkpoints: the job begins with the newest one that can be read. With
    "auto" that is the folder of `saving`, and the job begins anew if it has none.
    `non_finite` says what happens to a step whose sums are not finite: "raise" or "skip".
    The states of all chips are compared every `compare_every` steps.
    """

    n_samples: int | None
    batch: int
    steps: int
    seed: int = 0
    policy: str = "constant"
    saving: Saving | None = None
    resume: Resume = None
    non_finite: str = RAISE
    compare_every: int = COMPARE_EVERY

    def __post_init__(self) -> None:
        if self.batch < 1 or self.steps < 0:
            raise InputError(
                f"Job needs a batch of at least 1 and at least 0 steps, but got "
                f"batch={self.batch} and steps={self.steps}"
            )
        if self.compare_every < 1:
            raise InputError(
                f"Job needs compare_every of at least 1 step, but got {self.compare_every}"
            )
        batch_of(self.policy, self.batch, 1, 1)  # refuses an unknown policy
        check_policy(self.non_finite)

    def order(self) -> Order | StreamOrder:
        """Return the row of samples of the job.

        Raises:
            InputError: the data set has no samples.
        """
        if self.n_samples is None:
            return StreamOrder(self.seed)
        return Order(self.n_samples, self.seed)

"""What a user says of a job in any framework, and how the rest of it is completed."""

from dataclasses import dataclass
from typing import Final

from meshmend.errors import InputError, check_choice, check_count
from meshmend.train.core.chip_speeds import BY_SPEED, SHARES
from meshmend.train.core.share_checks import check_policy
from meshmend.train.core.step_sums import NON_FINITE, RAISE
from meshmend.train.core.worker_environment import worker_environment
from meshmend.train.data.samples import POLICIES, Order, StreamOrder
from meshmend.train.state.checkpoint import Saving
from meshmend.train.state.comparison import COMPARE_EVERY
from meshmend.train.state.resume import Resume

RESTORE, CONTINUE, STOP = "restore", "continue", "stop"
ON_WRONG_RESULT: Final = (RESTORE, CONTINUE, STOP)

_LARGEST_SEED: Final = 2**64 - 1  # of torch


@dataclass(frozen=True)
class JobSettings:
    """How many samples a step uses, how many steps there are, and where checkpoints are.

    `batch` counts the samples of a step over all chips. `n_samples` is the length of the data set,
    or None if that is a stream, whose samples are used in the order in which they come.
    `resume` is a folder of checkpoints: the job begins with the newest one that can be read. With
    "auto" that is the folder of `saving`, and the job begins anew if it has none.
    `non_finite` says what happens to a step whose sums are not finite: "raise" or "skip".
    The states of all chips are compared every `compare_every` steps. In one of every
    `check_shares` steps all shares are computed twice; 0: never, None: as the environment says.
    `on_wrong_result` says what a job does when a chip has computed wrong numbers: "restore" the
    newest checkpoint from before, "continue" without the chip, or "stop". `shares` are "equal", or
    by "speed": a chip that computes steadily slower than the others gets fewer samples.
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
    check_shares: int | None = None
    on_wrong_result: str | None = None
    shares: str | None = None

    def __post_init__(self) -> None:
        check_count("Job", "batch", self.batch, least=1)
        check_count("Job", "steps", self.steps, least=0)
        check_count("Job", "seed", self.seed, least=0, most=_LARGEST_SEED)
        check_count("Job", "compare_every", self.compare_every, least=1)
        check_count("Job", "check_shares", self.checked_every, least=0)
        if not isinstance(self.saving, Saving | None):
            raise InputError(
                "Job needs saving=Saving(folder, every=...), but got a "
                f"{type(self.saving).__name__}"
            )
        check_choice("a batch policy", self.policy, POLICIES)
        check_choice("non_finite", self.non_finite, NON_FINITE)
        check_policy(self.checked_every, self.policy)
        check_choice("shares", self.shared_by, SHARES)
        check_choice("on_wrong_result", self.wrong_result_policy, ON_WRONG_RESULT)

    def order(self) -> Order | StreamOrder:
        """Return the row of samples of the job.

        Raises:
            InputError: the data set has no samples.
        """
        if self.n_samples is None:
            return StreamOrder(self.seed)
        return Order(self.n_samples, self.seed)

    @property
    def checked_every(self) -> int:
        """In one of how many steps all shares are computed twice; 0: never."""
        usual = worker_environment().settings.check_shares
        return usual if self.check_shares is None else self.check_shares

    @property
    def wrong_result_policy(self) -> str:
        """What the job does when a chip has computed wrong numbers."""
        return self.on_wrong_result or worker_environment().settings.on_wrong_result

    @property
    def shared_by(self) -> str:
        """How the chips share the samples of a step."""
        return self.shares or worker_environment().settings.shares

    @property
    def n_notes(self) -> int:
        """How many numbers of its own a job needs in its sums: for shares by speed, a time each.

        There is a place for each chip of the mesh, whichever live: so sums always have the same
        sizes.
        """
        environment = worker_environment()
        is_needed = self.shared_by == BY_SPEED and environment.identity is not None
        return environment.whole.n_live if is_needed else 0

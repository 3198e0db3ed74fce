"""What a user says of a job in any framework, and how the rest of it is completed."""

from dataclasses import dataclass
from numbers import Integral
from typing import Final

from meshmend.errors import InputError, check_choice
from meshmend.train.core.chip_speeds import BY_SPEED, SHARES
from meshmend.train.core.share_checks import check_settings
from meshmend.train.core.step_sums import NON_FINITE, RAISE
from meshmend.train.core.worker_environment import worker_environment
from meshmend.train.data.samples import POLICIES, Order, StreamOrder
from meshmend.train.state.checkpoint import Saving
from meshmend.train.state.comparison import COMPARE_EVERY
from meshmend.train.state.resume import Resume
from meshmend.transport.codec import LARGEST

RESTORE, CONTINUE, STOP = "restore", "continue", "stop"
ON_WRONG_RESULT: Final = (RESTORE, CONTINUE, STOP)

# What a message to the coordinator can hold; a seed is also one of torch's.
_MOST: Final = dict.fromkeys(("batch", "steps", "check_shares"), LARGEST) | {"seed": 2**64 - 1}


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
        for name in ("batch", "steps", "compare_every"):
            value = getattr(self, name)
            if not isinstance(value, Integral):
                raise InputError(f"Job needs {name} as a whole number, but got {value!r}")
        if self.batch < 1 or self.steps < 0:
            raise InputError(
                f"Job needs a batch of at least 1 and at least 0 steps, but got "
                f"batch={self.batch} and steps={self.steps}"
            )
        if not isinstance(self.seed, Integral) or self.seed < 0:
            raise InputError(
                f"Job needs a seed that is a whole number of at least 0, but got {self.seed!r}"
            )
        for name, most in _MOST.items():
            value = getattr(self, name)
            if value is not None and value > most:
                raise InputError(f"Job needs {name} of at most {most}, but got {value}")
        if not isinstance(self.saving, Saving | None):
            raise InputError(
                "Job needs saving=Saving(folder, every=...), but got a "
                f"{type(self.saving).__name__}"
            )
        if self.compare_every < 1:
            raise InputError(
                f"Job needs compare_every of at least 1 step, but got {self.compare_every}"
            )
        check_choice("a batch policy", self.policy, POLICIES)
        check_choice("non_finite", self.non_finite, NON_FINITE)
        check_settings(self.checked_every, self.policy)
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

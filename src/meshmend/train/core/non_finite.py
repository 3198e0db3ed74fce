"""What a job does when the sums of a step are not finite: it tells who is to blame, and stops.

A sum is seen before any chip uses it, and all chips see the same. So the weights stay as they were
after the step before.
"""

import logging
from collections.abc import Sequence
from typing import Final

from meshmend.errors import InputError, NonFiniteError
from meshmend.membership.events import NonFiniteSum
from meshmend.topology.failures import Chip
from meshmend.train.core.worker_environment import WorkerEnvironment, coordinator_client
from meshmend.units import counted

RAISE, SKIP = "raise", "skip"
POLICIES: Final = (RAISE, SKIP)
_MOST_NAMES: Final = 3
_MOST_SKIPPED: Final = 20  # steps in a row
BUFFER: Final = "buffer "  # begins the name of a buffer, where parameters are named too

_log = logging.getLogger(__name__)


def check_policy(policy: str) -> None:
    """Raise InputError if there is no such policy."""
    if policy not in POLICIES:
        raise InputError(f"non_finite needs to be one of {', '.join(POLICIES)}, but got {policy!r}")


class NonFinite:
    """Reports sums that are not finite, and raises or lets the job skip the step."""

    def __init__(self, policy: str, environment: WorkerEnvironment) -> None:
        self._policy, self._environment = policy, environment
        self._n_in_a_row = 0

    def note_finite(self) -> None:
        """Note that the sums of a step are finite."""
        self._n_in_a_row = 0

    def report(self, step: int, chips: Sequence[Chip], culprits: Sequence[Sequence[str]]) -> None:
        """Report each chip that has something not finite; the list has one entry per chip.

        Raises:
            NonFiniteError: the policy is to raise, or too many steps in a row were skipped.
        """
        names = [name for each in culprits for name in each]
        buffers = [name for name in names if name.startswith(BUFFER)]
        what = "gradients" if len(buffers) < len(names) or not names else "buffers"
        words = [
            f"chip {chip}: {_names(names)}"
            for chip, names in zip(chips, culprits, strict=True)
            if names
        ]
        found = "; ".join(words) or "every chip's are, but their sum is too large"
        sentence = f"the {what} of step {step} are not finite: {found}"
        self._tell(step, dict(zip(chips, culprits, strict=True)))
        self._n_in_a_row += 1
        if what == "buffers":
            raise NonFiniteError(
                f"{sentence}; a change from or to a value that is not finite has no mean over the "
                "chips: buffers may hold such values, but a step must not change them"
            )
        if self._policy == RAISE:
            raise NonFiniteError(
                f"{sentence}; the weights are those after step {step - 1}. To go on without such "
                "steps, make the job with non_finite='skip'"
            )
        if self._n_in_a_row >= _MOST_SKIPPED:
            raise NonFiniteError(
                f"{sentence}; {self._n_in_a_row} steps in a row were skipped, so training stands "
                f"still: the weights are those after step {step - self._n_in_a_row}"
            )
        _log.warning("%s; the step changes no weights", sentence)

    def _tell(self, step: int, culprits: dict[Chip, Sequence[str]]) -> None:
        """Send the event of this chip, if it is to blame; if none is, the first chip sends one."""
        chip = self._environment.chip
        is_mine = bool(culprits[chip]) or (not any(culprits.values()) and chip == min(culprits))
        if is_mine and self._environment.identity is not None:
            names = tuple(culprits[chip][:_MOST_NAMES])
            coordinator_client().report(NonFiniteSum(chip, step, names, len(culprits[chip])))


def _names(names: Sequence[str]) -> str:
    some = ", ".join(names[:_MOST_NAMES])
    n_more = len(names) - _MOST_NAMES
    return f"{some} and {counted(n_more, 'more')}" if n_more > 0 else some

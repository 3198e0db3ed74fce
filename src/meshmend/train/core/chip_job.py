"""What a loop sees of its job in every framework: where it is, and what it asks of all chips."""

from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

from meshmend.errors import InputError
from meshmend.topology.failures import Chip
from meshmend.train.core.job_core import JobCore
from meshmend.train.core.learner import Learner


class ChipJob:
    """One chip's part in training the model of a learner; see `Job` and `JaxJob`."""

    _core: JobCore
    _learner: Learner
    steps: int

    @property
    def step_number(self) -> int:
        """The number of steps that are done."""
        return self._core.step_number

    @property
    def loss(self) -> float | None:
        """The mean loss over all samples of the last step; None before the first."""
        return self._core.loss

    @property
    def chips(self) -> tuple[Chip, ...]:
        """The chips that train now."""
        return self._core.chips

    @property
    def rank(self) -> int:
        """The number of this chip among those that train now; a failure may change it."""
        return self._core.rank

    @property
    def world_size(self) -> int:
        """How many chips train now."""
        return self._core.world_size

    @property
    def is_finished(self) -> bool:
        """Whether all steps are done, or all chips have agreed that the last one was the last."""
        return self._core.is_finished

    @property
    def is_leader(self) -> bool:
        """Whether this chip has rank 0: use it to print or plot once, not on every chip."""
        return self._core.is_leader

    def __len__(self) -> int:
        """Return the number of steps of the whole job, however many are done."""
        return self.steps

    def stop(self) -> None:
        """End the job early: all chips stop after the same step.

        That is the step in flight, or, after `step`, the next one. One chip that asks is enough.
        """
        self._core.is_stopping = True

    def after_step(self, callback: Callable[[Self], object]) -> None:
        """Call `callback(job)` after each step that counts, on every chip: to log, say."""
        self._core.after_step.append(lambda: callback(self))

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all chips, in the order of ranks; all chips must call this.

        A value is a number, a text, a tensor or array, or a list or dict of such. Before `step`, if
        the mesh changes, this returns this chip's value for each chip, and the step will not count.
        After `step`, it returns the values of the chips that are left, the same on all of them.

        Raises:
            InputError: the job does not run, or some chips have no samples to run the loop for.
        """
        if self._core.calls is None:
            return [value]
        packed = self._learner.framework.packed(value).tobytes()
        return [self._unpacked(each) for each in self._core.calls.gather(packed)]

    def all_reduce(self, value: Any) -> Any:
        """Return the sum of a value over all chips: a number, an array, or a list or dict of them.

        All chips must call this. It is for metrics and counts: every chip gets all values, and adds
        them up in the same order. For failures see `gather`.
        """
        return added(self.gather(value))

    def state(self) -> dict[str, Any]:
        """Return the training state at this step: that of the learner, and progress."""
        return self._core.state()

    def _unpacked(self, data: bytes) -> Any:
        return self._learner.framework.unpacked(np.frombuffer(data, dtype=np.uint8).copy())


def added(values: Sequence[Any]) -> Any:
    """Return the sum of values, in their order: numbers, arrays, or dicts and lists of them.

    Raises:
        InputError: two values have different keys or lengths, or cannot be added.
    """
    first = values[0]
    if isinstance(first, dict):
        if any(not isinstance(each, dict) or each.keys() != first.keys() for each in values):
            raise InputError(f"a sum needs the same keys everywhere, but got {list(values)!r:.200}")
        return {key: added([each[key] for each in values]) for key in first}
    if isinstance(first, list | tuple):
        if any(not isinstance(each, list | tuple) or len(each) != len(first) for each in values):
            raise InputError(f"a sum needs equally long lists, but got {list(values)!r:.200}")
        return type(first)(added(items) for items in zip(*values, strict=True))
    if first is None or isinstance(first, str):
        raise InputError(f"a sum needs numbers and tensors, but got {first!r:.60}")
    try:
        return sum(values[1:], start=first)
    except (TypeError, ValueError, RuntimeError) as error:  # such as two shapes
        raise InputError(f"a sum needs values alike, but: {error}") from None

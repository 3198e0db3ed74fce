"""What a job and Lightning's loops tell each other: batches, and how far the loops are."""

import math
from collections.abc import Callable, Iterator
from typing import Any, Final


class JobLoader:
    """The training loader of Lightning: an epoch of batches that the job hands out.

    `batch` counts the samples of a step over all chips. Batches cross the ends of epochs.
    """

    def __init__(
        self,
        loader: Any,
        n_chips: int,
        next_batch: Callable[[], Any],
        steps_done: Callable[[], int],
    ) -> None:
        self.dataset, self.collate = loader.dataset, loader.collate_fn
        self.batch: int = loader.batch_size * n_chips
        rounded = math.floor if loader.drop_last else math.ceil
        self._n_batches = max(1, int(rounded(len(loader.dataset) / self.batch)))
        self._next_batch, self._steps_done = next_batch, steps_done

    def __len__(self) -> int:
        return self._n_batches

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches that are left of the epoch."""
        for _ in range(self._n_batches - self._steps_done() % self._n_batches):
            yield self._next_batch()


class LightningProgress:
    """The states of Lightning's loops and callbacks, as part of a job's state.

    A chip that comes late takes them over before its own loops begin. Later the loops of all chips
    count for themselves.
    """

    is_compared: Final = False  # callbacks hold how long something took, and who saves

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._has_begun = False
        self._taken: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the loops and of the callbacks."""
        from lightning.pytorch.trainer.call import _call_callbacks_state_dict

        return {
            "fit_loop": self._trainer.fit_loop.state_dict(),
            "callbacks": _call_callbacks_state_dict(self._trainer),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the states, unless the loops have begun."""
        if not self._has_begun:
            self._taken = state

    def begin(self) -> None:
        """Give the loops and callbacks the states that were taken over, before they begin."""
        from lightning.pytorch.trainer.call import _call_callbacks_load_state_dict

        self._has_begun = True
        if self._taken is None:
            return
        loop = self._trainer.fit_loop
        loop.load_state_dict(self._taken["fit_loop"])
        loop.reset()  # as if the trainer had resumed from a checkpoint
        _call_callbacks_load_state_dict(self._trainer, self._taken)
        self._taken = None

"""A PyTorch model and its optimizer, as a job trains them."""

from collections.abc import Sequence
from typing import Any, Final, Protocol

import torch

from meshmend.train.gradients import Bytes, Gradients
from meshmend.train.shard_format import ShardFormat
from meshmend.train.torch_shards import TORCH_SHARDS
from meshmend.train.torch_state import digest, packed, tensors_of, unpacked
from meshmend.train.worker_loop import SumSizes


class Stateful(Protocol):
    """Anything whose state is part of the training, such as a learning-rate scheduler."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state: tensors, numbers and text."""

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any:
        """Replace the state."""


class TorchLearner:
    """A module, its optimizer, and further objects with a state, as a `Learner`."""

    shards: Final[ShardFormat] = TORCH_SHARDS

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        also: Sequence[Stateful] = (),
    ) -> None:
        self._model, self._optimizer, self._also = model, optimizer, tuple(also)
        self._gradients = Gradients(model)

    def gather(self, loss: torch.Tensor, scale: float, *, normalise: bool) -> None:
        """Put this chip's gradients and loss, times its scale, into the payloads."""
        self._gradients.gather(float(loss.detach()), scale, normalise=normalise)

    def sum_sizes(self) -> SumSizes:
        """Return the number of elements and the type of each sum of a step."""
        return self._gradients.sizes()

    def payloads(self) -> Sequence[Bytes]:
        """Return what this chip puts into each sum; the sums replace it in place."""
        return self._gradients.payloads()

    def clear(self) -> None:
        """Put zeros into the payloads, because this chip has no samples."""
        self._gradients.clear()

    def undo(self) -> None:
        """Reset running statistics to what they were before the step, which does not count."""
        self._gradients.restore()

    def update(self) -> float:
        """Step the optimizer with the sums; return the mean loss over all samples."""
        loss = self._gradients.scatter()
        self._optimizer.step()
        return loss

    def state(self) -> dict[str, Any]:
        """Return the state of the model, of the optimizer and of the objects in `also`."""
        return {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "also": [part.state_dict() for part in self._also],
        }

    def load(self, state: dict[str, Any]) -> None:
        """Replace these parts by those of another chip or of a checkpoint."""
        self._model.load_state_dict(state["model"])
        self._gradients.remember()
        self._optimizer.load_state_dict(state["optimizer"])
        for part, part_state in zip(self._also, state["also"], strict=True):
            part.load_state_dict(part_state)

    def packed(self, state: dict[str, Any]) -> Bytes:
        """Return a state, with the progress of the job, as bytes."""
        return packed(state)

    def unpacked(self, data: Bytes) -> dict[str, Any]:
        """Return the state that `packed` wrote."""
        state: dict[str, Any] = unpacked(data)
        return state

    def digest(self) -> str:
        """Return a hash of the bits of the state."""
        state = self.state()
        return digest(tensors_of([state["model"], state["optimizer"], state["also"]]))

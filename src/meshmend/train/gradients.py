"""What one step sums: weighted gradients, running statistics and the loss, in flat buffers.

There is one flat buffer per element type. The float32 buffer also holds:

- by how much the step changed the module's buffers, such as running means and counters. After the
  sum every chip has the same mean change over all samples;
- which parameters got a gradient;
- the loss, the weight, and whether to divide by the sum of the weights.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_TAIL = 3  # loss, weight, and the weight again if the sums are to be divided by it


@dataclass
class _Group:
    """The parameters of one element type as views of one flat tensor."""

    flat: torch.Tensor
    parameters: list[torch.nn.Parameter]
    views: list[torch.Tensor]

    @property
    def dtype(self) -> str:
        return str(self.flat.dtype).removeprefix("torch.")


class Gradients:
    """The flat buffers of a module; moves its gradients into them and back."""

    def __init__(self, model: torch.nn.Module) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._parameters = trained
        self._statistics = [buffer for buffer in model.buffers() if not buffer.is_complex()]
        self.remember()
        n_statistics = sum(buffer.numel() for buffer in self._statistics)
        single = [parameter for parameter in trained if parameter.dtype == torch.float32]
        extra = n_statistics + len(trained) + _TAIL
        self.groups = [_group(torch.float32, single, extra)]
        for dtype in dict.fromkeys(parameter.dtype for parameter in trained):
            if dtype != torch.float32:
                same = [parameter for parameter in trained if parameter.dtype == dtype]
                self.groups.append(_group(dtype, same, 0))
        first = self.groups[0].flat
        tail = first[len(first) - extra :]
        self._changes = tail[:n_statistics]
        self._used = tail[n_statistics : n_statistics + len(trained)]
        self._loss, self._weight, self._divisor = tail[-3:-2], tail[-2:-1], tail[-1:]

    def sizes(self) -> list[tuple[int, str]]:
        """Return the number of elements and the type of each flat buffer."""
        return [(group.flat.numel(), group.dtype) for group in self.groups]

    def payloads(self) -> list[Bytes]:
        """Return the memory of each flat buffer."""
        return [group.flat.view(torch.uint8).numpy() for group in self.groups]

    @torch.no_grad()
    def remember(self) -> None:
        """Copy the module's buffers, to find out later what a step has changed."""
        self._before = [buffer.clone() for buffer in self._statistics]

    @torch.no_grad()
    def restore(self) -> None:
        """Reset the module's buffers to the last copy, because the step does not count."""
        for buffer, before in zip(self._statistics, self._before, strict=True):
            buffer.copy_(before)

    @torch.no_grad()
    def gather(self, loss: float, weight: float, *, normalise: bool = False) -> None:
        """Put this chip's gradients times its weight into the flat buffers.

        With `normalise`, `scatter` divides by the sum of the weights. Without it, the weights of
        all chips must add up to one.
        """
        for group in self.groups:
            for parameter, view in zip(group.parameters, group.views, strict=True):
                if parameter.grad is None:
                    view.zero_()
                elif parameter.grad.data_ptr() != view.data_ptr():
                    view.copy_(parameter.grad)
        at = 0
        for buffer, before in zip(self._statistics, self._before, strict=True):
            change = self._changes[at : at + buffer.numel()].view(buffer.shape)
            change.copy_(buffer.to(torch.float64).sub(before.to(torch.float64)))
            at += buffer.numel()
        used = [parameter.grad is not None for parameter in self._parameters]
        self._used.copy_(torch.tensor(used, dtype=torch.float32))
        self._loss.fill_(loss)
        for group in self.groups:
            group.flat.mul_(weight)
        self._weight.fill_(weight)
        self._divisor.fill_(weight if normalise else 0.0)

    @torch.no_grad()
    def clear(self) -> None:
        """Fill the flat buffers with zeros, because this chip has no samples."""
        for group in self.groups:
            group.flat.zero_()

    @torch.no_grad()
    def scatter(self) -> float:
        """Copy the summed gradients to the parameters; return the mean loss over all samples."""
        divisor = float(self._divisor)
        if divisor > 0:
            for group in self.groups:
                group.flat.div_(divisor)
        used = dict(zip(self._parameters, (self._used > 0).tolist(), strict=True))
        for group in self.groups:
            for parameter, view in zip(group.parameters, group.views, strict=True):
                parameter.grad = view.to(parameter.device) if used[parameter] else None
        at = 0
        for buffer, before in zip(self._statistics, self._before, strict=True):
            change = self._changes[at : at + buffer.numel()].view(buffer.shape).to(buffer.device)
            if not buffer.is_floating_point():
                change = change.round()
            buffer.copy_(before.to(torch.float64).add(change.to(torch.float64)))
            at += buffer.numel()
        self.remember()
        return float(self._loss)


def _group(dtype: torch.dtype, parameters: Iterable[torch.nn.Parameter], extra: int) -> _Group:
    members = list(parameters)
    flat = torch.zeros(sum(each.numel() for each in members) + extra, dtype=dtype)
    views, at = [], 0
    for parameter in members:
        views.append(flat[at : at + parameter.numel()].view_as(parameter))
        at += parameter.numel()
    return _Group(flat, members, views)

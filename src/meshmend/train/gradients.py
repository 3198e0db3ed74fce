"""What one step sums: gradients, running statistics, the loss, flat and weighted.

One flat buffer per element type. The one of float32 also carries the module's floating buffers
(running means and the like: their mean over the samples is the same on every chip), which
parameters got a gradient at all, the loss, and the weight.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]

_TAIL = 2  # loss and weight


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
    """The flat buffers of a module, and the way of its gradients in and out of them."""

    def __init__(self, model: torch.nn.Module) -> None:
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._parameters = trained
        self._statistics = [
            buffer for buffer in model.buffers() if buffer.dtype == torch.float32 and buffer.numel()
        ]
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
        self._means = tail[:n_statistics]
        self._used = tail[n_statistics : n_statistics + len(trained)]
        self._loss, self._weight = tail[-2:-1], tail[-1:]

    def sizes(self) -> list[tuple[int, str]]:
        """Return the number of elements and the type of each flat buffer."""
        return [(group.flat.numel(), group.dtype) for group in self.groups]

    def payloads(self) -> list[Bytes]:
        """Return the memory of each flat buffer."""
        return [group.flat.view(torch.uint8).numpy() for group in self.groups]

    @torch.no_grad()
    def gather(self, loss: float, weight: float) -> None:
        """Put this chip's gradients times its weight into the flat buffers."""
        for group in self.groups:
            for parameter, view in zip(group.parameters, group.views, strict=True):
                if parameter.grad is None:
                    view.zero_()
                elif parameter.grad.data_ptr() != view.data_ptr():
                    view.copy_(parameter.grad)
        if self._statistics:
            torch.cat(
                [buffer.detach().cpu().reshape(-1) for buffer in self._statistics], out=self._means
            )
        used = [parameter.grad is not None for parameter in self._parameters]
        self._used.copy_(torch.tensor(used, dtype=torch.float32))
        self._loss.fill_(loss)
        for group in self.groups:
            group.flat.mul_(weight)
        self._weight.fill_(weight)

    @torch.no_grad()
    def clear(self) -> None:
        """Put nothing into the flat buffers: this chip has no samples."""
        for group in self.groups:
            group.flat.zero_()

    @torch.no_grad()
    def scatter(self, *, normalise: bool) -> float:
        """Give the summed gradients back to the parameters; return the loss over all samples.

        `normalise` divides by the sum of the weights, if that is not one by construction.
        """
        total = float(self._weight)
        loss = float(self._loss)
        if normalise:
            for group in self.groups:
                group.flat.div_(total)
            loss /= total
        used = dict(zip(self._parameters, (self._used > 0).tolist(), strict=True))
        for group in self.groups:
            for parameter, view in zip(group.parameters, group.views, strict=True):
                parameter.grad = view.to(parameter.device) if used[parameter] else None
        at = 0
        for buffer in self._statistics:
            mean = self._means[at : at + buffer.numel()]
            buffer.copy_(mean.view_as(buffer))
            at += buffer.numel()
        return loss


def _group(dtype: torch.dtype, parameters: Iterable[torch.nn.Parameter], extra: int) -> _Group:
    members = list(parameters)
    flat = torch.zeros(sum(each.numel() for each in members) + extra, dtype=dtype)
    views, at = [], 0
    for parameter in members:
        views.append(flat[at : at + parameter.numel()].view_as(parameter))
        at += parameter.numel()
    return _Group(flat, members, views)

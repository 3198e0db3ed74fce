"""Buckets: gradients of one element type as views of one flat tensor, which a sum replaces.

A bucket holds up to 1 MB, or up to a fifth of all gradients if that is more. Smaller buckets start
earlier, but each costs messages on every link. With five, about a fifth of the sum is left when the
backward pass is over.

The flat tensor is in the memory of the host, where sums are made. Gradients on a GPU go through a
copy of the bucket there, in a stream of its own and into pinned memory: neither the backward pass
nor this thread waits for them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
import torch.cuda

from meshmend.errors import InputError

cuda: Any = torch.cuda  # streams and events have no types
SMALLEST_BUCKET_BYTES: Final = 1_000_000

# `benchmarks/overlap.py`: with 8, sixteen chips on two cores take 7 % longer than DDP, with 5 they
# take 6 % less. With 4, four chips on slow links take 5 % longer than DDP, with 5 as long.
MOST_BUCKETS: Final = 5

Parameters = list[torch.nn.Parameter]


def trained_parameters(model: torch.nn.Module) -> dict[torch.nn.Parameter, str]:
    """Return the parameters of a model that are not frozen, with their names.

    Raises:
        InputError: one of them is sharded, complex, or has no shape yet.
    """
    trained = {
        parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad
    }
    for parameter, name in trained.items():
        if torch.nn.parameter.is_lazy(parameter):
            raise InputError(
                f"Job needs parameters that have a shape, but {name} has none yet; call the model "
                "once before you make the job"
            )
        if type(parameter.data) is not torch.Tensor:
            kind = type(parameter.data).__name__
            raise InputError(
                f"Job needs the whole of each parameter on every chip, but {name} is a {kind}; "
                "pass the model before it is sharded"
            )
        if not parameter.is_floating_point():
            raise InputError(
                f"Job needs parameters of real numbers, but {name} is {parameter.dtype}; store its "
                "real and imaginary part as two parameters"
            )
    return trained


def bucket_layout(
    parameters: Sequence[torch.nn.Parameter],
    bucket_bytes: int | None = None,
    *,
    last: torch.dtype = torch.float32,
) -> list[tuple[torch.dtype, Parameters]]:
    """Return the element type and the parameters of each bucket, in the order of their sums.

    Goes backwards through the parameters. A bucket holds up to `bucket_bytes`. The last one is
    of type `last` and may have no parameters, because it also holds what a step sums besides
    gradients.
    """
    total = sum(parameter.nbytes for parameter in parameters)
    limit = bucket_bytes or max(SMALLEST_BUCKET_BYTES, total // MOST_BUCKETS)
    full: list[tuple[torch.dtype, Parameters]] = []
    filling: dict[torch.dtype, Parameters] = {last: []}
    for parameter in reversed(parameters):
        members = filling.setdefault(parameter.dtype, [])
        if members and _n_bytes(members) + parameter.nbytes > limit:
            full.append((parameter.dtype, members))
            members = filling[parameter.dtype] = []
        members.append(parameter)
    in_last = filling.pop(last)
    return [*full, *filling.items(), (last, in_last)]


def _n_bytes(parameters: Parameters) -> int:
    return sum(parameter.nbytes for parameter in parameters)


@dataclass
class Bucket:
    """Parameters of one element type, and their gradients as views of one flat tensor."""

    flat: torch.Tensor
    parameters: dict[torch.nn.Parameter, str]  # with their names
    n_missing: int = 0  # gradients that this step's backward pass has not computed yet
    scale: float | None = None  # of a sum that began in the backward pass; None if none did
    taken: list[tuple[torch.Tensor | None, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._views = _views_of(self.flat, self.parameters)

    @property
    def dtype(self) -> str:
        return str(self.flat.dtype).removeprefix("torch.")

    @property
    def elements(self) -> torch.Tensor:
        """The gradients, without what else the last bucket holds."""
        return self.flat[: sum(parameter.numel() for parameter in self.parameters)]

    def begin(self) -> None:
        """Begin a step: no gradient of it has come, and no sum of it has begun."""
        self.n_missing, self.scale, self.taken = len(self.parameters), None, []
        for parameter in self.parameters:
            parameter.grad = None

    def take(self, scale: float) -> None:
        """Begin to fill the bucket for a sum that begins before the step ends."""
        self.scale = scale
        self.taken = [_version(parameter) for parameter in self.parameters]
        self.fill(scale)

    def fill(self, scale: float) -> None:
        """Begin to put the parameters' gradients, times a scale, into the flat tensor."""
        for (parameter, name), view in zip(self.parameters.items(), self._views, strict=True):
            gradient = parameter.grad
            if gradient is None or not scale:  # a gradient of weight 0 may be no number
                view.zero_()
                continue
            _refuse_unlike(gradient, view, name)
            if gradient.device == view.device:
                torch.mul(gradient, scale, out=view)
            else:
                view.copy_(gradient).mul_(scale)

    @property
    def is_full(self) -> bool:
        """Whether the flat tensor holds what `fill` puts into it."""
        return True

    def await_full(self) -> None:
        """Return when the bucket is full."""

    def empty(self) -> None:
        """Fill the flat tensor with zeros."""
        self.flat.zero_()

    def give(self, used: Mapping[torch.nn.Parameter, bool]) -> None:
        """Make the sums the gradients of those parameters that are used."""
        self.scale, self.taken = None, []
        for parameter, view in zip(self.parameters, self._views, strict=True):
            parameter.grad = view.to(parameter.device) if used[parameter] else None

    def is_stale(self, scale: float) -> bool:
        """Whether the gradients or their scale have changed since a sum began."""
        if self.scale is None:
            return False
        now = (_version(parameter) for parameter in self.parameters)
        return scale != self.scale or any(
            mine[0] is not other[0] or mine[1] != other[1]
            for mine, other in zip(self.taken, now, strict=True)
        )


class GpuBucket(Bucket):
    """A bucket of parameters on one GPU; its flat tensor is pinned."""

    def __post_init__(self) -> None:
        device = next(iter(self.parameters)).device
        self._on_gpu = torch.zeros(self.elements.numel(), dtype=self.flat.dtype, device=device)
        self._views = _views_of(self._on_gpu, self.parameters)
        self._stream = cuda.Stream(device)
        self._copied = cuda.Event()  # the last copy, in either direction

    def fill(self, scale: float) -> None:
        """Begin to put the parameters' gradients, times a scale, into the flat tensor."""
        gradients = [parameter.grad for parameter in self.parameters]
        self._stream.wait_stream(cuda.current_stream(self._on_gpu.device))
        with cuda.stream(self._stream):
            for gradient, view, name in zip(
                gradients, self._views, self.parameters.values(), strict=True
            ):
                if gradient is None or not scale:
                    view.zero_()
                    continue
                _refuse_unlike(gradient, view, name)
                torch.mul(gradient, scale, out=view)
                gradient.record_stream(self._stream)  # it may be freed before that has run
            self.elements.copy_(self._on_gpu, non_blocking=True)
            self._copied.record()

    @property
    def is_full(self) -> bool:
        """Whether the flat tensor holds what `fill` puts into it."""
        return bool(self._copied.query())

    def await_full(self) -> None:
        """Return when the bucket is full."""
        self._copied.synchronize()

    def empty(self) -> None:
        """Fill the flat tensor with zeros, once its last copy is over."""
        self._copied.synchronize()
        super().empty()

    def give(self, used: Mapping[torch.nn.Parameter, bool]) -> None:
        """Make the sums the gradients of those parameters that are used."""
        self._on_gpu.copy_(self.elements, non_blocking=True)
        self._copied.record(cuda.current_stream(self._on_gpu.device))
        super().give(used)


def bucket_of(dtype: torch.dtype, parameters: dict[torch.nn.Parameter, str], extra: int) -> Bucket:
    """Return the bucket of some parameters, with `extra` elements after their gradients."""
    n_elements = sum(each.numel() for each in parameters) + extra
    devices = {parameter.device for parameter in parameters}
    is_on_gpu = len(devices) == 1 and devices.pop().type == "cuda"
    flat = torch.zeros(n_elements, dtype=dtype, device="cpu", pin_memory=is_on_gpu)
    return (GpuBucket if is_on_gpu else Bucket)(flat, parameters)


def _views_of(
    flat: torch.Tensor, parameters: Mapping[torch.nn.Parameter, str]
) -> list[torch.Tensor]:
    views, at = [], 0
    for parameter in parameters:
        views.append(flat[at : at + parameter.numel()].view_as(parameter))
        at += parameter.numel()
    return views


def _version(parameter: torch.nn.Parameter) -> tuple[torch.Tensor | None, int]:
    """Return a parameter's gradient, and how often it was changed in place."""
    gradient = parameter.grad
    return gradient, -1 if gradient is None else gradient._version


def _refuse_unlike(gradient: torch.Tensor, view: torch.Tensor, name: str) -> None:
    """Raise InputError if a gradient is no dense tensor of its parameter's type."""
    if gradient.layout != torch.strided:
        raise InputError(
            f"Job cannot sum sparse gradients, but that of {name} is; make its layer with "
            "sparse=False"
        )
    if gradient.dtype != view.dtype:
        raise InputError(
            f"Job needs gradients of their parameters' type, but that of {name} is "
            f"{gradient.dtype}, and the parameter is {view.dtype}"
        )

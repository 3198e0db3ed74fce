"""Which parameters share a bucket, and which parameters a job can train.

The rule for the size: a bucket holds up to 1 MB, or up to a fifth of all gradients if that is
more. Smaller buckets start earlier, but each costs messages on every link. With five, about a fifth
of the sum is left when the backward pass is over.
"""

from collections.abc import Sequence
from typing import Final

import torch

from meshmend.errors import InputError

SMALLEST_BUCKET_BYTES: Final = 1_000_000
# `benchmarks/overlap.py`: with 8, sixteen chips on two cores take 7 % longer than DDP, with 5 they
# take 6 % less. With 4, four chips on slow links take 5 % longer than DDP, with 5 as long.
MOST_BUCKETS: Final = 5

Parameters = list[torch.nn.Parameter]


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

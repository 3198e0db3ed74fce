"""A workload whose model has weights in bfloat16: half of the memory and of the bytes to gather.

Normalisations keep float32: their statistics need it, and PyTorch computes them so.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch

from meshmend.lab.workloads.workload import Batch, Scores, Workload

_IN_FLOAT32: Final = (torch.nn.BatchNorm2d, torch.nn.GroupNorm, torch.nn.LayerNorm)


def with_bfloat16(workload: Workload) -> Workload:
    """Return a workload with its model's weights, and the samples that it sees, in bfloat16."""

    def model() -> torch.nn.Module:
        made = workload.new_model()
        for module in made.modules():
            if not isinstance(module, _IN_FLOAT32):
                for parameter in module.parameters(recurse=False):
                    parameter.data = parameter.data.bfloat16()
        return made

    return replace(
        workload,
        name=f"{workload.name}, in bfloat16",
        new_model=model,
        scores=_on_bfloat16(workload.scores),
    )


def _on_bfloat16(
    scores: Callable[[torch.nn.Module, Batch], Scores],
) -> Callable[[torch.nn.Module, Batch], Scores]:
    def on_bfloat16(model: torch.nn.Module, batch: Batch) -> Scores:
        return scores(
            model, [each.bfloat16() if each.is_floating_point() else each for each in batch]
        )

    return on_bfloat16

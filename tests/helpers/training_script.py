"""The script of a small training job; tests say what it does besides."""

from textwrap import dedent, indent

_TEXT = """
import os, select, sys, time
from pathlib import Path

import torch
from meshmend.train import Job, Saving

{first}
torch.manual_seed(0)
inputs = torch.randn(500, 8)
dataset = torch.utils.data.TensorDataset(inputs, inputs @ torch.randn(8, 1))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
job = Job(model, optimizer, dataset, {job})
for inputs, labels in job:
    loss = torch.nn.functional.mse_loss(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    counts = job.step(loss)
{each_step}
{last}
"""

# What such a script does first so that one chip computes another loss after its first steps.
WRONG_FROM_STEP_8 = """
import itertools

if os.environ["MESHMEND_CHIP"] == "{chip}":
    right, turns = torch.nn.functional.mse_loss, itertools.count()
    torch.nn.functional.mse_loss = lambda *given: right(*given) * (2 if next(turns) > 8 else 1)
"""


def training_script(job: str, each_step: str, *, first: str = "", last: str = "") -> str:
    """Return a script that fits a linear model to made-up samples.

    `job` are further arguments of `Job`. The script does `first` before it makes the job,
    `each_step` after each step, where `counts` says whether the step counts, and `last` at its end.
    """
    return _TEXT.format(
        first=dedent(first).strip(),
        job=job,
        each_step=indent(dedent(each_step).strip(), "    "),
        last=dedent(last).strip(),
    )

"""Where a job begins and ends, when its caller decides that: `begin_at` and `end_after`."""

import pytest
import torch

from meshmend.errors import InputError
from meshmend.train import Job


def job_of(steps: int) -> Job:
    """Return a job of one chip over eight samples."""
    model = torch.nn.Linear(1, 1)
    samples = torch.utils.data.TensorDataset(torch.arange(8.0).reshape(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return Job(model, optimizer, samples, batch=2, steps=steps)


def run(job: Job) -> list[list[float]]:
    """Run a job to its end; return the samples of each step."""
    assert isinstance(job.model, torch.nn.Module)
    used = []
    for (inputs,) in job:
        loss = job.model(inputs).square().mean()
        loss.backward()
        assert job.step(loss)
        used.append(inputs.flatten().tolist())
    return used


def test_a_job_that_begins_at_a_step_uses_the_samples_after_it() -> None:
    whole, part = job_of(6), job_of(6)

    part.begin_at(4)

    assert run(part) == run(whole)[4:]


def test_a_job_ends_after_the_step_that_its_caller_names() -> None:
    job = job_of(6)

    job.end_after(3)

    assert len(run(job)) == 3
    assert (job.step_number, job.steps) == (3, 3)


@pytest.mark.parametrize("step", [-1, 7])
def test_a_job_cannot_begin_outside_its_steps(step: int) -> None:
    with pytest.raises(InputError, match="begins at a step from 0 to 6"):
        job_of(6).begin_at(step)


def test_a_job_that_has_begun_cannot_begin_elsewhere() -> None:
    job = job_of(2)
    run(job)

    with pytest.raises(InputError, match="before its first step"):
        job.begin_at(1)

"""Seeds the random numbers of a step, so that a step done again draws the same ones."""

import torch


def seed_torch(number: int) -> None:
    """Seed torch's random numbers: the CPU's always, the GPU's only if it is in use.

    `torch.manual_seed` looks for every kind of device. That is too slow for small steps.
    """
    torch.default_generator.manual_seed(number)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]  # torch's stubs
        torch.cuda.manual_seed_all(number)

"""A GPT of 0.1 million parameters that learns Python's help texts, letter by letter: a workload.

The texts come with Python, so nothing is loaded from the network. There is no dropout, because a
step that is done again must give the same result.
"""

from dataclasses import replace

import numpy as np
import torch
from torch.nn import functional

from meshmend.lab.workloads.gpt import Passages
from meshmend.lab.workloads.workload import Batch, Scores, Workload

LENGTH = 32  # letters that the model sees
_WIDTH, _LAYERS, _HEADS = 64, 2, 4
_RATE = 2e-3
_HELD_OUT_EVERY = 10


def small_gpt(seed: int = 0) -> Workload:
    """Return a GPT-2 of 2 layers of width 64 that predicts the next of 32 letters."""
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics))
    alphabet = {letter: number for number, letter in enumerate(sorted(set(text)))}
    n_passages = len(text) // (LENGTH + 1)
    numbers = [alphabet[letter] for letter in text[: n_passages * (LENGTH + 1)]]
    passages = np.array(numbers, dtype=np.int64).reshape(n_passages, LENGTH + 1)
    is_held_out = np.arange(n_passages) % _HELD_OUT_EVERY == 1

    def model() -> torch.nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        config = GPT2Config(
            vocab_size=len(alphabet),
            n_positions=LENGTH,
            n_embd=_WIDTH,
            n_layer=_LAYERS,
            n_head=_HEADS,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        made: torch.nn.Module = GPT2LMHeadModel(config)
        return made

    def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=_RATE)

    return Workload(
        "a small GPT on the help texts of Python",
        Passages(passages[~is_held_out]),
        Passages(passages[is_held_out]),
        model,
        optimizer,
        _scores,
        seed,
    )


def in_float64(workload: Workload) -> Workload:
    """Return a workload whose model computes in float64."""
    return replace(
        workload,
        name=f"{workload.name}, in float64",
        new_model=lambda: workload.new_model().double(),
    )


def _scores(model: torch.nn.Module, batch: Batch) -> Scores:
    letters, following = batch
    guesses = model(input_ids=letters).logits
    return {
        "loss": functional.cross_entropy(guesses.flatten(0, 1), following.flatten()),
        "accuracy": (guesses.detach().argmax(2) == following).float().mean(),
    }

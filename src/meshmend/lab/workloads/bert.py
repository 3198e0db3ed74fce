"""BERT pre-training as a workload: masked words, and next sentence prediction.

The model is an untrained one of the transformers package, made from a configuration. `full` is
BERT-large as published, with 336,226,108 parameters. There is no dropout, because a step that is
done again must give the same result.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from meshmend.lab.workloads.texts import TextSource, library_text, text_folder
from meshmend.lab.workloads.workload import Batch, Scores, Workload

if TYPE_CHECKING:
    from transformers import BertConfig

_TINY_LENGTH, _TINY_TOKENS = 32, 2048
_FULL_LENGTH, _FULL_TOKENS = 128, 30522


def tiny_bert(data: Path | None, *, seed: int) -> Workload:
    """Return a BERT with 2 layers of hidden size 128, on samples of 32 tokens."""
    source = _text(data, _TINY_LENGTH, _TINY_TOKENS, seed=seed)
    config = _config(
        vocab_size=_TINY_TOKENS,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=512,
        max_position_embeddings=_TINY_LENGTH,
    )
    return _bert(source, config, name="tiny BERT", rate=1e-3, seed=seed)


def full_bert(data: Path | None, *, seed: int) -> Workload:
    """Return BERT-large on samples of 128 tokens, the length of most of its pre-training."""
    source = _text(data, _FULL_LENGTH, _FULL_TOKENS, seed=seed)
    config = _config(
        vocab_size=_FULL_TOKENS,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
    )
    return _bert(source, config, name="BERT-large", rate=1e-4, seed=seed)


def _config(**sizes: int) -> "BertConfig":
    """Return a configuration without dropout, so that a step depends on its samples only."""
    from transformers import BertConfig

    return BertConfig(**sizes, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def _text(data: Path | None, length: int, max_tokens: int, *, seed: int) -> TextSource:
    if data is None:
        return library_text(length=length, max_tokens=max_tokens, seed=seed)
    return text_folder(data, length=length, max_tokens=max_tokens, seed=seed)


def _bert(
    source: TextSource, config: "BertConfig", *, name: str, rate: float, seed: int
) -> Workload:
    def model() -> torch.nn.Module:
        from transformers import BertForPreTraining

        made: torch.nn.Module = BertForPreTraining(config)
        return made

    def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=rate)

    return Workload(
        f"{name} on {source.name}",
        source.train,
        source.held_out,
        model,
        optimizer,
        _scores,
        seed,
    )


def _scores(model: torch.nn.Module, batch: Batch) -> Scores:
    """Return the scores of a batch; words are predicted at the masked places only."""
    tokens, segments, masked, originals, is_random_next = batch
    body = model.get_submodule("bert")(input_ids=tokens, token_type_ids=segments)
    heads = model.get_submodule("cls")
    at_masked = masked.unsqueeze(2).expand(-1, -1, body.last_hidden_state.shape[2])
    guesses, order = heads(body.last_hidden_state.gather(1, at_masked), body.pooler_output)
    guesses, order = guesses.float(), order.float()  # also of a model in bfloat16
    words = functional.cross_entropy(guesses.flatten(0, 1), originals.flatten())
    return {
        "loss": words + functional.cross_entropy(order, is_random_next),
        "word_loss": words.detach(),
        "accuracy": (guesses.detach().argmax(2) == originals).float().mean(),
    }

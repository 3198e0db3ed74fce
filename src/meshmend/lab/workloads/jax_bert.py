"""A tiny BERT in JAX: masked words and next sentence prediction, as in the PyTorch workload."""

from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshmend.lab.workloads.jax_layers import (
    Params,
    dense,
    dense_params,
    layer_norm,
    norm_params,
)
from meshmend.lab.workloads.jax_workload import JaxWorkload, SampleScores
from meshmend.lab.workloads.texts import library_text, text_folder

_LENGTH, _N_TOKENS = 32, 2048
_WIDTH, _N_LAYERS, _N_HEADS, _INNER = 128, 2, 2, 512
_RATE: Final = 1e-3
_DECAY: Final = 0.01
_SCALE: Final = 0.02  # of all weights, as published

_cross_entropy = optax.softmax_cross_entropy_with_integer_labels


def tiny_jax_bert(data: Path | None, *, seed: int) -> JaxWorkload:
    """Return a BERT with 2 layers of hidden size 128, on samples of 32 tokens, without dropout."""
    if data is None:
        source = library_text(length=_LENGTH, max_tokens=_N_TOKENS, seed=seed)
    else:
        source = text_folder(data, length=_LENGTH, max_tokens=_N_TOKENS, seed=seed)
    return JaxWorkload(
        f"tiny JAX BERT on {source.name}",
        source.train,
        source.held_out,
        lambda seed: _params(np.random.default_rng(seed)),
        lambda rate: optax.adamw(rate, weight_decay=_DECAY),
        _scores,
        rate=_RATE,
        seed=seed,
    )


def _params(random: np.random.Generator) -> Params:
    def table(n_rows: int) -> Any:
        return random.normal(0.0, _SCALE, (n_rows, _WIDTH)).astype(np.float32)

    def linear(n_in: int, n_out: int) -> Params:
        return dense_params(random, n_in, n_out, scale=_SCALE)

    layers = [
        {
            "query_key_value": linear(_WIDTH, 3 * _WIDTH),
            "attended": linear(_WIDTH, _WIDTH),
            "attended_norm": norm_params(_WIDTH),
            "inner": linear(_WIDTH, _INNER),
            "outer": linear(_INNER, _WIDTH),
            "outer_norm": norm_params(_WIDTH),
        }
        for _ in range(_N_LAYERS)
    ]
    return {
        "tokens": table(_N_TOKENS),
        "places": table(_LENGTH),
        "segments": table(2),
        "embedded_norm": norm_params(_WIDTH),
        "layers": layers,
        "pooler": linear(_WIDTH, _WIDTH),
        "next": linear(_WIDTH, 2),
        "word": linear(_WIDTH, _WIDTH),
        "word_norm": norm_params(_WIDTH),
        "word_bias": np.zeros(_N_TOKENS, np.float32),
    }


def _scores(params: Params, batch: tuple[Any, ...]) -> SampleScores:
    """Return the scores of each sample; words are predicted at the masked places only."""
    tokens, segments, masked, originals, is_random_next = batch
    hidden = params["tokens"][tokens] + params["places"] + params["segments"][segments]
    hidden = layer_norm(params["embedded_norm"], hidden)
    for layer in params["layers"]:
        hidden = _layer(layer, hidden)
    at_masked = jnp.take_along_axis(hidden, masked[:, :, None], axis=1)
    words = layer_norm(params["word_norm"], jax.nn.gelu(dense(params["word"], at_masked)))
    guesses = words @ params["tokens"].T + params["word_bias"]
    word_loss = _cross_entropy(guesses, originals).mean(axis=1)
    order = dense(params["next"], jnp.tanh(dense(params["pooler"], hidden[:, 0])))
    return {
        "loss": word_loss + _cross_entropy(order, is_random_next),
        "word_loss": word_loss,
        "accuracy": (guesses.argmax(axis=2) == originals).astype(jnp.float32).mean(axis=1),
    }


def _layer(params: Params, hidden: jax.Array) -> jax.Array:
    n_samples, length, _ = hidden.shape
    heads = dense(params["query_key_value"], hidden)
    heads = heads.reshape(n_samples, length, 3, _N_HEADS, _WIDTH // _N_HEADS)
    query, key, value = (heads[:, :, part] for part in range(3))
    scores = jnp.einsum("sqhd,skhd->shqk", query, key) / (_WIDTH // _N_HEADS) ** 0.5
    mixed = jnp.einsum("shqk,skhd->sqhd", jax.nn.softmax(scores, axis=-1), value)
    attended = dense(params["attended"], mixed.reshape(hidden.shape))
    hidden = layer_norm(params["attended_norm"], hidden + attended)
    inner = dense(params["outer"], jax.nn.gelu(dense(params["inner"], hidden)))
    return layer_norm(params["outer_norm"], hidden + inner)

"""A tiny ResNet in JAX, of the shape of the PyTorch workload: three stages of one basic block."""

from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshmend.lab.workloads.images import digits, image_folder
from meshmend.lab.workloads.jax_layers import (
    Params,
    conv,
    conv_params,
    dense,
    dense_params,
    group_norm,
    norm_params,
)
from meshmend.lab.workloads.jax_workload import JaxWorkload, SampleScores

_RATE: Final = 0.05
_CHANNELS: Final = (8, 16, 32)  # of the stages; the first layer has as many as the first stage
_SMALL_SIDE: Final = 32  # images with fewer rows keep their resolution in the first layer


def tiny_jax_resnet(data: Path | None, *, seed: int) -> JaxWorkload:
    """Return a ResNet of 20 thousand parameters on the digits, or on small images of a folder."""
    source = digits() if data is None else image_folder(data, side=_SMALL_SIDE)
    n_channels, *sides = source.train[0][0].shape
    is_small = sides[0] < _SMALL_SIDE

    def new_params(seed: int) -> Params:
        random = np.random.default_rng(seed)
        return _params(random, n_channels, source.n_classes, stem_side=3 if is_small else 7)

    def scores(params: Params, batch: tuple[Any, ...]) -> SampleScores:
        images, labels = batch
        logits = _logits(params, images, stem_stride=1 if is_small else 2)
        return {
            "loss": optax.softmax_cross_entropy_with_integer_labels(logits, labels),
            "accuracy": (logits.argmax(axis=1) == labels).astype(jnp.float32),
        }

    return JaxWorkload(
        f"tiny JAX ResNet (group norm) on {source.name}",
        source.train,
        source.held_out,
        new_params,
        lambda rate: optax.sgd(rate, momentum=0.9),
        scores,
        rate=_RATE,
        seed=seed,
    )


def _params(
    random: np.random.Generator, n_channels: int, n_classes: int, *, stem_side: int
) -> Params:
    stages, n_in = [], _CHANNELS[0]
    for n_out in _CHANNELS:
        stage = {
            "first": conv_params(random, n_in, n_out, 3),
            "first_norm": norm_params(n_out),
            "second": conv_params(random, n_out, n_out, 3),
            "second_norm": norm_params(n_out),
        }
        if n_in != n_out:
            stage["shortcut"] = conv_params(random, n_in, n_out, 1)
            stage["shortcut_norm"] = norm_params(n_out)
        stages.append(stage)
        n_in = n_out
    return {
        "stem": conv_params(random, n_channels, _CHANNELS[0], stem_side),
        "stem_norm": norm_params(_CHANNELS[0]),
        "stages": stages,
        "head": dense_params(random, n_in, n_classes, scale=float(n_in) ** -0.5),
    }


def _logits(params: Params, images: jax.Array, *, stem_stride: int) -> jax.Array:
    hidden = conv(params["stem"], images, stride=stem_stride)
    hidden = jax.nn.relu(group_norm(params["stem_norm"], hidden))
    for stage in params["stages"]:
        hidden = _block(stage, hidden)
    return dense(params["head"], hidden.mean(axis=(2, 3)))


def _block(params: Params, images: jax.Array) -> jax.Array:
    """Return the output of a basic block; one that changes the channels halves the resolution."""
    is_wider = "shortcut" in params
    stride = 2 if is_wider else 1
    hidden = group_norm(params["first_norm"], conv(params["first"], images, stride=stride))
    hidden = group_norm(params["second_norm"], conv(params["second"], jax.nn.relu(hidden)))
    kept = images
    if is_wider:
        kept = group_norm(params["shortcut_norm"], conv(params["shortcut"], images, stride=stride))
    return jax.nn.relu(hidden + kept)

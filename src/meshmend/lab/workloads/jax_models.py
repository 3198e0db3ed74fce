"""The workloads that `meshmend train --framework jax` offers, by name.

A workload is a value: parameters, their optimizer, their samples and their loss. Parameters are
drawn by NumPy, and a launcher asks for shapes only: it must not compute with JAX before it forks
the workers.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshmend.config import JobConfig
from meshmend.errors import InputError
from meshmend.lab.workloads.images import digits, image_folder
from meshmend.lab.workloads.model_names import check_model_names
from meshmend.lab.workloads.texts import library_text, text_folder
from meshmend.lab.workloads.trainable import SampleSet, n_notes_of, resume_of, saving_of
from meshmend.planning.plan_request import SumSizes
from meshmend.train.core.chip_speeds import BY_SPEED
from meshmend.train.jax.job import JaxJob, default_micro_batch, stacked
from meshmend.train.jax.learner import named_arrays
from meshmend.train.jax.program import FlatTree, Tree, jax_program
from meshmend.train.state.state_tree import ARRAYS, Framework

MAX_EVALUATED = 1024  # held-out samples; enough for the figures at the end of a run
_EVALUATION_BATCH = 64

# The scores of a batch by name, such as "loss" and "accuracy": one value per sample.
SampleScores = Mapping[str, jax.Array]


@dataclass(frozen=True)
class JaxWorkload:
    """A JAX model to train on samples; `new_params(seed)` returns NumPy arrays."""

    name: str
    dataset: SampleSet
    held_out: SampleSet
    new_params: Callable[[int], Tree]
    optimizer: Callable[[float], optax.GradientTransformation]
    scores: Callable[[Tree, tuple[Any, ...]], SampleScores]
    rate: float
    seed: int = 0

    @property
    def n_samples(self) -> int:
        """The number of samples to train on."""
        return len(self.dataset)

    @property
    def n_parameters(self) -> int:
        """The number of elements of all parameters."""
        return sum(leaf.size for leaf in jax.tree.leaves(self.params))

    @property
    def framework(self) -> Framework:
        """How its states become bytes."""
        return ARRAYS

    @cached_property
    def params(self) -> Tree:
        """The parameters before the first step: NumPy arrays, the same in every process."""
        return self.new_params(self.seed)

    def preload(self, config: JobConfig, n_chips: Sequence[int]) -> None:
        """Trace what workers compute, which needs no computation, so that they need not.

        A micro-batch has the same shape after a loss.
        """
        flat = FlatTree.of(self.params, n_notes_of(config))
        program = jax_program(self.loss, self._optimizer_of(config), flat, None)
        micro_batch = default_micro_batch(
            config.training.batch, n_chips[0], by_speed=config.job.shares == BY_SPEED
        )
        program.trace(self.params, stacked([self.dataset[0]]), micro_batch)

    def sum_sizes(self, config: JobConfig, n_chips: int) -> SumSizes:
        """Return the number of elements and the type of each sum of a step."""
        return FlatTree.of(self.params, n_notes_of(config)).sizes()

    def fresh_state(self) -> dict[str, Any]:
        """Return the training state before the first step; the optimizer's values are zeros."""
        described = jax.eval_shape(self.optimizer(self.rate).init, self.params)
        zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), described)
        return {
            "model": named_arrays(self.params),
            "optimizer": named_arrays(zeros),
            "also": [],
        }

    def loss(self, params: Tree, batch: Any) -> jax.Array:
        """Return the loss of each sample of a batch."""
        return self.scores(params, batch)["loss"]

    def train(self, config: JobConfig) -> Mapping[str, float]:
        """Run the loop of one worker; return the evaluation on the leader, and nothing elsewhere.

        Raises:
            InputError: the settings, or the checkpoint to resume, do not fit.
        """
        what = config.training
        job = JaxJob(
            self.params,
            self._optimizer_of(config),
            self.loss,
            self.dataset,
            batch=what.batch,
            steps=what.steps,
            seed=what.seed,
            policy=what.batch_policy,
            saving=saving_of(config),
            resume=resume_of(config),
        )
        for batch in job:
            job.step(batch)
        return self.evaluate(job.params) if job.is_leader else {}

    def _optimizer_of(self, config: JobConfig) -> optax.GradientTransformation:
        """Return the optimizer of these settings: the same object each time."""
        rate = config.training.lr or self.rate
        if rate not in self._optimizers:
            self._optimizers[rate] = self.optimizer(rate)
        return self._optimizers[rate]

    @cached_property
    def _optimizers(self) -> dict[float, optax.GradientTransformation]:
        return {}

    def evaluate(self, params: Tree) -> dict[str, float]:
        """Return the means of all scores over held-out samples."""
        n_samples = min(len(self.held_out), MAX_EVALUATED)
        totals: dict[str, float] = {}
        scores = jax.jit(self.scores)
        for start in range(0, n_samples, _EVALUATION_BATCH):
            # The last batch is filled with samples that do not count, so that all have one shape.
            places = range(start, start + _EVALUATION_BATCH)
            batch = stacked([self.held_out[min(at, n_samples - 1)] for at in places])
            n_counted = min(_EVALUATION_BATCH, n_samples - start)
            for name, values in scores(params, batch).items():
                totals[name] = totals.get(name, 0.0) + float(np.asarray(values)[:n_counted].sum())
        return {name: total / n_samples for name, total in totals.items()}


Params = dict[str, Any]  # arrays of JAX or NumPy


def jax_workload(model: str, *, data: Path | None = None, seed: int = 0) -> JaxWorkload:
    """Return a tiny workload in JAX; without `data` it trains on data of Python packages.

    Raises:
        InputError: the name is unknown, the data cannot be used, or a package is missing.
    """
    check_model_names(model, "tiny", "group")
    try:
        return (tiny_jax_bert if model == "bert" else tiny_jax_resnet)(data, seed=seed)
    except ImportError as error:
        raise InputError(
            f"the workload {model} needs {error.name}, but it is not installed; install it with "
            "pip install 'meshmend[train]'"
        ) from None


# A tiny ResNet, of the shape of the PyTorch workload: three stages of one basic block.

_RESNET_RATE: Final = 0.05
_CHANNELS: Final = (8, 16, 32)  # of the stages; the first layer has as many as the first stage
_SMALL_SIDE: Final = 32  # images with fewer rows keep their resolution in the first layer


def tiny_jax_resnet(data: Path | None, *, seed: int) -> JaxWorkload:
    """Return a ResNet of 20 thousand parameters on the digits, or on small images of a folder."""
    source = digits() if data is None else image_folder(data, side=_SMALL_SIDE)
    n_channels, *sides = source.train[0][0].shape
    is_small = sides[0] < _SMALL_SIDE

    def new_params(seed: int) -> Params:
        random = np.random.default_rng(seed)
        return _resnet_params(random, n_channels, source.n_classes, stem_side=3 if is_small else 7)

    def scores(params: Params, batch: tuple[Any, ...]) -> SampleScores:
        images, labels = batch
        logits = _resnet_logits(params, images, stem_stride=1 if is_small else 2)
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
        rate=_RESNET_RATE,
        seed=seed,
    )


def _resnet_params(
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


def _resnet_logits(params: Params, images: jax.Array, *, stem_stride: int) -> jax.Array:
    hidden = conv(params["stem"], images, stride=stem_stride)
    hidden = jax.nn.relu(group_norm(params["stem_norm"], hidden))
    for stage in params["stages"]:
        hidden = _resnet_block(stage, hidden)
    return dense(params["head"], hidden.mean(axis=(2, 3)))


def _resnet_block(params: Params, images: jax.Array) -> jax.Array:
    """Return the output of a basic block; one that changes the channels halves the resolution."""
    is_wider = "shortcut" in params
    stride = 2 if is_wider else 1
    hidden = group_norm(params["first_norm"], conv(params["first"], images, stride=stride))
    hidden = group_norm(params["second_norm"], conv(params["second"], jax.nn.relu(hidden)))
    kept = images
    if is_wider:
        kept = group_norm(params["shortcut_norm"], conv(params["shortcut"], images, stride=stride))
    return jax.nn.relu(hidden + kept)


# A tiny BERT: masked words and next sentence prediction, as in the PyTorch workload.

_LENGTH, _N_TOKENS = 32, 2048
_WIDTH, _N_LAYERS, _N_HEADS, _INNER = 128, 2, 2, 512
_BERT_RATE: Final = 1e-3
_DECAY: Final = 0.01
_BERT_SCALE: Final = 0.02  # of all weights, as published

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
        lambda seed: _bert_params(np.random.default_rng(seed)),
        lambda rate: optax.adamw(rate, weight_decay=_DECAY),
        _bert_scores,
        rate=_BERT_RATE,
        seed=seed,
    )


def _bert_params(random: np.random.Generator) -> Params:
    def table(n_rows: int) -> Any:
        return random.normal(0.0, _BERT_SCALE, (n_rows, _WIDTH)).astype(np.float32)

    def linear(n_in: int, n_out: int) -> Params:
        return dense_params(random, n_in, n_out, scale=_BERT_SCALE)

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


def _bert_scores(params: Params, batch: tuple[Any, ...]) -> SampleScores:
    """Return the scores of each sample; words are predicted at the masked places only."""
    tokens, segments, masked, originals, is_random_next = batch
    hidden = params["tokens"][tokens] + params["places"] + params["segments"][segments]
    hidden = layer_norm(params["embedded_norm"], hidden)
    for layer in params["layers"]:
        hidden = _bert_layer(layer, hidden)
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


def _bert_layer(params: Params, hidden: jax.Array) -> jax.Array:
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


# The layers of both, as functions of their parameters.

_EPSILON: Final = 1e-5
_GROUP: Final = 8  # channels per group in group normalisation


def dense_params(random: np.random.Generator, n_in: int, n_out: int, *, scale: float) -> Params:
    """Return a weight matrix of normal values and a bias of zeros."""
    weight = random.normal(0.0, scale, (n_in, n_out)).astype(np.float32)
    return {"weight": weight, "bias": np.zeros(n_out, np.float32)}


def dense(params: Params, inputs: jax.Array) -> jax.Array:
    """Return inputs times the weight plus the bias, along the last axis."""
    return jnp.add(jnp.matmul(inputs, params["weight"]), params["bias"])


def norm_params(n_channels: int) -> Params:
    """Return the scale and the bias of a normalisation."""
    return {"scale": np.ones(n_channels, np.float32), "bias": np.zeros(n_channels, np.float32)}


def layer_norm(params: Params, inputs: jax.Array) -> jax.Array:
    """Normalise along the last axis."""
    centred = inputs - inputs.mean(axis=-1, keepdims=True)
    spread = jax.lax.rsqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + _EPSILON)
    return jnp.add(centred * spread * params["scale"], params["bias"])


def group_norm(params: Params, images: jax.Array) -> jax.Array:
    """Normalise each sample (channels, rows, columns) in groups of eight channels."""
    n_samples, n_channels, *sides = images.shape
    grouped = images.reshape(n_samples, n_channels // _GROUP, -1)
    centred = grouped - grouped.mean(axis=2, keepdims=True)
    spread = jax.lax.rsqrt(jnp.square(centred).mean(axis=2, keepdims=True) + _EPSILON)
    normal = (centred * spread).reshape(images.shape)
    shape = (n_channels, *(1 for _ in sides))
    scale, bias = (jnp.reshape(params[name], shape) for name in ("scale", "bias"))
    return normal * scale + bias


def conv_params(random: np.random.Generator, n_in: int, n_out: int, side: int) -> Any:
    """Return the weights of a convolution, drawn as He et al. (2015) do."""
    scale = np.sqrt(2.0 / (n_out * side * side))
    return random.normal(0.0, scale, (n_out, n_in, side, side)).astype(np.float32)


def conv(weight: jax.Array, images: jax.Array, *, stride: int = 1) -> jax.Array:
    """Return the convolution of images (samples, channels, rows, columns), padded at the edges."""
    half = weight.shape[-1] // 2
    padding = ((half, half), (half, half))
    return jax.lax.conv_general_dilated(images, weight, (stride, stride), padding)

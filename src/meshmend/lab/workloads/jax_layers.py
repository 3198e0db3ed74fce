"""The layers of the JAX models, as functions of their parameters.

Parameters are drawn by NumPy: a launcher makes them before it forks the workers, and must not
compute with JAX.
"""

from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

Params = dict[str, Any]  # arrays of JAX or NumPy

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

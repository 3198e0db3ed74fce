"""Gradients of sums: a sum over chips is its own transpose, so its program runs both ways."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax

AxisName = str | tuple[str, ...]
Sum = Callable[[jax.Array, Any, AxisName], jax.Array]  # what a chip has, the program, the axis


def with_own_transpose(run: Sum) -> Sum:
    """Return a sum whose gradient is the sum of the gradients, by the same program.

    JAX's own gradient is right too, but the transpose of each slice is a sum over the whole buffer.
    """

    @partial(jax.custom_vjp, nondiff_argnums=(1, 2))
    def summed(array: jax.Array, program: Any, axis_name: AxisName) -> jax.Array:
        return run(array, program, axis_name)

    def forward(array: jax.Array, program: Any, axis_name: AxisName) -> tuple[jax.Array, None]:
        return summed(array, program, axis_name), None

    def backward(
        program: Any, axis_name: AxisName, _: None, gradient: jax.Array
    ) -> tuple[jax.Array]:
        return (summed(gradient, program, axis_name),)

    summed.defvjp(forward, backward)
    return summed

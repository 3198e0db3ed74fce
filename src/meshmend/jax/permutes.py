"""The backend `permutes`: a plan as one `lax.scan` whose steps are permutes between ranks."""

import jax

from meshmend.planning.plan import Plan

AxisName = str | tuple[str, ...]


def vector_sum(
    vector: jax.Array, plan: Plan, axis_name: AxisName, slices: int | None
) -> jax.Array:
    """Return the sum of every chip's vector, by the steps of the plan."""
    raise NotImplementedError

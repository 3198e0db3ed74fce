"""Checks of the backend `pallas` inside larger programs; `test_pallas` runs this as a script."""

import sys
from typing import Any

import jax
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from meshmend import plan
from meshmend.errors import InputError, UnsupportedError
from meshmend.jax import allreduce, pmean
from meshmend.topology.text import parse_mesh
from virtual_devices import run_checks

MESH = parse_mesh("3x3", fail=["1,1"])
MENDED = plan(MESH, "trees")
NUMBERS = np.random.default_rng(0).integers(-8, 8, (8, 700)).astype(np.float32)
DEVICES = np.array(jax.devices())
CHIPS = P("chips")


def summed(tree: Any, axis_name: Any = "chips") -> Any:
    return allreduce(tree, MENDED, axis_name, slices=1, backend="pallas")


def on(devices: NDArray[Any], names: tuple[str, ...], function: Any, spec: P = CHIPS) -> Any:
    """Return a function of arrays whose first axis is the chips, jitted, in the interpreter."""
    mesh = jax.sharding.Mesh(devices, names)
    run = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec))

    def interpreted(argument: Any) -> Any:
        with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
            return jax.block_until_ready(run(argument))

    return interpreted


def check_trees() -> None:
    """Leaves of several types are summed by one kernel each, one after another."""
    tree: dict[str, NDArray[Any]]
    tree = {"a": NUMBERS, "b": NUMBERS.astype(np.int32), "c": NUMBERS[:, :3].astype(np.float16)}

    for name, total in on(DEVICES[:8], ("chips",), summed)(tree).items():
        assert total.dtype == tree[name].dtype
        assert (np.asarray(total) == tree[name].sum(axis=0)).all()


def check_gradients() -> None:
    """The gradient through a mean agrees with that of `lax.pmean`."""

    def ours(numbers: jax.Array) -> Any:
        return (pmean(numbers, MENDED, backend="pallas") * numbers).sum()

    def theirs(numbers: jax.Array) -> Any:
        return (lax.pmean(numbers, "chips") * numbers).sum()

    ended, expected = (
        on(DEVICES[:8], ("chips",), jax.grad(loss))(NUMBERS) for loss in (ours, theirs)
    )
    np.testing.assert_allclose(ended, expected, rtol=1e-6)


def check_cores() -> None:
    """With several cores a chip, each core sums with those of its number."""
    spec = P("chips", "cores")

    ended = on(DEVICES.reshape(8, 2), ("chips", "cores"), summed, spec)(NUMBERS)

    assert (np.asarray(ended) == NUMBERS.sum(axis=0)).all()


def check_two_axes() -> None:
    """Chips may be two axes of a mesh."""
    axes = ("rows", "columns")

    def over_both(numbers: jax.Array) -> Any:
        return summed(numbers, axes)

    ended = on(DEVICES[:8].reshape(2, 4), axes, over_both, P(axes))(NUMBERS)

    assert (np.asarray(ended) == NUMBERS.sum(axis=0)).all()


def check_refusals() -> None:
    """What the kernel cannot do is said in one sentence."""
    run = on(DEVICES[:8], ("chips",), summed)
    with pytest.raises(UnsupportedError, match="at most 32 bits, but got complex64; use backend="):
        run(NUMBERS.astype(np.complex64))
    with pytest.raises(InputError, match="one slice or more, but got 0"):
        on(
            DEVICES[:8],
            ("chips",),
            lambda numbers: allreduce(numbers, MENDED, slices=0, backend="pallas"),
        )(NUMBERS)


CHECKS = {
    "trees": check_trees,
    "gradients": check_gradients,
    "cores": check_cores,
    "two axes": check_two_axes,
    "refusals": check_refusals,
}

if __name__ == "__main__":
    run_checks(CHECKS, sys.argv[1:])

"""A data-parallel step over 16 virtual devices in one process, with a hole that moves.

    python examples/jax/virtual_devices.py

A small network learns on a 4x4 mesh. Four chips drop out, come back, and four others drop out. The
global batch stays the same: the chips that are left share it out. It runs in two ways:

- **tables swapped**: one executable over all links of the mesh. The plan is an argument, so a hole
  that moves costs a new plan and new tables, and nothing is compiled. Every device still has to
  answer: this is for failed links, and for chips that are left out on purpose.
- **recompiled**: a new executable over the devices that are left. This is what a device that is
  gone needs.

Both learn the same, to rounding. Only `pip install 'meshmend[jax]'` is needed.
"""

import os
import time
from functools import partial

os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=16"
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from meshmend import Mesh, plan
from meshmend.jax import SumFrame, allreduce, check_neighbours, device_mesh
from meshmend.planning.lowering import lowered

WHOLE = Mesh((4, 4))
HOLES = ("2x2@0,2", None, "2x2@2,0")  # where the hole is in each part of the run; None: no hole
STEPS, BATCH, LEARNING_RATE = 8, 48, 0.5
ROWS = BATCH // 12  # of the batch per chip, at most; where there are fewer, the rest weighs nothing


def samples(step, live):
    """Return this step's inputs, targets and weights for all 16 chips; live ones share them out."""
    random = np.random.default_rng(step)
    inputs = random.normal(size=(BATCH, 8)).astype(np.float32)
    targets = np.tanh(inputs.sum(axis=1))
    shares = np.array_split(np.arange(BATCH), len(live))
    x, y = np.zeros((16, ROWS, 8), np.float32), np.zeros((16, ROWS), np.float32)
    weights = np.zeros((16, ROWS), np.float32)
    for rank, share in zip(live, shares, strict=True):
        x[rank, : len(share)], y[rank, : len(share)] = inputs[share], targets[share]
        weights[rank, : len(share)] = 1 / BATCH
    return x, y, weights


def loss(params, x, y, weights):
    """Return the part of the batch's mean squared error that these rows make."""
    guessed = jnp.tanh(x @ params["in"]) @ params["out"]
    return (weights * (guessed - y) ** 2).sum()


def updated(summed, params, x, y, weights):
    """One chip's step: its own gradients, the sum of all chips', and the same update everywhere."""
    own = jax.tree.map(lambda leaf: leaf[0], params)
    error, gradients = jax.value_and_grad(loss)(own, x[0], y[0], weights[0])
    error, gradients = summed((error, gradients))
    new = jax.tree.map(lambda leaf, slope: leaf - LEARNING_RATE * slope, own, gradients)
    return jax.tree.map(lambda leaf: leaf[None], (new, error))


def compiled_step(mesh, summed, *arguments):
    """Return a step over the live devices of a mesh, compiled; everything is sharded by chip."""
    step = jax.shard_map(
        lambda params, x, y, weights, *tables: updated(
            partial(summed, *tables), params, x, y, weights
        ),
        mesh=device_mesh(mesh, jax.devices()),
        in_specs=P("chips"),
        out_specs=P("chips"),
    )
    compiled = jax.jit(step).lower(*arguments).compile()
    check_neighbours(compiled, mesh)
    return compiled


def replicated(params, n_chips):
    """Return parameters with an axis of chips in front, the same for all."""
    return jax.tree.map(lambda leaf: np.stack([leaf] * n_chips), params)


def learned(swaps_tables):
    """Train through all holes in one of the two ways; return the losses and how long swaps took."""
    random = np.random.default_rng(0)
    params = {"in": random.normal(size=(8, 16)) / 3, "out": random.normal(size=16) / 4}
    params = jax.tree.map(np.float32, params)
    frame = SumFrame(WHOLE, n_steps=64, n_cells=80)
    step, losses, times = None, [], []
    for number, hole in enumerate(HOLES):
        mesh = WHOLE if hole is None else WHOLE.without(hole)
        live = [WHOLE.rank_of[chip] for chip in mesh.live]
        chips = range(16) if swaps_tables else live  # which take part in the executable
        # Chips that come back take the parameters of those that stayed.
        copies = replicated(params, len(chips))
        batches = [
            [array[list(chips)] for array in samples(STEPS * number + at, live)]
            for at in range(STEPS)
        ]

        began = time.perf_counter()
        mended = plan(mesh, "trees")
        planned = time.perf_counter()
        if swaps_tables:
            tables = (frame.tables(mended),)
            if step is None:
                summed = lambda tables, tree: frame.allreduce(tree, tables)  # noqa: E731
                step = compiled_step(WHOLE, summed, copies, *batches[0], *tables)
        else:
            tables = ()
            step = compiled_step(mesh, partial(allreduce, plan=mended), copies, *batches[0])
        times.append((planned - began, time.perf_counter() - planned))

        for batch in batches:
            copies, errors = step(copies, *batch, *tables)
            losses.append(float(np.asarray(errors)[chips.index(live[0])]))
        rows = [chips.index(rank) for rank in live]
        held = jax.tree.map(np.asarray, copies)
        for leaf in jax.tree.leaves(held):
            assert (leaf[rows] == leaf[rows[0]]).all(), "replicas differ"
        params = jax.tree.map(lambda leaf, row=rows[0]: leaf[row], held)
    return losses, times


def main():
    """Run both ways and compare them."""
    # At its first use on a machine the planner compiles its loops; that is not what is timed here.
    lowered(plan(WHOLE, "trees"))
    curves = []
    for way in ("tables swapped", "recompiled"):
        losses, times = learned(way == "tables swapped")
        curves.append(losses)
        print(f"{way}: loss {losses[0]:.4f} to {losses[-1]:.4f}, replicas equal")
        for hole, (plan_s, ready_s) in zip(HOLES, times, strict=True):
            what = f"hole {hole}" if hole else "no hole"
            print(f"  {what:<13} planned in {plan_s * 1e3:.0f} ms, ready in {ready_s * 1e3:.0f} ms")
    print(f"the two ways differ by at most {np.abs(np.subtract(*curves)).max():.0e}")


if __name__ == "__main__":
    main()

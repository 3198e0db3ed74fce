"""The same loop, mended: it goes on when chips die, and takes them back.

meshmend run --elastic --mesh 2x2 --preload optax examples/jax/survives.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshmend.train import JaxJob


def spirals(n_samples: int = 600) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    labels = np.arange(n_samples) % 3
    radius = random.uniform(0.1, 1.0, n_samples)
    angle = 4 * radius + 2 * np.pi / 3 * labels + random.normal(0, 0.1, n_samples)
    points = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return points.astype(np.float32), labels


def new_params() -> dict[str, jax.Array]:
    first, second = jax.random.split(jax.random.key(0))
    return {
        "hidden": jax.random.normal(first, (2, 64)),
        "bias": jnp.zeros(64),
        "output": jax.random.normal(second, (64, 3)) / 8,
    }


def losses(params: dict[str, jax.Array], batch: tuple[jax.Array, jax.Array]) -> jax.Array:
    points, labels = batch
    hidden = jnp.tanh(points @ params["hidden"] + params["bias"])
    return optax.softmax_cross_entropy_with_integer_labels(hidden @ params["output"], labels)


def main() -> None:
    job = JaxJob(new_params(), optax.adam(1e-2), losses, spirals(), batch=48, steps=600)
    for batch in job:
        if job.step(batch) and job.is_leader:
            print(f"step {job.step_number} loss {job.loss:.6f}")


if __name__ == "__main__":
    main()

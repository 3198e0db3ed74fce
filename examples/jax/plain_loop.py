"""A plain JAX training loop: which of three spirals is a point on?

python examples/jax/plain_loop.py
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax


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
    points, labels = spirals()
    params = new_params()
    optimizer = optax.adam(1e-2)
    opt_state = optimizer.init(params)

    @jax.jit
    def step(params, opt_state, batch):  # type: ignore[no-untyped-def]
        loss, gradients = jax.value_and_grad(lambda p: losses(p, batch).mean())(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    random = np.random.default_rng(0)
    for number in range(1, 601):
        chosen = random.choice(len(labels), 48, replace=False)
        params, opt_state, loss = step(params, opt_state, (points[chosen], labels[chosen]))
        print(f"step {number} loss {loss:.6f}")


if __name__ == "__main__":
    main()

"""Loops in JAX as strangers write them: parameters, an optimizer of optax, a loss per sample."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final


@dataclass(frozen=True)
class JaxStyle:
    """One way to write a loop: the optimizer, the loss of each sample, and the parameters.

    `refused` are words of the one line that refuses the loop, if it is refused. `like` is a style
    whose optimizer has such a state among others: a job sees no other difference between them.
    `change` is what the loop does by hand with parameters and state, before and after each step.
    """

    name: str
    optimizer: Callable[[], Any]
    losses: Callable[[Any, Any], Any]
    params: Callable[[], Any]
    refused: str = ""
    like: str = ""
    change: Callable[[Any, Any], None] = lambda *_: None


def params() -> Any:
    import numpy as np

    random = np.random.default_rng(3)
    return {
        "first": {"kernel": random.normal(size=(4, 6)) / 2, "bias": np.zeros(6)},
        "last": {"kernel": random.normal(size=(6, 1)) / 2, "bias": np.zeros(1)},
    }


def square(params: Any, batch: Any) -> Any:
    import jax.numpy as jnp

    inputs, labels = batch
    hidden = jnp.tanh(inputs @ params["first"]["kernel"] + params["first"]["bias"])
    found = hidden @ params["last"]["kernel"] + params["last"]["bias"]
    return ((found - labels) ** 2)[:, 0]


def tied(params: Any, batch: Any) -> Any:
    import jax.numpy as jnp

    inputs, labels = batch
    hidden = jnp.tanh(inputs @ params["first"]["kernel"])
    again = jnp.tanh(hidden @ params["first"]["kernel"].T)
    found = jnp.tanh(again @ params["first"]["kernel"]) @ params["last"]["kernel"]
    return ((found - labels) ** 2)[:, 0]


def masked(params: Any, batch: Any) -> Any:
    import jax
    import jax.numpy as jnp

    inputs, labels = batch
    hidden = jnp.tanh(inputs @ params["first"]["kernel"] + params["first"]["bias"])
    mask = jnp.triu(jnp.full((6, 6), -jnp.inf), 1)
    scores = jax.nn.softmax(hidden[:, :, None] * hidden[:, None, :] + mask)
    found = (scores @ hidden[:, :, None])[:, :, 0] @ params["last"]["kernel"]
    return ((found - labels) ** 2)[:, 0]


def normalised(params: Any, batch: Any) -> Any:
    inputs, labels = batch
    return square(params, ((inputs - inputs.mean(0)) / (inputs.std(0) + 0.1), labels))


def with_aux(params: Any, batch: Any) -> Any:
    return square(params, batch), {"batch": batch}


def variables() -> Any:
    import numpy as np

    return {"params": params(), "batch_stats": {"mean": np.zeros(6), "var": np.ones(6)}}


def of_variables(variables: Any, batch: Any) -> Any:
    return square(variables["params"], batch)


def sgd() -> Any:
    import optax

    return optax.sgd(0.05, momentum=0.9)


def adam() -> Any:
    import optax

    return optax.adam(0.03)


def schedule() -> Any:
    import optax

    return optax.adam(optax.exponential_decay(0.05, 3, 0.5))


def clipped() -> Any:
    import optax

    return optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(0.03, weight_decay=0.1))


def accumulating() -> Any:
    import optax

    return optax.MultiSteps(optax.adam(0.03), 2)


def by_layer() -> Any:
    import optax

    kinds = {"slow": optax.sgd(0.01), "fast": optax.adam(0.05)}
    return optax.multi_transform(kinds, {"first": "slow", "last": "fast"})


def if_finite() -> Any:
    import optax

    return optax.apply_if_finite(optax.adam(0.03), 3)


def noisy() -> Any:
    import jax
    import optax

    return optax.chain(optax.add_noise(0.01, 0.55, jax.random.key(7)), optax.sgd(0.05))


def with_a_rate() -> Any:
    import optax

    return optax.inject_hyperparams(optax.adam)(learning_rate=0.05)


def change_by_hand(params: Any, state: Any) -> None:
    params["last"]["kernel"] = params["last"]["kernel"] * 0.99
    state.hyperparams["learning_rate"] = float(state.hyperparams["learning_rate"]) * 0.95


def with_a_teacher() -> Any:
    return {"student": params(), "teacher": params()}


def taught(both: Any, batch: Any) -> Any:
    import jax

    mine, its = square(both["student"], batch), square(both["teacher"], batch)
    return mine + 0.1 * (mine - jax.lax.stop_gradient(its)) ** 2


def leaving_the_teacher() -> Any:
    import optax

    kinds = {"train": optax.adam(0.03), "keep": optax.set_to_zero()}
    return optax.multi_transform(kinds, {"student": "train", "teacher": "keep"})


def move_the_teacher(both: Any, _state: Any) -> None:
    import optax

    both["teacher"] = optax.incremental_update(both["student"], both["teacher"], 0.3)


def lbfgs() -> Any:
    import optax

    return optax.lbfgs()


JAX_STYLES: Final = (
    JaxStyle("SGD", sgd, square, params),
    JaxStyle("Adam", adam, square, params, like="accumulation"),
    JaxStyle("schedule", schedule, square, params, like="accumulation"),
    JaxStyle("clip and weight decay", clipped, square, params, like="accumulation"),
    JaxStyle("accumulation", accumulating, square, params),
    JaxStyle("rates per layer", by_layer, square, params),
    JaxStyle("apply if finite", if_finite, square, params),
    JaxStyle("weight tying", adam, tied, params, like="accumulation"),
    JaxStyle("mask of -inf", adam, masked, params, like="accumulation"),
    JaxStyle("random key in the state", noisy, square, params),
    JaxStyle("rate by hand", with_a_rate, square, params, change=change_by_hand),
    JaxStyle(
        "teacher in the parameters",
        leaving_the_teacher,
        taught,
        with_a_teacher,
        change=move_the_teacher,
    ),
    JaxStyle("mixed samples", adam, normalised, params, "that depends on no other"),
    JaxStyle("aux", adam, with_aux, params, "needs to return one loss per sample"),
    JaxStyle("batch statistics", adam, of_variables, variables, "needs the parameters alone"),
    JaxStyle("L-BFGS", lbfgs, square, params, "steps with the gradients, the parameters"),
)


def plain_run(style: JaxStyle, batches: list[Any]) -> list[tuple[float, Any]]:
    """Return the loss and the parameters after each step of a plain loop in one process."""
    import jax
    import jax.numpy as jnp
    import optax

    optimizer, own = style.optimizer(), jax.tree.map(jnp.asarray, style.params())
    state = optimizer.init(own)

    @jax.jit
    def step(own: Any, state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda own: style.losses(own, batch).mean())(own)
        changes, state = optimizer.update(gradients, state, own)
        return loss, optax.apply_updates(own, changes), state

    found = []
    for batch in batches:
        style.change(own, state)
        loss, own, state = step(own, state, batch)
        style.change(own, state)
        found.append((float(loss), jax.tree.map(jnp.asarray, own)))  # the loop changes `own`
    return found

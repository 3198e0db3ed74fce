"""The names of frameworks, models, sizes, norms and optimizers.

Imports next to nothing, so that the command line checks the names fast.
"""

from meshmend.errors import InputError

FRAMEWORKS = ("torch", "jax")
MODELS = ("resnet", "bert", "gpt")
SIZES = ("tiny", "full")
NORMS = ("batch", "group")
OPTIMIZERS = ("sgd", "adam", "adamw", "adagrad", "rmsprop", "lars", "lamb")


def check_model_names(model: str, size: str, norm: str) -> None:
    """Raise InputError unless all three names are known."""
    for what, name, names in (
        ("model", model, MODELS),
        ("size", size, SIZES),
        ("norm", norm, NORMS),
    ):
        if name not in names:
            raise InputError(f"the {what} needs to be one of {', '.join(names)}, but got {name!r}")


def check_framework(framework: str, model: str, size: str, norm: str) -> None:
    """Raise InputError unless the framework is known, and has such a model."""
    if framework not in FRAMEWORKS:
        known = ", ".join(FRAMEWORKS)
        raise InputError(f"the framework needs to be one of {known}, but got {framework!r}")
    if framework == "jax" and model == "gpt":
        raise InputError("--framework jax has resnet and bert, but got gpt; use --framework torch")
    if framework == "jax" and size != "tiny":
        raise InputError(f"--framework jax has tiny models only, but got --size {size}")
    if framework == "jax" and norm != "group":
        raise InputError(
            f"--framework jax has group normalisation only, but got --norm {norm}: a chip computes "
            "in micro-batches, whose statistics would be those of too few samples"
        )


def check_optimizer(
    framework: str, optimizer: str | None, *, is_sharded: bool, has_masters: bool
) -> None:
    """Raise InputError unless the optimizer is known, and the framework has what is asked of it."""
    if optimizer is not None and optimizer not in OPTIMIZERS:
        known = ", ".join(OPTIMIZERS)
        raise InputError(f"the optimizer needs to be one of {known}, but got {optimizer!r}")
    asked = {
        "--shard-optimizer": is_sharded,
        "--master-weights": has_masters,
        "--optimizer": optimizer is not None,
    }
    for option in (option for option, is_asked in asked.items() if is_asked):
        if framework == "jax":
            raise InputError(f"{option} needs --framework torch, but got jax")


def default_norm(framework: str) -> str:
    """Return the normalisation of ResNet unless another is asked for."""
    return "group" if framework == "jax" else "batch"

"""The names of frameworks, models, sizes, norms and optimizers.

Imports next to nothing, so that the command line checks the names fast.
"""

from meshmend.errors import InputError, check_choice

FRAMEWORKS = ("torch", "jax")
MODELS = ("resnet", "bert", "gpt")
SIZES = ("tiny", "full")
NORMS = ("batch", "group")
OPTIMIZERS = ("sgd", "adam", "adamw", "adagrad", "rmsprop", "lars", "lamb")


def check_model_names(model: str, size: str, norm: str) -> None:
    """Raise InputError unless all three names are known."""
    check_choice("the model", model, MODELS)
    check_choice("the size", size, SIZES)
    check_choice("the norm", norm, NORMS)


def check_framework(framework: str, model: str, size: str, norm: str) -> None:
    """Raise InputError unless the framework is known, and has such a model."""
    check_choice("the framework", framework, FRAMEWORKS)
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
    if optimizer is not None:
        check_choice("the optimizer", optimizer, OPTIMIZERS)
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

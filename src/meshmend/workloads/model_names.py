"""The names of frameworks, models, sizes and norms.

Imports no framework, so that the command line checks the names fast.
"""

from meshmend.errors import InputError

FRAMEWORKS = ("torch", "jax")
MODELS = ("resnet", "bert")
SIZES = ("tiny", "full")
NORMS = ("batch", "group")


def check_model_names(model: str, size: str, norm: str) -> None:
    """Raise InputError unless all three names are known."""
    for what, name, names in (
        ("model", model, MODELS),
        ("size", size, SIZES),
        ("norm", norm, NORMS),
    ):
        if name not in names:
            raise InputError(f"the {what} needs to be one of {', '.join(names)}, but got {name!r}")


def check_framework(framework: str, size: str, norm: str) -> None:
    """Raise InputError unless the framework is known, and has models of this size and norm."""
    if framework not in FRAMEWORKS:
        known = ", ".join(FRAMEWORKS)
        raise InputError(f"the framework needs to be one of {known}, but got {framework!r}")
    if framework == "jax" and size != "tiny":
        raise InputError(f"--framework jax has tiny models only, but got --size {size}")
    if framework == "jax" and norm != "group":
        raise InputError(
            f"--framework jax has group normalisation only, but got --norm {norm}: a chip computes "
            "in micro-batches, whose statistics would be those of too few samples"
        )


def default_norm(framework: str) -> str:
    """Return the normalisation of ResNet unless another is asked for."""
    return "group" if framework == "jax" else "batch"

"""The names of models, sizes and norms, without torch: the command line checks one at once."""

from meshmend.errors import InputError

MODELS = ("resnet", "bert")
SIZES = ("tiny", "full")
NORMS = ("batch", "group")


def check_model_names(model: str, size: str, norm: str) -> None:
    """Raise InputError unless all three are known."""
    for what, name, names in (
        ("model", model, MODELS),
        ("size", size, SIZES),
        ("norm", norm, NORMS),
    ):
        if name not in names:
            raise InputError(f"a {what} is one of {', '.join(names)}, but got {name!r}")

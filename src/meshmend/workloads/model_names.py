"""The names of models, sizes and norms; no torch, so that the command line checks them fast."""

from meshmend.errors import InputError

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

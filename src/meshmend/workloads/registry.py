"""The workloads that `meshmend train` offers, by name.

transformers is imported when a workload is built, not before.
"""

from importlib import import_module
from pathlib import Path

import torch

from meshmend.errors import InputError
from meshmend.workloads.bert import full_bert, tiny_bert
from meshmend.workloads.model_names import check_model_names
from meshmend.workloads.resnet import full_resnet, tiny_resnet
from meshmend.workloads.workload import Workload


def workload(
    model: str, size: str = "tiny", *, data: Path | None = None, norm: str = "batch", seed: int = 0
) -> Workload:
    """Return a workload; without `data` it learns from what Python packages carry.

    `data` is a folder of images, one folder per class, or of text files. `norm` concerns ResNet
    only: `group` makes the loss of a batch independent of how chips share it out.

    Raises:
        InputError: an unknown name, data that cannot be used, or a package that is missing.
    """
    check_model_names(model, size, norm)
    try:
        if model == "bert":
            return (tiny_bert if size == "tiny" else full_bert)(data, seed=seed)
        return (tiny_resnet if size == "tiny" else full_resnet)(data, norm=norm, seed=seed)
    except ImportError as error:
        raise InputError(
            f"the workload {model} needs {error.name}, but it is not installed; install it with "
            "pip install 'meshmend[train]'"
        ) from None


def preload() -> None:
    """Import all that workloads need, so that processes forked from this one need not.

    The first optimizer of a process imports torch's compiler: 1.5 s, and as long in each child.
    """
    for name in ("resnet.modeling_resnet", "bert.modeling_bert"):
        import_module(f"transformers.models.{name}")
    import_module("sklearn.datasets")
    torch.optim.SGD([torch.zeros(1)])

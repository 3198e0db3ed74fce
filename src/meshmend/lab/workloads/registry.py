"""The workloads that `meshmend train` offers, by name.

The transformers package is imported when a workload is built, not before.
"""

from pathlib import Path

from meshmend.errors import InputError
from meshmend.lab.workloads.bert import full_bert, tiny_bert
from meshmend.lab.workloads.gpt import full_gpt, tiny_gpt
from meshmend.lab.workloads.model_names import check_model_names
from meshmend.lab.workloads.resnet import full_resnet, tiny_resnet
from meshmend.lab.workloads.workload import Workload, with_bfloat16, with_optimizer


def workload(
    model: str,
    size: str = "tiny",
    *,
    data: Path | None = None,
    norm: str = "batch",
    seed: int = 0,
    optimizer: str | None = None,
    in_bfloat16: bool = False,
) -> Workload:
    """Return a workload; without `data` it trains on data that comes with Python packages.

    `data` is a folder of images with one folder per class, or a folder of text files. `norm` is
    for ResNet only: with `group`, the loss of a batch does not depend on how chips share it.
    Without the name of an `optimizer` it has one that suits the model. With `in_bfloat16` the
    model has weights of 16 bits.

    Raises:
        InputError: a name is unknown, the data cannot be used, or a package is missing.
    """
    check_model_names(model, size, norm)
    try:
        if model == "gpt":
            made = (tiny_gpt if size == "tiny" else full_gpt)(data, seed=seed)
        elif model == "bert":
            made = (tiny_bert if size == "tiny" else full_bert)(data, seed=seed)
        else:
            made = (tiny_resnet if size == "tiny" else full_resnet)(data, norm=norm, seed=seed)
    except ImportError as error:
        raise InputError(
            f"the workload {model} needs {error.name}, but it is not installed; install it with "
            "pip install 'meshmend[train]'"
        ) from None
    made = with_optimizer(made, optimizer) if optimizer else made
    return with_bfloat16(made) if in_bfloat16 else made

"""The workloads that `meshmend train --framework jax` offers, by name."""

from pathlib import Path

from meshmend.errors import InputError
from meshmend.lab.workloads.jax_bert import tiny_jax_bert
from meshmend.lab.workloads.jax_resnet import tiny_jax_resnet
from meshmend.lab.workloads.jax_workload import JaxWorkload
from meshmend.lab.workloads.model_names import check_model_names


def jax_workload(model: str, *, data: Path | None = None, seed: int = 0) -> JaxWorkload:
    """Return a tiny workload in JAX; without `data` it trains on data of Python packages.

    Raises:
        InputError: the name is unknown, the data cannot be used, or a package is missing.
    """
    check_model_names(model, "tiny", "group")
    try:
        return (tiny_jax_bert if model == "bert" else tiny_jax_resnet)(data, seed=seed)
    except ImportError as error:
        raise InputError(
            f"the workload {model} needs {error.name}, but it is not installed; install it with "
            "pip install 'meshmend[train]'"
        ) from None

"""Training that survives failures: the step loop, recovery, checkpoints, the ledger.

    from meshmend.train import Job, Saving

Both are imported on first use, so that a coordinator does not import torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from meshmend.train.checkpoint import Saving
    from meshmend.train.job import Job

__all__ = ["Job", "Saving"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from meshmend.train import job

        return getattr(job, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

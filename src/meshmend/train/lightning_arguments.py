"""What of Lightning's Trainer a job cannot honour; each is refused in one line."""

from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from meshmend.errors import InputError


def check_loader(loader: object) -> None:
    """Raise InputError unless the job can hand out the samples of a training loader."""
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        raise InputError(
            "MeshmendStrategy needs a training DataLoader of a data set with len() and [], but got "
            f"{type(getattr(loader, 'dataset', loader)).__name__}"
        )
    if loader.batch_size is None:
        raise InputError(
            "MeshmendStrategy needs a training DataLoader with a batch_size, but it has a "
            "batch_sampler or none; the job shares out the samples itself"
        )


def check_trainer(trainer: Any) -> None:
    """Raise InputError for the first thing that the job cannot do."""
    module = trainer.lightning_module
    if not module.automatic_optimization:
        raise InputError(
            "MeshmendStrategy needs automatic optimization, but the module sets "
            "automatic_optimization to False; use meshmend.train.Job in a loop of your own"
        )
    if len(trainer.optimizers) != 1:
        raise InputError(
            f"MeshmendStrategy needs one optimizer, but the module has {len(trainer.optimizers)}; "
            "use meshmend.train.Job in a loop of your own"
        )
    if trainer.accumulate_grad_batches != 1:
        raise InputError(
            "MeshmendStrategy does not accumulate gradients: a step sums over all chips; set "
            "accumulate_grad_batches=1 and a larger batch_size"
        )
    if getattr(trainer.precision_plugin, "scaler", None) is not None:
        raise InputError("MeshmendStrategy does not support fp16: use precision='bf16-mixed'")
    if trainer.max_steps < 0 and (trainer.max_epochs is None or trainer.max_epochs < 0):
        raise InputError("MeshmendStrategy needs max_steps or max_epochs, but got neither")
    if any(config.reduce_on_plateau for config in trainer.lr_scheduler_configs):
        raise InputError(
            "MeshmendStrategy does not support ReduceLROnPlateau: use a scheduler that depends on "
            "the step alone"
        )

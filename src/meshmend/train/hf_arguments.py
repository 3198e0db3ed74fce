"""Which arguments of a Hugging Face trainer a job cannot honour; each is refused in one line."""

from collections.abc import Callable
from typing import Any, Final

from meshmend.errors import InputError

# A name, whether the arguments ask for it, and what to do instead.
_REFUSED: Final[tuple[tuple[str, Callable[[Any], Any], str], ...]] = (
    ("fsdp", lambda args: args.fsdp, "each chip holds the whole model"),
    ("deepspeed", lambda args: args.deepspeed, "each chip holds the whole model"),
    ("parallelism_config", lambda args: args.parallelism_config, "each chip holds the whole model"),
    ("fp16", lambda args: args.fp16, "use bf16=True, which needs no loss scale"),
    (
        "auto_find_batch_size",
        lambda args: args.auto_find_batch_size,
        "set per_device_train_batch_size",
    ),
    (
        "lr_scheduler_type",
        lambda args: (
            str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type))
            in ("reduce_lr_on_plateau", "greedy")
        ),
        "use one that depends on the step alone, such as linear or cosine",
    ),
    (
        "train_sampling_strategy",
        lambda args: args.train_sampling_strategy != "random",
        "the job shuffles each epoch by data_seed, or by seed",
    ),
    ("push_to_hub", lambda args: args.push_to_hub, "push the saved folder after the training"),
    (
        "include_num_input_tokens_seen",
        lambda args: args.include_num_input_tokens_seen not in ("no", False),
        "tokens are counted on each chip, and not summed",
    ),
    ("save_on_each_node", lambda args: args.save_on_each_node, "one chip saves, for all"),
    (
        "several GPUs in a process",
        lambda args: args.n_gpu > 1,
        "give each worker one of them with CUDA_VISIBLE_DEVICES",
    ),
)


def refuse_unsupported(args: Any, dataset: Any, trial: Any) -> None:
    """Raise InputError for the first thing that the job cannot do."""
    for name, is_asked_for, advice in _REFUSED:
        if is_asked_for(args):
            raise InputError(f"meshmend.train.hf.Trainer does not support {name}: {advice}")
    if trial is not None:
        raise InputError(
            "meshmend.train.hf.Trainer does not support a search of hyperparameters: run one job "
            "for each trial"
        )
    if dataset is None or not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise InputError(
            "meshmend.train.hf.Trainer needs a train_dataset with len() and [], but got "
            f"{type(dataset).__name__}; exactly-once needs to know which samples there are"
        )

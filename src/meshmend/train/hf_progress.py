"""The state of a Hugging Face trainer as part of a job's state: what a new chip needs."""

import json
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any, Final

_OF_THIS_CHIP: Final = ("is_local_process_zero", "is_world_process_zero", "is_hyper_param_search")


class TrainerProgress:
    """Step, logs, best metric, and the states of callbacks, of one trainer.

    `stop_after(step)` is called if the state of another chip says that this step is the last.
    """

    is_compared: Final = False  # logs hold how long something took, and who leads differs

    def __init__(self, trainer: Any, stop_after: Callable[[int], None]) -> None:
        self._trainer = trainer
        self._stop_after = stop_after

    def state_dict(self) -> dict[str, Any]:
        """Return the state as one text."""
        trainer = self._trainer
        state = {
            "state": asdict(trainer.state),
            "control": asdict(trainer.control),
            "callbacks": [callback.state() for callback in self._stateful()],
            "loss": float(trainer._tr_loss),
            "total_loss": trainer._total_loss_scalar,
            "logged": trainer._globalstep_last_logged,
        }
        return {"text": json.dumps(state)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the state; who leads is left as it is."""
        trainer, saved = self._trainer, json.loads(state["text"])
        for each in fields(trainer.state):
            if each.name not in _OF_THIS_CHIP:
                setattr(trainer.state, each.name, saved["state"][each.name])
        for name, value in saved["control"].items():
            setattr(trainer.control, name, value)
        for callback, its_state in zip(self._stateful(), saved["callbacks"], strict=True):
            for name, value in its_state["attributes"].items():
                setattr(callback, name, value)
        trainer._tr_loss.fill_(saved["loss"])
        trainer._total_loss_scalar = saved["total_loss"]
        trainer._globalstep_last_logged = saved["logged"]
        if trainer.control.should_training_stop:
            self._stop_after(trainer.state.global_step)

    def _stateful(self) -> list[Any]:
        from transformers.trainer_callback import ExportableState

        callbacks = self._trainer.callback_handler.callbacks
        return [callback for callback in callbacks if isinstance(callback, ExportableState)]

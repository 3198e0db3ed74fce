"""The step in flight: from the moment that it is handed out until it counts or has left no trace.

Knows the objects of a script, and when their optimizers step. Knows no other chip, no generation
and no number of a step that is done: whoever drives it says whether the step counts.
"""

import inspect
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from meshmend.errors import InputError
from meshmend.membership.faults.fault import Moment
from meshmend.membership.faults.fault_injector import SelfInjection
from meshmend.train.data.random_numbers import RandomNumbers
from meshmend.train.torch.group_state import GroupState


class StepInFlight:
    """What a chip does to its objects in one step after another, so that each can be undone.

    A step is due once it is handed out, and begins once. Its state is kept before that. It counts,
    or it fails; then the rest of the loop's body may still run, and what that does is undone too.
    """

    def __init__(self, injection: SelfInjection, random: RandomNumbers) -> None:
        self._injection, self._random = injection, random
        self.is_in_job = False  # outside of one nothing fails, and nothing is kept
        self.state = GroupState(())  # of the objects
        self._hooks: list[Any] = []  # in their optimizers
        self._step = 0  # its number, since it began
        self.is_due = False  # it was handed out, and no block has begun it
        self.is_kept = False  # the state before it is kept
        self._is_checked = False  # the objects are known to hold all that steps change
        self._n_stepped = 0  # optimizers that have stepped in it
        self._has_stepped = False  # whether an optimizer has stepped in a step that counts
        self._has_failed = False  # what is done until the next step is undone

    def watch(self, state: GroupState) -> None:
        """Make these objects those that steps change, and see when their optimizers step."""
        for hook in self._hooks:
            hook.remove()
        self.state = state
        self.is_kept = self._has_failed = self._is_checked = False
        self._hooks = [register_optimizer_step_pre_hook(self._check_update)]
        for optimizer in state.optimizers:
            self._hooks += [
                optimizer.register_step_pre_hook(self._before_update),
                optimizer.register_step_post_hook(self._after_update),
            ]

    def begin(self, step: int) -> None:
        """Begin the step that is due.

        Raises:
            InputError: none is, or a part of the training changes out of sight.
        """
        if not self.is_due:
            raise InputError(
                "retrying needs a step of its own, because each block counts as one; put all of a "
                "step that meshmend.torch.steps yields into one block"
            )
        self.is_due = self._has_failed = False
        self._step, self._n_stepped = step, 0
        self._injection.at(Moment.FORWARD, step)
        if self.is_in_job and not self._is_checked:
            self.state.check_comparable()
            self._is_checked = True
        if not self.is_kept:  # else since it was handed out
            self.keep()

    def keep(self) -> None:
        """Keep the state before a step: what fails from here on is undone."""
        if self.is_in_job:
            self._random.see("step")
            self.state.before.capture()
            self.is_kept = True

    def keep_joined(self) -> None:
        """Keep the state that this chip has taken when it joined, until its first step.

        What the script still does to begin, such as to read a checkpoint, the others did long ago.
        But it may seed its random numbers.
        """
        self.state.before.capture(with_random=False)
        self._has_failed = True

    def undo(self) -> None:
        """Make everything what it was before the step."""
        self.state.before.restore()

    def end(self) -> None:
        """See what a block that has ended without an error has done.

        Raises:
            InputError: it has made gradients, but leaves the step to a later one. They are in no
                other chip's state: a chip that dies takes its part of them along.
        """
        before = self.state.before
        if (
            self._n_stepped == 0
            and self.state.optimizers
            and before.has_new_gradients()
            and not before.has_updated_scaler()
        ):
            raise InputError(
                "retrying needs a whole step in its block, but got gradients without "
                "optimizer.step(); put all backward passes of an accumulation into one block"
            )
        self.state.note_moving()

    def count(self) -> None:
        """Note that the step counts."""
        self._has_stepped = self._has_stepped or self._n_stepped > 0
        self.is_kept = False

    def fail(self) -> None:
        """Keep the state that the step begins with again: the loop's body has not ended yet."""
        self.keep()
        self._has_failed = True

    def forget_rest(self) -> bool:
        """Undo what was changed since a step failed, or this chip joined; return whether."""
        has_failed, self._has_failed = self._has_failed, False
        if has_failed:
            self.undo()
        return has_failed

    def _check_update(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Refuse, before it steps, what changes the model but is not in the state."""
        if self._has_stepped or not self.is_in_job:
            return
        self.state.check_optimizer(optimizer)
        frame = inspect.currentframe()
        while frame is not None:
            self.state.check_scaler(frame.f_locals.get("self"))
            frame = frame.f_back

    def _before_update(self, *_: object) -> None:
        self._injection.at(Moment.UPDATE, self._step)

    def _after_update(self, *_: object) -> None:
        self._n_stepped += 1

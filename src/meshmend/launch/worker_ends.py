"""How the workers of a job ended, and what that says of the job.

A job goes on without a chip whose worker died. It fails where no other could do better: the script
asks for what cannot be done, or a worker fails after the last step, when nobody repeats its work.
"""

import logging
from typing import Final

from meshmend.launch.supervisor import Child
from meshmend.launch.worker import BAD_INPUT
from meshmend.topology.failures import Chip

_log: Final = logging.getLogger(__name__)


class WorkerEnds:
    """The workers that ended without an injected fault, in words."""

    def __init__(self) -> None:
        self._failures: list[str] = []
        self._left_early: list[str] = []
        self._refusals: list[str] = []  # those of the failures that are of bad input
        self._untold: dict[str, Chip] = {}  # tracebacks, and the chips that ended with them
        self._trained: set[Chip] = set()  # chips that have finished a step
        self._members: tuple[Chip, ...] = ()  # of the generation, and the step it began with
        self._begun_at = 0
        self._stepping_pids: set[int] = set()  # the processes of theirs that have
        self._lost_early: dict[Chip, str] = {}  # how chips died that had finished none by then

    @property
    def why(self) -> str:
        """Why a job that has no workers any more has failed: the first failure."""
        return [*self._failures, *self._left_early, "no worker is left"][0]

    @property
    def never_trained(self) -> tuple[str, ...]:
        """How chips died that have never finished a step."""
        return tuple(words for chip, words in self._lost_early.items() if chip not in self._trained)

    def note_step(self, chip: Chip, child: Child | None) -> None:
        """Note that a worker has finished a step: the job has gone on without those that ended."""
        self.tell_failures()
        self._trained.add(chip)
        if child is not None:
            self._stepping_pids.add(child.pid)

    def note_generation(self, step: int, chips: tuple[Chip, ...]) -> None:
        """Note that a generation begins; steps since the last one were done by its chips.

        One that died soon after its first step may not have told of it.
        """
        if step > self._begun_at:
            self._trained.update(self._members)
        self._members, self._begun_at = chips, step

    def add(self, chip: Chip, child: Child, *, is_over: bool) -> str:
        """Note that a worker has ended; return how, in words."""
        if child.code == 0:
            words = f"chip {chip} ended before the job was over: exit code 0"
            advice = "; a script needs a loop over a meshmend.train.Job, or meshmend.torch.steps"
            self._left_early.append(words if chip in self._trained else f"{words}{advice}")
        elif child.traceback:
            words = f"chip {chip} failed: {_error_line(child.traceback)}"
            is_line = child.traceback.strip().count("\n") == 0
            self._failures.append(words if is_line else f"{words}\n{child.traceback}")
            if not is_line:
                self._untold.setdefault(child.traceback, chip)
        else:
            words = f"chip {chip} died: {child.how_it_ended}"
            self._failures.append(words)
        if child.code == BAD_INPUT:
            self._refusals.append(self._failures[-1])
        if not is_over and chip not in self._trained:
            self._lost_early[chip] = words
        return words

    @property
    def last_failure(self) -> str:
        """The last failure, with its traceback if it has one."""
        return self._failures[-1]

    def fails_job(self, child: Child) -> bool:
        """Whether a worker that has finished steps was refused: all others run the same script."""
        return child.code == BAD_INPUT and child.pid in self._stepping_pids

    def is_refusal(self, why: str) -> bool:
        """Whether a job has failed because of bad input."""
        return why in self._refusals

    def was_refused_first(self, why: str) -> bool:
        """Whether it has failed because of bad input before any step was done."""
        return self.is_refusal(why) and not self._trained

    def tell_failures(self) -> None:
        """Print the tracebacks of workers that failed, since the job went on without them.

        A job that fails ends with that of the first worker instead.
        """
        for text, chip in self._untold.items():
            _log.error("chip %s failed, and the job went on without it:\n%s", chip, text.rstrip())
        self._untold.clear()


def _error_line(text: str) -> str:
    """Return the line of a traceback that names the error; its message may go on after it."""
    lines = text.strip().splitlines() or [text]
    last_frame = max((at for at, line in enumerate(lines) if line.startswith("  File ")), default=0)
    return next((line for line in lines[last_frame:] if not line.startswith(" ")), lines[-1])

"""Saves a checkpoint ahead of time when the scheduler says that it will soon end the job.

The notice is a signal that all workers get, such as the SIGTERM that Slurm sends at the beginning
of a grace time. From then on every chip saves its shard after each step, until a checkpoint of a
step since the notice is complete. So chips that get the notice in different steps need not agree
on one. Training goes on. A notice that not all chips get is forgotten after some steps.
"""

import signal
from pathlib import Path
from types import FrameType
from typing import Final

from meshmend.train.state.checkpoint_names import newest_complete

_MOST_STEPS: Final = 20  # until a notice is forgotten


class SaveNotice:
    """Whether this process was told to save, and since which step it does."""

    def __init__(self) -> None:
        self.is_given = False
        self._since: int | None = None

    def listen(self) -> None:
        """Take SIGTERM as the notice, instead of dying of it; forget those of a parent process."""
        self.is_given, self._since = False, None
        signal.signal(signal.SIGTERM, self._give)

    def is_due(self, folder: Path, step: int) -> bool:
        """Whether the step that was just done must be saved, in a folder of checkpoints."""
        if not self.is_given:
            return False
        if self._since is None:
            self._since = step
        newest = newest_complete(folder)
        is_saved = newest is not None and newest >= self._since
        if is_saved or step >= self._since + _MOST_STEPS:
            self.is_given, self._since = False, None
        return self.is_given

    def _give(self, number: int, frame: FrameType | None) -> None:
        self.is_given = True


SAVE_NOTICE = SaveNotice()  # of this process

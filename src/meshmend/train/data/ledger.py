"""The ledger: each worker writes down which samples it used in which step, and which steps it did.

There is one file per worker, with a line before each sum and a line after each step. Each line is
written to the kernel at once, so that the lines survive if the worker is killed. `audit.py`
reads all files and proves that the job has one history in which every sample was used exactly once.

    ledger 2 CHIP SAMPLES SEED ERRNO            the first line; ERRNO is not 0 while writing fails
    try STEP GENERATION START STOP BATCH SUM    before the sum: this chip's share of the step
    done STEP GENERATION POSITION               the step is done; the next begins at POSITION
    hold STEP GENERATION HASH                   a hash of the state after the step; with tiles,
                                                COLOUR.HASH of the part that chips of it hold
    resume STEP POSITION                        the job begins with the checkpoint of STEP
    back STEP GENERATION                        the generation goes back to STEP; the rest is lost
    gap                                         lines are missing here: writing failed

SUM is a checksum of the samples that does not depend on their order (`samples.checksum`). Of a
stream, SAMPLES is 0 and SUM is that of the places, because its samples have no other names.

A ledger never stops its worker. If a line cannot be written, the file records the gap, and the
audit reports the steps that it could not check.
"""

import errno
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from meshmend.topology.failures import Chip, format_chip
from meshmend.train.data.samples import Indices, Order, Share, StreamOrder, checksum

VERSION: Final = 2  # of the format
_MAX_FILES: Final = 10_000  # of one chip and process id: containers often reuse process ids

_log = logging.getLogger(__name__)


class Ledger:
    """Writes the ledger of one worker; writes nothing if `folder` is None.

    Calls `on_failure(reason)` when writing begins to fail, and again only after it has worked.
    """

    def __init__(
        self,
        folder: Path | None,
        chip: Chip,
        order: Order | StreamOrder | None = None,
        on_failure: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._chip, self._on_failure = chip, on_failure
        self._fd, self._size = -1, 0
        self._is_failing = False
        self._folder = folder  # None: nothing is written
        if folder is None:
            return
        n_samples, seed = (order.n_samples, order.seed) if order else (0, 0)
        head = f"ledger {VERSION} {format_chip(chip)} {n_samples} {seed} "
        self._errno_at = len(head)
        self._head = f"{head}{0:03d}\n"
        try:
            self._open()
            self._append(self._head)
        except OSError as error:
            self._fail(error)

    def write_try(
        self, step: int, generation: int, share: Share, samples: Indices | None = None
    ) -> None:
        """Write the share that is about to be summed, and the checksum of its samples."""
        total = "-" if samples is None else checksum(samples)
        self._write(f"try {step} {generation} {share.start} {share.stop} {share.batch} {total}")

    def write_done(self, step: int, generation: int, position: int) -> None:
        """Write that a step is done, and the position at which the next begins."""
        self._write(f"done {step} {generation} {position}")

    def write_hold(self, step: int, generation: int, bits: str) -> None:
        """Write a hash of the state after a step."""
        self._write(f"hold {step} {generation} {bits}")

    def write_resume(self, step: int, position: int) -> None:
        """Write that the job begins with the checkpoint of a step."""
        self._write(f"resume {step} {position}")

    def write_restore(self, step: int, generation: int) -> None:
        """Write that a generation goes back to the state after a step; later steps are lost."""
        self._write(f"back {step} {generation}")

    def close(self) -> None:
        """Close the file; later lines are ignored."""
        self._folder = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _open(self) -> None:
        if self._fd < 0 and self._folder is not None:
            self._fd = _new_file(self._folder, self._chip)

    def _write(self, line: str) -> None:
        if self._folder is None:
            return
        try:
            self._open()  # again, if it could not be made until now
            head = "" if self._size else self._head  # empty until now: the disk was full
            gap = "gap\n" if self._is_failing else ""
            self._append(f"{head}{gap}{line}\n")
        except OSError as error:
            self._fail(error)
            return
        if self._is_failing:
            self._is_failing = False
            self._write_errno(0)

    def _append(self, text: str) -> None:
        """Append all of the text, or raise OSError and leave the file unchanged."""
        data = text.encode()
        if os.pwrite(self._fd, data, self._size) < len(data):
            os.ftruncate(self._fd, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += len(data)

    def _fail(self, error: OSError) -> None:
        if self._is_failing:
            return
        self._is_failing = True
        self._write_errno(error.errno or errno.EIO)
        why = error.strerror or str(error)
        _log.warning("chip %s cannot write its ledger: %s; training goes on", self._chip, why)
        self._on_failure(why)

    def _write_errno(self, number: int) -> None:
        """Write an errno over the one in the first line: this needs no space on a full disk."""
        if self._size > self._errno_at:
            with suppress(OSError):
                os.pwrite(self._fd, f"{number:03d}".encode(), self._errno_at)


def _new_file(folder: Path, chip: Chip) -> int:
    """Create a file with a name that is not in use and return its descriptor."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{'-'.join(map(str, chip))}.{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    for number in range(_MAX_FILES):
        with suppress(FileExistsError):
            name = f"{stem}.{number}.txt" if number else f"{stem}.txt"
            return os.open(folder / name, flags, 0o644)
    raise FileExistsError(errno.EEXIST, f"{folder} has too many ledgers of {stem}")

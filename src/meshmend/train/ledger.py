"""The ledger: every chip writes down which samples it put into which step, and which steps count.

One file per worker, a line before each sum and a line after each step, written through to the
kernel at once: a killed worker's lines stay. `audit` reads all of them and proves that the job has
one history in which every sample was used exactly once.

    ledger 2 CHIP SAMPLES SEED ERRNO            the first line; ERRNO is not 0 while lines are lost
    try STEP GENERATION START STOP BATCH SUM    this chip's share of the step, about to be summed
    done STEP GENERATION POSITION               the step is real here; the next begins at POSITION
    hold STEP GENERATION HASH                   the bits of the state after a step
    resume STEP POSITION                        the state of a checkpoint, before the job began
    back STEP GENERATION                        the generation goes on from the checkpoint of STEP
    gap                                         lines are missing here: the disk was full

SUM stands for the samples themselves, whatever their order (`samples.checksum`).

A ledger never stops its worker. What cannot be written is missing, the file says so, and the audit
says which steps it could not check.
"""

import errno
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from meshmend.topology.failures import Chip
from meshmend.train.history_check import Audit, check_history
from meshmend.train.ledger_lines import VERSION, read_ledgers
from meshmend.train.samples import Indices, Order, Share, checksum

_log = logging.getLogger(__name__)

_MOST_FILES: Final = 10_000  # of one chip and process number: containers often repeat numbers


class Ledger:
    """The lines of one worker; with no folder, nothing is written.

    `on_failure` is told why nothing can be written, once for each time that it begins.
    """

    def __init__(
        self,
        folder: Path | None,
        chip: Chip,
        order: Order | None = None,
        on_failure: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._chip, self._on_failure = chip, on_failure
        self._fd, self._size = -1, 0
        self._is_cut = False
        if folder is None:
            return
        n_samples, seed = (order.n_samples, order.seed) if order else (0, 0)
        head = f"ledger {VERSION} {','.join(map(str, chip))} {n_samples} {seed} "
        self._errno_at = len(head)
        self._head = f"{head}{0:03d}\n"
        try:
            self._fd = _new_file(folder, chip)
            self._append(self._head)
        except OSError as error:
            self._fail(error)

    def tries(
        self, step: int, generation: int, share: Share, samples: Indices | None = None
    ) -> None:
        """Note the share that is about to be summed, and the samples that it is made of."""
        total = "-" if samples is None else checksum(samples)
        self._write(f"try {step} {generation} {share.start} {share.stop} {share.batch} {total}")

    def did(self, step: int, generation: int, position: int) -> None:
        """Note that a step is real, and where the next begins."""
        self._write(f"done {step} {generation} {position}")

    def holds(self, step: int, generation: int, bits: str) -> None:
        """Note a hash of the state after a step."""
        self._write(f"hold {step} {generation} {bits}")

    def resumed(self, step: int, position: int) -> None:
        """Note that the job begins with the checkpoint of a step."""
        self._write(f"resume {step} {position}")

    def went_back(self, step: int, generation: int) -> None:
        """Note that a generation goes on from the checkpoint of a step: later steps are lost."""
        self._write(f"back {step} {generation}")

    def close(self) -> None:
        """Write no more."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, line: str) -> None:
        if self._fd < 0:
            return
        try:
            head = "" if self._size else self._head  # the disk was full from the beginning
            gap = "gap\n" if self._is_cut else ""
            self._append(f"{head}{gap}{line}\n")
        except OSError as error:
            self._fail(error)
            return
        if self._is_cut:
            self._is_cut = False
            self._mark(0)

    def _append(self, text: str) -> None:
        """Write a text whole or not at all."""
        data = text.encode()
        if os.pwrite(self._fd, data, self._size) < len(data):
            os.ftruncate(self._fd, self._size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._size += len(data)

    def _fail(self, error: OSError) -> None:
        if self._is_cut:
            return
        self._is_cut = True
        self._mark(error.errno or errno.EIO)
        why = error.strerror or str(error)
        _log.warning("chip %s cannot write its ledger: %s; training goes on", self._chip, why)
        self._on_failure(why)

    def _mark(self, number: int) -> None:
        """Put an error's number into the first line: in place, so that a full disk has room."""
        if self._size > self._errno_at:
            with suppress(OSError):
                os.pwrite(self._fd, f"{number:03d}".encode(), self._errno_at)


def audit(folder: Path) -> Audit:
    """Return what all ledgers in a folder say together; they are those of one job.

    Raises:
        InputError: a line that cannot be read, other than a torn last one.
    """
    return check_history(read_ledgers(folder))


def _new_file(folder: Path, chip: Chip) -> int:
    """Return the descriptor of a file that was not there before."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"{'-'.join(map(str, chip))}.{os.getpid()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    for number in range(_MOST_FILES):
        with suppress(FileExistsError):
            name = f"{stem}.{number}.txt" if number else f"{stem}.txt"
            return os.open(folder / name, flags, 0o644)
    raise FileExistsError(errno.EEXIST, f"{folder} has too many ledgers of {stem}")

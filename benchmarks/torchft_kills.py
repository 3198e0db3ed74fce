"""A torchft job of 4x4 replica groups that random faults hit.

.venv-torchft/bin/python torchft_kills.py FOLDER SEED N_FAULTS BATCH TIMEOUT_S
"""

import sys
from collections.abc import Callable

from killed_job import KilledJob, Note, Training, Work, run
from torchft_worker import Worker, start_lighthouse, train


def torchft(training: Training, timeout_s: float) -> tuple[Work, Callable[[KilledJob], None]]:
    """Return the life of a worker; the lighthouse decides by itself who trains together."""
    lighthouse = start_lighthouse(timeout_s, least=1)

    def work(rank: int, note: Note) -> None:
        train(Worker(rank, lighthouse, timeout_s, least=1), training, note)

    return work, lambda job: None


if __name__ == "__main__":
    sys.exit(run(torchft))

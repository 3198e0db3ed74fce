"""Which steps a worker reports to the observers of its job: rank 0 all, others a few."""

import time

from meshmend.membership.events import WorkerStepped
from meshmend.topology.failures import Chip
from meshmend.train.core.worker_environment import coordinator_client
from meshmend.train.core.worker_loop import SumSizes


class StepReports:
    """Reports the steps of one chip: rank 0 every step, others their first in a generation."""

    def __init__(self, chip: Chip) -> None:
        self._chip = chip
        self._reported = 0  # the last generation in which this chip reported a step

    def report(
        self,
        step: int,
        generation: int,
        *,
        rank: int,
        loss: float | None,
        batch: int,
        sums: SumSizes,
    ) -> None:
        """Report a step that is done, if it is one to report."""
        is_first, self._reported = self._reported != generation, generation
        if rank != 0 and not is_first:
            return
        stepped = WorkerStepped(
            chip=self._chip,
            step=step,
            generation=generation,
            at=time.monotonic(),
            leads=rank == 0,
            first=is_first,
            loss=loss,
            samples=batch,
            sums=tuple(sums) if is_first else (),
        )
        coordinator_client().report(stepped)

"""Made-up ledgers of a job: chips that train in generations, are lost, and go back."""

from collections.abc import Iterable
from pathlib import Path

from meshmend.topology.failures import Chip
from meshmend.train.data.ledger import Ledger
from meshmend.train.data.samples import Order, share_of

BATCH, N_SAMPLES = 10, 37


class LedgerJob:
    """Writes what the chips of a job write down; each chip has one worker until it is replaced."""

    def __init__(self, folder: Path, *, batch: int = BATCH, n_samples: int = N_SAMPLES) -> None:
        self.folder, self.batch, self.n_samples = folder, batch, n_samples
        self.workers: dict[Chip, Ledger] = {}
        self.seeds: dict[Chip, int] = {}

    def worker(self, chip: Chip) -> Ledger:
        if chip not in self.workers:
            order = Order(self.n_samples, self.seeds.get(chip, 0))
            self.workers[chip] = Ledger(self.folder, chip, order)
        return self.workers[chip]

    def replace(self, chip: Chip) -> None:
        """Let the chip's next lines come from a new worker."""
        self.workers.pop(chip).close()

    def run(
        self,
        generation: int,
        columns: Iterable[int],
        *,
        after: int,
        to: int,
        bits: str = "bits",
        finished_by: Iterable[int] | None = None,
    ) -> None:
        """Do the steps after one up to another; if some are named, only they finish the last."""
        chips = [(0, column) for column in columns]
        for step in range(after + 1, to + 1):
            for rank, chip in enumerate(chips):
                share = share_of((step - 1) * self.batch, self.batch, rank, len(chips))
                order = Order(self.n_samples, self.seeds.get(chip, 0))
                samples = order.samples(share.start, share.stop)
                self.worker(chip).write_try(step, generation, share, samples)
            for chip in chips:
                if step < to or finished_by is None or chip[1] in finished_by:
                    self.worker(chip).write_done(step, generation, step * self.batch)
                    self.worker(chip).write_hold(step, generation, f"{bits}{step}")

    def close(self) -> None:
        for ledger in self.workers.values():
            ledger.close()

    def file(self, column: int) -> Path:
        """Return the only file of a chip."""
        (path,) = self.folder.glob(f"0-{column}.*.txt")
        return path

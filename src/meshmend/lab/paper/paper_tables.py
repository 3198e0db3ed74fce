"""Tables 1 and 2 of the paper, as values, and the payloads that its two benchmarks sum.

S. Kumar and N. Jouppi, "Highly Available Data Parallel ML training on Mesh Networks". Table 1
holds minutes to train and relative efficiencies, table 2 the share of a step that allreduce
takes. Nothing here is ours but the payloads: the paper does not print them.
"""

from dataclasses import dataclass

FAILED_REGION = (4, 2)
RUN_TO_RUN = 0.02  # "the run-to-run variance here is under 2%"


@dataclass(frozen=True)
class PaperWorkload:
    """One benchmark: its name in the tables, the bytes a step sums, and where they come from."""

    name: str
    payload_bytes: int
    source: str


RESNET = PaperWorkload("ResNet-50", 25_557_032 * 4, "25,557,032 parameters, 4-byte gradients")
BERT = PaperWorkload(
    "BERT", 336_226_108 * 2, "BERT-large, 336,226,108 parameters, 2-byte gradients"
)


@dataclass(frozen=True)
class PaperRow:
    """One row of tables 1 and 2, shares as fractions of one.

    `note` says what is odd about the row, if anything is.
    """

    workload: PaperWorkload
    shape: tuple[int, int]
    full_minutes: float
    broken_minutes: float
    relative_efficiency: float
    full_overhead: float
    broken_overhead: float
    note: str = ""

    @property
    def full_chips(self) -> int:
        return self.shape[0] * self.shape[1]

    @property
    def broken_chips(self) -> int:
        return self.full_chips - FAILED_REGION[0] * FAILED_REGION[1]

    @property
    def efficiency_of_times(self) -> float:
        """The relative efficiency that follows from the printed minutes."""
        return self.efficiency_of(self.broken_minutes)

    @property
    def efficiency_of_overheads(self) -> float:
        """The relative efficiency that follows from table 2 alone, if a step computes as long."""
        return (1 - self.broken_overhead) / (1 - self.full_overhead)

    def efficiency_of(self, broken_minutes: float) -> float:
        """Return (full time x full chips) / (fault-tolerant time x its chips)."""
        return self.full_minutes * self.full_chips / (broken_minutes * self.broken_chips)


PAPER_ROWS = (
    PaperRow(RESNET, (16, 32), 1.80, 1.84, 0.99, 0.042, 0.064),
    PaperRow(RESNET, (32, 32), 1.08, 1.15, 0.946, 0.088, 0.110),
    PaperRow(
        BERT,
        (16, 32),
        1.90,
        1.92,
        1.02,
        0.037,
        0.047,
        note="The printed relative efficiency 1.02 does not follow from the printed times: "
        "1.90 x 512 / (1.92 x 504) = 1.005.",
    ),
    PaperRow(BERT, (32, 32), 1.16, 1.19, 0.986, 0.060, 0.078),
)

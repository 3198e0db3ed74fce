"""What a simulated worker computes twice: a number, which is wrong now and then on a bad chip."""

from dataclasses import dataclass
from random import Random
from typing import Any

from meshmend.topology.failures import Chip
from meshmend.train.core.share_checks import Finding, Kind, ShareChecks
from simulation.invariants import Invariants
from simulation.peers import SimulatedPeers

EVERY = 2
_RIGHT = 7
_FIRST_WRONG = 3  # step; what is wrong before the first one is refused


@dataclass
class _Place:
    """Where a worker is, as `Exchange` says it."""

    peers: SimulatedPeers

    @property
    def mesh(self) -> "_Place":
        return self

    @property
    def n_live(self) -> int:
        return self.peers.n_members

    @property
    def rank(self) -> int:
        return self.peers.rank

    @property
    def generation_number(self) -> int:
        return self.peers.generation_number


@dataclass
class _Number:
    """What a worker has computed."""

    value: int = _RIGHT

    @property
    def sizes(self) -> list[tuple[int, str]]:
        return [(1, "int32")]  # such sums are not checked

    def payload_hashes(self, number: int) -> dict[str, int]:
        return {"number": self.value}


class SimulatedChecks:
    """One worker's checks; a bad chip computes wrong at a rate."""

    def __init__(
        self, peers: SimulatedPeers, rules: Invariants, chip: Chip, random: Random, rate: float
    ) -> None:
        self._number, self._random, self._rate = _Number(), random, rate
        self._rules, self._chip, self._peers = rules, chip, peers
        place: Any = _Place(peers)
        learner: Any = self._number
        self.checks = ShareChecks(learner, place, every=EVERY)

    def begin(self, step: int) -> None:
        """Compute the shares of a step, others' and one's own."""
        if step > 0 and self.checks.right_until is None:
            self.checks.right_until = 0  # a real state, or its checkpoint, carries it
        for _ in self.checks.begin(step):
            self._compute(step)
            self.checks.add_second()
        self._compute(step)
        self.checks.note_own(0)

    def _compute(self, step: int) -> None:
        self._number.value = _RIGHT
        if self._rate and step >= _FIRST_WRONG and self._random.random() < self._rate:
            self._number.value = self._random.getrandbits(40)
            self._rules.wrong.add(self._chip)

    def compare(self, step: int) -> Finding | None:
        """Tell the others and hear them; return why the step does not count, if it does not."""
        if self.checks.kind is Kind.NOTHING:
            return None
        told: list[Any] = [(self._peers.rank, self.checks.told())]
        self._peers.sum(told, 1, "float32")
        by_rank = [each for _, each in sorted(told)]
        finding = self.checks.judge(step, by_rank, self._peers.generation.chips)
        return finding if finding.is_void else None

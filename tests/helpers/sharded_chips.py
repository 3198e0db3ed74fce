"""Chips that share an update, as threads of one process, and what fails in their collectives.

A collective is complete when all chips of the generation have called it. A fault names a
collective by its number in the generation, and the chips that die in it: before they contribute, so
that nobody finishes it, or afterwards, so that only some of the others do.
"""

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from meshmend.errors import PeerLostError, StateLostError
from meshmend.membership.generation import Generation, Seat
from meshmend.membership.messages import FRESH, Go
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh
from meshmend.train.core.exchange import FinishedSum
from meshmend.train.core.worker_environment import WorkerEnvironment
from meshmend.train.sharding.sharded_optimizers import ShardedOptimizers
from meshmend.train.sharding.sharded_update import ShardedUpdate
from waiting import HANG_S

SHAPES = [(40, 30), (7,), (64, 5), ()]


class KilledError(Exception):
    """This chip dies now."""


@dataclass(frozen=True)
class Death:
    """Chips that die in a collective; if they have contributed, the finishers get its result."""

    collective: int
    chips: frozenset[Chip]
    has_contributed: bool = False
    finishers: frozenset[Chip] = frozenset()


@dataclass
class Meeting:
    """The collectives of one generation."""

    chips: tuple[Chip, ...]
    death: Death | None = None
    n_calls: dict[Chip, int] = field(default_factory=dict)
    calls: dict[int, dict[Chip, Any]] = field(default_factory=dict)
    gone: set[Chip] = field(default_factory=set)
    changed: threading.Condition = field(default_factory=threading.Condition)

    def call(self, chip: Chip, data: Any) -> dict[Chip, Any]:
        """Contribute to a collective; return what all chips have contributed."""
        with self.changed:
            number = self.n_calls.get(chip, 0)
            self.n_calls[chip] = number + 1
            death = self.death if self.death and self.death.collective == number else None
            if death and chip in death.chips and not death.has_contributed:
                self._leave(chip, KilledError())
            arrived = self.calls.setdefault(number, {})
            arrived[chip] = data
            self.changed.notify_all()
            is_over = self.changed.wait_for(
                lambda: len(arrived) == len(self.chips) or bool(self.gone - set(arrived)), HANG_S
            )
            assert is_over, f"chip {chip} waits for ever in collective {number}"
            if len(arrived) < len(self.chips):
                self._leave(chip, PeerLostError("a chip is gone", rank=0))
            if death and chip in death.chips:
                self._leave(chip, KilledError())
            if death and chip not in death.finishers:
                self._leave(chip, PeerLostError("a chip is gone", rank=0))
            return dict(arrived)

    def _leave(self, chip: Chip, error: Exception) -> None:
        self.gone.add(chip)
        self.changed.notify_all()
        raise error


class ThreadExchange:
    """What `ShardedUpdate` and `gather_bytes` need of an `Exchange`, and how states are sent."""

    def __init__(self, whole: Mesh, chip: Chip) -> None:
        self._whole, self._chip = whole, chip

    def enter(self, generation: Generation, meeting: Meeting) -> None:
        """Begin a generation."""
        self.generation_number = generation.number
        self.mesh = generation.mesh_of(self._whole)
        self.rank = self.mesh.rank_of[self._chip]
        self._meeting = meeting

    def _call(self, data: Any) -> list[Any]:
        found = self._meeting.call(self._chip, data)
        return [found[chip] for chip in self.mesh.live]

    def sum(self, payload: Any, n_elements: int, dtype: str) -> None:
        """Replace the payload by the sum of all."""
        total = sum(each.view(dtype) for each in self._call(payload.copy()))
        payload[:] = total.view(np.uint8)

    def start_sum(self, payload: Any, n_elements: int, dtype: str) -> FinishedSum:
        """Replace the payload by the sum of all, now."""
        self.sum(payload, n_elements, dtype)
        return FinishedSum()

    def all_gather(self, payload: Any) -> None:
        """Fill the payload with the part of each rank."""
        share = len(payload) // self.mesh.n_live
        for rank, each in enumerate(self._call(payload.copy())):
            payload[rank * share : (rank + 1) * share] = each[rank * share : (rank + 1) * share]

    def send_parts(
        self, payload: Any, cuts: Sequence[int], ends: Sequence[tuple[int, int]]
    ) -> None:
        """Receive the parts for this rank."""
        found = self._call(payload.copy())
        for at, (source, target) in enumerate(ends):
            if target == self.rank:
                payload[cuts[at] : cuts[at + 1]] = found[source][cuts[at] : cuts[at + 1]]

    def from_holder(self, state: Any, holders: Sequence[Chip]) -> Any:
        """Return the state of a holder."""
        return self._call(state)[self.mesh.rank_of[holders[0]]]


class ThreadChip:
    """One chip: parameters, a sharded optimizer, and how far it is. It is its own learner."""

    def __init__(self, whole: Mesh, chip: Chip, make: Callable[[Any], Any], board: Any) -> None:
        torch.manual_seed(0)
        self.parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
        self.chip, self.step_number, self.version = chip, 0, FRESH
        self.is_overwritten = False
        self.sharded = ShardedOptimizers({"": make(self.parameters)})
        self.exchange = ThreadExchange(whole, chip)
        environment = WorkerEnvironment(whole=whole, chip=chip, board=board)
        exchange: Any = self.exchange
        self.update = ShardedUpdate(
            self,  # type: ignore[arg-type]  # a learner of its own
            self,
            exchange,
            self.exchange_state,
            environment,
        )
        self.has_lost = False

    def prepare_update(self) -> None:
        """Get the gradients, which depend on the step alone."""
        for parameter, gradient in zip(
            self.parameters, gradients_at(self.step_number), strict=True
        ):
            parameter.grad = gradient

    def inject(self, moment: Any) -> None:
        """Inject nothing: faults are deaths in collectives."""

    def exchange_state(self, go: Go, generation: Generation) -> Any:
        """Send weights, settings and the step, or return those of a holder.

        One that never had a state loses its weights before all others have come, as in a job.
        """
        if len(go.holders) == len(generation.seats):
            return None
        is_holder = self.chip in go.holders
        if is_holder and self.is_overwritten:
            raise StateLostError("its weights were overwritten")
        if not is_holder and self.version == FRESH and go.step > 0:
            self.is_overwritten, self.step_number = True, go.step
            for parameter in self.parameters:
                parameter.data.fill_(math.nan)
        weights = [each.detach().clone() for each in self.parameters]
        mine = weights, self.sharded.state_dict(), self.step_number
        found = self.exchange.from_holder(mine if is_holder else None, go.holders)
        return None if is_holder else found

    def take_state(self, state: Any) -> None:
        """Replace weights, settings and the step."""
        weights, optimizer, self.step_number = state
        for parameter, each in zip(self.parameters, weights, strict=True):
            parameter.data.copy_(each)
        self.sharded.load_state_dict(optimizer)
        self.is_overwritten = False

    def run(self, go: Go, generation: Generation, meeting: Meeting, steps: int) -> bool:
        """Be in a generation until it breaks or all steps are done; return whether this lives."""
        self.exchange.enter(generation, meeting)
        try:
            self.update.catch_up(go, generation)
            self.version = generation.number
            while self.step_number < steps:
                self.exchange.sum(np.zeros(8, dtype=np.uint8), 1, "int64")  # of the gradients
                self.sharded.begin()
                self.update.gather()
                self.sharded.step()
                self.step_number += 1
            self.exchange.sum(np.zeros(8, dtype=np.uint8), 1, "int64")  # all have finished
        except KilledError:
            return False
        except PeerLostError:
            pass
        except StateLostError:
            self.version, self.has_lost = FRESH, True
            meeting.gone.add(self.chip)
        return True


class ThreadJob:
    """Chips in boards of two, and generations of those that live."""

    def __init__(self, n_boards: int, make: Callable[[Any], Any]) -> None:
        self.whole, self._make = Mesh((n_boards, 2)), make
        self.chips = {chip: self._new(chip) for chip in self.whole.live}
        self.number = 0

    def _new(self, chip: Chip) -> ThreadChip:
        return ThreadChip(self.whole, chip, self._make, (1, 2))

    def repair(self) -> None:
        """Start new workers for all dead chips."""
        for chip in self.whole.live:
            self.chips.setdefault(chip, self._new(chip))

    def run(self, steps: int, death: Death | None = None) -> int:
        """Run one generation; return how many collectives its longest member called."""
        self.number += 1
        chips = tuple(sorted(self.chips))
        seats = tuple(Seat(chip, ("localhost", 1), 1) for chip in chips)
        generation = Generation(self.number, seats)
        best = max((each.version, each.step_number) for each in self.chips.values())
        holders = tuple(
            chip
            for chip in chips
            if (self.chips[chip].version, self.chips[chip].step_number) == best
        )
        go = Go(self.number, best[1], holders if best[0] != FRESH else holders[:1])
        meeting = Meeting(chips, death)
        with ThreadPoolExecutor(len(chips)) as pool:
            lives = pool.map(
                lambda each: each.run(go, generation, meeting, steps), self.chips.values()
            )
            alive = dict(zip(list(self.chips), lives, strict=True))
        self.chips = {chip: each for chip, each in self.chips.items() if alive[chip]}
        return max(meeting.n_calls.values())


def gradients_at(step: int) -> list[torch.Tensor]:
    """Return the gradients of a step."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def plain_weights(steps: int, make: Callable[[Any], Any]) -> list[torch.Tensor]:
    """Return the weights after so many steps of an optimizer that is not sharded."""
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    optimizer = make(parameters)
    for step in range(steps):
        for parameter, gradient in zip(parameters, gradients_at(step), strict=True):
            parameter.grad = gradient
        optimizer.step()
    return [each.detach() for each in parameters]

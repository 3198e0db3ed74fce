"""All chips of a generation run the same plan for each sum, and change it between the same steps.

The fastest plan is **searched** for. A chip has it if it was made ahead, or in an earlier
generation; another chip may lack it, or find it in its folder a moment later. So the chips agree
when a generation begins: each tells all others the digests of the searched plans that it has. All
see the same digests, and conclude the same:

- if all have the same plan, they take it;
- if only some have one, the first of those sends it to all;
- if none has one, all take the **quick** plan, which needs no search and is the same everywhere.

Nobody waits for a search. While a quick plan is in use, somebody makes the searched one. Before
some steps the first chip tells all others what it has found; it sends the plans along, and all take
them before that step. Telling costs a step two messages even if nothing was found, so it is done
before the 2nd, 4th, 8th step of a generation and so on: at worst, a quick plan serves twice as many
steps as it has to. Before the 1st all have just told each other what they have. A chip that fails
to hear of a plan has lost a peer, and the generation ends with all its plans: so no two chips ever
begin a step with different ones. If they did, the fingerprints of their frames would differ, and
the step would fail.

`PlanAgreement` knows no meshes and schedules. The plans of a real chip are `FolderPlans`.
"""

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import msgspec
import numpy as np

from meshmend.planning.catalogue import (
    QUICK,
    Catalogue,
    is_remembered,
    is_searched,
    proved_schedule,
)
from meshmend.planning.plan_cache import (
    has_plan,
    load_plans,
    packed_plan,
    planned_calls,
    remember_packed,
)
from meshmend.planning.plan_request import SumSizes
from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh

Bytes = Any  # a flat array of bytes; NumPy's in a job

_LOOK_EVERY_S: Final = 0.1  # for plans that were made meanwhile
_MOST_STEPS_APART: Final = 64  # of those before which chips ask for better plans

_log = logging.getLogger(__name__)


class Plans(Protocol):
    """One chip's plans for the sums of a generation that are searched for, by number."""

    def digests(self) -> Sequence[int]:
        """Return the digest of each searched plan, 0 where this chip has none."""

    def packed(self, number: int) -> bytes:
        """Return a searched plan that this chip has, as bytes."""

    def take(self, number: int, packed: bytes | None) -> None:
        """Run a searched plan from now on, after its proof; None: the one that this chip has."""

    def take_quick(self, number: int) -> None:
        """Run the quick plan from now on."""

    def has_found(self, numbers: Sequence[int]) -> bool:
        """Look for searched plans that were made meanwhile; return whether all these are there."""


class Members(Protocol):
    """The chips of a generation, which all call these methods in the same order."""

    @property
    def rank(self) -> int:
        """The number of this chip in the generation."""

    @property
    def members(self) -> Sequence[Chip]:
        """The chips by rank."""

    def gather_numbers(self, mine: Sequence[int]) -> Sequence[Sequence[int]]:
        """Return the numbers of all chips, by rank; all have equally many."""

    def spread(self, payload: Bytes | None, holders: Sequence[Chip]) -> Bytes:
        """Return the holders' payload on every chip; chips that are no holders pass None."""


class PlanAgreement:
    """One chip's part in the agreement on the plans of one generation."""

    def __init__(self, members: Members, plans: Plans) -> None:
        self._members, self._plans = members, plans
        self._quick: list[int] = []  # the sums that run quick plans, the same on all chips
        self._n_steps = 0  # that began with quick plans, as many on all chips

    @property
    def is_provisional(self) -> bool:
        """Whether quick plans are in use, so that better ones may come; the same on all chips."""
        return bool(self._quick)

    def begin(self) -> None:
        """Agree on the plans that the generation begins with."""
        mine = self._plans.digests()
        if not mine:
            return
        told = self._members.gather_numbers(mine)
        for number, digests in enumerate(zip(*told, strict=True)):
            if not any(digests):
                self._plans.take_quick(number)
                self._quick.append(number)
            elif len(set(digests)) == 1:
                self._plans.take(number, None)
            else:
                first = next(rank for rank, digest in enumerate(digests) if digest)
                self._plans.take(number, self._sent(first, [number])[0])

    def swap(self) -> bool:
        """Take the searched plans if the first chip has found them; return whether it has.

        All chips call this before the same step, while plans are provisional.
        """
        self._n_steps += 1
        is_power = self._n_steps > 1 and self._n_steps.bit_count() == 1
        if not is_power and self._n_steps % _MOST_STEPS_APART:
            return False
        is_found = self._members.rank == 0 and self._plans.has_found(self._quick)
        plans = self._sent(0, self._quick if is_found else [])
        if not plans:
            return False
        for number, plan in zip(self._quick, plans, strict=True):
            self._plans.take(number, plan)
        self._quick = []
        return True

    def _sent(self, sender: int, numbers: Sequence[int]) -> list[bytes]:
        """Return the searched plans that a rank sends to all; only that rank knows the numbers."""
        payload = None
        if self._members.rank == sender:
            packed = msgspec.msgpack.encode([self._plans.packed(number) for number in numbers])
            payload = np.frombuffer(bytearray(packed), dtype=np.uint8)
        data = self._members.spread(payload, [self._members.members[sender]])
        return msgspec.msgpack.decode(data, type=list[bytes])


class FolderPlans:
    """The plans of a chip for a mesh, in memory and in a folder that planning ahead fills.

    What this chip has of both it prepares at once: searched plans from the folder, quick ones where
    there are none.
    """

    def __init__(
        self,
        folder: Path | None,
        mesh: Mesh,
        algorithm: str,
        sums: SumSizes,
        catalogue: Catalogue,
    ) -> None:
        self._folder, self._mesh, self._algorithm = folder, mesh, algorithm
        self._sums, _ = split_sums(mesh, algorithm, sums)
        self._calls = planned_calls(self._sums)
        self._catalogue = catalogue
        self._runs = [algorithm] * len(self._calls)
        self._look_at = 0.0
        self._load()
        for number, digest in enumerate(self.digests()):
            if not digest:
                self.take_quick(number)

    def digests(self) -> list[int]:
        """Return the digest of each searched plan, 0 where this chip has none."""
        return [
            proved_schedule(self._mesh, self._algorithm, *call)[0].digest
            if is_remembered(self._mesh, self._algorithm, *call)
            else 0
            for call in self._calls
        ]

    def packed(self, number: int) -> bytes:
        """Return a searched plan that this chip has, as bytes."""
        return packed_plan(self._mesh, self._algorithm, *self._calls[number])

    def take(self, number: int, packed: bytes | None) -> None:
        """Run a searched plan from now on, after its proof; None: the one that this chip has.

        Raises:
            PlanFileError, ProofError: what was sent is no right plan for this mesh.
        """
        if packed is not None:
            remember_packed(self._mesh, self._algorithm, *self._calls[number], packed)
        if packed is not None or self._runs[number] != self._algorithm:
            self._run(number, self._algorithm)

    def take_quick(self, number: int) -> None:
        """Run the quick plan from now on; it is made and proved now."""
        if self._runs[number] != QUICK:
            proved_schedule(self._mesh, QUICK, *self._calls[number])
            self._run(number, QUICK)

    def has_found(self, numbers: Sequence[int]) -> bool:
        """Look for searched plans that were made meanwhile; return whether all these are there."""
        now = time.monotonic()
        if self._folder is None or now < self._look_at:
            return False
        self._look_at = now + _LOOK_EVERY_S
        key = self._mesh, self._algorithm
        if not all(has_plan(self._folder, *key, *self._calls[number]) for number in numbers):
            return False
        self._load()
        digests = self.digests()
        return all(digests[number] for number in numbers)

    def _run(self, number: int, algorithm: str) -> None:
        self._runs[number] = algorithm
        self._catalogue.replan(*self._calls[number], algorithm)

    def _load(self) -> None:
        if self._folder is not None:
            load_plans(self._folder, self._mesh, self._algorithm, self._sums)


def split_sums(mesh: Mesh, algorithm: str, sums: SumSizes) -> tuple[SumSizes, SumSizes]:
    """Return the sums whose plans are searched for, and those that have one plan at once."""
    searched = [each for each in sums if is_searched(mesh, algorithm, *planned_calls([each])[0])]
    return searched, [each for each in sums if each not in searched]

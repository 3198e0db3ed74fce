"""How a chip gets its part of the state in a job with tiles: from a chip of the same colour.

The parts of one colour after another are sent, as `StateTransfer` spreads a whole state, but only
to the chips that lack them. Chips on the way pass them on, because twins need not be neighbours.
"""

from collections.abc import Callable
from typing import Any

from msgspec import structs

from meshmend.membership.generation import Generation
from meshmend.membership.messages import Go
from meshmend.topology.failures import Chip
from meshmend.topology.tiles import box_colour
from meshmend.train.core.state_transfer import StateTransfer


class PartTransfer:
    """One chip's part in giving their parts of the state to those that lack them.

    `settle(step)` makes the state that this chip holds that of a step: before it sends some of it.
    `share(generation, state)` gets what twins share of it; `state` is what this chip will take.
    """

    def __init__(
        self,
        chip: Chip,
        tile: tuple[int, ...],
        transfer: StateTransfer,
        *,
        settle: Callable[[int], None],
        take: Callable[[Any], None],
        share: Callable[[Generation, Any | None], None] | None = None,
    ) -> None:
        self._chip, self._tile, self._transfer = chip, tile, transfer
        self._settle, self._take, self._share = settle, take, share

    def catch_up(self, go: Go, generation: Generation) -> None:
        """Get the part of the state that this chip lacks, or send its own to twins that lack it.

        Raises:
            TransportError: the mesh has changed; a chip that had a state of the job has it still.
            StateLostError: a part of what twins share is lost.
        """
        if self._chip in go.holders:
            self._settle(go.step)
        state = self._exchanged(go, generation)
        if self._share is not None:
            self._share(generation, state)
        if state is not None:
            self._take(state)

    def first_state(self, generation: Generation, step: int) -> Any | None:
        """Return the state of the first chip of this colour; None if this chip is the first.

        Raises:
            TransportError: the mesh has changed.
        """
        first: dict[int, Chip] = {}
        for chip in generation.chips:
            first.setdefault(box_colour(self._tile, chip), chip)
        go = Go(generation.number, step, tuple(sorted(first.values())))
        return self._exchanged(go, generation)

    def _exchanged(self, go: Go, generation: Generation) -> Any | None:
        """Return what this chip is to take; None if it has it."""
        by_colour: dict[int, list[Chip]] = {}
        for chip in generation.chips:
            by_colour.setdefault(box_colour(self._tile, chip), []).append(chip)
        taken = None
        for _, twins in sorted(by_colour.items()):
            holders = tuple(chip for chip in twins if chip in go.holders)
            if len(holders) == len(twins):
                continue
            lacking = [chip for chip in twins if chip not in go.holders]
            mine = structs.replace(go, holders=holders)
            found = self._transfer.exchanged(mine, generation, lacking)
            if self._chip in twins:
                taken = found
        return taken

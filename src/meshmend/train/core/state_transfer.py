"""How a chip that lacks the state gets it: from many holders at once, into memory where it stays.

First goes what is small: the nesting, plain values, small tensors, and the types and shapes of the
large ones. Then goes each large tensor, in pieces. A holder sends a piece from the tensor's own
memory; from a device it copies one while others are under way. A chip that receives has the pieces
written to where the tensors stay, and passes them on from there. So neither has a second copy of
the state.

A chip next to several holders takes parts of each piece from all of them: they hold the same bits.
Objects in `also` need not be equal on all chips, so what is theirs comes from one holder each.

A new chip has its own tensors overwritten. If that breaks off, it holds no state, and says so. A
chip with a state of the job keeps it until all of the other state has come: it may be needed still.

In a job with tiles a chip gets its part of the state from a chip of the same colour. The parts of
one colour after another are sent, but only to the chips that lack them. Chips on the way pass them
on, because twins need not be neighbours.
"""

import json
import zlib
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import numpy as np

from meshmend.errors import StateLostError, TransportError
from meshmend.membership.generation import Generation
from meshmend.membership.messages import Go
from meshmend.topology.failures import Chip
from meshmend.topology.tiles import box_colour
from meshmend.train.core.exchange import Exchange, PendingSum, Spreading, first_error
from meshmend.train.state.state_tree import (
    Bytes,
    Framework,
    RawArray,
    StateTree,
    decoded_without,
    encoded_without,
    tree_of,
)

_LARGE_BYTES: Final = 1 << 16
_PIECE_BYTES: Final = 1 << 25
_MOST_IN_FLIGHT: Final = 4
_ALSO: Final = "also."  # what the names of arrays in the state of such objects begin with


class TransferredReplica(Protocol):
    """What a transfer needs of its job; `JobCore` is such."""

    @property
    def is_overwritten(self) -> bool:
        """Whether a part of the state was overwritten, so that this chip has none."""

    def state(self) -> dict[str, Any]:
        """Return the training state at this step; its tensors may be those of the model."""

    def begin_overwriting(self, step: int) -> bool:
        """Whether the state of a step may be written over this chip's own, before all has come."""

    def take_state(self, state: Any) -> None:
        """Replace all of this chip's state by that of another chip."""


class StateTransfer:
    """One chip's part in giving the state to those that lack it.

    With a `tile` each chip holds a part of it, and gets that from a twin: a chip of its colour.
    """

    def __init__(
        self,
        replica: TransferredReplica,
        exchange: Exchange,
        framework: Framework,
        *,
        tile: tuple[int, ...] | None = None,
    ) -> None:
        self._replica, self._exchange, self._framework = replica, exchange, framework
        self._chip, self._tile = exchange.chip, tile

    def catch_up(self, go: Go, generation: Generation) -> None:
        """Get the state that a generation begins with, or send it to those that lack it.

        Raises:
            TransportError: the mesh has changed; a chip that had a state of the job has it still.
            StateLostError: this chip is to send a state, but its own was overwritten in part.
        """
        if (state := self.exchanged(go, generation)) is not None:
            self._replica.take_state(state)

    def first_state(self, generation: Generation, step: int) -> Any | None:
        """Return the state of the first chip, of this colour; None if this chip is the first.

        Raises:
            TransportError: the mesh has changed.
        """
        first = tuple(sorted(twins[0] for twins in self._twins_in(generation)))
        return self.exchanged(Go(generation.number, step, first), generation)

    def exchanged(self, go: Go, generation: Generation) -> Any | None:
        """Send or receive a state; return what this chip is to take, None if there is nothing.

        Raises:
            TransportError, StateLostError: as `catch_up`.
        """
        if self._chip in go.holders and self._replica.is_overwritten:
            raise StateLostError("its state was overwritten in part, and the rest has not come")
        taken = None
        for twins in self._twins_in(generation):
            holders = [chip for chip in twins if chip in go.holders]
            lacking = [chip for chip in twins if chip not in go.holders]
            if lacking:
                receivers = None if self._tile is None else lacking
                found = self._exchanged(holders, go.step, receivers)
                taken = found if self._chip in twins else taken
        return taken

    def _twins_in(self, generation: Generation) -> list[list[Chip]]:
        """Return the chips of a generation that hold the same of the state: all, or by colour."""
        if self._tile is None:
            return [list(generation.chips)]
        by_colour: dict[int, list[Chip]] = {}
        for chip in generation.chips:
            by_colour.setdefault(box_colour(self._tile, chip), []).append(chip)
        return [twins for _, twins in sorted(by_colour.items())]

    def _exchanged(
        self, holders: Sequence[Chip], step: int, receivers: Sequence[Chip] | None
    ) -> Any | None:
        """Do what `exchanged` does, for the state of some holders.

        With `receivers`, what is large of it goes to these chips only; those on the way pass it on.
        """
        is_holder = self._chip in holders
        tree = tree_of(self._replica.state(), self._framework.raw) if is_holder else None
        large = {} if tree is None else _large(tree)
        holders, small = self._agreed(holders, tree, large)
        is_between = receivers is not None and self._chip not in (*receivers, *holders)
        if is_between:
            _, shapes = decoded_without(small)
            room = self._framework.room  # what does not pass here touches none of it
            rooms = {
                name: RawArray.of(dtype, shape, room(dtype, shape, None)[1])
                for name, (dtype, shape) in shapes.items()
            }
            self._move(rooms, holders, receivers)
            return None
        if tree is None or self._chip not in holders:
            return self._received(small, holders, step, receivers)
        del tree  # and so copies of tensors that are in several pieces, when they are sent
        self._move(large, holders, receivers)
        return None

    def _agreed(
        self, holders: Sequence[Chip], tree: StateTree | None, large: Mapping[str, RawArray]
    ) -> tuple[Sequence[Chip], Bytes]:
        """Return the holders that the others take their state from, and what is small of it.

        Those are the holders whose large tensors have the names, types and shapes of the first's:
        objects in `also` may differ. Most holders have no neighbour that lacks the state, and
        encode nothing. One message tells all chips the shapes and the lengths.
        """
        shapes = [(name, array.dtype, array.shape) for name, array in large.items()]
        mine = zlib.crc32(json.dumps(shapes).encode())
        while True:
            spreading = self._exchange.spreading(holders, in_parts=False)
            is_sender = tree is not None and self._chip in holders and spreading.has_part
            small = encoded_without(tree, large) if tree and is_sender else np.empty(0, np.uint8)
            told = self._exchange.gather_numbers([mine, len(small)])
            shapes_of = {chip: told[rank][0] for chip, rank in self._exchange.mesh.rank_of.items()}
            alike = [chip for chip in holders if shapes_of[chip] == shapes_of[holders[0]]]
            if len(alike) == len(holders):
                break
            holders = alike  # others send than had thought so, and have lengths to tell
        payload = np.zeros(max(length for _, length in told), dtype=np.uint8)  # the rest is padding
        payload[: len(small)] = small
        spreading.run(payload)
        return holders, payload

    def _received(
        self,
        small: Bytes,
        holders: Sequence[Chip],
        step: int,
        receivers: Sequence[Chip] | None,
    ) -> Any:
        """Return all of the state; what is large of it is taken from the holders."""
        framework = self._framework
        tree, shapes = decoded_without(small)
        tensors = {name: framework.tensor(array) for name, (array, _) in tree.arrays.items()}
        own: Mapping[str, Any] = {}
        if self._replica.begin_overwriting(step):
            own = _tensors(self._replica.state(), framework)
        large: dict[str, RawArray] = {}
        for name, (dtype, shape) in shapes.items():
            tensors[name], memory = framework.room(dtype, shape, own.get(name))
            large[name] = RawArray.of(dtype, shape, memory)
        self._move(large, holders, receivers)
        return tree.state_of(tensors)

    def _move(
        self,
        large: dict[str, RawArray],
        holders: Sequence[Chip],
        receivers: Sequence[Chip] | None,
    ) -> None:
        """Send tensors, or fill their memory, piece by piece; forget each when it is under way."""
        spreadings: dict[bool, Spreading] = {}  # each is proved, so only those that are needed
        in_flight: deque[PendingSum] = deque()
        try:
            for name in list(large):
                in_parts = len(holders) > 1 and not name.startswith(_ALSO)
                if in_parts not in spreadings:
                    spreadings[in_parts] = self._exchange.spreading(
                        holders, in_parts=in_parts, receivers=receivers
                    )
                spreading, array = spreadings[in_parts], large.pop(name)
                for start, stop in _pieces(array):
                    if len(in_flight) == _MOST_IN_FLIGHT:
                        in_flight.popleft().wait()
                    if spreading.has_part:
                        piece = array.read(start, stop)
                    else:
                        piece = np.empty((stop - start) * array.element_bytes, dtype=np.uint8)
                    in_flight.append(spreading.start(piece))
        except TransportError:
            first_error(in_flight)  # afterwards nothing is written any more
            raise
        if (error := first_error(in_flight)) is not None:
            raise error


def _large(tree: StateTree) -> dict[str, RawArray]:
    return {
        name: array
        for name, (array, place) in tree.arrays.items()
        if place is None and array.n_bytes >= _LARGE_BYTES
    }


def _pieces(array: RawArray) -> Iterable[tuple[int, int]]:
    """Yield the first element of each piece and the one after its last."""
    n_elements = max(1, _PIECE_BYTES // array.element_bytes)
    for start in range(0, array.n_elements, n_elements):
        yield start, min(start + n_elements, array.n_elements)


def _tensors(state: Any, framework: Framework) -> dict[str, Any]:
    """Return the tensors of a state by the names that they have in its tree."""
    leaves: list[tuple[RawArray, Any]] = []

    def raw(leaf: Any, where: str) -> RawArray | None:
        array = framework.raw(leaf, where)
        if array is not None:
            leaves.append((array, leaf))
        return array

    tree = tree_of(state, raw)
    leaf_of = {id(array): leaf for array, leaf in leaves}
    return {name: leaf_of[id(array)] for name, (array, _) in tree.arrays.items()}

"""Optimizers whose state twins share: each chip keeps a share of what it needs, and a mirror's.

Twins hold the same part of a model, one in each tile, and step it alike. With shared optimizers
each twin steps only a share of that part, and one more that it mirrors, and then all gather the
new weights. Optimizers see pieces of their parameters meanwhile, plain tensors: the loop calls
`optimizer.step()` as ever, and hooks do the rest.

A step that fails is undone as all of the elastic group's are, so nothing is tried here. When the
mesh changes, chips say which spans of the row of parameters they hold the state of, and what a chip
lacks is sent to it. Nobody forgets anything before all chips have made their objects.
"""

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from meshmend.errors import InputError, StateLostError
from meshmend.membership.generation import Generation
from meshmend.topology.failures import Chip
from meshmend.topology.tiles import box_colour
from meshmend.torch.call_arguments import dist
from meshmend.torch.group import MeshmendGroup
from meshmend.train.core.byte_gather import gather_values
from meshmend.train.core.exchange import Exchange
from meshmend.train.sharding.layerwise import LAYERWISE
from meshmend.train.sharding.sharded_optimizers import ShardedOptimizers
from meshmend.train.sharding.sharded_update import sent_states
from meshmend.train.sharding.update_shares import (
    DEFAULT_DOMAINS,
    Move,
    Span,
    Spans,
    UpdateShares,
    counted_domains,
    domains_of,
    mirrors_of,
    moves_to,
    without,
)
from meshmend.train.state.state_tree import Bytes
from meshmend.train.torch.group_state import GroupState
from meshmend.train.torch.optimizers import before_other_hooks, has_closure

_log = logging.getLogger(__name__)

Row = tuple[int, Spans]  # the bytes of an optimizer's parameters here, and which have their state
Received = tuple[int, Span, Bytes]  # the number of an optimizer, a span and its state


class Holding(NamedTuple):
    """What a chip has of the optimizers' states when a generation begins.

    `is_all`: it makes or reads all of them by itself, and can send none. Else `rows` has one entry
    for each optimizer; it is empty if the chip has nothing of the state that counts.
    """

    is_all: bool
    rows: tuple[Row, ...] = ()
    board: tuple[int, ...] = ()  # as this chip was told


class TwinShares:
    """One chip's part in the optimizers of the present objects, in their order.

    It begins with all of the states that the optimizers have.

    Raises:
        InputError: one cannot be shared.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.of: dict[torch.optim.Optimizer, ShardedOptimizers] = {}
        self._stepping = ExitStack()
        self._twins: Any = None  # their process group; None: this chip has no other
        self._row_bytes: list[int] = []  # of each optimizer, the most of any colour
        for optimizer in optimizers:
            if isinstance(optimizer, LAYERWISE):
                raise InputError(
                    "shard_optimizer with tiles needs an optimizer that updates each element by "
                    f"itself, such as AdamW, but got {type(optimizer).__name__}, which needs norms "
                    "of whole tensors; leave out shard_optimizer"
                )
            self.of[optimizer] = ShardedOptimizers({"": optimizer}, calls_step=False)
            optimizer.register_step_pre_hook(self._before_step)
            before_other_hooks(optimizer, self._after_step)  # which see all of the new weights

    @property
    def holding(self) -> Holding:
        """What this chip has."""
        return Holding(False, tuple((each.flat.n_bytes, each.held) for each in self.of.values()))

    def take(self, before: "TwinShares | None", received: Sequence[Received]) -> None:
        """Have what another one had, and what has come from other chips, and nothing else."""
        mine = list(self.of.values())
        for each in mine:
            each.drop()
        for each, other in zip(mine, before.of.values() if before else (), strict=False):
            each.states, each.held = dict(other.states), other.held
        for number, span, data in received:
            mine[number].receive(span, data)

    def keep(
        self, place: int, mirror_of: Sequence[int], twins: Any, row_bytes: Sequence[int]
    ) -> None:
        """Keep this chip's share and those that it mirrors; `place` is its number among twins."""
        for each in self.of.values():
            shares = UpdateShares(each.flat.n_bytes, tuple(mirror_of))
            each.keep(shares.owned(place), shares.mirrored(place))
        self._twins = twins if len(mirror_of) > 1 else None
        self._row_bytes = list(row_bytes)

    def packed(self, number: int, span: Span) -> Bytes:
        """Return the state of a span of an optimizer's parameters, as bytes."""
        found: Bytes = list(self.of.values())[number].packed_span(span)
        return found

    def _before_step(
        self, optimizer: torch.optim.Optimizer, arguments: Any, named: Mapping[str, Any]
    ) -> None:
        if has_closure(arguments, named):
            raise InputError(
                "shard_optimizer needs optimizer.step() without a closure, but got one; compute "
                "the gradients before it"
            )
        self._stepping = ExitStack()  # one that was left open was undone
        self._stepping.enter_context(self.of[optimizer].on_pieces())

    @torch.no_grad()
    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self._stepping.close()
        if self._twins is None:
            return
        mine = self.of[optimizer]
        flat, number = mine.flat, list(self.of).index(optimizer)
        # A sum of disjoint parts is their concatenation.
        payload = torch.zeros(
            self._row_bytes[number], dtype=torch.uint8, device=flat.parameters[0].device
        )
        for piece in flat.pieces(mine.own):
            flat.bytes_in(payload, piece).copy_(flat.values(piece))
        dist.all_reduce(payload.view(torch.int32), group=self._twins)
        for span in without([(0, flat.n_bytes)], mine.held):
            for piece in flat.pieces(span):
                flat.values(piece).copy_(flat.bytes_in(payload, piece))


class HeldShares:
    """The shares of optimizers that this chip holds, from one generation to the next.

    When a generation begins a chip gets what it lacks, for the objects that it will make. When all
    chips have made theirs, it keeps its own shares alone.
    """

    def __init__(self, tile: tuple[int, ...], board: tuple[int, ...]) -> None:
        self._tile, self._board = tile, board
        self._shares: TwinShares | None = None  # of the present objects
        self._received: list[Received] = []  # for those of the next group
        self._mirror_of: tuple[int, ...] = ()  # of the twins of this generation
        self.has_lost_state = False  # so that a checkpoint of this very step must be read

    def receive(
        self,
        exchange: Exchange,
        generation: Generation,
        step: int,
        coming: Mapping[str, Any] | None,
    ) -> None:
        """Get the states that this chip lacks; `coming` is what it will hold, None: what it holds.

        What the beginning of a job is made of, and what is read from a checkpoint, each chip makes
        or reads by itself: that is a state without objects.

        Raises:
            TransportError: the mesh has changed.
            StateLostError: no chip has the state of some share.
        """
        mine = Holding(is_all=True) if self._shares is None else self._shares.holding
        if coming is not None:
            mine = Holding(is_all=not coming["objects"])
        holdings = gather_values(exchange, mine._replace(board=self._board), Holding)
        # Chips may be told of other boards: those of the first count.
        chips, board = exchange.mesh.live, holdings[0].board
        try:
            moves = _moves(chips, holdings, generation, self._tile, board)
        except StateLostError as lost:
            if exchange.rank == 0:
                _log.error("after step %d %s", step, lost)
            self.has_lost_state = True
            raise
        received: list[Received] = []
        for number, of_one in moves:
            states = sent_states(exchange, of_one, partial(self._packed, number))
            received += [(number, span, data) for span, data in states]
        colour = box_colour(self._tile, chips[exchange.rank])
        twins = [chip for chip in chips if box_colour(self._tile, chip) == colour]
        self._received, self._mirror_of = received, mirrors_of_twins(twins, generation, board)

    def _packed(self, number: int, span: Span) -> Bytes:
        assert self._shares is not None, "this chip has said that it has this state"
        return self._shares.packed(number, span)

    def share(self, objects: GroupState, *, has_begun: bool, keeps_own: bool) -> None:
        """Let twins share the optimizers of new objects; a job that `has_begun` has their states.

        They have those that have come, and with `keeps_own` those of the objects before them.
        """
        before = self._shares if keeps_own else None
        self._shares = TwinShares(objects.optimizers)
        objects.share(self._shares.of)
        if has_begun:
            self._shares.take(before, self._received)
        self._received, self.has_lost_state = [], False

    def keep(self) -> None:
        """Keep this chip's shares alone, once all chips have made their objects.

        Raises:
            RuntimeError, TransportError: the mesh has changed.
        """
        shares, world = self._shares, dist.group.WORLD if dist.is_initialized() else None
        if shares is None or not isinstance(world, MeshmendGroup):
            return
        rows = [n_bytes for n_bytes, _ in shares.holding.rows]
        told = torch.zeros((dist.get_world_size(), len(rows)), dtype=torch.int64, device="cpu")
        told[dist.get_rank()] = torch.tensor(rows, device="cpu")
        dist.all_reduce(told)
        mesh = world.meshes[-1]
        _, *inside = cast("tuple[int, ...]", mesh.get_coordinate())
        line: Any = (slice(None), *inside)
        twins = sorted(mesh.mesh[line].tolist())
        # Without failures there are no mirrors.
        mirror_of = self._mirror_of or tuple(range(len(twins)))
        place = twins.index(dist.get_rank())
        shares.keep(place, mirror_of, mesh.get_group(0), told.max(0).values.tolist())


def mirrors_of_twins(
    twins: Sequence[Chip], generation: Generation, board: tuple[int, ...]
) -> tuple[int, ...]:
    """Return which twin mirrors the share of each: one of another board, and of another host."""
    hosts = {seat.chip: seat.address[0] for seat in generation.seats}
    names = counted_domains(DEFAULT_DOMAINS, hosts)
    return mirrors_of(domains_of(names, twins, hosts, board))


def _moves(
    chips: Sequence[Chip],
    holdings: Sequence[Holding],
    generation: Generation,
    tile: tuple[int, ...],
    board: tuple[int, ...],
) -> list[tuple[int, list[Move]]]:
    """Return what has to move, for each optimizer and colour; the same on all chips."""
    ranks_of: dict[int, list[int]] = {}
    for rank, chip in enumerate(chips):
        ranks_of.setdefault(box_colour(tile, chip), []).append(rank)
    found = []
    for _, ranks in sorted(ranks_of.items()):
        known = [holdings[rank].rows for rank in ranks if holdings[rank].rows]
        mirror_of = mirrors_of_twins([chips[rank] for rank in ranks], generation, board)
        if not known and not all(holdings[rank].is_all for rank in ranks):
            raise StateLostError("no chip has the state of the optimizers in a part of the model")
        for number, (n_bytes, _) in enumerate(known[0] if known else ()):
            shares = UpdateShares(n_bytes, mirror_of)
            needed: list[Spans] = [()] * len(chips)
            held: list[Spans] = [()] * len(chips)
            for place, rank in enumerate(ranks):
                if not holdings[rank].is_all:
                    needed[rank] = shares.kept(place)
                    held[rank] = holdings[rank].rows[number][1] if holdings[rank].rows else ()
            wanted = [span for spans in needed for span in spans]
            if without(wanted, [span for spans in held for span in spans]):
                raise StateLostError(
                    "a part of the optimizers' state is lost: the chips that kept it and their "
                    "mirrors are gone"
                )
            found.append((number, moves_to(needed, held)))
    return found

"""How the chips of a job share out the update: new weights are gathered, states are moved.

In a step every chip has the sums of all gradients. If the optimizer needs norms of whole tensors,
the owners sum the squares of their shares. Each owner tries the update of its share, and all gather
the new weights. Whoever has finished that counts the step. It had to hear of all
chips, so all of them have the sums and have tried the step: one that did not finish can still
update what it keeps, by itself, and takes the rest from a chip that did.

In a new generation the chips say what they hold. Then the shares are cut anew, and what a chip
lacks is sent to it. Nobody forgets anything before all chips have what they need.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from meshmend.errors import StateLostError
from meshmend.membership.faults.fault import Moment
from meshmend.membership.generation import Generation
from meshmend.membership.messages import Go
from meshmend.planning.plan_request import SumSizes
from meshmend.train.core.byte_gather import gather_values
from meshmend.train.core.exchange import Exchange
from meshmend.train.core.learner import ExchangeState, ShardedReplica
from meshmend.train.core.worker_environment import WorkerEnvironment
from meshmend.train.sharding.sharded_optimizers import StateName
from meshmend.train.sharding.update_shares import (
    DEFAULT_DOMAINS,
    Move,
    Span,
    Spans,
    UpdateShares,
    batches_of_moves,
    check_domains,
    counted_domains,
    domains_of,
    kept_apart,
    mirrors_of,
    moves_to,
    without,
)
from meshmend.train.torch.learner import TorchLearner

_log = logging.getLogger(__name__)

_BATCH_BYTES: Final = 64 << 20  # of parameters whose states move at the same time


@dataclass(frozen=True)
class _Holding:
    """What a chip says in a new generation: which state it keeps, or could, and of which spans.

    `initial` is its step if its state has never been updated: all such chips of a step have the
    same state of the optimizer, whose holder may die before it has sent any of it.
    """

    name: StateName | None
    tried: StateName | None
    spans: Spans
    initial: int | None
    board: tuple[int, ...]

    def of(self, holder: "_Holding") -> Spans:
        """Return the spans whose state is, or could be, the one of a holder."""
        is_initial = self.initial is not None and self.initial == holder.initial
        return self.spans if holder.name in (self.name, self.tried) or is_initial else ()


class ShardedUpdate:
    """One chip's part in a sharded update of the models of a learner."""

    def __init__(
        self,
        learner: TorchLearner,
        replica: ShardedReplica,
        exchange: Exchange,
        exchange_state: ExchangeState,
        environment: WorkerEnvironment,
        mirror_domains: Sequence[str] = DEFAULT_DOMAINS,
    ) -> None:
        check_domains(mirror_domains, environment.whole, environment.board)
        assert learner.sharded is not None, "its optimizers are not sharded"
        self._learner, self._optimizers = learner, learner.sharded
        self._chip, self._board = environment.chip, environment.board
        self._domain_names = tuple(mirror_domains)
        self._n_apart: int | None = None  # how many domains mirrors keep apart
        self._initial_name: StateName | None = None  # of the state before any update
        self._replica, self._exchange, self._exchange_state = replica, exchange, exchange_state
        self._shares = UpdateShares(self._optimizers.flat.n_bytes, (0,))
        self.has_lost_state = False  # so that a checkpoint of this very step must be read

    def sum_sizes(self) -> SumSizes:
        """Return the sizes of the sums and gathers of an update on the chips that train now."""
        return self._optimizers.sum_sizes(self._exchange.mesh.n_live)

    def gather(self) -> None:
        """Try the update of this chip's share, and gather the new weights of all.

        Raises:
            TransportError: the mesh has changed.
        """
        self._learner.prepare_update()
        squares = self._optimizers.squared_norms()
        if squares is not None:
            self._exchange.sum(squares.reshape(-1).view(np.uint8), squares.size, "float64")
        name = self._exchange.generation_number, self._replica.step_number + 1
        payload = self._optimizers.trial(name, self._shares)
        self._replica.inject(Moment.GATHER)
        self._exchange.all_gather(payload.numpy())

    def catch_up(self, go: Go, generation: Generation) -> None:
        """Get the state that a generation begins with, and this chip's shares of it.

        Raises:
            TransportError: the mesh has changed.
            StateLostError: no chip has the state of some share, or this chip is to send a state
                that was overwritten in part.
        """
        optimizers, exchange = self._optimizers, self._exchange
        is_initial = optimizers.name in (None, self._initial_name)
        # One that was overwritten names the step of others, and has no state of it.
        is_whole = is_initial and not self._replica.is_overwritten
        initial = self._replica.step_number if is_whole else None
        if self._chip in go.holders and optimizers.name is None:
            optimizers.name = self._initial_name = (go.generation, go.step)
        holdings = self._holdings(initial)
        holder = holdings[exchange.mesh.rank_of[go.holders[0]]]
        held = [each.of(holder) for each in holdings]
        self._initial_name = holder.name if holder.initial is not None else None
        self._check_complete(held, go)
        if (state := self._exchange_state(go, generation)) is not None:
            self._join(holder, state, keeps=bool(held[exchange.rank]))
        # Chips may be told of other boards: those of the first count.
        mirror_of = self._mirrors(generation, holdings[0].board)
        shares = UpdateShares(optimizers.flat.n_bytes, mirror_of)
        kept = [shares.kept(rank) for rank in range(shares.n_ranks)]
        moves = moves_to(kept, held)
        for span, data in sent_states(exchange, moves, optimizers.packed_span):
            optimizers.receive(span, data)
        if moves:
            self._replica.inject(Moment.REFILL)
        if moves or any(without(mine, keeps) for mine, keeps in zip(held, kept, strict=True)):
            self._await_all()  # some chip forgets something
        optimizers.keep(shares.owned(exchange.rank), shares.mirrored(exchange.rank))
        self._shares, self.has_lost_state = shares, False

    def _holdings(self, initial: int | None) -> list[_Holding]:
        """Tell all chips what this one holds; return what each holds, by rank."""
        mine = self._optimizers
        holding = _Holding(mine.name, mine.tried, mine.held, initial, self._board)
        return gather_values(self._exchange, holding, _Holding)

    def _check_complete(self, held: Sequence[Spans], go: Go) -> None:
        n_bytes = self._optimizers.flat.n_bytes
        missing = without([(0, n_bytes)], [span for spans in held for span in spans])
        if missing:
            self.has_lost_state = True
            n_missing = sum(high - low for low, high in missing)
            lost = StateLostError(
                f"the optimizer's state of {n_missing / n_bytes:.0%} of the parameters after step "
                f"{go.step} is lost: the chips that kept it and their mirrors are gone"
            )
            if self._exchange.rank == 0:
                _log.error("%s", lost)
            raise lost

    def _join(self, holder: _Holding, state: Any, *, keeps: bool) -> None:
        """Be where the holders are: nothing can fail between the parts of this."""
        optimizers = self._optimizers
        if optimizers.tried == holder.name:
            optimizers.step_late()
        elif not keeps:
            optimizers.drop()
        self._replica.take_state(state)
        if holder.initial == 0:
            optimizers.renew_masters()  # chips may begin with different weights
        optimizers.name = holder.name

    def _mirrors(self, generation: Generation, board: tuple[int, ...]) -> tuple[int, ...]:
        """Return the mirror of each rank; say so if fewer domains are kept apart than before.

        Ranks are numbers of chips in row-major order, as seats are.
        """
        hosts = {seat.chip: seat.address[0] for seat in generation.seats}
        names = counted_domains(self._domain_names, hosts)
        domains = domains_of(names, self._exchange.mesh.live, hosts, board)
        n_apart = kept_apart(domains)
        if self._n_apart is not None and n_apart < self._n_apart and self._exchange.rank == 0:
            _log.warning(
                "on %d live chips, mirrors and their owners cannot be kept on another %s each: "
                "one failure may take both",
                len(domains),
                " and another ".join(names[n_apart:]),
            )
        self._n_apart = n_apart
        return mirrors_of(domains)

    def _await_all(self) -> None:
        """Wait until every chip has received its states: only then may any chip forget others."""
        self._exchange.sum(np.zeros(8, dtype=np.uint8), 1, "int64")


def sent_states(
    exchange: Exchange, moves: Sequence[Move], packed: Callable[[Span], Any]
) -> Iterator[tuple[Span, Any]]:
    """Send the states of some spans, as `packed` returns them; yield what comes to this chip.

    All chips call this alike, and go through all that it yields.
    """
    rank = exchange.rank
    for batch in batches_of_moves(moves, _BATCH_BYTES):
        sent = {at: packed(move.span) for at, move in enumerate(batch) if move.source == rank}
        lengths = np.zeros(len(batch), dtype=np.int64)
        for at, data in sent.items():
            lengths[at] = len(data)
        exchange.sum(lengths.view(np.uint8), len(lengths), "int64")
        cuts = [0, *np.cumsum(lengths).tolist()]
        payload = np.empty(cuts[-1], dtype=np.uint8)
        for at, data in sent.items():
            payload[cuts[at] : cuts[at + 1]] = data
        exchange.send_parts(payload, cuts, [(each.source, each.target) for each in batch])
        for at, move in enumerate(batch):
            if move.target == rank:
                yield move.span, payload[cuts[at] : cuts[at + 1]]

"""A sharded optimizer that is no more than digests, for the real `ShardedUpdate` to move about.

The row of parameters is cut in cells. The optimizer's state of a cell is the digest of the training
state that it belongs to. So a worker that steps with a state of another history, or whose new
weights come from one, is found out at once.
"""

from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from meshmend.topology.mesh import Mesh
from meshmend.train.core.exchange import FinishedSum
from meshmend.train.core.learner import ExchangeState
from meshmend.train.core.worker_environment import WorkerEnvironment
from meshmend.train.sharding.sharded_update import ShardedUpdate
from meshmend.train.sharding.update_shares import ALIGN_BYTES, Span, Spans, UpdateShares
from simulation.peers import SimulatedPeers

N_CELLS: Final = 12
_N_BYTES: Final = N_CELLS * ALIGN_BYTES
_DIGEST_BYTES: Final = 8

Bytes = NDArray[np.uint8]
Check = Callable[[bool, str], None]


class SimulatedShards:
    """What `ShardedUpdate` needs of `ShardedOptimizers`, and of the learner that has them."""

    flat = SimpleNamespace(n_bytes=_N_BYTES)

    def __init__(self, check: Check) -> None:
        self._check = check
        self._new_weights: Bytes | None = None
        self._before = self._after = 0  # digests of the step in flight
        self.held: Spans = ()
        self._own: Span = (0, 0)
        self._cells: dict[int, int] = {}
        self.name: tuple[int, int] | None = None
        self.tried: tuple[int, int] | None = None
        self.adopt(0)

    @property
    def sharded(self) -> "SimulatedShards":
        """The optimizers of this learner."""
        return self

    def adopt(self, digest: int) -> None:
        """Hold the state of all cells, as a checkpoint has it."""
        self.drop()
        self._cells = dict.fromkeys(range(0, _N_BYTES, ALIGN_BYTES), digest)
        self.held, self._own, self.name = ((0, _N_BYTES),), (0, _N_BYTES), None

    def begin(self, before: int, after: int) -> None:
        """Begin a step, whose gradients are summed, from one digest to another."""
        self.tried, self._new_weights = None, None
        self._before, self._after = before, after

    def check_kept(self, digest: int) -> None:
        """Check that what this worker keeps belongs to its training state."""
        strange = [cell for cell, each in self._cells.items() if each != digest]
        self._check(not strange, f"the optimizer's state of {strange} is of another history")

    def missing(self, digest: int, others: Iterable["SimulatedShards"]) -> set[int]:
        """Return the cells of a state of which neither this worker nor another one has a copy."""
        cells = set(_cells_of((0, _N_BYTES)))
        for each in (self, *others):
            cells -= {cell for cell, held in each._cells.items() if held == digest}
        return cells

    def prepare_update(self) -> None:
        """Do nothing: a digest needs no gradients."""

    def squared_norms(self) -> None:
        """Return nothing: a digest has no norm."""

    def trial(self, name: tuple[int, int], shares: UpdateShares) -> Any:
        """Return a payload to gather: this worker's share of the new weights is in its place."""
        payload = np.zeros(shares.share_bytes * shares.n_ranks, dtype=np.uint8)
        for cell in _cells_of(self._own):
            _put(payload, cell, hash((self._cells[cell], self._after)))
        self.tried, self._new_weights = name, payload
        return SimpleNamespace(numpy=lambda: payload)

    def step(self) -> None:
        """Make the step count, with the new weights of all."""
        if self._new_weights is not None:
            found = {_get(self._new_weights, cell) for cell in _cells_of((0, _N_BYTES))}
            wanted = {hash((self._before, self._after))}
            self._check(found == wanted, "new weights are made from a state of another history")
        self.step_late()

    def step_late(self) -> None:
        """Update what this worker keeps by the step that was tried."""
        self._cells = dict.fromkeys(self._cells, self._after)
        self.name = self.tried or self.name
        self.tried, self._new_weights = None, None

    def packed_span(self, span: Span) -> Bytes:
        """Return the state of a span."""
        digests = [self._cells[cell] for cell in _cells_of(span)]
        return np.array(digests, dtype=np.int64).view(np.uint8)

    def receive(self, span: Span, data: Bytes) -> None:
        """Take the state of a span that another worker has sent."""
        self._cells.update(zip(_cells_of(span), data.view(np.int64).tolist(), strict=True))
        self.held = (*self.held, span)

    def drop(self) -> None:
        """Forget all states."""
        self.held, self._cells, self._own = (), {}, (0, 0)
        self.tried, self._new_weights = None, None

    def renew_masters(self) -> None:
        """Do nothing: a digest has no masters."""

    def keep(self, own: Span, mirrored: Iterable[Span]) -> None:
        """Keep the states of these spans and forget the others."""
        spans = tuple(span for span in (own, *mirrored) if span[0] < span[1])
        self._cells = {cell: self._cells[cell] for span in spans for cell in _cells_of(span)}
        self._own, self.held = own, spans


class SimulatedExchange:
    """What `ShardedUpdate` needs of an `Exchange`: every collective is a sum of parts."""

    def __init__(self, peers: SimulatedPeers, whole: Mesh) -> None:
        self._peers, self._whole = peers, whole

    @property
    def generation_number(self) -> int:
        """The generation that was entered last."""
        return self._peers.generation_number

    @property
    def rank(self) -> int:
        """The place of this worker among the members."""
        return self._peers.rank

    @property
    def mesh(self) -> Mesh:
        """The members of the generation."""
        return self._peers.generation.mesh_of(self._whole)

    def sum(self, payload: Bytes, n_elements: int, dtype: str) -> None:
        """Replace the payload by the sum of all."""
        parts = self._gathered(payload.tobytes())
        total = sum(np.frombuffer(part, dtype=dtype) for part in parts)
        payload[:] = np.asarray(total, dtype=dtype).view(np.uint8)

    def start_sum(self, payload: Bytes, n_elements: int, dtype: str) -> FinishedSum:
        """Replace the payload by the sum of all, now."""
        self.sum(payload, n_elements, dtype)
        return FinishedSum()

    def all_gather(self, payload: Bytes) -> None:
        """Fill the payload with the part of each rank."""
        share = len(payload) // self._peers.n_members
        mine = payload[self.rank * share : (self.rank + 1) * share].tobytes()
        payload[:] = np.frombuffer(b"".join(self._gathered(mine)), dtype=np.uint8)

    def send_parts(
        self, payload: Bytes, cuts: Sequence[int], ends: Sequence[tuple[int, int]]
    ) -> None:
        """Receive the parts for this rank."""
        found = self._gathered(payload.tobytes())
        for at, (source, target) in enumerate(ends):
            if target == self.rank:
                part = found[source][cuts[at] : cuts[at + 1]]
                payload[cuts[at] : cuts[at + 1]] = np.frombuffer(part, dtype=np.uint8)

    def _gathered(self, mine: bytes) -> list[bytes]:
        """Return what each rank puts in."""
        parts = [(self.rank, mine)]
        self._peers.sum(parts, 1, "uint8")
        return [data for _, data in parts]


def sharded_update(
    shards: SimulatedShards,
    replica: Any,
    peers: SimulatedPeers,
    exchange_state: ExchangeState,
    environment: WorkerEnvironment,
) -> ShardedUpdate:
    """Return the real protocol over simulated shards."""
    learner: Any = shards
    exchange: Any = SimulatedExchange(peers, environment.whole)
    return ShardedUpdate(learner, replica, exchange, exchange_state, environment)


def _cells_of(span: Span) -> range:
    return range(span[0], span[1], ALIGN_BYTES)


def _put(payload: Bytes, cell: int, digest: int) -> None:
    payload[cell : cell + _DIGEST_BYTES] = np.array([digest], dtype=np.int64).view(np.uint8)


def _get(payload: Bytes, cell: int) -> int:
    return int(payload[cell : cell + _DIGEST_BYTES].view(np.int64)[0])

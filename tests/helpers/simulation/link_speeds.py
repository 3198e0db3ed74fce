"""What a simulated chip knows about its links: it keeps it as `Exchange` and `JobCore` do.

Some links are slow at times, which is drawn from the seed. What kernels count is drawn from the
seed and the chip, so that a world that does not watch its links plays as it did before.
"""

from random import Random

from meshmend.topology.failures import Chip, Link
from meshmend.topology.mesh import Mesh
from meshmend.train.core.link_speeds import LinkSpeeds, Work
from simulation.event_loop import EventLoop
from simulation.peers import SimulatedPeers

_SLOW_PROBABILITY = 0.3
_SLOWEST = 0.25
_NOISE = 0.3
_READ_BYTES = 10**6  # between two readings of the counters
_CLOCK = 10**7  # microseconds in a second: steps of 0.05 s count as such of half a second


class SimulatedLinkSpeeds:
    """One chip's part in watching links; each generation begins with what the state says."""

    def __init__(self, peers: SimulatedPeers, whole: Mesh, chip: Chip, events: EventLoop) -> None:
        self._peers, self._whole, self._chip, self._events = peers, whole, chip, events
        self._random = Random(f"counted {events.seed} {chip}")
        self._counted: dict[Chip, Work] = {}
        self._generation = 0
        self._speeds: LinkSpeeds | None = None

    def is_due(self) -> bool:
        """Count a step; return whether chips look at their links before it."""
        if self._generation != self._peers.generation_number:
            self._generation, self._speeds = self._peers.generation_number, None
        if self._peers.n_members <= 2:
            return False
        return self._speeds is None or self._speeds.is_due()

    def found(self, known: str) -> str:
        """Return what the state of a step that counts says of links."""
        return known if self._speeds is None else " ".join(map(str, self._speeds.found))

    def look(self, known: str) -> None:
        """Tell the others what the kernel has counted, and conclude what all conclude."""
        if self._speeds is None:
            self._speeds = LinkSpeeds(self._peers.generation.mesh_of(self._whole), known)
            return
        speeds = self._speeds
        changed = speeds.conclude(self._peers.gather_numbers(self._work(speeds)))
        while speeds.probe_bytes:
            self._work(speeds)
            changed = speeds.conclude(self._peers.gather_numbers(self._work(speeds)))
        for each in changed:
            self._events.tell(f"worker {self._chip}", "finds %s", each)

    def _work(self, speeds: LinkSpeeds) -> list[int]:
        mesh = speeds.mesh
        ranks = mesh.neighbor_ranks[mesh.rank_of[self._chip]].tolist()
        work = [self._read(mesh.live[rank]) if rank >= 0 else (0, 0) for rank in ranks]
        return speeds.mine(work, round(self._events.now * _CLOCK))

    def _read(self, other: Chip) -> Work:
        n_bytes, busy_us = self._counted.get(other, (0, 0))
        slower = (1 + _NOISE * self._random.random()) / self._speed(Link.between(self._chip, other))
        self._counted[other] = n_bytes + _READ_BYTES, busy_us + round(_READ_BYTES * slower)
        return self._counted[other]

    def _speed(self, link: Link) -> float:
        """Return how fast a link is now; some become slow and fast again all the time."""
        random = Random(f"speed {self._events.seed} {link}")
        has_faults, for_s = random.random() < _SLOW_PROBABILITY, random.uniform(0.2, 0.5)
        is_slow = has_faults and int(self._events.now / for_s) % 2 > 0
        return _SLOWEST if is_slow else 1.0

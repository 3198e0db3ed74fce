"""The connections among the workers of a generation: what `exchange` and `sockets` do.

A sum goes up a tree of the generation's mesh and down again, so some workers finish it before
others, and some never. The root changes from sum to sum, and with the plan. A frame names its
generation, its number in it and its plan: one of an older generation is dropped, one of a newer
waits, and one of another plan is an error. Connections have epochs,
as real ones do, and are kept from one generation to the next.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from meshmend.errors import PeerLostError, StoppedError
from meshmend.membership.generation import Generation
from meshmend.planning.plan_request import SumSizes
from meshmend.topology.failures import Chip, Link
from meshmend.topology.mesh import Mesh
from meshmend.train.core.plan_agreement import PlanAgreement
from meshmend.transport.listener import Address
from simulation.network import End, Network
from simulation.plans import SimulatedPlans
from simulation.worker_process import WorkerProcess

Call = tuple[int, int]  # generation, number in it
Frame = tuple[Call, str, Any]

_CONNECT_S = 1.5


class SimulatedPeers:
    """One worker's connections."""

    def __init__(
        self,
        process: WorkerProcess,
        network: Network,
        whole: Mesh,
        port: int,
        *,
        swaps_plans: bool = False,
    ) -> None:
        self._process = process
        self._network = network
        self._whole = whole
        self._chip = process.chip
        self._port = port
        self._seats = {chip: seat for seat, chip in enumerate(whole.live)}
        self._generation = Generation(0, ())
        self._sequence = 0
        self._is_stopped = False
        self._links: dict[Chip, tuple[int, End]] = {}
        self._arrived: dict[Chip, tuple[int, End]] = {}
        self._chosen_in: dict[Chip, int] = {}  # the last generation with a connection
        self._swaps_plans = swaps_plans
        self._plans: SimulatedPlans | None = None
        self._agreement: PlanAgreement | None = None
        network.listen(process, port, self._admit)

    @property
    def address(self) -> Address:
        """Where this worker listens."""
        return f"host-{self._process.host}", self._port

    @property
    def generation(self) -> Generation:
        """The generation that was entered last."""
        return self._generation

    @property
    def generation_number(self) -> int:
        """The generation that was entered last."""
        return self._generation.number

    @property
    def rank(self) -> int:
        """The place of this worker among the members."""
        return self._generation.chips.index(self._chip)

    @property
    def n_members(self) -> int:
        """How many workers form the generation."""
        return len(self._generation.seats)

    def interrupt(self) -> None:
        """Stop waiting now."""
        self._is_stopped = True
        self._process.wake()

    def sever(self, chip: Chip) -> None:
        """Break the connection to a chip."""
        if chip in self._links:
            self._links[chip][1].close()
            self._links[chip][1].lose()

    def chip_of(self, seat: int) -> Chip:
        """Return the chip of a seat."""
        return self._whole.live[seat]

    def enter(self, generation: Generation) -> None:
        """Begin a generation."""
        assert generation.number > self._generation.number, "a generation after a later one"
        self._generation, self._sequence, self._is_stopped = generation, 0, False
        self._plans = self._agreement = None
        for chip, (_, end) in list(self._links.items()):
            if end.is_lost or chip not in generation.seat_of:
                self._drop(chip)

    def plan(self, sums: SumSizes) -> None:
        """Take the time that planning takes."""
        self._process.sleep(0.005 * self._process.events.random.random())
        if self._swaps_plans:
            events = self._process.events
            name = f"{events.seed} {self._chip} {self._generation.number}"
            self._plans = SimulatedPlans(name, lambda: events.now)
            self._agreement = PlanAgreement(self, self._plans)

    def plan_ahead(self, sums: SumSizes) -> None:
        """Plan nothing."""

    def prepare(self) -> None:
        """Connect to all neighbours, those with higher numbers first."""
        neighbors = _neighbors(self._whole, self._generation.chips, self._generation.cut)
        wanted = {chip: self._generation.epoch(self._chip, chip) for chip in neighbors[self._chip]}
        for chip, epoch in wanted.items():
            is_called = self._arrived.get(chip, (-1, None))[0] == epoch
            if chip in self._links and (self._links[chip][0] != epoch or is_called):
                self._drop(chip)
            elif chip in self._links:
                self._chosen_in[chip] = self._generation.number
        until = self._process.events.now + _CONNECT_S
        for chip in sorted(set(wanted) - set(self._links), reverse=True):
            end = self._connection(chip, wanted[chip], until)
            end.on_ready = self._process.wake
            self._links[chip] = wanted[chip], end
        if self._agreement is not None:
            self._agreement.begin()

    @property
    def is_provisional(self) -> bool:
        """Whether the plan in use may be replaced."""
        return self._agreement is not None and self._agreement.is_provisional

    def swap_plans(self) -> None:
        """Take a better plan if there is one."""
        assert self._agreement is not None
        if self._agreement.swap():
            self._process.events.tell(self._process.name, "swaps its plan")

    @property
    def members(self) -> Sequence[Chip]:
        """The chips of the generation."""
        return self._generation.chips

    def gather_numbers(self, mine: Sequence[int]) -> list[list[int]]:
        """Return the numbers of all workers, by rank."""
        payload = [(self.rank, *mine)]
        self._sum(payload, plan=0)
        return [list(numbers) for _, *numbers in payload]

    def sum(self, payload: list[Any], n_elements: int, dtype: str) -> None:
        """Leave all workers' contributions in the payload of each."""
        self._sum(payload, plan=self._plans.plan if self._plans else 0)

    def _sum(self, payload: list[Any], *, plan: int) -> None:
        self._sequence += 1
        if self.n_members == 1:
            self._check_stopped()
            return
        chips = self._generation.chips
        root = chips[(self._sequence + plan) % len(chips)]
        parent, children = self._place((root,))
        up, down = f"up {plan}", f"down {plan}"
        inward = [self._await(chip, up, [parent, *children]) for chip in children]
        gathered = sorted([*payload, *(part for parts in inward for part in parts)])
        if parent is not None:
            self._send(parent, up, gathered)
            gathered = self._await(parent, down, [parent, *children])
        for chip in children:
            self._send(chip, down, gathered)
        payload[:] = gathered

    def spread(self, payload: Any, holders: Sequence[Chip]) -> Any:
        """Return the payload that the holders have."""
        self._sequence += 1
        parent, children = self._place(tuple(holders))
        if self._chip not in holders:
            assert parent is not None
            payload = self._await(parent, "state", [parent, *children])
        for chip in children:
            self._send(chip, "state", payload)
        return payload

    def close(self) -> None:
        """Give up all connections."""
        for chip in list(self._links):
            self._drop(chip)

    def _place(self, roots: tuple[Chip, ...]) -> tuple[Chip | None, list[Chip]]:
        parents, children_of = _tree(
            self._whole, self._generation.chips, self._generation.cut, roots
        )
        return parents[self._chip], children_of[self._chip]

    def _check_stopped(self) -> None:
        if self._is_stopped:
            self._is_stopped = False
            raise StoppedError(f"chip {self._chip} was told to stop")

    def _send(self, chip: Chip, kind: str, content: Any) -> None:
        frame: Frame = (self._generation.number, self._sequence), kind, content
        if chip in self._links:
            self._links[chip][1].send(frame)

    def _await(self, chip: Chip, kind: str, needed: Sequence[Chip | None]) -> Any:
        """Return what a neighbour sends in this call, unless any that is needed is lost before."""
        call = self._generation.number, self._sequence
        while True:
            self._check_stopped()
            frame = self._next_frame(chip, call)
            if frame is not None:
                assert frame[1] == kind, f"{chip} is in {frame}, {self._chip} awaits {kind}"
                return frame[2]
            for peer in needed:
                if peer is not None and self._is_lost(peer):
                    raise PeerLostError(f"chip {peer} hung up", self._seats[peer])
            self._process.block()

    def _next_frame(self, chip: Chip, call: Call) -> Frame | None:
        """Return the frame of a call, if it has come; older ones are dropped, newer ones stay."""
        if chip not in self._links:
            return None
        inbox = self._links[chip][1].inbox
        while inbox and inbox[0][0] < call:
            inbox.popleft()
        if inbox and inbox[0][0] == call:
            frame: Frame = inbox.popleft()
            return frame
        assert not inbox or inbox[0][0][0] > call[0], f"{inbox[0]} came before {call}"
        return None

    def _is_lost(self, chip: Chip) -> bool:
        return chip not in self._links or self._links[chip][1].is_lost

    def _connection(self, chip: Chip, epoch: int, until: float) -> End:
        """Return a new connection to a chip: the one with the lower seat calls."""
        if self._seats[chip] < self._seats[self._chip]:
            return self._caller(chip, epoch, until)
        results: list[End | None] = []
        has_given_up = [False]

        def answered(end: End | None) -> None:
            if has_given_up[0] and end is not None:
                end.close()
                return
            results.append(end)
            self._process.wake()

        host, port = self._generation.seat_of[chip].address
        self._network.dial(
            self._process,
            (int(host.removeprefix("host-")), port),
            (self._chip, epoch, self._generation.number),
            on_ready=self._process.wake,
            on_result=answered,
        )
        try:
            while not results:
                self._check_stopped()
                self._process.block()
        except StoppedError:
            has_given_up[0] = True
            raise
        if results[0] is None:
            raise PeerLostError(f"cannot reach chip {chip}", self._seats[chip])
        return results[0]

    def _caller(self, chip: Chip, epoch: int, until: float) -> End:
        while self._arrived.get(chip, (-1, None))[0] != epoch:
            self._check_stopped()
            if self._process.events.now >= until:
                raise PeerLostError(f"chip {chip} did not connect in time", self._seats[chip])
            self._process.block(until)
        self._chosen_in[chip] = self._generation.number
        return self._arrived.pop(chip)[1]

    def _admit(self, end: End, request: tuple[Chip, int, int]) -> None:
        chip, epoch, generation = request
        before, old = self._arrived.get(chip, (-1, None))
        if epoch < before or generation <= self._chosen_in.get(chip, -1):
            end.close()  # the caller finds out when it needs this connection
            return
        if old is not None:
            old.close()
        self._arrived[chip] = epoch, end
        self._process.wake()

    def _drop(self, chip: Chip) -> None:
        self._links.pop(chip)[1].close()


@lru_cache(maxsize=1000)
def _neighbors(
    whole: Mesh, chips: tuple[Chip, ...], cut: frozenset[Link]
) -> dict[Chip, tuple[Chip, ...]]:
    members = set(chips)
    return {
        chip: tuple(
            other
            for other in whole.neighbors(chip)
            if other in members and Link.between(chip, other) not in cut
        )
        for chip in chips
    }


@lru_cache(maxsize=1000)
def _tree(
    whole: Mesh, chips: tuple[Chip, ...], cut: frozenset[Link], roots: tuple[Chip, ...]
) -> tuple[dict[Chip, Chip | None], dict[Chip, list[Chip]]]:
    """Return each chip's parent and children in trees from some roots: breadth first."""
    neighbors = _neighbors(whole, chips, cut)
    parents: dict[Chip, Chip | None] = dict.fromkeys(roots)
    children: dict[Chip, list[Chip]] = {chip: [] for chip in chips}
    reached = list(roots)
    for chip in reached:
        for other in neighbors[chip]:
            if other not in parents:
                parents[other] = chip
                children[chip].append(other)
                reached.append(other)
    assert set(parents) == set(chips), "a generation that is not connected"
    return parents, children

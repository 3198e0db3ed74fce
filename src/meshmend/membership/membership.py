"""Who trains together: turns arrivals, departures and complaints into generations.

No sockets and no clock: times are given, decisions are returned. The coordinator asks `decide`
after everything it has told, and whenever `settled_at` says.

What a worker holds is known by its **state version**, the last generation in which it was up to
date, and its step. In one generation all members step together and end each step with the same
bits, so state version and step together name one state. `history` knows which of them counts. No
generation begins without a worker that holds it. If none is left, the others wait for one, then go
on from a checkpoint, or the job has failed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from meshmend.membership.decision import Decision
from meshmend.membership.generation import Generation, Seat
from meshmend.membership.history import CoordinatorRecord, History, restorable
from meshmend.membership.messages import FRESH, Go, Status
from meshmend.membership.timing import Timing
from meshmend.membership.unrest import Unrest
from meshmend.net.listener import Address
from meshmend.topology.failures import Chip, Link
from meshmend.topology.graph import components
from meshmend.topology.mesh import Mesh

UNHEARD = 10  # generations that a lost coordinator may have made and no live worker has heard of


@dataclass
class _Worker:
    """A worker that is connected; `since` is 0 while it is no member."""

    chip: Chip
    address: Address
    status: Status
    since: int = 0


class Membership:
    """The workers of one job, and the generations that they form.

    `mesh` is what to begin with; a chip that has failed there joins when its worker comes.
    `history` is what a coordinator before this one knew.
    """

    def __init__(
        self,
        mesh: Mesh,
        timing: Timing,
        *,
        board: tuple[int, ...],
        history: History | None = None,
    ) -> None:
        self._mesh = replace(mesh, failed=frozenset(), failed_links=frozenset())
        self._timing = timing
        self._board = board
        self._workers: dict[Chip, _Worker] = {}
        self._cut: set[Link] = set(mesh.failed_links)
        self._mended: dict[Link, int] = {}
        self._unrest = Unrest(timing.settle_s, timing.doubt_s)
        self._gathers_until: float | None = None
        self._first = frozenset(mesh.live)
        self._awaited: set[Chip] = set(mesh.live)
        self._recalls = False
        self._unheard = 0
        self._holder_until: float | None = None  # set while no holder is left
        self._restores = False
        self.history = history or History(CoordinatorRecord(""))
        self.generation: Generation | None = None
        self.go: Go | None = None
        self.is_over = False

    def arrive(
        self,
        chip: Chip,
        address: Address,
        *,
        status: Status,
        memory: Generation | None,
        now: float,
    ) -> str | None:
        """Take a worker in; return why it must come back as new, if it must.

        `memory` is the generation that it last heard of, from which a coordinator that was started
        again learns what its predecessor knew.
        """
        if memory is not None and (self.generation is None or self._recalls):
            self._recall(memory, now)
        self.history.hear((chip, address), status)
        if self.history.is_stale(status):
            return "the others went on without it"
        if self.generation is None and self._gathers_until is None:
            self._gathers_until = now + self._timing.gather_s
        self._workers[chip] = _Worker(chip, address, status)
        self.hear(chip, now)
        self._unrest.stir(f"chip {chip} is ready", now)
        return None

    def forgo(self, chip: Chip) -> None:
        """Begin without a chip whose worker has died before it came."""
        self._awaited.discard(chip)

    def leave(self, chip: Chip, why: str, now: float) -> None:
        """Take a worker out."""
        if self._workers.pop(chip, None) is not None:
            self._unrest.stir(why, now)

    def hear(self, chip: Chip, now: float) -> None:
        """Take up that a worker has said something, whatever it was."""
        self._unrest.heard[chip] = now

    def tell(self, chip: Chip, status: Status, now: float) -> None:
        """Take up what a worker says of itself."""
        self.hear(chip, now)
        worker = self._workers[chip]
        worker.status = status
        self.history.hear((chip, worker.address), status)
        if self.generation is None or status.generation != self.generation.number:
            return
        if self.go and self.go.restores and chip in self.go.holders and not status.ready:
            self.go = None
            self._unrest.stir(f"chip {chip} cannot read the checkpoint", now)
        for peer in status.lost:
            self._unrest.doubt(Link.between(chip, peer), now)

    def mend(self, link: Link, now: float) -> None:
        """Take back a link that was cut."""
        if link in self._cut:
            self._cut.discard(link)
            number = self.generation.number + 1 if self.generation else 1
            self._mended[link] = number
            self._unrest.stir(f"{link} is back", now)

    def cut(self, link: Link, now: float) -> None:
        """Take out a link; chips that none joins get a new connection instead."""
        if self._mesh.has_link(link) and link not in self._cut:
            self._cut.add(link)
            self._unrest.stir(f"{link} is cut", now)
            return
        for chip in (link.first, link.second):
            if self._is_member(chip) and self.generation is not None:
                self._workers[chip].since = self.generation.number + 1
        self._unrest.stir(f"{link.first} and {link.second} lost each other", now)

    def settled_at(self) -> float | None:
        """Return when to ask `decide` again even if nothing happens."""
        times = [doubt.look_at for doubt in self._unrest.doubts.values()]
        if self._holder_until is not None and not self._restores:
            times.append(self._holder_until)
        if self._gathers_until is not None:
            times.append(self._gathers_until)
        elif self._unrest.reasons:
            times.append(self._unrest.calm_at())
        return min(times, default=None)

    def decide(self, now: float) -> Decision:
        """Return what has to be said to the workers, if anything."""
        if self.is_over:
            return Decision()
        for link in self._unrest.cut_links(self._workers, now):
            self.cut(link, now)
        if self._is_gathering(now):
            return Decision()
        if self._unrest.reasons and now >= self._unrest.calm_at():
            why = self._unrest.settle()
            if (generation := self._formed()) is not None:
                return Decision(generation=generation, why=why)
        if (found := self._look_for_holder(now)) is not None:
            return found
        was_restoring, lost_step = self._restores, self.history.step
        if (go := self._begun()) is not None:
            return Decision(go=go, lost_step=lost_step if was_restoring else None)
        return Decision(is_over=self._ended())

    @property
    def knows_all(self) -> bool:
        """Whether no worker can know of a generation that this coordinator has not heard of."""
        return self.generation is not None and not self._recalls

    def _look_for_holder(self, now: float) -> Decision | None:
        """Return what has to be said because no worker holds the state that counts."""
        if self._is_witnessed(self._workers) or not self._workers:
            if self._holder_until is not None:
                self._holder_until, self._restores = None, False
                self._unrest.stir("a chip that holds the state is back", now)
            return None
        if self._holder_until is None:
            self._holder_until = now + self._timing.holder_timeout_s
            return Decision(lost_step=self.history.step)
        if now < self._holder_until or self._restores:
            return None
        if all(restorable(worker.status) is None for worker in self._workers.values()):
            return Decision(failed=self._why_failed())
        self._restores = True
        self._unrest.stir("nobody is left who holds the state; going on from a checkpoint", now)
        return None

    def _why_failed(self) -> str:
        return (
            f"no chip that is left holds the state after step {self.history.step}, none came back "
            f"within {self._timing.holder_timeout_s:g} s, and there is no whole checkpoint"
        )

    def waiting(self) -> tuple[Chip, ...]:
        """Return the chips whose workers are there but are no members."""
        members = set(self.generation.chips) if self.generation else set()
        return tuple(sorted(set(self._workers) - members))

    def reason_to_wait(self, chip: Chip) -> str:
        """Return why a worker that is there is no member."""
        if self.generation is None or self._gathers_until is not None:
            return "the others are not there yet"
        if self._holder_until is not None:
            return (
                f"no chip that is here holds the state after step {self.history.step}; waiting "
                f"{self._timing.holder_timeout_s:g} s for one"
            )
        if chip in self._largest(self._able()):
            return "the next generation is being made"
        if missing := sorted(self._board_of(chip) - set(self._workers)):
            verb = "is" if len(missing) == 1 else "are"
            return f"its board joins whole, and {', '.join(map(str, missing))} {verb} missing"
        return "it is cut off from the largest live part of the mesh"

    def _recall(self, memory: Generation, now: float) -> None:
        """Take up the generation that a worker remembers, if it is the latest heard of."""
        if self.generation is None:
            self._gathers_until = now + self._timing.recall_s
        elif memory.number <= self.generation.number:
            return
        self._recalls = True
        self.generation = memory
        self._awaited = set(memory.chips)
        self._cut = set(memory.cut)
        self._mended = dict(memory.mended)

    def _is_gathering(self, now: float) -> bool:
        """Whether workers that are expected may still come."""
        if self._gathers_until is None:
            return False
        if now < self._gathers_until and not self._awaited <= set(self._workers):
            return True
        self._gathers_until = None
        if self._recalls:
            self._resume()
        return False

    def _resume(self) -> None:
        """Go on with the generation that was recalled, if nothing has changed since."""
        assert self.generation is not None
        self._recalls = False
        self._unheard = UNHEARD
        number = self.generation.number
        for seat in self.generation.seats:
            worker = self._workers.get(seat.chip)
            if worker and worker.status.state_version != FRESH:  # not one that came in its place
                worker.since = seat.since
        members = [self._workers.get(chip) for chip in self.generation.chips]
        self._unrest.reasons.clear()
        if all(
            each and each.status.ready and each.status.state_version == number for each in members
        ):
            self.go = Go(number, 0, self.generation.chips)
        # Who waited for the word of the one before, or was no member, is seen to now.
        self._unrest.reasons.append("the coordinator was started again")

    def _board_of(self, chip: Chip) -> set[Chip]:
        """Return the chips that must be there before this one joins.

        All of its board; if it was there from the start, all that were.
        """

        def number(of: Chip) -> Chip:
            return tuple(at // size for at, size in zip(of, self._board, strict=True))

        known = self._first if chip in self._first else self._mesh.live
        return {other for other in known if number(other) == number(chip)}

    def _formed(self) -> Generation | None:
        """Return the next generation, or None if it would be the same as this one."""
        chips = self._largest(self._able()) if self._workers else frozenset()
        if not chips:
            return None
        number = 1 + max(worker.status.generation for worker in self._workers.values())
        number = max(number, self.generation.number + 1 if self.generation else 1) + self._unheard
        number = max(number, self.history.record.highest + 1)
        seats = []
        for chip in sorted(self._workers):
            worker = self._workers[chip]
            worker.since = (worker.since or number) if chip in chips else 0
            if worker.since:
                seats.append(Seat(chip, worker.address, worker.since))
        formed = Generation(number, tuple(seats), frozenset(self._cut), tuple(self._mended.items()))
        before = self.generation
        if before and self.go and formed == replace(before, number=number):
            return None
        self._unrest.doubts.clear()
        self._unheard = 0
        self.history.made(number)
        self.generation, self.go = formed, None
        return formed

    def _able(self) -> set[Chip]:
        """Return the chips that may train: members, whole boards, and who alone can go on."""
        there = set(self._workers)
        able = {
            chip
            for chip, worker in self._workers.items()
            if worker.since or self._board_of(chip) <= there
        }
        if not self._can_go_on(able):
            able |= {chip for chip in there if self._can_go_on([chip])}
        return able or there

    def _largest(self, able: Iterable[Chip]) -> frozenset[Chip]:
        """Return the largest connected part that holds the state that counts; none if none does."""
        dead = frozenset(self._mesh.live) - set(able)
        mesh = replace(
            self._mesh,
            failed=self._mesh.failed | dead,
            failed_links=self._mesh.failed_links | self._cut,
        )
        parts: tuple[tuple[Chip, ...], ...] = components(mesh)
        with_state = [part for part in parts if self._can_go_on(part)]
        largest: tuple[Chip, ...] = max(with_state, key=len, default=())
        return frozenset(largest)

    def _can_go_on(self, part: Iterable[Chip]) -> bool:
        """Whether one of some chips has the state to go on from, or may tell who has."""
        if not self._restores:
            return self._is_witnessed(part)
        states = {chip: restorable(worker.status) for chip, worker in self._workers.items()}
        best = max((state for state in states.values() if state is not None), default=None)
        return best is not None and any(states[chip] == best for chip in part)

    def _is_witnessed(self, part: Iterable[Chip]) -> bool:
        workers = [self._workers[chip] for chip in part]
        return self.history.has_witness(
            ((worker.chip, worker.address), worker.status) for worker in workers
        )

    def _is_member(self, chip: Chip) -> bool:
        """Whether a worker has been a member since the last generation was made."""
        return chip in self._workers and self._workers[chip].since > 0

    def _state_of(self, chip: Chip) -> tuple[int, int]:
        status = self._workers[chip].status
        return status.state_version, status.step

    def _begun(self) -> Go | None:
        """Return the word to begin once every member is ready."""
        if self.generation is None or self.go is not None:
            return None
        number = self.generation.number
        for chip in self.generation.chips:
            worker = self._workers.get(chip)
            if not worker or not worker.status.ready or worker.status.generation != number:
                return None
        if self._restores:
            return self._restored(self.generation)
        best = max(self._state_of(chip) for chip in self.generation.chips)
        holders = tuple(chip for chip in self.generation.chips if self._state_of(chip) == best)
        if not self.history.is_holder(self._workers[holders[0]].status):
            return None
        # Workers that have just been made may differ: one of them gives its state to the others.
        self.go = Go(number, best[1], holders if best[0] != FRESH else holders[:1])
        self.history.begin(self.generation, version=best[0], step=best[1])
        return self.go

    def _restored(self, generation: Generation) -> Go | None:
        """Return the word to begin from the newest state that a member can still get at."""
        found = {chip: restorable(self._workers[chip].status) for chip in generation.chips}
        best = max((state for state in found.values() if state is not None), default=None)
        if best is None:
            return None
        step, version = best
        holders = tuple(chip for chip in generation.chips if found[chip] == best)
        restores, lost = version == FRESH, self.history.step
        self.go = Go(generation.number, step, holders[:1] if restores else holders, restores, lost)
        self.history.begin(generation, version=version, step=step)
        self._holder_until, self._restores = None, False
        return self.go

    def _ended(self) -> bool:
        """Whether every member has finished, told once."""
        if self.generation is None or self.go is None or self.is_over:
            return False
        workers = [self._workers.get(chip) for chip in self.generation.chips]
        self.is_over = all(worker and worker.status.finished for worker in workers)
        return self.is_over

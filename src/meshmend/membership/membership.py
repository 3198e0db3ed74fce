"""Decides who trains together: turns arrivals, departures and complaints into generations.

No sockets and no clock: the caller passes in times and gets decisions back. The coordinator calls
`decide` after every change that it passes in, and at the time that `settled_at` returns.

A worker's state is named by its **state version**, the last generation in which it was up to date,
and its step. In one generation all members step together and end each step with the same bits, so
state version and step name one state. `history` knows which state counts. No generation begins
without a worker that holds that state. If none is left, the others wait for one, then go on from a
checkpoint; without a checkpoint the job fails. It also fails if no worker is left for long.

In a job with tiles (`topology/tiles.py`) a worker holds the part of the state that has its chip's
colour, which its position gives. Then all colours of one state need a holder each, and only chips
in whole tiles are members. The others wait: a tile's sums need all of its chips.
"""

import math
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Final

from msgspec import structs

from meshmend.config import Timing
from meshmend.errors import TopologyError
from meshmend.membership.generation import Generation, GenerationName, Seat
from meshmend.membership.history import CoordinatorRecord, History, Process
from meshmend.membership.messages import FRESH, Go, Hello, Status
from meshmend.topology.failures import Chip, Link, format_shape
from meshmend.topology.graph import components
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_tile
from meshmend.topology.tiles import Tile, box_colour, box_tiling, upright_boxes
from meshmend.transport.listener import Address

# How many generations a lost coordinator may have made that no live worker knows of.
UNHEARD_GENERATIONS = 10
_LONGEST_RECALL = 10  # times `recall_s`, while workers of the recalled generation keep coming

_LONGEST_SETTLE: Final = 10  # times `settle_s`, if changes keep coming
# From when links that are cut leave live chips out until they are tried again; then twice as long.
_FIRST_RETRY_S: Final = 60.0
_LONGEST_RETRY_S: Final = 3600.0  # a try that fails stops the others for about the link timeout
_MOST_TILINGS: Final = 200  # tried if that with the most tiles has not all colours of the state
WRONG_NUMBERS: Final = "a chip had computed wrong numbers"  # why a job goes back
_MOST_REASONS: Final = 4  # named in the text; the others are counted


@dataclass
class ConnectedWorker:
    """A connected worker; `since` is 0 while it is not a member.

    `recalls`: it came with the latest generation that it received. Another one may have been told
    to wait, and then does not go on with a generation that was formed before it came.
    """

    chip: Chip
    address: Address
    status: Status
    connected_at: float
    since: int = 0
    recalls: bool = False


@dataclass(frozen=True)
class Decision:
    """A new generation and why, a go message, the end of the job, or a failure; empty if nothing.

    `stands_still`: no chips can form a generation, and those of the present one are to wait.
    `lost_step` is the last step whose state no worker holds any more. It is set when the
    job begins to wait for that state, and together with the `go` that restores an earlier one.
    """

    generation: Generation | None = None
    why: str = ""
    go: Go | None = None
    is_over: bool = False
    failed: str = ""
    lost_step: int | None = None
    stands_still: bool = False


class Membership:
    """The workers of one job, and the generations that they form.

    `mesh` is the mesh to begin with; a chip that has failed there joins when its worker connects.
    `history` is what the previous coordinator saved.
    """

    def __init__(
        self, mesh: Mesh, timing: Timing, *, board: tuple[int, ...], history: History | None = None
    ) -> None:
        self._mesh = replace(mesh, failed=frozenset(), failed_links=frozenset())
        self._timing = timing
        self._board = board
        self.workers: dict[Chip, ConnectedWorker] = {}
        self._broken_at_start = mesh.failed_links
        self._cut: set[Link] = set(mesh.failed_links)
        self._retry_s = _FIRST_RETRY_S
        self._retry_at: float | None = None  # set while links that are cut leave live chips out
        self._retried_at = -math.inf
        self._mended: dict[Link, int] = {}
        self._changes = PendingChanges(timing.settle_s, timing.doubt_s)
        self._gather_until: float | None = None
        self._recall_limit = 0.0
        self._initial_chips = frozenset(mesh.live)
        self._awaited: set[Chip] = set(mesh.live)
        self._absent: set[Chip] = set()  # chips whose workers are known to be dead
        self._is_recalling = False
        self._n_skipped = 0  # numbers that the next generation leaves out
        self._alone_since: float | None = None  # set when the last worker leaves
        self._holder_deadline: float | None = None  # set while no holder is left
        self._is_restoring = False
        self._right_until: int | None = None  # set while the state that counts may be wrong
        self._stands_still = False  # with tiles: no whole tiles hold all of the state
        self.history = history or History(CoordinatorRecord(""))
        self.generation: Generation | None = None
        self.go: Go | None = None
        self._looked_at = 0  # the index of a member that was not ready
        self.is_over = False

    def arrive(
        self,
        chip: Chip,
        address: Address,
        *,
        status: Status,
        memory: Generation | None,
        now: float,
    ) -> None:
        """Add a worker.

        `memory` is the latest generation that it received. From it a restarted coordinator learns
        what the previous one knew.
        """
        if memory is not None and (self.generation is None or self._is_recalling):
            self._recall(memory, now)
            if chip in self._awaited:  # others of its generation are still on their way
                self._gather_until = min(now + self._timing.recall_s, self._recall_limit)
        self.history.update((chip, address), status)
        if self.generation is None and self._gather_until is None:
            self._gather_until = now + self._timing.gather_s
        self.workers[chip] = ConnectedWorker(chip, address, status, now, recalls=memory is not None)
        if self._is_replaced(chip):
            self._changes.forget_doubts(chip)
        self._absent.discard(chip)
        self._alone_since = None
        self.note_contact(chip, now)
        self._changes.add(f"chip {chip} is ready", now)

    def stop_awaiting(self, chip: Chip) -> None:
        """Begin without a chip whose worker is known to be dead."""
        self._absent.add(chip)

    def leave(self, chip: Chip, why: str, now: float) -> None:
        """Remove a worker."""
        if self.workers.pop(chip, None):
            self._changes.add(why, now)
            if not self.workers:
                self._alone_since = now

    def note_contact(self, chip: Chip, now: float) -> None:
        """Record that a worker has sent a message, of whatever kind."""
        self._changes.heard[chip] = now

    def update_status(self, chip: Chip, status: Status, now: float) -> None:
        """Record the new status of a worker, and its complaints about links."""
        self.note_contact(chip, now)
        worker = self.workers[chip]
        worker.status = status
        self.history.update((chip, worker.address), status)
        if self.generation is None or status.generation != self.generation.number:
            return
        if self.go and chip in self.go.holders and not status.ready:
            if self.go.restores:
                self.go = None
                self._changes.add(f"chip {chip} cannot read the checkpoint", now)
            elif status.state_version == FRESH:  # a chip that waits may have it
                self._changes.add(f"chip {chip} lacks a part of the state", now)
        for peer in status.lost:
            if not self._is_replaced(peer):
                self._changes.doubt_link(Link.between(chip, peer), now)

    def _is_replaced(self, chip: Chip) -> bool:
        """Whether a member died, and a new worker of its chip has come: its links are sound."""
        worker = self.workers.get(chip)
        seat = self.generation.seat_of.get(chip) if self.generation is not None else None
        return worker is not None and seat is not None and worker.address != seat.address

    def go_back(self, right_until: int) -> None:
        """Begin the next generation with the newest checkpoint of at most a step, if there is one.

        The state that workers hold may have wrong numbers in it.
        """
        self._right_until = right_until
        self._is_restoring = self._restorable(self.workers) is not None
        if not self._is_restoring:
            self._right_until = None

    def cut_on_purpose(self, link: Link) -> None:
        """Do not try a link again, once it is cut, before it is mended: the user has cut it."""
        self._note_on_purpose(self._cut_on_purpose | {link})

    def to_sever(self, chip: Chip) -> tuple[Chip, ...]:
        """Return to whom a chip has a link that the user has cut and that is in use still.

        The coordinator that was told may have died before it could tell the chip.
        """
        used = ((link.first, link.second) for link in self._cut_on_purpose - self._cut)
        return tuple(one if chip == other else other for one, other in used if chip in (one, other))

    def mend(self, link: Link, now: float) -> None:
        """Use a link again that was cut."""
        self._note_on_purpose(self._cut_on_purpose - {link})
        if link in self._cut:
            self._use_again(link)
            self._changes.add(f"{link} is back", now)

    @property
    def _cut_on_purpose(self) -> frozenset[Link]:
        return frozenset(self.history.record.cut_on_purpose)

    def _note_on_purpose(self, links: frozenset[Link]) -> None:
        links_in_order = tuple(sorted(links))
        self.history.record = structs.replace(self.history.record, cut_on_purpose=links_in_order)

    def _use_again(self, link: Link) -> None:
        self._cut.discard(link)
        self._mended[link] = self.generation.number + 1 if self.generation else 1

    def cut(self, link: Link, now: float) -> None:
        """Stop using a link; two chips without a link between them reconnect instead."""
        if self._mesh.has_link(link) and link not in self._cut:
            self._cut.add(link)
            self._changes.add(f"{link} is cut", now)
            return
        for chip in (link.first, link.second):
            worker = self.workers.get(chip)
            if worker and worker.since and self.generation is not None:
                worker.since = self.generation.number + 1
        self._changes.add(f"chips {link.first} and {link.second} lost their connection", now)

    def settled_at(self) -> float | None:
        """Return when to call `decide` again even if nothing happens."""
        times = [doubt.check_at for doubt in self._changes.doubts.values()]
        if self._holder_deadline is not None and not self._is_restoring:
            times.append(self._holder_deadline)
        if self._gather_until is not None:
            times.append(self._gather_until)
        elif self._changes.reasons:
            times.append(self._changes.settles_at())
        return min(times, default=None)

    def decide(self, now: float) -> Decision:
        """Return the next decision, empty if there is nothing to do."""
        if self.is_over:
            return Decision()
        alone_s = self._timing.alone_s
        if self._alone_since is not None and now >= self._alone_since + alone_s:
            return Decision(
                failed=f"the last worker has left, and none came back within {alone_s:g} s"
            )
        for link in self._changes.cut_links(self.workers, now):
            self.cut(link, now)
        if self._is_gathering(now):
            return Decision()
        self._retry_links(now)
        if self._changes.reasons and now >= self._changes.settles_at():
            why, stood_still = self._changes.take_reasons(), self._stands_still
            if (generation := self._form_generation()) is not None:
                return Decision(generation=generation, why=why)
            if self._stands_still and not stood_still:
                return Decision(stands_still=True)
        if (found := self._look_for_holder(now)) is not None:
            return found
        was_restoring, lost_step = self._is_restoring, self.history.step
        why = "" if self._right_until is None else WRONG_NUMBERS
        if (go := self._begin_when_ready(now)) is not None:
            is_restored = was_restoring and go.lost is not None
            return Decision(go=go, lost_step=lost_step if is_restored else None, why=why)
        return Decision(is_over=self._notice_end())

    @property
    def is_state_lost(self) -> bool:
        """Whether no connected worker holds the state that counts."""
        return self._holder_deadline is not None

    @property
    def active_members(self) -> tuple[Chip, ...]:
        """The members whose loops should move: none while all wait for a chip with the state."""
        is_waiting = self.is_over or (self.is_state_lost and not self._is_restoring)
        is_waiting = is_waiting or self._stands_still
        return () if self.generation is None or is_waiting else self.generation.chips

    @property
    def awaited(self) -> tuple[Chip, ...]:
        """The chips that the job waits for before it begins, or goes on after a restart."""
        missing = self._awaited - self._absent - set(self.workers)
        return () if self._gather_until is None else tuple(sorted(missing))

    @property
    def knows_all(self) -> bool:
        """Whether this coordinator knows every generation that a worker can know."""
        return self.generation is not None and not self._is_recalling

    def _look_for_holder(self, now: float) -> Decision | None:
        """Return the decision that follows if no worker holds the state that counts."""
        if self._has_witness(self.workers) or not self.workers:
            if self.is_state_lost:
                self._holder_deadline, self._is_restoring = None, False
                self._changes.add("a chip that holds the state is back", now)
            return None
        # The one with the state to go back to may have left, or turn out to have done another step.
        is_lost_again = self._is_restoring and not self._restorable(self.workers)
        if self._holder_deadline is None or is_lost_again:
            self._holder_deadline = now + self.history.wait_s(self._timing.holder_timeout_s)
            self._is_restoring = False
            return Decision(lost_step=self.history.step)
        if now < self._holder_deadline or self._is_restoring:
            return None
        if not self._restorable(self.workers):
            states = (each for chip in self.workers for each in self._states_to_restore(chip))
            is_saved = any(version == FRESH for _, version in states)
            can_come = self._tile is not None and self._initial_chips - set(self.workers)
            if not (is_saved and can_come):
                return Decision(failed=self.history.why_lost(self._timing.holder_timeout_s))
            # There is a checkpoint, but not a chip of each colour that reads it: those come first.
            self._holder_deadline = now + self.history.wait_s(self._timing.holder_timeout_s)
            return None
        self._is_restoring, self.go = True, None  # the next one may have the same members
        self._changes.add("no worker holds the state any more; going on from a checkpoint", now)
        return None

    def is_missed(self, hello: Hello) -> bool:
        """Whether a worker has the state that no connected worker has."""
        has_newest = not self._restorable(self.workers) and self.history.restorable(hello.status)
        knows = self.history.knows_state((hello.chip, hello.address), hello.status)
        return self.is_state_lost and (bool(has_newest) or knows)

    def recalled(self, name: GenerationName) -> Generation | None:
        """Return the generation that a worker names; None if only a worker can tell it.

        Once this coordinator knows all generations, what a worker recalls changes nothing.
        """
        known = self.generation, self.history.record.formed
        found = (each for each in known if each is not None and each.name == name)
        return next(found, self.generation if self.knows_all else None)

    def waiting(self) -> tuple[Chip, ...]:
        """Return the chips whose workers are connected but are not members that could step."""
        has_members = self.generation is not None and not self._stands_still
        members = set(self.generation.chips) if self.generation and has_members else set()
        return tuple(sorted(set(self.workers) - members))

    def reasons_to_wait(self) -> dict[Chip, str]:
        """Return why each connected worker that is not a member is none."""
        waiting = self.waiting()
        is_forming = not (self.generation is None or self._gather_until is not None)
        if not waiting or not is_forming or self.is_state_lost:
            return {chip: self.reason_to_wait(chip) for chip in waiting}
        part = self._largest_part(self._eligible())
        return {chip: self.reason_to_wait(chip, part) for chip in waiting}

    def reason_to_wait(self, chip: Chip, part: frozenset[Chip] | None = None) -> str:
        """Return why a connected worker is not a member; `part` would form a generation now."""
        if self.generation is None or self._gather_until is not None:
            return "the other workers have not connected yet"
        if self.is_state_lost:
            return self.history.why_waiting(self._timing.holder_timeout_s)
        if chip in (self._largest_part(self._eligible()) if part is None else part):
            return "the next generation is being formed"
        if self._stands_still and self._tile is not None:
            return f"no whole tiles of {format_shape(self._tile)} are left that hold the state"
        if missing := sorted(self._board_of(chip) - set(self.workers)):
            verb = "is" if len(missing) == 1 else "are"
            return f"its board must be complete, but {', '.join(map(str, missing))} {verb} missing"
        if self._tile is not None:
            return f"it has no place in a whole tile of {format_shape(self._tile)}"
        return "it is cut off from the largest live part of the mesh"

    def _recall(self, memory: Generation, now: float) -> None:
        """Adopt the generation that a worker remembers, if it is the latest so far."""
        if self.generation is None:
            self._gather_until = now + self._timing.recall_s
            self._recall_limit = now + _LONGEST_RECALL * self._timing.recall_s
        elif memory.number <= self.generation.number:
            return
        self._is_recalling = True
        self.generation = memory
        self._awaited = set(memory.chips)
        self._cut = set(memory.cut)
        self._mended = dict(memory.mended)

    def _is_gathering(self, now: float) -> bool:
        """Whether to wait longer for expected workers."""
        if self._gather_until is None:
            return False
        if now < self._gather_until and self.awaited:
            return True
        self._gather_until = None
        if self._is_recalling:
            self._resume()
        return False

    def _resume(self) -> None:
        """Go on with the recalled generation, if nothing has changed since."""
        assert self.generation is not None
        self._is_recalling = False
        self._n_skipped = UNHEARD_GENERATIONS
        number = self.generation.number
        for seat in self.generation.seats:
            worker = self.workers.get(seat.chip)
            # A new worker in its place, or one that lost its state, has to connect again.
            if worker and worker.address == seat.address and worker.status.state_version != FRESH:
                worker.since = seat.since
        members = [self.workers.get(chip) for chip in self.generation.chips]
        self._changes.reasons.clear()
        if number >= self.history.latest and all(
            each and each.recalls and each.status.ready and each.status.state_version == number
            for each in members
        ):
            self.go = Go(number, 0, self.generation.chips)
            self.history.is_committed = True
        # This handles workers that waited for the previous coordinator's go, or were not members.
        self._changes.reasons.append("the coordinator was started again")

    def _board_of(self, chip: Chip) -> set[Chip]:
        """Return the chips that must be connected before this one joins: those of its board.

        For a chip that was live at the start, only those that were live at the start.
        """

        is_initial = chip in self._initial_chips
        return self._boards[is_initial][self._board_number(chip)]

    def _board_number(self, chip: Chip) -> Chip:
        return tuple(at // size for at, size in zip(chip, self._board, strict=True))

    @cached_property
    def _boards(self) -> tuple[Mapping[Chip, set[Chip]], Mapping[Chip, set[Chip]]]:
        """The chips of each board, by its number: all of them, and those live at the start."""
        boards: tuple[dict[Chip, set[Chip]], dict[Chip, set[Chip]]] = {}, {}
        for known, chips in zip(boards, (self._mesh.live, self._initial_chips), strict=True):
            for chip in chips:
                known.setdefault(self._board_number(chip), set()).add(chip)
        return boards

    def _form_generation(self) -> Generation | None:
        """Form and return the next generation; None if it would equal this one or has no chips."""
        self._give_up_going_back()
        chips = self._largest_part(self._eligible()) if self.workers else frozenset()
        chips = chips or self._part_across_cuts()
        if not chips:
            self._stands_still = self._tile is not None and self.generation is not None
            return None
        number = 1 + max(worker.status.generation for worker in self.workers.values())
        number = max(number, self.generation.number + 1 if self.generation else 1) + self._n_skipped
        number = max(number, self.history.record.highest + 1)
        seats = []
        for chip in sorted(self.workers):
            worker = self.workers[chip]
            worker.since = (worker.since or number) if chip in chips else 0
            if worker.since:
                seats.append(Seat(chip, worker.address, worker.since))
        cut, mended = frozenset(self._cut), tuple(self._mended.items())
        formed = Generation(number, tuple(seats), cut, mended, self.history.record.term)
        before = self.generation
        if (
            before
            and self.go
            and not self._stands_still
            and formed == structs.replace(before, number=number, term=formed.term)
        ):
            return None
        self._stands_still = False
        self._changes.doubts.clear()
        self._n_skipped = 0
        self.history.use_number(number)
        self.history.record = structs.replace(self.history.record, formed=formed)
        self.generation, self.go = formed, None
        return formed

    def _eligible(self) -> set[Chip]:
        """Return the chips that may train: members, complete boards, and holders if needed."""
        connected = set(self.workers)
        eligible = {
            chip
            for chip, worker in self.workers.items()
            if worker.since or self._board_of(chip) <= connected
        }
        if not self._can_continue(eligible):
            eligible |= {chip for chip in connected if self._is_needed(chip)}
        return eligible or connected

    def _is_needed(self, chip: Chip) -> bool:
        """Whether a chip has a part of the state to go on from, or can prove which one counts."""
        worker = self.workers[chip]
        if self._is_restoring:
            return self._restorable(self.workers) in self._states_to_restore(chip)
        who = chip, worker.address
        is_base = self._tile is not None and self.history.has_base(who, worker.status)
        return is_base or self.history.knows_state(who, worker.status)

    def _largest_part(self, eligible: Iterable[Chip]) -> frozenset[Chip]:
        """Return the largest connected part that holds the state that counts, else an empty set."""
        dead = frozenset(self._mesh.live) - set(eligible)
        mesh = replace(self._mesh, failed=dead, failed_links=frozenset(self._cut))
        for choice in (mesh,) if self._tile is None else self._tiled(mesh, self._tile):
            with_state = [part for part in components(choice) if self._can_continue(part)]
            largest: tuple[Chip, ...] = max(with_state, key=len, default=())
            if largest:
                return frozenset(largest)
        return frozenset()

    def _retry_links(self, now: float) -> None:
        """Now and then, use links again without which live chips are cut off from the others.

        They may have been silent for some seconds only. If they still are, they are soon cut again.
        """
        links = self._links_to_retry()
        if not links:
            self._retry_at = None
        elif self._retry_at is None:
            if now - self._retried_at > self._retry_s:  # the last try did not fail
                self._retry_s = _FIRST_RETRY_S
            self._retry_at = now + self._retry_s
        elif now >= self._retry_at:
            self._retry_at = None
            if not (useful := self._useful(links)):
                return
            self._retried_at = now
            self._retry_s = min(2 * self._retry_s, _LONGEST_RETRY_S)
            for link in sorted(useful):
                self._use_again(link)
                self._changes.add(f"{link} is tried again", now)

    def _links_to_retry(self) -> set[Link]:
        """Return the links cut since the start that may keep chips which wait from the members.

        With tiles also those between chips that wait: they may lack a link inside their own tile.
        """
        if self.generation is None:
            return set()
        members = self.generation.seat_of
        most = 1 if self._tile is None else 2
        apart = {
            link
            for link in self._cut - self._broken_at_start - self._cut_on_purpose
            if 0 < (link.first not in members) + (link.second not in members) <= most
        }
        able = self._eligible() if apart else set()
        return {link for link in apart if {link.first, link.second} <= able}

    def _useful(self, links: set[Link]) -> set[Link]:
        """Return those of some links that would bring chips which wait among the members.

        With tiles that are none if the chips would have no place in a whole tile: a try would stop
        the others in vain.
        """
        if self._tile is None:
            return links
        assert self.generation is not None
        part = self._largest_part_with(links)
        if not part - self.generation.seat_of.keys():
            return set()
        return {link for link in links if {link.first, link.second} <= part}

    def _largest_part_with(self, links: set[Link]) -> frozenset[Chip]:
        """Return the part that could go on if some links that are cut were used again."""
        before, self._cut = self._cut, self._cut - links
        part = self._largest_part(self._eligible())
        self._cut = before
        return part

    def _part_across_cuts(self) -> frozenset[Chip]:
        """Return the part that could go on if links that failed since the start are tried again.

        Without tiles a single chip can go on. But a tile waits for a link that has failed once.
        """
        suspects = self._cut - self._broken_at_start
        if self._tile is None or not self.workers or not suspects:
            return frozenset()
        part = self._largest_part_with(suspects)
        for link in suspects:
            if {link.first, link.second} <= part:
                self._use_again(link)
        return part

    def _tiled(self, mesh: Mesh, tile: tuple[int, ...]) -> Iterator[Mesh]:
        """Yield the mesh without the spares of a tiling: first of that with the most tiles.

        That one may leave out the last chips with a colour of the state, or lie in parts of which
        none has all colours. The others have fewer tiles, but all colours of the state in them.
        """
        needed = {chip for chip in mesh.live if self._is_needed(chip)}
        try:
            yield _without(mesh, box_tiling(mesh, tile, needed).spares)
        except TopologyError:
            return
        for boxes in islice(_boxes_with_all_colours(mesh, tile, needed), _MOST_TILINGS):
            chosen = set().union(*boxes)
            if not self._can_continue(chosen):
                continue
            spares = tuple(set(mesh.live) - chosen)
            with suppress(TopologyError):  # no other box fits beside them
                spares = box_tiling(_without(mesh, chosen), tile, needed).spares if spares else ()
            yield _without(mesh, spares)

    def _can_continue(self, part: Collection[Chip]) -> bool:
        """Whether some chips have the state to go on from, or can prove which one counts."""
        if not self._is_restoring:
            return self._has_witness(part)
        best = self._restorable(self.workers)
        return best is not None and self._restorable(part) == best

    def _restorable(self, part: Iterable[Chip]) -> tuple[int, int] | None:
        """Return the newest state that some chips can go back to, all parts of it."""
        return self._newest((chip, self._states_to_restore(chip)) for chip in part)

    def _states_to_restore(self, chip: Chip) -> tuple[tuple[int, int], ...]:
        """Return the states that a chip can go back to: checkpoints if its state is in doubt."""
        found, until = self.history.restorable(self.workers[chip].status), self._right_until
        if until is None:
            return found
        return tuple(each for each in found if each[0] <= until and each[1] == FRESH)

    def _has_witness(self, part: Collection[Chip]) -> bool:
        def among(knows: Callable[[Process, Status], bool]) -> Iterator[Chip]:
            found = (self.workers[chip] for chip in part)
            return (each.chip for each in found if knows((each.chip, each.address), each.status))

        if self._tile is None:
            return any(True for _ in among(self.history.knows_state))
        if self._may_hold_all(among(self.history.knows_state)):
            return True
        # All parts of what the latest generation began with, and one who can prove that it counts.
        is_provable = any(True for _ in among(self.history.may_deny))
        return is_provable and self._may_hold_all(among(self.history.has_base))

    def _may_hold_all(self, chips: Iterable[Chip]) -> bool:
        """Whether chips may have all parts of one state that is not behind the steps that count.

        Who has left its generation has said which states it holds. Others may step right now.
        """
        unsure: list[Chip] = []
        holders: dict[tuple[int, int], list[Chip]] = {}
        for chip in chips:
            worker = self.workers[chip]
            if self.history.may_move((chip, worker.address), worker.status):
                unsure.append(chip)
            for state in self._counting_states_of(chip):
                holders.setdefault(state, []).append(chip)
        return any(self._is_all([*unsure, *found]) for found in (*holders.values(), []))

    @property
    def _tile(self) -> tuple[int, ...] | None:
        """The shape of the job's tiles; None if each chip holds all of the state."""
        ours = self.history.record.fingerprint
        return parse_tile(ours.tile) if ours is not None and ours.tile else None

    def _is_all(self, chips: Iterable[Chip]) -> bool:
        """Whether chips of which each holds its part of one state hold all of it together."""
        if (tile := self._tile) is None:
            return any(True for _ in chips)
        return len({box_colour(tile, chip) for chip in chips}) == math.prod(tile)

    def _one_of_each_part(self, chips: Iterable[Chip]) -> tuple[Chip, ...]:
        """Return the first of these chips; with tiles, the first of each colour."""
        tile = self._tile
        first: dict[int, Chip] = {}
        for chip in chips:
            first.setdefault(0 if tile is None else box_colour(tile, chip), chip)
        return tuple(sorted(first.values()))

    def _newest(
        self, held: Iterable[tuple[Chip, Iterable[tuple[int, int]]]]
    ) -> tuple[int, int] | None:
        """Return the greatest of the states that chips hold, of which they hold all parts."""
        holders: dict[tuple[int, int], list[Chip]] = {}
        for chip, states in held:
            for state in states:
                holders.setdefault(state, []).append(chip)
        whole = (state for state in sorted(holders, reverse=True) if self._is_all(holders[state]))
        return next(whole, None)

    def _held_by_most(self, version: int, chips: Iterable[Chip]) -> tuple[int, int]:
        """Return the state of a version that most chips hold; if several are, the greatest.

        A chip that has not done a step holds the state before it, and so do all others then: the
        step counts nowhere. If it counts somewhere, all chips hold the state after it. Twins may
        share what belongs to a state, so that it takes all of them to have it.
        """
        held: dict[tuple[int, int], list[Chip]] = {}
        for chip in chips:
            for state in self._counting_states_of(chip):
                if state[0] == version:
                    held.setdefault(state, []).append(chip)
        whole = [state for state, holders in held.items() if self._is_all(holders)]
        return max(whole, key=lambda state: (len(held[state]), state))

    def _counting_states_of(self, chip: Chip) -> tuple[tuple[int, int], ...]:
        """Return the states that a chip holds; with tiles, without those of steps before the last.

        Without tiles one worker's word is enough for that.
        """
        found = self.history.states_of(self.workers[chip].status)
        if self._tile is None:
            return found
        return tuple(each for each in found if each[1] >= self.history.step)

    def _begin_when_ready(self, now: float) -> Go | None:
        """Return the go message once every member is ready, else None."""
        # A generation of an earlier coordinator may have begun already, with other holders.
        if self.generation is None or self.go is not None or self._n_skipped:
            return None
        number, chips = self.generation.number, self.generation.chips
        # It goes on where it found a late one before, so that it looks at each about once.
        for at in range(self._looked_at, self._looked_at + len(chips)):
            worker = self.workers.get(chips[at % len(chips)])
            if not worker or not worker.status.ready or worker.status.generation != number:
                self._looked_at = at % len(chips)
                return None
        self._give_up_going_back()
        if self._is_restoring:
            # The decision to go back asks for a generation of its own. If this one began, that one
            # would end it before a chip has read its checkpoint, and find the state lost again.
            return None if self._changes.reasons else self._begin_from_saved_state(self.generation)
        best = self._newest((chip, self._counting_states_of(chip)) for chip in chips)
        if best is not None and self._tile is not None:
            best = self._held_by_most(best[0], chips)
        holders = tuple(chip for chip in chips if best in self._counting_states_of(chip))
        if best is None or not self.history.is_holder(self.workers[holders[0]].status):
            if not self._has_witness(self.generation.chips) and not self._changes.reasons:
                self._changes.add("a chip that waits holds the state", now)
            return None
        # New workers may differ in their initial weights: one sends its state to the others.
        is_new = best[0] == FRESH
        self.go = Go(number, best[1], self._one_of_each_part(holders) if is_new else holders)
        self.history.begin(self.generation, version=best[0], step=best[1])
        return self.go

    def _begin_from_saved_state(self, generation: Generation) -> Go | None:
        """Return the go message for the newest state that a member holds or can read from disk."""
        if (best := self._restorable(generation.chips)) is None:
            return None
        step, version = best
        holders = tuple(chip for chip in generation.chips if best in self._states_to_restore(chip))
        restores, lost = version == FRESH, self.history.step
        if restores:
            holders = self._one_of_each_part(holders)
        self.go = Go(generation.number, step, holders, restores, lost)
        self.history.begin(generation, version=version, step=step)
        self._holder_deadline, self._is_restoring, self._right_until = None, False, None
        return self.go

    def _give_up_going_back(self) -> None:
        """Go on with the state that workers hold if no checkpoint from before its doubt is left."""
        if self._right_until is not None and self._restorable(self.workers) is None:
            self._right_until, self._is_restoring = None, False

    def _notice_end(self) -> bool:
        """Set `is_over` once every member has finished; return True only that once."""
        if self.generation is None or self.go is None or self.is_over:
            return False
        workers = (self.workers.get(chip) for chip in self.generation.chips)
        self.is_over = all(worker and worker.status.finished for worker in workers)
        return self.is_over


def _without(mesh: Mesh, chips: Iterable[Chip]) -> Mesh:
    return replace(mesh, failed=mesh.failed | set(chips))


def _boxes_with_all_colours(
    mesh: Mesh, tile: tuple[int, ...], needed: Container[Chip]
) -> Iterator[tuple[Tile, ...]]:
    """Yield sets of boxes that share no chip and in which each colour is that of a needed chip."""
    of_colour: list[list[Tile]] = [[] for _ in range(math.prod(tile))]
    for box in upright_boxes(mesh, tile):
        for colour, chip in enumerate(box):
            if chip in needed:
                of_colour[colour].append(box)

    def choose(
        colours: Sequence[list[Tile]], chosen: tuple[Tile, ...]
    ) -> Iterator[tuple[Tile, ...]]:
        if not colours:
            yield chosen
            return
        for box in colours[0]:
            if box in chosen:
                yield from choose(colours[1:], chosen)
            elif not any(set(box) & set(other) for other in chosen):
                yield from choose(colours[1:], (*chosen, box))

    return choose(sorted(of_colour, key=len), ())


@dataclass
class DoubtfulLink:
    """When a worker complained about a link, and when to check it again."""

    since: float
    check_at: float


@dataclass
class PendingChanges:
    """The reasons for a new generation, and the links that are in doubt.

    A link in doubt counts as cut once both its ends have sent a message after the complaint. If a
    whole host is silent, its chips are dead and its links are not the cause.
    """

    settle_s: float
    doubt_s: float
    first: float = 0.0
    last: float = 0.0
    reasons: list[str] = field(default_factory=list)
    doubts: dict[Link, DoubtfulLink] = field(default_factory=dict)
    heard: dict[Chip, float] = field(default_factory=dict)

    def add(self, why: str, now: float) -> None:
        """Add a reason for a new generation."""
        if not self.reasons:
            self.first = now
        self.reasons.append(why)
        self.last = now

    def doubt_link(self, link: Link, now: float) -> None:
        """Record that one end of a link has lost its connection to the other."""
        self.doubts.setdefault(link, DoubtfulLink(now, now + self.doubt_s))

    def forget_doubts(self, chip: Chip) -> None:
        """Take the links of a chip for sound again: its worker had died."""
        for link in [each for each in self.doubts if chip in (each.first, each.second)]:
            del self.doubts[link]

    def cut_links(self, live: Container[Chip], now: float) -> list[Link]:
        """Return the links that now count as cut, because both ends live; each once."""
        cut = []
        for link, doubt in list(self.doubts.items()):
            ends = (link.first, link.second)
            if not all(chip in live for chip in ends):
                del self.doubts[link]
            elif now >= doubt.check_at and all(self.heard[chip] >= doubt.since for chip in ends):
                del self.doubts[link]
                cut.append(link)
            elif now >= doubt.check_at:
                doubt.check_at = now + self.doubt_s
        return cut

    def settles_at(self) -> float:
        """Return when to make a new generation if no more changes come."""
        return min(self.last + self.settle_s, self.first + _LONGEST_SETTLE * self.settle_s)

    def take_reasons(self) -> str:
        """Return all reasons as one text, and forget them."""
        reasons = list(dict.fromkeys(self.reasons))
        self.reasons.clear()
        shown = ", ".join(reasons[:_MOST_REASONS])
        more = len(reasons) - _MOST_REASONS
        return shown if more <= 0 else f"{shown} and {more} more"

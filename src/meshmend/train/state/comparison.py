"""Compares the states of all chips: when a generation begins, and every so many steps.

A generation in which a chip got its state is compared at its first step. One that only lost chips
is compared at its second: nobody waits for a digest to train on.

A turn of the loop begins with a digest of the state, if a comparison is due; the comparison is part
of the turn's step, after its sums and before any weight changes. All chips see the same digests, so
all of them stop at the same step, and each can say who differs from whom, in what, and since when.

Nobody waits for the digest of large arrays: a thread takes it while the step computes. A loop that
changes weights before it steps may be caught at it. So if such digests differ, the next turn begins
with one that is waited for, and that one counts.

In a job that checks its chips, one that differs from most others takes their state instead, and the
step is done again. One that differs twice in a row is wrong.
"""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

from meshmend.errors import ReplicasDifferError, TransportError
from meshmend.membership.events import StateMended, StatesDiffer
from meshmend.topology.failures import Chip
from meshmend.train.core.byte_gather import gather_values
from meshmend.train.core.exchange import Exchange
from meshmend.train.core.learner import Learner
from meshmend.train.core.share_checks import ToldShares
from meshmend.train.core.worker_environment import coordinator_client
from meshmend.train.data.samples import Seen
from meshmend.train.state.digest import BegunDigests, total_of
from meshmend.units import counted, some

COMPARE_EVERY: Final = 200  # steps; benchmarks/state_digest.py has the share of a step
MOST_NAMES: Final = 3  # that an event or an error names
_CAUSES: Final = (
    "usual causes: an optimizer stepped or weights changed outside job.step, a scheduler or other "
    "object with a state that is not in also, random numbers that change the state, a chip that "
    "computes wrong"
)


@dataclass(frozen=True)
class Compared:
    """What all chips told in a comparison, by rank, and which chips had another state.

    Those that were `mended` have the state of the others now; those that are `wrong` do not.
    """

    told: Sequence[ToldShares]
    mended: tuple[Chip, ...] = ()
    wrong: tuple[Chip, ...] = ()


@dataclass(frozen=True)
class _Told:
    """What a chip tells all others in a comparison: of its state, its shares and its samples."""

    total: str
    last_equal: int | None
    shares: Mapping[str, str]  # digests of what it keeps of a sharded optimizer, by place
    checks: ToldShares | None
    strange: tuple[Chip, ...]  # that differed in the comparison before
    is_early: bool
    seen: Seen | None


@dataclass(frozen=True)
class _Difference:
    """What the states of chips differ in after a step, and since when."""

    step: int
    since: int | None  # the last step after which all were equal
    names: tuple[str, ...]
    strange: tuple[Chip, ...]  # that differ from most others
    n_most: int  # how many have the same state


Mend = Callable[[int, Sequence[Chip]], None]  # gives the state of some chips to all others


class StateComparison:
    """One chip's part in comparing the states of all chips of a job.

    `more` returns parts of the state, in words, that are not the learner's. Without `mend`, no
    state of a chip is replaced: the job ends.
    """

    def __init__(
        self,
        learner: Learner,
        exchange: Exchange,
        *,
        every: int,
        more: Callable[[], Mapping[str, str]] = dict,
        mend: Mend | None = None,
        seen: Callable[[], Seen | None] = lambda: None,
    ) -> None:
        self._learner, self._exchange, self._every = learner, exchange, every
        self._chip = exchange.chip
        self._more, self._mend, self._seen = more, mend, seen
        self._strange: tuple[Chip, ...] = ()  # in the comparison before
        self._digests: BegunDigests | None = None  # of the state that is to be compared
        self._words: Mapping[str, str] = {}  # what belongs to it beside the learner's
        self._is_open = False  # whether the last digests differed, but were taken during a step
        self._shares: Mapping[str, str] = {}
        self._generation = 0  # the last one in which a comparison was made
        self._begun = 0  # the last one in which a step was begun
        self._last_equal: int | None = None  # the last step after which all chips were equal

    def begin(self, step: int, *, has_moved_state: bool, is_due: bool = False) -> None:
        """Take the digest of the state after a step, if this state is to be compared."""
        number = self._exchange.generation_number
        is_begun, self._begun = self._begun == number, number
        is_open = self._is_open and is_begun  # else others may not know that it is
        waits = is_due or is_open or self._mend is not None
        is_due |= is_open or (self._generation != number and (is_begun or has_moved_state))
        if is_due or step == 1 or step % self._every == 0:
            self.take(waits=waits)
        else:
            self._digests = None

    def take(self, *, waits: bool = True) -> None:
        """Take the digest of the state; if nobody `waits`, that of large parts of it later."""
        self._digests, self._is_open = self._learner.begun_digest(), False
        if waits:
            found = self._digests.wait()
            self._digests = BegunDigests(lambda: found, is_early=False)
        self._words, self._shares = self._more(), self._learner.share_digests()

    def complete(
        self, step: int, chips: Sequence[Chip], *, told: ToldShares | None = None
    ) -> Compared | None:
        """Compare the digests of all chips, if `begin` has taken one; it does so on all or none.

        Returns None if it has not. `told` is what else this chip tells the others.

        Raises:
            TransportError: the mesh has changed.
            ReplicasDifferError: two chips have different states after this step.
        """
        if self._digests is None:
            return None
        digests, self._digests = self._digests, None
        parts = {**digests.wait(), **self._words}
        mine = _Told(
            total_of(parts),
            self._last_equal,
            self._shares,
            told,
            self._strange,
            digests.is_early,
            self._seen(),
        )
        found = gather_values(self._exchange, mine, _Told)
        self._check_samples(step, chips, [each.seen for each in found])
        totals = [each.total for each in found]
        checks = [each.checks for each in found if each.checks is not None]
        shares = _different_shares([each.shares for each in found], chips)
        if len(set(totals)) > 1 and not shares and any(each.is_early for each in found):
            self._is_open = True
            return Compared(checks)
        if len(set(totals)) > 1 or shares:
            all_parts = gather_values(self._exchange, parts, dict[str, str])
            known = [each.last_equal for each in found if each.last_equal is not None]
            since = max(known, default=None)
            words = [*shares, *self._different_parts(all_parts)]
            before = {chip for each in found for chip in each.strange}
            (most, n_most), *_ = Counter(totals).most_common()
            strange = [chip for chip, each in zip(chips, totals, strict=True) if each != most]
            difference = _Difference(step, since, tuple(words), tuple(strange), n_most)
            compared = self._mended(difference, chips, before)
            if compared is None or shares:
                self._raise(difference, chips)
            return compared
        self._strange = ()
        self._generation, self._last_equal = self._exchange.generation_number, step
        return Compared(checks)

    def _check_samples(self, step: int, chips: Sequence[Chip], seen: Sequence[Seen | None]) -> None:
        """Raise ReplicasDifferError if chips have read other samples of a stream than the rest.

        One that had no samples in this step may not have read as far.
        """
        place = max((each.place for each in seen if each), default=0)
        by_chip = {
            chip: each.hash
            for chip, each in zip(chips, seen, strict=True)
            if each and each.place == place
        }
        if len(set(by_chip.values())) <= 1:
            return
        (most, n_most), *_ = Counter(by_chip.values()).most_common()
        strange = [chip for chip, each in by_chip.items() if each != most]
        self._tell_all(StatesDiffer(self._chip, step, tuple(strange), ("samples",), 1, None), chips)
        raise ReplicasDifferError(
            f"a Job needs a stream that all chips read alike, but of its first {place} samples "
            f"{', '.join(f'chip {chip}' for chip in strange)} has read others than the other "
            f"{counted(n_most, 'chip')}; make its __iter__ the same on every chip: the job gives "
            "each chip its share, and seeds the random numbers of Python, NumPy and torch"
        )

    def _tell_all(self, event: StatesDiffer, chips: Sequence[Chip]) -> None:
        """Let the first chip report why the job ends, before any chip ends it."""
        if chips[0] == self._chip:
            coordinator_client().report(event)
            coordinator_client().flush()
        with suppress(TransportError):
            self._exchange.gather_numbers([event.step])

    def _mended(
        self, found: _Difference, chips: Sequence[Chip], before: Collection[Chip]
    ) -> Compared | None:
        """Give chips that differ the state of most others; None if there are no such others.

        Those that have differed `before` are wrong, and keep what they have.
        """
        if self._mend is None or 2 * found.n_most <= len(chips):
            return None
        self._strange = found.strange
        wrong = tuple(chip for chip in found.strange if chip in before)
        if wrong:
            return Compared((), wrong=wrong)
        right = [chip for chip in chips if chip not in found.strange]
        self._mend(found.step, right)
        if right[0] == self._chip:
            few, n_names = found.names[:MOST_NAMES], len(found.names)
            for chip in found.strange:
                event = StateMended(chip, found.step, few, n_names, found.since, self._chip)
                coordinator_client().report(event)
        return Compared((), mended=found.strange)

    def _different_parts(self, by_rank: Sequence[Mapping[str, str]]) -> list[str]:
        """Return the names of the parts that are not equal on all chips.

        Plain values come first: a learning rate that differs is why weights do.
        """
        first, plain, arrays = by_rank[0], list[str](), list[str]()
        names = {name: None for parts in by_rank for name in parts}
        for name in names:
            values = [parts.get(name, "nothing") for parts in by_rank]
            if len(set(values)) > 1:
                other = next(value for value in values if value != values[0])
                shown = self._learner.part_name(name)
                if "[" in first.get(name, "["):
                    arrays.append(shown)
                else:
                    plain.append(f"{shown} ({values[0]} against {other})")
        return [*plain, *arrays]

    def _raise(self, found: _Difference, chips: Sequence[Chip]) -> None:
        step, since, names = found.step, found.since, found.names
        few = names[:MOST_NAMES]
        self._tell_all(StatesDiffer(self._chip, step, found.strange, few, len(names), since), chips)
        is_majority = 2 * found.n_most > len(chips)
        who = ", ".join(f"chip {chip}" for chip in found.strange) or "a chip and its mirror"
        against = f"the other {counted(found.n_most, 'chip')}" if is_majority else "the others"
        equal = "they were never compared before" if since is None else f"equal after step {since}"
        raise ReplicasDifferError(
            f"the states of the chips differ after step {step} ({equal}): {who} against {against}, "
            f"in {some(names, MOST_NAMES)}; {_CAUSES}"
        )


def _different_shares(by_rank: Sequence[Mapping[str, str]], chips: Sequence[Chip]) -> list[str]:
    """Return words for each share of a sharded optimizer whose mirror is not equal to it."""
    holders: dict[str, dict[str, list[Chip]]] = {}
    for chip, shares in zip(chips, by_rank, strict=True):
        for span, digest in shares.items():
            holders.setdefault(span, {}).setdefault(digest, []).append(chip)
    return [
        f"the optimizer's state of bytes {span} of the parameters on "
        + " against ".join(f"chip {mine[0]}" for mine in by_digest.values())
        for span, by_digest in holders.items()
        if len(by_digest) > 1
    ]

"""Shares computed twice: finds a chip that computes wrong numbers, and says which one it is.

In one of every `every` steps each chip first computes the share of another chip too, and then its
own. Over the steps every chip is checked by every other one in turn. All chips tell each other the
hashes of both. If two differ for the same share, the step does not count, and **all** chips compute
that share: what most of those say that are neither of the two decides, if it is what one of the two
had. If it is neither's, the check is made again.

When a generation begins, all chips compute one share twice: if that is not bit for bit the same
everywhere, no check could tell right from wrong. At the beginning of a job it is then refused;
later, a chip that differs from most others is wrong.

In the same steps a few elements of a sum are summed again, from what all chips have put in. That
finds a chip that adds wrong, and a link that changes bytes. A chip whose own copy of the sum is
wrong is named. If all have the same wrong sum, some chip on the way has added wrong: nobody can say
which, and the step is done again.

Knows ranks and hashes, but no samples. All chips get the same numbers, and conclude the same.
"""

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

import numpy as np

from meshmend.config import CHECKSUM
from meshmend.errors import InputError, WrongResultError
from meshmend.topology.failures import Chip
from meshmend.train.core.exchange import Exchange
from meshmend.train.core.learner import LearnerSums
from meshmend.train.state.digest import total_of
from meshmend.units import some

Hashes = dict[str, int]  # by the name of a parameter
PutAndGot = tuple[bytes, bytes]  # some elements of a sum, before and after it

_PERIOD: Final = 5  # steps
_BLOCK, _LONG_BLOCK = 30, 100  # checks until their places move, for few and for frequent checks
_MOST_UNDECIDED: Final = 3  # checks in a row
_MOST_ELEMENTS: Final = 64  # of a sum that is checked
_TYPES: Final = ("float32", "float64")  # of such sums: NumPy adds those as the kernels do


def is_check_step(step: int, every: int) -> bool:
    """Whether the shares of the step after this one are checked: one in `every` steps.

    Any five checks in a row are of five different steps modulo five, so that a chip that is wrong
    in one of five steps is caught within `n_trusted_steps`. That these places move now and then
    catches one that is wrong in one of any other number of steps: by five steps, which changes
    nothing for the former; where that is more than lies between two checks, by one, and for a while
    both places are checked.
    """
    if every > _PERIOD:
        return _is_on_beat(step % (_BLOCK * every - _PERIOD), every)
    block, within = divmod(step, _LONG_BLOCK * every)
    is_new = within < n_trusted_steps(every)
    return _is_on_beat(step - block, every) or (is_new and _is_on_beat(step - block + 1, every))


def _is_on_beat(step: int, every: int) -> bool:
    """Whether a step is one of a row of checks, each at another place modulo five."""
    beat, place = divmod(step, every)
    return place == (0 if every % _PERIOD else beat % _PERIOD)


def n_trusted_steps(every: int) -> int:
    """Return for how many steps checks must find no chip wrong before a step counts as right.

    One that is wrong in one of five steps may pass the checks of the others.
    """
    return _PERIOD * every


def checked_rank(rank: int, n_ranks: int, step: int, every: int) -> int:
    """Return the rank whose share a chip computes too: in turn, that of each other chip."""
    return (rank - 1 - step // every % (n_ranks - 1)) % n_ranks


class Kind(Enum):
    """What is compared in a step."""

    NOTHING = "nothing"
    TEST = "one share that all chips compute twice"
    CHECK = "a second share of each chip"
    VERDICT = "the shares in dispute, which all chips compute"


@dataclass(frozen=True)
class Dispute:
    """Two chips have computed the share of the first, with different results."""

    owner: int
    checker: int
    owners: str
    checkers: str


@dataclass(frozen=True)
class Finding:
    """What a comparison has found: `wrong` ranks, and whether the step is to be done again.

    `share` is the rank whose share was computed wrong, and `parameters` are those whose gradients
    were; None and none if it was that of all.
    """

    is_void: bool = False
    wrong: tuple[int, ...] = ()
    share: int | None = None
    parameters: tuple[str, ...] = ()
    sums: tuple[int, ...] | None = None  # the ranks whose sums were wrong, if sums were


RIGHT: Final = Finding()


@dataclass(frozen=True)
class ToldShares:
    """What a chip tells the others of a step: digests of its own share and of the second ones.

    `disputed` are the hashes by parameter of both shares of a dispute, where it is one of the two.
    """

    own: str
    seconds: tuple[str, ...]  # an empty text is no share
    right_until: int | None
    disputed: tuple[Hashes, Hashes]
    sums: PutAndGot | None


class SumCheck:
    """One chip's part in checking some elements of one sum of a step."""

    def __init__(self, payloads: LearnerSums, exchange: Exchange) -> None:
        self._payloads, self._exchange = payloads, exchange
        self._number = -1  # of the sum that is checked; -1: none
        self._span = slice(0, 0)
        self._sums_again: Any = None
        self._before: Any = None  # what this chip has put in

    def begin(self, step: int, *, is_checked: bool = True) -> None:
        """Choose a sum and some elements of it, the same on all chips, if the step is checked."""
        sizes = self._payloads.sizes
        numbers = [at for at, (n, dtype) in enumerate(sizes) if n > 0 and dtype in _TYPES]
        self._number = -1
        if not numbers or not is_checked:
            return
        chance = random.Random(f"{self._exchange.generation_number} {step}")
        self._number = chance.choice(numbers)
        n_elements, dtype = sizes[self._number]
        element = chance.randrange(n_elements)
        _, stop, self._sums_again = self._exchange.sum_order(n_elements, dtype, element)
        self._span = slice(element, min(stop, element + _MOST_ELEMENTS))

    def note(self, number: int) -> None:
        """Keep what this chip puts into a sum, which begins now."""
        if number == self._number:
            self._before = self._elements().copy()

    def told(self) -> PutAndGot | None:
        """Return what this chip has put in and what it has got, after the sums."""
        if self._number < 0:
            return None
        return self._before.tobytes(), self._elements().tobytes()

    def wrong_ranks(self, told: Sequence[PutAndGot | None]) -> list[int]:
        """Return the ranks whose sum is not that of what all have put in."""
        if self._number < 0:
            return []
        dtype = self._before.dtype
        known = [each for each in told if each is not None]
        parts = [np.frombuffer(put, dtype=dtype) for put, _ in known]
        right = [each.tobytes() for each in self._sums_again(parts)]
        return [rank for rank, (_, got) in enumerate(known) if got != right[rank]]

    def _elements(self) -> Any:
        dtype = self._payloads.sizes[self._number][1]
        return self._payloads.payloads[self._number].view(dtype)[self._span]


class ShareChecks:
    """One chip's part in computing shares twice, and in checking sums in the same steps."""

    def __init__(self, payloads: LearnerSums, exchange: Exchange, *, every: int) -> None:
        self._payloads, self._exchange, self._every = payloads, exchange, every
        self._sums = SumCheck(payloads, exchange)
        self.kind = Kind.NOTHING  # of the step in flight
        self._own: Hashes = {}  # of what this chip puts into the sums
        self._second: list[Hashes] = []  # of each share that it computes besides
        self._disputed: tuple[Hashes, Hashes] = ({}, {})  # both, of a check that was disputed
        self._tested = 0  # the last generation whose chips were found alike
        self._disputes: tuple[Dispute, ...] = ()
        self._disputed_in = 0  # the generation of the disputes
        self._forced: tuple[int, int] | None = None  # a generation and a step to be checked
        self._n_undecided = 0
        self._wrong_sums: tuple[int, ...] = ()  # of the check before, in this generation
        self._passed: deque[int] = deque()  # the steps whose shares were found right, lately
        self.right_until: int | None = None  # the last step that is known to be right

    def go_back(self, step: int | None) -> None:
        """Begin with a state that is known to be right up to a step."""
        self._passed.clear()
        self.right_until = step

    def begin(self, step: int) -> list[int]:
        """Begin the step after this one; return the ranks whose shares to compute too."""
        second = self._begin_shares(step)
        self._sums.begin(step, is_checked=bool(second))
        return second

    def _begin_shares(self, step: int) -> list[int]:
        number, n_ranks = self._exchange.generation_number, self._exchange.mesh.n_live
        self._own, self._second = {}, []
        if self._disputed_in != number:
            self._disputes, self._wrong_sums, self._disputed_in = (), (), number
        if n_ranks == 1:
            if self.right_until is None:  # nobody can say otherwise
                self.right_until = step
            self.kind = Kind.NOTHING
            return []
        if self._tested != number:
            self.kind = Kind.TEST
            return 2 * [n_ranks - 1]  # the last has samples if any has
        if self._disputes:
            self.kind = Kind.VERDICT
            return [dispute.owner for dispute in self._disputes]
        if is_check_step(step, self._every) or self._forced == (number, step):
            self.kind = Kind.CHECK
            return [checked_rank(self._exchange.rank, n_ranks, step, self._every)]
        self.kind = Kind.NOTHING
        return []

    def judge_sums(self, step: int, wrong: Sequence[int], chips: Sequence[Chip]) -> Finding:
        """Say what follows if some ranks have a sum that is not that of what all have put in.

        One that has it twice in a row, while most others are right, is wrong.

        Raises:
            WrongResultError: sums are wrong again and again, on most chips alike.
        """
        before, self._wrong_sums = self._wrong_sums, ()
        if not wrong:
            return RIGHT
        is_few = 2 * len(wrong) < len(chips)
        if is_few and set(wrong) & set(before):
            again = tuple(rank for rank in wrong if rank in before)
            return Finding(is_void=True, wrong=again, sums=tuple(wrong))
        if is_few:
            self._wrong_sums = tuple(wrong)
            self._forced = self._exchange.generation_number, step
            return Finding(is_void=True, sums=tuple(wrong))
        self._n_undecided += 1
        if self._n_undecided >= _MOST_UNDECIDED:
            raise WrongResultError(
                f"the sums of step {step + 1} are not those of what the chips have put in, "
                f"{self._n_undecided} times in a row: a chip adds wrong, or a link changes bytes; "
                f"find the link with --checksum or {CHECKSUM.name}=1"
            )
        self._forced = self._exchange.generation_number, step
        return Finding(is_void=True, sums=tuple(wrong))

    def force(self, step: int) -> bool:
        """Check the step after this one, which turned out strange; False if that was done."""
        before, self._forced = self._forced, (self._exchange.generation_number, step)
        return self.kind is Kind.NOTHING and before != self._forced

    def note_own(self, number: int) -> None:
        """Take the hash of what this chip puts into a sum; it is complete now."""
        if self.kind is Kind.CHECK:
            self._own |= self._payloads.payload_hashes(number)
        self._sums.note(number)

    def add_second(self, *, is_empty: bool = False) -> None:
        """Take the hash of a second share, which the payloads hold now if it has samples."""
        found: Hashes = {}
        for number in range(0 if is_empty else len(self._payloads.sizes)):
            found |= self._payloads.payload_hashes(number)
        self._second.append(found)

    def told(self) -> ToldShares:
        """Return what this chip tells the others of the step in flight."""
        rank = self._exchange.rank
        is_mine = any(rank in (each.owner, each.checker) for each in self._disputes)
        return ToldShares(
            _joined(self._own),
            tuple(map(_joined, self._second)),
            self.right_until,
            self._disputed if is_mine and self.kind is Kind.VERDICT else ({}, {}),
            self._sums.told(),
        )

    def judge(self, step: int, told: Sequence[ToldShares], chips: Sequence[Chip]) -> Finding:
        """Compare what all chips have told; all come to the same conclusion.

        Raises:
            InputError: the chips do not compute the same, so that nothing can be checked.
            WrongResultError: it cannot be said which chip is wrong.
        """
        finding = self.judge_sums(step, self._sums.wrong_ranks([each.sums for each in told]), chips)
        if finding.is_void:
            return finding
        known = [each.right_until for each in told if each.right_until is not None]
        self.right_until = max(known, default=None)
        match self.kind:
            case Kind.NOTHING:
                return RIGHT
            case Kind.TEST:
                return self._judge_test(step, [each.seconds for each in told], chips)
            case Kind.CHECK:
                found = disputes_of(
                    [each.own for each in told],
                    [each.seconds[0] for each in told],
                    lambda rank: checked_rank(rank, len(told), step, self._every),
                )
                if found:
                    self._disputes = tuple(found)
                    self._disputed = self._own, self._second[0]
                    self._disputed_in = self._exchange.generation_number
                    return Finding(is_void=True)
                self._n_undecided = 0
                self._passed.append(step + 1)
                while step + 1 - self._passed[0] >= n_trusted_steps(self._every):
                    self.right_until = max(self._passed.popleft(), self.right_until or 0)
                return RIGHT
            case Kind.VERDICT:
                disputes, self._disputes = self._disputes, ()
                votes = zip(*(each.seconds for each in told), strict=True)
                for dispute, each in zip(disputes, votes, strict=True):
                    if (wrong := wrong_one(dispute, each)) is not None:
                        self._n_undecided = 0
                        own, second = told[dispute.owner], told[dispute.checker]
                        names = _differing(own.disputed[0], second.disputed[1])
                        return Finding(
                            is_void=True, wrong=(wrong,), share=dispute.owner, parameters=names
                        )
                first = disputes[0]
                return self._undecided(step, [chips[first.owner], chips[first.checker]])

    def _judge_test(
        self, step: int, found: Sequence[Sequence[str]], chips: Sequence[Chip]
    ) -> Finding:
        counts = Counter(second for pair in found for second in pair)
        (most, _), *others = counts.most_common()
        if not others:
            self._tested = self._exchange.generation_number
            if self.right_until is None:
                self.right_until = step
            return RIGHT
        strange = tuple(rank for rank, pair in enumerate(found) if set(pair) != {most})
        if self.right_until is not None:  # the others were alike before
            if 2 * len(strange) < len(chips):
                return Finding(is_void=True, wrong=strange)
            return self._undecided(step, [chips[rank] for rank in strange])
        who = some([chips[rank] for rank in strange], 3)
        raise InputError(
            "check_shares needs chips that compute the same bits from the same samples, but for "
            f"one share, computed twice by each, chips {who} differ from the others or from "
            "themselves; usual causes: random numbers of a generator of its own, kernels that are "
            "not deterministic (torch.use_deterministic_algorithms), another kind of chip or "
            "number of threads; or train with check_shares=0"
        )

    def _undecided(self, step: int, chips: Sequence[Chip]) -> Finding:
        """Have the step checked again; after a few times in a row, give up."""
        self._n_undecided += 1
        if self._n_undecided >= _MOST_UNDECIDED:
            raise WrongResultError(
                f"chips {', '.join(map(str, chips[:3]))} computed different numbers from the same "
                f"samples in step {step + 1}, {self._n_undecided} times in a row, and not enough "
                "others agree on one result: it cannot be said which one is wrong"
            )
        self._forced = self._exchange.generation_number, step
        return Finding(is_void=True)


def disputes_of(
    owns: Sequence[str], seconds: Sequence[str], checked: Callable[[int], int]
) -> list[Dispute]:
    """Return the shares that two chips have computed differently; an empty text is no share."""
    pairs = ((checked(checker), checker) for checker in range(len(owns)))
    return [
        Dispute(owner, checker, owns[owner], seconds[checker])
        for owner, checker in pairs
        if seconds[checker] and owns[owner] != seconds[checker]
    ]


def wrong_one(dispute: Dispute, votes: Sequence[str]) -> int | None:
    """Return which of the two chips of a dispute is wrong; None if that cannot be said.

    `votes` are the results of all chips, who have computed the share after the dispute. Those of
    the two do not count. The others decide if more than half of them agree with one of the two.
    """
    suspects = (dispute.owner, dispute.checker)
    others = [vote for rank, vote in enumerate(votes) if rank not in suspects]
    if not others:
        return None
    (most, n_most), *_ = Counter(others).most_common()
    if 2 * n_most <= len(others):
        return None
    if most == dispute.owners:
        return dispute.checker
    return dispute.owner if most == dispute.checkers else None


def _joined(hashes: Hashes) -> str:
    """Return one digest of all hashes; an empty text if there are none."""
    return total_of({name: f"{each:016x}" for name, each in hashes.items()}) if hashes else ""


def _differing(one: Hashes, other: Hashes) -> tuple[str, ...]:
    """Return the parameters of which two chips have computed something else."""
    return tuple(name for name in sorted(one) if one[name] != other.get(name))


def check_policy(check_shares: int, policy: str) -> None:
    """Raise InputError if a job of such batches cannot compute shares twice."""
    if check_shares and policy != "constant":
        raise InputError(
            f'check_shares needs policy="constant", but got {policy!r}: a step that is done again '
            "without a chip must be of the same samples"
        )

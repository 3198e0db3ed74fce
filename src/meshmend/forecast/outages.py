"""When parts of the machine fail and come back: one year of transitions, sorted by time.

Knows domains by their numbers alone, and nothing of jobs: what a job does changes no failure and no
repair. So one list serves all answers.

A domain that fails is first repaired automatically, if that is set; where this does not help, it
waits for one of the repair crews and is repaired by hand. A failure may pull a second domain of its
kind down soon after it, that one a third, and so on: a burst.

A chip that computes wrong numbers has one transition more: nobody sees it go wrong, and only when
it is found, some time later, does it go down to be repaired. What is slow is so for a while, and
never goes down.

Random numbers are a function of a key and a counter, without state: the n-th draw of a domain is
the same whatever other domains draw, and in every answer and every scenario of a sweep. So two
answers differ by what they do, never by their luck. The mixing function is the finaliser of
SplitMix64 (Steele, Lea and Flood, 2014).
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from meshmend.forecast.records import Figures, Ints, packed
from meshmend.forecast.scenario import KINDS
from meshmend.kernels import inner_kernel, plain_kernel

FIXED, EXPONENTIAL, LOGNORMAL = 0, 1, 2  # how repair times are spread around their mean

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)


@inner_kernel
def mixed(value: np.uint64) -> np.uint64:
    """Return a value whose bits depend on all bits of the given one."""
    value = (value ^ (value >> np.uint64(30))) * _FIRST
    value = (value ^ (value >> np.uint64(27))) * _SECOND
    return value ^ (value >> np.uint64(31))


@inner_kernel
def key_of(seed: int, year: int, domain: int) -> np.uint64:
    """Return the key of the draws of one domain in one simulated year."""
    key = mixed(np.uint64(seed) + _GOLDEN)
    key = mixed(key + np.uint64(year) * _GOLDEN + np.uint64(1))
    return mixed(key + np.uint64(domain) * _GOLDEN + np.uint64(2))


@inner_kernel
def uniform(key: np.uint64, counter: int) -> float:
    """Return a number above 0 and below 1."""
    bits = mixed(key + np.uint64(counter) * _GOLDEN) >> np.uint64(11)
    return (float(bits) + 0.5) / 9007199254740992.0


@inner_kernel
def normal(key: np.uint64, counter: int) -> float:
    """Return a number of the standard normal distribution; takes counters n and n + 1."""
    radius = math.sqrt(-2.0 * math.log(uniform(key, counter)))
    return radius * math.cos(2.0 * math.pi * uniform(key, counter + 1))


@inner_kernel
def weibull(key: np.uint64, counter: int, scale: float, shape: float) -> float:
    """Return a Weibull life; of shape 1 it is exponential."""
    hazard = -math.log(uniform(key, counter))
    return scale * hazard if shape == 1.0 else scale * hazard ** (1.0 / shape)


@inner_kernel
def weibull_residual(key: np.uint64, counter: int, scale: float, shape: float) -> float:
    """Return how long a component of a machine that has run for ever still lives.

    The life that spans a random moment is length-biased: (life / scale) ** shape is then of the
    gamma distribution with 1 + 1 / shape; the moment lies anywhere in it. Takes 64 counters.
    """
    if shape == 1.0:
        return scale * -math.log(uniform(key, counter))
    life = scale * _gamma(key, counter + 1, 1.0 + 1.0 / shape) ** (1.0 / shape)
    return life * uniform(key, counter)


@inner_kernel
def _gamma(key: np.uint64, counter: int, alpha: float) -> float:
    """Return a number of the gamma distribution, alpha of 1 or more (Marsaglia and Tsang)."""
    d = alpha - 1.0 / 3.0
    c = 1.0 / math.sqrt(9.0 * d)
    for attempt in range(20):  # each is refused with a probability of less than 5 %
        at = counter + 3 * attempt
        x = normal(key, at)
        v = (1.0 + c * x) ** 3
        if v > 0.0 and math.log(uniform(key, at + 2)) < 0.5 * x * x + d - d * v + d * math.log(v):
            return d * v
    return d


@inner_kernel
def duration(key: np.uint64, counter: int, mean: float, kind: int, sigma: float) -> float:
    """Return a repair time of this mean; takes counters n and n + 1."""
    if kind == EXPONENTIAL:
        return mean * -math.log(uniform(key, counter))
    if kind == LOGNORMAL:
        return mean * math.exp(sigma * normal(key, counter) - 0.5 * sigma * sigma)
    return mean


TOO_MANY = -1  # the transitions do not fit into the arrays
DOWN, UP, WRONG, SLOW, FAST = range(5)  # what a transition says of its domain

Draws = np.record

# How far the year is.
_NOW = ("heap_size", "n_out", "busy", "queue_first", "queue_last")
_COUNTS = ("n_domains", "most_out")
# Where the parts begin; `out` holds the transitions.
_PARTS = ("kind_of", "next_fail", "lives", "queue", "heap", "out")
# Numbers of kinds: that of wrong chips or -1, and the first that only gets slow.
_SPECIAL = ("wrong_kind", "first_slow_kind")
_FIGURES = (
    "auto_ns",  # repair
    "auto_success",
    "manual_ns",
    "spread",
    "sigma",
    "crews",
    "burst",
    "burst_ns",
    "silent_ns",  # how long a wrong chip is silent, in the mean and at least
    "least_silent_ns",
    "slow_ns",  # how long something is slow
)
# Of each kind of domain: scale and shape of its lives, its first domain, and one past its last.
OF_KINDS = ("life_ns", "life_shape", "first_domain", "end_domain")
_DRAWS = np.dtype(
    (
        np.record,
        [
            *((name, np.int64) for name in (*_NOW, *_COUNTS, *_PARTS, *_SPECIAL)),
            *((name, np.float64) for name in _FIGURES),
            *((name, np.float64, (len(KINDS),)) for name in OF_KINDS),
        ],
    )
)

_DOWN = np.int64(2**62)  # as the next failure of a domain that is down or wrong
_NEVER = np.int64(2**62 - 1)
_LONGEST_NS = 4e18

_FAIL, _TO_MANUAL, _UP, _UP_BY_HAND, _FOUND, _FAST = range(6)  # what happens to a domain next

# Counters of the draws: 64 for the first life, then these for each repair and the life after it.
_FIRST_LIFE, _PER_LIFE = 64, 9
_BY_HAND, _AUTOMATIC, _SUCCESS, _HAS_BURST, _VICTIM, _BURST_WAIT, _LIFE = 0, 2, 4, 5, 6, 7, 8
_SILENCE = 2**40  # and from here on one for each time that it was wrong, or slow


@dataclass(frozen=True, eq=False)
class OutageArrays:
    """The record and the cells of a year."""

    draws: Draws
    cells: Ints

    @property
    def events(self) -> Ints:
        """The transitions of the year, flat: time in ns, domain, and what happens to it."""
        return self.cells[self.draws.out :]

    @property
    def n_most(self) -> int:
        return int(self.draws.most_out)

    @property
    def n_domains(self) -> int:
        return int(self.draws.n_domains)


def outage_arrays(figures: Figures, kind_of: NDArray[np.int32], n_most: int) -> OutageArrays:
    """Return empty arrays for at most so many transitions."""
    n = len(kind_of)
    parts: dict[str, int | Ints] = {
        "kind_of": kind_of.astype(np.int64),
        **dict.fromkeys(("next_fail", "lives", "queue"), n),
        "heap": 3 * (n + n_most + 4),
        "out": 3 * n_most,
    }
    return OutageArrays(*packed(_DRAWS, {**figures, "n_domains": n, "most_out": n_most}, parts))


@plain_kernel
def fill_outages(draws: Draws, cells: Ints, seed: int, year: int, horizon_ns: int) -> int:
    """Fill `out` with the transitions of one year and return how many there are.

    Returns `TOO_MANY` if they do not fit.
    """
    draws.heap_size = draws.n_out = draws.busy = draws.queue_first = draws.queue_last = 0
    for domain in range(draws.n_domains):
        kind = cells[draws.kind_of + domain]
        cells[draws.lives + domain] = 0
        key = key_of(seed, year, domain)
        scale, shape = draws.life_ns[kind], draws.life_shape[kind]
        life = weibull_residual(key, 0, scale, shape)
        _fail_at(draws, cells, domain, 0, life, horizon_ns)
    first = draws.heap
    while draws.heap_size > 0 and cells[first] < horizon_ns:
        now, domain, what = cells[first], cells[first + 1], cells[first + 2]
        _pop(draws, cells)
        full = draws.heap_size + 3 > draws.n_domains + draws.most_out
        if full or draws.n_out >= draws.most_out:
            return TOO_MANY
        key = key_of(seed, year, domain)
        if what == _FAIL:
            if now == cells[draws.next_fail + domain]:  # else a burst took it down before its time
                if cells[draws.kind_of + domain] == draws.wrong_kind:
                    _go_wrong(draws, cells, domain, now, key)
                elif cells[draws.kind_of + domain] >= draws.first_slow_kind:
                    _slow_down(draws, cells, domain, now, key)
                else:
                    _fail(draws, cells, domain, now, key, horizon_ns)
                    if draws.auto_ns <= 0.0:
                        _ask_for_hand(draws, cells, domain, now, seed, year)
        elif what == _FOUND:
            _fail(draws, cells, domain, now, key, horizon_ns)
            if draws.auto_ns <= 0.0:
                _ask_for_hand(draws, cells, domain, now, seed, year)
        elif what == _TO_MANUAL:
            _ask_for_hand(draws, cells, domain, now, seed, year)
        else:
            _come_up(draws, cells, domain, now, key, horizon_ns, FAST if what == _FAST else UP)
            if what == _UP_BY_HAND:
                _free_crew(draws, cells, now, seed, year)
    return draws.n_out


@inner_kernel
def _go_wrong(draws: Draws, cells: Ints, domain: int, now: int, key: np.uint64) -> None:
    """Let a chip compute wrong numbers from now on, and draw when it is found."""
    cells[draws.next_fail + domain] = _DOWN
    _emit(draws, cells, now, domain, WRONG)
    silence = weibull(key, _SILENCE + cells[draws.lives + domain], draws.silent_ns, 1.0)
    silence = max(silence, draws.least_silent_ns)
    _push(draws, cells, now + np.int64(min(silence, _LONGEST_NS)), domain, _FOUND)


@inner_kernel
def _slow_down(draws: Draws, cells: Ints, domain: int, now: int, key: np.uint64) -> None:
    """Let a domain be slow from now on, and draw for how long."""
    cells[draws.next_fail + domain] = _DOWN
    _emit(draws, cells, now, domain, SLOW)
    lasts = weibull(key, _SILENCE + cells[draws.lives + domain], draws.slow_ns, 1.0)
    _push(draws, cells, now + np.int64(min(lasts, _LONGEST_NS)), domain, _FAST)


@inner_kernel
def _fail(
    draws: Draws, cells: Ints, domain: int, now: int, key: np.uint64, horizon_ns: int
) -> None:
    """Take a domain down, begin its automatic repair, and perhaps a burst."""
    at = _FIRST_LIFE + _PER_LIFE * cells[draws.lives + domain]
    cells[draws.next_fail + domain] = _DOWN
    _emit(draws, cells, now, domain, DOWN)
    if uniform(key, at + _HAS_BURST) < draws.burst:
        kind = cells[draws.kind_of + domain]
        first = int(draws.first_domain[kind])
        n_others = int(draws.end_domain[kind]) - first - 1
        victim = first + int(uniform(key, at + _VICTIM) * n_others)
        victim += 1 if victim >= domain and n_others > 0 else 0
        wait = weibull(key, at + _BURST_WAIT, draws.burst_ns, 1.0)
        when = now + 1 + np.int64(min(wait, _LONGEST_NS))
        if when < cells[draws.next_fail + victim] and cells[draws.next_fail + victim] != _DOWN:
            _fail_at(draws, cells, victim, now + 1, wait, horizon_ns)
    if draws.auto_ns > 0.0:
        mean, spread = draws.auto_ns, int(draws.spread)
        time = duration(key, at + _AUTOMATIC, mean, spread, draws.sigma)
        well = uniform(key, at + _SUCCESS) < draws.auto_success
        when = now + np.int64(min(time, _LONGEST_NS))
        _push(draws, cells, when, domain, _UP if well else _TO_MANUAL)


@inner_kernel
def _ask_for_hand(draws: Draws, cells: Ints, domain: int, now: int, seed: int, year: int) -> None:
    """Begin the repair by hand, or put the domain into the queue for a crew."""
    if draws.crews > 0.0 and draws.busy >= draws.crews:
        cells[draws.queue + draws.queue_last % draws.n_domains] = domain
        draws.queue_last += 1
        return
    draws.busy += 1
    key = key_of(seed, year, domain)
    at = _FIRST_LIFE + _PER_LIFE * cells[draws.lives + domain]
    mean, spread = draws.manual_ns, int(draws.spread)
    time = duration(key, at + _BY_HAND, mean, spread, draws.sigma)
    _push(draws, cells, now + np.int64(min(time, _LONGEST_NS)), domain, _UP_BY_HAND)


@inner_kernel
def _free_crew(draws: Draws, cells: Ints, now: int, seed: int, year: int) -> None:
    """Give the crew that has finished to the first domain of the queue."""
    draws.busy -= 1
    if draws.queue_first < draws.queue_last:
        domain = cells[draws.queue + draws.queue_first % draws.n_domains]
        draws.queue_first += 1
        _ask_for_hand(draws, cells, domain, now, seed, year)


@inner_kernel
def _come_up(
    draws: Draws, cells: Ints, domain: int, now: int, key: np.uint64, horizon_ns: int, what: int
) -> None:
    """Bring a domain up, or to its full speed, and draw its next life."""
    _emit(draws, cells, now, domain, what)
    at = _FIRST_LIFE + _PER_LIFE * cells[draws.lives + domain]
    cells[draws.lives + domain] += 1
    kind = cells[draws.kind_of + domain]
    life = weibull(key, at + _LIFE, draws.life_ns[kind], draws.life_shape[kind])
    _fail_at(draws, cells, domain, now, life, horizon_ns)


@inner_kernel
def _fail_at(
    draws: Draws, cells: Ints, domain: int, now: int, life: float, horizon_ns: int
) -> None:
    """Set when a domain fails next; what lies beyond the horizon need not enter the heap."""
    when = _NEVER if life >= _LONGEST_NS else now + np.int64(life)
    cells[draws.next_fail + domain] = when
    if when < horizon_ns:
        _push(draws, cells, when, domain, _FAIL)


@inner_kernel
def _emit(draws: Draws, cells: Ints, now: int, domain: int, what: int) -> None:
    _put(draws, cells, draws.out + 3 * draws.n_out, now, domain, what)
    draws.n_out += 1


@inner_kernel
def _put(draws: Draws, cells: Ints, at: int, time: int, domain: int, what: int) -> None:
    cells[at], cells[at + 1], cells[at + 2] = time, domain, what


@inner_kernel
def _is_before(draws: Draws, cells: Ints, at: int, time: int, domain: int) -> bool:
    """Whether an event of the heap comes first; of two at the same time, the lower domain does."""
    return cells[at] < time or (cells[at] == time and cells[at + 1] <= domain)


@inner_kernel
def _push(draws: Draws, cells: Ints, time: int, domain: int, what: int) -> None:
    """Put an event into the heap."""
    heap, at = draws.heap, draws.heap_size
    draws.heap_size += 1
    while at > 0:
        above = heap + 3 * ((at - 1) // 2)
        if _is_before(draws, cells, above, time, domain):
            break
        _put(draws, cells, heap + 3 * at, cells[above], cells[above + 1], cells[above + 2])
        at = (at - 1) // 2
    _put(draws, cells, heap + 3 * at, time, domain, what)


@inner_kernel
def _pop(draws: Draws, cells: Ints) -> None:
    """Take the first event out of the heap."""
    heap, size, at = draws.heap, draws.heap_size - 1, 0
    draws.heap_size = size
    last = heap + 3 * size
    time, domain, what = cells[last], cells[last + 1], cells[last + 2]
    while 2 * at + 1 < size:
        below = 2 * at + 1
        other = heap + 3 * (below + 1)
        one = heap + 3 * below
        if below + 1 < size and _is_before(draws, cells, other, cells[one], cells[one + 1]):
            below, one = below + 1, other
        if not _is_before(draws, cells, one, time, domain):
            break
        _put(draws, cells, heap + 3 * at, cells[one], cells[one + 1], cells[one + 2])
        at = below
    _put(draws, cells, heap + 3 * at, time, domain, what)

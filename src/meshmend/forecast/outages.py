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


Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

TOO_MANY = -1  # the transitions do not fit into the arrays

# Single figures: those of repair, of bursts, and of wrong chips.
AUTO_NS, AUTO_SUCCESS, MANUAL_NS, SPREAD, SIGMA, CREWS, BURST, BURST_NS = range(8)
# Of wrong chips: the number of their kind or -1, how long they are silent, in the mean, at least.
WRONG_KIND, SILENT_NS, LEAST_SILENT_NS = range(8, 11)
# The number of the first kind that only gets slow, and for how long that lasts.
FIRST_SLOW_KIND, SLOW_NS = range(11, 13)
# Then for each kind of domain: scale and shape of its lives, its first domain, one past its last.
SCALE_NS, SHAPE, FIRST_DOMAIN, LAST_DOMAIN = range(13, 17)
PER_KIND = 4

DOWN, UP, WRONG, SLOW, FAST = range(5)  # what a transition says of its domain

# Single numbers of the array of whole numbers, and where its parts begin.
_HEAP_SIZE, _N_OUT, _BUSY, _QUEUE_FIRST, _QUEUE_LAST, _N_DOMAINS, _MOST_OUT = range(7)
_KIND_OF, _NEXT_FAIL, _LIVES, _QUEUE, _HEAP, OUT = range(7, 13)
_PARTS_BEGIN = 16

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
    """The two arrays of a year: whole numbers, and the figures of the model.

    The part OUT of the first holds the transitions: time in ns, domain, and what happens to it.
    """

    state: Ints
    figures: Floats

    @property
    def events(self) -> Ints:
        """The transitions of the year, flat."""
        return self.state[self.state[OUT] :]

    @property
    def n_most(self) -> int:
        return int(self.state[_MOST_OUT])

    @property
    def n_domains(self) -> int:
        return int(self.state[_N_DOMAINS])


def outage_arrays(figures: Floats, kind_of: NDArray[np.int32], n_most: int) -> OutageArrays:
    """Return empty arrays for at most so many transitions."""
    n = len(kind_of)
    sizes = {_KIND_OF: n, _NEXT_FAIL: n, _LIVES: n, _QUEUE: n, _HEAP: 3 * (n + n_most + 4)}
    state = np.zeros(_PARTS_BEGIN + sum(sizes.values()) + 3 * n_most, dtype=np.int64)
    begin = _PARTS_BEGIN
    for part, size in sizes.items():
        state[part] = begin
        begin += size
    state[OUT], state[_N_DOMAINS], state[_MOST_OUT] = begin, n, n_most
    state[state[_KIND_OF] : state[_KIND_OF] + n] = kind_of
    return OutageArrays(state, figures)


@plain_kernel
def fill_outages(state: Ints, figures: Floats, seed: int, year: int, horizon_ns: int) -> int:
    """Fill `out` with the transitions of one year and return how many there are.

    Returns `TOO_MANY` if they do not fit.
    """
    state[: _QUEUE_LAST + 1] = 0
    for domain in range(state[_N_DOMAINS]):
        kind = state[state[_KIND_OF] + domain]
        state[state[_LIVES] + domain] = 0
        key = key_of(seed, year, domain)
        scale, shape = figures[SCALE_NS + PER_KIND * kind], figures[SHAPE + PER_KIND * kind]
        life = weibull_residual(key, 0, scale, shape)
        _fail_at(state, figures, domain, 0, life, horizon_ns)
    first = state[_HEAP]
    while state[_HEAP_SIZE] > 0 and state[first] < horizon_ns:
        now, domain, what = state[first], state[first + 1], state[first + 2]
        _pop(state)
        full = state[_HEAP_SIZE] + 3 > state[_N_DOMAINS] + state[_MOST_OUT]
        if full or state[_N_OUT] >= state[_MOST_OUT]:
            return TOO_MANY
        key = key_of(seed, year, domain)
        if what == _FAIL:
            if (
                now == state[state[_NEXT_FAIL] + domain]
            ):  # else a burst took it down before its time
                if state[state[_KIND_OF] + domain] == figures[WRONG_KIND]:
                    _go_wrong(state, figures, domain, now, key)
                elif state[state[_KIND_OF] + domain] >= figures[FIRST_SLOW_KIND]:
                    _slow_down(state, figures, domain, now, key)
                else:
                    _fail(state, figures, domain, now, key, horizon_ns)
                    if figures[AUTO_NS] <= 0.0:
                        _ask_for_hand(state, figures, domain, now, seed, year)
        elif what == _FOUND:
            _fail(state, figures, domain, now, key, horizon_ns)
            if figures[AUTO_NS] <= 0.0:
                _ask_for_hand(state, figures, domain, now, seed, year)
        elif what == _TO_MANUAL:
            _ask_for_hand(state, figures, domain, now, seed, year)
        else:
            _come_up(state, figures, domain, now, key, horizon_ns, FAST if what == _FAST else UP)
            if what == _UP_BY_HAND:
                _free_crew(state, figures, now, seed, year)
    return state[_N_OUT]


@inner_kernel
def _go_wrong(state: Ints, figures: Floats, domain: int, now: int, key: np.uint64) -> None:
    """Let a chip compute wrong numbers from now on, and draw when it is found."""
    state[state[_NEXT_FAIL] + domain] = _DOWN
    _emit(state, now, domain, WRONG)
    silence = weibull(key, _SILENCE + state[state[_LIVES] + domain], figures[SILENT_NS], 1.0)
    silence = max(silence, figures[LEAST_SILENT_NS])
    _push(state, now + np.int64(min(silence, _LONGEST_NS)), domain, _FOUND)


@inner_kernel
def _slow_down(state: Ints, figures: Floats, domain: int, now: int, key: np.uint64) -> None:
    """Let a domain be slow from now on, and draw for how long."""
    state[state[_NEXT_FAIL] + domain] = _DOWN
    _emit(state, now, domain, SLOW)
    lasts = weibull(key, _SILENCE + state[state[_LIVES] + domain], figures[SLOW_NS], 1.0)
    _push(state, now + np.int64(min(lasts, _LONGEST_NS)), domain, _FAST)


@inner_kernel
def _fail(
    state: Ints, figures: Floats, domain: int, now: int, key: np.uint64, horizon_ns: int
) -> None:
    """Take a domain down, begin its automatic repair, and perhaps a burst."""
    at = _FIRST_LIFE + _PER_LIFE * state[state[_LIVES] + domain]
    state[state[_NEXT_FAIL] + domain] = _DOWN
    _emit(state, now, domain, DOWN)
    if uniform(key, at + _HAS_BURST) < figures[BURST]:
        kind = state[state[_KIND_OF] + domain]
        first = int(figures[FIRST_DOMAIN + PER_KIND * kind])
        n_others = int(figures[LAST_DOMAIN + PER_KIND * kind]) - first - 1
        victim = first + int(uniform(key, at + _VICTIM) * n_others)
        victim += 1 if victim >= domain and n_others > 0 else 0
        wait = weibull(key, at + _BURST_WAIT, figures[BURST_NS], 1.0)
        when = now + 1 + np.int64(min(wait, _LONGEST_NS))
        if when < state[state[_NEXT_FAIL] + victim] and state[state[_NEXT_FAIL] + victim] != _DOWN:
            _fail_at(state, figures, victim, now + 1, wait, horizon_ns)
    if figures[AUTO_NS] > 0.0:
        mean, spread = figures[AUTO_NS], int(figures[SPREAD])
        time = duration(key, at + _AUTOMATIC, mean, spread, figures[SIGMA])
        well = uniform(key, at + _SUCCESS) < figures[AUTO_SUCCESS]
        when = now + np.int64(min(time, _LONGEST_NS))
        _push(state, when, domain, _UP if well else _TO_MANUAL)


@inner_kernel
def _ask_for_hand(
    state: Ints, figures: Floats, domain: int, now: int, seed: int, year: int
) -> None:
    """Begin the repair by hand, or put the domain into the queue for a crew."""
    if figures[CREWS] > 0.0 and state[_BUSY] >= figures[CREWS]:
        state[state[_QUEUE] + state[_QUEUE_LAST] % state[_N_DOMAINS]] = domain
        state[_QUEUE_LAST] += 1
        return
    state[_BUSY] += 1
    key = key_of(seed, year, domain)
    at = _FIRST_LIFE + _PER_LIFE * state[state[_LIVES] + domain]
    mean, spread = figures[MANUAL_NS], int(figures[SPREAD])
    time = duration(key, at + _BY_HAND, mean, spread, figures[SIGMA])
    _push(state, now + np.int64(min(time, _LONGEST_NS)), domain, _UP_BY_HAND)


@inner_kernel
def _free_crew(state: Ints, figures: Floats, now: int, seed: int, year: int) -> None:
    """Give the crew that has finished to the first domain of the queue."""
    state[_BUSY] -= 1
    if state[_QUEUE_FIRST] < state[_QUEUE_LAST]:
        domain = state[state[_QUEUE] + state[_QUEUE_FIRST] % state[_N_DOMAINS]]
        state[_QUEUE_FIRST] += 1
        _ask_for_hand(state, figures, domain, now, seed, year)


@inner_kernel
def _come_up(
    state: Ints, figures: Floats, domain: int, now: int, key: np.uint64, horizon_ns: int, what: int
) -> None:
    """Bring a domain up, or to its full speed, and draw its next life."""
    _emit(state, now, domain, what)
    at = _FIRST_LIFE + _PER_LIFE * state[state[_LIVES] + domain]
    state[state[_LIVES] + domain] += 1
    kind = state[state[_KIND_OF] + domain]
    life = weibull(
        key, at + _LIFE, figures[SCALE_NS + PER_KIND * kind], figures[SHAPE + PER_KIND * kind]
    )
    _fail_at(state, figures, domain, now, life, horizon_ns)


@inner_kernel
def _fail_at(
    state: Ints, figures: Floats, domain: int, now: int, life: float, horizon_ns: int
) -> None:
    """Set when a domain fails next; what lies beyond the horizon need not enter the heap."""
    when = _NEVER if life >= _LONGEST_NS else now + np.int64(life)
    state[state[_NEXT_FAIL] + domain] = when
    if when < horizon_ns:
        _push(state, when, domain, _FAIL)


@inner_kernel
def _emit(state: Ints, now: int, domain: int, what: int) -> None:
    _put(state, state[OUT] + 3 * state[_N_OUT], now, domain, what)
    state[_N_OUT] += 1


@inner_kernel
def _put(state: Ints, at: int, time: int, domain: int, what: int) -> None:
    state[at], state[at + 1], state[at + 2] = time, domain, what


@inner_kernel
def _is_before(state: Ints, at: int, time: int, domain: int) -> bool:
    """Whether an event of the heap comes first; of two at the same time, the lower domain does."""
    return state[at] < time or (state[at] == time and state[at + 1] <= domain)


@inner_kernel
def _push(state: Ints, time: int, domain: int, what: int) -> None:
    """Put an event into the heap."""
    heap, at = state[_HEAP], state[_HEAP_SIZE]
    state[_HEAP_SIZE] += 1
    while at > 0:
        above = heap + 3 * ((at - 1) // 2)
        if _is_before(state, above, time, domain):
            break
        _put(state, heap + 3 * at, state[above], state[above + 1], state[above + 2])
        at = (at - 1) // 2
    _put(state, heap + 3 * at, time, domain, what)


@inner_kernel
def _pop(state: Ints) -> None:
    """Take the first event out of the heap."""
    state[_HEAP_SIZE] -= 1
    heap, size, at = state[_HEAP], state[_HEAP_SIZE], 0
    last = heap + 3 * size
    time, domain, what = state[last], state[last + 1], state[last + 2]
    while 2 * at + 1 < size:
        below = 2 * at + 1
        other = heap + 3 * (below + 1)
        one = heap + 3 * below
        if below + 1 < size and _is_before(state, other, state[one], state[one + 1]):
            below, one = below + 1, other
        if not _is_before(state, one, time, domain):
            break
        _put(state, heap + 3 * at, state[one], state[one + 1], state[one + 2])
        at = below
    _put(state, heap + 3 * at, time, domain, what)

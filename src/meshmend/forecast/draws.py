"""Random numbers that are a function of their place: a key and a counter, no state.

The n-th draw of a domain is the same whatever other domains draw, and in every answer and every
scenario of a sweep. So two answers differ by what they do, never by their luck. The mixing function
is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014).
"""

import math

import numpy as np

from meshmend.kernels import inner_kernel

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

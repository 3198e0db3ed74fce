"""The random numbers of a process: those of Python, of NumPy, and of PyTorch if it is in use.

They are seeded together, put back together, and passed on to other chips. Imports no framework.
"""

import json
import random
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np


def seed_all(number: int) -> None:
    """Seed all generators; those of a GPU are left to who computes on it.

    `torch.manual_seed` looks for every kind of device. That is too slow for small steps.
    """
    random.seed(number)
    np.random.seed(number)
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.manual_seed(number)


@contextmanager
def seeded(number: int) -> Iterator[None]:
    """Seed all generators; at the end they go on where they were before."""
    before = random_states()
    seed_all(number)
    try:
        yield
    finally:
        for name, state in before.items():
            set_random_state(name, state)


def random_states() -> dict[str, Any]:
    """Return what each generator draws next, by its name."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(legacy=False)}
    torch = sys.modules.get("torch")
    return states if torch is None else {**states, "torch": torch.get_rng_state()}


def set_random_state(name: str, state: Any) -> None:
    """Let a generator go on with a state that `random_states` returned, or its JSON."""
    if name == "python":
        version, numbers, following = state
        random.setstate((version, tuple(numbers), following))
    elif name == "numpy":
        np.random.set_state(state)
    else:
        torch = sys.modules["torch"]
        torch.set_rng_state(torch.as_tensor(state, dtype=torch.uint8, device="cpu"))


class RandomNumbers:
    """The random numbers that a script draws: who takes a state goes on with those of its giver.

    So chips that pick samples by the same numbers still do. It does not if the script has seeded
    its chips apart: then each has numbers of its own. That is seen when a chip joins, when it has
    made its objects once, and when its first step begins; a script may seed in between.
    """

    def __init__(self) -> None:
        self._seen: dict[str, dict[str, int]] = {}  # digests by the moment and the generator

    def see(self, moment: str) -> None:
        """Note what the next numbers are, once for each moment."""
        if moment not in self._seen:
            words = _words().items()
            self._seen[moment] = {name: zlib.crc32(each.encode()) for name, each in words}

    def state(self) -> dict[str, Any]:
        """Return what the next numbers are, as text, and what they were."""
        return {"seen": {moment: dict(of) for moment, of in self._seen.items()}, **_words()}

    def take(self, state: Mapping[str, Any]) -> None:
        """Go on with the numbers of another chip, of each generator that was seeded alike there."""
        moment = next(reversed(self._seen))  # the later one
        theirs = state["seen"].get(moment, {})
        for name, digest in self._seen[moment].items():
            if theirs.get(name) == digest:
                set_random_state(name, json.loads(state[name]))
                for other, digests in state["seen"].items():
                    if name in digests:  # else its giver had numbers of its own then
                        self._seen.setdefault(other, {})[name] = digests[name]


def _words() -> dict[str, str]:
    """Return the states as texts; arrays and tensors become lists."""
    states = random_states().items()
    return {name: json.dumps(each, default=lambda array: array.tolist()) for name, each in states}

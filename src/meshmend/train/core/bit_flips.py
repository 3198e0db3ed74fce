"""Flips single bits of what a worker computes or holds, because a fault asks for it.

The bit depends on chip and step alone, so that the same run flips the same bit again.
"""

import random
from typing import Any, Final

import numpy as np

from meshmend.membership.faults.fault import Part
from meshmend.membership.faults.fault_injector import SelfInjection
from meshmend.topology.failures import Chip
from meshmend.train.core.learner import Learner
from meshmend.train.state.state_tree import Bytes, RawArray, tree_of

_HELD: Final = {Part.WEIGHTS: "model", Part.STATE: "optimizer"}
_BITS: Final = 8


class BitFlips:
    """Flips the bits of one chip whose time has come."""

    def __init__(self, learner: Learner, chip: Chip, injection: SelfInjection) -> None:
        self._learner, self._chip, self._injection = learner, chip, injection

    def in_state(self, step: int) -> None:
        """Flip a bit of the weights or of the optimizer's state before a step, if one is due."""
        if not self._injection.has_wrong_numbers:
            return
        for part in _HELD:
            if self._injection.flips(part, step):
                flip_held(self._learner, part, self._chip, step)

    def in_payload(self, part: Part, step: int) -> None:
        """Flip a bit of this chip's part of its first sum, or of the sum, if one is due."""
        if self._injection.has_wrong_numbers and self._injection.flips(part, step):
            flip_bit(self._learner.sums.payloads[0], self._chip, step)


def flip_bit(data: Bytes, chip: Chip, step: int) -> None:
    """Flip one bit of some bytes."""
    bit = random.Random(f"{chip} {step}").randrange(len(data) * _BITS)
    data[bit // _BITS] ^= 1 << bit % _BITS


def flip_held(learner: Learner, part: Part, chip: Chip, step: int) -> None:
    """Flip one bit of the weights, or of the state of the optimizer, if there is any."""
    state, framework = learner.state(), learner.framework
    tree = tree_of({_HELD[part]: state[_HELD[part]]}, framework.raw)
    names = [name for name, (array, _) in tree.arrays.items() if array.n_bytes]
    if not names:
        return
    chosen = random.Random(f"{chip} {step}").choice(names)
    tensors: dict[str, Any] = {}
    for name, (array, _) in tree.arrays.items():
        data = np.array(array.data)
        if name == chosen:
            flip_bit(data, chip, step)
        tensors[name] = framework.tensor(RawArray.of(array.dtype, array.shape, data))
    learner.load(state | tree.state_of(tensors))

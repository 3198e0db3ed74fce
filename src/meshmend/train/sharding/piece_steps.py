"""Optimizers that step on pieces of parameters instead of on the parameters that they were given.

For the time of a step the groups of an optimizer hold the pieces, and its state is theirs. An
optimizer cannot tell a piece from a parameter, unless it needs norms of whole tensors: it then gets
them. A piece of a 16-bit parameter steps on its **master**, float32 weights that are a part of its
state; its own elements are the master's, rounded.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.train.sharding.elementwise import refuse_hooks
from meshmend.train.sharding.flat_parameters import FlatParameters, Piece
from meshmend.train.sharding.layerwise import LAYERWISE
from meshmend.train.sharding.master_weights import MASTER
from meshmend.train.sharding.piece_states import State

SquaredNorms = NDArray[np.float64]  # two for each parameter


class PieceWork(NamedTuple):
    """A piece to step on: its elements and its state, both changed in place."""

    piece: Piece
    values: torch.Tensor
    state: State

    @property
    def stepped(self) -> torch.Tensor:
        """What the optimizer changes: the master, if there is one."""
        master = self.state.get(MASTER)
        return self.values if master is None else master


class PieceSteps:
    """The optimizers of a job, by name, whose parameters lie in a row."""

    def __init__(self, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self._optimizers = list(optimizers.values())
        self.lists = [
            [list(group["params"]) for group in each.param_groups] for each in self._optimizers
        ]
        self._n_parameters = sum(len(group) for groups in self.lists for group in groups)

    @property
    def needs_norms(self) -> bool:
        """Whether an optimizer needs norms of whole tensors."""
        return any(isinstance(each, LAYERWISE) for each in self._optimizers)

    @property
    def n_norms(self) -> int:
        """How many squared norms there are: two for each parameter."""
        return 2 * self._n_parameters

    def squared_norms(self, work: Sequence[PieceWork], flat: FlatParameters) -> SquaredNorms:
        """Return what these pieces contribute to the squared norms of all parameters."""
        found = np.zeros((self._n_parameters, 2))
        number_of = {each.stepped: each.piece.number for each in work}
        with self._on(work, flat):
            for optimizer in self._optimizers:
                if isinstance(optimizer, LAYERWISE):
                    for parameter, *squares in optimizer.squared_norms():
                        found[number_of[parameter]] += squares
        return found

    def step(
        self,
        work: Sequence[PieceWork],
        flat: FlatParameters,
        norms: SquaredNorms | None,
        *,
        with_hooks: bool,
    ) -> None:
        """Step on pieces, with the squared norms of all parameters if an optimizer needs them."""
        with self._on(work, flat):
            for optimizer in self._optimizers:
                if isinstance(optimizer, LAYERWISE):
                    assert norms is not None, "the norms of this step are not known"
                    roots = np.sqrt(norms).tolist()
                    optimizer.norms = {each.stepped: roots[each.piece.number] for each in work}
                if with_hooks:
                    _step_and_call_hooks(optimizer, work)
                else:
                    _step_without_hooks(optimizer)
                    _round_masters(optimizer, work)
                for each in work:
                    if each.stepped in optimizer.state:
                        each.state.update(optimizer.state[each.stepped])

    @contextmanager
    def _on(self, work: Sequence[PieceWork], flat: FlatParameters) -> Iterator[None]:
        """Give the optimizers pieces for parameters, and take them back."""
        for each in work:
            gradient = flat.gradient(each.piece)
            each.stepped.grad = None if gradient is None else gradient.to(each.stepped.dtype)
        first = 0
        kept = [each.state for each in self._optimizers]
        try:
            for optimizer, lists in zip(self._optimizers, self.lists, strict=True):
                optimizer.state = defaultdict(dict)
                for group, parameters in zip(optimizer.param_groups, lists, strict=True):
                    last = first + len(parameters)
                    mine = [each for each in work if first <= each.piece.number < last]
                    group["params"] = [each.stepped for each in mine]
                    optimizer.state.update((each.stepped, _inner(each.state)) for each in mine)
                    first = last
            yield
        finally:
            for optimizer, state, lists in zip(self._optimizers, kept, self.lists, strict=True):
                optimizer.state = state
                if isinstance(optimizer, LAYERWISE):
                    optimizer.norms = None
                for group, parameters in zip(optimizer.param_groups, lists, strict=True):
                    group["params"] = parameters
            for each in work:
                each.stepped.grad = None

    def check_unchanged(self) -> None:
        """Raise InputError if the optimizers have hooks, or other parameters than at first."""
        for optimizer, lists in zip(self._optimizers, self.lists, strict=True):
            refuse_hooks(optimizer)
            now = [group["params"] for group in optimizer.param_groups]
            if [list(map(id, each)) for each in now] != [list(map(id, each)) for each in lists]:
                raise InputError(
                    "shard_optimizer needs the parameters that the optimizer had when the job was "
                    "made, but its groups have changed; make the job after the last add_param_group"
                )


def _inner(state: State) -> State:
    """Return what the optimizer sees of a state: it begins with an empty one."""
    return {key: value for key, value in state.items() if key != MASTER}


def _step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    step: Any = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


def _step_and_call_hooks(optimizer: torch.optim.Optimizer, work: Sequence[PieceWork]) -> None:
    """Step; the hooks see the new weights, also those that are rounded from masters."""
    hooks: Any = vars(optimizer)["_optimizer_step_post_hooks"]
    handle = optimizer.register_step_post_hook(lambda *_: _round_masters(optimizer, work))
    hooks.move_to_end(handle.id, last=False)
    try:
        optimizer.step()
    finally:
        handle.remove()


def _round_masters(optimizer: torch.optim.Optimizer, work: Sequence[PieceWork]) -> None:
    for each in work:
        if each.stepped is not each.values and each.stepped in optimizer.state:
            each.values.copy_(each.stepped)

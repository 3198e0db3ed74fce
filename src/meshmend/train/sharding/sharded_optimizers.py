"""The optimizers of a job, sharded: this chip keeps the state of two shares of the parameters.

A step is **tried** on copies of this chip's own share, piece by piece, so that the new weights can
be gathered from all owners while nothing has changed yet. When all of them are there the step
counts: the optimizers step in place on what this chip keeps, its own share and those that it
mirrors. Both give the same bits, and so does the mirror. If the gather fails, the gradients are
still there, and the step is done in place later, or never.

An optimizer that needs norms of whole tensors gets them before the trial: every chip adds up the
squares of its own share, and the chips sum these.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch

from meshmend.errors import InputError
from meshmend.planning.plan_request import GATHER, SumSizes
from meshmend.train.sharding.elementwise import (
    check_elementwise,
    check_parameters,
    refuse_hooks,
)
from meshmend.train.sharding.flat_parameters import FlatParameters, Piece
from meshmend.train.sharding.master_weights import MASTER, check_no_masters, needs_master
from meshmend.train.sharding.optimizer_pieces import OptimizerPieces
from meshmend.train.sharding.piece_states import (
    State,
    copied,
    cut_state,
    is_by_element,
    n_bytes_of,
    whole_state,
)
from meshmend.train.sharding.piece_steps import PieceSteps, PieceWork, SquaredNorms
from meshmend.train.sharding.update_shares import Span, Spans, UpdateShares, without
from meshmend.train.state.torch_state import digest, packed, unpacked
from meshmend.train.torch.optimizers import part_name

StateName = tuple[int, int]  # of the last update: the generation in which it was made, its step

_TRIED_PARTS: Final = 8  # a trial copies the state of about an eighth of the share at a time
_SHARDED: Final = "sharded"


class ShardedOptimizers:
    """Optimizers by name whose state is sharded; a single one is called ''.

    With `has_masters`, the state of parameters of 16 bits has their weights in float32.

    Raises:
        InputError: one cannot be sharded.
    """

    skips_non_finite = False

    def __init__(
        self, optimizers: Mapping[str, torch.optim.Optimizer], *, has_masters: bool = False
    ) -> None:
        self._optimizers = dict(optimizers)
        for each in self._optimizers.values():
            check_elementwise(each)
            refuse_hooks(each)
        self._steps = PieceSteps(self._optimizers)
        parameters = [each for groups in self._steps.lists for group in groups for each in group]
        check_parameters(parameters)
        self.flat = FlatParameters(parameters)
        self._has_masters = has_masters
        self.held: Spans = ()
        self._own: Span = (0, 0)
        self._states: dict[Piece, State] = {}
        self._new_weights: torch.Tensor | None = None
        self._norms: SquaredNorms | None = None  # of the step in flight, over all chips
        self.name: StateName | None = None  # None before this chip has been in a generation
        self.tried: StateName | None = None  # a step that was tried, and neither counts nor is void
        self._adopt([dict(each.state) for each in self._optimizers.values()])
        for each in self._optimizers.values():
            each.register_state_dict_pre_hook(_refuse_state_dict)

    def n_state_bytes(self) -> int:
        """Return the bytes of the state that this chip keeps now."""
        return n_bytes_of(self._states.values())

    def sum_sizes(self, n_ranks: int) -> SumSizes:
        """Return the sizes of the sums and gathers of an update that so many ranks share.

        The first is for what chips tell each other in a new generation.
        """
        norms = [(self._steps.n_norms, "float64")] if self._steps.needs_norms else []
        gathered = UpdateShares(self.flat.n_bytes, (0,) * n_ranks).gathered_bytes
        return ((1, "int64"), *norms, (gathered, GATHER))

    # A step: `begin`, `clip`, `squared_norms`, `trial`, a gather of what that returns, `step`.

    def begin(self) -> None:
        """Forget the last step, if it did not count; its gradients go now."""
        self.tried, self._new_weights, self._norms = None, None, None

    def clip(self, max_norm: float | None) -> float | None:
        """Clip the summed gradients to a norm, and return what it was; None: do not."""
        if max_norm is None:
            return None
        return float(torch.nn.utils.clip_grad_norm_(self.flat.parameters, max_norm))

    @torch.no_grad()
    def squared_norms(self) -> SquaredNorms | None:
        """Return this chip's part of the squared norms of all parameters, for a sum in place.

        None if no optimizer needs them.
        """
        if not self._steps.needs_norms:
            return None
        self._norms = self._steps.squared_norms(self._kept(self.flat.pieces(self._own)), self.flat)
        return self._norms

    @torch.no_grad()
    def trial(self, name: StateName, shares: UpdateShares) -> torch.Tensor:
        """Return a payload to gather: this chip's share of the new weights is in its place.

        Raises:
            InputError: the optimizers have changed since the job was made, or have hooks.
        """
        self._steps.check_unchanged()
        payload = torch.empty(shares.gathered_bytes, dtype=torch.uint8)
        payload[self._own[0] : self._own[1]] = 0  # padding between parameters
        for pieces in self._batches(self.flat.pieces(self._own), shares.share_bytes):
            work = [
                PieceWork(piece, self.flat.values(piece).clone(), copied(self._states[piece]))
                for piece in pieces
            ]
            self._steps.step(work, self.flat, self._norms, with_hooks=False)
            for piece, values, _ in work:
                self.flat.bytes_in(payload, piece).copy_(values)
        self.tried, self._new_weights = name, payload
        return payload

    @torch.no_grad()
    def step(self) -> None:
        """Make the step that was tried count; the hooks of the optimizers see the new weights."""
        if self._new_weights is not None:
            for span in without([(0, self.flat.n_bytes)], self.held):
                for piece in self.flat.pieces(span):
                    new = self.flat.bytes_in(self._new_weights, piece)
                    self.flat.values(piece).copy_(new)
        elif self._norms is None:
            self.squared_norms()  # this chip trains alone
        self._step_in_place(with_hooks=True)

    @torch.no_grad()
    def step_late(self) -> None:
        """Update what this chip keeps by the step that was tried: it counts on other chips.

        The rest, and what hooks have done, comes from them.
        """
        self._step_in_place(with_hooks=False)

    def _step_in_place(self, *, with_hooks: bool) -> None:
        self._steps.step(self._kept(self._states), self.flat, self._norms, with_hooks=with_hooks)
        self.name = self.tried or self.name
        self.begin()

    def _kept(self, pieces: Iterable[Piece]) -> list[PieceWork]:
        """Return pieces that this chip keeps, to step on in place."""
        return [PieceWork(each, self.flat.values(each), self._states[each]) for each in pieces]

    def _batches(self, pieces: Sequence[Piece], share_bytes: int) -> Iterator[list[Piece]]:
        batch: list[Piece] = []
        n_bytes = 0
        for piece in pieces:
            batch.append(piece)
            n_bytes += self.flat.values(piece).nbytes
            if n_bytes > share_bytes // _TRIED_PARTS:
                yield batch
                batch, n_bytes = [], 0
        if batch:
            yield batch

    # What this chip keeps.

    def packed_span(self, span: Span) -> Any:
        """Return the state of a span that this chip holds, as bytes."""
        pieces = self.flat.pieces(span)
        return packed([[*piece, cut_state(self._states, piece)] for piece in pieces])

    def receive(self, span: Span, data: Any) -> None:
        """Take the state of a span that another chip has sent."""
        for number, start, stop, state in unpacked(data):
            piece = Piece(number, start, stop)
            device = self.flat.parameters[number].device
            self._states[piece] = {
                key: value.to(device) if is_by_element(value) else value
                for key, value in state.items()
            }
        self.held = (*self.held, span)

    def drop(self) -> None:
        """Forget all states: they are not those that count."""
        self.held, self._states, self._own = (), {}, (0, 0)
        self.begin()

    def renew_masters(self) -> None:
        """Take the master weights from the weights, which have come from another chip."""
        for piece, state in self._states.items():
            if MASTER in state:
                state[MASTER] = self.flat.values(piece).float()

    def keep(self, own: Span, mirrored: Iterable[Span]) -> None:
        """Keep the states of these spans and forget the others; all of them are held."""
        spans = tuple(span for span in (own, *mirrored) if span[0] < span[1])
        pieces = [piece for span in spans for piece in self.flat.pieces(span)]
        self._states = {piece: cut_state(self._states, piece) for piece in pieces}
        self._own, self.held = own, spans

    # The state as part of the training state.

    def part_name(self, name: str, parameter_names: Mapping[torch.Tensor, str]) -> str:
        """Return the name of a part of the training state."""
        return part_name(name, self._optimizers, parameter_names)

    def share_digests(self) -> dict[str, str]:
        """Return a digest of each span that this chip keeps; owner and mirror have the same."""
        return {
            f"{low} to {high}": digest(
                {str(piece): self._states[piece] for piece in self.flat.pieces((low, high))}
            )
            for low, high in self.held
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the settings of the optimizers, without the sharded state."""
        return self._by_name([{"state": {}, _SHARDED: True} for _ in self._optimizers])

    def saved_state(self) -> dict[str, Any]:
        """Return the settings, and the state of this chip's own share, for a checkpoint."""
        own = {piece: cut_state(self._states, piece) for piece in self.flat.pieces(self._own)}
        states, first = [], 0
        for lists in self._steps.lists:
            numbers = range(first, first + sum(map(len, lists)))
            shapes = [tuple(self.flat.parameters[number].shape) for number in numbers]
            pieces = [
                (piece.number - first, piece.start, state)
                for piece, state in own.items()
                if piece.number in numbers
            ]
            states.append({"state": OptimizerPieces(shapes, pieces)})
            first = numbers.stop
        return self._by_name(states)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace settings, and the state if it comes from a checkpoint: then this chip has all."""
        states = [state] if list(self._optimizers) == [""] else [*state.values()]
        for optimizer, loaded in zip(self._optimizers.values(), states, strict=True):
            for group, saved in zip(optimizer.param_groups, loaded["param_groups"], strict=True):
                group.update({key: value for key, value in saved.items() if key != "params"})
        if not any(_SHARDED in each for each in states):
            if not self._has_masters:
                check_no_masters(held for each in states for held in each["state"].values())
            self._adopt(
                [_by_parameter(each, self._optimizers, at) for at, each in enumerate(states)]
            )

    def _by_name(self, states: list[dict[str, Any]]) -> dict[str, Any]:
        named: dict[str, Any] = {}
        for (name, optimizer), state in zip(self._optimizers.items(), states, strict=True):
            named[name] = state | {"param_groups": _settings_of(optimizer)}
        return named[""] if list(named) == [""] else named

    def _adopt(self, states: Sequence[Mapping[torch.Tensor, State]]) -> None:
        """Hold the states of all parameters, given for each optimizer by parameter."""
        self.drop()
        everything = (0, self.flat.n_bytes)
        given = {parameter: state for each in states for parameter, state in each.items()}
        for piece in self.flat.pieces(everything):
            parameter = self.flat.parameters[piece.number]
            state = whole_state(given.get(parameter, {}), parameter)
            if self._has_masters and needs_master(parameter) and MASTER not in state:
                state[MASTER] = self.flat.values(piece).float()
            self._states[piece] = state
        for optimizer in self._optimizers.values():
            optimizer.state = defaultdict(dict)
        self.held, self._own, self.name = (everything,), everything, None


def _settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Return the groups of an optimizer, with the numbers of their parameters, as torch does."""
    settings, first = [], 0
    for group in optimizer.param_groups:
        numbers = list(range(first, first + len(group["params"])))
        named = {key: value for key, value in group.items() if key != "params"}
        settings.append({**named, "params": numbers})
        first += len(numbers)
    return settings


def _by_parameter(
    state: Mapping[str, Any], optimizers: Mapping[str, torch.optim.Optimizer], at: int
) -> dict[torch.Tensor, State]:
    """Return the state of each parameter of an optimizer, given its `state_dict`."""
    groups = list(optimizers.values())[at].param_groups
    parameters = [each for group in groups for each in group["params"]]
    return {parameters[int(number)]: each for number, each in state["state"].items()}


def _refuse_state_dict(_optimizer: torch.optim.Optimizer) -> None:
    raise InputError(
        "this optimizer's state_dict would lack the state that is on other chips: the job has "
        "shard_optimizer=True; save it with Job(saving=...)"
    )

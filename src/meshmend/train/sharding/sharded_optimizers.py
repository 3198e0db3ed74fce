"""The optimizers of a job, sharded: this chip keeps the state of two shares of the parameters.

A step is **tried** on copies of this chip's own share, piece by piece, so that the new weights can
be gathered from all owners while nothing has changed yet. When all of them are there the step
counts: the optimizers step in place on what this chip keeps, its own share and those that it
mirrors. Both give the same bits, and so does the mirror. If the gather fails, the gradients are
still there, and the step is done in place later, or never.

For the time of a step the groups of an optimizer hold pieces in place of parameters, and its state
is theirs. An optimizer cannot tell a piece from a parameter, if it updates each element by itself.
One that needs norms of whole tensors, such as LARS, gets them before the trial: every chip adds up
the squares of its own share, and the chips sum these. A piece of a 16-bit parameter steps on its
master, float32 weights that are a part of its state; its own elements are the master's, rounded.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.planning.plan_request import GATHER, SumSizes
from meshmend.train.sharding.layerwise import LAYERWISE
from meshmend.train.sharding.pieces import (
    FlatParameters,
    Piece,
    State,
    copied,
    cut_state,
    is_by_element,
    n_bytes_of,
    whole_state,
)
from meshmend.train.sharding.update_shares import Span, Spans, UpdateShares, without
from meshmend.train.state.state_tree import OwnedPieces
from meshmend.train.state.torch_state import TORCH
from meshmend.train.torch.local_tensors import local_of
from meshmend.train.torch.optimizers import (
    MASTER,
    before_other_hooks,
    check_no_masters,
    needs_master,
    parameters_of,
)

StateName = tuple[int, int]  # of the last update: the generation in which it was made, its step
SquaredNorms = NDArray[np.float64]  # two for each parameter
_TRIED_PARTS: Final = 8  # a trial copies the state of about an eighth of the share at a time
_SHARDED: Final = "sharded"

_ELEMENTWISE: Final = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
)


class _PieceWork(NamedTuple):
    """A piece to step on: its elements and its state, both changed in place."""

    piece: Piece
    values: torch.Tensor
    state: State

    @property
    def stepped(self) -> torch.Tensor:
        """What the optimizer changes: the master, if there is one."""
        master = self.state.get(MASTER)
        return self.values if master is None else master


class ShardedOptimizers:
    """Optimizers by name whose state is sharded; a single one is called ''.

    With `has_masters`, the state of parameters of 16 bits has their weights in float32. Without
    `calls_step`, a loop steps the optimizers itself, and so calls all their hooks.

    Raises:
        InputError: one cannot be sharded.
    """

    skips_non_finite = False

    def __init__(
        self,
        optimizers: Mapping[str, torch.optim.Optimizer],
        *,
        has_masters: bool = False,
        calls_step: bool = True,
    ) -> None:
        self._optimizers = dict(optimizers)
        for each in self._optimizers.values():
            _check_elementwise(each)
            if calls_step:
                _refuse_hooks(each)
        self._steps = _PieceSteps(self._optimizers)
        parameters = [each for groups in self._steps.lists for group in groups for each in group]
        _check_parameters(parameters)
        self.flat = FlatParameters(parameters)
        self._has_masters = has_masters
        self.held: Spans = ()
        self.own: Span = (0, 0)
        self.states: dict[Piece, State] = {}
        self._new_weights: torch.Tensor | None = None
        self._norms: SquaredNorms | None = None  # of the step in flight, over all chips
        self.name: StateName | None = None  # None before this chip has been in a generation
        self.tried: StateName | None = None  # a step that was tried, and neither counts nor is void
        self._adopt([dict(each.state) for each in self._optimizers.values()])
        for each in self._optimizers.values():
            each.register_state_dict_pre_hook(_refuse_state_dict)

    def n_state_bytes(self) -> int:
        """Return the bytes of the state that this chip keeps now."""
        return n_bytes_of(self.states.values())

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
        self._norms = self._steps.squared_norms(self._kept(self.flat.pieces(self.own)), self.flat)
        return self._norms

    @torch.no_grad()
    def trial(self, name: StateName, shares: UpdateShares) -> torch.Tensor:
        """Return a payload to gather: this chip's share of the new weights is in its place.

        Raises:
            InputError: the optimizers have changed since the job was made, or have hooks.
        """
        self._steps.check_unchanged()
        payload = torch.empty(shares.gathered_bytes, dtype=torch.uint8, device="cpu")
        payload[self.own[0] : self.own[1]] = 0  # padding between parameters
        for pieces in self._batches(self.flat.pieces(self.own), shares.share_bytes):
            work = [
                _PieceWork(piece, self.flat.values(piece).clone(), copied(self.states[piece]))
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
        self._steps.step(self._kept(self.states), self.flat, self._norms, with_hooks=with_hooks)
        self.name = self.tried or self.name
        self.begin()

    @contextmanager
    def on_pieces(self) -> Iterator[None]:
        """Give the optimizers what this chip keeps for parameters, while a loop steps them."""
        work = self._kept(self.states)
        with self._steps.on(work, self.flat):
            yield
            self._steps.take_states(work)

    def _kept(self, pieces: Iterable[Piece]) -> list[_PieceWork]:
        """Return pieces that this chip keeps, to step on in place."""
        return [_PieceWork(each, self.flat.values(each), self.states[each]) for each in pieces]

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
        return TORCH.packed([[*piece, cut_state(self.states, piece)] for piece in pieces])

    def receive(self, span: Span, data: Any) -> None:
        """Take the state of a span that another chip has sent."""
        for number, start, stop, state in TORCH.unpacked(data):
            piece = Piece(number, start, stop)
            device = self.flat.parameters[number].device
            self.states[piece] = {
                key: value.to(device) if is_by_element(value) else value
                for key, value in state.items()
            }
        self.held = (*self.held, span)

    def drop(self) -> None:
        """Forget all states: they are not those that count."""
        self.held, self.states, self.own = (), {}, (0, 0)
        self.begin()

    def renew_masters(self) -> None:
        """Take the master weights from the weights, which have come from another chip."""
        for piece, state in self.states.items():
            if MASTER in state:
                state[MASTER] = self.flat.values(piece).float()

    def keep(self, own: Span, mirrored: Iterable[Span]) -> None:
        """Keep the states of these spans and forget the others; all of them are held."""
        spans = tuple(span for span in (own, *mirrored) if span[0] < span[1])
        pieces = [piece for span in spans for piece in self.flat.pieces(span)]
        self.states = {piece: cut_state(self.states, piece) for piece in pieces}
        self.own, self.held = own, spans

    # The state as part of the training state.

    def share_digests(self) -> dict[str, str]:
        """Return a digest of each span that this chip keeps; owner and mirror have the same."""
        return {
            f"{low} to {high}": TORCH.digest(
                {str(piece): self.states[piece] for piece in self.flat.pieces((low, high))}
            )
            for low, high in self.held
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the settings of the optimizers, without the sharded state."""
        return self._by_name([{"state": {}, _SHARDED: True} for _ in self._optimizers])

    def saved_state(self) -> dict[str, Any]:
        """Return the settings, and the state of this chip's own share, for a checkpoint."""
        own = {piece: cut_state(self.states, piece) for piece in self.flat.pieces(self.own)}
        states, first = [], 0
        for lists in self._steps.lists:
            numbers = range(first, first + sum(map(len, lists)))
            shapes = [tuple(self.flat.parameters[number].shape) for number in numbers]
            pieces = [
                (piece.number - first, self.flat.first(piece), state)
                for piece, state in own.items()
                if piece.number in numbers
            ]
            states.append({"state": OwnedPieces(shapes, pieces)})
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
            pairs = zip(self._optimizers.values(), states, strict=True)
            self._adopt([_by_parameter(optimizer, each) for optimizer, each in pairs])

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
            self.states[piece] = state
        for optimizer in self._optimizers.values():
            optimizer.state = defaultdict(dict)
        self.held, self.own, self.name = (everything,), everything, None


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
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any]
) -> dict[torch.Tensor, State]:
    """Return the state of each parameter of an optimizer, given its `state_dict`."""
    parameters = list(parameters_of(optimizer))
    return {parameters[int(number)]: each for number, each in state["state"].items()}


def _refuse_state_dict(_optimizer: torch.optim.Optimizer) -> None:
    raise InputError(
        "this optimizer's state_dict would lack the state that is on other chips: the job has "
        "shard_optimizer=True; save it with saving= of the job"
    )


class _PieceSteps:
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

    def squared_norms(self, work: Sequence[_PieceWork], flat: FlatParameters) -> SquaredNorms:
        """Return what these pieces contribute to the squared norms of all parameters."""
        found = np.zeros((self._n_parameters, 2))
        number_of = {each.stepped: each.piece.number for each in work}
        with self.on(work, flat):
            for optimizer in self._optimizers:
                if isinstance(optimizer, LAYERWISE):
                    for parameter, *squares in optimizer.squared_norms():
                        found[number_of[parameter]] += squares
        return found

    def step(
        self,
        work: Sequence[_PieceWork],
        flat: FlatParameters,
        norms: SquaredNorms | None,
        *,
        with_hooks: bool,
    ) -> None:
        """Step on pieces, with the squared norms of all parameters if an optimizer needs them."""
        with self.on(work, flat):
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
            self.take_states(work)

    def take_states(self, work: Sequence[_PieceWork]) -> None:
        """Take over what the optimizers have made of the states of pieces."""
        for optimizer in self._optimizers:
            for each in work:
                if each.stepped in optimizer.state:
                    each.state.update(optimizer.state[each.stepped])

    @contextmanager
    def on(self, work: Sequence[_PieceWork], flat: FlatParameters) -> Iterator[None]:
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
            _refuse_hooks(optimizer)
            now = [group["params"] for group in optimizer.param_groups]
            if [list(map(id, each)) for each in now] != [list(map(id, each)) for each in lists]:
                raise InputError(
                    "shard_optimizer needs the parameters that the optimizer had when the job was "
                    "made, but its groups have changed; make the job after the last add_param_group"
                )


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is known to update each element by itself."""
    return type(optimizer) in _ELEMENTWISE or getattr(optimizer, "is_elementwise", False)


def _check_elementwise(optimizer: torch.optim.Optimizer) -> None:
    """Raise InputError if an optimizer may need more than one element to update an element.

    LARS and LAMB do, but say what they need. An optimizer that we do not know says that it does not
    with an attribute.
    """
    if is_elementwise(optimizer) or type(optimizer) in LAYERWISE:
        return
    name = type(optimizer).__name__
    raise InputError(
        "shard_optimizer needs an optimizer that updates each element by itself, such as SGD, "
        f"Adam or AdamW, or LARS or LAMB of meshmend.train, but got {name}; train with "
        f"shard_optimizer=False, or set {name}.is_elementwise = True if it does"
    )


def _refuse_hooks(optimizer: torch.optim.Optimizer) -> None:
    """Raise InputError if something happens between the sums and the update."""
    hooks: Any = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    if hooks:
        raise InputError(
            "shard_optimizer cannot call step_pre_hooks: a step is tried before it counts; clip "
            "with job.clip_grad_norm, or train with shard_optimizer=False"
        )


def _check_parameters(parameters: list[torch.Tensor]) -> None:
    """Raise InputError if the parameters of the optimizers do not lie in a row, each once."""
    if len({id(each) for each in parameters}) != len(parameters):
        raise InputError("shard_optimizer needs each parameter in one group of one optimizer")
    for number, parameter in enumerate(parameters):
        if not local_of(parameter).is_contiguous():
            raise InputError(
                f"shard_optimizer needs contiguous parameters, but number {number}, of shape "
                f"{tuple(parameter.shape)}, is not; call model.to(memory_format="
                "torch.contiguous_format)"
            )


def _inner(state: State) -> State:
    """Return what the optimizer sees of a state: it begins with an empty one."""
    return {key: value for key, value in state.items() if key != MASTER}


def _step_without_hooks(optimizer: torch.optim.Optimizer) -> None:
    step: Any = type(optimizer).step
    getattr(step, "__wrapped__", step)(optimizer)


def _step_and_call_hooks(optimizer: torch.optim.Optimizer, work: Sequence[_PieceWork]) -> None:
    """Step; the hooks see the new weights, also those that are rounded from masters."""
    handle = before_other_hooks(optimizer, lambda *_: _round_masters(optimizer, work))
    try:
        optimizer.step()
    finally:
        handle.remove()


def _round_masters(optimizer: torch.optim.Optimizer, work: Sequence[_PieceWork]) -> None:
    for each in work:
        if each.stepped is not each.values and each.stepped in optimizer.state:
            each.values.copy_(each.stepped)

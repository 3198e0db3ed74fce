"""What one step sums: weighted gradients, running statistics and the loss, in flat buckets.

A bucket holds gradients of one element type. Buckets follow the parameters backwards, because the
backward pass computes the last layers first. So the first buckets are full, and can be summed,
while the pass goes on. The layout depends on the parameters alone: it is the same on all chips and
in all generations. The last bucket is summed when the step ends, and also holds:

- by how much the step changed the module's buffers, such as running means and counters. After the
  sum every chip has the same mean change over all samples. What no chip changes keeps its bits, so
  a mask may hold infinities;
- which parameters got a gradient;
- which buckets must be summed again, because their gradients changed after their sum began;
- the loss, the weight, whether to divide by the sum of the weights, whether to stop, and the norm
  to clip to: a chip without samples, whose loop does not run, learns these from the others;
- what a job has to tell of each chip, such as how long it computed: a number for each.
"""

from collections.abc import Container, Mapping
from typing import Any

import torch
from numpy.typing import NDArray

from meshmend.errors import InputError
from meshmend.planning.plan_request import SumSizes
from meshmend.train.core.step_sums import BUFFER
from meshmend.train.state.digest import hash_bytes
from meshmend.train.state.state_tree import Bytes
from meshmend.train.torch.buckets import bucket_layout, bucket_of, trained_parameters

# The loss, the weight, the weight again if the sums are to be divided by it, the stop, the norm to
# clip to, and whether there is one.
_TAIL = 6
_BUFFERS, _LOSS = "the buffers", "the loss"  # beside the names of parameters


class Gradients:
    """The buckets of a module; moves its gradients into them and back.

    A bucket holds up to `bucket_bytes`; without that number, `bucket_layout` has the rule.
    The job has `n_notes` numbers of its own.
    """

    def __init__(
        self, model: torch.nn.Module, bucket_bytes: int | None = None, *, n_notes: int = 0
    ) -> None:
        self._names = trained_parameters(model)
        self._parameters = list(self._names)
        self._frozen = {
            parameter: name
            for name, parameter in model.named_parameters()
            if parameter not in self._names
        }
        self._buffers = _buffers_of(model)
        self._held = [
            (path, each._buffers, _present_in(each._buffers))
            for path, each in model.named_modules()
        ]
        self.remember()
        self._bad_buffers: list[str] = []  # whose change on this chip is not finite
        self._has_trained = False  # whether a step has had a gradient, on any chip
        # A loss and running statistics of float64 keep their digits.
        types = {each.dtype for each in self._parameters} | {each.dtype for each in self._buffers}
        last_type = torch.float64 if torch.float64 in types else torch.float32
        layout = bucket_layout(self._parameters, bucket_bytes, last=last_type)
        n_changes = [each.n_elements for each in self._buffers]
        counts = [sum(n_changes), len(self._parameters), len(layout), *[1] * _TAIL, n_notes]
        extras = [*[0] * (len(layout) - 1), sum(counts)]
        self.buckets = [
            bucket_of(dtype, {each: self._names[each] for each in members}, extra)
            for (dtype, members), extra in zip(layout, extras, strict=True)
        ]
        last = self.buckets[-1].flat
        self._tail = last[len(last) - sum(counts) :]
        self._changes, self._used, self._again, *rest = torch.split(self._tail, counts)
        self._changes_of = torch.split(self._changes, n_changes)
        self._loss, self._weight, self._divisor, self._stop, *self._clip, notes = rest
        # The numbers that are the job's own; it fills them when all else is gathered.
        self.notes: NDArray[Any] = notes.numpy()
        self._own_weight: float | None = None  # in the step in flight; None without samples
        # Of each bucket the number of elements and the type, and its memory.
        self.sizes: SumSizes = [(each.flat.numel(), each.dtype) for each in self.buckets]
        self.payloads: list[Bytes] = [each.flat.view(torch.uint8).numpy() for each in self.buckets]

    def payload_hashes(self, number: int) -> dict[str, int]:
        """Return a hash of each gradient of a bucket, without what says how it was summed.

        That depends on the chip: which buckets are summed again, and whether it wants to stop.
        """
        bucket = self.buckets[number]
        sizes = [parameter.numel() for parameter in bucket.parameters]
        parts = zip(bucket.parameters.values(), torch.split(bucket.elements, sizes), strict=True)
        found = {name: _hash(part) for name, part in parts}
        if number == len(self.buckets) - 1:
            found[_BUFFERS] = _hash(self._changes)
            about = torch.cat([self._used, self._loss, self._weight, self._divisor])
            found[_LOSS] = _hash(about)
        return found

    @torch.no_grad()
    def refill_changed(self) -> None:
        """Fill the buckets again whose gradients have changed since they were filled."""
        assert self._own_weight is not None, "this chip has samples"
        for bucket in self.buckets:
            if bucket.is_stale(self._own_weight):
                bucket.fill(self._own_weight)
                bucket.await_full()

    @torch.no_grad()
    def remember(self) -> None:
        """Copy the module's buffers, to find out later what a step has changed."""
        for each in self._buffers:
            each.remember()

    @torch.no_grad()
    def restore(self) -> None:
        """Reset the module's buffers to the last copy, because the step does not count."""
        for each in self._buffers:
            each.restore()

    def begin(self) -> None:
        """Begin a step: no gradient of it has come, and no sum of it has begun.

        Gradients of an earlier step go, so that none is added to them, whether it counted or not.
        What buffers are now is what the step changes: who changes them between steps, by mistake or
        by purpose, does so for this chip alone.
        """
        self.remember()
        for bucket in self.buckets:
            bucket.begin()

    @torch.no_grad()
    def take(self, index: int, scale: float) -> None:
        """Begin to fill one bucket, because its sum begins before the step ends."""
        self.buckets[index].take(scale)

    @torch.no_grad()
    def gather(
        self,
        loss: float,
        weight: float,
        *,
        normalise: bool = False,
        is_last: bool = False,
        max_norm: float | None = None,
    ) -> None:
        """Complete the buckets: this chip's gradients, its loss, and what is said about them.

        With `normalise`, `scatter` divides by the sum of the weights. Without it, the weights of
        all chips must add up to one. A chip of weight 0 adds nothing, whatever its gradients are.
        With `is_last`, all chips stop after this step. With `max_norm`, all chips clip the sums to
        this norm.

        Raises:
            InputError: a parameter that was frozen when the job was made has a gradient, or the
                model has other buffers than then.
        """
        self._refuse_thawed()
        self._refuse_new_buffers()
        self._own_weight = weight
        again = [bucket.is_stale(weight) for bucket in self.buckets]
        for bucket in self.buckets:
            if bucket.scale is None:
                bucket.fill(weight)
        self._gather_changes()
        used = [parameter.grad is not None for parameter in self._parameters]
        self._used.copy_(torch.tensor(used, dtype=torch.float32, device="cpu"))
        self._loss.fill_(loss if weight else 0.0)  # a mean over nothing is no number
        self._tail.mul_(weight)
        self._again.copy_(torch.tensor(again, dtype=torch.float32, device="cpu"))
        self._weight.fill_(weight)
        self._divisor.fill_(weight if normalise else 0.0)
        self._stop.fill_(float(is_last))
        self._clip[0].fill_(max_norm or 0.0)
        self._clip[1].fill_(float(max_norm is not None))
        for bucket in self.buckets:
            bucket.await_full()

    @torch.no_grad()
    def clear(self, *, is_last: bool = False) -> None:
        """Fill the buckets with zeros, because this chip has no samples."""
        self.begin()
        self._own_weight, self._bad_buffers = None, []
        for bucket in self.buckets:
            bucket.empty()
        self._stop.fill_(float(is_last))

    @torch.no_grad()
    def refill_stale(self) -> list[int]:
        """Fill the buckets again whose gradients changed, on any chip, after their sum began.

        Returns their numbers: all chips sum them a second time.
        """
        stale = torch.nonzero(self._again).reshape(-1).tolist()
        for index in stale:
            if self._own_weight is None:
                self.buckets[index].empty()
            else:
                self.buckets[index].fill(self._own_weight)
                self.buckets[index].await_full()
        return stale

    @property
    def is_last(self) -> bool:
        """Whether a chip said that this step is the last; known after the sum."""
        return float(self._stop) > 0

    def max_norm(self) -> float | None:
        """Return the norm that all chips clip to, or None; known after the sum."""
        total, n_chips = (float(each) for each in self._clip)
        return total / n_chips if n_chips else None

    def loss(self) -> float:
        """Return the mean loss over all samples; known after the sum."""
        divisor = float(self._divisor)
        return float(self._loss) / divisor if divisor > 0 else float(self._loss)

    def is_finite(self) -> bool:
        """Whether all summed gradients, and all changes of buffers, are finite numbers."""
        if not self.are_buffers_finite():
            return False
        for bucket in self.buckets:
            elements = bucket.elements
            # A sum is not finite if an element is not; it may overflow though all are finite.
            if not torch.isfinite(elements.sum()) and not torch.isfinite(elements).all():
                return False
        return True

    def are_buffers_finite(self) -> bool:
        """Whether all summed changes of buffers are finite numbers."""
        return bool(torch.isfinite(self._changes).all())

    def non_finite(self) -> list[str]:
        """Return what is not finite on this chip: gradients by parameter, and `buffer ...`."""
        gradients = [
            name
            for parameter, name in self._names.items()
            if parameter.grad is not None and not torch.isfinite(parameter.grad).all()
        ]
        return [*gradients, *(f"{BUFFER}{name}" for name in self._bad_buffers)]

    def check_trained(self) -> None:
        """Raise InputError if this is the first step and no chip has a gradient; after the sum."""
        if not self._has_trained and self._parameters and float(self._weight) > 0:
            if not bool((self._used > 0).any()):
                raise InputError(
                    "Job.step needs gradients, but in the first step no parameter got one on any "
                    "chip; call loss.backward() before job.step(loss), with a loss that depends on "
                    "the parameters of the model"
                )
            self._has_trained = True

    def skip_check(self) -> None:
        """Let a step be without gradients: this chip has the state of a job that has begun."""
        self._has_trained = True

    def _gather_changes(self) -> None:
        """Put the changes of buffers into the last bucket."""
        self._bad_buffers = []
        for each, changes in zip(self._buffers, self._changes_of, strict=True):
            each.take_changes(changes)
            if not torch.isfinite(changes).all():
                self._bad_buffers += each.non_finite(changes)

    def scatter(self) -> float:
        """Copy what was summed to parameters and buffers; return the mean loss over all samples."""
        loss = self.loss()
        self.give_gradients()
        self.give_statistics()
        return loss

    @torch.no_grad()
    def give_gradients(self) -> None:
        """Copy the summed gradients to the parameters; `loss` is then not known any more."""
        divisor = float(self._divisor)
        if divisor > 0:
            for bucket in self.buckets:
                bucket.flat.div_(divisor)
        used = dict(zip(self._parameters, (self._used > 0).tolist(), strict=True))
        for bucket in self.buckets:
            bucket.give(used)

    @torch.no_grad()
    def give_statistics(self) -> None:
        """Change the buffers by what the step has changed on all chips, after `give_gradients`."""
        for each, changes in zip(self._buffers, self._changes_of, strict=True):
            each.change(changes)

    def _refuse_new_buffers(self) -> None:
        """Raise InputError if the model has a buffer for which a chip that joins has no place."""
        for path, held, before in self._held:
            for name in _present_in(held) - before:
                raise InputError(
                    "Job needs a model that keeps its buffers, but "
                    f"{f'{path}.{name}' if path else name} came after the job was made; make it "
                    "in the module's __init__, or call the model once before you make the job"
                )

    def freeze(self, names: Container[str]) -> None:
        """Freeze some parameters, and no others of those that the job was made with."""
        for parameter, name in self._names.items():
            parameter.requires_grad_(name not in names)

    def _refuse_thawed(self) -> None:
        """Raise InputError if a gradient would be left out of the sums."""
        for parameter, name in self._frozen.items():
            if parameter.grad is not None:
                raise InputError(
                    f"Job cannot sum the gradient of {name}: it was frozen when the job was made; "
                    "make the job before you freeze parameters"
                )


class _Buffers:
    """The buffers of one type of a module, as one flat tensor: many small ones cost much time."""

    def __init__(self, slots: dict[str, tuple[torch.nn.Module, str]]) -> None:
        self._slots = slots  # where modules keep them, by name; a step may put another tensor there
        first = [module._buffers[key] for module, key in slots.values()]
        self._shapes = [each.shape for each in first if each is not None]
        self._sizes = [shape.numel() for shape in self._shapes]
        self.dtype = next(each.dtype for each in first if each is not None)
        # Complex numbers are not summed: what a step changes must be the same on all chips.
        self.n_elements = 0 if self.dtype.is_complex else sum(self._sizes)

    def remember(self) -> None:
        """Copy the buffers, to find out later what a step has changed."""
        self._before = self._flat()

    def restore(self) -> None:
        """Reset the buffers to the last copy."""
        self._write(self._before)

    def take_changes(self, changes: torch.Tensor) -> None:
        """Write by how much the buffers have changed since the last copy; what is equal by zero."""
        now, before = self._flat(), self._before
        if not self.n_elements:
            return
        if torch.equal(now, before):
            changes.zero_()
            return
        same = (now == before) | ((now != now) & (before != before))
        difference = now.to(torch.float64).sub(before.to(torch.float64))
        changes.copy_(difference.masked_fill_(same, 0.0))

    def change(self, changes: torch.Tensor) -> None:
        """Change the buffers of the last copy by so much; those that do not change keep their bits.

        So integers that no float64 can hold survive, and so do infinities.
        """
        if not self.n_elements:
            return
        before, changes = self._before, changes.to(self._before.device)
        if not before.is_floating_point():
            changes = changes.round()
        after = before.to(torch.float64).add(changes.to(torch.float64)).to(before.dtype)
        self._write(torch.where(changes == 0, before, after))

    def non_finite(self, changes: torch.Tensor) -> list[str]:
        """Return the names of the buffers whose changes are not all finite."""
        parts = zip(self._slots, torch.split(changes, self._sizes), strict=True)
        return [name for name, part in parts if not torch.isfinite(part).all()]

    def _present(self) -> list[torch.Tensor]:
        """Return the buffers.

        Raises:
            InputError: a module has replaced a buffer by one of another shape.
        """
        found = []
        for (name, (module, key)), shape in zip(self._slots.items(), self._shapes, strict=True):
            buffer = module._buffers.get(key)
            if buffer is None or buffer.shape != shape or buffer.dtype != self.dtype:
                raise InputError(
                    f"Job needs buffers that keep shape and type, but {name} was "
                    f"{list(shape)} of {self.dtype} and is {_shape_words(buffer)}; keep what grows "
                    "out of the buffers of the model"
                )
            found.append(buffer)
        return found

    def _flat(self) -> torch.Tensor:
        """Return a copy of all buffers in one tensor."""
        buffers = self._present()
        return torch.cat([each.reshape(-1).to(buffers[0].device) for each in buffers])

    def _write(self, flat: torch.Tensor) -> None:
        parts = torch.split(flat, self._sizes)
        for buffer, part in zip(self._present(), parts, strict=True):
            buffer.copy_(part.view(buffer.shape))


def _buffers_of(model: torch.nn.Module) -> list[_Buffers]:
    """Return the buffers of a module that a step may change, those of one type together."""
    by_type: dict[torch.dtype, dict[str, tuple[torch.nn.Module, str]]] = {}
    for name, buffer in model.named_buffers():
        path, _, key = name.rpartition(".")
        by_type.setdefault(buffer.dtype, {})[name] = model.get_submodule(path), key
    return [_Buffers(slots) for slots in by_type.values()]


def _present_in(buffers: Mapping[str, torch.Tensor | None]) -> set[str]:
    return {name for name, each in buffers.items() if each is not None}


def _hash(part: torch.Tensor) -> int:
    return hash_bytes(part.contiguous().view(torch.uint8).numpy())


def _shape_words(buffer: torch.Tensor | None) -> str:
    return "None" if buffer is None else f"{list(buffer.shape)} of {buffer.dtype}"

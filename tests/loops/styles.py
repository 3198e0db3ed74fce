"""Loops as strangers write them: the styles of the matrix, in plain PyTorch.

A style makes its parts (`make`) and does one step on a batch: `plain` as a script without meshmend
does it, which is also how it runs on a process group of meshmend; `job` as it is written for a
`Job`. The plain step on the whole batch, in one process, is the reference of all runs.

Knows neither chips nor processes nor faults.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

BATCH: Final = 12  # shares of one, two, three and four chips have the same size
N_SAMPLES: Final = 30  # so batches cross the ends of epochs
EXACT: Final = 1e-9
ROUGH: Final = 1e-3  # where a scaler or bfloat16 rounds


@dataclass
class Parts:
    """What a loop holds: `net` is what it calls, the model or its wrapper."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    also: list[Any] = field(default_factory=list)  # what else has a state of training
    scaler: torch.amp.GradScaler | None = None
    hidden: list[Any] = field(default_factory=list)  # has a state, but meshmend is not told of it
    compiled: bool = False
    ddp: Mapping[str, Any] = field(default_factory=dict)
    after_ddp: Callable[[Any], None] | None = None
    job: Mapping[str, Any] = field(default_factory=dict)
    step: int = 0
    results: list[float] = field(default_factory=list)  # what the loop found besides
    net: Any = None
    mean: Callable[[Tensor], Tensor] = lambda loss: loss  # over the shares of all chips
    after_block: Callable[[], object] = lambda: (
        None
    )  # the rest of a loop's body in an elastic group

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.optimizers[0]

    def watched(self) -> list[tuple[str, Tensor]]:
        """Return what must be that of the reference: parameters, buffers, averages."""
        modules = [self.model, *(each for each in self.also if isinstance(each, nn.Module))]
        named = [
            (f"{at}.{name}", value)
            for at, module in enumerate(modules)
            for name, value in (*module.named_parameters(), *module.named_buffers())
        ]
        rates = [group["lr"] for each in self.optimizers for group in each.param_groups]
        return [*named, ("rates", torch.tensor(rates))]


Plain = Callable[[Parts, Tensor, Tensor], Tensor]
InJob = Callable[[Any, Parts, Tensor, Tensor], Any]


@dataclass(frozen=True)
class Style:
    """One way to write a loop.

    `passes` counts the forward passes of a step: a chip is killed in the last of them. With
    `by_share` the result depends on how a batch is cut into shares, and the reference cuts it too.
    `refused` holds, for each front that refuses the loop, words of the one line that says so.
    """

    name: str
    make: Callable[[], Parts]
    plain: Plain
    job: InJob | None
    passes: int = 1
    tolerance: float = EXACT
    by_share: bool = False
    refused: Mapping[str, str] = field(default_factory=dict)
    fronts: tuple[str, ...] = ("job", "group")
    hf: Mapping[str, Any] = field(default_factory=dict)  # what the arguments of a trainer say of it


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.first(inputs)))


def samples() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(N_SAMPLES, 4, generator=generator, dtype=torch.float64)
    return inputs, torch.sin(inputs.sum(1, keepdim=True))


def seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(3)
    return build().double()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.03)


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def parts(
    build: Callable[[], nn.Module] = Net,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adam,
    **more: Any,
) -> Parts:
    model = seeded(build)
    return Parts(model, [optimizer(model)], **more)


def unsynced(net: Any) -> AbstractContextManager[None]:
    """Return DDP's `no_sync`, and nothing for a plain model."""
    return net.no_sync() if hasattr(net, "no_sync") else nullcontext()


# Steps, as a plain script and as a `Job` have them.


def zero_first(p: Parts, inputs: Tensor, labels: Tensor) -> Tensor:
    loss = mse_loss(p.net(inputs), labels)
    p.optimizer.zero_grad()
    loss.backward()
    p.optimizer.step()
    return loss


def job_zero_first(job: Any, p: Parts, inputs: Tensor, labels: Tensor) -> None:
    loss = mse_loss(p.net(inputs), labels)
    p.optimizer.zero_grad()
    loss.backward()
    job.step(loss)


def zero_last(p: Parts, inputs: Tensor, labels: Tensor) -> Tensor:
    loss = mse_loss(p.net(inputs), labels)
    loss.backward()
    p.optimizer.step()
    p.optimizer.zero_grad()
    return loss


def job_zero_last(job: Any, p: Parts, inputs: Tensor, labels: Tensor) -> None:
    loss = mse_loss(p.net(inputs), labels)
    loss.backward()
    job.step(loss)
    p.optimizer.zero_grad()


def zero_in_place_last(p: Parts, inputs: Tensor, labels: Tensor) -> Tensor:
    loss = mse_loss(p.net(inputs), labels)
    loss.backward()
    p.optimizer.step()
    p.optimizer.zero_grad(set_to_none=False)
    return loss


def job_zero_in_place_last(job: Any, p: Parts, inputs: Tensor, labels: Tensor) -> None:
    loss = mse_loss(p.net(inputs), labels)
    loss.backward()
    job.step(loss)
    p.optimizer.zero_grad(set_to_none=False)


def halves(inputs: Tensor, labels: Tensor) -> list[tuple[Tensor, Tensor, float]]:
    """Return two micro-batches, each with its part of the samples."""
    return [
        (some, answers, len(some) / len(inputs))
        for some, answers in zip(inputs.chunk(2), labels.chunk(2), strict=True)
    ]


def accumulation(p: Parts, inputs: Tensor, labels: Tensor) -> Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for some, answers, part in halves(inputs, labels):
        loss = mse_loss(p.net(some), answers) * part
        loss.backward()
        total += loss.detach()
    p.optimizer.step()
    p.optimizer.zero_grad()
    return total


def job_accumulation(job: Any, p: Parts, inputs: Tensor, labels: Tensor) -> None:
    total = torch.zeros((), dtype=torch.float64)
    for some, answers, part in halves(inputs, labels):
        loss = mse_loss(p.net(some), answers) * part
        loss.backward()
        total += loss.detach()
    job.step(total)
    p.optimizer.zero_grad()


def no_sync(p: Parts, inputs: Tensor, labels: Tensor) -> Tensor:
    (some, answers, part), (others, more_answers, rest) = halves(inputs, labels)
    with unsynced(p.net):
        first = mse_loss(p.net(some), answers) * part
        first.backward()
    second = mse_loss(p.net(others), more_answers) * rest
    second.backward()
    p.optimizer.step()
    p.optimizer.zero_grad()
    return first + second


def job_accumulate(job: Any, p: Parts, inputs: Tensor, labels: Tensor) -> None:
    (some, answers, part), (others, more_answers, rest) = halves(inputs, labels)
    with job.accumulate():
        first = mse_loss(p.net(some), answers) * part
        first.backward()
    second = mse_loss(p.net(others), more_answers) * rest
    second.backward()
    job.step(first + second)
    p.optimizer.zero_grad()


def climb(model: nn.Module, rho: float = 0.05) -> list[tuple[Tensor, Tensor]]:
    """Move all weights uphill, as sharpness-aware minimization does; return the old ones."""
    norm = torch.stack([each.grad.norm() for each in model.parameters()]).norm()
    before = []
    with torch.no_grad():
        for each in model.parameters():
            before.append((each, each.detach().clone()))
            each.add_(each.grad * (rho / norm))
    return before


def sam(p: Parts, inputs: Tensor, labels: Tensor) -> Tensor:
    loss = mse_loss(p.net(inputs), labels)
    loss.backward()
    before = climb(p.model)
    p.optimizer.zero_grad()
    mse_loss(p.net(inputs), labels).backward()
    for each, old in before:
        each.data = old
    p.optimizer.step()
    p.optimizer.zero_grad()
    return loss


def job_sam(job: Any, p: Parts, inputs: Tensor, labels: Tensor) -> None:
    with job.accumulate():
        loss = mse_loss(p.net(inputs), labels)
        loss.backward()
    part = len(inputs) / BATCH
    sums = job.all_reduce([each.grad * part for each in p.model.parameters()])
    for each, total in zip(p.model.parameters(), sums, strict=True):
        each.grad = total
    before = climb(p.model)
    p.optimizer.zero_grad()
    mse_loss(p.net(inputs), labels).backward()
    for each, old in before:
        each.data = old
    job.step(loss)


def closure(p: Parts, inputs: Tensor, labels: Tensor) -> Tensor:
    losses = []

    def compute() -> Tensor:
        p.optimizer.zero_grad()
        loss = mse_loss(p.net(inputs), labels)
        loss.backward()
        losses.append(loss.detach())
        return p.mean(loss.detach().clone())  # the optimizer decides by it whether to go on

    p.optimizer.step(compute)
    return losses[0]


def scaled(p: Parts, inputs: Tensor, labels: Tensor) -> Tensor:
    assert p.scaler is not None
    loss = mse_loss(p.net(inputs), labels)
    p.scaler.scale(loss).backward()
    p.scaler.step(p.optimizer)
    p.scaler.update()
    p.optimizer.zero_grad()
    return loss


def job_scaled(job: Any, p: Parts, inputs: Tensor, labels: Tensor) -> None:
    loss = mse_loss(p.net(inputs), labels)
    p.scaler.scale(loss).backward()
    job.step(loss)
    p.optimizer.zero_grad()


def scaled_and_clipped(p: Parts, inputs: Tensor, labels: Tensor) -> Tensor:
    assert p.scaler is not None
    loss = mse_loss(p.net(inputs), labels)
    p.scaler.scale(loss).backward()
    p.scaler.unscale_(p.optimizer)
    nn.utils.clip_grad_norm_(p.model.parameters(), 0.1)
    p.scaler.step(p.optimizer)
    p.scaler.update()
    p.optimizer.zero_grad()
    return loss


def job_scaled_and_clipped(job: Any, p: Parts, inputs: Tensor, labels: Tensor) -> None:
    loss = mse_loss(p.net(inputs), labels)
    p.scaler.scale(loss).backward()
    job.clip_grad_norm(0.1)
    job.step(loss)
    p.optimizer.zero_grad()


def clip_norm(p: Parts, inputs: Tensor, labels: Tensor) -> Tensor:
    loss = mse_loss(p.net(inputs), labels)
    p.optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(p.model.parameters(), 0.1)
    p.optimizer.step()
    return loss


def job_clip_norm(job: Any, p: Parts, inputs: Tensor, labels: Tensor) -> None:
    loss = mse_loss(p.net(inputs), labels)
    p.optimizer.zero_grad()
    loss.backward()
    job.clip_grad_norm(0.1)
    job.step(loss)


def clip_value_in_hook() -> Parts:
    made = parts(optimizer=momentum)
    made.optimizer.register_step_pre_hook(
        lambda *_: nn.utils.clip_grad_value_(made.model.parameters(), 0.05)
    )
    return made


def ema_parts(*, in_hook: bool) -> Parts:
    made = parts(Net)
    average = torch.optim.swa_utils.AveragedModel(
        made.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    made.also.append(average)
    if in_hook:
        made.optimizer.register_step_post_hook(lambda *_: average.update_parameters(made.model))
    return made


def ema_after(p: Parts, inputs: Tensor, labels: Tensor) -> Tensor:
    loss = zero_last(p, inputs, labels)
    p.also[0].update_parameters(p.model)
    return loss


def job_ema_after(job: Any, p: Parts, inputs: Tensor, labels: Tensor) -> None:
    loss = mse_loss(p.net(inputs), labels)
    p.optimizer.zero_grad()
    loss.backward()
    job.step(loss)
    p.also[0].update_parameters(p.model)  # undone where the step did not count


class Branches(nn.Module):
    """One of two layers is used in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.even, self.odd = nn.Linear(4, 6), nn.Linear(6, 1), nn.Linear(6, 1)
        self.is_even = True

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        return self.even(hidden) if self.is_even else self.odd(hidden)


def branching(p: Parts, inputs: Tensor, labels: Tensor) -> Tensor:
    p.model.is_even = p.step % 2 == 0
    return zero_first(p, inputs, labels)


def job_branching(job: Any, p: Parts, inputs: Tensor, labels: Tensor) -> None:
    p.model.is_even = p.step % 2 == 0
    job_zero_first(job, p, inputs, labels)


class Checkpointed(Net):
    """Computes its first layer again in the backward pass."""

    def forward(self, inputs: Tensor) -> Tensor:
        def hidden(values: Tensor) -> Tensor:
            return torch.tanh(self.first(values))

        return self.last(checkpoint(hidden, inputs, use_reentrant=False))


def scheduled(*, told: bool, in_hook: bool = False) -> Parts:
    made = parts(Net)
    scheduler = torch.optim.lr_scheduler.StepLR(made.optimizer, 3, 0.5)
    (made.also if told else made.hidden).append(scheduler)
    if in_hook:
        made.optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return made


def seeded_alike() -> Parts:
    made = parts(Net)
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    return made


def randomly_scaled(p: Parts, inputs: Tensor, labels: Tensor) -> Tensor:
    """Scale inputs by numbers that all chips draw alike."""
    scales = torch.rand(4, dtype=torch.float64) + random.random() + np.random.rand()
    return zero_first(p, inputs * scales, labels)


def scheduled_after_block() -> Parts:
    made = parts(Net)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(made.optimizer, 0.9)
    made.also.append(scheduler)
    made.after_block = scheduler.step
    return made


def schedule_after(p: Parts, inputs: Tensor, labels: Tensor) -> Tensor:
    loss = zero_first(p, inputs, labels)
    (p.also or p.hidden)[0].step()
    return loss


def job_schedule_after(job: Any, p: Parts, inputs: Tensor, labels: Tensor) -> None:
    loss = mse_loss(p.net(inputs), labels)
    p.optimizer.zero_grad()
    loss.backward()
    job.step(loss)
    (p.also or p.hidden)[0].step()  # undone where the step did not count


def evaluated(p: Parts, inputs: Tensor, labels: Tensor) -> Tensor:
    """Evaluate before each third step."""
    if p.step % 3 == 0:
        p.model.eval()
        with torch.no_grad():
            held_out, answers = samples()
            p.results.append(mse_loss(p.net(held_out), answers).item())
        p.model.train()
    return zero_last(p, inputs, labels)


def evaluated_at_the_end(p: Parts, inputs: Tensor, labels: Tensor) -> Tensor:
    """Evaluate after each step: a chip that joins has not, and goes on with the others."""
    loss = zero_last(p, inputs, labels)
    p.model.eval()
    with torch.no_grad():
        p.net(samples()[0])
    p.model.train()
    return loss


def job_evaluated(job: Any, p: Parts, inputs: Tensor, labels: Tensor) -> None:
    loss = mse_loss(p.net(inputs), labels)
    p.optimizer.zero_grad()
    loss.backward()
    if job.step(loss) and job.step_number % 3 == 0:
        held_out = torch.utils.data.TensorDataset(*samples())
        job.evaluate(held_out, lambda batch: (p.model(batch[0]) - batch[1]).square().sum(), batch=8)


class Masked(Net):
    """Adds a causal mask, a constant buffer with -inf, before a softmax."""

    def __init__(self, *, persistent: bool = True) -> None:
        super().__init__()
        mask = torch.full((6, 6), -torch.inf).triu(1)
        self.register_buffer("mask", mask, persistent=persistent)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(inputs))
        scores = torch.softmax(hidden[:, :, None] * hidden[:, None, :] + self.mask, -1)
        return self.last((scores @ hidden[:, :, None]).squeeze(-1))


class Counting(Net):
    """Scales its output by a buffer that each forward pass in training changes."""

    def __init__(self, *, persistent: bool, reassigned: bool = False) -> None:
        super().__init__()
        self.register_buffer("seen", torch.ones(()), persistent=persistent)
        self.reassigned = reassigned

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and self.reassigned:
            self.seen = self.seen * 0.9 + 0.3
        elif self.training:
            self.seen.mul_(0.9).add_(0.3)
        return super().forward(inputs) * self.seen


class Normed(nn.Module):
    """Has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(inputs))))


class Tied(nn.Module):
    """Two layers share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.last = nn.Linear(4, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(inputs)))))


class Taught(Net):
    """Has a teacher, an average of its weights, which each forward pass in training moves."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = Net().requires_grad_(False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            for mine, own in zip(self.teacher.parameters(), self.parameters(), strict=False):
                mine.data = mine.data * 0.9 + own.data * 0.1
        return super().forward(inputs) + 0.1 * self.teacher(inputs)


@torch.no_grad()
def decay(model: nn.Module) -> None:
    for each in model.parameters():
        each.mul_(0.99)


def decayed(p: Parts, inputs: Tensor, labels: Tensor) -> Tensor:
    loss = zero_first(p, inputs, labels)
    decay(p.model)
    return loss


def job_decayed(job: Any, p: Parts, inputs: Tensor, labels: Tensor) -> None:
    job_zero_first(job, p, inputs, labels)
    decay(p.model)  # undone where the step did not count


def two_optimizers() -> Parts:
    model = seeded(Net)
    return Parts(
        model,
        [
            torch.optim.Adam(model.first.parameters(), lr=0.03),
            torch.optim.SGD(model.last.parameters(), lr=0.05, momentum=0.9),
        ],
    )


def both(p: Parts, inputs: Tensor, labels: Tensor) -> Tensor:
    loss = mse_loss(p.net(inputs), labels)
    loss.backward()
    for each in p.optimizers:
        each.step()
    for each in p.optimizers:
        each.zero_grad()
    return loss


def rate_groups(model: Any) -> torch.optim.Optimizer:
    groups = [
        {"params": model.first.parameters(), "lr": 0.01, "weight_decay": 0.1},
        {"params": model.last.parameters(), "lr": 0.05},
    ]
    return torch.optim.AdamW(groups)


def bfloat16(p: Parts, inputs: Tensor, labels: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = mse_loss(p.net(inputs.float()).float(), labels.float())
    p.optimizer.zero_grad()
    loss.backward()
    p.optimizer.step()
    return loss


def job_bfloat16(job: Any, p: Parts, inputs: Tensor, labels: Tensor) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = mse_loss(p.net(inputs.float()).float(), labels.float())
    p.optimizer.zero_grad()
    loss.backward()
    job.step(loss)


def single_precision() -> Parts:
    model = seeded(Net).float()
    return Parts(model, [torch.optim.SGD(model.parameters(), lr=0.02)])


def freezing(p: Parts, inputs: Tensor, labels: Tensor) -> Tensor:
    """Train the last layer alone from the fifth step on."""
    p.model.first.requires_grad_(p.step < 5)
    return zero_first(p, inputs, labels)


def job_freezing(job: Any, p: Parts, inputs: Tensor, labels: Tensor) -> None:
    p.model.first.requires_grad_(p.step < 5)
    job_zero_first(job, p, inputs, labels)


def python_hook(ddp: Any) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

    ddp.register_comm_hook(None, allreduce_hook)


def builtin_hook(ddp: Any) -> None:
    import torch.distributed as dist

    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)


def contrast(ours: Tensor, theirs: Tensor) -> Tensor:
    """Return a loss in which each sample is told from all others of the batch."""
    scores = ours @ theirs.T
    return (torch.logsumexp(scores, 1) - scores.diagonal()).mean()


def contrastive(p: Parts, inputs: Tensor, labels: Tensor) -> Tensor:
    loss = contrast(p.net(inputs), labels)
    p.optimizer.zero_grad()
    loss.backward()
    p.optimizer.step()
    return loss


def job_contrastive(job: Any, p: Parts, inputs: Tensor, labels: Tensor) -> None:
    """Each chip computes the whole loss, and its gradients by the outputs of its own samples."""
    mine = p.net(inputs)
    ours = job.gather(mine.detach())
    ours[job.rank] = mine
    loss = contrast(torch.cat(ours), torch.cat(job.gather(labels)))
    p.optimizer.zero_grad()
    (loss * BATCH / len(inputs)).backward()
    job.step(loss)


def job_steps_beside(job: Any, p: Parts, inputs: Tensor, labels: Tensor) -> None:
    loss = mse_loss(p.net(inputs), labels)
    p.optimizer.zero_grad()
    loss.backward()
    p.optimizer.step()
    job.step(loss)


def job_without_backward(job: Any, p: Parts, inputs: Tensor, labels: Tensor) -> None:
    job.step(mse_loss(p.net(inputs), labels))


def lbfgs(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=4)


def scaler(**more: Any) -> Any:
    return torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=3, **more)


def style(
    name: str,
    make: Callable[[], Parts] = parts,
    plain: Plain = zero_first,
    job: InJob | None = job_zero_first,
    **more: Any,
) -> Style:
    return Style(name, make, plain, job, **more)


_GROUP: Final = ("group",)
_JOB: Final = ("job",)
_ALL: Final = ("job", "group", "trainer")

STYLES: Final[Sequence[Style]] = (
    style("zero first", fronts=_ALL),
    style("zero last", plain=zero_last, job=job_zero_last),
    style("zero in place, last", plain=zero_in_place_last, job=job_zero_in_place_last),
    style(
        "accumulation",
        plain=accumulation,
        job=job_accumulation,
        passes=2,
        fronts=_ALL,
        hf={"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3},
    ),
    style("no_sync", plain=no_sync, job=job_accumulate, passes=2),
    style("SAM", plain=sam, job=job_sam, passes=2),
    style(
        "LBFGS",
        lambda: parts(optimizer=lbfgs),
        closure,
        passes=2,
        refused={"job": "Job cannot step LBFGS"},
    ),
    style("scaler", lambda: parts(scaler=scaler()), scaled, job_scaled),
    style(
        "scaler and clip",
        lambda: parts(scaler=scaler()),
        scaled_and_clipped,
        job_scaled_and_clipped,
    ),
    style(
        "clip by norm", plain=clip_norm, job=job_clip_norm, fronts=_ALL, hf={"max_grad_norm": 0.1}
    ),
    style("clip by value, in a hook", clip_value_in_hook),
    style("EMA after the step", lambda: ema_parts(in_hook=False), ema_after, job_ema_after),
    style("EMA in a hook", lambda: ema_parts(in_hook=True)),
    style("static graph", lambda: parts(ddp={"static_graph": True}), zero_last, fronts=_GROUP),
    style(
        "find unused parameters",
        lambda: parts(Branches, ddp={"find_unused_parameters": True}),
        branching,
        job_branching,
    ),
    style(
        "gradients as views of buckets",
        lambda: parts(ddp={"gradient_as_bucket_view": True}),
        zero_last,
        fronts=_GROUP,
    ),
    style("communication hook", lambda: parts(after_ddp=python_hook), fronts=_GROUP),
    style("built-in communication hook", lambda: parts(after_ddp=builtin_hook), fronts=_GROUP),
    style("activation checkpointing", lambda: parts(Checkpointed), fronts=_ALL),
    style("compile", lambda: parts(compiled=True, ddp={"bucket_cap_mb": 25})),
    style(
        "scheduler that the job knows",
        lambda: scheduled(told=True, in_hook=True),
    ),
    style(
        "scheduler after the step",
        lambda: scheduled(told=True),
        schedule_after,
        job_schedule_after,
        fronts=_ALL,
    ),
    style("random numbers", seeded_alike, randomly_scaled, fronts=_GROUP),
    style("scheduler after the block", scheduled_after_block, fronts=_GROUP),
    style(
        "scheduler that nobody told of",
        lambda: scheduled(told=False),
        schedule_after,
        job_schedule_after,
        refused={
            "job": "of its optimizer in also",
            "group": "reconfigure needs the scheduler of Adam",
        },
    ),
    style(
        "evaluation inside the loop",
        plain=evaluated,
        job=job_evaluated,
        fronts=_ALL,
        hf={"eval_strategy": "steps", "eval_steps": 3},
    ),
    style("mask of -inf", lambda: parts(Masked), fronts=_ALL),
    style(
        "mask of -inf that is not saved",
        lambda: parts(lambda: Masked(persistent=False)),
        fronts=_ALL,
    ),
    style("saved buffer", lambda: parts(lambda: Counting(persistent=True))),
    # No trainer: it cuts the larger shares of fewer chips into several passes, and these buffers
    # count passes.
    style("buffer that is not saved", lambda: parts(lambda: Counting(persistent=False))),
    style("reassigned buffer", lambda: parts(lambda: Counting(persistent=True, reassigned=True))),
    style(
        "reassigned buffer that is not saved",
        lambda: parts(lambda: Counting(persistent=False, reassigned=True)),
    ),
    style("batch norm", lambda: parts(Normed, momentum), by_share=True),
    style(
        "batch norm, and evaluation at the end",
        lambda: parts(Normed, momentum),
        evaluated_at_the_end,
        by_share=True,
        fronts=_GROUP,
    ),
    style("weight tying", lambda: parts(Tied), fronts=_ALL),
    style("teacher, and decay by hand", lambda: parts(Taught), decayed, job_decayed),
    style("two optimizers", two_optimizers, both),
    style("rates per layer", lambda: parts(optimizer=rate_groups), fronts=_ALL),
    style(
        "contrastive loss of the whole batch", plain=contrastive, job=job_contrastive, fronts=_JOB
    ),
    # No group: DDP itself raises in the step after a layer was frozen.
    style("layer frozen midway", plain=freezing, job=job_freezing, fronts=_JOB),
    style("bfloat16", single_precision, bfloat16, job_bfloat16, tolerance=ROUGH),
    style("shared optimizer", lambda: parts(job={"shard_optimizer": True}), fronts=_JOB),
    style(
        "optimizer stepped beside the job",
        job=job_steps_beside,
        fronts=_JOB,
        refused={"job": "must not call optimizer.step()"},
    ),
    style(
        "without backward",
        job=job_without_backward,
        fronts=_JOB,
        refused={"job": "Job.step needs gradients"},
    ),
)

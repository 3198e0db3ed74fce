"""A step that fails is done again as if it had never begun, in loops of many styles."""

import re
from pathlib import Path

import pytest

from commanding import Ended, meshmend_run

# A loop in float64 whose style is its first argument. It prints each step's loss over all samples,
# and the weights at the end. Chip 0,1 kills itself once at the places of the further arguments.
LOOP = """
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import meshmend.torch

STYLE, FOLDER = sys.argv[1], Path(sys.argv[2])
KILLS = sys.argv[3:]  # "place:step"
STEPS, BATCH = 14, 12
torch.set_default_dtype(torch.float64)


def dies(place):
    # Kills this chip at a place of the loop, once.
    mark = FOLDER / "killed"
    if f"{place}:{step}" in KILLS and os.environ["MESHMEND_CHIP"] == "0,1" and not mark.exists():
        mark.touch()
        os.kill(os.getpid(), signal.SIGKILL)


class Dies(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        dies("backward")
        return gradient


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(6, 8)
        self.second = torch.nn.Linear(8, 1)
        self.register_buffer("mask", torch.full((8,), 0.5), persistent=False)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        if STYLE == "buffers" and self.training:
            self.mask *= 1.05
        hidden = Dies.apply(torch.tanh(self.first(x)) * self.mask)
        if STYLE == "reassigned" and self.training:
            self.seen = self.seen + 1
            hidden = hidden * (1 + 0.1 * self.seen)
        if STYLE == "modes" and not self.training:
            hidden = hidden * 3
        return self.second(hidden)


class Sam(torch.optim.Optimizer):
    def __init__(self, parameters, base):
        super().__init__(parameters, {"rho": 0.05})
        self.base_optimizer = base(self.param_groups)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self):
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["old"] = each.data.clone()
                each.add_(each.grad, alpha=group["rho"])

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for each in group["params"]:
                each.data = self.state[each]["old"]
        self.base_optimizer.step()

    def step(self, closure=None):
        raise NotImplementedError


dist.init_process_group("meshmend")
torch.manual_seed(0)
net = Net()
ddp = DistributedDataParallel(net, static_graph=STYLE == "static")
momentum = lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
objects = [ddp]
scaler = scheduler = None
if STYLE == "lbfgs":
    optimizer = torch.optim.LBFGS(ddp.parameters(), lr=0.3, max_iter=4, history_size=3)
elif STYLE == "sam":
    optimizer = Sam(ddp.parameters(), momentum)
    objects.append(optimizer.base_optimizer)
elif STYLE == "two":
    optimizer = momentum(net.first.parameters())
    second = torch.optim.Adam(net.second.parameters(), lr=0.01)
    objects.append(second)
elif STYLE == "scheduler":
    optimizer = momentum(ddp.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.8)
    objects.append(scheduler)
elif STYLE == "scaler":
    optimizer = momentum(ddp.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    objects.append(scaler)
else:
    optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
objects.append(optimizer)
if STYLE == "fp16 hook":
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    ddp.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
if STYLE == "builtin hook":
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)

generator = torch.Generator().manual_seed(1)
inputs = torch.randn(64, BATCH, 6, generator=generator)


def batch(at):
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    mine = slice(BATCH * rank // n_ranks, BATCH * (rank + 1) // n_ranks)
    return inputs[at % 64][mine]


def mean(x):
    # So that the mean over ranks is the mean over samples.
    return (ddp(x) - x.sum(1, keepdim=True)).square().sum() * dist.get_world_size() / BATCH


def summed(loss):
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


give_up = time.monotonic() + 60
meshmend.torch.reconfigure(*objects)
for step in meshmend.torch.steps(STEPS):
    while KILLS and step == 11 and dist.get_world_size() < 4 and time.monotonic() < give_up:
        time.sleep(0.01)
        meshmend.torch.reconfigure()
    if STYLE == "drawn outside":
        shift = torch.rand(())
    with meshmend.torch.retrying():
        dies("forward")
        # Chips that were seeded alike may pick samples by random numbers.
        x = batch(int(torch.randint(64, ())) if STYLE == "caught" else step)
        if STYLE == "lbfgs":

            def closure():
                optimizer.zero_grad()
                loss = mean(x)
                loss.backward()
                closure.calls += 1
                if closure.calls == 3:
                    dies("third closure")
                return torch.tensor(summed(loss))

            closure.calls = 0
            loss = optimizer.step(closure).item()
        elif STYLE == "sam":
            first = mean(x)
            first.backward()
            optimizer.first_step()
            optimizer.zero_grad()
            dies("between")
            mean(x).backward()
            optimizer.second_step()
            optimizer.zero_grad()
            loss = summed(first)
        elif STYLE in ("no_sync", "no_sync zero last"):
            if STYLE == "no_sync":
                optimizer.zero_grad()
            with ddp.no_sync():
                first = mean(x)
                first.backward()
            dies("between")
            mean(batch(step + 7)).backward()
            optimizer.step()
            if STYLE != "no_sync":
                optimizer.zero_grad()
            loss = summed(first)
        elif STYLE == "two":
            optimizer.zero_grad()
            second.zero_grad()
            tensor = mean(x)
            tensor.backward()
            optimizer.step()
            dies("between")
            dist.barrier()
            second.step()
            loss = summed(tensor)
        elif STYLE == "scaler":
            optimizer.zero_grad()
            tensor = mean(x)
            scaler.scale(tensor).backward()
            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
            dies("between")
            loss = summed(tensor)
            scaler.step(optimizer)
            scaler.update()
        elif STYLE == "modes":
            tensor = mean(x)
            tensor.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            ddp.eval()
            with torch.no_grad():
                mean(batch(step + 1))
            dies("between")
            loss = summed(tensor)
            ddp.train()
        else:
            if STYLE == "drawn outside":
                x = x + shift
            tensor = mean(x)
            try:
                tensor.backward()
            except RuntimeError:  # as a loop does that goes on when memory is short
                if STYLE != "caught":
                    raise
            dies("update")
            optimizer.step()
            optimizer.zero_grad(set_to_none=STYLE != "zero values")
            dies("tail")
            loss = summed(tensor)
    print(f"at {step} {loss!r} on {dist.get_world_size()}") if dist.get_rank() == 0 else None
    if scheduler is not None:
        scheduler.step()
if dist.get_rank() == 0:
    weights = torch.cat([each.detach().flatten() for each in net.parameters()])
    print("weights", " ".join(repr(each) for each in weights.tolist()))
"""


def losses(ended: Ended) -> dict[int, float]:
    """Return the loss of each step; of one that was done again, that of the last time."""
    found = re.findall(r"at (\d+) (\S+) on", ended.stdout)
    return {int(step): float(loss) for step, loss in found}


def weights(ended: Ended) -> list[float]:
    (line,) = re.findall(r"weights (.*)", ended.stdout)
    return [float(each) for each in line.split()]


def run(folder: Path, style: str, *options: str, mesh: str, dies_at: str = "") -> Ended:
    script = folder / "loop.py"
    script.write_text(LOOP)
    places = [dies_at] if dies_at else []
    return meshmend_run("--elastic", "--mesh", mesh, *options, script, style, str(folder), *places)


STYLES = [
    ("caught", "backward", 1e-9),
    ("zero last", "backward", 1e-9),
    ("zero values", "update", 1e-9),
    ("zero last", "tail", 1e-9),
    ("lbfgs", "third closure", 1e-9),
    ("sam", "between", 1e-9),
    ("no_sync", "between", 1e-9),
    ("no_sync zero last", "between", 1e-9),
    ("two", "between", 1e-9),
    ("scaler", "between", 1e-9),
    ("scheduler", "tail", 1e-9),
    ("modes", "between", 1e-9),
    ("reassigned", "update", 1e-9),
    ("buffers", "update", 1e-9),
    ("static", "backward", 1e-9),
    ("fp16 hook", "update", 1e-3),
    ("builtin hook", "update", 1e-3),
]
IN_EVERY_RUN = {"caught backward", "sam between"}


@pytest.mark.parametrize(
    ("style", "place", "tolerance"),
    [
        pytest.param(
            *each, marks=[] if f"{each[0]} {each[1]}" in IN_EVERY_RUN else [pytest.mark.slow]
        )
        for each in STYLES
    ],
)
def test_a_failed_step_leaves_no_trace(
    tmp_path: Path, style: str, place: str, tolerance: float
) -> None:
    """Chip 0,1 dies at a place of step 5 and comes back at 9; no number changes."""
    usual = run(tmp_path, style, mesh="1x1")
    struck = run(
        *(tmp_path, style, "--inject", "repair 0,1 at 9"), mesh="2x2", dies_at=f"{place}:5"
    )

    assert (usual.returncode, struck.returncode) == (0, 0), usual.stderr + struck.stderr
    assert set(re.findall(r"on (\d)$", struck.stdout, re.M)) == {"3", "4"}
    assert "replicas equal bit for bit" in struck.stderr
    assert losses(struck) == pytest.approx(losses(usual), abs=tolerance)
    assert weights(struck) == pytest.approx(weights(usual), abs=tolerance)


BEFORE = """
import os, torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.nn.parallel import DistributedDataParallel
import meshmend.torch

dist.init_process_group("meshmend")
ddp = DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
other = torch.optim.SGD(ddp.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
"""

AFTER = """
meshmend.torch.reconfigure(ddp, optimizer)
for step in meshmend.torch.steps(3):
    with meshmend.torch.retrying():
        scale = scaler.scale if {scales} else (lambda loss: loss)
        scale(ddp(torch.ones(2, 2)).sum()).backward()
        {update}
    print("done", step)
"""


@pytest.mark.parametrize(
    ("first", "update", "words"),
    [
        (
            "ddp.register_comm_hook(power.PowerSGDState(None, 1), power.powerSGD_hook)",
            "optimizer.step()",
            "reconfigure needs communication hooks without a state, but powerSGD_hook has a",
        ),
        (
            "torch.optim.lr_scheduler.StepLR(optimizer, 1)",
            "optimizer.step()",
            "reconfigure needs the scheduler of SGD, but did not get it",
        ),
        ("", "other.step()", "reconfigure needs every optimizer, but a SGD that it did not get"),
        ("", "scaler.step(optimizer)", "reconfigure needs the GradScaler, but did not get it"),
        (
            "import warnings\nwarnings.simplefilter('ignore')  # PyTorch's own, of its import\n"
            "from torch.distributed.optim import ZeroRedundancyOptimizer as Zero\n"
            "optimizer = Zero(ddp.parameters(), torch.optim.SGD, lr=0.1)",
            "optimizer.step()",
            "reconfigure needs all of an optimizer's state on each chip, but a ZeroRedundancy",
        ),
        ("", "pass", "retrying needs a whole step in its block, but got gradients without"),
    ],
)
def test_a_loop_whose_steps_could_not_be_undone_is_refused_before_its_first_step_counts(
    tmp_path: Path, first: str, update: str, words: str
) -> None:
    script = tmp_path / "loop.py"
    script.write_text(BEFORE + first + AFTER.format(update=update, scales="scaler" in update))

    ended = meshmend_run("--elastic", "--mesh", "1x1", script)

    assert ended.returncode == 2
    assert words in ended.stderr
    assert "done" not in ended.stdout


def test_a_script_that_has_not_joined_the_others_does_not_train_alone(tmp_path: Path) -> None:
    """A loop that was written for torchrun would train as many models as there are chips."""
    script = tmp_path / "loop.py"
    script.write_text(
        BEFORE
        + "assert int(os.environ.get('RANK', -1)) != -1\n"
        + "ddp(torch.ones(2, 2)).sum().backward()\noptimizer.step()\n"
    )

    ended = meshmend_run("--elastic", "--mesh", "1x2", script)

    assert ended.returncode == 2
    assert "this worker has not joined them and would train alone; call" in ended.stderr


def test_the_workers_of_an_elastic_job_have_the_variables_of_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "loop.py"
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
    script.write_text(
        BEFORE
        + "meshmend.torch.reconfigure(ddp, optimizer)\nlist(meshmend.torch.steps(0))\n"
        + f"print('has', *(os.environ[name] for name in {names}))\n"
        + "master = os.environ['MASTER_ADDR'] + ':' + os.environ['MASTER_PORT']\n"
        + "assert master == os.environ['MESHMEND_COORDINATOR']\n"
    )

    # A library that has a trainer is not yet a trainer.
    ended = meshmend_run("--elastic", "--mesh", "1x3", "--preload", "transformers", script)

    assert ended.returncode == 0, ended.stderr
    found = sorted(re.findall(r"has (.*)", ended.stdout))
    assert found == ["0 3 0 3", "1 3 1 3", "2 3 2 3"]

"""A plain DDP loop on an elastic process group: chips die and come back, and the loop goes on."""

import re
from pathlib import Path

import pytest
import torch

from commanding import Ended, meshmend_run
from meshmend.membership.events import LinkSlow, read_events

EXAMPLE = Path(__file__).parents[2] / "examples" / "torch" / "elastic_ddp.py"

# Each step waits for its gate, so that faults come at a known step on any machine.
LOOP = """
import os, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import meshmend.torch

def waits(step):
    {waits}

dist.init_process_group("meshmend")
torch.manual_seed(os.getpid())  # each chip begins with other weights
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
ddp = DistributedDataParallel(model)
optimizer = torch.optim.Adam(ddp.parameters(), lr=0.01)
generator = torch.Generator().manual_seed(0)
inputs = torch.randn(64, 8, generator=generator)
{first}
meshmend.torch.reconfigure(ddp, optimizer)
{joined}
for step in meshmend.torch.steps({steps}):
    waits(step)
    with meshmend.torch.retrying():
        rank, n_ranks = dist.get_rank(), dist.get_world_size()
        mine = inputs[rank * 64 // n_ranks : (rank + 1) * 64 // n_ranks]
        optimizer.zero_grad()
        (ddp(mine) - mine.sum(1, keepdim=True)).square().mean().backward()
        {before_update}
        optimizer.step()
        {after_update}
        print(f"step {{step + 1}} on {{n_ranks}}")
    {rest}
weights = torch.cat([each.detach().flatten() for each in model.parameters()])
gathered = [torch.empty_like(weights) for _ in range(dist.get_world_size())]
dist.all_gather(gathered, weights)
assert all(torch.equal(each, weights) for each in gathered)
print(f"equal on {{dist.get_world_size()}}")
"""


def loop(folder: Path, *, steps: int = 40, **parts: str) -> Path:
    """Write the script of a DDP loop into a folder whose name has a space, and return it."""
    script = folder / "a folder" / "loop.py"
    script.parent.mkdir(exist_ok=True)
    named = {
        "waits": "pass",
        "first": "",
        "joined": "",
        "before_update": "",
        "after_update": "",
        "rest": "",
        **parts,
    }
    script.write_text(LOOP.format(steps=steps, **named))
    return script


def elastic(script: Path, *arguments: str | Path, mesh: str = "2x2") -> Ended:
    patience = ("--set", "timing.heartbeat_timeout=60")  # on a busy machine chips may be silent
    return meshmend_run("--elastic", "--mesh", mesh, *patience, *arguments, script)


def sizes_at_the_end(ended: Ended) -> list[int]:
    return [int(text) for text in re.findall(r"equal on (\d+)", ended.stdout)]


def test_the_example_goes_on_after_a_kill_and_takes_the_chip_back() -> None:
    usual = meshmend_run("--elastic", "--mesh", "2x2", EXAMPLE)
    struck = meshmend_run(
        *("--elastic", "--mesh", "2x2", "--inject", "kill 0,1 at 10"),
        *("--inject", "repair 0,1 at 20", EXAMPLE, "--steps", "60"),
    )

    assert (usual.returncode, struck.returncode) == (0, 0), usual.stderr + struck.stderr
    assert "60 steps; samples not counted; replicas equal bit for bit" in struck.stderr
    found = {
        run: {
            int(step): float(loss)
            for step, loss in re.findall(r"step (\d+) loss (\S+) on", run.stdout)
        }
        for run in (usual, struck)
    }
    assert set(re.findall(r"on (\d) chips", struck.stdout)) >= {"3", "4"}
    both = found[usual].keys() & found[struck].keys()
    assert len(both) > 50
    assert all(found[usual][at] == pytest.approx(found[struck][at], abs=1e-4) for at in both)


@pytest.mark.slow
def test_a_chip_killed_at_any_moment_of_a_step_costs_no_bit(tmp_path: Path) -> None:
    inject = ["kill 0,1 at 8 in forward", "repair 0,1 at 12", "kill 1,0 at 20 in update"]
    script = loop(tmp_path, waits="time.sleep(0.02)")

    ended = elastic(script, *(word for fault in inject for word in ("--inject", fault)))

    assert ended.returncode == 0, ended.stderr
    assert "40 steps; samples not counted; replicas equal bit for bit" in ended.stderr
    assert len(set(sizes_at_the_end(ended))) == 1


@pytest.mark.slow
def test_a_chip_that_dies_between_update_and_the_end_of_a_step_leaves_no_step_undone_or_done_twice(
    tmp_path: Path,
) -> None:
    # All survivors have stepped when the sum after it fails, so the step counts on all of them.
    dies = "if step == 10 and os.environ['MESHMEND_CHIP'] == '1,1': os._exit(9)"
    script = loop(tmp_path, after_update=f"{dies}\n        dist.barrier()", steps=20)

    ended = elastic(script)

    assert ended.returncode == 0, ended.stderr
    assert "20 steps; samples not counted; replicas equal bit for bit" in ended.stderr
    assert sizes_at_the_end(ended) == [3, 3, 3]


def test_one_chip_alone_goes_on_and_a_second_joins_it(tmp_path: Path) -> None:
    script = loop(tmp_path, waits="time.sleep(0.02)", steps=60)

    ended = elastic(
        script, "--inject", "kill 0,0 at 10", "--inject", "repair 0,0 at 20", mesh="1x2"
    )

    assert ended.returncode == 0, ended.stderr
    assert {"step 15 on 1"} <= set(re.findall(r"step 15 on \d", ended.stdout))
    assert "replicas equal bit for bit" in ended.stderr


def test_a_chip_that_joins_late_keeps_the_state_of_the_others_whatever_its_script_begins_with(
    tmp_path: Path,
) -> None:
    """All chips read a checkpoint after `reconfigure`, as some scripts do."""
    script = loop(
        tmp_path,
        joined="for each in ddp.parameters(): each.data.fill_(0.5)\n"
        "for group in optimizer.param_groups: group['lr'] = 0.02",
        waits="while step == 9 and dist.get_world_size() < 2:\n"
        "        time.sleep(0.01)\n"
        "        meshmend.torch.reconfigure()",
        steps=12,
    )

    ended = elastic(script, "--inject", "kill 0,1 at 4", "--inject", "repair 0,1 at 6", mesh="1x2")

    assert ended.returncode == 0, ended.stderr
    assert "12 steps; samples not counted; replicas equal bit for bit" in ended.stderr
    assert sizes_at_the_end(ended) == [2, 2]


def test_what_a_loop_changes_after_a_failed_step_is_not_passed_on_by_a_call_of_reconfigure(
    tmp_path: Path,
) -> None:
    rest = """if step == 4 and dist.get_world_size() == 1:
        for each in ddp.parameters(): each.data.add_(1)
        while dist.get_world_size() == 1:
            time.sleep(0.01)
            meshmend.torch.reconfigure()
        for each in ddp.parameters(): each.data.add_(1)"""
    script = loop(tmp_path, rest=rest, steps=8)

    ended = elastic(script, "--inject", "kill 0,1 at 4", "--inject", "repair 0,1 at 4", mesh="1x2")

    assert ended.returncode == 0, ended.stderr
    assert "8 steps; samples not counted; replicas equal bit for bit" in ended.stderr
    assert sizes_at_the_end(ended) == [2, 2]


def test_a_step_that_is_a_function_is_called_again_until_it_counts(tmp_path: Path) -> None:
    """One chip dies in step 5 before its sum, so the others call the function once more."""
    script = loop(tmp_path)
    before_loop, _, _ = script.read_text().partition("for step in")
    script.write_text(
        before_loop
        + """
n_calls = []

@meshmend.torch.elastic_step
def train(step):
    n_calls.append(step)
    if step == 5 and os.environ["MESHMEND_CHIP"] == "1,1":
        os._exit(9)
    optimizer.zero_grad()
    loss = ddp(inputs).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()

losses = [train(step) for step in meshmend.torch.steps(10)]
assert len(losses) == 10 and all(isinstance(each, float) for each in losses)
print("calls", n_calls, "of", dist.get_world_size())
"""
    )

    ended = elastic(script)

    assert ended.returncode == 0, ended.stderr
    assert "10 steps; samples not counted; replicas equal bit for bit" in ended.stderr
    called = "calls [0, 1, 2, 3, 4, 5, 5, 6, 7, 8, 9] of 3"
    assert ended.stdout.count(called) == 3, ended.stdout + ended.stderr


def test_collectives_under_way_fail_within_a_second_and_name_the_chip(tmp_path: Path) -> None:
    first = """
import threading
began = []
def watch(error):
    print(f"failed after {time.monotonic() - began[-1]:.2f} s: {error}")
class Watched:
    def __enter__(self): began.append(time.monotonic())
    def __exit__(self, kind, error, trace):
        if error is not None: watch(error)
"""
    body = """if step == 5:
            if os.environ["MESHMEND_CHIP"] == "1,1":
                os._exit(9)
            with Watched(): dist.all_reduce(torch.ones(1000))"""
    script = loop(tmp_path, first=first, before_update=body, steps=10)

    ended = elastic(script)

    assert ended.returncode == 0, ended.stderr
    took = [float(text) for text in re.findall(r"failed after (\S+) s", ended.stdout)]
    assert len(took) == 3
    assert "chip (1, 1)" in ended.stdout
    assert max(took) < 30  # half a second on a quiet machine; a silent chip is missed after 60 s


@pytest.mark.slow
@pytest.mark.parametrize("after_ms", [0, 5, 20])
def test_a_chip_that_dies_while_the_others_make_a_group_with_it_is_noticed_at_once(
    tmp_path: Path, after_ms: int
) -> None:
    first = f"""
import signal, threading
import meshmend.train.torch.group_meeting as member
init_group = member.init_group
def dying(settings, store, rank):
    if settings.mesh.n_live == 3 and os.environ["MESHMEND_CHIP"] == "1,0":
        if {after_ms} == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Timer({after_ms} / 1000, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return init_group(settings, store, rank)
member.init_group = dying
"""
    dies = "if step == 5 and os.environ['MESHMEND_CHIP'] == '1,1': os._exit(9)"
    script = loop(tmp_path, first=first, before_update=dies, steps=10)

    ended = elastic(script)

    assert ended.returncode == 0, ended.stderr
    assert sizes_at_the_end(ended) == [2, 2]
    assert "replicas equal bit for bit" in ended.stderr


@pytest.mark.slow
def test_a_link_that_breaks_between_two_living_chips_is_planned_around(tmp_path: Path) -> None:
    breaks = """if step == 5 and n_ranks == 4 and os.environ["MESHMEND_CHIP"] == "0,0":
            if not Path("broken").exists():
                Path("broken").touch()
                connections = dist.group.WORLD._transport._transport
                connections.sever(min(connections._sockets))"""
    body = f"os.chdir({str(tmp_path)!r})\n        {breaks}"
    # A sum of this size uses that link; a short one may go over the other three.
    sums = "dist.all_reduce(torch.ones(1 << 18))"
    script = loop(tmp_path, before_update=f"{body}\n        {sums}", steps=10)

    ended = elastic(script)

    assert ended.returncode == 0, ended.stderr
    assert "link:0,0-" in ended.stderr
    assert sizes_at_the_end(ended) == [4, 4, 4, 4]


BUILT = """
import os
from pathlib import Path
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import meshmend.torch

def build():
    mesh = init_device_mesh("cpu", ({shape}), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)

inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0))
meshmend.torch.reconfigure(build=build)
for step in meshmend.torch.steps(20):
    with meshmend.torch.retrying() as (model, optimizer):
        if step == 8 and os.environ["MESHMEND_CHIP"] == "1,1":
            os._exit(9)
        rank, n_ranks = dist.get_rank(), dist.get_world_size()
        mine = inputs[rank * 64 // n_ranks : (rank + 1) * 64 // n_ranks]
        optimizer.zero_grad()
        (model(mine) - mine.sum(1, keepdim=True)).square().mean().backward()
        optimizer.step()
        if step in (4, 12):
            dcp.save(get_model_state_dict(model), checkpoint_id=Path({folder!r}) / str(step))
restored = get_model_state_dict(model)
before = {{name: value.to_local().clone() for name, value in restored.items()}}
for step in (4, 12):
    dcp.load(restored, checkpoint_id=Path({folder!r}) / str(step))
    is_same = torch.equal(restored["0.weight"].to_local(), before["0.weight"])
    print("loaded", step, "changed", not is_same)
"""


@pytest.mark.slow
def test_fsdp2_replicated_over_the_chips_and_distributed_checkpoints_work_before_and_after(
    tmp_path: Path,
) -> None:
    script = tmp_path / "built.py"
    script.write_text(BUILT.format(folder=str(tmp_path), shape="dist.get_world_size(), 1"))

    ended = elastic(script)

    assert ended.returncode == 0, ended.stderr
    assert "20 steps; samples not counted; replicas equal bit for bit" in ended.stderr
    assert ended.stdout.count("loaded 4 changed True") == 3
    assert ended.stdout.count("loaded 12 changed True") == 3


CATCHES = """
import os
import torch
import torch.distributed as dist
import meshmend.torch

dist.init_process_group("meshmend")
model = torch.nn.Linear(1, 1, bias=False)
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
meshmend.torch.reconfigure(model, optimizer)
for step in meshmend.torch.steps(8):
    with meshmend.torch.retrying():
        if step == 4 and os.environ["MESHMEND_CHIP"] == "0,1":
            os._exit(9)
        total = torch.ones(1, 1)
        try:
            dist.all_reduce(total)
        except RuntimeError:
            total *= 5
        model.weight.grad = total / dist.get_world_size()
        optimizer.step()
print("weight", model.weight.item(), flush=True)
"""


def test_a_step_whose_sum_failed_does_not_count_though_the_loop_caught_the_error(
    tmp_path: Path,
) -> None:
    script = tmp_path / "catches.py"
    script.write_text(CATCHES)

    ended = elastic(script, mesh="1x2")

    assert ended.returncode == 0, ended.stderr
    assert "[0,0] weight -8.0\n" in ended.stdout


DRAWS = """
import time
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import meshmend.torch

def build():
    ddp = DistributedDataParallel(torch.nn.Linear(2, 1))
    return ddp, torch.optim.SGD(ddp.parameters(), lr=0.1)

dist.init_process_group("meshmend")
torch.manual_seed(0)
meshmend.torch.reconfigure(build=build)
for step in meshmend.torch.steps(12):
    while step == 9 and dist.get_world_size() < 2:
        time.sleep(0.01)
        meshmend.torch.reconfigure()
    with meshmend.torch.retrying() as (ddp, optimizer):
        picked = torch.rand(2)
        optimizer.zero_grad()
        ddp(picked).sum().backward()
        optimizer.step()
        print(f"step {step} picks {picked.sum().item()!r}", flush=True)
"""


def test_objects_that_are_made_anew_leave_the_random_numbers_of_the_steps_alone(
    tmp_path: Path,
) -> None:
    script = tmp_path / "draws.py"
    script.write_text(DRAWS)

    ended = elastic(script, "--inject", "kill 0,1 at 4", "--inject", "repair 0,1 at 6", mesh="1x2")

    assert ended.returncode == 0, ended.stderr
    torch.manual_seed(0)
    torch.nn.Linear(2, 1)
    expected = [torch.rand(2).sum().item() for _ in range(12)]
    found = re.findall(r"\[(0,\d)\] step (\d+) picks (\S+)", ended.stdout)
    assert [(step, value) for _, step, value in found if float(value) != expected[int(step)]] == []
    assert ("0,1", "11") in {(chip, step) for chip, step, _ in found}


@pytest.mark.slow
def test_a_model_that_is_sharded_over_chips_is_refused_in_one_line(tmp_path: Path) -> None:
    script = tmp_path / "built.py"
    script.write_text(BUILT.format(folder=str(tmp_path), shape="1, dist.get_world_size()"))

    ended = elastic(script)

    assert ended.returncode == 2
    assert "reconfigure needs all of the state on each chip" in ended.stderr


def test_an_error_of_the_script_itself_is_not_retried(tmp_path: Path) -> None:
    ended = elastic(loop(tmp_path, before_update="raise ValueError('mine')"), mesh="1x2")

    assert ended.returncode == 1
    assert "ValueError: mine" in ended.stderr


WRONG = """
import pathlib, time, torch, meshmend.torch
model = torch.nn.Linear(1, 1)

def until_told():
    while '"event":"step"' not in pathlib.Path({events!r}).read_text():
        time.sleep(0.02)

{lines}
"""


@pytest.mark.parametrize(
    ("code", "lines", "words"),
    [
        (2, "next(meshmend.torch.steps(3))", "call reconfigure before"),
        (2, "meshmend.torch.reconfigure(3)", "with state_dict and load_state_dict, but got"),
        (2, "meshmend.torch.reconfigure(model, build=list)", "got both"),
        (
            1,  # the job was over before
            "import torch.distributed as dist\n"
            "dist.init_process_group('meshmend')\n"
            "meshmend.torch.reconfigure(model)\n"
            "list(meshmend.torch.steps(0))\n"
            "list(meshmend.torch.steps(2))",
            "the job has ended with its first loop over steps; give that loop all steps",
        ),
        (
            2,
            "import torch.distributed as dist\n"
            "dist.init_process_group('meshmend')\n"
            "meshmend.torch.reconfigure(model)\n"
            "for step in meshmend.torch.steps(2):\n"
            "    dist.all_reduce(torch.ones(2))",
            "steps needs a block for each step, or the same step comes for ever",
        ),
        (
            1,  # the first block has counted
            "import torch.distributed as dist\n"
            "dist.init_process_group('meshmend')\n"
            "meshmend.torch.reconfigure(model)\n"
            "for step in meshmend.torch.steps(4):\n"
            "    for part in range(2):\n"
            "        with meshmend.torch.retrying():\n"
            "            pass\n"
            "        until_told()",
            "retrying needs a step of its own, because each block counts as one",
        ),
        (
            2,
            "import torch.distributed as dist\n"
            "dist.init_process_group('meshmend')\n"
            "meshmend.torch.reconfigure(model)\n"
            "meshmend.torch.reconfigure(model)\n"
            "meshmend.torch.reconfigure(model, torch.optim.SGD(model.parameters(), lr=0.1))",
            "reconfigure needs all objects in its first call",
        ),
        (
            2,
            "import torch.distributed as dist\n"
            "dist.init_process_group('meshmend')\n"
            "meshmend.torch.reconfigure(build=lambda: (model,))\n"
            "meshmend.torch.reconfigure(build=lambda: (model,))",
            "reconfigure needs all objects in its first call",
        ),
        (
            2,
            "meshmend.torch.reconfigure(torch.optim.SGD(model.parameters(), lr=0.1))\n"
            "for step in meshmend.torch.steps(2):\n"
            "    with meshmend.torch.retrying():\n"
            "        pass",
            "but did not get a parameter of shape [1, 1]: a chip that joins would have another one",
        ),
        *(
            (
                2,
                "import torch.distributed as dist\n"
                "dist.init_process_group('meshmend')\n"
                "whole = torch.nn.parallel.DistributedDataParallel(model)\n"
                f"meshmend.torch.reconfigure({given})\n"
                "for step in meshmend.torch.steps(2):\n"
                "    with meshmend.torch.retrying():\n"
                "        whole(torch.ones(1, 1)).sum().backward()",
                f"needs the DistributedDataParallel around the model, but got {got}",
            )
            for given, got in (("model", "the Linear inside of it"), ("", "nothing"))
        ),
    ],
)
def test_misuse_is_refused_in_one_line(tmp_path: Path, code: int, lines: str, words: str) -> None:
    script, run = tmp_path / "wrong.py", tmp_path / "run"
    script.write_text(WRONG.format(events=str(run / "events.jsonl"), lines=lines))

    ended = elastic(script, "--run-dir", run, mesh="1x1")

    assert ended.returncode == code, ended.stderr
    assert words in ended.stderr


def test_a_loop_that_is_left_by_a_break_is_told(tmp_path: Path) -> None:
    script = loop(tmp_path, after_update="if step == 3: break", steps=9)

    ended = elastic(script, "--set", "timing.holder_timeout=1", mesh="1x1")

    assert ended.returncode == 1
    assert "chip (0, 0) has left its loop after step 4 of 9, by a break" in ended.stderr


def test_a_later_call_with_the_objects_of_the_first_changes_nothing(tmp_path: Path) -> None:
    script = loop(tmp_path, waits="meshmend.torch.reconfigure(ddp, optimizer)", steps=9)

    ended = elastic(script, mesh="1x1")

    assert ended.returncode == 0, ended.stderr
    assert "9 steps; samples not counted; replicas equal bit for bit" in ended.stderr


def test_links_are_not_watched_by_chips_that_hold_a_part_of_the_model(tmp_path: Path) -> None:
    script = tmp_path / "wrong.py"
    script.write_text("import meshmend.torch as torch\ntorch.reconfigure(build=list, tile='1x1')\n")

    ended = elastic(script, "--set", "sums.watch_links=true", mesh="1x1")

    assert ended.returncode == 2
    assert "needs a job whose chips hold the whole model, but got tiles of 1x1" in ended.stderr


# The kernel counts as if the link between chips 0,0 and 0,1 took four times as long. Only the group
# has traffic: what the other connections count is too little for a look, and enough for a probe.
COUNTED = """
import itertools
from meshmend.transport.sockets import SocketTransport

def counted(self):
    self.looks = getattr(self, "looks", itertools.count(1))
    n_bytes = next(self.looks) * (10**9 if self.runs_group else 1000)
    return {
        peer: (n_bytes, n_bytes * (4 if {self.rank, peer} == {0, 1} else 1))
        for peer in range(4)
    }

make = SocketTransport.__init__

def made(self, *arguments, reports_failures=False, **named):
    self.runs_group = reports_failures
    make(self, *arguments, reports_failures=reports_failures, **named)

SocketTransport.__init__, SocketTransport.work_done = made, counted
"""
# Steps are so long that looks are at most ten steps apart. Three chips wait for the fourth.
WATCHES = """
    from meshmend.train.torch.elastic_group import elastic_group
    group = elastic_group()
    watch, slow = group._joined.watch, dist.group.WORLD._catalogue._mesh.slow
    planned = " ".join(map(str, sorted(slow))) or "none"
    known, n_ranks = watch.found(group._links) or "none", dist.get_world_size()
    print(f"{os.environ['MESHMEND_CHIP']} before {step} of {n_ranks}: {known}, {planned}")
    time.sleep(0.05)
    while step >= 70 and n_ranks == 3 and not group._is_outdated():
        time.sleep(0.01)
"""


def test_the_group_finds_a_slow_link_by_its_own_traffic_and_a_newcomer_knows_it(
    tmp_path: Path,
) -> None:
    script = loop(tmp_path, waits=WATCHES.strip(), first=COUNTED, steps=80)
    run_dir = tmp_path / "run"

    ended = elastic(
        script,
        *("--set", "sums.watch_links=true", "--run-dir", str(run_dir)),
        *("--inject", "kill 1,1 at 60", "--inject", "repair 1,1 at 62"),
    )

    assert ended.returncode == 0, ended.stderr
    assert "80 steps; samples not counted; replicas equal bit for bit" in ended.stderr
    lines = (run_dir / "events.jsonl").read_text().splitlines(keepends=True)
    found = [each.event for each in read_events(lines) if isinstance(each.event, LinkSlow)]
    assert [(event.link, event.speed) for event in found] == [("link:0,0-0,1", 0.25)]
    seen = re.findall(r"(\d,\d) before (\d+) of \d: (\S+), (\S+)", ended.stdout)
    found_at = min(int(step) for _, step, known, _ in seen if known != "none")
    for chip, step, *what in seen:
        speed = "link:0,0-0,1=0.25" if int(step) >= found_at else "none"
        assert what == [speed, speed], f"chip {chip} at step {step}"
    assert {chip for chip, step, *_ in seen if int(step) >= 70} == {"0,0", "0,1", "1,0", "1,1"}

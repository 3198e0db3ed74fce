"""`meshmend run --elastic`, and the two loops of examples/train."""

import difflib
import os
import re
import runpy
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from commanding import commands
from packages import needs
from waiting import HANG_S, until

pytest.importorskip("torch")

import torch
from torch.utils import data

from meshmend.cli.main import run_line
from meshmend.launch import elastic
from meshmend.train import Job, Saving
from meshmend.train.core.worker_environment import worker_environment
from meshmend.train.data.audit import audit
from meshmend.train.data.samples import Order
from meshmend.train.state.checkpoint import complete_steps

pytestmark = needs("sklearn")

EXAMPLES = Path(__file__).parents[2] / "examples" / "train"
MENDED, PLAIN = EXAMPLES / "mended_loop.py", EXAMPLES / "plain_loop.py"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process trains alone, whatever the environment says."""
    for name in [name for name in os.environ if name.startswith("MESHMEND_")]:
        monkeypatch.delenv(name)
    worker_environment.cache_clear()
    yield
    worker_environment.cache_clear()


def losses_in(text: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss ([\d.]+)", text)]


def in_the_order_of_a_job(dataset: Any, batch: int, sampler: Any) -> Iterator[Any]:
    """Yield batches as a DataLoader does, but of the samples that a job takes."""
    order = Order(len(dataset))
    for start in range(0, sampler.num_samples, batch):
        places = order.samples(start, start + batch).tolist()
        yield data.default_collate([dataset[place] for place in places])


@pytest.fixture
def plain_losses(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> list[float]:
    """The losses of the plain loop on the samples that the mended one takes."""
    monkeypatch.setattr(data, "DataLoader", in_the_order_of_a_job)
    runpy.run_path(str(PLAIN), run_name="__main__")
    return losses_in(capsys.readouterr().out)


def test_five_lines_mend_a_plain_loop() -> None:
    def code(path: Path) -> list[str]:
        text = path.read_text().partition('"""\n\n')[2]  # after the docstring
        return [line for line in text.splitlines() if line.strip()]

    matcher = difflib.SequenceMatcher(None, code(PLAIN), code(MENDED), autojunk=False)
    changed = [
        max(end - start, end_after - start_after)
        for kind, start, end, start_after, end_after in matcher.get_opcodes()
        if kind != "equal"
    ]
    assert 0 < sum(changed) <= 5


def test_the_mended_loop_alone_has_the_losses_of_the_plain_one(
    plain_losses: list[float], alone: None, capsys: pytest.CaptureFixture[str]
) -> None:
    runpy.run_path(str(MENDED), run_name="__main__")

    mended = losses_in(capsys.readouterr().out)
    assert len(mended) == 100
    assert mended == pytest.approx(plain_losses, rel=1e-4, abs=1e-5)
    assert mended[-1] < mended[0] / 2


def train_with_hooks(steps: int, folder: Path, *, resume: Path | None = None) -> tuple[float, ...]:
    """Train with clipping and a scheduler as the manual says; return loss and learning rate."""
    torch.manual_seed(0)
    inputs = torch.randn(100, 8)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)

    def clip(optimizer: object, args: object, kwargs: object) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)

    optimizer.register_step_pre_hook(clip)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    job = Job(
        model,
        optimizer,
        data.TensorDataset(inputs, inputs[:, :1]),
        batch=16,
        steps=steps,
        also=[scheduler],
        saving=Saving(folder, every=5),
        resume=resume,
    )
    for features, labels in job:
        loss = torch.nn.functional.mse_loss(model(features), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's stubs
        job.step(loss)
    assert job.loss is not None
    return job.loss, optimizer.param_groups[0]["lr"]


def test_a_scheduler_in_a_hook_is_where_it_was_after_resuming(alone: None, tmp_path: Path) -> None:
    train_with_hooks(5, tmp_path / "half")

    resumed = train_with_hooks(10, tmp_path / "half", resume=tmp_path / "half")
    assert resumed == train_with_hooks(10, tmp_path / "whole")


def test_four_chips_that_lose_one_and_get_it_back_have_the_losses_of_the_plain_loop(
    plain_losses: list[float], tmp_path: Path
) -> None:
    faults = ("--inject", "kill 0,1 at 20", "--inject", "repair 0,1 at 40")
    # On a busy machine the coordinator may be silent for longer than the usual two seconds.
    patience = ("--set", "timing.heartbeat_timeout=60")
    events = tmp_path / "run" / "events.jsonl"
    # Nobody gets past these steps before the chip is gone, and before it is back.
    gates = {
        30: r'"fault":"kill 0,1".*"event":"left"[^\n]*"chip":\[0,1\]',
        60: r'"fault":"repair 0,1".*"event":"arrived"[^\n]*"chip":\[0,1\]',
    }
    gate = f"{str(tmp_path)!r} + f'/{{job.step_number}}'"
    closed = f"job.step_number in {tuple(gates)} and not os.path.exists({gate})"
    wait = f"import os, time\n        while {closed}:\n            time.sleep(0.02)"
    script = tmp_path / "gated_loop.py"
    script.write_text(
        MENDED.read_text().replace("loss.backward()", f"loss.backward()\n        {wait}")
    )

    def has_come(seen: str) -> bool:
        text = events.read_text() if events.exists() else ""
        return ran.has_ended or bool(re.search(seen, text, re.DOTALL))

    with commands(tmp_path) as start:
        options = (*faults, *patience, "--run-dir", tmp_path / "run")
        ran = start("run", "run", "--elastic", "--mesh", "2x2", *options, script)
        for step, seen in gates.items():
            until(partial(has_come, seen), why=lambda: ran.err)
            (tmp_path / str(step)).touch()
        assert ran.end() == 0, ran.err

    told = {int(step): float(loss) for step, loss in re.findall(r"step (\d+) loss (\S+)", ran.out)}
    # A chip that was one step behind at a change takes the step from another, and says nothing.
    assert len(told) >= 98
    for step, loss in told.items():
        assert loss == pytest.approx(plain_losses[step - 1], rel=1e-4, abs=1e-5)
    assert all(line.startswith("[0,0] ") for line in ran.out.splitlines())
    assert re.findall(r"generation \d+: (\d) chips? from", ran.err) == ["4", "3", "4"], ran.err
    assert re.search(r"recovered from kill 0,1 at step \d+ in [\d.]+ s", ran.err)
    assert "loss" not in ran.err
    found = audit(tmp_path / "run" / "ledger")
    assert (found.steps, found.used, found.lost, found.repeated) == (100, 6400, 0, 0)
    assert found.hashed > 0
    assert not found.split
    assert "100 steps; samples: 6400 used, 0 lost, 0 repeated; replicas equal" in ran.err
    report = (tmp_path / "run" / "report.html").read_text()
    assert f"meshmend: report {tmp_path / 'run' / 'report.html'}" in ran.err
    assert "Training gated_loop.py on 2x2" in report
    assert "kill 0,1" in report


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("raise ValueError('no data')", r"failed: ValueError: no data\nTraceback"),
        ("raise ValueError('no data\\nsee the manual')", r"failed: ValueError: no data\nTraceback"),
        ("import sys; sys.exit('that is all')", r"failed: that is all\n$"),
        ("import os; os.kill(os.getpid(), 9)", r"did not finish: chip .* died: killed by SIGKILL"),
    ],
)
def test_a_script_that_fails_on_all_chips_ends_with_its_first_words(
    text: str, said: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(text)
    with commands(tmp_path) as start:
        ran = start("run", "run", "--elastic", "--mesh", "1x2", script)

        assert ran.end() == 1
        assert re.search(said, ran.err), ran.err


# A small model, and something that happens before, in or after its loop.
SCRIPT = """
import os, pathlib, shutil, sys, time, torch
from meshmend.train import Job

what, chip = sys.argv[1], os.environ["MESHMEND_CHIP"]
left = pathlib.Path(__file__).with_name("left")
def is_reaped():
    return left.exists() and not pathlib.Path("/proc", left.read_text()).exists()
if what == "early" and chip == "0,1":
    raise ValueError("no data")
inputs = torch.randn(500, 8)
dataset = torch.utils.data.TensorDataset(inputs, inputs[:, :1])
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
more = {}
if what == "nothing to resume":
    more["resume"] = pathlib.Path("no-checkpoints")
if what == "bad batch":
    more["policy"] = "grow"
if what == "bad arguments":
    sys.exit(2)
job = Job(model, optimizer, dataset, batch=16, steps=20, **more)
for inputs, labels in job:
    loss = torch.nn.functional.mse_loss(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    if what == "stuck" and chip == "0,1" and job.step_number == 5:
        time.sleep(600)
    if what == "all stuck" and job.step_number == 5:
        time.sleep(600)
    if what in ("one leaves", "one leaves, the others fail"):
        if chip == "0,1" and job.step_number == 5:
            left.write_text(str(os.getpid()))
            sys.exit(0)
        while job.step_number == 10 and not is_reaped():  # the job is not over by then
            time.sleep(0.02)
        if what == "one leaves, the others fail" and job.step_number == 10:
            raise ValueError("no more data")
    if what == "all leave" and job.step_number == 5:
        sys.exit(0)
    if what == "one is refused" and job.step_number == 5:
        if chip == "0,1":
            time.sleep(600)
        while '"event":"step"' not in (pathlib.Path(sys.argv[2]) / "events.jsonl").read_text():
            time.sleep(0.02)
        continue
    job.step(loss)
    if what == "vanish" and chip == "0,0" and job.step_number == 5:
        shutil.rmtree(sys.argv[2])
    if what == "late input error" and job.step_number == 5:
        while '"event":"step"' not in (pathlib.Path(sys.argv[2]) / "events.jsonl").read_text():
            time.sleep(0.02)
        Job(model, optimizer, dataset, batch=16, steps=20)
    plans = pathlib.Path(os.environ["MESHMEND_JOB_DIR"]) / "plans"
    while what == "plans" and not list(plans.glob("*.json")):
        time.sleep(0.02)
if what == "bad end" and job.is_leader:
    raise ValueError("no score")
if what == "late" and job.is_leader:
    time.sleep(2)
    print("evaluated", flush=True)
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def test_a_leader_is_not_ended_while_it_evaluates(
    script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "_LINGER_S", 0.2)
    with commands(tmp_path) as start:
        ran = start("run", "run", "--elastic", "--mesh", "1x2", script, "late")

        assert ran.end() == 0, ran.err
        assert ran.out == "[0,0] evaluated\n"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("one leaves, the others fail", r"chip \(0, [02]\) failed: ValueError: no more data"),
        ("all leave", r"chip \(0, [012]\) ended before the job was over: exit code 0"),
        ("bad end", r"after the last step chip \(0, 0\) failed: ValueError: no score\nTraceback"),
    ],
)
def test_a_job_that_did_not_finish_is_not_a_success(
    what: str, said: str, script: Path, tmp_path: Path
) -> None:
    with commands(tmp_path) as start:
        ran = start("run", "run", "--elastic", "--mesh", "1x2", script, what)

        assert ran.end() == 1, ran.err
        assert re.search(f"did not finish: {said}", ran.err), ran.err


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        ("nothing to resume", 2, r"chip .* failed: .*no-checkpoints.* but it has none; resume="),
        ("bad batch", 2, r"script.py, line \d+: a batch policy needs to be .* got 'grow'"),
        ("bad arguments", 2, r"chip \(0, [01]\) died: exit code 2"),
        ("late input error", 1, r"script.py, line \d+: a process can train one job"),
        ("one is refused", 1, r"script.py, line \d+: .* to call job.step once in each turn"),
    ],
)
def test_a_script_that_is_refused_ends_with_its_line_and_before_the_first_step_with_exit_code_2(
    what: str,
    code: int,
    said: str,
    script: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ends at once: no chip trains on."""
    monkeypatch.setattr(elastic, "_LINGER_S", 2 * HANG_S)
    folder = tmp_path / "run"
    with commands(tmp_path) as start:
        options = ("--mesh", "1x2", "--run-dir", folder)
        ran = start("run", "run", "--elastic", *options, script, what, folder)

        assert ran.end() == code, ran.err
        assert re.search(f"did not finish: .*{said}", ran.err), ran.err
        assert "Traceback" not in ran.err


def test_a_run_whose_folder_vanished_is_no_success_and_names_the_chips(
    script: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    with commands(tmp_path) as start:
        options = ("--mesh", "1x2", "--run-dir", folder)
        ran = start("run", "run", "--elastic", *options, script, "vanish", folder)

        assert ran.end() == 1, ran.err
        assert "meshmend: 20 steps; samples not checked" in ran.err
        assert "without a step" not in ran.err
        assert "lost" not in ran.err
        assert "no ledger tells what chip (0, 0), (0, 1) did in steps 1 to 20" in ran.err


def test_a_script_without_a_loop_over_a_job_is_told_that_it_needs_one(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('trained')")
    with commands(tmp_path) as start:
        ran = start("run", "run", "--elastic", "--mesh", "1x2", script)

        assert ran.end() == 1, ran.err
        assert "a script needs a loop over a meshmend.train.Job" in ran.err.splitlines()[-1]


def test_a_chip_that_ends_well_too_early_is_lost_and_the_others_finish(
    script: Path, tmp_path: Path
) -> None:
    with commands(tmp_path) as start:
        ran = start("run", "run", "--elastic", "--mesh", "1x2", script, "one leaves")

        assert ran.end() == 0, ran.err
        assert "chip (0, 1) ended before the job was over: exit code 0" in ran.err
        assert "20 steps; samples: 320 used, 0 lost, 0 repeated" in ran.err


def test_a_job_in_which_all_chips_stand_still_ends_and_says_where_they_are(
    script: Path, tmp_path: Path
) -> None:
    with commands(tmp_path) as start:
        options = ("--mesh", "1x2", "--set", "timing.straggler_timeout=10")
        ran = start("run", "run", "--elastic", *options, script, "all stuck")

        assert ran.end() == 1, ran.err
        place = "1x2@0,0 is in generation 1 after step 5"
        assert f"no step was finished and no chip joined or left for 10 s: {place}" in ran.err


def test_a_job_that_stands_still_before_its_first_step_ends(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import time\ntime.sleep(600)\n")
    with commands(tmp_path) as start:
        ran = start(
            "run",
            "run",
            "--elastic",
            "--mesh",
            "1x2",
            "--set",
            "timing.straggler_timeout=2",
            script,
        )

        assert ran.end() == 1, ran.err
        assert "1x2@0,0 has not connected to the coordinator" in ran.err


def test_a_chip_whose_loop_stands_still_is_left_behind(script: Path, tmp_path: Path) -> None:
    with commands(tmp_path) as start:
        options = (
            "--mesh",
            "1x2",
            "--set",
            "timing.straggler_timeout=15",
            "--run-dir",
            tmp_path / "run",
        )
        ran = start("run", "run", "--elastic", *options, script, "stuck")

        assert ran.end() == 0, ran.err
        assert re.search(r"chip \(0, 1\) turned away: its loop kept the others waiting", ran.err)
        assert re.findall(r"generation \d: (\d) chips? from step (\d+)", ran.err) == [
            ("2", "0"),
            ("1", "5"),
        ]
    found = audit(tmp_path / "run" / "ledger")
    assert (found.steps, found.used, found.lost, found.repeated) == (20, 320, 0, 0)


def test_a_chip_that_fails_before_the_first_step_is_not_waited_for_but_that_is_no_success(
    script: Path, tmp_path: Path
) -> None:
    with commands(tmp_path) as start:
        ran = start("run", "run", "--elastic", "--mesh", "1x2", script, "early")

        assert ran.end() == 1, ran.err
        assert "20 steps; samples: 320 used, 0 lost, 0 repeated" in ran.err
        assert ran.err.splitlines()[-1] == (
            "meshmend: 1 chip of this job died before the first step and never came back: chip "
            "(0, 1) failed: ValueError: no data"
        )
        assert re.search(r"chip \(0, 1\) failed: ValueError: no data", ran.err)
        assert "generation 1: 1 chip from step 0 on" in ran.err


def test_plans_for_the_loss_of_a_board_are_made_once_it_is_known_what_is_summed(
    script: Path, tmp_path: Path
) -> None:
    with commands(tmp_path, plan_ahead=True) as start:
        options = ("--mesh", "1x4", "--run-dir", tmp_path / "run")
        ran = start("run", "run", "--elastic", *options, script, "plans")

        assert ran.end() == 0, ran.err
        assert list((tmp_path / "run" / "plans").glob("*.json"))


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)]
)
def test_an_interrupted_run_leaves_no_worker(number: int, code: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import os, time\nprint(os.getpid(), flush=True)\ntime.sleep(600)\n")
    with commands(tmp_path) as start:
        ran = start("run", "run", "--elastic", "--mesh", "1x2", script)
        until(lambda: len(ran.out.splitlines()) == 2, why=lambda: ran.err)
        ran.signal(number)

        assert ran.end() == code, ran.err
        workers = [int(line.split()[-1]) for line in ran.out.splitlines()]
        assert not any(Path(f"/proc/{worker}").exists() for worker in workers)


_SAVES = """
import pathlib, sys, time
import torch
from meshmend.train import Job, Saving

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
dataset = torch.utils.data.TensorDataset(torch.ones(64, 4))
saving = Saving(pathlib.Path(sys.argv[1]), every=int(sys.argv[2]))
job = Job(model, optimizer, dataset, batch=4, steps=10**6, saving=saving, resume="auto")
for (inputs,) in job:
    loss = model(inputs).mean()
    loss.backward()
    if job.step(loss) and job.is_leader:
        print("step", job.step_number, flush=True)
    time.sleep(0.02)
"""


def test_a_run_that_is_terminated_saves_first_and_goes_on_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elastic, "_SAVE_S", HANG_S)  # on a busy machine a checkpoint takes longer
    script, folder = tmp_path / "script.py", tmp_path / "checkpoints"
    script.write_text(_SAVES)

    def run_and_terminate(number: int, after: int) -> int:
        with commands(tmp_path) as start:
            run = "run", "--elastic", "--mesh", "1x2"
            ran = start(f"after-{after}", *run, script, folder, "1000000")
            until(lambda: f"step {after + 3}" in ran.out, why=lambda: ran.err)
            ran.signal(number)
            ran.signal(number)  # as `timeout` does, and a shell whose terminal is closed

            assert ran.end() == 143, ran.err
            assert ran.out.splitlines()[0].endswith(f"step {after + 1}")
            assert "saved step" in ran.err, ran.err
            newest = complete_steps(folder)[-1]
            assert newest >= after + 3
            assert f"saved step {newest} in {folder}" in ran.err
            return newest

    run_and_terminate(signal.SIGHUP, after=run_and_terminate(signal.SIGTERM, after=0))


def test_a_run_whose_launcher_is_killed_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    script, folder = tmp_path / "script.py", tmp_path / "checkpoints"
    script.write_text(_SAVES)
    run = "run", "--elastic", "--mesh", "1x2", "--run-dir"

    with commands(tmp_path) as start:
        one = start("one", *run, str(tmp_path / "one"), str(script), str(folder), "10")
        until(lambda: "step 25" in one.out, why=lambda: one.err)
        one.signal(signal.SIGKILL)
        one.end()
        newest = complete_steps(folder)[-1]
        two = start("two", *run, str(tmp_path / "two"), str(script), str(folder), "10")
        until(lambda: f"step {newest + 3}" in two.out, why=lambda: two.err)

    assert newest >= 10
    assert two.out.splitlines()[0].endswith(f"step {newest + 1}")


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--elastic", "nowhere.py"], "there is no file nowhere.py"),
        (["--elastic", "--inject", "kill 5,5 at 3", "{script}"], "--inject 'kill 5,5 at 3'"),
        (["--elastic", "--inject", "maim 0,0 at 3", "{script}"], "--inject cannot read"),
        (["--elastic", "--set", "sums.slices=4", "{script}"], "sums.slices cannot be set with --"),
        (["--elastic", "--preload", "nosuchmodule", "{script}"], "cannot import nosuchmodule"),
        (["--elastic", "--run-dir", "{taken}", "{script}"], "a run needs a new folder"),
        (["--inject", "kill 0,0 at 3", "{script}"], "--inject and --run-dir need --elastic"),
        (["--run-dir", "somewhere", "{script}"], "--inject and --run-dir need --elastic"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_line(
    arguments: list[str], match: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ledger").mkdir()
    places = {"{script}": str(MENDED), "{taken}": str(tmp_path)}
    line = ["run", "--mesh", "2x2", *(places.get(part, part) for part in arguments)]

    assert run_line(line) == 2
    assert match in capsys.readouterr().err.splitlines()[-1]


def test_a_fault_that_comes_too_late_is_told(script: Path, tmp_path: Path) -> None:
    with commands(tmp_path) as start:
        faults = ("--inject", "kill 0,1 at 99", "--inject", "kill 0,0 at 99 in reduce")
        ran = start("run", "run", "--elastic", "--mesh", "1x2", *faults, script, "")

        assert ran.end() == 0, ran.err
        assert "kill 0,1 at 99 was not injected: the job ended before it" in ran.err
        assert "kill 0,0 at 99 in reduce was not injected" in ran.err

"""What a loop over a job can do on real processes, while nothing fails and while chips die."""

import re
from pathlib import Path
from textwrap import dedent, indent

import pytest

from commanding import Ended, meshmend_run

pytest.importorskip("torch")

_BEGIN = """
import os, sys, time
import torch
from pathlib import Path
from meshmend.train import Job

torch.manual_seed(0)
inputs = torch.randn(500, 8)
dataset = torch.utils.data.TensorDataset(inputs, inputs @ torch.randn(8, 1))
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
mse = torch.nn.functional.mse_loss
"""


def run(folder: Path, script: str, *options: str, mesh: str = "2x2") -> Ended:
    """Run a script on some chips; it finds a data set, a model and an optimizer."""
    path = folder / "script.py"
    path.write_text(_BEGIN + dedent(script))
    return meshmend_run("--elastic", "--mesh", mesh, *options, str(path))


def said(ended: Ended) -> list[str]:
    """Return what the chips printed, without the names of the chips, each line once."""
    assert ended.returncode == 0, ended.stderr
    lines = [line.partition("] ")[2] for line in ended.stdout.splitlines() if line[0] == "["]
    return list(dict.fromkeys(lines))


def test_an_overflow_on_one_chip_skips_the_step_and_lowers_the_scale_on_all(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        """
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1000)
        job = Job(model, optimizer, dataset, batch=16, steps=4, scaler=scaler, bucket_bytes=64)
        for features, targets in job:
            before = model[0].weight.detach().clone()
            loss = mse(model(features), targets)
            factor = float("inf") if job.step_number == 1 and job.rank == 2 else 1.0
            scaler.scale(loss * factor).backward()
            job.step(loss)
            changed = not torch.equal(before, model[0].weight)
            print(job.step_number, scaler.get_scale(), changed)
        """,
    )

    assert said(ended) == ["1 16.0 True", "2 8.0 False", "3 8.0 True", "4 8.0 True"]
    assert "replicas equal bit for bit" in ended.stderr


def test_the_accumulation_of_the_page_trains_as_one_pass_over_the_batch(tmp_path: Path) -> None:
    """The loop of docs/job.md, on shares of 22, 21 and 21 samples: losses, norms and weights."""
    page = (Path(__file__).parents[2] / "docs" / "job.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n([^`]*job\.accumulate[^`]*)```", page)
    begin = """
        from contextlib import nullcontext
        from torch.nn.functional import cross_entropy
        from meshmend.train.data.samples import Order
        torch.set_default_dtype(torch.float64)
        labels = torch.randint(0, 4, (500,))
        dataset = torch.utils.data.TensorDataset(inputs.double(), labels)
        held_out = torch.utils.data.Subset(dataset, range(50))
        model = torch.nn.Linear(8, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        found = []
        log = lambda *words: found.append(words)
        twin = torch.nn.Linear(8, 4)
        twin.load_state_dict(model.state_dict())
    """
    end = """
        plain = torch.optim.SGD(twin.parameters(), lr=0.5)
        for step in range(6):
            some, answers = dataset[Order(500).samples(64 * step, 64 * step + 64)]
            plain.zero_grad()
            loss = cross_entropy(twin(some), answers)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
            plain.step()
            if job.is_leader:
                expected = torch.tensor([step + 1, loss.item(), norm.item()])
                torch.testing.assert_close(torch.tensor(found[step]), expected, rtol=0, atol=1e-9)
        for mine, expected in zip(model.parameters(), twin.parameters()):
            torch.testing.assert_close(mine, expected, rtol=0, atol=1e-9)
        print("as one pass", job.step_number)
    """
    block = block.replace("steps=1000", "steps=6").replace("% 100", "% 3")
    block = block.replace("GradScaler()", 'GradScaler("cpu")')

    ended = run(tmp_path, dedent(begin) + block + dedent(end), mesh="3x1")

    assert said(ended) == ["as one pass 6"]


def test_the_early_stopping_of_the_page_ends_the_job_and_keeps_the_best_model(
    tmp_path: Path,
) -> None:
    """Nothing gets better after the first evaluation, since nothing is learnt."""
    page = (Path(__file__).parents[2] / "docs" / "job.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(error = [^`]*)```", page)
    begin = f"""
        import math
        os.chdir({str(tmp_path)!r})
        held_out = torch.utils.data.Subset(dataset, range(50))
        errors = lambda batch: mse(model(batch[0]), batch[1], reduction="sum")
        job = Job(model, torch.optim.SGD(model.parameters(), lr=0.0), dataset, batch=16, steps=20)
        for features, targets in job:
            loss = mse(model(features), targets)
            loss.backward()
            if not job.step(loss) or job.step_number % 2:
                continue
    """
    end = """
        print(job.step_number, torch.load("best.pt")["step"])
    """

    ended = run(
        tmp_path,
        dedent(begin) + indent(block.replace(">= 300", ">= 4"), "    ") + dedent(end),
        mesh="1x2",
    )

    assert said(ended) == ["7 2"]


def test_chips_without_samples_clip_and_scale_as_the_others_do(tmp_path: Path) -> None:
    """Their loop does not run, so they learn the norm from the others."""
    ended = run(
        tmp_path,
        """
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)
        job = Job(model, optimizer, dataset, batch=2, steps=6, scaler=scaler, bucket_bytes=64)
        for features, targets in job:
            loss = mse(model(features), targets)
            scaler.scale(loss).backward()
            job.clip_grad_norm(0.01)
            job.step(loss)
        print(scaler.get_scale(), model[0].weight.sum().item())
        """,
    )

    assert len(said(ended)) == 1
    assert said(ended)[0].startswith("128.0 ")
    assert "replicas equal bit for bit" in ended.stderr


def test_two_models_with_optimizers_of_their_own_survive_together(tmp_path: Path) -> None:
    """As a pair of networks that train against each other does, in turns."""
    ended = run(
        tmp_path,
        """
        critic = torch.nn.Linear(1, 1)
        optimizers = {
            "generator": torch.optim.Adam(model.parameters()),
            "critic": torch.optim.SGD(critic.parameters(), lr=0.1, momentum=0.9),
        }
        models = {"generator": model, "critic": critic}
        job = Job(models, optimizers, dataset, batch=16, steps=12)
        for features, targets in job:
            is_critic = job.step_number % 2 == 0
            for parameter in model.parameters():
                parameter.requires_grad_(not is_critic)
            loss = critic(model(features)).square().mean() - critic(targets).mean()
            loss.backward()
            before = model[0].weight.detach().clone()
            if job.step(loss):
                assert torch.equal(before, model[0].weight) is is_critic
        """,
        "--inject",
        "kill 0,1 at 4",
        "--inject",
        "repair 0,1 at 6",
    )

    assert ended.returncode == 0, ended.stderr
    assert "12 steps" in ended.stderr
    assert "replicas equal bit for bit" in ended.stderr


def test_a_second_job_in_a_process_is_refused_in_one_line(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        """
        job = Job(model, optimizer, dataset, batch=16, steps=2)
        Job(model, optimizer, dataset, batch=16, steps=2)
        """,
    )

    assert ended.returncode == 2
    assert "a process can train one job, but this script makes a second one" in ended.stderr


@pytest.mark.parametrize("others", ["pass", "print(job.gather(1.0))"], ids=["none", "gather"])
def test_a_loop_in_which_one_chip_makes_another_call_than_the_rest_ends_on_all_chips(
    tmp_path: Path, others: str
) -> None:
    ended = run(
        tmp_path,
        f"""
        job = Job(model, optimizer, dataset, batch=16, steps=9)
        for features, targets in job:
            loss = mse(model(features), targets)
            loss.backward()
            if job.step(loss) and job.step_number == 2:
                if job.is_leader:
                    job.evaluate(dataset, lambda batch: mse(model(batch[0]), batch[1]), batch=64)
                else:
                    {others}
        """,
        mesh="1x2",
    )

    assert ended.returncode == 1
    words = "all chips of a job must call step, gather, all_reduce and evaluate alike"
    assert words in ended.stderr.splitlines()[-1]
    assert "has left its job" not in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not ended.stdout


def test_gradients_that_are_not_finite_are_told_with_chip_and_parameter(tmp_path: Path) -> None:
    script = """
        job = Job(model, optimizer, dataset, batch=16, steps=3, non_finite={policy!r})
        for features, targets in job:
            loss = mse(model(features), targets)
            loss.backward()
            if job.step_number == 1 and job.rank == 2:
                model[2].weight.grad[0, 3] = float("nan")
            job.step(loss)
        """

    raised = run(tmp_path, script.format(policy="raise"))
    skipped = run(tmp_path, script.format(policy="skip"), "--run-dir", str(tmp_path / "run"))

    assert raised.returncode == 1
    words = r"gradients of step 2 are not finite: chip \(1, 0\): 2.weight; the weights are those"
    assert re.search(words, raised.stderr)
    assert skipped.returncode == 0
    assert "chip (1, 0) has gradients in step 2 that are not finite: 2.weight" in skipped.stderr
    assert '"event":"non-finite"' in (tmp_path / "run" / "events.jsonl").read_text()
    assert "3 steps" in skipped.stderr


def test_one_chip_stops_all_after_the_same_step(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        """
        job = Job(model, optimizer, dataset, batch=16, steps=1000)
        job.after_step(lambda job: None if job.step_number < 7 else print("after", job.step_number))
        for features, targets in job:
            loss = mse(model(features), targets)
            loss.backward()
            if job.step_number == 6 and job.rank == 3:
                job.stop()
            job.step(loss)
        print("ended at", job.step_number)
        """,
    )

    assert said(ended) == ["after 7", "ended at 7"]
    assert "7 steps; samples: 112 used, 0 lost, 0 repeated" in ended.stderr


def test_values_are_summed_and_gathered_within_a_step_and_between_steps(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        """
        job = Job(model, optimizer, dataset, batch=16, steps=2, bucket_bytes=64)
        for features, targets in job:
            print(job.world_size, job.all_reduce(len(features)))
            loss = mse(model(features), targets)
            loss.backward()
            print(job.all_reduce({"a": torch.full((2,), job.rank), "b": [1.5, True]}))
            assert job.step(loss)
            print(job.gather({"rank": job.rank, "text": "x" * job.rank}))
            print(len(job.gather(torch.zeros(100_000))))
        """,
    )

    once = [
        "4 16",
        "{'a': tensor([6, 6]), 'b': [6.0, 4]}",
        "[{'rank': 0, 'text': ''}, {'rank': 1, 'text': 'x'}, {'rank': 2, 'text': 'xx'}, "
        "{'rank': 3, 'text': 'xxx'}]",
        "4",
    ]
    assert said(ended) == once


def test_calls_that_some_chips_could_not_make_are_refused(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        """
        from meshmend.errors import InputError
        job = Job(model, optimizer, dataset, batch=3, steps=1)
        for features, targets in job:
            try:
                job.gather(1)
            except InputError as error:
                print(error)
            loss = mse(model(features), targets)
            loss.backward()
            job.step(loss)
        """,
    )

    (words,) = said(ended)
    assert "a batch of 3 gives some of the 4 chips no samples; use a batch of at least 4" in words


_EVALUATE = """
        folder, chips_to_wait_for, sample_to_die_on = Path({folder!r}), {waits}, {dies}
        (folder / f"start-{{os.getpid()}}").touch()

        def scores(batch):
            features, targets = batch
            if job.step_number == 4:
                while len(list(folder.glob("start-*"))) < chips_to_wait_for:
                    time.sleep(0.01)
                if sample_to_die_on and features[0].equal(inputs[sample_to_die_on]):
                    try:
                        (folder / "died").touch(exist_ok=False)
                        os.kill(os.getpid(), 9)
                    except FileExistsError:
                        pass
            return {{"n": len(features), "loss": mse(model(features), targets, reduction="sum")}}

        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        job = Job(
            model, optimizer, dataset, batch=16, steps=8, also=[plateau], compare_every=1
        )
        for features, targets in job:
            loss = mse(model(features), targets)
            loss.backward()
            if job.step(loss) and job.step_number % 4 == 0:
                result = job.evaluate(dataset, scores, batch=20)
                plateau.step(result["loss"].item())
                print(job.step_number, result["n"], result["loss"].item())
                others = job.gather(job.step_number)
                assert 2 < len(others) and set(others) == {{job.step_number}}
        """


def evaluated(folder: Path, *options: str, waits: int = 0, dies: int = 0) -> list[str]:
    """Return what the chips printed about two evaluations; the replicas end equal.

    After each, the loop changes an object in `also`, which is compared in every step.
    """
    folder.mkdir()
    ended = run(folder, _EVALUATE.format(folder=str(folder), waits=waits, dies=dies), *options)
    lines = said(ended)
    assert [line.split()[:2] for line in lines] == [["4", "500"], ["8", "500"]]
    assert "128 used, 0 lost, 0 repeated; replicas equal bit for bit" in ended.stderr
    return lines


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return evaluated(tmp_path_factory.mktemp("undisturbed") / "run")


@pytest.mark.parametrize("sample", [20, 240, 480], ids=["at first", "in between", "at last"])
def test_an_evaluation_counts_each_sample_once_although_a_chip_dies_in_it(
    tmp_path: Path, undisturbed: list[str], sample: int
) -> None:
    """At step 4 the weights are the same, so the result has the same bits."""
    assert evaluated(tmp_path / "run", dies=sample)[0] == undisturbed[0]
    assert (tmp_path / "run" / "died").exists()


def test_a_chip_that_comes_during_an_evaluation_looks_on_and_then_has_what_loops_made_of_it(
    tmp_path: Path, undisturbed: list[str]
) -> None:
    """No chip scores a sample before the fifth process has begun, in the place of the first."""
    inject = ["--inject", "kill 0,0 at 4", "--inject", "repair 0,0 at 4"]

    assert evaluated(tmp_path / "run", *inject, waits=5)[0] == undisturbed[0]

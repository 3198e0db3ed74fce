"""`meshmend train` as a user types it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from commanding import commands
from meshmend.cli.main import run_line
from meshmend.planning.compile_once import compile_once
from packages import needs
from waiting import HANG_S, until

pytestmark = needs("torch", "transformers", "sklearn")


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("nosuch", "the model needs to be one of resnet, bert, gpt, but got 'nosuch'"),
        ("--size huge", "the size needs to be one of tiny, full, but got 'huge'"),
        ("--norm odd", "the norm needs to be one of batch, group, but got 'odd'"),
        ("--mesh 0x4", "--mesh needs positive extents"),
        ("--mesh 2x2 --fail 2x2@0,0", "needs at least one live chip"),
        ("--inject murder", "--inject cannot read 'murder'"),
        ("--inject kill_0,0_at_" + "9" * 400, "at most 200 characters, but got 412"),
        (
            "--set training.batch_policy=grow",
            "a batch policy needs to be one of constant, shrink, but got 'grow'",
        ),
        ("--lr 0", "--lr needs a number above 0, but got 0"),
        ("--lr nan", "--lr needs a number, but got 'nan'"),
        ("--steps 0", "--steps needs a whole number of at least 1"),
        ("--resume {tmp}", "--resume needs a run with a complete checkpoint"),
        ("--run-dir /dev/null/run", "a run needs a new folder"),
        ("--data {tmp}", "--data needs two or more folders"),
        ("--data {tmp}/none", "/none is none"),
        ("--testbed fast", "bandwidth"),
        ("--optimizer lion", "the optimizer needs to be one of sgd, adam, adamw, adagrad, rmsprop"),
        ("--shard-optimizer --framework jax", "--shard-optimizer needs --framework torch"),
        ("--master-weights --framework jax", "--master-weights needs --framework torch"),
        ("--set sharding.mirror_domain=row", "sharding.mirror_domain needs --shard-optimizer"),
        (
            "--shard-optimizer --mesh 1x4 --set sharding.mirror_domain=row",
            "shares no row with their owner",
        ),
        (
            "--check-shares 4 --set training.batch_policy=shrink",
            "check_shares needs policy=\"constant\", but got 'shrink'",
        ),
        ("gpt --framework jax", "--framework jax has resnet and bert, but got gpt"),
        ("bert --tile 2x2", "but got bert; write: meshmend train gpt --tile 2x2"),
        ("gpt --tile 5x5", "no tile of 5x5, as it is written, fits 4x4"),
        ("gpt --tile 2by2", "2by2"),
        ("gpt --tile 2x2 --batch 8", "--tile needs a sample for each chip"),
        (
            "gpt --tile 2x2 --shard-optimizer --set sharding.mirror_domain=row",
            "got sharding.mirror_domain; leave it out",
        ),
        (
            "gpt --tile 2x2 --set training.batch_policy=shrink",
            "got training.batch_policy shrink; leave it out",
        ),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(
    line: str, match: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compile_once()  # else a line says that it compiles
    assert run_line(["train", *line.format(tmp=tmp_path).split()]) == 2
    *before, said = capsys.readouterr().err.splitlines()
    assert match in said
    assert all(line.startswith("meshmend: loading") for line in before)  # it took a second


def test_a_folder_with_a_run_is_refused_with_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ledger").mkdir()

    assert run_line(["train", "--run-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"meshmend: a run needs a new folder, but {tmp_path} has an earlier run; go on with it by "
        "--resume auto, or name another with --run-dir"
    )


def test_a_fault_after_the_last_step_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    compile_once()

    assert run_line(["train", "--steps", "100", "--inject", "kill 0,0 at 100"]) == 2
    assert (
        "--inject 'kill 0,0 at 100' needs more than 100 steps, but the job has 100"
        in capsys.readouterr().err
    )


def test_a_package_that_does_not_load_beside_the_others_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers.models.bert.modeling_bert", None)

    assert run_line(["train", "gpt", "--mesh", "1x2", "--run-dir", str(tmp_path / "run")]) == 2

    said = capsys.readouterr().err.splitlines()[-1]
    assert "the workloads need transformers, but it does not load here: ModuleNotFound" in said
    assert not (tmp_path / "run").exists()


def test_a_fault_in_a_part_that_only_shared_updates_have_is_refused(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_line(["train", "--inject", "kill 0,0 at 3 in gather"]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert "only jobs with --shard-optimizer have that part" in said


@pytest.mark.slow
@pytest.mark.parametrize("shard", [[], ["--shard-optimizer"]])
def test_master_weights_are_saved_and_taken_up_again(tmp_path: Path, shard: list[str]) -> None:
    first, masters = tmp_path / "first", (*shard, "--master-weights")
    common = ("train", "--norm", "group", "--mesh", "1x2", "--batch", "8", "--json")
    with commands(tmp_path) as start:
        save = ("--steps", "4", "--save-every", "4", "--run-dir", first)
        ran = start("one", *common, *masters, *save)
        assert ran.end() == 0, ran.err
        resume = (*common, "--steps", "6", "--resume", first, "--run-dir")
        again = start("two", *resume, tmp_path / "second", *masters)
        assert again.end() == 0, again.err
        without = start("three", *resume, tmp_path / "third", *shard)
        assert without.end() == 2
        said = without.err.splitlines()[-1]
        assert said.endswith("the checkpoint has master weights; add --master-weights")

    assert json.loads(ran.out)["replicas_equal"]
    assert json.loads(again.out)["steps"] == 6
    assert "in bfloat16" in (first / "events.jsonl").read_text()


@pytest.mark.slow
def test_a_gpt_on_tiles_loses_a_chip_and_goes_on_with_larger_tiles_and_with_none(
    tmp_path: Path,
) -> None:
    common = ("train", "gpt", "--batch", "8", "--json", "--save-every", "3")
    patience = ("--set", "timing.heartbeat_timeout=60")  # on a busy machine chips may be silent
    first = tmp_path / "first"
    answers = []
    with commands(tmp_path) as start:
        tiles = ("--mesh", "1x4", "--tile", "1x2", "--inject", "kill 0,1 at 4")
        ran = start("one", *common, *tiles, *patience, "--steps", "6", "--run-dir", first)
        assert ran.end() == 0, ran.err
        for name, options in {
            "larger": ("--mesh", "2x2", "--tile", "2x2"),
            "none": ("--mesh", "1x2"),
        }.items():
            places = ("--resume", first, "--run-dir", tmp_path / name)
            again = start(name, *common, *options, "--steps", "9", *places)
            assert again.end() == 0, again.err
            answers.append(json.loads(again.out))

    answer = json.loads(ran.out)
    assert answer["samples"] == {"used": 48, "lost": 0, "repeated": 0}
    assert (answer["replicas_equal"], answer["chips"]) == (True, [4, 2])
    assert answers[0]["final_loss"] == pytest.approx(answers[1]["final_loss"], abs=1e-4)


def test_a_run_is_one_json_object_and_can_be_taken_up_with_another_learning_rate(
    tmp_path: Path,
) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    common = ("train", "--norm", "group", "--mesh", "1x2", "--batch", "8", "--json")
    with commands(tmp_path) as start:
        ran = start("one", *common, "--steps", "4", "--save-every", "4", "--run-dir", first)
        assert ran.end() == 0, ran.err
        options = ("--steps", "6", "--resume", first, "--run-dir", second)
        again = start("two", *common, *options, "--lr", "1e-9")
        assert again.end() == 0, again.err
        short = start("three", *common, "--steps", "2", "--resume", first)
        assert short.end() == 2
        assert short.err.splitlines()[-1].endswith(
            "at step 4, but the job ends at step 2; set steps to at least 4"
        )

    answer = json.loads(ran.out)
    assert answer["steps"] == 4
    assert answer["samples"] == {"used": 32, "lost": 0, "repeated": 0}
    assert (answer["replicas_equal"], answer["chips"], answer["faults"]) == (True, [2], [])
    assert Path(answer["report"]).read_text().startswith("<!doctype html>")
    taken_up = json.loads(again.out)
    assert taken_up["steps"] == 6
    before, after = answer["evaluation"], taken_up["evaluation"]
    assert after["accuracy"] == before["accuracy"]  # such small steps change nothing
    assert '"rate":1e-09' in (second / "events.jsonl").read_text()


@needs("triton")  # PyTorch then imports it, and it prints at the end what was not freed
def test_nothing_follows_the_summary_of_a_run(tmp_path: Path) -> None:
    options = ("--mesh", "1x2", "--batch", "8", "--steps", "2", "--run-dir", tmp_path / "run")
    ran = subprocess.run(
        [sys.executable, "-m", "meshmend", "train", *options],
        capture_output=True,
        text=True,
        timeout=HANG_S,
    )

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1].startswith("report")
    assert "done: 2 steps" in ran.stderr.splitlines()[-1]


@pytest.mark.slow
def test_one_command_starts_a_run_goes_on_and_says_that_it_is_finished(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    common = ("train", "--norm", "group", "--mesh", "1x2", "--batch", "8", "--save-every", "4")
    auto = (*common, "--run-dir", folder, "--resume", "auto")
    with commands(tmp_path) as start:
        first = start("first", *auto, "--steps", "4", "--json")
        assert first.end() == 0, first.err
        second = start("second", *auto, "--steps", "8", "--json")
        assert second.end() == 0, second.err
        third = start("third", *auto, "--steps", "8")
        assert third.end() == 0, third.err
        short = start("short", *auto, "--steps", "6")
        assert short.end() == 2
        straight = start(
            "straight", *common, "--run-dir", tmp_path / "straight", "--steps", "8", "--json"
        )
        assert straight.end() == 0, straight.err
        for shard in folder.glob("checkpoints/step-*/shard-001-*"):
            shard.unlink()
        anew = start("anew", *auto, "--steps", "9", "--json")
        assert anew.end() == 0, anew.err

    began, ended, whole = (json.loads(each.out) for each in (first, second, straight))
    assert began["steps"] == 4
    assert ended["steps"] == 8
    assert ended["samples"] == {"used": 32, "lost": 0, "repeated": 0}  # of the last four steps
    assert ended["final_loss"] == pytest.approx(whole["final_loss"], rel=1e-5)
    assert "finished: 8 of 8 steps; nothing is left to do" in third.out
    assert "without a step" not in third.out + third.err
    assert short.err.splitlines()[-1].endswith("set steps to at least 8")
    assert json.loads(anew.out)["samples"]["used"] == 9 * 8
    assert anew.err.count("found no complete checkpoint") == 1


@pytest.mark.slow
def test_a_run_whose_folder_vanishes_is_no_success_and_names_the_chips(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    line = ("train", "--norm", "group", "--mesh", "1x2", "--batch", "8", "--run-dir", folder)
    with commands(tmp_path) as start:
        ran = start("run", *line, "--steps", "60", "--save-every", "20")
        events = folder / "events.jsonl"
        until(lambda: events.exists() and '"event":"step"' in events.read_text())
        folder.rename(tmp_path / "elsewhere")

        assert ran.end() == 1, ran.err

    assert "steps     60 of 60" in ran.out
    assert "without a step" not in ran.out + ran.err
    assert "no ledger tells what chip (0, 0), (0, 1) did in steps 1 to 60" in ran.err

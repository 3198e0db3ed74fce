"""Chips that compute wrong numbers, as faults make them do."""

from pathlib import Path
from typing import Any

import pytest

from commanding import commands, meshmend_run
from elastic_job import elastic, losses, of_kind
from meshmend.train.core.share_checks import is_check_step
from meshmend.train.state.checkpoint import complete_steps
from testbeds import require_testbed

pytest.importorskip("torch")

STEPS = 12


@pytest.mark.parametrize(
    "part", ["weights", *(pytest.param(part, marks=pytest.mark.slow) for part in ("state", "sum"))]
)
def test_a_bit_that_flips_on_one_chip_makes_it_differ_from_the_others(
    part: str, tmp_path: Path
) -> None:
    result = elastic(tmp_path, mesh="1x3", steps=STEPS, inject=[f"flip {part} 0,1 at 6"])

    fault, *_ = of_kind(result, "fault")
    assert (fault["kind"], fault["chips"], fault["at_step"] >= 6) == ("flip", [[0, 1]], True)
    (differ,) = of_kind(result, "states-differ")
    assert (differ["step"], differ["strange"]) == (STEPS, [[0, 1]])


@pytest.mark.slow
def test_a_bit_that_flips_in_a_gradient_makes_all_chips_wrong_alike(tmp_path: Path) -> None:
    right = elastic(tmp_path / "right", mesh="1x3", steps=STEPS)
    wrong = elastic(tmp_path / "wrong", mesh="1x3", steps=STEPS, inject=["flip gradient 0,1 at 5"])

    assert wrong["finished"]
    assert not of_kind(wrong, "states-differ")
    same = [losses(wrong)[step] == losses(right)[step] for step in range(1, STEPS + 1)]
    assert all(same[:5])
    assert not all(same[5:])


def out(result: dict[str, Any]) -> list[list[int]]:
    """Return the chips that were turned away."""
    return [event["chip"] for event in of_kind(result, "turned away")]


@pytest.mark.parametrize("framework", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_a_chip_that_computes_wrong_once_in_a_step_that_is_checked_is_named_and_left_out(
    framework: str, tmp_path: Path
) -> None:
    step = next(step for step in range(5, 20) if is_check_step(step, 4))
    fault = f"flip gradient 0,1 at {step}"

    result = elastic(
        tmp_path, mesh="2x2", steps=14, check_shares=4, inject=[fault], framework=framework
    )

    assert result["finished"], result["why"]
    assert out(result) == [[0, 1]]
    (found,) = of_kind(result, "wrong-result")
    assert (found["chip"], found["step"], found["by"]) == ([0, 1], step + 1, [0, 0])
    first, end = found["share"]
    assert 48 * step <= first < end == first + 12  # its own share, or the one that it checked
    assert found["n_parameters"] == len(found["parameters"]) == 1  # one bit, of one of them
    assert found["parameters"][0] in ("0.weight", "0.bias", "2.weight", "2.bias", "the loss") or (
        framework == "jax"
    )
    assert result["audit"]["faults"] == []


def test_a_chip_whose_weights_change_takes_those_of_the_others_and_trains_on(
    tmp_path: Path,
) -> None:
    result = elastic(
        tmp_path, mesh="1x3", steps=14, check_shares=4, inject=["flip weights 0,1 at 4"]
    )

    assert result["finished"], result["why"]
    assert out(result) == []
    (mended,) = of_kind(result, "state-mended")
    assert (mended["chip"], mended["by"]) == ([0, 1], [0, 0])
    assert mended["names"][0].startswith("model.")
    audit = result["audit"]
    assert (audit["used"], audit["lost"], audit["repeated"]) == (14 * 48, 0, 0)
    assert audit["faults"] == []


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_job_goes_back_to_before_a_chip_was_wrong_and_ends_as_if_it_had_not_been(
    framework: str, tmp_path: Path
) -> None:
    options = {"mesh": "2x2", "steps": 80, "check_shares": 5, "save_every": 5}
    options |= {"framework": framework}
    right, wrong = (
        elastic(tmp_path / name, **options, dtype="float64", inject=inject)
        for name, inject in (("right", []), ("wrong", ["wrong 0,1 from 50"]))
    )

    assert wrong["finished"], wrong["why"]
    assert out(wrong) == [[0, 1]]
    (found,), (back,) = of_kind(wrong, "wrong-result"), of_kind(wrong, "restored")
    assert found["step"] <= 50 + 7 * 5
    assert back["step"] <= found["right_until"] <= 50
    tolerance = 1e-9 if framework == "torch" else 1e-4  # jax has one layer in float32
    assert abs(losses(wrong)[80] - losses(right)[80]) < tolerance
    assert wrong["audit"]["faults"] == []


@pytest.mark.slow
def test_a_job_that_is_told_to_stops_and_leaves_no_checkpoint_that_may_be_wrong(
    tmp_path: Path,
) -> None:
    result = elastic(
        tmp_path,
        mesh="2x2",
        steps=80,
        check_shares=5,
        save_every=5,
        on_wrong_result="stop",
        inject=["wrong 0,1 from 50"],
    )

    assert not result["finished"]
    (found,) = of_kind(result, "wrong-result")
    assert "chips (0, 1) computed wrong numbers in step" in result["why"]
    left = complete_steps(tmp_path / "checkpoints")
    assert left
    assert max(left) <= found["right_until"]


_NEWEST = """
import torch
from meshmend.train import Job, Saving

torch.manual_seed(0)
dataset = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
saving = Saving({folder!r}, every=5)
job = Job(model, optimizer, dataset, batch=16, steps=60, check_shares=4, saving=saving)
for inputs, targets in job:
    loss = ((model(inputs) - targets) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    if job.step(loss) and job.step_number == 60 and job.is_leader:
        print("could go back to", job._core.newest_checkpoint())
"""


def test_once_a_job_has_gone_on_without_a_wrong_chip_its_new_checkpoints_count(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(_NEWEST.format(folder=str(tmp_path / "saved")))
    step = next(step for step in range(40, 60) if is_check_step(step, 4))

    ended = meshmend_run(
        *("--elastic", "--mesh", "2x2", "--inject", f"flip gradient 0,1 at {step}", script)
    )

    assert ended.returncode == 0, ended.stderr
    assert "turned away" in ended.stderr
    assert int(ended.stdout.split()[-1]) >= 50


_WITH_RANDOM_NUMBERS = """
import random
import torch
from meshmend.train import Job

dataset = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
job = Job(model, optimizer, dataset, batch=16, steps=8, check_shares=4)
own = random.Random()
for inputs, targets in job:
    loss = ((model(inputs) * {numbers}.random() - targets) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    job.step(loss)
"""


@pytest.mark.slow
def test_a_loop_with_random_numbers_of_python_computes_the_same_shares_twice(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(_WITH_RANDOM_NUMBERS.format(numbers="random"))

    ended = meshmend_run("--elastic", "--mesh", "1x3", str(script))

    assert ended.returncode == 0, ended.stderr


@pytest.mark.slow
def test_a_loop_with_random_numbers_of_its_own_is_refused_before_its_first_step(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(_WITH_RANDOM_NUMBERS.format(numbers="own"))

    ended = meshmend_run("--elastic", "--mesh", "1x3", str(script))

    assert ended.returncode == 2
    assert "check_shares needs chips that compute the same bits" in ended.stderr
    assert "step 1" not in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.slow
def test_a_link_that_changes_bytes_is_left_out_with_checksums_and_told_without(
    tmp_path: Path,
) -> None:
    fault = "corrupt link:0,0-0,1 at 6"
    more: dict[str, Any] = {"mesh": "2x2", "steps": 14, "check_shares": 4, "inject": [fault]}

    summed = elastic(tmp_path / "summed", **more, checksum=True)
    plain = elastic(tmp_path / "plain", **more)

    assert summed["finished"], summed["why"]
    assert of_kind(summed, "generation")[-1]["cut"] == ["link:0,0-0,1"]
    assert out(summed) == []
    assert not plain["finished"]
    assert out(plain) == []
    assert any("find it with --checksum" in event["fault"] for event in of_kind(plain, "fault"))


@pytest.mark.slow
def test_once_something_was_wrong_a_link_that_changes_bytes_is_named_without_checksums_asked_for(
    tmp_path: Path,
) -> None:
    """A link is told from a chip before the chip is blamed: chips whose states differ twice are."""
    faults = ["flip weights 1,1 at 4", "corrupt link:0,0-0,1 at 10"]

    result = elastic(tmp_path, mesh="2x2", steps=16, check_shares=4, inject=faults)

    assert result["finished"], result["why"]
    assert [event["chip"] for event in of_kind(result, "state-mended")] == [[1, 1]]
    assert of_kind(result, "generation")[-1]["cut"] == ["link:0,0-0,1"]
    assert out(result) == []


@pytest.mark.slow
def test_such_a_link_is_left_out_and_told_on_a_testbed_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require_testbed()
    monkeypatch.setenv("MESHMEND_TESTBED_DIR", str(tmp_path / "beds"))

    line = ["train", "--mesh", "2x2", "--steps", "16", "--testbed", "50Mbit"]
    line += ["--check-shares", "4", "--inject", "corrupt link:0,0-0,1 at 6"]

    with commands(tmp_path) as start:
        summed = start("summing", *line, "--checksum", "--run-dir", tmp_path / "summed")
        is_right = summed.end() == 0
        plain = start("not summing", *line, "--run-dir", tmp_path / "plain")
        code = plain.end()

    assert is_right, summed.err
    assert '"cut":["link:0,0-0,1"]' in (tmp_path / "summed" / "events.jsonl").read_text()
    assert code == 1
    assert "turned away" not in plain.err
    assert plain.err.splitlines()[-1].endswith("find it with --checksum or MESHMEND_CHECKSUM=1")

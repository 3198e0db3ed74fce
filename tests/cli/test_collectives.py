"""`--collective` and `--update-rate` of `simulate` and `plan`, as a user types them."""

import json
from pathlib import Path
from typing import Any

import pytest

from meshmend.cli.main import run_line

HOLE = ["--mesh", "4x4", "--fail", "2x2@0,2"]
Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def printed_json(capsys: Captured, *arguments: str) -> dict[str, Any]:
    assert run_line([*arguments, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


@pytest.mark.parametrize("collective", ["reduce-scatter", "all-gather", "sharded-update"])
def test_every_algorithm_stands_beside_the_limit_of_the_collective(
    capsys: Captured, collective: str
) -> None:
    document = printed_json(
        capsys,
        *("simulate", *HOLE, "--payload", "1MB", "--algorithm", "all,auto"),
        *("--collective", collective),
    )

    assert document["collective"] == collective
    of_all = [result for result in document["results"] if result["chips"] == 12]
    times = {result["algorithm"]: result["time_s"] for result in of_all}
    assert {"trees", "ring-1d", "ft-two-d", "rings-nd", "auto"} <= set(times)
    assert times["auto"] <= 1.02 * min(times.values())
    assert min(times.values()) >= 0.999 * document["limit_s"]


def test_the_question_again_has_the_same_answer_from_disk(capsys: Captured) -> None:
    asked = ["simulate", *HOLE, "--payload", "1MB", "--algorithm", "auto"]
    of_update = [*asked, "--collective", "sharded-update"]
    first, plain, again = (printed_json(capsys, *each) for each in (of_update, asked, of_update))

    assert first == again
    assert first["results"][0]["time_s"] != plain["results"][0]["time_s"]


def test_slow_updates_take_longer_and_the_limit_says_so(capsys: Captured) -> None:
    asked = ["--collective", "sharded-update", "--algorithm", "auto", "--payload", "1MB"]
    slow = printed_json(capsys, "simulate", *HOLE, *asked, "--update-rate", "1GB/s")

    assert slow["limit_kind"] == "update"
    assert slow["results"][0]["time_s"] > slow["limit_s"] > 1e6 / 12 / 1e9


def test_a_plan_says_that_no_weight_is_used_too_early_and_verify_proves_it_again(
    capsys: Captured, tmp_path: Path
) -> None:
    file = str(tmp_path / "plan with spaces.json")
    assert run_line(["plan", *HOLE, "--collective", "sharded-update", "-o", file]) == 0
    assert "no weight used before its update" in capsys.readouterr().out

    assert printed_json(capsys, "verify", file)["collective"] == "sharded-update"
    document = json.loads(Path(file).read_text(encoding="utf-8"))
    document["owners"] = document["owners"][1:] + document["owners"][:1]  # others own the chunks
    Path(file).write_text(json.dumps(document), encoding="utf-8")
    assert run_line(["verify", file]) == 1
    assert "which is no updated weight at rank" in capsys.readouterr().err


@pytest.mark.parametrize("shape", ["1x1", "1x5", "2x2x2", "3x3"])
def test_odd_meshes_have_plans_too(capsys: Captured, shape: str) -> None:
    facts = printed_json(capsys, "plan", "--mesh", shape, "--collective", "sharded-update")

    assert facts["verified"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "--collective", "sum"], "there is no collective 'sum'; choose one of"),
        (["plan", "--collective", "sum"], "there is no collective 'sum'; choose one of"),
        (["plan", "--update-rate", "1GB/s"], "--update-rate needs --collective sharded-update"),
        (["simulate", "--update-rate", "1GB/s"], "--update-rate needs --collective sharded-up"),
        (
            ["plan", "--collective", "sharded-update", "--update-rate", "fast"],
            "a bandwidth needs a number and a unit",
        ),
        (
            ["plan", "--collective", "sharded-update", "--lower", "jax"],
            "--lower jax needs an allreduce, reduce-scatter or all-gather",
        ),
        (
            ["plan", "--collective", "all-to-all", "--lower", "jax"],
            "--lower jax needs an allreduce, reduce-scatter or all-gather",
        ),
        (
            ["simulate", "--buckets", "4x1MB", "--collective", "all-gather"],
            "--buckets does not go with --collective all-gather",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    capsys: Captured, arguments: list[str], message: str
) -> None:
    assert run_line([*arguments, *HOLE]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1


def test_plan_says_what_mirrors_cost(capsys: Captured) -> None:
    asked = ["plan", "--mesh", "4x4", "--collective", "sharded-update", "--payload", "4202496B"]
    mirrors = printed_json(capsys, *asked, "--update-rate", "1GB/s")["mirrors"]

    assert mirrors["sent_bytes_per_step"] == 0
    assert mirrors["state_and_mirror_bytes"] == 2 * mirrors["state_bytes"] == 4 * 262_656
    assert mirrors["unsharded_state_bytes"] == 2 * 4_202_496
    assert mirrors["update_s"] == pytest.approx(262_656 / 1e9)
    assert mirrors["domains"] == ["board"]
    assert run_line([*asked, "--mirror-domain", "row"]) == 0
    assert "mirrors      0 B a step sent, 1.05 MB of AdamW's state" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--collective", "sharded-update", "--mirror-domain", "4x4"], "shares no 4x4 with"),
        (["--collective", "sharded-update", "--mirror-domain", "rack"], "but got 'rack'"),
        (["--mirror-domain", "row"], "needs --collective sharded-update, but got allreduce"),
    ],
)
def test_domains_that_no_mirrors_can_have_are_refused(
    capsys: Captured, arguments: list[str], words: str
) -> None:
    assert run_line(["plan", "--mesh", "4x4", *arguments]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1

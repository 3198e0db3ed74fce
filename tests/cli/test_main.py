"""The command line: right figures on standard output, one line on standard error, exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from meshmend import __version__
from meshmend.cli.main import run_line as run
from meshmend.schedule.algorithms import ALGORITHMS

Captured = pytest.CaptureFixture[str]


def errors_of(text: str) -> list[str]:
    """The lines on standard error, but for the note that a first use compiles."""
    return [line for line in text.splitlines() if "compiling for the first use" not in line]


def printed_json(capsys: Captured, *arguments: str) -> dict[str, Any]:
    assert run([*arguments, "--json"]) == 0
    out, err = capsys.readouterr()
    assert not errors_of(err)
    assert out.count("\n") == 1
    facts: dict[str, Any] = json.loads(out, parse_constant=lambda name: pytest.fail(name))
    return facts


def refusal(capsys: Captured, *arguments: str, code: int = 2) -> str:
    assert run(list(arguments)) == code
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = errors_of(err)
    assert line.startswith("meshmend: ")
    return line


HOLE = ("--mesh", "8x8", "--fail", "2x2@2,2")


def test_plan_prints_the_figures_that_others_rely_on(capsys: Captured) -> None:
    facts = printed_json(capsys, "plan", *HOLE, "--algorithm", "ft-two-d")

    assert facts["mesh"] == {
        "shape": [8, 8],
        "wrap": [False, False],
        "live": 60,
        "failed": 4,
        "links": 100,
        "stranded": [],
    }
    assert (facts["algorithm"], facts["collective"]) == ("ft-two-d", "allreduce")
    assert (facts["ranks"], facts["virtual_channels"], facts["proof"]) == (60, 1, "exact")
    assert facts["verified"] is facts["deadlock_free"] is True
    for count in ("rows", "chunks", "max_hops"):
        assert type(facts[count]) is int
        assert facts[count] > 0
    assert 0 < facts["max_link_load"] < 3
    assert {"build", "hazards", "verify", "deadlock"} <= set(facts["seconds"])
    assert all(seconds >= 0 for seconds in facts["seconds"].values())


@pytest.mark.parametrize("collective", ["allreduce", "reduce-scatter", "all-gather"])
@pytest.mark.parametrize("name", ["ring-1d", "ft-two-d", "rank-ring", "auto"])
def test_plan_takes_each_algorithm_and_collective(
    capsys: Captured, name: str, collective: str
) -> None:
    facts = printed_json(capsys, "plan", *HOLE, "--algorithm", name, "--collective", collective)

    assert facts["collective"] == collective
    assert facts["algorithm"] == (name if name != "auto" else facts["algorithm"]) in ALGORITHMS


@pytest.mark.parametrize("mesh", ["1", "1x1", "2", "1x2", "3x3", "2x2x2"])
def test_the_smallest_meshes_have_plans_in_valid_json(capsys: Captured, mesh: str) -> None:
    for wrap in ("none", "all"):
        facts = printed_json(capsys, "plan", "--mesh", mesh, "--wrap", wrap)
        assert facts["verified"] is True


def test_plan_says_in_words_what_it_proved(capsys: Captured) -> None:
    assert run(["plan", *HOLE, "--algorithm", "ft-two-d"]) == 0

    out = capsys.readouterr().out
    assert "8x8 less 2x2@2,2: 60 live chips, 100 live links" in out
    assert "ft-two-d (allreduce over 60 ranks)" in out
    assert "every contribution once, every hop alive (counted exactly)" in out
    assert "free, with 1 virtual channel\n" in out


def test_plan_lowers_to_steps_and_prices_them(capsys: Captured) -> None:
    trees = (*HOLE, "--algorithm", "trees", "--lower", "jax", "--slices", "8")

    planned = printed_json(capsys, "plan", *trees)
    facts = planned["lowered"]

    assert (facts["permutes_per_step"], facts["slices"]) == (4, 8)
    assert facts["cells"] == 8 * planned["chunks"]
    assert facts["link_bound"] < facts["steps_bound"] <= facts["steps"]
    assert facts["steps"] <= 1.25 * max(facts["link_bound"], facts["depth_chain"])
    per_cell = 1e8 / facts["cells"]
    assert facts["bytes_per_link"]["needed"] == pytest.approx(facts["link_bound"] * per_cell)
    assert facts["bytes_per_link"]["moved"] == pytest.approx(facts["steps"] * per_cell)
    assert facts["limit_s"] < facts["free_running_s"] < facts["predicted_s"]
    assert run(["plan", *trees]) == 0
    out = capsys.readouterr().out
    least = facts["steps_bound"]
    assert f"steps        {facts['steps']} of 4 permutes, 8 slices; no order takes fewer" in out
    assert f"than {least}\n" in out
    assert "\nlockstep " in out


def test_chips_that_are_cut_off_are_said_on_standard_error(capsys: Captured) -> None:
    arguments = ["plan", "--mesh", "4x4", "--fail", "0,1", "--fail", "1,0"]

    assert printed_json(capsys, *arguments)["mesh"]["stranded"] == [[0, 0]]
    assert run(arguments) == 0
    assert "cut off from the rest and left out: (0, 0)" in capsys.readouterr().err


@pytest.mark.parametrize(
    "collective", ["allreduce", "reduce-scatter", "all-gather", "sharded-update"]
)
def test_verify_reads_back_and_proves_what_plan_wrote(
    capsys: Captured, tmp_path: Path, collective: str
) -> None:
    file = str(tmp_path / "plan.json")
    planned = printed_json(capsys, "plan", *HOLE, "--collective", collective, "-o", file)
    for extra in ((), HOLE):
        verified = printed_json(capsys, "verify", file, *extra)
        for key in planned.keys() - {"seconds", "mirrors"}:  # a plan file knows no mirrors
            assert verified[key] == planned[key]


def test_verify_tells_a_wrong_plan_from_one_that_cannot_be_used(
    capsys: Captured, tmp_path: Path
) -> None:
    file = tmp_path / "plan.json"
    assert run(["plan", *HOLE, "--algorithm", "ring-1d", "-o", str(file)]) == 0
    capsys.readouterr()
    document = json.loads(file.read_text(encoding="utf-8"))

    assert "is a plan for the mesh 8x8 less 2x2@2,2, but got 8x8;" in refusal(
        capsys, "verify", str(file), "--mesh", "8x8"
    )
    file.write_text(json.dumps(document | {"op": [1, *document["op"][1:]]}), encoding="utf-8")
    assert "is wrong: rank" in refusal(capsys, "verify", str(file), code=1)
    file.write_text(json.dumps(document)[:-100], encoding="utf-8")
    assert "is not a plan file: not JSON" in refusal(capsys, "verify", str(file))
    file.write_bytes(b"\x00\xff" * 99)
    assert "is not a plan file: not JSON" in refusal(capsys, "verify", str(file), "--json")
    assert "No such file" in refusal(capsys, "verify", str(tmp_path / "none.json"))
    assert "Is a directory" in refusal(capsys, "verify", str(tmp_path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("bogus", "No such command 'bogus'"),
        ("plan", "Missing option '--mesh'"),
        ("plan --mesh 4x4 --bogus", "No such option: --bogus"),
        ("plan --mesh 4x4 extra", "unexpected extra argument"),
        ("plan --mesh", "requires an argument"),
        ("plan --mesh 0x4", "--mesh needs positive extents joined by x, such as 16x32, but got"),
        ("plan --mesh axb", "but got 'axb'"),
        ("plan --mesh 4x4x", "but got '4x4x'"),
        ("plan --mesh 9999x9999", "Mesh needs at most 1048576 chips, but got 9999x9999"),
        ("plan --mesh 4x4 --wrap 2", "--wrap needs none, all, or axes from 0 to 1"),
        ("plan --mesh 4x4 --fail 9,9", "inside the mesh 4x4, but 9,9 reaches from"),
        ("plan --mesh 4x4 --fail 2x2@3,3", "2x2@3,3 reaches from (3, 3) to (4, 4)"),
        ("plan --mesh 4x4 --fail oops", "--fail cannot read 'oops'; write 4x2@6,8 (block)"),
        ("plan --mesh 4x4 --fail 1", "on the mesh 4x4 needs 2 axes, but 1 has 1"),
        ("plan --mesh 4x4 --fail link:0,0-2,0", "has no link:0,0-2,0"),
        ("plan --mesh 4x4 --fail 4x4@0,0", "at least one live chip, but all 16 failed"),
        ("plan --mesh 4x4 --algorithm nope", "there is no algorithm 'nope'; choose one of"),
        ("plan --mesh 4x4 --collective nope", "there is no collective 'nope'; choose one of"),
        ("plan --mesh 8x8 --fail 2x2@2,2 --algorithm two-d", "; use '"),
        ("plan --mesh 4x4 --lower tpu", "--lower needs 'jax', but got 'tpu'"),
        ("plan --mesh 4x4 --slices 2", "--slices needs --lower jax: a plan itself has no slices"),
        ("plan --mesh 4x4 --lower jax --slices 0", "--slices needs 1 or more, but got 0"),
        ("plan --mesh 4x4 --lower jax --slices 100000000", "needs at most 65536 slices, but got"),
        ("simulate --mesh 4x4 --fabric 1GB/s,5,0s", "but got '5'; write 5us if you mean that"),
        ("simulate --mesh 4x4 --hop-latency 5", "but got '5'; write 5us if you mean that"),
        ("simulate --mesh 4x4 --fabric 70Gb/s,0s,0s", "70Gb/s in bits is 8.75GB/s; write that"),
        ("plan --mesh 4x4 -o .", "cannot write .: Is a directory"),
        ("plan --mesh 4x4 -o /dev/null/p.json", "cannot write /dev/null/p.json"),
        ("reproduce -o /dev/null/p.html", "cannot write /dev/null/p.html"),  # at once
        ("simulate --mesh 32x32 -o .", "cannot write .: Is a directory"),
        ("bench --mesh 4x4 --save /dev/null", "cannot write /dev/null/result.json"),
        ("plan --mesh 0x4 --json", "--mesh needs positive extents"),
        ("verify", "Missing argument"),
        ("show --mesh 4x4 --fail 4x4@0,0", "at least one live chip"),
        ("show --mesh 4x4 --load", "--load needs --algorithm NAME"),
        ("show --mesh 4x4 --route 0,0", "--route needs two chips such as 0,0-7,7"),
        ("show --mesh 4x4 --route 0,0-9,9", "--route needs two live chips of 4x4"),
        ("show --mesh 4x4 -o .", "cannot write .: Is a directory"),
        ("figures -o /dev/null/here", "cannot write /dev/null/here/"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    capsys: Captured, arguments: str, message: str
) -> None:
    assert message in refusal(capsys, *arguments.split())


def test_show_prints_the_mesh_and_its_figures(capsys: Captured, tmp_path: Path) -> None:
    picture = tmp_path / "new" / "mesh.svg"

    facts = printed_json(capsys, "show", *HOLE, "--route", "3,0-3,7", "-o", str(picture))
    assert (facts["live"], facts["failed"], facts["links"]) == (60, 4, 100)
    assert facts["components"] == [60]
    assert facts["routes"][0][0] == [3, 0]
    assert facts["routes"][0][-1] == [3, 7]
    assert picture.read_text(encoding="utf-8").startswith("<svg")
    assert run(["show", *HOLE]) == 0
    assert "60 live, 4 failed, 0 cut off" in capsys.readouterr().out


@pytest.mark.parametrize("extra", [[], ["--load"]])
def test_show_draws_an_algorithm(capsys: Captured, tmp_path: Path, extra: list[str]) -> None:
    picture = tmp_path / "rings.svg"

    assert run(["show", *HOLE, "--algorithm", "ft-two-d", *extra, "-o", str(picture)]) == 0
    assert "<svg" in picture.read_text(encoding="utf-8")
    assert f"written      {picture}" in capsys.readouterr().out


def test_algorithms_lists_what_each_needs_and_gives(capsys: Captured) -> None:
    rows = printed_json(capsys, "algorithms")["algorithms"]

    assert [row["name"] for row in rows] == list(ALGORITHMS)
    assert all(row["needs"] and row["gives"] for row in rows)
    assert run(["algorithms"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in ("ring-1d", "two-d", "row-pair", "ft-two-d"))


def test_help_teaches_and_the_version_is_printed(capsys: Captured) -> None:
    assert run([]) == 0
    assert "Start with: meshmend train" in capsys.readouterr().out
    for command in ("plan", "verify", "show", "algorithms", "figures"):
        assert run([command, "--help"]) == 0
        assert "--json" in capsys.readouterr().out
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"meshmend {__version__}\n"


def python(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)


def test_help_imports_nothing_heavy() -> None:
    done = python(
        "import sys\n"
        "from meshmend.cli.main import run_line as run\n"
        "assert run(['--help']) == 0\n"
        "heavy = {'numpy', 'scipy', 'numba', 'torch', 'jax'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )

    assert (done.returncode, done.stderr) == (0, "")
    assert "Usage: meshmend" in done.stdout


MISTAKES = [
    "plan --mesh foo",
    "plan --mesh 4x4 --fail 9,9",
    "plan --mesh 4x4 --payload foo",
    "plan --mesh 4x4 --fabric foo",
    "plan --mesh 4x4 --algorithm foo",
    "plan --mesh 4x4 --collective foo",
    "verify nowhere.json",
    "simulate --mesh 4x4 --payload foo",
    "simulate --mesh 4x4 --algorithm foo",
    "simulate --mesh 4x4 --slices 0",
    "show --mesh 4x4 --load",
    "show --mesh 4x4 --algorithm foo -o picture.svg",
    "train foo",
    "train --mesh foo",
    "train --inject foo",
    "train --testbed foo",
    "train --algorithm foo",
    "train --set training.batch_policy=foo",
    "run --mesh foo script.py",
    "run --mesh 4x4 nowhere.py",
    "run --mesh 4x4 --inject foo script.py",
    "run --elastic --mesh 4x4 --inject foo script.py",
    "run --elastic --mesh 4x4 --slices 2 script.py",
    "worker --mesh foo --coordinator 127.0.0.1:7000 script.py",
    "agent --mesh foo --coordinator 127.0.0.1:7000 --chips 0,0 script.py",
    "agent --mesh 4x4 --coordinator 127.0.0.1:7000 --chips 4x2@0,3 script.py",
    "submit slurm --mesh foo script.py",
    "submit slurm --mesh 4x4 --hosts 3x2 script.py",
    "submit slurm --mesh 4x4 nowhere.py",
    "submit foo --mesh 4x4 script.py",
    "coordinator --mesh foo --listen 127.0.0.1:7000",
    "bench --mesh 4x4 --payload foo",
    "bench --mesh 4x4 --algorithm foo",
    "testbed up --mesh foo --link 50Mbit",
    "reproduce --fabric foo",
]


def test_a_mistake_in_the_arguments_is_told_in_one_line_before_anything_heavy_is_imported() -> None:
    done = python(
        "import sys\n"
        "from meshmend.cli.main import run_line as run\n"
        f"for line in {MISTAKES}:\n"
        "    assert run(line.split()) == 2, line\n"
        "    heavy = {'numba', 'torch', 'transformers'} & set(sys.modules)\n"
        "    assert not heavy, (line, heavy)\n"
    )

    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr.count("\n") == len(MISTAKES)
    assert all(line.startswith("meshmend: ") for line in done.stderr.splitlines())


def test_importing_the_package_imports_nothing_heavy_and_has_no_effect() -> None:
    done = python(
        "import sys, meshmend\n"
        "print(sorted({'numpy', 'scipy', 'numba', 'typer', 'rich'} & set(sys.modules)))\n"
    )

    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


def test_the_module_is_the_command() -> None:
    command = [sys.executable, "-m", "meshmend", "plan", "--mesh", "2x2", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    bad = [*command[:4], "--mesh", "0x4"]
    refused = subprocess.run(bad, capture_output=True, text=True, check=False, timeout=600)

    assert done.returncode == 0
    assert json.loads(done.stdout)["mesh"]["live"] == 4
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.count("\n") == 1


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_goes_away_is_no_traceback(unbuffered: str) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "meshmend", "algorithms"],
            stdout=writer,
            stderr=subprocess.PIPE,
            check=False,
            timeout=600,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
        )
    finally:
        os.close(writer)

    assert (done.returncode, done.stderr) == (141, b"")


def test_output_that_finds_no_room_is_told_in_one_line_and_without_streams_commands_work(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-m", "meshmend", "algorithms", "--json"]
    closed = f"{sys.executable} -m meshmend show --mesh 2x2 -o mesh.svg <&- >&- 2>&-"

    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=600
        )
    without = subprocess.run(["sh", "-c", closed], cwd=tmp_path, check=False, timeout=600)

    said = "meshmend: cannot write all of the output: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)
    assert without.returncode == 0
    assert (tmp_path / "mesh.svg").read_text().endswith("</svg>\n")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("plan --mesh 4x4 --fail 2x2@0", "the block 2x2 has 2 and its start 0 has 1"),
        ("simulate --mesh 4x4 --fabric 70,0s,0s", "but got '70'; write 70GB/s if you mean"),
        ("show --mesh 4x4 -o x.png", "-o writes SVG, so it needs a name such as x.svg"),
        ("simulate --mesh 4x4 -o x.pdf", "-o writes SVG, so it needs a name such as x.svg"),
        ("reproduce --quick -o x.svg", "-o writes HTML, so it needs a name such as x.html"),
        ("explore --mesh 2x2 --export /x.pdf", "--export writes HTML, so it needs a name such as"),
        ("plan --mesh 2x2 -o /etc/hostname/x", "cannot write /etc/hostname/x: /etc/hostname is no"),
        ("show --mesh 4x4 -o /no-such-folder/x.svg", "there is no folder /no-such-folder"),
        ("simulate --mesh 4X4", "but got '4X4'; write a small x"),
        ("plan --mesh 4x4 --fail 2x2x1@0,0,0", "needs 2 axes, but 2x2x1@0,0,0 has 3"),
        ("simulate --mesh 4x4 --fabric 70,0s,0s", "a bandwidth needs a unit such as MB/s, GB/s"),
        ("simulate --mesh 4x4 --hop-latency 1e7s", "a fabric needs times up to 1e+06 s"),
        ("simulate --mesh 4x4 --fabric 1GB/s,1e7s,0s", "a fabric needs times up to 1e+06 s"),
        ("simulate --mesh 4x4 --fabric 1GB/s,0s,1e7s", "needs times up to 1e+06 s, but got"),
        ("simulate --mesh 4x4 --fabric 1e-9B/s,0s,0s", "a fabric needs links of 1 byte/s or more"),
    ],
)
def test_what_a_command_cannot_do_is_said_in_one_line(
    capsys: Captured, line: str, words: str
) -> None:
    assert run(line.split()) == 2

    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert words in err
    assert not Path("/no-such-folder").exists()


def test_a_latency_of_days_is_simulated_like_any_other(capsys: Captured) -> None:
    slow = ["--fabric", "70GB/s,1000000s,50ns"]
    facts = printed_json(capsys, "simulate", "--mesh", "4x4", *slow, "--algorithm", "trees")

    assert facts["results"][0]["time_s"] > 1e6

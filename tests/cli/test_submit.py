"""`meshmend submit`: the job file that it prints, and what it refuses."""

import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from meshmend.cli.main import run_line
from meshmend.config import JobConfig
from meshmend.errors import InputError
from meshmend.launch import slurm
from meshmend.launch.slurm import Allocation, SlurmJob, supervised

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder to submit from, with a script in it."""
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)


def job_file(capsys: Captured, *options: str) -> str:
    assert run_line(["submit", "slurm", *options]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def directives(text: str) -> list[str]:
    return re.findall(r"^#SBATCH (.*)$", text, flags=re.MULTILINE)


def test_a_job_file_asks_for_a_node_per_host_and_survives_lost_nodes(capsys: Captured) -> None:
    text = job_file(capsys, "--mesh", "8x8", "--hosts", "4x2", "train.py", "--lr", "0.1")

    assert text.startswith("#!/bin/bash\n#SBATCH --job-name=train\n")
    asked = directives(text)
    assert {"--nodes=8", "--ntasks-per-node=1", "--cpus-per-task=8"} <= set(asked)
    assert {"--no-kill", "--requeue", "--open-mode=append"} <= set(asked)
    assert 'run="runs/slurm-$SLURM_JOB_ID"' in text
    assert "slurm-job --mesh 8x8 --hosts 4x2 " in text
    assert text.endswith("    train.py --lr 0.1\n")


def test_hosts_have_4x2_chips_and_dead_hosts_need_no_node(capsys: Captured) -> None:
    text = job_file(capsys, "--mesh", "8x8", "--fail", "host:0,2", "--fail", "0,0", "train.py")

    assert "--nodes=7" in directives(text)
    assert "--fail host:0,2 --fail 0,0" in text


def test_a_step_per_chip_asks_for_a_task_per_chip(capsys: Captured) -> None:
    text = job_file(capsys, "--mesh", "4x4", "--hosts", "2x2", "--per-chip", "train.py")

    assert {"--nodes=4", "--ntasks-per-node=4", "--cpus-per-task=1"} <= set(directives(text))


def test_options_of_sbatch_come_last_so_that_they_win(capsys: Captured) -> None:
    extras = ("--sbatch", "--partition=long", "--sbatch", "--cpus-per-task=96")

    text = job_file(capsys, "--mesh", "4x4", "--time", "8:00:00", *extras, "train.py")

    assert directives(text)[-3:] == ["--time=8:00:00", "--partition=long", "--cpus-per-task=96"]


def test_blanks_and_quotes_survive_in_folders_and_arguments(
    capsys: Captured, tmp_path: Path
) -> None:
    folder, words = str(tmp_path / "it's a folder"), ["--name", "two words", "$HOME"]

    text = job_file(capsys, "--mesh", "4x4", "--run-dir", folder, "train.py", *words)

    line = text.rpartition("exec ")[2].replace("\\\n", "")
    assert shlex.split(line)[-4:] == ["train.py", *words]
    assert f"run={shlex.quote(folder)}\n" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="needs shellcheck")
def test_shellcheck_finds_nothing_in_a_job_file(capsys: Captured) -> None:
    text = job_file(capsys, "--mesh", "4x4", "--run-dir", "a b", "-m", "my.package", "it's")

    subprocess.run(["shellcheck", "-"], input=text, text=True, check=True)


def test_a_job_file_is_written_to_a_file(capsys: Captured, tmp_path: Path) -> None:
    assert job_file(capsys, "--mesh", "4x4", "-o", "jobs/job.sh", "train.py") == ""

    assert (tmp_path / "jobs" / "job.sh").read_text().startswith("#!/bin/bash\n")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("slurm --mesh 8x8 --hosts 3x2 train.py", "--hosts needs a block of chips that tiles"),
        ("slurm --mesh 2x2 train.py", "--hosts needs a block of chips that tiles the mesh 2x2"),
        ("slurm --mesh 8x8 --hosts 4y2 train.py", "--hosts needs a block of chips such as 4x2"),
        ("slurm --mesh 8x8 --board 2 train.py", "--board needs a shape"),
        ("slurm --mesh foo train.py", "--mesh needs positive extents"),
        ("slurm --mesh 4x4 other.py", "needs a script, but there is no file other.py"),
        ("slurm --mesh 4x4 --sbatch partition=long train.py", "--sbatch needs an option of sbatch"),
        ("slurm --mesh 4x4 --port 0 train.py", "--port needs a whole number from 1 to 65535"),
        ("slurm --mesh 4x4", "Missing argument"),
        ("pbs --mesh 4x4 train.py", "No such command 'pbs'"),
    ],
)
def test_what_cannot_be_submitted_is_refused_in_one_line(
    capsys: Captured, line: str, words: str
) -> None:
    assert run_line(["submit", *line.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert words in err


def test_a_second_line_in_an_option_of_sbatch_is_refused(capsys: Captured) -> None:
    assert run_line(["submit", "slurm", "--mesh", "4x4", "--time", "1\nrm x", "train.py"]) == 2
    assert "--time needs one line of printable text" in capsys.readouterr().err


def test_submitting_without_slurm_is_refused(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")

    assert run_line(["submit", "slurm", "--mesh", "4x4", "--run", "train.py"]) == 2
    assert "--run needs sbatch of Slurm" in capsys.readouterr().err


def test_what_a_job_file_runs_is_refused_outside_of_slurm(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    secret = tmp_path / "secret"
    secret.write_text("only the chips of this test know")
    secret.chmod(0o600)
    line = [
        "slurm-job",
        "--mesh",
        "4x4",
        "--run-dir",
        "r",
        "--secret-file",
        str(secret),
        "train.py",
    ]

    assert run_line(line) == 2
    assert "needs to run in a job file" in capsys.readouterr().err


def job(tmp_path: Path, changes: Mapping[str, object] = {}) -> SlurmJob:
    secret = tmp_path / "secret"
    secret.write_text("only the chips of this test know")
    secret.chmod(0o600)
    settings = {"mesh.shape": "4x4", "hosts.block": "2x2", "job.run_dir": str(tmp_path)}
    settings["job.secret_file"] = str(secret)
    return SlurmJob(JobConfig().with_({**settings, **changes}), ("train.py", "-v"))


ALLOCATION = Allocation("7", ("n0", "n1", "n2", "n3"), "127.0.0.1", {"SLURM_CPUS_PER_TASK": "2"})


def test_each_host_has_a_step_on_its_node_with_its_block_of_chips(tmp_path: Path) -> None:
    commands = supervised(job(tmp_path), ALLOCATION)

    assert list(commands.steps) == [f"host 2x2@{at}" for at in ("0,0", "0,2", "2,0", "2,2")]
    line = " ".join(commands.steps["host 2x2@2,0"]().command)
    assert line.startswith("srun --overlap --no-kill --nodelist=n2 --job-name=host-2x2@2.0 ")
    assert " --nodes=1 --ntasks=1 " in line
    assert " agent --coordinator 127.0.0.1:" in line
    assert " --chips 2x2@2,0 --supervised --slurm-job 7 " in line
    assert line.endswith(" train.py -v")
    assert "--state" in commands.coordinator()
    assert commands.coordinator()[-1] == "--restarted"


def test_a_step_per_chip_skips_chips_that_have_failed(tmp_path: Path) -> None:
    mesh = {"mesh.shape": "2x4", "mesh.fail": ("0,1", "2x2@0,2")}

    commands = supervised(job(tmp_path, {**mesh, "slurm.per_chip": True}), ALLOCATION)

    assert list(commands.steps) == ["chip 0,0", "chip 1,0", "chip 1,1"]
    assert "--exact" in commands.steps["chip 1,1"]().command


def test_a_host_whose_node_has_left_the_job_asks_for_another_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Allocation, "has", lambda self, node: node != "n2")
    inside = {"SLURM_JOB_PARTITION": "long", "SLURM_JOB_ID": "7", "SLURM_CONF": "conf", "HOME": "h"}
    extras = ("--gres=gpu:4", "--output=job.out", "-J name", "--constraint 'a b'")
    allocation = Allocation("7", ALLOCATION.nodes, "127.0.0.1", inside)
    commands = supervised(job(tmp_path, {"slurm.sbatch": extras}), allocation)
    lost, other = commands.steps["host 2x2@2,0"], commands.steps["host 2x2@0,0"]
    assert "--nodelist=n2" in lost().command  # Slurm is asked only about a step that has died

    again = lost()

    words = ["--partition=long", "--gres=gpu:4", "--constraint", "a b"]
    assert list(again.command[:5]) == ["srun", *words]
    assert "--job-name=meshmend-7-host-2x2@2.0" in again.command
    assert again.environment == {"SLURM_CONF": "conf", "HOME": "h"}
    assert [
        command for command in (other(), other()) if "--nodelist=n0" not in command.command
    ] == []


@pytest.mark.parametrize(
    ("left", "asked"), [("1-02:03:04", ["--time=1-02:03:04"]), ("UNLIMITED", []), ("INVALID", [])]
)
def test_what_replaces_a_node_has_the_processors_of_a_host_and_the_time_that_the_job_has_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left: str, asked: list[str]
) -> None:
    answers = {"--format=%N": "", "--format=%L": f"{left}\n"}
    monkeypatch.setattr(slurm, "ask_slurm", lambda *command: answers.get(command[-1], ""))
    extras = {"slurm.sbatch": ("--time=2-00:00:00", "--qos=long")}
    lost = supervised(job(tmp_path, extras), ALLOCATION).steps["host 2x2@2,0"]
    lost()

    words = lost().command

    assert "--nodelist=n2" not in words
    assert "--cpus-per-task=2" in words
    times = [word for word in words if word.startswith("--time")]
    assert times == ["--time=2-00:00:00", *asked]  # the last one counts


def test_a_node_that_resolves_its_own_name_to_loopback_has_the_address_toward_another_node(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers = {"n0": "127.0.1.1", "n1": "127.0.0.1", "n2": "192.0.2.7"}

    def ask(*command: str) -> str:
        if command[:3] == ("scontrol", "show", "hostnames"):
            return "n0\nn1\nn2\n"
        return f"NodeName={command[3]} NodeAddr={answers[command[3]]} State=IDLE"

    monkeypatch.setattr(slurm, "ask_slurm", ask)
    monkeypatch.setattr(slurm, "address_toward", lambda endpoint: f"toward {endpoint[0]}")
    inside = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[0-2]", "SLURMD_NODENAME": "n0"}

    assert Allocation.from_environment(inside).address == "toward 192.0.2.7"
    answers["n2"] = "127.0.0.1"  # all nodes are on one machine
    assert Allocation.from_environment(inside).address == "127.0.1.1"
    answers["n0"] = "192.0.2.5"
    assert Allocation.from_environment(inside).address == "192.0.2.5"


def test_the_coordinator_has_the_port_that_its_user_wants(capsys: Captured, tmp_path: Path) -> None:
    assert " --port 24816 " in job_file(capsys, "--mesh", "4x4", "--port", "24816", "train.py")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InputError, match=f"the coordinator needs port {port} of 127.0.0.1"):
            supervised(job(tmp_path, {"slurm.port": port}), ALLOCATION)

    commands = supervised(job(tmp_path, {"slurm.port": port}), ALLOCATION)

    assert f"127.0.0.1:{port}" in commands.coordinator()


def test_an_allocation_with_too_few_nodes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="hosts of 1x1 needs 16 nodes, but job 7 has 4; ask for"):
        supervised(job(tmp_path, {"hosts.block": "1x1"}), ALLOCATION)


def test_without_a_scheduler_submit_prints_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_line(["submit"]) == 0
    printed = capsys.readouterr()
    assert "jobset" in printed.out
    assert not printed.err

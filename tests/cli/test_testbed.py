"""`meshmend testbed` from the command line, as root and as nobody."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshmend.cli.main import run_line as run
from meshmend.lab.testbed import records
from meshmend.lab.testbed.bed import Testbed
from testbeds import require_testbed


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of records that no other test sees; what is up in it goes down at the end."""
    monkeypatch.setenv("MESHMEND_TESTBED_DIR", str(tmp_path / "run"))
    yield tmp_path / "run"
    for record in records.live_records():
        Testbed.of(record).down()


def meshmend(line: str) -> int:
    """Run `meshmend testbed` with these words and return its exit code."""
    return run(["testbed", *line.split()])


def test_a_testbed_is_made_broken_mended_and_taken_down(
    run_dir: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    require_testbed()

    assert meshmend("up --mesh 2x3 --fail 0,1 --link 50Mbit --name one") == 0
    assert "chips        5 up, 1 down" in capfd.readouterr().out
    assert meshmend("exec 0,0 ip -brief address show dev chip") == 0
    assert "10.0.0.1/32" in capfd.readouterr().out
    assert meshmend("exec --name one 0,0 test -e /nowhere") == 1
    assert meshmend("fail link:1,0-1,1") == 0
    assert "links        3 up, 4 down; 6.25 MB/s (50 Mbit/s) each way" in capfd.readouterr().out
    assert meshmend("repair 0,1 link:1,0-1,1") == 0
    assert "links        7 up, 0 down" in capfd.readouterr().out
    assert meshmend("down one") == 0
    assert capfd.readouterr().out == "down         one\n"
    assert not run_dir.exists()


def test_status_as_json_names_every_chip_and_link(capsys: pytest.CaptureFixture[str]) -> None:
    require_testbed()

    assert meshmend("up --mesh 1x3 --fail 0,2 --link 1MB/s --json") == 0
    made = json.loads(capsys.readouterr().out)
    assert meshmend("status --json") == 0
    (shown,) = json.loads(capsys.readouterr().out)["testbeds"]

    assert shown == made
    assert shown["name"] == "bed1"
    assert shown["mesh"] == "1x3 less 0,2"
    assert shown["link_bytes_per_s"] == 1e6
    assert [(chip["address"], chip["up"]) for chip in shown["chips"]] == [
        ("10.0.0.1", True),
        ("10.0.0.2", True),
        ("10.0.0.3", False),
    ]
    assert shown["links"] == [
        {"link": "link:0,0-0,1", "up": True, "speed": 1.0, "loses": [0.0, 0.0]},
        {"link": "link:0,1-0,2", "up": False, "speed": 1.0, "loses": [0.0, 0.0]},
    ]
    assert meshmend("down --all --json") == 0
    assert json.loads(capsys.readouterr().out) == {"down": ["bed1"], "leftovers": []}


def test_status_shows_what_a_link_loses_until_it_loses_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    require_testbed()
    assert meshmend("up --mesh 1x3 --link 50Mbit") == 0
    assert meshmend("lose link:0,0-0,1=0.01") == 0
    Testbed.attach().drop((0, 1), (0, 0))
    assert meshmend("fail 0,2") == 0
    capfd.readouterr()

    assert meshmend("status") == 0
    assert "packets      link:0,0-0,1 loses 0.01 of them there, 1 back" in capfd.readouterr().out
    assert meshmend("lose link:0,0-0,1=0") == 0
    assert meshmend("status") == 0
    assert "packets" not in capfd.readouterr().out


def test_check_prints_the_ratio_of_measured_to_asked(capsys: pytest.CaptureFixture[str]) -> None:
    require_testbed()
    meshmend("up --mesh 1x2 --link 10Mbit")
    capsys.readouterr()

    assert meshmend("check --between 0,0-0,1 --json") == 0
    assert 0 < json.loads(capsys.readouterr().out)["ratio"] < 1.05  # less on a busy machine


def test_without_a_testbed_status_and_down_all_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert meshmend("status") == 0
    assert meshmend("down --all") == 0
    assert capsys.readouterr().out == "no testbed is up\n" * 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("up --mesh 4 x4 --link 50Mbit", "unexpected extra argument"),
        ("up --mesh 4x --link 50Mbit", "--mesh needs positive extents"),
        ("up --mesh 4x4 --link fast", "a bandwidth needs a number and a unit"),
        ("up --mesh 4x4", "Missing option '--link'"),
        ("up --mesh 40x40 --link 50Mbit", "at most 256 chips"),
        ("up --mesh 2x2 --link 50Mbit --name a/b", "but got 'a/b'"),
        ("exec 0,0 ls", "there is none; make one with: meshmend testbed up"),
        ("exec --name one 0,0 ls", "there is no testbed 'one'; up: none"),
        ("exec 2x2@0,0 ls", "exec needs a chip such as 3,4, but got '2x2@0,0'"),
        ("exec nowhere ls", "exec needs a chip such as 3,4, but got 'nowhere'"),
        ("fail 0,0", "there is none; make one"),
        ("repair 0,0", "there is none; make one"),
        ("check", "there is none; make one"),
        ("down", "there is none; make one"),
        ("down one --all", "down needs a name or --all, but got both"),
        ("status one", "there is no testbed 'one'"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    line: str, message: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert meshmend(line) == 2

    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1
    assert message in shown.err
    assert not run_dir.exists()


JOB = """
import os
from meshmend.lab.testbed.bed import Testbed
from meshmend.lab.testbed.measure import link_rate
from meshmend.topology.text import parse_mesh
with Testbed.up(parse_mesh("2x2"), link_bandwidth=1.25e6) as bed:
    bed.fail("0,1")
    link_rate(bed)
    child = os.fork()
    if not child:
        bed.enter((1, 1))
        os._exit(0 if bed.address((1, 1)) in os.popen("ip address").read() else 1)
    assert os.waitpid(child, 0)[1] == 0
    print(os.geteuid(), bed.is_user, bed.mesh)
"""

NOBODY = "--reuid=65534 --regid=65534 --clear-groups"
ROOT_WITHOUT_ADMIN = "--bounding-set=-sys_admin --inh-caps=-sys_admin"


def run_as(privileges: str, interpreter: str, tmp_path: Path) -> "subprocess.CompletedProcess[str]":
    """Run a job that makes a testbed with fewer privileges than ours."""
    folder = tmp_path / "theirs"
    folder.mkdir(mode=0o777, exist_ok=True)
    folder.chmod(0o777)
    environment = {
        "PATH": os.environ["PATH"],
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "MESHMEND_TESTBED_DIR": str(folder / "run"),
        "NUMBA_DISABLE_JIT": "1",  # two by two chips are not worth compiling for
    }
    argv = ["setpriv", *privileges.split(), interpreter, "-c", JOB]
    return subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.slow
def test_root_without_admin_rights_uses_a_user_namespace(tmp_path: Path) -> None:
    require_testbed()
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root, to give up rights, and setpriv")

    done = run_as(ROOT_WITHOUT_ADMIN, sys.executable, tmp_path)

    assert done.stdout == "0 True 2x2 less 0,1\n", done.stderr
    assert not (tmp_path / "theirs/run").exists()


def test_nobody_can_make_a_testbed(tmp_path: Path) -> None:
    require_testbed()
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root, to become nobody, and setpriv")
    for parent in (tmp_path, *tmp_path.parents[:2]):
        parent.chmod(0o755)
    system = f"/usr/bin/python3.{sys.version_info.minor}"
    for interpreter in (sys.executable, system):
        done = run_as(NOBODY, interpreter, tmp_path)
        if done.returncode == 0:
            break
        if (
            "Permission denied" not in done.stderr + done.stdout
            and "cannot start" not in done.stderr
        ):
            pytest.fail(done.stderr)
    else:
        pytest.skip(f"nobody may not run Python here: {done.stderr.strip()[-200:]}")

    assert done.stdout == "65534 True 2x2 less 0,1\n"
    assert not (tmp_path / "theirs/run").exists()

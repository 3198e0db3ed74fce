"""`meshmend run`: output, failures, exit codes, and that nothing outlives it."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from commanding import commands, meshmend_run
from ports import free_port
from waiting import HANG_S, until

pytest.importorskip("torch")

from meshmend.launch import script as launch_script

EXAMPLES = Path(__file__).parents[2] / "examples" / "torch"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """A script that does what its arguments say, without torch's slow parts."""
    path = tmp_path / "script.py"
    path.write_text(
        "import os, signal, sys, time\n"
        "what, rank = sys.argv[1], int(os.environ['RANK'])\n"
        "print('chip', os.environ['MESHMEND_CHIP'], 'of', os.environ['WORLD_SIZE'], flush=True)\n"
        "if what == 'raise' and rank == 2: raise ValueError('no more chips')\n"
        "if what == 'exit' and rank == 1: sys.exit(7)\n"
        "if what == 'text' and rank == 1: sys.exit('that is all')\n"
        "if what == 'kill' and rank == 1: os.kill(os.getpid(), signal.SIGKILL)\n"
        "if what != 'end': time.sleep(600)\n"
    )
    return path


def test_every_line_names_its_chip(script: Path) -> None:
    ended = meshmend_run("--mesh", "2x2", "--fail", "0,1", script, "end")

    assert ended.returncode == 0, ended.stderr
    assert sorted(ended.stdout.splitlines()) == [
        "[0,0] chip 0,0 of 3",
        "[1,0] chip 1,0 of 3",
        "[1,1] chip 1,1 of 3",
    ]


@pytest.mark.parametrize(
    ("what", "code", "said"),
    [
        (
            "raise",
            1,
            r"chip \(1, 0\) \(rank 2\) failed first: exit code 1\nTraceback(.*\n)*"
            r".*script.py\", line 4, in <module>\n.*\n.*\n?ValueError: no more chips",
        ),
        ("exit", 7, r"chip \(0, 1\) \(rank 1\) failed first: exit code 7"),
        ("text", 1, r"failed first: exit code 1\nthat is all"),
        ("kill", 137, r"chip \(0, 1\) \(rank 1\) failed first: killed by SIGKILL"),
    ],
)
def test_the_first_failure_is_told_and_ends_the_job(
    script: Path, what: str, code: int, said: str
) -> None:
    ended = meshmend_run("--mesh", "2x2", script, what)

    assert ended.returncode == code
    assert re.search(said, ended.stderr), ended.stderr


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--mesh", "2x2", "nowhere.py"], "there is no file nowhere.py"),
        (["--mesh", "2x2", "-m", "nowhere.train"], "a module, but there is none named 'nowhere."),
        (["--mesh", "2by2", "nowhere.py"], "--mesh needs positive extents"),
        (["--mesh", "2x2", "--preload", "nosuchmodule", "{script}"], "cannot import nosuchmodule"),
        (["--mesh", "2x2", "--algorithm", "magic", "{script}"], "no algorithm 'magic'"),
        (["--mesh", "1x5", "--fail", "0,1", "{script}"], "(0, 0) is cut off"),
    ],
)
def test_bad_input_ends_with_code_2_and_one_line(
    script: Path, arguments: list[str], match: str
) -> None:
    ended = meshmend_run(*(part.replace("{script}", str(script)) for part in arguments))

    assert ended.returncode == 2
    assert match in ended.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -9)]
)
def test_no_worker_outlives_its_parent(
    script: Path, number: int, code: int, tmp_path: Path
) -> None:
    with commands(tmp_path) as start:
        parent = start("run", "run", "--mesh", "2x2", script, "sleep")
        until(lambda: len(parent.out.splitlines()) == 4, why=lambda: parent.err)
        children = children_of(parent.pid)
        parent.signal(number)
        assert parent.end() == code

    assert len(children) == 4
    until(lambda: not any(Path(f"/proc/{child}").exists() for child in children))


def children_of(pid: int) -> list[int]:
    """Return the processes whose parent this is."""
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


DYING = """
import os, torch, torch.distributed as dist
dist.init_process_group("meshmend")
x = torch.ones(1 << 20)
dist.all_reduce(x)
if dist.get_rank() == 3:
    os._exit(9)
try:
    while True:
        dist.all_reduce(x)
except Exception as error:
    print(error, flush=True)
"""


def test_a_worker_that_dies_is_named_by_every_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_script, "_GRACE_S", HANG_S)  # a second, on a busy machine, is short
    script = tmp_path / "dying.py"
    script.write_text(DYING)

    ended = meshmend_run("--mesh", "2x4", script)

    assert ended.returncode == 9
    told = re.findall(r"\] chip \(0, 3\) \(rank 3\) hung up", ended.stdout)
    assert len(told) == 7, ended.stdout + ended.stderr


@pytest.mark.parametrize(
    ("example", "mesh", "preload"),
    [
        ("ddp_digits.py", ["--mesh", "2x3", "--fail", "0,1"], []),
        pytest.param(
            "ddp_digits.py",
            ["--mesh", "4x4", "--fail", "2x2@0,2"],
            [],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "hsdp.py",
            ["--mesh", "2x4"],  # imported once instead of by each worker
            ["torch.distributed.fsdp", "torch.distributed.tensor.parallel"],
            marks=pytest.mark.slow,  # tests of tiles compare such losses with those of one process
        ),
        pytest.param(
            "accelerate_bert.py",
            ["--mesh", "2x3", "--fail", "0,1"],
            ["transformers.models.bert.modeling_bert", "accelerate"],
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "ddp_resnet.py",
            ["--mesh", "4x4", "--fail", "2x2@0,2"],
            ["transformers.models.resnet.modeling_resnet"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_training_gives_the_losses_of_gloo(
    example: str, mesh: list[str], preload: list[str], tmp_path: Path
) -> None:
    for name in preload:
        pytest.importorskip(name)
    preloads = (f"--preload={name}" for name in preload)
    line = ("run", *mesh, *preloads, EXAMPLES / example, "--backend")
    with commands(tmp_path) as start:
        meshmend = start("meshmend", *line, "meshmend")
        assert meshmend.end() == 0, meshmend.err
        ours = losses_in(meshmend.out)
        gloo = start("gloo", *line, "gloo")
        # Gloo now and then hangs at its end: what it has printed is enough.
        until(lambda: gloo.out.count("\n") == len(ours) or gloo.has_ended, why=lambda: gloo.err)
        theirs = losses_in(gloo.out)

    assert len(ours) == len(theirs) >= 5
    # Sums in another order differ in the last bits, and training makes more of it step by step.
    assert ours[:10] == pytest.approx(theirs[:10], rel=1e-5, abs=2e-6)
    assert ours[-1] < ours[0]


def losses_in(text: str) -> list[float]:
    return [float(line.split()[-1]) for line in text.splitlines()]


TORCHRUN = """
import torch, torch.distributed as dist, meshmend.torch
dist.init_process_group("meshmend")
x = torch.full((1000,), float(dist.get_rank()))
dist.all_reduce(x)
print(f"rank {dist.get_rank()} sum {x[0].item():.0f}", flush=True)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_two_agents_of_torchrun_make_one_mesh(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(TORCHRUN)
    port = free_port()
    environment = os.environ | {"MESHMEND_MESH": "2x3", "MESHMEND_FAIL": "0,1 0,0"}
    agents = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2"),
                *("--nproc-per-node", "2", "--node-rank", str(node)),
                *("--master-addr", "127.0.0.1", "--master-port", str(port), str(script)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for node in range(2)
    ]
    ended = [agent.communicate(timeout=HANG_S) for agent in agents]

    assert [agent.returncode for agent in agents] == [0, 0], ended
    lines = sorted(line for out, _ in ended for line in out.splitlines())
    assert lines == [f"rank {rank} sum 6" for rank in range(4)]


def test_a_script_need_not_import_the_backend(tmp_path: Path) -> None:
    """In a process of its own: this one has imported the backend for other tests."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch.distributed as dist\nprint('MESHMEND' in dist.Backend._plugins)\n"
    )
    command = [sys.executable, "-m", "meshmend", "run", "--mesh", "1x2", str(script)]

    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)

    assert sorted(ended.stdout.splitlines()) == ["[0,0] True", "[0,1] True"], ended.stderr


@pytest.mark.parametrize(
    ("said", "preallocate"),
    [
        ({}, "false"),
        ({"XLA_PYTHON_CLIENT_PREALLOCATE": "true"}, "true"),
        ({"XLA_PYTHON_CLIENT_MEM_FRACTION": ".2"}, "None"),
    ],
)
def test_workers_share_the_memory_of_a_gpu_unless_the_user_says_how(
    said: dict[str, str], preallocate: str, tmp_path: Path
) -> None:
    """JAX would take three quarters of it for the first worker, and the others would die."""
    script = tmp_path / "script.py"
    script.write_text("import os\nprint(os.environ.get('XLA_PYTHON_CLIENT_PREALLOCATE'))\n")

    ended = meshmend_run("--mesh", "1x2", script, **said)

    assert sorted(ended.stdout.splitlines()) == [f"[0,0] {preallocate}", f"[0,1] {preallocate}"]

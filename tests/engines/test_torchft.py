"""torchft's Manager on our schedules: a replica is killed, the others go on, and it comes back.

Needs torchft and the torch that it was built for: `pip install torchft==0.2.0`, or a newer one,
which takes the group that PyTorch makes with our backend (torch 2.15).
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from waiting import until

torchft = pytest.importorskip("torchft", reason="needs torchft: pip install torchft")

from meshmend.errors import InputError  # noqa: E402
from meshmend.topology.text import parse_mesh  # noqa: E402
from meshmend.torch.torchft import MeshmendReplicas  # noqa: E402

pytestmark = pytest.mark.engines

EXAMPLE = Path(__file__).parents[2] / "examples" / "torch" / "torchft_digits.py"
N_STEPS = 150
# Importing takes as long as many steps: a process does it before it is told to begin.
_WHEN_TOLD = """
import runpy, sys
import torchft, meshmend.torch.torchft
sys.stdin.readline()
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
coordination: Any = import_module("torchft.coordination")
dist: Any = import_module("torch.distributed")  # whose names are hidden from mypy now and then
CHIPS = ("0,0", "0,1", "1,0", "1,1")
# Newer ones take PyTorch's own groups, and need a store for the ranks to meet in.
TAKES_GROUPS = hasattr(import_module("torchft.process_group"), "ReconfigureOptions")
_LINE = re.compile(r"step (\d+) of (\d+) replicas, weights (\S+)")


class Replicas:
    """Processes of the example, one for each chip; each writes what it prints to a file.

    One that is ready waits until it is told to begin.
    """

    def __init__(self, folder: Path, lighthouse: str, stack: ExitStack) -> None:
        self._folder, self._lighthouse, self._stack = folder, lighthouse, stack
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def make_ready(self, chip: str) -> subprocess.Popen[bytes]:
        output = self._stack.enter_context((self._folder / chip).open("ab"))
        command = [sys.executable, "-c", _WHEN_TOLD, str(EXAMPLE)]
        command += ["--mesh", "2x2", "--chip", chip, "--pause", "0.1"]
        command += ["--lighthouse", self._lighthouse, "--steps", str(N_STEPS)]
        command += ["--store", f"127.0.0.1:{self._store.port}"] if TAKES_GROUPS else []
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=subprocess.STDOUT
        )
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def begin(self, chip: str, process: subprocess.Popen[bytes]) -> None:
        self.processes[chip] = process
        assert process.stdin is not None
        process.stdin.write(b"\n")
        process.stdin.close()

    def steps(self, chip: str) -> dict[int, tuple[int, str]]:
        """Return by its number how many did a step, and the sum of the weights after it."""
        text = (self._folder / chip).read_text(errors="replace")
        return {int(step): (int(n), total) for step, n, total in _LINE.findall(text)}

    def outputs(self) -> str:
        return "\n".join(
            f"{file.name}:\n{file.read_text()[-2000:]}" for file in self._folder.iterdir()
        )


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[Replicas]:
    server = coordination.LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=2,
        join_timeout_ms=2000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=2000,
    )
    port = server.address().rpartition(":")[2]
    with ExitStack() as stack:
        yield Replicas(tmp_path, f"http://127.0.0.1:{port}", stack)
    server.shutdown()


def test_the_others_go_on_after_a_kill_and_the_replica_heals(replicas: Replicas) -> None:
    ready = {chip: replicas.make_ready(chip) for chip in CHIPS}
    for chip in CHIPS:
        replicas.begin(chip, ready[chip])
    spare = replicas.make_ready("0,1")

    def has(chip: str, n_replicas: int) -> bool:
        return any(n == n_replicas for n, _ in replicas.steps(chip).values())

    until(lambda: all(has(chip, 4) for chip in CHIPS), why=replicas.outputs)
    replicas.processes["0,1"].kill()
    until(lambda: has("0,0", 3), why=replicas.outputs)
    replicas.begin("0,1", spare)
    codes = [replicas.processes[chip].wait(120) for chip in CHIPS]

    assert codes == [0] * 4, replicas.outputs()
    last = {chip: replicas.steps(chip)[N_STEPS] for chip in CHIPS}
    assert set(last.values()) == {(4, last["0,0"][1])}, replicas.outputs()
    everyone = [replicas.steps(chip) for chip in CHIPS]
    for step in range(1, N_STEPS + 1):
        assert len({steps[step] for steps in everyone if step in steps}) == 1, step
    output = replicas.outputs()
    assert "runs on Gloo" not in output, output


def test_a_replica_has_compiled_before_its_first_quorum() -> None:
    with mock.patch("meshmend.torch.torchft.compile_once") as compiled:
        MeshmendReplicas(parse_mesh("2x2"), (0, 1))

    compiled.assert_called_once_with()


def test_a_chip_that_is_not_there_is_refused() -> None:
    with pytest.raises(InputError, match="needs a live chip of the mesh 2x2"):
        MeshmendReplicas(parse_mesh("2x2", fail=["0,1"]), (0, 1))

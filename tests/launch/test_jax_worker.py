"""`meshmend worker` with a loop over a `JaxJob`: refused beside PyTorch, killed, and back."""

import signal
from pathlib import Path

import pytest

from commanding import Command, commands
from ports import free_port
from waiting import until

pytest.importorskip("torch")

from meshmend.train.data.audit import audit


@pytest.fixture(autouse=True)
def imported() -> None:
    """JAX is imported here, once for all workers, which are forked."""
    pytest.importorskip("jax")
    pytest.importorskip("optax")


JAX = """
import os, sys, time
import jax.numpy as jnp, numpy as np, optax
from meshmend.train import JaxJob

inputs = np.random.default_rng(0).normal(size=(100, 8)).astype(np.float32)
losses = lambda params, batch: jnp.square(batch[0] @ params - batch[1])
data = (inputs, inputs.sum(axis=1))
job = JaxJob(np.zeros(8, np.float32), optax.adam(0.1), losses, data, batch=16, steps=40)
for batch in job:
    job.step(batch)
    while job.step_number == 20 and not os.path.exists(sys.argv[1]):
        open(sys.argv[1] + "-" + os.environ["MESHMEND_CHIP"], "w").close()
        time.sleep(0.02)
print(f"finished {job.step_number} {job.loss:.6f}")
"""

TORCH = """
import torch
from meshmend.train import Job

model = torch.nn.Linear(8, 1)
data = [torch.zeros(8)] * 100
job = Job(model, torch.optim.Adam(model.parameters()), data, batch=16, steps=40)
for inputs in job:
    job.step(model(inputs).sum())
"""


def test_a_jax_worker_is_killed_and_comes_back_and_one_of_torch_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHMEND_SECRET", "only the chips of this test know")
    for name, text in (("jax", JAX), ("torch", TORCH)):
        (tmp_path / f"{name}_loop.py").write_text(text)
    gate, run_dir, address = tmp_path / "gate", tmp_path / "run", f"127.0.0.1:{free_port()}"
    with commands(tmp_path) as start:
        listen = ("--listen", address, "--board", "1x1", "--set", "timing.heartbeat_timeout=60")
        coordinator = start("coordinator", "coordinator", "--mesh", "1x2", *listen)

        def worker(name: str, chip: str, framework: str = "jax") -> Command:
            line = ("worker", "--mesh", "1x2", "--board", "1x1", "--coordinator", address)
            mine = ("--chip", chip, "--run-dir", run_dir, tmp_path / f"{framework}_loop.py", gate)
            return start(name, *line, *mine)

        first = worker("first", "0,0")
        until(lambda: "connected, 1 of 2" in coordinator.err, why=lambda: coordinator.err)
        wrong = worker("wrong", "0,1", "torch")
        assert wrong.end() == 1
        assert wrong.err.splitlines()[-1] == (
            "meshmend: chip (0, 1) refused: framework is torch on that chip, but jax in this job, "
            "as on chip (0, 0)"
        )
        killed = worker("killed", "0,1")
        until(lambda: Path(f"{gate}-0,1").exists(), why=lambda: killed.err)
        killed.signal(signal.SIGKILL)
        killed.end()
        again = worker("again", "0,1")
        until(lambda: coordinator.err.count("(0, 1) connected") > 1, why=lambda: coordinator.err)
        gate.touch()

        assert [first.end(), again.end()] == [0, 0], first.err + again.err
    assert first.out == again.out
    assert first.out.startswith("finished 40 ")
    found = audit(run_dir / "ledger")
    assert (found.steps, found.used, found.lost, found.repeated) == (40, 640, 0, 0)
    assert found.replicas_equal

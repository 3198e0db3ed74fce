"""The chips of a job compare all of their state: a bit that differs is found and named."""

import json
import re
from pathlib import Path
from textwrap import dedent

import pytest

from commanding import Ended, meshmend_run

pytest.importorskip("torch")

from meshmend.train.state.checkpoint import complete_steps

_BEGIN = """
import json, os, random, struct, sys
import torch
from meshmend.errors import ReplicasDifferError
from meshmend.train import Job

torch.manual_seed(0)
inputs = torch.randn(500, 8)
dataset = torch.utils.data.TensorDataset(inputs, inputs @ torch.randn(8, 1))
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))
model.register_buffer("mask", torch.full((4, 4), -torch.inf).triu(1), persistent=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1000)
optimizer.register_step_post_hook(lambda *_: scheduler.step())
network = torch.nn.Sequential(*model)
mse = torch.nn.functional.mse_loss
"""


def run(folder: Path, script: str, *options: str, mesh: str = "1x2") -> Ended:
    """Run a script; it finds a data set, a model with buffers, an optimizer and a scheduler."""
    path = folder / "script.py"
    path.write_text(_BEGIN + dedent(script))
    return meshmend_run("--elastic", "--mesh", mesh, *options, str(path))


_FLIPS = """
def flip(tensor, bit):
    data = tensor.detach().reshape(-1).view(torch.uint8)
    before = data.clone()
    data[bit // 8] ^= 1 << (bit % 8)
    return lambda: data.copy_(before)

def flipped_float(value, bit):
    return struct.unpack("<d", (int.from_bytes(struct.pack("<d", value), "little") ^ (1 << bit))
                         .to_bytes(8, "little"))[0]

names = {parameter: name for name, parameter in model.named_parameters()}

def places():
    "Yield all of the state: a name, a number of bits, and what flips one and returns the undoing."
    for name, tensor in model.state_dict().items():
        yield f"model.{name}", 8 * tensor.nbytes, lambda bit, t=tensor: flip(t, bit)
    yield "buffers.mask", 8 * model.mask.nbytes, lambda bit: flip(model.mask, bit)
    for parameter, state in optimizer.state.items():
        for key, tensor in state.items():
            name = f"the optimizer's {key} of {names[parameter]}"
            yield name, 8 * tensor.nbytes, lambda bit, t=tensor: flip(t, bit)
    group = optimizer.param_groups[0]
    for key in ("lr", "eps", "weight_decay"):
        def change(bit, key=key):
            before, group[key] = group[key], flipped_float(group[key], bit)
            return lambda: group.update({key: before})
        yield f"optimizer.param_groups.0.{key}", 64, change
    def advance(bit):
        before, scheduler.last_epoch = scheduler.last_epoch, scheduler.last_epoch ^ (1 << bit)
        return lambda: setattr(scheduler, "last_epoch", before)
    yield "also.0.last_epoch", 16, advance

N_FLIPS = int(os.environ["N_FLIPS"])
choose = random.Random(0)
job = Job(model, optimizer, dataset, batch=16, steps=8, also=[scheduler], compare_every=1)
flips, found = 0, []
for features, targets in job:
    loss = mse(network(features), targets)
    loss.backward()
    try:
        job.step(loss)
    except ReplicasDifferError as error:
        found.append([place, bit, str(error)])
        if job.rank == 1:
            undo()
    if job.step_number >= 2 and flips < N_FLIPS and job.step_number < 8:
        kinds = list(places())
        place, n_bits, change = kinds[flips % len(kinds)]
        bit = choose.randrange(n_bits)
        flips += 1
        if job.rank == 1:
            undo = change(bit)
print(json.dumps(found))
"""


def check_flips(folder: Path, n_flips: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that so many flipped bits, all over the state of one chip, are found and named."""
    monkeypatch.setenv("N_FLIPS", str(n_flips))

    ended = run(folder, _FLIPS)

    assert "replicas equal bit for bit" in ended.stderr
    lines = [line.partition("] ")[2] for line in ended.stdout.splitlines() if line[:1] == "["]
    assert len(lines) == 2
    for line in lines:
        found = json.loads(line)
        assert len(found) == n_flips
        for place, bit, words in found:
            assert re.search(rf"in {re.escape(place)}( \(|;)", words), (place, bit, words)
            assert "differ after step 2 (equal after step 1)" in words


def test_single_bits_that_flip_in_each_kind_of_state_are_found_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_flips(tmp_path, 30, monkeypatch)


@pytest.mark.slow
def test_a_hundred_single_bits_that_flip_are_found_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_flips(tmp_path, 100, monkeypatch)


def test_a_job_whose_chips_differ_ends_and_says_who_what_and_since_when(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        """
        job = Job(model, optimizer, dataset, batch=16, steps=40, also=[scheduler], compare_every=5)
        for features, targets in job:
            loss = mse(network(features), targets)
            loss.backward()
            job.step(loss)
            if job.step_number == 7 and job.chips[job.rank] == (1, 0):
                with torch.no_grad():
                    model.mask[2, 1] = 1e-30
        """,
        "--run-dir",
        str(tmp_path / "run"),
        mesh="2x2",
    )

    assert ended.returncode == 1
    words = (
        "the states of the chips differ after step 10 (equal after step 5): chip (1, 0) against "
        "the other 3 chips, in buffers.mask; usual causes: an optimizer stepped"
    )
    assert words in ended.stderr
    assert '"event":"states-differ"' in (tmp_path / "run" / "events.jsonl").read_text()
    assert (
        "the chips differ after step 10, equal after step 5: chip (1, 0) in buffers.mask"
        in ended.stderr
    )


def test_a_difference_in_the_last_steps_is_found_at_the_end(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        """
        job = Job(model, optimizer, dataset, batch=16, steps=4, also=[scheduler])
        for features, targets in job:
            loss = mse(network(features), targets)
            loss.backward()
            job.step(loss)
            if job.step_number == 2 and job.rank == 1:
                optimizer.param_groups[0]["lr"] = 0.02
        """,
    )

    assert ended.returncode == 1
    assert "differ after step 4 (equal after step 1)" in ended.stderr
    assert "optimizer.param_groups.0.lr (0.01 against 0.02)" in ended.stderr


def test_large_weights_that_a_loop_changes_before_its_step_are_no_difference_but_a_flip_is(
    tmp_path: Path,
) -> None:
    """One chip hashes weights before the loop has changed them, the other one afterwards."""
    ended = run(
        tmp_path,
        """
        import threading
        from meshmend.train.state import digest

        wide = torch.nn.Linear(8, 1 << 16)  # 2 MB of weights: hashed in a thread
        optimizer = torch.optim.SGD(wide.parameters(), lr=0.01)
        hash_bytes, is_changed = digest.hash_bytes, threading.Event()
        def hash_late(data):
            if threading.current_thread() is not threading.main_thread():
                is_changed.wait(0.2)
            return hash_bytes(data)
        job = Job(wide, optimizer, dataset, batch=16, steps=40, compare_every=4)
        if job.chips[0] == (0, 1):
            digest.hash_bytes = hash_late
        for features, targets in job:
            with torch.no_grad():
                if job.step_number == 10 and job.rank == 1:
                    wide.weight.view(torch.int32)[7, 3] ^= 1 << 22
                wide.weight.mul_(0.999)
            is_changed.set()
            loss = wide(features).square().mean()
            loss.backward()
            job.step(loss)
            is_changed.clear()
        """,
    )

    assert ended.returncode == 1
    assert re.search(r"differ after step 13 \(equal after step [89]\)", ended.stderr), ended.stderr
    assert "in model.weight" in ended.stderr


def test_a_state_that_does_not_load_as_it_was_sent_is_found_before_the_next_step(
    tmp_path: Path,
) -> None:
    """The one who joins forgets a part of what it is given."""
    ended = run(
        tmp_path,
        """
        class Forgetful:
            count = 0
            def state_dict(self):
                return {"count": self.count}
            def load_state_dict(self, state):
                pass
        forgetful = Forgetful()
        def count(*_):
            forgetful.count += 1
        optimizer.register_step_post_hook(count)
        job = Job(model, optimizer, dataset, batch=16, steps=400, also=[scheduler, forgetful])
        for features, targets in job:
            loss = mse(network(features), targets)
            loss.backward()
            job.step(loss)
        """,
        "--inject",
        "kill 0,1 at 4",
        "--inject",
        "repair 0,1 at 6",
    )

    assert ended.returncode == 1
    assert re.search(r"in also\.1\.count \(\d+ against 0\)", ended.stderr), ended.stderr


_FLIPPED_AND_KILLED = """
import logging, pathlib, signal, time
from meshmend.train import Saving

logging.basicConfig(force=True)  # pytest's handler would keep warnings
folder = pathlib.Path(sys.argv[0]).parent / "checkpoints"
model = torch.nn.Sequential(torch.nn.Linear(8, 999), torch.nn.Linear(999, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
job = Job(model, optimizer, dataset, batch=16, steps=30, compare_every=1000,
          saving=Saving(folder, every=10), resume="auto")
if job.rank == 0:
    print(f"begins at {job.step_number}", flush=True)
for features, targets in job:
    loss = mse(model(features), targets)
    loss.backward()
    job.step(loss)
    if job.step_number == 15 and job.rank == 1 and "FLIP" in os.environ:
        with torch.no_grad():
            model[0].weight.view(torch.int32)[700, 3] ^= 1 << 22
    if job.step_number == 24 and "FLIP" in os.environ:
        while len(list((folder / "step-00000020").glob("shard-*"))) < 2:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_checkpoint_of_a_chip_whose_bit_flipped_is_not_resumed_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All chips die after it, before their states are compared."""
    with monkeypatch.context() as flipped:
        flipped.setenv("FLIP", "1")
        killed = run(tmp_path, _FLIPPED_AND_KILLED)

    resumed = run(tmp_path, _FLIPPED_AND_KILLED)

    assert killed.returncode == 1
    assert "begins at 0" in killed.stdout
    assert complete_steps(tmp_path / "checkpoints") == [10, 20, 30]
    assert resumed.returncode == 0, resumed.stderr
    assert "begins at 10" in resumed.stdout
    assert "chips (0, 0), (0, 1) had different states" in resumed.stderr
    assert "replicas equal bit for bit" in resumed.stderr

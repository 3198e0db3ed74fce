"""Loops that a job cannot train right are refused at their first step, in one line."""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from commanding import meshmend_run  # noqa: E402
from meshmend.errors import InputError, NonFiniteError  # noqa: E402
from meshmend.train import Job  # noqa: E402


class Masked(torch.nn.Module):  # type: ignore[misc,name-defined]
    """A layer with buffers as attention has them: a mask of infinities, and one that counts."""

    def __init__(self, *, persistent: bool) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4, dtype=torch.float64)
        mask = torch.full((4, 4), -torch.inf, dtype=torch.float64).triu(1)
        self.register_buffer("mask", mask, persistent=persistent)
        self.seen: Any
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.register_buffer("unset", torch.tensor([torch.nan, 1.0]))

    def forward(self, inputs: Any) -> Any:
        self.seen = self.seen + 1  # another tensor, as many modules do it
        return (self.layer(inputs).unsqueeze(1) + self.mask).softmax(-1).sum(1)


def made(**options: Any) -> tuple[Any, Any, Any]:
    """Return a model, its optimizer, and a job on one chip that trains it for four steps."""
    torch.manual_seed(0)
    inputs = torch.randn(64, 4, dtype=torch.float64)
    dataset = torch.utils.data.TensorDataset(inputs, inputs.softmax(-1))
    model = options.pop("model", None) or torch.nn.Linear(4, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, Job(model, optimizer, dataset, batch=8, steps=4, **options)


def scheduled(scheduler: Any) -> tuple[Any, Any, Any, Any]:
    """Return a model, its optimizer and scheduler, and a job on one chip that knows it."""
    torch.manual_seed(0)
    inputs = torch.randn(64, 4, dtype=torch.float64)
    dataset = torch.utils.data.TensorDataset(inputs, inputs.softmax(-1))
    model = torch.nn.Linear(4, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made_of = scheduler(optimizer)
    job = Job(model, optimizer, dataset, batch=8, steps=3, also=[made_of])
    return model, optimizer, made_of, job


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train on one chip, as a script without a launcher does."""
    for name in ("MESHMEND_COORDINATOR", "MESHMEND_SECRET"):
        monkeypatch.delenv(name, raising=False)


def loss_of(model: Any, batch: Any) -> Any:
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


@pytest.mark.parametrize("persistent", [True, False])
def test_a_mask_of_infinities_stays_as_it_is_and_the_model_trains(persistent: bool) -> None:
    model, _, job = made(model=Masked(persistent=persistent))
    before = model.mask.clone()
    plain = Masked(persistent=persistent)
    plain.load_state_dict(model.state_dict())
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)

    for batch in job:
        loss = loss_of(model, batch)
        loss.backward()
        job.step(loss)
        plain_optimizer.zero_grad()
        loss_of(plain, batch).backward()
        plain_optimizer.step()

    assert torch.equal(model.mask, before)
    assert model.seen == 4
    assert model.unset.isnan().tolist() == [True, False]
    torch.testing.assert_close(model.layer.weight, plain.layer.weight, rtol=0, atol=1e-9)


class Lazy(torch.nn.Module):  # type: ignore[misc,name-defined]
    """A layer that makes a buffer in its first forward pass."""

    def __init__(self, *, how: str) -> None:
        super().__init__()
        self.layer, self.how = torch.nn.Linear(4, 4, dtype=torch.float64), how
        self.scale: Any
        if how == "set":
            self.register_buffer("scale", None)

    def forward(self, inputs: Any) -> Any:
        if self.how == "set" and self.scale is None:
            self.scale = torch.ones(4, dtype=torch.float64)
        elif not hasattr(self, "scale"):
            self.register_buffer("scale", torch.ones(4), persistent=self.how == "saved")
        return self.layer(inputs) * self.scale


@pytest.mark.parametrize("how", ["set", "saved", "not saved"])
def test_a_model_that_makes_a_buffer_later_is_refused(how: str) -> None:
    """A chip that joins has no place for it."""
    model, _, job = made(model=torch.nn.Sequential(Lazy(how=how)))

    def loop() -> None:
        for batch in job:
            loss = loss_of(model, batch)
            loss.backward()
            job.step(loss)

    with pytest.raises(InputError, match=r"0\.scale came after the job was made; make it in"):
        loop()
    assert job.step_number == 0


def test_a_second_loop_over_a_job_is_refused() -> None:
    """As one for each epoch would do no step after the first."""
    model, _, job = made()
    for batch in job:
        loss = loss_of(model, batch)
        loss.backward()
        job.step(loss)

    with pytest.raises(InputError, match=r"needs one loop.* this is its second.*=3 \* len"):
        next(iter(job))


def test_a_job_trains_on_the_host_whatever_the_default_device() -> None:
    model, _, job = made()
    before = model.weight.clone()
    with torch.device("meta"):
        for batch in job:
            loss = loss_of(model, batch)
            loss.backward()
            job.step(loss)

    assert job.is_finished
    assert not torch.equal(model.weight, before)


def test_a_buffer_that_becomes_infinite_is_named_and_not_blamed_on_gradients() -> None:
    model, _, job = made()
    model.register_buffer("largest", torch.tensor(0.0))
    job = made(model=model)[2]

    def loop() -> None:
        for batch in job:
            model.largest.fill_(torch.inf)
            loss = loss_of(model, batch)
            loss.backward()
            job.step(loss)

    with pytest.raises(NonFiniteError, match=r"the buffers of step 1 are not finite.*largest"):
        loop()


def test_steps_are_not_skipped_for_ever() -> None:
    model = torch.nn.Linear(4, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs = torch.ones(64, 4, dtype=torch.float64)
    dataset = torch.utils.data.TensorDataset(inputs, inputs)
    job = Job(model, optimizer, dataset, batch=8, steps=90, non_finite="skip")

    def loop() -> None:
        for batch in job:
            loss = loss_of(model, batch) * (torch.nan if job.step_number >= 5 else 1)
            loss.backward()
            job.step(loss)

    with pytest.raises(NonFiniteError, match="20 steps in a row were skipped"):
        loop()
    assert job.step_number == 24


@pytest.mark.parametrize("is_first", [True, False])
def test_an_optimizer_stepped_in_the_loop_is_refused_where_it_is_stepped(is_first: bool) -> None:
    model, optimizer, job = made()
    before = model.weight.detach().clone()

    def loop() -> None:
        nonlocal before
        for batch in job:
            loss = loss_of(model, batch)
            loss.backward()
            if is_first:
                optimizer.step()
            job.step(loss)
            before = model.weight.detach().clone()
            optimizer.step()

    with pytest.raises(InputError, match=r"remove optimizer\.step\(\)"):
        loop()
    assert torch.equal(before, model.weight)
    assert job.step_number == (0 if is_first else 1)


def test_after_the_loop_the_optimizer_is_the_users_again() -> None:
    model, optimizer, job = made()
    for batch in job:
        loss = loss_of(model, batch)
        loss.backward()
        job.step(loss)
    before = model.weight.detach().clone()

    optimizer.step()

    assert not torch.equal(before, model.weight)


def test_a_scheduler_that_is_not_in_also_is_refused_before_the_first_step() -> None:
    model, optimizer, job = made()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def loop() -> None:
        for batch in job:
            loss = loss_of(model, batch)
            loss.backward()
            job.step(loss)
            scheduler.step()

    with pytest.raises(InputError, match=r"needs the StepLR of its optimizer in also"):
        loop()
    assert job.step_number == 0


@pytest.mark.filterwarnings("ignore:Detected call of")  # PyTorch's own
def test_a_scheduler_that_the_loop_steps_before_the_job_is_refused() -> None:
    """If the step does not count, nobody could say what the scheduler was before."""
    model, _, scheduler, job = scheduled(lambda of: torch.optim.lr_scheduler.StepLR(of, 1))

    def loop() -> None:
        for batch in job:
            loss = loss_of(model, batch)
            loss.backward()
            scheduler.step()
            job.step(loss)

    with pytest.raises(InputError, match=r"must not change the StepLR in also before.*post_hook"):
        loop()
    assert job.step_number == 0


@pytest.mark.parametrize(
    ("told", "words"),
    [(lambda loss: loss.expand(3), r"shape \[3\]"), (float, r"\d\.\d+; pass its mean")],
)
def test_a_loss_that_is_no_tensor_of_one_element_is_refused(
    told: Callable[[Any], Any], words: str
) -> None:
    model, _, job = made()

    def loop() -> None:
        for batch in job:
            loss = loss_of(model, batch)
            loss.backward()
            job.step(told(loss.detach()))

    with pytest.raises(InputError, match=f"needs the loss as a tensor of one element, .*{words}"):
        loop()
    assert job.step_number == 0


@pytest.mark.parametrize("is_chain", [False, True])
def test_a_scheduler_that_the_loop_steps_after_the_job_is_that_of_plain_pytorch(
    is_chain: bool,
) -> None:
    schedulers = torch.optim.lr_scheduler

    def make(of: Any) -> Any:
        plain = schedulers.StepLR(of, 1, 0.5)
        return schedulers.ChainedScheduler([plain]) if is_chain else plain

    model, _, scheduler, job = scheduled(make)
    rates = []
    for batch in job:
        loss = loss_of(model, batch)
        loss.backward()
        rates.append(scheduler.get_last_lr()[0])
        job.step(loss)
        scheduler.step()

    assert rates == [0.1, 0.05, 0.025]


def test_a_scheduler_that_needs_a_metric_is_stepped_by_the_loop() -> None:
    model = torch.nn.Linear(4, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    dataset = torch.utils.data.TensorDataset(*[torch.ones(64, 4, dtype=torch.float64)] * 2)
    job = Job(model, optimizer, dataset, batch=8, steps=3, also=[scheduler])

    for batch in job:
        loss = loss_of(model, batch)
        loss.backward()
        if job.step(loss):
            scheduler.step(loss.item())

    assert scheduler.last_epoch == 3


def test_schedulers_in_also_and_inside_of_those_are_let_be() -> None:
    model = torch.nn.Linear(4, 4, dtype=torch.float64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for _ in range(2)]
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, parts, milestones=[2])
    optimizer.register_step_post_hook(lambda *_: both.step())
    torch.optim.lr_scheduler.StepLR(optimizer, 7)  # given up
    gc.collect()
    dataset = torch.utils.data.TensorDataset(*[torch.ones(64, 4, dtype=torch.float64)] * 2)
    job = Job(model, optimizer, dataset, batch=8, steps=2, also=[both])

    for batch in job:
        loss = loss_of(model, batch)
        loss.backward()
        job.step(loss)

    assert job.step_number == 2


def test_a_first_step_without_a_gradient_is_refused() -> None:
    model, _, job = made()

    def loop() -> None:
        for batch in job:
            job.step(loss_of(model, batch))

    with pytest.raises(InputError, match=r"call loss\.backward\(\) before job\.step\(loss\)"):
        loop()
    assert job.step_number == 0


def test_a_later_step_without_a_gradient_changes_nothing() -> None:
    model, _, job = made()

    for batch in job:
        loss = loss_of(model, batch)
        if job.step_number != 2:
            loss.backward()
        job.step(loss)

    assert job.step_number == 4


def test_a_break_is_told_and_the_others_do_not_wait_for_the_chip(tmp_path: Path) -> None:
    """The chip that leaves lives on until the other has done all steps."""
    script = tmp_path / "script.py"
    script.write_text(
        """
import time
from pathlib import Path
import torch
from meshmend.train import Job

inputs = torch.randn(64, 4)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = Job(model, optimizer, torch.utils.data.TensorDataset(inputs, inputs), batch=8, steps=6)
for features, targets in job:
    loss = torch.nn.functional.mse_loss(model(features), targets)
    loss.backward()
    job.step(loss)
    if job.step_number == 3 and job.chips[job.rank] == (0, 1):
        break
else:
    Path("DONE").touch()
    raise SystemExit
deadline = time.monotonic() + 60
while not Path("DONE").exists() and time.monotonic() < deadline:
    time.sleep(0.05)
print("not waited for:", Path("DONE").exists())
""".replace("DONE", str(tmp_path / "done"))
    )

    ended = meshmend_run("--elastic", "--mesh", "1x2", str(script))

    assert "chip (0, 1) has left its job after step 3 of 6" in ended.stderr
    assert "call job.stop()" in ended.stderr
    assert "[0,1] not waited for: True" in ended.stdout


def test_an_exception_of_one_chip_is_shown_though_the_others_train_on(tmp_path: Path) -> None:
    body = """
job = Job(model, optimizer, dataset, batch=4, steps=6)
for features, targets in job:
    loss = torch.nn.functional.mse_loss(model(features), targets)
    loss.backward()
    if job.step_number == 3 and job.chips[job.rank] == (0, 1):
        raise ValueError("a bug")
    job.step(loss)
"""

    ended = meshmend_run("--elastic", "--mesh", "1x2", script_of(tmp_path, body))

    assert ended.returncode == 0
    assert "chip (0, 1) failed, and the job went on without it:\nTraceback" in ended.stderr
    assert ended.stderr.count('raise ValueError("a bug")') == 1
    assert "6 steps" in ended.stderr


def script_of(folder: Path, body: str) -> str:
    """Write a loop over a small job of four samples a step; return its path."""
    script = folder / "loop.py"
    script.write_text(
        f"""
import torch
from meshmend.train import Job

torch.manual_seed(0)
inputs = torch.randn(64, 4)
dataset = torch.utils.data.TensorDataset(inputs, inputs)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
{body}
"""
    )
    return str(script)


def test_gradients_that_the_loop_clips_on_each_chip_are_told(tmp_path: Path) -> None:
    script = script_of(
        tmp_path,
        """
for features, targets in (job := Job(model, optimizer, dataset, batch=8, steps=3)):
    torch.nn.functional.mse_loss(model(features), targets).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    job.step(torch.zeros(()))
""",
    )

    ended = meshmend_run("--elastic", "--mesh", "1x2", script)

    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("instead of clip_grad_norm_") == 2  # once on each chip


@pytest.mark.parametrize("n_processes", ["1", "many", ""])
def test_a_job_in_one_process_trains(n_processes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", n_processes)

    assert len(made()[2]) == 4


def test_a_job_in_one_of_many_processes_that_would_each_train_alone_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")

    with pytest.raises(InputError, match=r"one of 4 that were started otherwise.*run --elastic"):
        made()


def test_a_data_set_without_numbers_is_not_evaluated() -> None:
    model, _, job = made()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 4)))
    with pytest.raises(InputError, match=r"got a DataLoader; of a DataLoader, pass loader.dataset"):
        job.evaluate(loader, lambda batch: model(batch[0]).sum())


def test_a_script_that_is_refused_after_its_first_step_ends_the_job_on_all_chips(
    tmp_path: Path,
) -> None:
    """Three chips are refused their call; the fourth has no samples, and would train on alone."""
    script = script_of(
        tmp_path,
        """
for features, targets in (job := Job(model, optimizer, dataset, batch=3, steps=10**6)):
    loss = torch.nn.functional.mse_loss(model(features), targets)
    loss.backward()
    job.step(loss)
    if job.step_number == 2:
        job.evaluate(dataset, lambda batch: model(batch[0]).sum())
""",
    )

    ended = meshmend_run("--elastic", "--mesh", "2x2", script)

    assert ended.returncode == 1
    assert "use a batch of at least 4" in ended.stderr.splitlines()[-1]


@pytest.mark.parametrize("bucket_bytes", [None, 8])
def test_a_parameter_that_is_frozen_after_the_job_was_made_stays_as_it_is(
    bucket_bytes: int | None,
) -> None:
    model, optimizer, job = made(bucket_bytes=bucket_bytes)
    model.bias.requires_grad_(False)
    bias, weight = model.bias.clone(), model.weight.detach().clone()
    for batch in job:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        job.step(loss)

    assert torch.equal(model.bias, bias)
    assert not torch.equal(model.weight, weight)

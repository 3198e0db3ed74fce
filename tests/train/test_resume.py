"""Resuming: what fits goes on, what does not is refused in one sentence with both values."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from meshmend.errors import CheckpointDamageError, InputError
from meshmend.train.core.worker_environment import WorkerEnvironment, worker_environment_from
from meshmend.train.data.samples import Order
from meshmend.train.state.checkpoint import Saving, save_shard
from meshmend.train.state.resume import resumable
from meshmend.train.state.torch_state import TORCH
from meshmend.train.torch.job import Job
from meshmend.train.torch.job_record import JobRecord, SampleTerms
from meshmend.train.torch.tile_checkpoints import load_whole

DATA = [(torch.ones(3), torch.zeros(1))] * 12


def state(
    n_inputs: int = 3, *, step: int = 0, seed: int = 0, n_samples: int = 12, also: int = 0
) -> dict[str, Any]:
    model = torch.nn.Linear(n_inputs, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    progress = {
        "step": step, "position": 8 * step, "seed": seed, "n_samples": n_samples, "loss": 1.0
    }  # fmt: skip
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "also": [{}] * also,
        "progress": progress,
    }


def saved(folder: Path, step: int) -> list[Path]:
    own = state(step=step)
    return [
        save_shard(folder, own, TORCH, step=step, shard=shard, n_shards=2) for shard in range(2)
    ]


@pytest.mark.parametrize(
    ("fresh", "steps", "match"),
    [
        (state(), 30, "at step 60, but the job ends at step 30; set steps to at least 60"),
        (state(seed=7), 90, "needs the seed of the checkpoint, 0, but got 7: the order of samples"),
        (state(n_samples=13), 90, "the number of samples of the checkpoint, 12, but got 13"),
        (state(5), 90, r"but weight has shape \(1, 3\) there and shape \(1, 5\) in this job"),
        (state(also=1), 90, "needs 0 objects in also, as the checkpoint has, but got 1"),
    ],
    ids=["past its end", "seed", "data set", "model", "also"],
)
def test_a_checkpoint_of_another_job_is_refused_with_both_values(
    tmp_path: Path, fresh: dict[str, Any], steps: int, match: str
) -> None:
    saved(tmp_path, 60)

    with pytest.raises(InputError, match=match):
        resumable(tmp_path, fresh, TORCH, steps=steps)


def test_a_checkpoint_of_the_same_job_is_taken_up_even_at_its_last_step(tmp_path: Path) -> None:
    saved(tmp_path, 60)

    assert resumable(tmp_path, state(), TORCH, steps=60).step == 60


def test_damage_of_the_newest_is_told_and_the_one_before_taken_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 30)
    saved(tmp_path, 60)[1].write_bytes(b"no more")

    found = resumable(tmp_path, state(), TORCH, steps=90)

    assert found.step == 30
    (record,) = caplog.records
    assert "shard-001-of-002.safetensors is not used: it does not begin" in record.getMessage()


def test_a_job_with_tiles_tells_the_damage_of_the_newest_too(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 30)
    saved(tmp_path, 60)[1].write_bytes(b"no more")
    terms = SampleTerms(Order(12, 0), batch=8, steps=90, samples=lambda: "")

    record = JobRecord(WorkerEnvironment(), terms, resume=tmp_path)
    record.resumed()

    assert record.saved_step == 30
    (line,) = [each.getMessage() for each in caplog.records]
    assert "shard-001-of-002.safetensors is not used: it does not begin" in line


def test_a_job_with_tiles_goes_back_further_if_what_it_began_with_is_damaged_since(
    tmp_path: Path,
) -> None:
    saved(tmp_path, 30)
    began_with = saved(tmp_path, 60)
    terms = SampleTerms(Order(12, 0), batch=8, steps=90, samples=lambda: "")
    saving = Saving(tmp_path, every=10)
    record = JobRecord(WorkerEnvironment(), terms, saving, resume=tmp_path)
    record.resumed()
    began_with[1].write_bytes(b"no more")

    with pytest.raises(CheckpointDamageError, match=r"shard-001-of-002.* does not begin"):
        record.load(60)

    assert record.writer.newest() == 30


def test_one_chip_of_a_job_tells_the_damage(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 30)
    saved(tmp_path, 60)[1].write_bytes(b"no more")
    terms = SampleTerms(Order(12, 0), batch=8, steps=90, samples=lambda: "")
    job = {
        "MESHMEND_COORDINATOR": "127.0.0.1:7000",
        "MESHMEND_SECRET": "known to all of us",
        "MESHMEND_MESH": "1x4",
        "MESHMEND_FAIL": "0,0",  # it comes later, if at all
    }

    for chip in ("0,1", "0,2", "0,3"):
        environment = worker_environment_from({**job, "MESHMEND_CHIP": chip})
        JobRecord(environment, terms, resume=tmp_path).resumed()

    assert len(caplog.records) == 1


def test_a_job_with_tiles_refuses_the_checkpoint_of_another_optimizer(tmp_path: Path) -> None:
    saved(tmp_path, 60)
    terms = SampleTerms(Order(12, 0), batch=8, steps=90, samples=lambda: "")
    model = torch.nn.Linear(3, 1)

    whole = JobRecord(WorkerEnvironment(), terms, resume=tmp_path).resumed()

    assert whole is not None
    load_whole([model, torch.optim.SGD(model.parameters(), lr=0.2)], whole)
    with pytest.raises(InputError, match="the optimizer of the checkpoint, which has dampening"):
        load_whole([model, torch.optim.Adam(model.parameters())], whole)


def lacks_a_shard(folder: Path) -> None:
    saved(folder, 60)[1].unlink()


def is_a_file(folder: Path) -> None:
    folder.write_text("")


def leads_nowhere(folder: Path) -> None:
    folder.symlink_to(folder.with_name("disk that is not mounted"))


def is_empty(folder: Path) -> None:
    folder.mkdir()


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (
            lacks_a_shard,
            "of step 60, it has 1 of 2 shards; shard-001-of-002.safetensors is missing",
        ),
        (is_empty, ""),
        (lambda folder: None, ""),
    ],
)
def test_a_job_that_begins_anew_says_why_it_does_not_go_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, make: Callable[[Path], None], told: str
) -> None:
    folder = tmp_path / "checkpoints"
    make(folder)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    job = Job(model, optimizer, DATA, batch=8, steps=90, saving=Saving(folder, 30), resume="auto")

    assert job.step_number == 0
    words = f'resume="auto" found no complete checkpoint in {folder}: {told}'
    assert [each.getMessage() for each in caplog.records] == ([words] if told else [])


@pytest.mark.parametrize("make", [is_a_file, leads_nowhere])
@pytest.mark.parametrize("resume", ["auto", None])
def test_a_job_that_could_write_no_checkpoint_is_refused(
    tmp_path: Path, make: Callable[[Path], None], resume: str | None
) -> None:
    folder = tmp_path / "checkpoints"
    make(folder)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(InputError, match=f"Saving needs a folder, but {folder} is a file, or a"):
        Job(model, optimizer, DATA, batch=8, steps=90, saving=Saving(folder, 30), resume=resume)


def test_when_all_are_damaged_one_sentence_names_the_damage_of_each(tmp_path: Path) -> None:
    for step in (30, 60):
        saved(tmp_path, step)[0].write_bytes(b"no more")

    with pytest.raises(InputError) as raised:
        resumable(tmp_path, state(), TORCH, steps=90)

    (line,) = str(raised.value).splitlines()
    for step in (30, 60):
        name = f"step-000000{step}/shard-000-of-002.safetensors"
        assert f"{name}: it does not begin with its checksum" in line


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="that can be read, but it has none"):
        resumable(tmp_path, state(), TORCH, steps=90)


def test_a_loop_of_ones_own_is_refused_too(tmp_path: Path) -> None:
    saved(tmp_path, 60)
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    with pytest.raises(
        InputError, match="the checkpoint is at step 60, but the job ends at step 30"
    ):
        Job(model, optimizer, DATA, batch=8, steps=30, resume=tmp_path)

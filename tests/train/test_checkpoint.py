"""Checkpoints: what is saved comes back; what is broken is named and the one before it used."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from forked_script import run_forked
from meshmend.errors import CheckpointDamageError, InputError
from meshmend.train.state import checkpoint
from meshmend.train.state.checkpoint import (
    Loaded,
    complete_steps,
    load,
    newest_complete,
    owner_of,
    prune,
    read_step,
    save_shard,
    steps_in,
    why_not_shared,
)
from meshmend.train.state.torch_state import TORCH
from same_bits import is_same


def save(folder: Path, state: dict[str, Any], step: int, n_shards: int) -> list[Path]:
    return [
        save_shard(folder, state, TORCH, step=step, shard=shard, n_shards=n_shards)
        for shard in range(n_shards)
    ]


def make_older(folder: Path) -> None:
    """Let all files seem to be written a second earlier."""
    for file in folder.rglob("shard-*"):
        earlier = file.stat().st_mtime_ns - 10**9
        os.utime(file, ns=(earlier, earlier))


def loaded(folder: Path) -> Loaded:
    found, damage = load(folder, TORCH)
    assert not damage
    assert found is not None
    return found


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.Adam(parameters, lr=1e-3, amsgrad=True),
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3),
    ],
    ids=["sgd", "adam", "adamw"],
)
def test_training_resumed_is_training_never_stopped(
    tmp_path: Path, optimizer: Callable[[Any], torch.optim.Optimizer]
) -> None:
    def fresh(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(
            torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.Flatten()
        )
        return model, optimizer(model.parameters())

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(3):
            batch = torch.rand(5, 1, 4, 4, generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            model(batch).square().mean().backward()
            optimizer.step()

    straight, stopped, resumed = fresh(0), fresh(0), fresh(1)
    for parts in (straight, stopped):
        train(*parts)
    state = {"model": stopped[0].state_dict(), "optimizer": stopped[1].state_dict()}
    save(tmp_path, state | {"progress": {"step": 3}}, step=3, n_shards=4)
    found = loaded(tmp_path)
    resumed[0].load_state_dict(found.state["model"])
    resumed[1].load_state_dict(found.state["optimizer"])
    for parts in (straight, resumed):
        train(*parts)

    assert found.state["progress"] == {"step": 3}
    assert vars(found.state["model"])["_metadata"] == vars(state["model"])["_metadata"]
    assert is_same(resumed[0].state_dict(), straight[0].state_dict())
    assert is_same(resumed[1].state_dict(), straight[1].state_dict())


def test_a_shard_is_a_file_that_safetensors_reads(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    (path,) = save(tmp_path, {"weight": torch.arange(3.0)}, step=100, n_shards=1)

    assert path == tmp_path / "step-00000100" / "shard-000-of-001.safetensors"
    with safetensors.safe_open(path, "pt") as file:
        assert file.metadata()["step"] == "100"
        assert torch.equal(file.get_tensor("weight"), torch.arange(3.0))


def test_a_shard_outside_the_count_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="12 shards needs shards 0 to 11, but got 12"):
        save_shard(tmp_path, {}, TORCH, step=0, shard=12, n_shards=12)


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")

    with pytest.raises(InputError, match=f"cannot write the checkpoint {file}/step-00000001/"):
        save_shard(file, {}, TORCH, step=1, shard=0, n_shards=1)


def test_nothing_saved_is_nothing_loaded(tmp_path: Path) -> None:
    assert load(tmp_path / "none", TORCH) == (None, [])
    assert complete_steps(tmp_path / "none") == []
    prune(tmp_path / "none")


def flip(files: list[Path]) -> Path:
    data = bytearray(files[1].read_bytes())
    data[len(data) // 2] ^= 1
    files[1].write_bytes(data)
    return files[1]


def truncate(files: list[Path]) -> Path:
    os.truncate(files[1], 50)
    return files[1]


def shorten(files: list[Path]) -> Path:
    os.truncate(files[1], files[1].stat().st_size - 1)
    return files[1]


def remove(files: list[Path]) -> Path:
    files[1].unlink()
    return files[1].parent


def swap(files: list[Path]) -> Path:
    files[1].write_bytes(files[2].read_bytes())
    return files[1]


def mix(files: list[Path]) -> Path:
    other = {"weight": torch.ones(99)}
    save_shard(files[1].parent.parent, other, TORCH, step=200, shard=1, n_shards=3)
    return files[1].parent


def replace_by_a_device(files: list[Path]) -> Path:
    files[1].unlink()
    files[1].symlink_to(os.devnull)
    return files[1]


def empty(files: list[Path]) -> Path:
    for file in files:
        file.unlink()
    return files[1].parent


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip, "its checksum is wrong: it is incomplete, or some bytes have changed"),
        (truncate, "it does not begin with its checksum"),
        (shorten, "its checksum is wrong: it is incomplete, or some bytes have changed"),
        (remove, "it has 2 of 3 shards; shard-001-of-003.safetensors is missing"),
        (swap, "its name is wrong: it holds step 200, shard 2 of 3"),
        (mix, "chip of shard 1 had another state than the others"),
        (replace_by_a_device, "it is no file"),
        (empty, "it has no shards"),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_it_used(
    tmp_path: Path, damage: Callable[[list[Path]], Path], reason: str
) -> None:
    save(tmp_path, {"weight": torch.full((99,), 1.0)}, step=100, n_shards=4)
    files = save(tmp_path, {"weight": torch.full((99,), 2.0)}, step=200, n_shards=3)
    assert loaded(tmp_path).step == 200
    broken = damage(files)

    found, named = load(tmp_path, TORCH)
    assert found is not None
    assert (found.step, found.state["weight"][0]) == (100, 1.0)
    ((path, why),) = named
    assert path == broken
    assert reason in why


def test_a_folder_named_for_a_step_that_no_job_can_have_is_left_alone(tmp_path: Path) -> None:
    save(tmp_path, {"weight": torch.ones(8)}, step=100, n_shards=1)
    (tmp_path / "step-99999999999999999999").mkdir()
    (tmp_path / "step-99999999999999999999" / "shard-000-of-001.safetensors").write_bytes(b"")

    assert complete_steps(tmp_path) == [100]
    assert loaded(tmp_path).step == 100


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000, "\0"])
def test_a_folder_that_does_not_say_whose_it_is_belongs_to_nobody(
    tmp_path: Path, text: str
) -> None:
    (tmp_path / "run.json").write_text(text)

    assert owner_of(tmp_path) is None


def test_a_step_saved_again_by_fewer_chips_is_read_from_those(tmp_path: Path) -> None:
    old, new = {"weight": torch.zeros(50)}, {"weight": torch.ones(50)}
    for shard in range(15):
        save_shard(tmp_path, old, TORCH, step=100, shard=shard, n_shards=16)
    assert complete_steps(tmp_path) == []
    save(tmp_path, new, step=100, n_shards=12)

    assert complete_steps(tmp_path) == [100]
    assert is_same(loaded(tmp_path).state, new)
    make_older(tmp_path)
    save_shard(tmp_path, old, TORCH, step=100, shard=15, n_shards=16)
    assert is_same(loaded(tmp_path).state, old), "both are complete: the last one written"


def test_the_other_set_of_a_step_is_used_if_one_is_damaged(tmp_path: Path) -> None:
    save(tmp_path, {"weight": torch.ones(50)}, step=100, n_shards=16)
    make_older(tmp_path)
    broken = flip(save(tmp_path, {"weight": torch.ones(50)}, step=100, n_shards=12))

    found, named = load(tmp_path, TORCH)
    assert found is not None
    assert found.step == 100
    assert [path for path, _ in named] == [broken]


def test_prune_keeps_the_newest_complete_ones_and_what_may_still_be_written(tmp_path: Path) -> None:
    for step in (100, 200, 300, 400):
        save(tmp_path, {"step": step}, step=step, n_shards=2)
    for step in (150, 350, 500):  # a chip is missing
        save_shard(tmp_path, {"step": step}, TORCH, step=step, shard=0, n_shards=2)
    fresh, stale = (tmp_path / "step-00000500" / f".{name}.part" for name in ("fresh", "stale"))
    for draft in (fresh, stale):
        draft.write_text("")
    os.utime(stale, (1, 1))

    prune(tmp_path, keep=2)
    prune(tmp_path, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-00000300",
        "step-00000350",
        "step-00000400",
        "step-00000500",
    ]
    assert fresh.exists()
    assert not stale.exists()


def test_prune_always_leaves_one_that_is_known_to_be_right(tmp_path: Path) -> None:
    """What is known to be right comes far behind: by then others would have taken its place."""
    for step in range(5, 101, 5):
        right_until = max(0, step - 42)
        save(tmp_path, {"step": step}, step, 1)
        prune(tmp_path, keep=2, right_until=right_until)

        left = checkpoint.complete_steps(tmp_path)
        assert len(left) <= 4
        assert left[-2:] == [step - 5, step][-len(left) :]
        assert right_until < 5 or left[0] <= right_until


def test_checkpoints_that_may_be_wrong_are_set_aside_and_read_by_nobody(tmp_path: Path) -> None:
    for step in (5, 10, 15):
        save(tmp_path, {"step": step}, step, 1)

    checkpoint.set_aside(tmp_path, after=5)
    checkpoint.set_aside(tmp_path, after=5)

    assert checkpoint.complete_steps(tmp_path) == [5]
    assert loaded(tmp_path).step == 5
    assert len(list(tmp_path.glob("doubtful-step-*/*"))) == 2


@pytest.mark.parametrize("offset_s", [-5 * 3600, 5 * 3600])
def test_prune_keeps_drafts_of_a_file_server_whose_clock_differs(
    offset_s: float, tmp_path: Path
) -> None:
    save(tmp_path, {}, step=100, n_shards=2)
    draft = tmp_path / "step-00000100" / ".other.part"
    draft.write_text("")
    for path in (draft, draft.parent):
        os.utime(path, (time.time() + offset_s, time.time() + offset_s))

    prune(tmp_path)

    assert draft.exists()


def test_shards_on_the_disks_of_other_hosts_are_missed(tmp_path: Path) -> None:
    save(tmp_path, {}, step=100, n_shards=2)
    save_shard(tmp_path, {}, TORCH, step=200, shard=1, n_shards=2)

    assert why_not_shared(tmp_path, 100) == ""
    assert why_not_shared(tmp_path, 200) == (
        f"{tmp_path}/step-00000200: it has 1 of 2 shards; shard-000-of-002.safetensors is missing; "
        "all hosts must see this folder, or no job can resume from it"
    )
    assert newest_complete(tmp_path) == 100


def test_prune_never_deletes_the_last_complete_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, {}, step=100, n_shards=2)
    save_shard(tmp_path, {}, TORCH, step=200, shard=0, n_shards=2)

    prune(tmp_path, keep=1)
    assert complete_steps(tmp_path) == [100]
    with pytest.raises(
        InputError, match="prune needs keep as a whole number of at least 1, but got 0"
    ):
        prune(tmp_path, keep=0)


def test_prune_twice_at_once_finds_what_the_other_took_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (100, 200):
        save(tmp_path, {}, step=step, n_shards=1)
    steps = steps_in(tmp_path)
    prune(tmp_path, keep=1)
    monkeypatch.setattr(checkpoint, "steps_in", lambda _: steps)

    prune(tmp_path, keep=1)
    assert complete_steps(tmp_path) == [200]


SAVER = """
import os, signal, sys, torch
from pathlib import Path
from meshmend.train.state.checkpoint import save_shard
from meshmend.train.state.torch_state import TORCH

def save(folder, step):
    for shard in range(2):
        state = {"step": torch.full((9999,), step)}
        save_shard(folder, state, TORCH, step=step, shard=shard, n_shards=2)

def dying(call, *, at):
    left = [at]
    def instead(*arguments):
        left[0] -= 1
        if left[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*arguments)
    return instead

torch.set_num_threads(1)
for name, at in [("fsync", 0), ("fsync", 1), ("fsync", 3), ("fsync", 4), ("replace", 1)]:
    if (child := os.fork()) == 0:
        folder = Path(sys.argv[1]) / f"{name}-{at}"
        save(folder, 100)
        place = os if name == "fsync" else Path
        setattr(place, name, dying(getattr(place, name), at=at))
        save(folder, 200)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
"""


def test_killed_while_saving_the_checkpoint_before_is_usable(tmp_path: Path) -> None:
    """Shot before a draft is on the disk, before it has its name, before that is on the disk."""
    script = tmp_path / "saver.py"
    script.write_text(SAVER)
    ended = run_forked(str(script), str(tmp_path))
    assert ended.returncode == 0, ended.stderr

    for name in ("fsync-0", "fsync-1", "fsync-3", "replace-1"):
        found, named = load(tmp_path / name, TORCH)
        assert found is not None
        assert found.step == 100
        assert found.state["step"].tolist() == [100] * 9999
        assert [path for path, _ in named] == [tmp_path / name / "step-00000200"]
    assert loaded(tmp_path / "fsync-4").step == 200, "all shards have their names"


def test_the_newest_complete_step_is_found_by_names_alone(tmp_path: Path) -> None:
    assert newest_complete(tmp_path / "nothing") is None
    for step in (10, 20, 30):
        save(tmp_path, {"weight": torch.ones(8)}, step, 2)
    next((tmp_path / "step-00000030").iterdir()).unlink()
    for file in (tmp_path / "step-00000020").iterdir():
        file.write_bytes(b"damaged, but here")

    assert newest_complete(tmp_path) == 20
    assert newest_complete(tmp_path, without={20}) == 10


def test_one_step_is_read_or_its_damage_is_named(tmp_path: Path) -> None:
    for step in (10, 20):
        save(tmp_path, {"weight": torch.full((8,), float(step))}, step, 2)
    file = next((tmp_path / "step-00000020").iterdir())
    file.write_bytes(file.read_bytes()[:-1])

    found = read_step(tmp_path, 10, TORCH)
    assert found.step == 10
    assert found.state["weight"].tolist() == [10.0] * 8
    with pytest.raises(CheckpointDamageError, match="its checksum is wrong"):
        read_step(tmp_path, 20, TORCH)
    with pytest.raises(CheckpointDamageError, match="step-00000030: it has no shards"):
        read_step(tmp_path, 30, TORCH)

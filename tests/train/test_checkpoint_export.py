"""Checkpoints that other programs open: safetensors, transformers, and PyTorch's own DCP."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("safetensors")

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import load_file as load_numpy_file
from safetensors.torch import load_file
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from meshmend.cli.main import run_line
from meshmend.errors import InputError
from meshmend.train.state.checkpoint import load, save_shard
from meshmend.train.state.checkpoint_export import export_safetensors, read_checkpoint
from meshmend.train.state.dcp_files import import_dcp, read_dcp, write_dcp
from meshmend.train.state.resume import resumable
from meshmend.train.state.state_tree import ARRAYS
from meshmend.train.state.torch_state import TORCH


def trained(steps: int = 3) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(steps)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2, dtype=torch.float32)
    )
    model.register_buffer("short", torch.randn(3).to(torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * steps, betas=(0.8, 0.9))
    for _ in range(steps):
        model(torch.randn(16, 8)).square().sum().backward()
        optimizer.step()
    return model, optimizer


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:
    progress = {"step": step, "position": 8 * step, "seed": 0, "n_samples": 100, "loss": 0.5}
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "also": [],
        "progress": progress,
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run with two checkpoints, each in three shards."""
    for step in (3, 6):
        state = state_of(*trained(step), step)
        for shard in range(3):
            save_shard(
                tmp_path / "run" / "checkpoints",
                state,
                TORCH,
                step=step,
                shard=shard,
                n_shards=3,
            )
    return tmp_path / "run"


def check_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_safetensors_reads_the_model_in_one_file(run: Path, tmp_path: Path) -> None:
    goal = tmp_path / "a folder" / "model.safetensors"

    done = export_safetensors(read_checkpoint(run), goal)

    assert (done.step, done.files) == (6, (goal,))
    check_equal(load_file(goal), trained(6)[0].state_dict())


def test_shards_have_an_index_that_names_the_file_of_each_tensor(run: Path, tmp_path: Path) -> None:
    goal = tmp_path / "model"

    done = export_safetensors(read_checkpoint(run, 3), goal, shard_bytes=60)

    index = json.loads((goal / "model.safetensors.index.json").read_text())
    found = {}
    for name, file in index["weight_map"].items():
        found[name] = load_file(goal / file)[name]
    check_equal(found, trained(3)[0].state_dict())
    assert index["metadata"]["total_size"] == done.n_bytes
    files = {file.name for file in done.files}
    assert files == {*index["weight_map"].values(), "model.safetensors.index.json"}
    assert len(files) > 3


@pytest.mark.parametrize("shard_bytes", [200_000, 10**9])
def test_transformers_loads_an_exported_model(tmp_path: Path, shard_bytes: int) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 32}
    config = transformers.BertConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)
    model = transformers.BertForMaskedLM(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = state_of(model, optimizer, 1)
    save_shard(tmp_path / "run", state, TORCH, step=1, shard=0, n_shards=1)
    saved = read_checkpoint(tmp_path / "run")
    export_safetensors(saved, tmp_path / "model", shard_bytes=shard_bytes)
    config.save_pretrained(tmp_path / "model")

    loaded, info = transformers.BertForMaskedLM.from_pretrained(
        tmp_path / "model", output_loading_info=True
    )

    assert not info["missing_keys"]
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name


def test_the_whole_state_has_the_optimizer_and_its_plain_values(run: Path, tmp_path: Path) -> None:
    goal = tmp_path / "all.safetensors"

    export_safetensors(read_checkpoint(run), goal, what="all")

    found = load_file(goal)
    _, optimizer = trained(6)
    average = optimizer.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(found["optimizer.state.0.exp_avg"], average)
    with safe_open(goal, "pt") as file:
        values = json.loads(file.metadata()["values"])
    assert values["progress.position"] == 48
    assert values["optimizer.param_groups.0.betas"] == [0.8, 0.9]


def test_arrays_of_jax_are_exported_by_dotted_names(tmp_path: Path) -> None:
    weights = np.arange(6, dtype=np.float32).reshape(2, 3)
    state = {"model": {"['layer']['w']": weights}, "optimizer": {"[0].mu": weights}, "also": []}
    save_shard(tmp_path / "run", state, ARRAYS, step=2, shard=0, n_shards=1)

    export_safetensors(read_checkpoint(tmp_path / "run"), tmp_path / "x.safetensors", what="all")

    found = load_numpy_file(tmp_path / "x.safetensors")
    assert sorted(found) == ["model.layer.w", "optimizer.0.mu"]
    assert np.array_equal(found["model.layer.w"], weights)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_loads_an_export_into_plain_pytorch(run: Path, tmp_path: Path) -> None:
    write_dcp(read_checkpoint(run, framework=TORCH).state, tmp_path / "dcp")
    model, optimizer = trained(1)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    dcp_load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])

    wanted, other = trained(6)
    check_equal(model.state_dict(), wanted.state_dict())
    assert optimizer.param_groups[0]["lr"] == other.param_groups[0]["lr"]
    average = other.state_dict()["state"][0]["exp_avg"]
    assert torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], average)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_job_resumes_from_what_dcp_saved_in_plain_pytorch(tmp_path: Path) -> None:
    model, optimizer = trained(4)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp_save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)

    import_dcp(tmp_path / "dcp", tmp_path / "checkpoints", step=4)

    fresh = state_of(*trained(1), 0)
    loaded = resumable(tmp_path / "checkpoints", fresh, TORCH, steps=9)
    check_equal(loaded.state["model"], model.state_dict())
    trained(1)[1].load_state_dict(loaded.state["optimizer"])
    assert loaded.step == 4


def test_a_checkpoint_that_went_through_dcp_is_the_same(run: Path, tmp_path: Path) -> None:
    state = read_checkpoint(run, framework=TORCH).state
    write_dcp(state, tmp_path / "dcp")
    import_dcp(tmp_path / "dcp", tmp_path / "again")

    found, _ = load(tmp_path / "again", TORCH)

    assert found is not None
    assert found.state["progress"] == state["progress"]
    assert found.state["optimizer"]["param_groups"] == state["optimizer"]["param_groups"]
    for number, parts in state["optimizer"]["state"].items():
        check_equal(found.state["optimizer"]["state"][number], parts)


def test_an_optimizer_without_a_state_goes_through_dcp_too(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    state = state_of(model, torch.optim.SGD(model.parameters(), lr=0.1), 0)

    write_dcp(state, tmp_path / "dcp")

    assert read_dcp(tmp_path / "dcp")["optimizer"] == state["optimizer"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["export", "RUN", "-o", "x.safetensors", "--step", "4"], "complete are: 3, 6"),
        (
            ["export", "RUN", "-o", "x", "--what", "half"],
            "--what needs model or all, but got",
        ),
        (["export", "RUN", "-o", "x", "--format", "onnx"], "--format needs safetensors or dcp"),
        (["export", "RUN", "-o", "x", "--shard-size", "big"], "big"),
        (["export", "RUN", "-o", "RUN"], "needs a new or an empty folder, but"),
        (["export", "RUN/none", "-o", "x"], "is not a folder"),
        (["export", ".", "-o", "x"], "has no checkpoints"),
        (["list", "RUN/none"], "meshmend checkpoint needs the folder of a run, but"),
        (["import", "RUN", "-o", "x"], "has no .metadata"),
        (
            ["export", "RUN", "-o", "/dev/null/x.safetensors"],
            "cannot write /dev/null/x.safetensors",
        ),
        (["export", "RUN", "-o", "model.pt"], "a name such as model.safetensors, or a folder, but"),
        (["export", "RUN", "-o", "x.safetensors", "--format", "dcp"], "dcp writes a folder, but"),
    ],
)
def test_wrong_arguments_are_refused_in_one_line(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)

    code = run_line(["checkpoint", *[part.replace("RUN", str(run)) for part in arguments]])

    captured = capsys.readouterr()
    assert code == 2
    assert len(captured.err.splitlines()) == 1
    assert words in captured.err
    assert not captured.out


def test_the_commands_list_check_and_export(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (run / "checkpoints" / "step-00000003" / "shard-001-of-003.safetensors").unlink()
    goal = tmp_path / "model.safetensors"

    assert run_line(["checkpoint", "list", str(run)]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert "not complete: it has 2 of 3 shards" in listed[0]
    assert listed[1].split()[:3] == ["step", "6", "torch"]
    assert listed[1].endswith("complete")
    assert run_line(["checkpoint", "check", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"checkpoints": [{"step": 6, "damage": None}]}
    assert run_line(["checkpoint", "export", str(run), "-o", str(goal), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["files"]) == (6, [str(goal)])
    as_dcp = ["-o", str(tmp_path / "d"), "--format", "dcp"]
    assert run_line(["checkpoint", "export", str(run), *as_dcp]) == 0
    assert "step 6: " in capsys.readouterr().out
    checkpoints = str(tmp_path / "again")
    assert run_line(["checkpoint", "import", str(tmp_path / "d"), "-o", checkpoints]) == 0


def test_a_damaged_checkpoint_is_told_and_not_exported(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = run / "checkpoints" / "step-00000006" / "shard-001-of-003.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)

    assert run_line(["checkpoint", "check", str(run)]) == 1
    assert "step 6: " in capsys.readouterr().out
    assert run_line(["checkpoint", "export", str(run), "-o", str(tmp_path / "x.safetensors")]) == 1
    assert "its checksum is wrong" in capsys.readouterr().err
    assert not (tmp_path / "x.safetensors").exists()


def test_a_type_that_safetensors_lacks_is_refused(tmp_path: Path) -> None:
    state = {"model": {"z": torch.zeros(2, dtype=torch.complex128)}, "also": []}
    save_shard(tmp_path, state, TORCH, step=1, shard=0, n_shards=1)

    with pytest.raises(InputError, match="safetensors has no type for z, which is complex128"):
        export_safetensors(read_checkpoint(tmp_path), tmp_path / "x.safetensors")


class Hostile:
    """An object that runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


def with_hostile_metadata(folder: Path, hostile: Hostile) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(hostile))


class Reaching(Hostile):
    """An object that reaches for a method of a class that DCP's metadata has, when unpickled."""

    def __reduce__(self) -> Any:
        return getattr, (type(self.mark), "unlink")


def with_hostile_attribute(folder: Path, hostile: Hostile) -> None:
    with_hostile_metadata(folder, Reaching(hostile.mark))


def with_hostile_value(folder: Path, hostile: Hostile) -> None:
    shutil.rmtree(folder)
    dcp_save(
        {"model": {}, "optimizer": {}, "progress": {"step": hostile}},
        checkpoint_id=folder,
        no_dist=True,
    )


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("attack", "words"),
    [
        (with_hostile_metadata, "its metadata asks for posix.system, which DCP does not write"),
        (with_hostile_attribute, "its metadata asks for builtins.getattr"),
        (with_hostile_value, "progress.step is neither a tensor nor a plain value"),
    ],
)
def test_code_in_a_dcp_folder_is_refused_in_one_line_and_does_not_run(
    run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    attack: Callable[[Path, Hostile], None],
    words: str,
) -> None:
    mark, goal = tmp_path / "it-ran", tmp_path / "again"
    write_dcp(read_checkpoint(run, framework=TORCH).state, tmp_path / "dcp")
    attack(tmp_path / "dcp", Hostile(mark))

    code = run_line(["checkpoint", "import", str(tmp_path / "dcp"), "-o", str(goal)])

    captured = capsys.readouterr()
    assert code == 2
    assert len(captured.err.splitlines()) == 1
    assert words in captured.err
    assert not captured.out
    assert not mark.exists()
    assert not goal.exists()

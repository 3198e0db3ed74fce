"""`TileJob`: samples for replicas that are tiles; chips die and return, no sample is lost."""

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from commanding import Ended, import_sharding, meshmend_run
from meshmend.errors import InputError
from meshmend.train import Saving, TileJob
from meshmend.train.data.samples import Order
from meshmend.train.state.checkpoint_export import read_checkpoint

STEPS, BATCH, N_SAMPLES = 16, 10, 37

SCRIPT = """
import gc, time
import torch
import torch.distributed as dist
import meshmend.torch
from torch.distributed.fsdp import fully_shard
from pathlib import Path
from meshmend.train import Saving, TileJob
from tile_job_samples import model_and_samples, loss_of

gc.disable()  # so that nothing but the job frees what refers to itself

def build(mesh):
    model, _ = model_and_samples()
    {shard}
    return model, torch.optim.Adam(model.parameters(), lr=0.01)

samples = model_and_samples()[1]
job = TileJob(build, samples, tile={tile!r}, batch={batch}, steps={steps}, seed=3{more})
for step in job:
    while job.step_number == {gate} and job.mesh.size(0) < {n_tiles}:
        time.sleep(0.01)
        meshmend.torch.reconfigure()
    with step as batch:
        loss = loss_of(job.model, batch)
        job.optimizer.zero_grad()
        step.backward(loss)
        torch.nn.utils.clip_grad_norm_(job.model.parameters(), 0.5)
        job.optimizer.step()
    {after}
if job.is_leader:
    print(f"loss {{job.loss:.17g}}")
classes = [type(each) for each in gc.get_objects()]
n_layers, n_groups = (
    sum(issubclass(each, wanted) for each in classes)
    for wanted in (torch.nn.Linear, meshmend.torch.group.MeshmendGroup))
print(f"kept {{n_layers}} layers and {{n_groups}} groups")
"""

HELPER = f"""
import torch

def model_and_samples():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 34), torch.nn.Tanh(), torch.nn.Linear(34, 1))
    numbers = torch.randn({N_SAMPLES}, 8, generator=torch.Generator().manual_seed(0)).double()
    return model.double(), [(each,) for each in numbers]

def loss_of(model, batch):
    return (model(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()
"""
TOLD = """
from meshmend.errors import RefusedError

def steps():
    try:
        yield from job
    except RefusedError as error:
        Path({told!r}).write_text(str(error))
        raise

for step in steps():"""
SHARD = "fully_shard(model[0], mesh=mesh); fully_shard(model, mesh=mesh)"


def script(
    folder: Path,
    *,
    shard: str = SHARD,
    tile: str = "1x2",
    gate: int = -1,
    n_tiles: int = 2,
    batch: int = BATCH,
    steps: int = STEPS,
    more: str = "",
    after: str = "",
) -> Path:
    (folder / "tile_job_samples.py").write_text(HELPER)
    path = folder / "train.py"
    path.write_text(
        SCRIPT.format(
            shard=shard,
            tile=tile,
            gate=gate,
            n_tiles=n_tiles,
            batch=batch,
            steps=steps,
            more=more,
            after=after,
        )
    )
    return path


def run(path: Path, *faults: str, mesh: str = "1x4", more: tuple[str, ...] = ()) -> Ended:
    patience = ("--set", "timing.heartbeat_timeout=60")  # on a busy machine chips may be silent
    inject = [word for fault in faults for word in ("--inject", fault)]
    import_sharding()
    return meshmend_run("--elastic", "--mesh", mesh, *patience, *more, *inject, path)


def saved(folder: Path, *, every: int) -> str:
    return f", saving=Saving(Path({str(folder)!r}), every={every})"


def undisturbed_loss(folder: Path, *, slower_from: int = STEPS, steps: int = STEPS) -> float:
    """The last loss of the same loop on one chip that has all of the model and of the batch."""
    names: dict[str, Any] = {}
    exec(HELPER, names)
    model, samples = names["model_and_samples"]()
    optimizer, order = torch.optim.Adam(model.parameters(), lr=0.01), Order(N_SAMPLES, 3)
    loss = torch.zeros(())
    for step in range(steps):
        if step == slower_from:
            optimizer.param_groups[0]["lr"] = 0.005
        chosen = order.samples(step * BATCH, (step + 1) * BATCH)
        loss = names["loss_of"](model, default_collate([samples[at] for at in chosen]))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return loss.item()


def test_chips_are_killed_and_return_and_the_loss_is_that_of_an_undisturbed_run(
    tmp_path: Path,
) -> None:
    """Ten samples on six chips, then on four: shares differ, and are weighed.

    Without the last tile, and then without the first, the mesh has the ranks 0 to 3: the chips
    between them have other ranks in a mesh that PyTorch takes for the one before.
    """
    path = script(tmp_path, gate=10, n_tiles=3)

    ended = run(path, "kill 2,1 at 4", "repair 2,1 at 7", "kill 0,1 at 11", mesh="3x2")

    assert ended.returncode == 0, ended.stderr
    (found,) = re.findall(r"loss (\S+)", ended.stdout)
    assert float(found) == pytest.approx(undisturbed_loss(tmp_path), rel=0, abs=1e-9)
    assert (
        f"{STEPS} steps; samples: {STEPS * BATCH} used, 0 lost, 0 repeated; replicas equal bit for "
        "bit" in ended.stderr
    )
    # Of models and groups before the loss and the repair, nothing is left.
    assert re.findall(r"kept (.*)", ended.stdout) == ["2 layers and 3 groups"] * 4


SHARED = ", shard_optimizer=True"
COUNTED = """
print("state", sum(each.n_state_bytes() for each in meshmend.train.torch.elastic_group
                   .elastic_group()._tile.shares._shares.of.values()))
"""


def test_twins_share_the_state_of_their_optimizer(tmp_path: Path) -> None:
    """Four twins of each colour: a tile is lost and returns; each keeps two of four shares."""
    path = script(tmp_path, gate=10, n_tiles=4, more=SHARED)
    path.write_text(path.read_text() + COUNTED)

    ended = run(path, "kill 0,1 at 4", "repair 0,1 at 7", mesh="2x4")

    assert ended.returncode == 0, ended.stderr
    (found,) = re.findall(r"loss (\S+)", ended.stdout)
    assert float(found) == pytest.approx(undisturbed_loss(tmp_path), rel=0, abs=1e-9)
    assert "0 lost, 0 repeated; replicas equal bit for bit" in ended.stderr
    # Adam keeps two numbers of 8 bytes for each of 8 * 34 + 34 + 34 + 1 parameters.
    sizes = [int(size) for size in re.findall(r"state (\d+)", ended.stdout)]
    assert len(sizes) == 8
    assert sum(sizes) == pytest.approx(2 * 16 * 341, rel=0.1)  # each twice, and counts of steps


@pytest.mark.slow
def test_a_share_that_died_with_its_mirror_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    """Of three twins two die at once. The chips that are left hold all weights, but not all of
    the optimizer: they go back to step 6."""
    path = script(tmp_path, more=saved(tmp_path / "kept", every=6) + SHARED)

    ended = run(
        path,
        "kill 0,1 at 9",
        "kill 0,3 at 9",
        mesh="1x6",
        more=("--set", "timing.holder_timeout=2"),
    )

    assert ended.returncode == 0, ended.stderr
    assert "a part of the optimizers' state is lost" in ended.stderr
    (found,) = re.findall(r"loss (\S+)", ended.stdout)
    assert float(found) == pytest.approx(undisturbed_loss(tmp_path), rel=0, abs=1e-9)
    assert "0 lost, 0 repeated; replicas equal bit for bit; 3 steps done again" in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("tile", ["1x2", "2x1"])
def test_what_twins_share_is_saved_and_resumed_with_and_without_sharing(
    tmp_path: Path, tile: str
) -> None:
    kept = tmp_path / "kept"
    first = run(
        script(tmp_path, tile=tile, steps=12, more=saved(kept, every=6) + SHARED), mesh="2x3"
    )
    assert first.returncode == 0, first.stderr
    for how, mesh, more in (("2x2", "2x2", ""), ("1x2", "1x6", SHARED)):
        resumed = script(tmp_path, tile=how, more=f"{more}, resume={str(kept)!r}")

        second = run(resumed, mesh=mesh)

        assert second.returncode == 0, second.stderr
        (found,) = re.findall(r"loss (\S+)", second.stdout)
        assert float(found) == pytest.approx(undisturbed_loss(tmp_path), rel=0, abs=1e-9)


def test_a_chip_that_returns_with_other_samples_is_refused(tmp_path: Path) -> None:
    """As many, with the same seed: only the samples tell. The others wait until it is refused."""
    path = script(tmp_path)
    told, begun = tmp_path / "told", tmp_path / "begun"
    path.write_text(
        path.read_text()
        .replace("job = TileJob", f"first = not Path({str(begun)!r}).exists()\njob = TileJob")
        .replace("samples, tile", "samples if first else samples[::-1], tile")
        .replace("while job", f"Path({str(begun)!r}).touch()\n    while job")
        .replace("== -1 and job.mesh.size(0) < 2", f"== 10 and not Path({str(told)!r}).exists()")
        .replace("for step in job:", TOLD.format(told=str(told)))
    )

    ended = run(path, "kill 0,1 at 4", "repair 0,1 at 7")

    assert ended.returncode == 0, ended.stderr
    assert "samples" in told.read_text()
    assert f"{STEPS} steps; samples: {STEPS * BATCH} used, 0 lost, 0 repeated" in ended.stderr


def test_a_checkpoint_has_each_part_once_and_is_resumed_with_larger_tiles(tmp_path: Path) -> None:
    """Two tiles of 1x2, of which one is lost; then one tile of 2x2 goes on.

    The learning rate that the loop sets after its last step belongs to the checkpoint of that step.
    """
    kept = tmp_path / "kept"
    slower = "if job.step_number == 12: job.optimizer.param_groups[0]['lr'] = 0.005"
    saving = saved(kept, every=6)
    first = run(script(tmp_path, steps=12, more=saving, after=slower), "kill 0,3 at 8")
    assert first.returncode == 0, first.stderr
    parts = ["shard-000-of-002", "shard-001-of-002"]
    before, last = (
        sorted(path.name.partition(".")[0] for path in kept.glob(f"step-{step:08d}/shard-*"))
        for step in (6, 12)
    )
    assert last == parts
    assert before in (parts, parts[:1])  # on a busy machine the chip dies before it has written
    whole = read_checkpoint(kept, 12).state
    names: dict[str, Any] = {}
    exec(HELPER, names)
    wanted = names["model_and_samples"]()[0].state_dict()
    assert {name: each.shape for name, each in whole["model"].items()} == {
        name: tuple(each.shape) for name, each in wanted.items()
    }

    wanted_loss = undisturbed_loss(tmp_path, slower_from=12)

    # Then one tile goes on, or several twins, which save as well.
    for tile, mesh, saves in (("2x2", "2x2", ""), ("1x2", "1x4", saved(tmp_path / "new", every=6))):
        more = f", resume={str(kept)!r}{saves}"
        second = run(script(tmp_path, tile=tile, more=more), mesh=mesh)

        assert second.returncode == 0, second.stderr
        (found,) = re.findall(r"loss (\S+)", second.stdout)
        assert float(found) == pytest.approx(wanted_loss, rel=0, abs=1e-9)
        assert f"samples: {(STEPS - 12) * BATCH} used, 0 lost, 0 repeated" in second.stderr


def test_chips_that_have_just_joined_write_the_checkpoint_of_the_step_before(
    tmp_path: Path,
) -> None:
    """They join when step 10 is done and not yet saved, and have not done it themselves."""
    kept = tmp_path / "kept"
    joined = """while job.step_number == 10 and coordinator_client().news.generation.number < 3:
        time.sleep(0.01)"""
    path = script(tmp_path, more=saved(kept, every=10), after=joined)
    client = "from meshmend.train.core.worker_environment import coordinator_client\n"
    path.write_text(client + path.read_text())

    ended = run(path, "kill 0,1 at 4", "repair 0,1 at 7")

    assert ended.returncode == 0, ended.stderr
    progress = read_checkpoint(kept, 10).state["progress"]
    assert progress["step"] == 10
    assert progress["loss"] == pytest.approx(undisturbed_loss(tmp_path, steps=10), rel=0, abs=1e-9)


@pytest.mark.slow
def test_a_state_that_died_with_all_of_its_twins_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    """Both chips of a colour die; the job goes back to step 6 when they are there again."""
    more = saved(tmp_path / "kept", every=6)
    patience = ("--set", "timing.holder_timeout=2")

    ended = run(
        script(tmp_path, more=more),
        *("kill 0,1 at 9", "kill 0,3 at 9", "repair 0,1 at 9", "repair 0,3 at 9"),
        more=patience,
    )

    assert ended.returncode == 0, ended.stderr
    (found,) = re.findall(r"loss (\S+)", ended.stdout)
    assert float(found) == pytest.approx(undisturbed_loss(tmp_path), rel=0, abs=1e-9)
    assert "0 lost, 0 repeated" in ended.stderr


@pytest.mark.slow
def test_chips_along_a_third_axis_see_the_same_samples_which_count_once(tmp_path: Path) -> None:
    shard = "fully_shard(model, mesh=mesh['replicate', 'shard'])"
    styles = "{'0': ColwiseParallel(), '2': RowwiseParallel()}"
    tensor = f"parallelize_module(model, mesh['tensor'], {styles})"
    names = "ColwiseParallel, RowwiseParallel, parallelize_module"
    # A warning of FSDP, which is none of this test's, would be an error here.
    quiet = "import warnings; warnings.simplefilter('ignore')"
    imports = f"{quiet}; from torch.distributed.tensor.parallel import {names}"
    both = f"{imports}; {tensor}; {shard}"
    axes, kept = ', axes=("replicate", "shard", "tensor")', tmp_path / "kept"
    path = script(tmp_path, shard=both, tile="2x2", more=axes + saved(kept, every=12))

    ended = run(path, "kill 0,1 at 5", mesh="2x4")

    assert ended.returncode == 0, ended.stderr
    (found,) = re.findall(r"loss (\S+)", ended.stdout)
    assert float(found) == pytest.approx(undisturbed_loss(tmp_path), rel=0, abs=1e-9)
    assert f"samples: {STEPS * BATCH} used, 0 lost, 0 repeated" in ended.stderr

    # Its checkpoint is that of any other job: with tensor parallelism, with other tiles.
    shutil.rmtree(kept / f"step-{STEPS:08d}")
    for more, how in ((axes, both), ("", SHARD)):
        resumed = run(script(tmp_path, shard=how, more=f"{more}, resume={str(kept)!r}"))
        assert resumed.returncode == 0, resumed.stderr
        (found,) = re.findall(r"loss (\S+)", resumed.stdout)
        assert float(found) == pytest.approx(undisturbed_loss(tmp_path), rel=0, abs=1e-9)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"shard": "pass"}, "but 0.weight is on each chip, and its gradients would not be summed"),
        (
            {"shard": "fully_shard(model, mesh=mesh['shard'])"},
            "but 0.weight is on 2 chips, and its gradients would not be summed",
        ),
        (
            {"shard": "model = torch.nn.parallel.DistributedDataParallel(model)"},
            "but module.0.weight is on each chip",
        ),
        ({"batch": 3}, "needs a sample for each chip, but got batch=3 for 4 chips"),
        ({"more": ', policy="shrink"'}, 'a job with tiles needs policy="constant"'),
    ],
)
def test_what_tiles_cannot_train_is_refused_in_one_line(
    tmp_path: Path, arguments: dict[str, Any], words: str
) -> None:
    ended = run(script(tmp_path, **arguments))

    assert ended.returncode == 2, ended.stderr
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_checkpoints_need_an_elastic_job(tmp_path: Path) -> None:
    """Without one nobody says which chips are there: none would have been written."""
    job = TileJob(
        lambda mesh: (), [0, 1], tile="1x2", batch=2, steps=1, saving=Saving(tmp_path, every=1)
    )

    with pytest.raises(InputError, match="needs a job of meshmend run --elastic"):
        next(iter(job))


@pytest.mark.slow
def test_a_loop_that_does_no_step_is_refused_and_not_endless(tmp_path: Path) -> None:
    path = script(tmp_path)
    path.write_text(path.read_text().replace("    with step", "    continue\n    with step"))

    ended = run(path)

    assert ended.returncode == 2, ended.stderr
    assert "the loop over a TileJob needs 'with step as batch' in each turn" in ended.stderr


LATE = """
import logging, os, shutil
from meshmend.train.torch import job_record

class Server(logging.Handler):
    # A file server that shows the last shard when its client has told that it misses it.
    def emit(self, record):
        if "which others see" in record.getMessage() and {comes}:
            shutil.copy({shard!r}, {late!r})

logging.getLogger().addHandler(Server())
job_record._SEEN_S = {patience}
kept = {kept!r} if os.environ["RANK"] != "0" else {missed!r}
job = """


@pytest.mark.parametrize("comes", [True, False])
def test_a_chip_that_sees_a_checkpoint_later_than_the_others_waits_for_it_or_is_refused(
    tmp_path: Path, comes: bool
) -> None:
    kept, missed = tmp_path / "kept", tmp_path / "missed"
    first = run(script(tmp_path, steps=12, more=saved(kept, every=6)), mesh="1x2")
    assert first.returncode == 0, first.stderr
    shutil.copytree(kept, missed)
    shard = next((kept / "step-00000012").glob("shard-001-*"))
    late = missed / "step-00000012" / shard.name
    late.unlink()
    path = script(tmp_path, more=', saving=Saving(Path(kept), every=6), resume="auto"')
    names = {"comes": comes, "patience": 600 if comes else 1, "shard": str(shard)}
    names |= {"late": str(late), "kept": str(kept), "missed": str(missed)}
    path.write_text(path.read_text().replace("job = ", LATE.format(**names), 1))

    second = run(path)

    assert late.exists() == comes, second.stderr
    (found,) = re.findall(r"loss (\S+)", second.stdout)
    assert float(found) == pytest.approx(undisturbed_loss(tmp_path), rel=0, abs=1e-9)
    if comes:
        assert second.returncode == 0, second.stderr
    else:  # the others go on without its tile
        assert second.returncode == 1, second.stderr
        refused = f"resume needs a checkpoint in {missed} that can be read, but step-00000012: it"
        assert f"chip (0, 0) failed: {refused} has 1 of 2 shards" in second.stderr

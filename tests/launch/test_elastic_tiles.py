"""Replicas that are tiles, on an elastic process group: FSDP2 inside a tile, chips die and return.

Each chip holds a part of the model. What is compared is a loop in one process that never fails.
"""

import re
from pathlib import Path

import pytest
import torch

from commanding import Ended, import_sharding, meshmend_run
from meshmend.train.data.audit import audit

STEPS = 24
GATE = 16  # a step that waits until all tiles are there again

# Each tile begins with other weights. All chips of a tile see the same samples.
LOOP = """
import os, time
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import meshmend.torch

TILE, N_TILES = {tile!r}, {n_tiles}

def build():
    global mesh
    mesh = meshmend.torch.tiles(TILE)
    torch.manual_seed(os.getpid() if mesh.get_local_rank("replicate") else 0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 33), torch.nn.Tanh(), torch.nn.Linear(33, 1))
    model.double()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)

def once(what):
    try:
        (Path({folder!r}) / what).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

chip = os.environ["MESHMEND_CHIP"]
inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).double()
dist.init_process_group("meshmend")
meshmend.torch.reconfigure(build=build, tile=TILE, shard_optimizer={shared})
for step in meshmend.torch.steps({steps}):
    while step == {gate} and mesh.size(0) < N_TILES:
        time.sleep(0.01)
        meshmend.torch.reconfigure()
    with meshmend.torch.retrying() as (model, optimizer):
        at, n_tiles = mesh.get_local_rank("replicate"), mesh.size(0)
        mine = inputs[at * 64 // n_tiles : (at + 1) * 64 // n_tiles]
        optimizer.zero_grad()
        loss = (model(mine) - mine.sum(1, keepdim=True)).square().sum() / 64
        (loss * n_tiles).backward()
        optimizer.step()
        loss = loss.detach()
        dist.all_reduce(loss, group=mesh.get_group("replicate"))
        if dist.get_rank() == 0:
            print(f"step {{step + 1}} loss {{loss.item():.15g}} on {{n_tiles}} tiles", flush=True)
        {at_the_end}
"""


def loop(
    folder: Path,
    *,
    tile: str,
    n_tiles: int,
    gate: int = GATE,
    at_the_end: str = "",
    shared: bool = False,
) -> Path:
    script = folder / "loop.py"
    script.write_text(
        LOOP.format(
            folder=str(folder),
            tile=tile,
            n_tiles=n_tiles,
            gate=gate,
            steps=STEPS,
            at_the_end=at_the_end,
            shared=shared,
        )
    )
    return script


def elastic(script: Path, *faults: str, mesh: str, run_dir: Path | None = None) -> Ended:
    """Run a job; with `run_dir`, its ledgers stay there, with a hash of each step."""
    patience = ("--set", "timing.heartbeat_timeout=60")  # on a busy machine chips may be silent
    inject = [word for fault in faults for word in ("--inject", fault)]
    checks = ("--set", "job.check_every_step=true", "--run-dir", run_dir) if run_dir else ()
    import_sharding()
    return meshmend_run("--elastic", "--mesh", mesh, *patience, *inject, *checks, script)


def undisturbed_losses() -> list[float]:
    """The losses of the same loop on one chip that has all of the model."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 33), torch.nn.Tanh(), torch.nn.Linear(33, 1))
    model.double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    inputs = torch.randn(64, 8, generator=torch.Generator().manual_seed(0)).double()
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def check_losses(ended: Ended) -> dict[int, set[int]]:
    """Check that each step's loss is that of an undisturbed run; return its numbers of tiles."""
    assert ended.returncode == 0, ended.stderr
    assert f"{STEPS} steps; samples not counted; replicas equal bit for bit" in ended.stderr
    found = re.findall(r"step (\d+) loss (\S+) on (\d+) tiles", ended.stdout)
    losses = undisturbed_losses()
    n_tiles: dict[int, set[int]] = {}
    for step, loss, n in found:
        assert float(loss) == pytest.approx(losses[int(step) - 1], rel=0, abs=1e-9)
        n_tiles.setdefault(int(step), set()).add(int(n))
    assert STEPS in n_tiles
    return n_tiles


def test_a_tile_goes_on_without_another_and_a_chip_that_returns_gets_its_part(
    tmp_path: Path,
) -> None:
    script = loop(tmp_path, tile="1x2", n_tiles=2)

    ended = elastic(script, "kill 0,1 at 5", "repair 0,1 at 10", mesh="1x4")

    n_tiles = check_losses(ended)
    assert n_tiles[1] == {2}
    assert n_tiles[10] == {1}
    assert n_tiles[STEPS] == {2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("others", "begins"),
    [
        ("time.sleep(1.0 if chip == '0,2' and step == 8 else 0)", 9),
        ("if chip == '0,2' and step == 8 and once('failed'): raise RuntimeError('a sum')", 8),
    ],
    ids=["all have done the step", "one has not"],
)
def test_a_step_that_only_some_chips_have_done_counts_if_all_of_its_state_is_there(
    tmp_path: Path, others: str, begins: int
) -> None:
    """A chip of the other tile dies at the end of the step, and with it the sums that follow."""
    dies = "if chip == '0,1' and step == 8 and once('died'): os._exit(9)"
    script = loop(tmp_path, tile="1x2", n_tiles=2, gate=-1, at_the_end=f"{dies}\n        {others}")

    ended = elastic(script, mesh="1x4")

    assert check_losses(ended)[STEPS] == {1}
    assert f"generation 2: 2 chips from step {begins} on" in ended.stderr


def test_a_step_that_counts_when_the_next_generation_begins_is_seen_like_any_other(
    tmp_path: Path,
) -> None:
    """All chips have done step 9 when one of them dies. The next one waits for its repair."""
    end = f"""if step == 8:
            once(f"done {{chip}}")
            while chip == "0,1" and not all(
                (Path({str(tmp_path)!r}) / f"done 0,{{at}}").exists() for at in (0, 2, 3)
            ):
                time.sleep(0.01)
            if chip == "0,1" and once("died"):
                os._exit(9)"""
    script = loop(tmp_path, tile="1x2", n_tiles=2, gate=9, at_the_end=end)
    run_dir = tmp_path / "run"

    ended = elastic(script, "repair 0,1 at 9", mesh="1x4", run_dir=run_dir)

    assert check_losses(ended)[STEPS] == {2}
    assert "generation 2: 2 chips from step 9 on" in ended.stderr
    assert audit(run_dir / "ledger").hashed == STEPS


@pytest.mark.slow
def test_a_step_that_one_twin_lacks_is_done_again_where_twins_share_its_state(
    tmp_path: Path,
) -> None:
    """All colours have done the step, but a share of each: it takes all twins to go on from it."""
    dies = "if chip == '0,1' and step == 8 and once('died'): os._exit(9)"
    fails = "if chip == '0,3' and step == 8 and once('failed'): raise RuntimeError('a sum')"
    end = f"{dies}\n        {fails}"
    script = loop(tmp_path, tile="1x2", n_tiles=4, gate=-1, at_the_end=end, shared=True)

    ended = elastic(script, mesh="2x4")

    assert check_losses(ended)[STEPS] == {3}
    assert "generation 2: 6 chips from step 8 on" in ended.stderr
    assert "is lost" not in ended.stderr


@pytest.mark.slow
@pytest.mark.parametrize("shared", [False, True], ids=["each has its state", "twins share it"])
@pytest.mark.parametrize("moment", ["forward", "update", "recovery"])
def test_a_chip_may_die_at_any_moment_of_a_step(
    tmp_path: Path, moment: str, *, shared: bool
) -> None:
    script = loop(tmp_path, tile="1x2", n_tiles=3, shared=shared)

    ended = elastic(script, f"kill 0,1 at 5 in {moment}", "repair 0,1 at 10", mesh="1x6")

    assert check_losses(ended)[STEPS] == {3}


@pytest.mark.slow
def test_chips_that_wait_for_one_that_hangs_are_called_away(tmp_path: Path) -> None:
    """Nobody's connection breaks: the sums over tiles must hear that the mesh has changed."""
    script = loop(tmp_path, tile="1x2", n_tiles=2, gate=-1)

    ended = meshmend_run("--elastic", "--mesh", "1x4", "--inject", "hang 0,1 at 8", script)

    check_losses(ended)


@pytest.mark.slow
def test_a_spare_takes_the_place_of_a_chip_that_died(tmp_path: Path) -> None:
    """Tiles of 1x2 on 2x3: the last column waits; then 0,2 has the colour that 0,0 had."""
    script = loop(tmp_path, tile="1x2", n_tiles=2, gate=-1)

    ended = elastic(script, "kill 0,0 at 8", mesh="2x3")

    n_tiles = check_losses(ended)
    assert set().union(*n_tiles.values()) == {2}
    assert "2x1@0,2 waiting: it has no place in a whole tile of 1x2" in ended.stderr
    assert "0,2 waiting" not in ended.stderr.partition("generation 2")[2]


@pytest.mark.slow
def test_tiles_of_four_chips_lose_a_tile_and_get_it_back(tmp_path: Path) -> None:
    script = loop(tmp_path, tile="2x2", n_tiles=2)

    ended = elastic(script, "kill 0,0 at 5", "repair 0,0 at 10", mesh="2x4")

    n_tiles = check_losses(ended)
    assert (n_tiles[1], n_tiles[10], n_tiles[STEPS]) == ({2}, {1}, {2})


@pytest.mark.parametrize(
    ("code", "mesh", "lines", "words"),
    [
        (
            2,
            "1x1",
            "meshmend.torch.reconfigure(model, tile='1x1')",
            "reconfigure(tile='1x1') needs build=, which makes the model anew when the tiles",
        ),
        (
            1,  # the coordinator refuses it, which knows the mesh
            "1x1",
            "meshmend.torch.reconfigure(build=lambda: [model], tile='1x2')",
            "a tile of 1x2 does not fit the mesh 1x1; take another",
        ),
        (
            2,
            "1x1",
            "meshmend.torch.reconfigure(build=lambda: [DDP(model)], tile='1x1')",
            "but got a DistributedDataParallel, which has all of it on each chip; leave out tile",
        ),
        (
            2,
            "1x1",
            "meshmend.torch.reconfigure(build=lambda: meshmend.torch.tiles('1x1'))",
            "call tiles in build, with reconfigure(build=build, tile='1x1')",
        ),
        (
            2,
            "1x2",
            "def build():\n"
            "    mesh = init_device_mesh('cpu', (2,))\n"
            "    return [fully_shard(model, mesh=mesh)]\n"
            "meshmend.torch.reconfigure(build=build, tile='1x1')",
            "needs each parameter whole in one tile, but weight is sharded over ranks such as",
        ),
    ],
)
def test_what_does_not_fit_tiles_is_refused_in_one_line(
    tmp_path: Path, code: int, mesh: str, lines: str, words: str
) -> None:
    script = tmp_path / "wrong.py"
    script.write_text(
        "import torch, meshmend.torch, torch.distributed as dist\n"
        "from torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "from torch.nn.parallel import DistributedDataParallel as DDP\n"
        "dist.init_process_group('meshmend')\n"
        f"model = torch.nn.Linear(4, 4)\n{lines}\n"
    )

    ended = elastic(script, mesh=mesh)

    assert ended.returncode == code, ended.stderr
    assert words in ended.stderr

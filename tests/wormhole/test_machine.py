"""The host side: where a mesh lies on a machine, and runs under ttsim if it is there."""

import json
import os
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from meshmend.cli.main import run_line
from meshmend.config import TTSIM
from meshmend.errors import InputError, TransportError
from meshmend.planning.plan import plan
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from meshmend.wormhole.bus import Clock, Read, RemoteBus, Request, Write
from meshmend.wormhole.compiler import compiled
from meshmend.wormhole.experiment import Question, parse_lost_cable, run_experiment
from meshmend.wormhole.machine import (
    Machine,
    discovered,
    laid_out,
    run,
    wiring_of,
    with_lost_cables,
)
from meshmend.wormhole.table import ETHERNET_PLACES, HEADER_AT, PASS, WAIT, Core, Program
from wormhole_cables import with_table

Captured = pytest.CaptureFixture[str]
LIBRARY = TTSIM.value_in(os.environ)
with_ttsim = pytest.mark.skipif(
    not LIBRARY, reason=f"{TTSIM.name} does not name a libttsim.so of 32 Wormhole chips"
)


class NoBus:
    """The bus of a machine of which only the cables are asked."""

    n_chips = 32

    def do(self, requests: Sequence[Request]) -> list[bytes]:
        raise AssertionError(requests)


def torus_machine(shape: tuple[int, int]) -> Machine:
    """Return a torus of chips with four cables a link, numbered as nobody would expect."""
    mesh = Mesh(shape, (True, True))
    number = {chip: 5 * rank % mesh.n_chips for rank, chip in enumerate(mesh.live)}
    cables = {}
    for rank, chip in enumerate(mesh.live):
        for port, other in enumerate(mesh.neighbor_ranks[rank].tolist()):
            for cable in range(4):
                there = number[mesh.live[other]], 4 * (port ^ 1) + cable
                cables[number[chip], 4 * port + cable] = there
    return Machine(NoBus(), cables)


@pytest.mark.parametrize("mesh", ["8x4", "4x8", "2x2", "1x5", "3x4"])
def test_a_mesh_lies_where_all_its_links_have_cables(mesh: str) -> None:
    machine, wanted = torus_machine((8, 4)), parse_mesh(mesh)

    chips = laid_out(machine, wanted)

    assert len(set(chips.values())) == wanted.n_chips
    for rank, port in product(range(wanted.n_live), range(4)):
        other = wanted.neighbor_ranks[rank, port]
        if other >= 0:
            ends = chips[wanted.live[rank]], chips[wanted.live[other]]
            here, back = machine.between(*ends), machine.between(*reversed(ends))
            assert len(here) == 4
            assert back == tuple((there, own) for own, there in here)


@pytest.mark.parametrize(("mesh", "wrap"), [("5x5", "none"), ("4x4", "all"), ("33x1", "none")])
def test_a_mesh_that_the_machine_does_not_have_is_refused(mesh: str, wrap: str) -> None:
    with pytest.raises(InputError, match="ask for a smaller one"):
        laid_out(torus_machine((8, 4)), parse_mesh(mesh, wrap=wrap))


def test_a_lost_cable_has_no_part_at_both_ends() -> None:
    machine, made = torus_machine((8, 4)), plan(Mesh((2, 2)), "trees")
    chips = laid_out(machine, made.mesh)

    wiring = wiring_of(machine, made, chips, [parse_lost_cable("0,0-0,1:2")])

    assert {end: len(cables) for end, cables in wiring.cables.items() if len(cables) < 4} == {
        (0, 3): 3,
        (1, 2): 3,
    }


def test_links_are_as_slow_as_the_cables_that_they_lost() -> None:
    machine, mesh = torus_machine((8, 4)), Mesh((2, 2))
    chips = laid_out(machine, mesh)
    lost = [parse_lost_cable(f"0,0-0,1:{number}") for number in (0, 2, 2)]
    lost += [parse_lost_cable(f"1,0-1,1:{number}") for number in range(4)]

    found = with_lost_cables(mesh, machine, chips, lost)

    assert str(found) == "2x2 less link:1,0-1,1 slow link:0,0-0,1=0.5"
    for text, n_cables in (("0,0-0,1:4", 4), ("0,1-0,2:0", 0)):
        with pytest.raises(InputError, match=f"has {n_cables} cables on this machine"):
            with_lost_cables(mesh, machine, chips, [parse_lost_cable(text)])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--mesh 2x2", "needs --library libttsim.so, or MESHMEND_TTSIM"),
        ("--mesh 2x2 --library /nowhere.so", "cannot read the library /nowhere.so"),
        ("--mesh 2x2 --library {here}", "cannot use {here} as a library of ttsim"),
        ("--mesh 2x2 --library {here} --type float64", "adds int32, float32, bfloat16"),
        ("--mesh 2x2 --library {here} --collective scatter", "needs one of allreduce"),
        ("--mesh 2x2 --library {here} --payload 3", "a payload of one int32 or more"),
        ("--mesh 2x2 --library {here} --payload 1GB", "at most 67,108,864 bytes"),
        ("--mesh 2x2 --library {here} --lost-cable 0,0", "a lost cable is written 0,1-0,2:3"),
        ("--mesh 2x2 --library {here} --algorithm nope", "nope"),
        ("--mesh 2y2 --library {here}", "2y2"),
        ("--mesh 2x2 --library {here} --plan /nowhere.json", "cannot read the plan"),
        ("--mesh 2x2 --library {here} --plan {here} --algorithm trees", "leave the others out"),
    ],
)
def test_bad_input_is_one_line(
    line: str, message: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TTSIM.name, raising=False)
    words = line.format(here=__file__).split()

    assert run_line(["wormhole", "run", *words]) == 2
    (said,) = capsys.readouterr().err.splitlines()
    assert message.format(here=__file__) in said


@with_ttsim
@pytest.mark.parametrize(
    ("line", "n_untouched"),
    [
        ("--mesh 2x2 --payload 2KB --lost-cable 0,0-0,1:3", 482),
        ("--mesh 2x3 --fail 1,1 --payload 1KB --type float32 --slices 2", 480),
        ("--mesh 2x2 --payload 1KB --type bfloat16 --collective reduce-scatter", 480),
        ("--mesh 2x2 --fail link:0,0-0,1 --payload 2KB --collective all-gather", 488),
        ("--mesh 2x2 --payload 2KB --collective broadcast", 488),
    ],
)
def test_a_small_mesh_has_every_bit(line: str, n_untouched: int, capsys: Captured) -> None:
    assert run_line(["wormhole", "run", *line.split(), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)

    assert facts["right"]
    assert facts["untouched_cores"] == n_untouched
    assert facts["cables"] == (512 - n_untouched) // 2
    assert 0 < facts["busiest_cable"]["bytes"] <= facts["bytes_on_cables"]


@with_ttsim
def test_a_plan_of_a_file_runs_on_its_own_mesh_only(tmp_path: Path, capsys: Captured) -> None:
    file = tmp_path / "plan.json"
    plan(Mesh((2, 2)), "ring-1d").save(file)
    line = f"wormhole run --payload 1KB --plan {file} --json"

    assert run_line([*line.split(), "--mesh", "2x2"]) == 0
    assert json.loads(capsys.readouterr().out)["algorithm"] == "ring-1d"
    assert run_line([*line.split(), "--mesh", "2x3"]) == 2
    assert "is a plan for the mesh 2x2, but got 2x3" in capsys.readouterr().err


@with_ttsim
def test_the_galaxy_is_an_8x4_torus() -> None:
    with RemoteBus(Path(LIBRARY)) as bus:
        machine = discovered(bus)
        chips = laid_out(machine, parse_mesh("8x4", wrap="all"))

    assert bus.n_chips == 32
    assert len(machine.cables) == 32 * 16
    assert [chips[0, column] for column in range(4)] == [0, 3, 19, 16]


def with_a_stray_move(program: Program, victim: Core) -> Program:
    """Return a program in which a core of the victim's chip writes 16 bytes there, at the end."""
    core = next(each for each in program.moves if each.rank == victim.rank)
    stray = np.zeros((1, 8), dtype=np.uint32)
    stray[0] = PASS, 0x30000, HEADER_AT, 16, 0x30000, ETHERNET_PLACES[victim.channel], 1, 0
    return with_table(program, core, np.concatenate([program.moves[core], stray]))


@with_ttsim
def test_a_byte_on_a_dead_cable_is_found() -> None:
    made, lost = plan(Mesh((1, 2)), "trees"), [parse_lost_cable("0,0-0,1:1")]
    with RemoteBus(Path(LIBRARY)) as bus:
        machine = discovered(bus)
        chips = laid_out(machine, made.mesh)
        program = compiled(made, wiring_of(machine, made, chips, lost), n_elements=64)
        numbers = [chips[chip] for chip in made.mesh.live]
        (here, _) = machine.between(*numbers)[1]
        arrays = [np.ones(64, np.int32)] * 2
        mutant = with_a_stray_move(program, Core(0, here))

        with pytest.raises(TransportError, match=f"channel {here} of chip {numbers[0]} changed"):
            run(machine, mutant, numbers, arrays)


@with_ttsim
@pytest.mark.slow
def test_a_core_that_waits_forever_is_found() -> None:
    made = plan(Mesh((1, 2)), "trees")
    with RemoteBus(Path(LIBRARY)) as bus:
        machine = discovered(bus)
        chips = laid_out(machine, made.mesh)
        program = compiled(made, wiring_of(machine, made, chips), n_elements=64)
        core = next(iter(program.moves))
        moves = program.moves[core].copy()
        moves[moves[:, 0] == WAIT, 6] += 1000

        with pytest.raises(TransportError, match="did nothing for 200,000 clocks"):
            run(
                machine,
                with_table(program, core, moves),
                [chips[chip] for chip in made.mesh.live],
                [np.ones(64, np.int32)] * 2,
            )


@with_ttsim
def test_what_the_hardware_does_not_define_ends_the_child_alone() -> None:
    with RemoteBus(Path(LIBRARY)) as bus:
        assert bus.do([Write(0, ETHERNET_PLACES[0], 0x30000, b"meshmend"), Clock(1)]) == []
        assert bus.do([Read(0, ETHERNET_PLACES[0], 0x30000, 8)]) == [b"meshmend"]
        with pytest.raises(TransportError, match=r"the simulator ended: .*ETH read overrun"):
            bus.do([Read(0, ETHERNET_PLACES[0], 0x3FFFF, 8)])


@with_ttsim
@pytest.mark.slow
@pytest.mark.parametrize("type_name", ["int32", "float32"])
def test_a_galaxy_that_lost_a_board_has_every_bit(type_name: str) -> None:
    mesh = parse_mesh("8x4", wrap="all", fail=["2x2@2,0"])

    result = run_experiment(Question(mesh, 65536, type_name), Path(LIBRARY))

    assert result.n_wrong == 0
    assert result.outcome.n_untouched >= 4 * 16

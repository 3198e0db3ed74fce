"""The paper's way to a sharded update, drawn after figure 10 with its time beside ours."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from meshmend.cli.main import run_line
from meshmend.planning.pricing import price
from meshmend.planning.target import Question
from meshmend.schedule.table import Collective
from meshmend.topology.fabric import FABRICS
from meshmend.topology.mesh import Mesh
from meshmend.units import format_time


def test_figures_draws_the_owners_the_update_and_both_times(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mesh = Mesh((8, 8)).without("2x2@2,4")
    question = Question(mesh, 100e6, FABRICS["reference"], Collective.SHARDED_UPDATE)
    theirs, ours = price(question, "ft-two-d"), price(question, "trees")

    assert run_line(["figures", "-o", str(tmp_path)]) == 0

    assert "figure-11-sharded-update.svg" in capsys.readouterr().out
    picture = ElementTree.parse(tmp_path / "figure-11-sharded-update.svg")
    words = " ".join(" ".join(picture.getroot().itertext()).split())
    assert "5. update" in words
    assert "each of 48 blue chips: its share of the weights" in words
    assert ours.time_s < theirs.time_s
    for time_s in (theirs.time_s, ours.time_s):
        assert format_time(time_s) in words

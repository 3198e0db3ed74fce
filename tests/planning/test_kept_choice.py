"""What `auto` found is kept with its trees, and a file that does not fit is found anew."""

import json
from pathlib import Path

import numpy as np
import pytest

from meshmend.planning import choose as module
from meshmend.planning import target
from meshmend.planning.choose import Choice, choose, chosen_schedule, forget
from meshmend.planning.target import Question
from meshmend.schedule.table import Collective
from meshmend.topology.fabric import FABRICS
from meshmend.topology.text import parse_mesh

MESH = parse_mesh("4x4", fail=["2x2@0,2"])


def _chosen(cache_dir: Path) -> Choice:
    forget()
    return choose(Question(MESH, 1e6, FABRICS["reference"]), cache_dir=cache_dir)


def test_a_kept_choice_gives_the_same_schedule_without_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = chosen_schedule(MESH, _chosen(tmp_path), Collective.ALLREDUCE)

    monkeypatch.setattr(module, "trees_of", lambda *_: pytest.fail("searched again"))
    monkeypatch.setattr(module, "price", lambda *_, **__: pytest.fail("searched again"))
    second = chosen_schedule(MESH, _chosen(tmp_path), Collective.ALLREDUCE)

    for column in ("src", "dst", "lo", "hi", "op", "cuts"):
        np.testing.assert_array_equal(getattr(first, column), getattr(second, column))


def test_a_choice_that_other_code_has_found_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = _chosen(tmp_path)

    monkeypatch.setattr(target, "code_digest", lambda: "of another version")

    assert _chosen(tmp_path) == choice
    assert len([*tmp_path.glob("*.json")]) == 2


@pytest.mark.parametrize(
    "parents",
    [None, [], [[0, 1]], [[11] * 12], [[-1] * 12], "trees"],
    ids=["none", "empty", "too few ranks", "no neighbours", "no ways", "words"],
)
def test_kept_trees_that_are_none_of_this_mesh_are_found_anew(
    tmp_path: Path, parents: object
) -> None:
    choice = _chosen(tmp_path)
    (file,) = tmp_path.glob("*.json")
    document = json.loads(file.read_text())

    file.write_text(json.dumps(document | {"parents": parents}))
    again = _chosen(tmp_path)

    assert again == choice
    assert json.loads(file.read_text()) == document

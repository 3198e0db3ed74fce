"""The limit of a large mesh is read from disk the second time, and is the same."""

from pathlib import Path
from typing import Any

import pytest

from meshmend.planning.kept_limits import kept_or_computed_limit
from meshmend.planning.pricing import Question
from meshmend.schedule.table import Collective
from meshmend.simulator.limit import Limit, limit
from meshmend.topology.fabric import FABRICS
from meshmend.topology.text import parse_mesh

LARGE = parse_mesh("17x16", wrap="all", fail=["2x2@4,4"])


def asked(collective: Collective = Collective.ALLREDUCE) -> Question:
    return Question(
        LARGE, 1e6, FABRICS["tpu-v4"].with_(chip_bandwidth_bytes_per_s=1e11), collective
    )


def kept(folder: Path, question: Question, *, may_compute: bool = True) -> Limit:
    def computed() -> Limit:
        assert may_compute, "computed again"
        return limit(question.mesh, question.fabric, question.payload_bytes, question.collective)

    return kept_or_computed_limit(folder, question, computed)


@pytest.mark.parametrize("collective", list(Collective))
def test_the_second_time_it_is_read_and_says_the_same(
    tmp_path: Path, collective: Collective
) -> None:
    first = kept(tmp_path, asked(collective))
    again = kept(tmp_path, asked(collective), may_compute=False)

    assert again.describe() == first.describe()
    assert again.bounds_s() == first.bounds_s()
    assert again.bandwidth_or_latency_s == first.bandwidth_or_latency_s


DAMAGE: list[Any] = ["", "[]", "{}", '"part_of"', '"lower": 9e9,', '"rank": 99999,']


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_limit_is_computed_again(tmp_path: Path, damage: str) -> None:
    first = kept(tmp_path, asked())
    (file,) = (tmp_path / "limits").iterdir()
    text = file.read_text()
    if damage.endswith(","):
        name = damage.split(":")[0]
        start = text.index(name)
        text = text[:start] + damage + text[text.index(",", start) + 1 :]
    else:
        text = damage
    file.write_text(text)

    assert kept(tmp_path, asked()).describe() == first.describe()


def test_without_a_folder_or_on_few_chips_nothing_is_kept(tmp_path: Path) -> None:
    small = Question(parse_mesh("4x4"), 1e6, FABRICS["tpu-v4"])
    kept(tmp_path, small)

    assert not list(tmp_path.iterdir())

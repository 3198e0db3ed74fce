"""The limit of a large mesh is read from disk the second time, and is the same."""

from pathlib import Path
from typing import Any

import pytest

from meshmend.planning import comparison
from meshmend.planning.comparison import lower_bound
from meshmend.planning.target import Question
from meshmend.schedule.table import Collective
from meshmend.topology.fabric import FABRICS
from meshmend.topology.text import parse_mesh

LARGE = parse_mesh("17x16", wrap="all", fail=["2x2@4,4"])


def asked(collective: Collective = Collective.ALLREDUCE) -> Question:
    return Question(
        LARGE, 1e6, FABRICS["tpu-v4"].with_(chip_bandwidth_bytes_per_s=1e11), collective
    )


@pytest.mark.parametrize("collective", list(Collective))
def test_the_second_time_it_is_read_and_says_the_same(
    tmp_path: Path, collective: Collective, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = lower_bound(asked(collective), tmp_path)
    monkeypatch.setattr(comparison, "limit", lambda *_: pytest.fail("computed again"))
    again = lower_bound(asked(collective), tmp_path)

    assert again.describe() == first.describe()
    assert again.bounds_s() == first.bounds_s()
    assert again.bandwidth_or_latency_s == first.bandwidth_or_latency_s


DAMAGE: list[Any] = ["", "[]", "{}", '"part_of"', '"packing_lower": 9e9,', '"rank": 99999,']


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_limit_is_computed_again(tmp_path: Path, damage: str) -> None:
    first = lower_bound(asked(), tmp_path)
    (file,) = (tmp_path / "limits").iterdir()
    text = file.read_text()
    if damage.endswith(","):
        name = damage.split(":")[0]
        start = text.index(name)
        text = text[:start] + damage + text[text.index(",", start) + 1 :]
    else:
        text = damage
    file.write_text(text)

    assert lower_bound(asked(), tmp_path).describe() == first.describe()


def test_without_a_folder_or_on_few_chips_nothing_is_kept(tmp_path: Path) -> None:
    small = Question(parse_mesh("4x4"), 1e6, FABRICS["tpu-v4"])
    lower_bound(small, tmp_path)

    assert not list(tmp_path.iterdir())

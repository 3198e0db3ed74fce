"""A question that was asked before is answered from disk, with the same figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from meshmend.planning import comparison as module
from meshmend.planning.comparison import Comparison, compared
from meshmend.schedule.table import Collective
from meshmend.topology.fabric import FABRICS
from meshmend.topology.text import parse_mesh

MESH = parse_mesh("4x4", wrap="all", fail=["0,2"])


def ask(cache_dir: Path | None, payload_bytes: float = 1e6) -> Comparison:
    return compared(MESH, FABRICS["tpu-v4"], payload_bytes, ["auto"], cache_dir=cache_dir)


def ask_all(cache_dir: Path | None, names: Sequence[str] = ("all",), **asked: Any) -> Comparison:
    return compared(MESH, FABRICS["tpu-v4"], 1e4, names, cache_dir=cache_dir, **asked)


def test_the_same_question_again_needs_no_search_and_no_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ask(tmp_path).summary()
    monkeypatch.setattr(module, "choose", lambda *_, **__: pytest.fail("searched again"))

    assert ask(tmp_path).summary() == first


def test_the_same_question_about_every_algorithm_needs_no_simulation_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = ask_all(tmp_path).summary()
    monkeypatch.setattr(module, "price", lambda *_, **__: pytest.fail("priced again"))

    assert ask_all(tmp_path).summary() == first


@pytest.mark.parametrize(
    "other",
    [{"slices": 3}, {"collective": Collective.REDUCE_SCATTER}, {"names": ["rings-nd"]}],
    ids=str,
)
def test_other_slices_collectives_and_names_have_prices_of_their_own(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    ask_all(tmp_path)
    asked = {"names": ["trees"]} | other

    assert ask_all(tmp_path, **asked).summary() == ask_all(None, **asked).summary()


def test_another_payload_of_the_same_class_has_its_own_price(tmp_path: Path) -> None:
    first, other = ask(tmp_path).prices[0], ask(tmp_path, 1.001e6).prices[0]

    assert first.time_s < other.time_s
    assert other.time_s == ask(None, 1.001e6).prices[0].time_s


def test_the_simulation_behind_a_kept_price_can_be_had_again(tmp_path: Path) -> None:
    first = ask(tmp_path).traced()
    again = ask(tmp_path).traced()

    assert again.trace is not None
    assert again.time_s == first.time_s


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"figures": {}, "shape": 1}'])
def test_a_damaged_price_is_found_again(tmp_path: Path, text: str) -> None:
    first = ask(tmp_path).summary()
    (file,) = (tmp_path / "prices").iterdir()
    file.write_text(text)

    assert ask(tmp_path).summary() == first


def test_a_folder_that_cannot_be_written_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "prices").write_text("")

    assert ask(tmp_path).summary() == ask(None).summary()

"""The notice to save: a checkpoint is due after each step until one is complete."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from meshmend.train.state.checkpoint import SaveNotice, shard_name, step_folder


@pytest.fixture
def notice() -> Iterator[SaveNotice]:
    before = signal.getsignal(signal.SIGTERM)
    notice = SaveNotice()
    notice.listen()
    yield notice
    signal.signal(signal.SIGTERM, before)


def save(folder: Path, step: int, shard: int) -> None:
    file = step_folder(folder, step) / shard_name(shard, 2)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()


def test_nothing_is_due_without_a_notice(notice: SaveNotice, tmp_path: Path) -> None:
    assert not notice.is_due(tmp_path, 7)


def test_a_step_is_due_until_all_shards_of_one_are_there(
    notice: SaveNotice, tmp_path: Path
) -> None:
    for shard in (0, 1):
        save(tmp_path, 5, shard)  # before the notice
    os.kill(os.getpid(), signal.SIGTERM)

    assert notice.is_due(tmp_path, 7)
    save(tmp_path, 7, 0)  # the other chip gets the notice one step later
    assert notice.is_due(tmp_path, 8)
    for shard in (0, 1):
        save(tmp_path, 8, shard)
    assert not notice.is_due(tmp_path, 9)
    assert not notice.is_due(tmp_path, 10)


def test_a_notice_that_other_chips_do_not_get_is_forgotten(
    notice: SaveNotice, tmp_path: Path
) -> None:
    os.kill(os.getpid(), signal.SIGTERM)

    assert [notice.is_due(tmp_path, step) for step in range(7, 29)] == [True] * 20 + [False] * 2


def test_a_second_notice_saves_again(notice: SaveNotice, tmp_path: Path) -> None:
    os.kill(os.getpid(), signal.SIGTERM)
    assert notice.is_due(tmp_path, 7)
    for shard in (0, 1):
        save(tmp_path, 7, shard)
    assert not notice.is_due(tmp_path, 8)

    os.kill(os.getpid(), signal.SIGTERM)

    assert notice.is_due(tmp_path, 9)

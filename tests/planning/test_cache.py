"""A cache answers what was put into it, or nothing: never a torn, foreign, old or evicted value."""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend.planning.cache import Cache


@dataclass(frozen=True)
class Answer:
    time_s: float
    slices: int
    name: str


ONE, OTHER = Answer(1.5, 3, "trees"), Answer(2.5, 4, "rings-nd")


def cache_in(
    folder: Path | None, *, version: str = "1", most_bytes: int = 1 << 20
) -> Cache[Answer]:
    decode = msgspec.json.Decoder(Answer).decode
    return Cache(folder, version, msgspec.json.encode, decode, most_bytes)


def never() -> Answer:
    raise AssertionError("it was to be taken from the folder")


def test_what_was_made_once_is_read_and_no_draft_is_left(tmp_path: Path) -> None:
    cache = cache_in(tmp_path / "new" / "folder")

    assert cache.get_or_make(("4x4", 1e6), lambda: ONE) == ONE
    assert cache.get_or_make(("4x4", 1e6), never) == ONE
    assert len(list((tmp_path / "new" / "folder").iterdir())) == 1


def test_other_keys_and_versions_have_values_of_their_own(tmp_path: Path) -> None:
    cache_in(tmp_path).put(("4x4", 1e6), ONE)

    assert cache_in(tmp_path).get(("4x4", 2e6)) is None
    assert cache_in(tmp_path, version="2").get(("4x4", 1e6)) is None


@given(st.data())
def test_a_file_that_is_cut_off_or_changed_is_made_anew(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.mktemp("cache")
    cache = cache_in(folder)
    cache.put(("key",), ONE)
    (file,) = folder.iterdir()
    whole = file.read_bytes()
    cut = data.draw(st.integers(0, len(whole) - 1))
    file.write_bytes(data.draw(st.sampled_from([whole[:cut], b"{}", b"[]", b'"words"', b"\xff"])))

    assert cache.get_or_make(("key",), lambda: ONE) == ONE
    assert file.read_bytes() == whole


def test_without_a_folder_and_where_nothing_can_be_written_it_is_made_every_time(
    tmp_path: Path,
) -> None:
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    for folder in (None, tmp_path / "file"):
        cache = cache_in(folder)
        assert cache.get_or_make(("key",), lambda: ONE) == ONE
        assert cache.get_or_make(("key",), lambda: OTHER) == OTHER
    with pytest.raises(OSError, match="file"):
        cache_in(tmp_path / "file").put(("key",), ONE)


def test_above_the_limit_the_values_that_were_not_used_for_longest_go(tmp_path: Path) -> None:
    size = len(msgspec.json.encode(ONE))
    cache = cache_in(tmp_path, most_bytes=4 * size)
    for number in range(4):
        earlier = set(tmp_path.iterdir())
        cache.put((number,), ONE)
        (newest,) = set(tmp_path.iterdir()) - earlier
        os.utime(newest, (number, number))
    assert cache.get((0,)) == ONE  # now the one that was used last

    cache.put((4,), ONE)

    assert [cache.get((number,)) is not None for number in range(5)] == [
        True, False, False, True, True,
    ]  # fmt: skip


def test_many_writers_of_one_key_leave_a_whole_value(tmp_path: Path) -> None:
    cache = cache_in(tmp_path)
    cache.put(("key",), ONE)

    def write(value: Answer) -> None:
        for _ in range(100):
            cache.put(("key",), value)

    with ThreadPoolExecutor(4) as pool:
        writers = [pool.submit(write, value) for value in (ONE, OTHER)]
        while not all(writer.done() for writer in writers):
            assert cache.get(("key",)) in (ONE, OTHER)
    assert [writer.exception() for writer in writers] == [None, None]

"""The coordinator's record on disk: replaced as a whole, and saved later if the disk is full."""

from pathlib import Path

import pytest

from meshmend.membership.history import BegunGeneration, CoordinatorRecord, VoidGeneration
from meshmend.membership.messages import FRESH
from meshmend.membership.record_file import RecordSaver, load_history, save_record
from small_disks import small_disk


def test_a_record_that_finds_a_full_disk_is_saved_as_soon_as_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", n_bytes=64 << 10) as disk:
        path, filler = disk / "record", disk / "filler"
        saver = RecordSaver(lambda record: save_record(path, record))
        saver.save(CoordinatorRecord("job", step=1))
        with pytest.raises(OSError, match="No space"):
            filler.write_bytes(bytes(1 << 20))

        saver.save(CoordinatorRecord("job", step=2))
        saver.retry()

        assert load_history(path, "job").step == 1
        assert caplog.text.count("record cannot be written") == 1, "told once, not at each retry"

        filler.unlink()
        saver.retry()

        assert load_history(path, "job").step == 2
        assert sorted(disk.iterdir()) == [path]


def test_a_saved_record_is_not_written_again() -> None:
    written: list[CoordinatorRecord] = []
    saver = RecordSaver(written.append)
    saver.save(CoordinatorRecord("job"))

    saver.retry()

    assert written == [CoordinatorRecord("job")]


def test_a_record_names_the_generations_that_took_no_step(tmp_path: Path) -> None:
    begun = (BegunGeneration(1, (), is_confirmed=True), BegunGeneration(6, (), base=1, step=4))
    void = (VoidGeneration(4, FRESH), VoidGeneration(5, 1))
    record = CoordinatorRecord("job", begun, step=4, highest=6, void=void)

    save_record(tmp_path / "record", record)

    assert load_history(tmp_path / "record", "job").record == record

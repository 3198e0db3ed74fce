"""The coordinator's record on disk: replaced as a whole, and saved later if the disk is full."""

import os
import stat
from pathlib import Path

import pytest
from msgspec.structs import replace

from meshmend.errors import InputError
from meshmend.membership.history import BegunGeneration, CoordinatorRecord, VoidGeneration
from meshmend.membership.messages import FRESH
from meshmend.membership.record_file import (
    VERSION,
    RecordFile,
    RecordSaver,
    check_record,
    load_history,
    record_text,
)
from small_disks import small_disk

RECORD = CoordinatorRecord(
    "job",
    (
        BegunGeneration(1, (((0, 0), ("host-1", 7001)),), is_confirmed=True, term=3_000_001),
        BegunGeneration(6, (((0, 1), ("host-2", 7002)),), base=1, step=4, term=3_000_001),
    ),
    step=4,
    highest=6,
    void=(VoidGeneration(5, 1),),
    term=4_000_002,
    lineage=((3_000_001, 6),),
)


def put(path: Path, data: bytes) -> None:
    """Make this a file's content; a truncated file would be flushed to disk, which takes long."""
    path.unlink(missing_ok=True)
    path.write_bytes(data)


def test_a_record_that_finds_a_full_disk_is_saved_as_soon_as_there_is_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk", n_bytes=64 << 10) as disk:
        path, filler = disk / "record", disk / "filler"
        saver = RecordSaver(lambda record: RecordFile(path).save(record))
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


def test_a_record_and_then_the_name_that_it_has_are_flushed_to_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a power failure could bring back the record before it, or none."""
    path = tmp_path / "record"
    flushed: list[tuple[bool, bool]] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        is_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        flushed.append((is_folder, path.exists()))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)

    RecordFile(path).save(RECORD)

    assert flushed == [(False, False), (True, True)]


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

    RecordFile(tmp_path / "record").save(record)

    assert load_history(tmp_path / "record", "job").record == record


def test_a_record_of_which_any_bit_has_flipped_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "record"
    RecordFile(path).save(RECORD)
    whole = path.read_bytes()
    believed = []

    for bit in range(8 * len(whole)):
        rotten = bytearray(whole)
        rotten[bit // 8] ^= 1 << bit % 8
        put(path, bytes(rotten))
        if not load_history(path, "job").is_unknown or RecordFile(path).term():
            believed.append(bit)

    assert believed == []


def test_the_term_on_disk_is_that_of_whoever_wrote_last(tmp_path: Path) -> None:
    path = tmp_path / "record"
    one, other = RecordFile(path), RecordFile(path)
    terms = []

    for writer, term in ((one, 7), (other, 8), (one, 9), (other, 6)):  # all of one length
        writer.save(replace(RECORD, term=term))
        terms.append((one.term(), other.term()))

    assert terms == [(7, 7), (8, 8), (9, 9), (6, 6)]


def test_a_record_that_was_cut_off_or_goes_on_with_another_is_not_believed(tmp_path: Path) -> None:
    path = tmp_path / "record"
    RecordFile(path).save(RECORD)
    whole = path.read_bytes()

    for kept in range(len(whole)):
        for rest in (b"", bytes(len(whole) - kept), whole[:1]):
            put(path, whole[:kept] + rest)
            if whole[:kept] + rest != whole:
                assert load_history(path, "job").is_unknown, (kept, rest)
    for more in (b" ", b"\n", b"}", whole):
        put(path, whole + more)
        assert load_history(path, "job").is_unknown, more

    put(path, whole)
    assert load_history(path, "job").record == RECORD


def test_a_record_of_an_earlier_version_is_not_believed_and_one_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "record"
    path.write_text('{"version": 1, "kind": "coordinator", "job": "job", "begun": []}')

    assert load_history(path, "job").is_unknown

    [line] = caplog.messages
    assert f"its version is 1, but this meshmend reads version {VERSION}" in line
    assert "\n" not in line


def test_what_follows_a_record_that_cannot_be_read_is_no_new_beginning(tmp_path: Path) -> None:
    """The coordinator writes its term at once; if it is killed then, the next one reads that."""
    path = tmp_path / "record"
    path.write_bytes(b"")

    for _ in range(2):
        history = load_history(path, "job")
        history.take_term(0, 5)
        RecordFile(path).save(history.record)

    assert load_history(path, "job").is_unknown
    assert not load_history(path, "job").is_new


def test_a_file_with_the_record_of_another_job_and_a_folder_are_refused(tmp_path: Path) -> None:
    """A coordinator would overwrite the one, and then the other job would begin at step 0."""
    file = tmp_path / "coordinator.json"
    check_record(file, "ours", forget=False)
    file.write_text(record_text(CoordinatorRecord("theirs")))

    with pytest.raises(InputError, match="is the record of job 'theirs', but this is job 'ours'"):
        check_record(file, "ours", forget=False)
    with pytest.raises(InputError, match=f"needs a file, but {tmp_path} is a folder"):
        check_record(tmp_path, "ours", forget=True)
    check_record(file, "theirs", forget=False)
    check_record(file, "ours", forget=True)
    file.write_text("torn")
    check_record(file, "ours", forget=False)

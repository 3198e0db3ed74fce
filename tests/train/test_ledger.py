"""The ledger: an honest run audits clean, and every mutant of it is found."""

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledgers import LedgerJob
from meshmend.errors import InputError
from meshmend.train.data.audit import Audit, audit
from meshmend.train.data.ledger import Ledger
from meshmend.train.data.samples import share_of
from small_disks import small_disk

BATCH, STEPS = 10, 4


def train(folder: Path, n_chips: int = 3) -> None:
    """Write what chips write down that do four steps in generation 1."""
    ledgers = [Ledger(folder, (0, column)) for column in range(n_chips)]
    for step in range(1, STEPS + 1):
        for rank, ledger in enumerate(ledgers):
            ledger.write_try(step, 1, share_of((step - 1) * BATCH, BATCH, rank, n_chips))
        for ledger in ledgers:
            ledger.write_done(step, 1, step * BATCH)
            ledger.write_hold(step, 1, f"bits{step}")
    for ledger in ledgers:
        ledger.close()


def file_of(folder: Path, column: int) -> Path:
    (path,) = folder.glob(f"0-{column}.*.txt")
    return path


@pytest.mark.parametrize("n_chips", [1, 3, 16])
def test_an_honest_run_loses_and_repeats_nothing(tmp_path: Path, n_chips: int) -> None:
    train(tmp_path, n_chips)

    assert audit(tmp_path) == Audit(
        steps=STEPS, used=STEPS * BATCH, lost=0, repeated=0, hashed=STEPS, split=()
    )


@pytest.mark.parametrize(
    ("mutate", "expected"),
    [
        (lambda text: text.replace("try 2 1 13 16 10 -\n", ""), {"used": 37, "lost": 3}),
        (lambda text: text.replace("try 2 1 13 16", "try 2 1 12 16"), {"repeated": 1}),
        (lambda text: text.replace("try 3 1 23 26", "try 3 1 24 26"), {"used": 39, "lost": 1}),
        (lambda text: text + "try 4 1 30 33 10 -\n", {"repeated": 3}),
        (lambda text: text.replace("hold 3 1 bits3", "hold 3 1 other"), {"split": (3,)}),
        (lambda text: text + "hold 4 2 other\n", {"split": (4,)}),
        (lambda text: text + "done 5 1 60\n", {"steps": 5, "lost": 20}),
    ],
    ids=["no share", "overlap", "gap", "twice", "other bits", "bits later", "nobody summed"],
)
def test_a_mutant_is_found(
    tmp_path: Path, mutate: Callable[[str], str], expected: dict[str, object]
) -> None:
    train(tmp_path)
    path = file_of(tmp_path, 1)
    before = path.read_text()
    path.write_text(mutate(before))
    assert path.read_text() != before

    result = audit(tmp_path)

    assert {name: getattr(result, name) for name in expected} == expected


def test_a_step_that_was_lost_with_its_chips_and_done_again_counts_once(tmp_path: Path) -> None:
    train(tmp_path)
    with file_of(tmp_path, 0).open("a") as ledger:  # chip (0, 0) alone goes back to step 4
        ledger.write("try 4 7 30 40 10 -\ndone 4 7 40\nhold 4 7 again\n")

    result = audit(tmp_path)

    assert (result.used, result.lost, result.repeated, result.split) == (40, 0, 0, ())


def test_a_try_that_came_to_nothing_does_not_count(tmp_path: Path) -> None:
    train(tmp_path)
    with file_of(tmp_path, 2).open("a") as ledger:
        ledger.write("try 5 1 46 50 10 -\ntry 5 2 40 50 10 -\n")

    assert audit(tmp_path).used == STEPS * BATCH


@given(st.integers(1, 30))
def test_a_torn_last_line_is_passed_over(tmp_path_factory: pytest.TempPathFactory, n: int) -> None:
    folder = tmp_path_factory.mktemp("ledger")
    train(folder)
    with file_of(folder, 1).open("a") as ledger:
        ledger.write("try 5 1 43 46 10 - and much more"[:n])

    assert audit(folder).used == STEPS * BATCH


@pytest.mark.parametrize("line", ["done 5", "did 5 1 50", "", "try 1 2 3 4 5 x", "done five 1 50"])
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, line: str) -> None:
    train(tmp_path)
    with file_of(tmp_path, 1).open("a") as ledger:
        ledger.write(f"{line}\ndone 4 1 40\n")

    with pytest.raises(InputError, match=r"0-1\.\d+\.txt is not a ledger: line 14 reads"):
        audit(tmp_path)


@pytest.mark.parametrize("text", ["done 5 1 50\n", "ledger 1 0,0 0 0 000\n"])
def test_a_file_of_another_version_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "0-0.1.txt").write_text(text)

    with pytest.raises(InputError, match="is not a ledger of version 2: line 1 reads"):
        audit(tmp_path)


def test_two_workers_of_a_chip_with_the_same_process_number_have_two_files(tmp_path: Path) -> None:
    for _ in range(2):
        Ledger(tmp_path, (0, 0)).close()

    assert len(list(tmp_path.iterdir())) == 2


class FullDisk:
    """Stands in for `os.pwrite`: new bytes beyond `room` do not fit, old ones can be changed.

    With a path, that file alone is on the full disk.
    """

    def __init__(self, room: int, path: Path | None = None) -> None:
        self.room, self._path = room, path
        self._write = os.pwrite

    def __call__(self, fd: int, data: bytes, offset: int) -> int:
        if self._path is not None and not os.path.samestat(os.fstat(fd), self._path.stat()):
            return self._write(fd, data, offset)
        size = os.fstat(fd).st_size
        room = max(size, self.room) - offset
        if room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._write(fd, data[:room], offset)


def test_a_full_disk_does_not_stop_the_ledger_and_the_audit_says_what_was_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    ledger = Ledger(tmp_path, (0, 1), on_failure=told.append)
    monkeypatch.setattr(os, "pwrite", FullDisk(room=90))
    for step in range(1, 9):
        ledger.write_try(step, 1, share_of((step - 1) * BATCH, BATCH, 0, 1))
        ledger.write_done(step, 1, step * BATCH)
        ledger.write_hold(step, 1, "bits")
    ledger.close()

    found = audit(tmp_path)

    assert told == ["No space left on device"]
    assert found.unchecked == (
        "the ledger of chip (0, 1) ends at step 2: No space left on device; "
        "later steps are not checked",
    )
    assert not found.is_wrong
    assert found.replicas_equal is None


def test_a_full_disk_of_one_chip_loses_no_samples_of_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = LedgerJob(tmp_path)
    job.run(1, (0, 1, 2), after=0, to=3)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", FullDisk(room=0, path=job.file(1)))
        job.run(1, (0, 1, 2), after=3, to=6)
    job.close()

    found = audit(tmp_path)

    assert (found.lost, found.repeated, found.faults) == (0, 0, ())
    assert found.unchecked == (
        "the ledger of chip (0, 1) ends at step 3: No space left on device; "
        "later steps are not checked",
    )


def test_when_there_is_room_again_the_ledger_goes_on_after_a_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = LedgerJob(tmp_path)
    job.run(1, (0, 1), after=0, to=3)
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", FullDisk(room=0))
        job.run(1, (0, 1), after=3, to=6)
    job.run(1, (0, 1), after=6, to=9)
    job.close()

    found = audit(tmp_path)

    assert not found.is_wrong
    assert found.unchecked[0] == (
        "the ledger of chip (0, 0) lacks lines of steps 3 to 7: writing failed; "
        "these steps are not checked"
    )
    assert found.replicas_equal is True  # at the end


def test_a_ledger_that_began_on_a_full_disk_gets_its_first_line_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", FullDisk(room=0))
        job = LedgerJob(tmp_path)
        job.run(1, (0, 1), after=0, to=3)
    job.run(1, (0, 1), after=3, to=6)
    job.close()

    found = audit(tmp_path)

    assert not found.is_wrong
    assert found.unchecked
    assert found.replicas_equal is True  # at the end


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_ledger_on_a_real_full_disk(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", n_bytes=16384) as folder:
        job = LedgerJob(folder)
        job.run(1, (0, 1), after=0, to=1000)
        job.close()
        found = audit(folder)

    assert len(found.unchecked) == 2
    assert all("No space left on device" in words for words in found.unchecked)
    assert not found.is_wrong
    assert found.replicas_equal is None


def test_without_a_folder_nothing_is_written(tmp_path: Path) -> None:
    ledger = Ledger(None, (0, 0))

    ledger.write_done(1, 1, 10)
    ledger.close()

    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_holds_no_steps(tmp_path: Path) -> None:
    assert audit(tmp_path) == Audit(steps=0, used=0, lost=0, repeated=0, hashed=0, split=())

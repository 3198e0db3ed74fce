"""The log of a run: a full disk neither ends the run nor loses an event of it."""

import errno
import logging
import os
from contextlib import closing
from pathlib import Path

import pytest

from meshmend.launch.run_log import RunLog
from meshmend.membership.events import TimedEvent
from small_disks import small_disk
from training_events import lines, short_run


class FullSink:
    """Takes three events, then the disk is full."""

    def __init__(self) -> None:
        self.n_taken = 0

    def add(self, timed: TimedEvent) -> None:
        self.close()
        self.n_taken += 1

    def close(self) -> None:
        if self.n_taken == 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_all_events_are_in_the_file(tmp_path: Path) -> None:
    with closing(RunLog(tmp_path / "events.jsonl")) as log:
        for timed in short_run():
            log.add(timed)

    assert (tmp_path / "events.jsonl").read_text() == "".join(lines(short_run()))
    assert list(log.lines()) == lines(short_run())


def test_a_sink_that_fails_is_named_once_and_the_file_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    sink = FullSink()
    with closing(RunLog(tmp_path / "events.jsonl", sink)) as log:
        for timed in short_run():
            log.add(timed)

    (record,) = caplog.records
    assert record.getMessage() == (
        "cannot write to FullSink any more: No space left on device; training goes on"
    )
    assert list(log.lines()) == lines(short_run())


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_on_a_full_disk_all_lines_are_still_there_and_one_line_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with small_disk(tmp_path / "disk", n_bytes=4096) as folder:
        with closing(RunLog(folder / "events.jsonl")) as log:
            for timed in short_run():
                log.add(timed)
        found = list(log.lines())

    assert found == lines(short_run())
    (record,) = caplog.records
    assert "events.jsonl: No space left on device; training goes on" in record.message


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_once_a_full_disk_has_room_again_all_events_are_in_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    *events, last = short_run()
    n_bytes = len("".join(lines(short_run()))) + 4096
    with small_disk(tmp_path / "disk", n_bytes=n_bytes) as folder:
        path, other = folder / "events.jsonl", folder / "other"
        other.write_bytes(bytes(n_bytes // 2))
        with closing(RunLog(path)) as log:
            for timed in events:
                log.add(timed)
            n_before = path.read_text().count("\n")
            os.truncate(other, 0)
            log.add(last)
            found = path.read_text()

    assert 0 < n_before < len(events)
    assert found == "".join(lines([*events, last]))
    assert caplog.messages == [
        f"cannot write to {path}: No space left on device; training goes on",
        f"{path} has all events again",
    ]

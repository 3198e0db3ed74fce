"""TensorBoard files: every record intact, every figure where TensorBoard looks for it."""

import math
import struct
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from meshmend.errors import InputError
from meshmend.membership.events import StepFinished, TimedEvent
from training_events import chips_without, end, generation, short_run, start, step

pytest.importorskip("tensorboardX")

from tensorboardX.crc32c import crc32c
from tensorboardX.proto.event_pb2 import Event as Record

from meshmend.pages.report.tensorboard import TensorBoardLog

FULL = chips_without("4x4")
STARTED = 1794715200.0  # 2026-11-15T04:00:00Z


def masked(data: bytes) -> int:
    """The checksum of the TFRecord format: CRC-32C, rotated and shifted."""
    crc: int = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def records(folder: Path) -> Iterator[Any]:
    (path,) = folder.iterdir()
    data, at = path.read_bytes(), 0
    while at < len(data):
        head = data[at : at + 8]
        (length,) = struct.unpack("<Q", head)
        body = data[at + 12 : at + 12 + length]
        assert struct.unpack("<I", data[at + 8 : at + 12]) == (masked(head),)
        assert struct.unpack("<I", data[at + 12 + length : at + 16 + length]) == (masked(body),)
        record = Record()
        record.ParseFromString(body)
        yield record
        at += 16 + length


def scalars(folder: Path) -> dict[str, list[tuple[int, float, float]]]:
    """(step, seconds since the start, value) of each scalar by its tag."""
    found = defaultdict(list)
    for record in records(folder):
        for value in record.summary.value:
            if value.HasField("simple_value"):
                at = record.wall_time - STARTED
                found[value.tag].append((record.step, at, value.simple_value))
    return dict(found)


def written(folder: Path, *events: TimedEvent) -> Path:
    with TensorBoardLog(folder) as log:
        for event in events:
            log.add(event)
    return folder


def test_every_step_of_a_run_is_read_back(tmp_path: Path) -> None:
    events = short_run()

    found = scalars(written(tmp_path / "tb", *events))

    steps = [(each.t, each.event) for each in events if isinstance(each.event, StepFinished)]
    rates = {"samples_per_s", "recovery_s", "rejoin_s"}
    assert set(found) == {"loss", "chips", "generation"} | rates
    assert [step for step, _, _ in found["loss"]] == list(range(1, 101))
    for (_, at, loss), (t, event) in zip(found["loss"], steps, strict=True):
        assert at == pytest.approx(t, abs=1e-5)
        assert loss == pytest.approx(event.loss, rel=1e-6)
    assert {value for _, _, value in found["chips"]} == {12, 16}
    assert [value for _, _, value in found["generation"]] == [1, 2, 3]
    assert [value for _, _, value in found["recovery_s"]] == pytest.approx([0.41])
    assert [value for _, _, value in found["rejoin_s"]] == pytest.approx([1.7])
    assert all(30 < value < 1100 for _, _, value in found["samples_per_s"])


def test_the_file_begins_with_its_version_and_tells_faults_as_text(tmp_path: Path) -> None:
    first, *rest = records(written(tmp_path, *short_run()))

    assert first.file_version == "brain.Event:2"
    texts = [
        value.tensor.string_val[0].decode()
        for record in rest
        for value in record.summary.value
        if value.metadata.plugin_data.plugin_name == "text"
    ]
    assert texts[1] == "kill 2x2@0,2 at step 30"
    assert texts[-1].startswith("done: 100 steps")


def test_events_are_on_disk_while_the_run_goes_on(tmp_path: Path) -> None:
    log = TensorBoardLog(tmp_path)
    for event in (start(), generation(0.0, 1, FULL), step(1.5, 1, 2.0)):
        log.add(event)

    assert [(number, loss) for number, _, loss in scalars(tmp_path)["loss"]] == [(1, 2.0)]
    log.close()


def test_figures_that_are_not_numbers_are_left_out(tmp_path: Path) -> None:
    no_losses = step(1, 1, math.nan), step(1, 2, None), end(2, 2, math.nan, math.nan)
    broken = start(date="yesterday"), *no_losses

    assert set(scalars(written(tmp_path, *broken))) == {"chips"}


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(InputError, match="cannot write TensorBoard files in"):
        TensorBoardLog(tmp_path / "file" / "tb")


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)

    with pytest.raises(InputError, match=r"needs tensorboardX.*pip install 'meshmend\[train\]'"):
        TensorBoardLog(tmp_path)

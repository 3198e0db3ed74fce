"""TensorBoard event files of a training run, written while it runs.

The only module that imports tensorboardX. It uses that library's file format, but not its
`SummaryWriter`: workers that are forked later would get a copy of its queue and thread.
"""

import math
import time
from datetime import datetime
from pathlib import Path

from meshmend.errors import InputError
from meshmend.membership.events import (
    ConnectionRefused,
    FaultHappened,
    FaultRecovered,
    GenerationBegan,
    RunEnded,
    RunStarted,
    StepFinished,
    TimedEvent,
    WorkerTurnedAway,
)
from meshmend.membership.faults.fault import FaultKind
from meshmend.membership.moving_rate import MovingRate
from meshmend.pages.report.event_words import event_words

_WINDOW_S = 2.0  # samples per second are a mean over at least this time
_FLUSH_S = 1.0
_AS_TEXT = (
    RunStarted, FaultHappened, FaultRecovered, ConnectionRefused, WorkerTurnedAway, RunEnded,
)  # fmt: skip


class TensorBoardLog:
    """Writes loss, samples_per_s, chips, generation and recovery_s by step, and faults as text.

    `rejoin_s` is the time from a repair until the repaired chips finished a step.

    Wall times are the run's date plus each event's seconds, so that TensorBoard's relative axis
    shows the time of the run. The file is flushed when an event comes, at most once a
    second, and at the end.

    Raises:
        InputError: tensorboardX is not installed, or the folder cannot be written.
    """

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX import summary
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto.event_pb2 import Event as Record
        except ImportError:
            raise InputError(
                "TensorBoardLog needs tensorboardX, which is not installed; "
                "install it with pip install 'meshmend[train]'"
            ) from None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._writer = EventsWriter(str(folder / "events"))
        except OSError as error:
            raise InputError(f"cannot write TensorBoard files in {folder}: {error}") from None
        self._summary, self._record = summary, Record
        self._started = time.time()
        self._step = 0
        self._rate = MovingRate(_WINDOW_S)
        self._flushed = -math.inf

    def add(self, timed: TimedEvent) -> None:
        """Write the figures of an event; an event without figures writes nothing."""
        t, event = timed.t, timed.event
        match event:
            case RunStarted():
                self._started = _epoch(event.date, self._started)
                self._rate = MovingRate(_WINDOW_S)
            case GenerationBegan():
                self._rate.begin(t)
                self._scalar("generation", event.number, t)
            case StepFinished():
                self._step = event.step
                self._scalar("loss", event.loss, t)
                self._scalar("chips", event.chips, t)
                self._scalar("samples_per_s", self._rate.add(t, event.samples), t)
            case FaultRecovered():
                name = "rejoin_s" if event.kind is FaultKind.REPAIR else "recovery_s"
                self._scalar(name, event.recovered_s, t)
        if isinstance(event, _AS_TEXT):
            self._write(self._summary.text("events", event_words(event)), t)
        if t - self._flushed >= _FLUSH_S or isinstance(event, RunEnded):
            self._writer.flush()
            self._flushed = t

    def close(self) -> None:
        """Write everything to disk and close the file."""
        self._writer.close()

    def __enter__(self) -> "TensorBoardLog":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _scalar(self, name: str, value: float | None, t: float) -> None:
        if value is not None and math.isfinite(value):
            self._write(self._summary.scalar(name, value), t)

    def _write(self, summary: object, t: float) -> None:
        record = self._record(wall_time=self._started + t, step=self._step, summary=summary)
        self._writer.write_event(record)


def _epoch(date: str, default: float) -> float:
    try:
        return datetime.fromisoformat(date).timestamp()
    except ValueError:
        return default

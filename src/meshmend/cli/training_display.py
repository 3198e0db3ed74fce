"""Shows a training run while it goes on: a live picture on a terminal, plain lines elsewhere.

Both get the events that the run writes to `events.jsonl`, and know nothing else of it.
"""

import math
import statistics
import time
from collections import deque

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from meshmend.cli.mesh_map import mesh_map
from meshmend.membership.events import (
    ConnectionRefused,
    CoordinatorChanged,
    CoordinatorSuperseded,
    Event,
    FaultHappened,
    FaultMissed,
    FaultRecovered,
    GenerationBegan,
    HistoryDropped,
    JobFailed,
    RunEnded,
    StateLost,
    StateRestored,
    StepFinished,
    TimedEvent,
    WorkerTurnedAway,
)
from meshmend.membership.faults.fault import FaultKind
from meshmend.membership.job_view import ChipState, JobView
from meshmend.membership.moving_rate import MovingRate
from meshmend.pages.report.event_words import event_words, rate_words, seconds
from meshmend.topology.mesh import Mesh

_SPARKS = "▁▂▃▄▅▆▇█"
_N_SPARKS = 32
_N_EVENTS = 5
_REFRESH_S = 0.1
_WINDOW_S = 2.0
_FACTS_WIDTH = 50
_COLOURS: dict[type[Event], str] = {
    FaultHappened: "red",
    FaultRecovered: "green",
    CoordinatorChanged: "magenta",
    ConnectionRefused: "yellow",
    WorkerTurnedAway: "yellow",
    FaultMissed: "yellow",
    StateLost: "bold red",
    StateRestored: "yellow",
    HistoryDropped: "bold red",
    CoordinatorSuperseded: "bold red",
    JobFailed: "bold red",
    GenerationBegan: "cyan",
    RunEnded: "bold green",
}


def plain_line(timed: TimedEvent, n_steps: int = 0) -> str | None:
    """Return the line that shows an event where there is no terminal, or None.

    About twenty of the `n_steps` steps have a line, including the first and the last.
    """
    event = timed.event
    if isinstance(event, StepFinished):
        is_end = event.step in {1, n_steps}
        if not is_end and event.step % max(1, n_steps // 20):
            return None
    return f"{timed.t:9.2f} s  {event_words(event)}"


class LossSketch:
    """Keeps the losses of a run as a few averages; neighbours are merged as the run grows.

    It never holds more than `2 * n_most` averages, however many steps there are.
    """

    def __init__(self, n_most: int) -> None:
        self._n_most = n_most
        self._means: list[float] = []
        self._pending: list[float] = []
        self._per_mean = 1

    def add(self, loss: float) -> None:
        """Add the loss of one more step; a loss that is not finite is left out."""
        if not math.isfinite(loss):
            return
        self._pending.append(loss)
        if len(self._pending) < self._per_mean:
            return
        self._means.append(statistics.fmean(self._pending))
        self._pending.clear()
        if len(self._means) == 2 * self._n_most:
            pairs = zip(self._means[::2], self._means[1::2], strict=True)
            self._means = [(one + other) / 2 for one, other in pairs]
            self._per_mean *= 2

    def sparkline(self) -> str:
        """Return the losses as a row of bars, highest loss highest."""
        n_each = math.ceil(len(self._means) / self._n_most) or 1
        means = [
            statistics.fmean(self._means[at : at + n_each])
            for at in range(0, len(self._means), n_each)
        ]
        low, high = min(means, default=0.0), max(means, default=0.0)
        scale = (len(_SPARKS) - 1) / (high - low) if high > low else 0.0
        return "".join(_SPARKS[round((loss - low) * scale)] for loss in means)


class TrainingDisplay:
    """A live picture of a run: mesh map, step, loss, samples/s, recoveries, the last events.

    A context manager. It redraws after an event, at most ten times a second. It starts no
    thread, so that workers may be forked while it is shown.
    """

    def __init__(self, mesh: Mesh, n_steps: int, *, console: Console | None = None) -> None:
        self._n_steps = n_steps
        self._console = console or Console(stderr=True)
        self._live = Live(
            console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False
        )
        self._drawn = -math.inf
        self._mesh = mesh
        self._view = JobView(mesh.shape, mesh.failed)
        self._losses = LossSketch(_N_SPARKS)
        self._rate = MovingRate(_WINDOW_S)
        self._t, self._loss, self._samples_per_s = 0.0, math.nan, math.nan
        self._events: deque[TimedEvent] = deque(maxlen=_N_EVENTS)

    def __enter__(self) -> "TrainingDisplay":
        self._live.start()
        self.refresh()
        return self

    def __exit__(self, *_: object) -> None:
        self.refresh()
        self._live.stop()

    def feed(self, timed: TimedEvent) -> None:
        """Follow one event of the run, and redraw if the last picture is old enough."""
        self._t, event = timed.t, timed.event
        self._view.take(self._t, event)
        match event:
            case StepFinished():
                self._loss = math.nan if event.loss is None else event.loss
                self._losses.add(self._loss)
                self._samples_per_s = self._rate.add(self._t, event.samples)
            case GenerationBegan():
                self._rate.begin(self._t)
        if not isinstance(event, StepFinished):
            self._events.append(timed)
        if time.monotonic() - self._drawn >= _REFRESH_S or isinstance(event, RunEnded):
            self.refresh()

    def refresh(self) -> None:
        """Draw the picture now."""
        if self._live.is_started:
            self._live.update(self.picture(), refresh=True)
            self._drawn = time.monotonic()

    def picture(self) -> RenderableType:
        """Return what is shown now."""
        room = self._console.width - _FACTS_WIDTH - 10
        height = self._console.height - _N_EVENTS - 5
        table = Table.grid(padding=(0, 4, 0, 0))
        facts = self._facts()
        if room >= 24:
            table.add_row(mesh_map(self._view.chips, room, height), facts)
        else:  # a narrow terminal: the map above the facts
            table.add_row(mesh_map(self._view.chips, self._console.width - 6, height - 9))
            table.add_row("")
            table.add_row(facts)
        title = f"meshmend train, mesh {self._mesh}"
        return Panel(Group(table, "", self._last_events()), title=title, padding=(1, 2))

    def _facts(self) -> Table:
        facts = Table.grid(padding=(0, 2, 0, 0))
        facts.add_column(style="dim", no_wrap=True)
        facts.add_column(no_wrap=True)
        bar = ProgressBar(
            total=self._n_steps or 1,
            completed=self._view.step,
            width=_N_SPARKS,
            complete_style="green",
            finished_style="green",
        )
        facts.add_row("step", f"{self._view.step} of {self._n_steps}, {seconds(self._t)}")
        facts.add_row("", bar)
        facts.add_row("loss", "-" if math.isnan(self._loss) else f"{self._loss:.4g}")
        facts.add_row("", Text(self._losses.sparkline(), style="blue"))
        rate = self._samples_per_s
        facts.add_row("samples/s", rate_words(rate))
        alive, n_chips = self._view.chips.count(ChipState.ALIVE), self._mesh.n_chips
        generation = self._view.generation.number if self._view.generation else 0
        facts.add_row("chips", f"{alive} of {n_chips}, generation {generation}")
        n_faults = sum(fault.kind is not FaultKind.REPAIR for fault in self._view.faults)
        facts.add_row("faults", str(n_faults))
        facts.add_row("recovery", self._recovery())
        if not self._view.has_coordinator:
            facts.add_row("coordinator", Text("lost; training goes on", style="magenta"))
        return facts

    def _recovery(self) -> str:
        recoveries_s = self._view.recoveries_s
        if not recoveries_s:
            return "-"
        last, median = recoveries_s[-1], statistics.median(recoveries_s)
        return f"last {seconds(last)}, median {seconds(median)}"

    def _last_events(self) -> Text:
        lines = [
            Text(
                f"{timed.t:8.2f} s  {event_words(timed.event)}",
                style=_colour(timed.event),
                no_wrap=True,
            )
            for timed in self._events
        ]
        # The panel keeps its height before the first events.
        lines += [Text("")] * (_N_EVENTS - len(lines))
        text = Text("\n").join(lines)
        text.overflow, text.no_wrap = "ellipsis", True
        return text


def _colour(event: Event) -> str:
    """Return the colour of an event's line; a repair is good news."""
    if isinstance(event, FaultHappened) and event.kind is FaultKind.REPAIR:
        return _COLOURS[FaultRecovered]
    return _COLOURS.get(type(event), "")

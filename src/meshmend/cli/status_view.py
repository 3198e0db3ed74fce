"""Draws the status of a job: on a terminal in colours, elsewhere as plain lines."""

import itertools

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshmend.cli.mesh_map import mesh_map
from meshmend.membership.job_status import (
    BEHIND_S,
    ChipsWait,
    JobPhase,
    JobStatus,
    SharedArguments,
)
from meshmend.membership.job_view import ChipState, ChipStates
from meshmend.pages.report.event_words import (
    change_words,
    chips_words,
    event_words,
    fabric_words,
    rate_words,
    seconds,
)
from meshmend.topology.failures import format_shape
from meshmend.units import counted

_N_EVENTS = 8
_PLAIN_WIDTH = 110
_TALLEST_MAP = 200  # rows, where nothing scrolls away


def print_status(status: JobStatus) -> None:
    """Print the status on standard output."""
    console = _console()
    console.print(picture(status, console.width, _TALLEST_MAP), highlight=False)


class StatusDisplay:
    """Shows one status after another: in place on a terminal, else one below the other."""

    def __init__(self, *, is_live: bool) -> None:
        from rich.live import Live  # which a single status does not need

        self._console = _console()
        self._live = Live(console=self._console, auto_refresh=False) if is_live else None
        self._last: RenderableType = ""

    def __enter__(self) -> "StatusDisplay":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()

    def show(self, status: JobStatus) -> None:
        """Draw a status."""
        height = self._console.height // 2 if self._live else _TALLEST_MAP
        self._last = picture(status, self._console.width, height)
        self._draw(self._last)

    def show_silence(self, silent_s: float, why: str) -> None:
        """Draw, below the last status, that nobody answers."""
        line = Text(f"no answer for {seconds(silent_s)}: {why}", style="red")
        self._draw(Group(self._last, line) if self._live else line)

    def _draw(self, what: RenderableType) -> None:
        if self._live is not None:
            self._live.update(what, refresh=True)
        else:
            self._console.print(what, highlight=False)


def picture(status: JobStatus, width: int, height: int) -> RenderableType:
    """Return what is shown of a status, with a map of at most `height` rows."""
    parts: list[RenderableType] = [_title(status), "", mesh_map(states_of(status), width, height)]
    parts += ["", _facts(status)]
    if status.waits:
        parts += ["", Text("waiting", style="bold"), *map(_wait_line, status.waits)]
    if lines := _past_lines(status):
        parts += ["", Text("last changes", style="bold"), *lines]
    return Group(*parts)


def states_of(status: JobStatus) -> ChipStates:
    """Return the state of every chip, as the map shows it.

    A chip without a connected worker is dead, or joining if the job has not begun. Where a worker
    answers, members of its generation
    that were not heard count as alive, unless another worker has lost them.
    """
    states = ChipStates(status.shape)
    everywhere = set(itertools.product(*map(range, status.shape)))
    members, heard = set(status.members), {each.chip: each for each in status.workers}
    is_from_worker = status.answered_by is not None
    lost = {chip for wait in status.waits for chip in wait.awaited}
    present = (members - lost) | set(heard) if is_from_worker else set(heard)
    if status.phase is not JobPhase.GATHERING:
        states.set(everywhere - present, ChipState.DEAD)
    states.set(status.waiting, ChipState.WAITING)
    number = status.generation.number if status.generation else None
    trains = status.phase not in (JobPhase.GATHERING, JobPhase.PREPARING)
    for chip in members & present:
        worker = heard.get(chip)
        is_current = worker is None or worker.generation == number
        states.set([chip], ChipState.ALIVE if is_current and trains else ChipState.JOINING)
        if worker is not None and (worker.behind_s or 0.0) >= BEHIND_S:
            states.set([chip], ChipState.HUNG)
    return states


def _console() -> Console:
    console = Console(soft_wrap=False)
    return console if console.is_terminal else Console(width=_PLAIN_WIDTH)


def _title(status: JobStatus) -> Text:
    answered = "the coordinator"
    if status.answered_by is not None:
        n_others = len(status.workers) - 1
        others = f" and {counted(n_others, 'other worker')}" if n_others else ""
        answered = f"the worker of chip {status.answered_by}{others}"
    shape = format_shape(status.shape)
    title = Text(f"job {status.job!r} on mesh {shape}: ", style="bold")
    title.append(status.phase.value, style=_colour(status.phase))
    title.append(f"   answered by {answered}, up {seconds(status.uptime_s)}", style="dim")
    return title


def _colour(phase: JobPhase) -> str:
    match phase:
        case JobPhase.TRAINING | JobPhase.OVER:
            return "bold green"
        case JobPhase.FAILED | JobPhase.STATE_LOST:
            return "bold red"
        case JobPhase.GATHERING | JobPhase.PREPARING:
            return "bold yellow"


def _facts(status: JobStatus) -> Table:
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column()
    if status.failure:
        facts.add_row("failure", Text(status.failure, style="red"))
    of = f" of {status.n_steps}" if status.n_steps is not None else ""
    ago = "" if status.step_ago_s is None else f", {seconds(status.step_ago_s)} ago"
    facts.add_row("step", f"{status.step}{of}{ago}")
    if status.steps_per_s is not None:
        samples = status.samples_per_s
        more = "" if samples is None else f", {rate_words(samples)} samples/s"
        facts.add_row("rate", f"{rate_words(status.steps_per_s)} steps/s{more}")
    generation = status.generation
    if generation is not None:
        cut = f", without {', '.join(sorted(map(str, generation.cut)))}" if generation.cut else ""
        n_chips = counted(len(generation.chips), "chip")
        facts.add_row("generation", f"{generation.number} with {n_chips}{cut}")
    if status.planned is not None:
        n_planned, n_losses = status.planned
        facts.add_row("plans ahead", f"for the loss of {n_planned} of {counted(n_losses, 'board')}")
    given = {group.fingerprint.fabric or "reference" for group in status.arguments}
    if status.fabric or given - {"reference"}:
        planned = f"plans for {', '.join(sorted(given)) or 'one that nobody has told'}"
        measured = f"; measured: {fabric_words(status.fabric)}" if status.fabric else ""
        facts.add_row("fabric", planned + measured)
    if status.slow:
        slow = ", ".join(f"{each.what} at {each.speed:g}" for each in status.slow)
        facts.add_row("slow", Text(f"{slow} of the others' speed", style="yellow"))
    if status.coordinator_lost_s is not None:
        lost = f"none answers the workers for {seconds(status.coordinator_lost_s)}"
        facts.add_row("coordinator", Text(lost, style="magenta"))
    for group in status.arguments:
        facts.add_row("arguments", _argument_words(group, is_only=len(status.arguments) == 1))
    return facts


def _argument_words(group: SharedArguments, *, is_only: bool) -> str:
    its = group.fingerprint
    whose = "" if is_only else f"{chips_words(group.chips)}: "
    return (
        f"{whose}meshmend {its.version}, {counted(its.steps, 'step')} of "
        f"{counted(its.batch, 'sample')}, seed {its.seed}, policy {its.policy}, {its.optimizer}, "
        f"{its.model}, data set of {its.dataset_length} (samples {its.samples})"
    )


def _wait_line(wait: ChipsWait) -> Text:
    who = chips_words(wait.chips) if wait.chips else "the job"
    whom = f" for {chips_words(wait.awaited)}" if wait.awaited else ""
    since = "" if wait.since_s is None else f", {seconds(wait.since_s)} so far"
    plural = "s" if not wait.chips or len(wait.chips) == 1 else ""
    return Text(f"  {who} wait{plural}{whom}{since}: {wait.why}")


def _past_lines(status: JobStatus) -> list[RenderableType]:
    """Return the last faults and recoveries as lines, the oldest first."""
    past = [(each.ago_s, event_words(each.event)) for each in status.events]
    past += [(each.ago_s, change_words(each.change)) for each in status.changes]
    newest = sorted(past, key=lambda pair: -pair[0])[-_N_EVENTS:]
    return [Text(f"  {seconds(ago_s):>11} ago  {words}") for ago_s, words in newest]

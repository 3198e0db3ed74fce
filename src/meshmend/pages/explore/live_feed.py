"""Follows a running job for the page: events as they happen, steps every two seconds, the status.

It is an observer of the coordinator, as the launcher is, and asks for the status as `meshmend
status` does, while a page is open. Training needs neither. Steps may come by the hundred a second.
Each message would wake this process, and each line the browser, on cores that may be the job's: so
messages are read a few times a second, steps are told together, and the status is asked for when
events or a lack of steps say that it changed.
"""

import asyncio
import json
import math
import select
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from meshmend.errors import (
    ChannelError,
    InputError,
    MeshmendError,
    MessageError,
    TransportError,
)
from meshmend.membership.events import (
    CoordinatorChanged,
    CoordinatorState,
    Event,
    JobFailed,
    JobFinished,
    WorkerStepped,
)
from meshmend.membership.job_status import BEHIND_S, JobPhase, JobStatus
from meshmend.membership.messages import (
    COORDINATOR,
    OBSERVER,
    Observe,
    Observed,
    received_messages,
    send_message,
)
from meshmend.membership.status_client import StatusQuestion, ask_job
from meshmend.pages.report.event_words import event_words
from meshmend.transport.channel import Channel
from meshmend.transport.codec import plain
from meshmend.transport.handshake import ConnectRequest, Deadline, dial

_STEPS_EVERY_S: Final = 2.0
_STATUS_EVERY_S: Final = 6.0  # while steps come: without any, somebody waits, and it is asked for
_AT_LEAST_S: Final = 0.1  # between two questions after events that change who trains
_RETRY_S: Final = 0.25
_READ_EVERY_S: Final = 0.1  # an event is on the page within 0.3 s
_READ_UNWATCHED_S: Final = 1.0  # while no page is open
_CONNECT_S: Final = 1.0
_MOST_KEPT: Final = 400  # events that a page is told when it opens
_MOST_STEPS: Final = 2000  # of the loss curve

StepLoss = tuple[int, float | None]  # a step and its loss, if that is a number
Inject = Callable[[str], None]  # takes a fault in the words of --inject


@dataclass(eq=False)
class LiveFeed:
    """One job and the pages that watch it; `inject_words` passes faults on, where allowed."""

    question: StatusQuestion
    inject_words: Inject | None = None
    _kept: deque[bytes] = field(default_factory=lambda: deque(maxlen=_MOST_KEPT))
    _past_steps: deque[StepLoss] = field(default_factory=lambda: deque(maxlen=_MOST_STEPS))
    _new_steps: deque[StepLoss] = field(default_factory=lambda: deque(maxlen=_MOST_STEPS))
    _status: bytes = b""
    _pages: set["asyncio.Queue[bytes]"] = field(default_factory=set)
    _changed: threading.Event = field(default_factory=threading.Event)
    _is_watched: threading.Event = field(default_factory=threading.Event)
    _end: str = ""  # how the job has ended; its coordinator may be gone before it is asked
    _has_lost: bool = False  # the coordinator; its workers may still train

    def begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """Follow the job in threads that end with the process; news go to the loop."""
        self._loop = loop
        for follow in (self._follow_status, self._follow_events):
            threading.Thread(target=follow, daemon=True).start()

    async def news(self) -> AsyncIterator[bytes]:
        """Yield what a page needs to know, as lines of JSON: the past, then what happens."""
        page: asyncio.Queue[bytes] = asyncio.Queue()
        self._pages.add(page)
        self._is_watched.set()
        try:
            for line in (*self._kept, _line(_steps_document(list(self._past_steps)))):
                yield line
            if self._status:
                yield self._status
            while True:
                lines = [await page.get()]
                while not page.empty():
                    lines.append(page.get_nowait())
                yield b"".join(lines)
        finally:
            self._pages.discard(page)
            if not self._pages:
                self._is_watched.clear()

    def inject(self, document: Mapping[str, Any]) -> None:
        """Pass on a fault that a page asks for.

        Raises:
            InputError: the job takes no faults from the page, or the fault has no words.
        """
        words = document.get("fault")
        if self.inject_words is None:
            raise InputError(
                "this page may not inject faults; start the job with --explore --allow-faults"
            )
        if not isinstance(words, str) or "\n" in words:
            raise InputError(f"a fault needs one line of words, but got {words!r}")
        self.inject_words(words)

    def _tell(self, *documents: dict[str, Any]) -> None:
        self._loop.call_soon_threadsafe(self._spread, documents)

    def _spread(self, documents: tuple[dict[str, Any], ...]) -> None:
        lines = [_line(document) for document in documents]
        for document, line in zip(documents, lines, strict=True):
            match document["kind"]:
                case "event":
                    self._kept.append(line)
                case "steps":
                    self._past_steps.extend(document["steps"])
                case _:
                    self._status = line
        for page in self._pages:
            page.put_nowait(b"".join(lines))

    def _follow_status(self) -> None:
        """Tell steps, and the status where events or a lack of steps say that it changed."""
        question, due = self.question, 0.0
        while True:
            began = time.monotonic()
            if self._new_steps and began < due and not self._changed.is_set():
                self._tell(self._steps_since())
            else:
                due = began + _STATUS_EVERY_S
                self._changed.clear()
                try:
                    status = ask_job(question)
                except MeshmendError as error:
                    why = self._end or str(error)
                    kind = "ended" if self._end else "silence"
                    self._tell(self._steps_since(), {"kind": kind, "why": why})
                    if self._end:
                        return
                    due = began
                else:
                    self._tell(self._steps_since(), status_document(status))
                    if status.phase in (JobPhase.OVER, JobPhase.FAILED):
                        return
                    addresses = tuple(each.address for each in status.workers if each.address[1])
                    question = replace(question, workers=addresses or question.workers)
            time.sleep(max(0.0, began + _AT_LEAST_S - time.monotonic()))
            self._changed.wait(max(0.0, began + _STEPS_EVERY_S - time.monotonic()))
            self._is_watched.wait()

    def _steps_since(self) -> dict[str, Any]:
        """Return the steps that no page was told of yet."""
        return _steps_document([self._new_steps.popleft() for _ in range(len(self._new_steps))])

    def _follow_events(self) -> None:
        job = self.question.job
        while True:
            try:
                if job is None:
                    job = ask_job(self.question).job
                self._observe(job)
            except (MeshmendError, ChannelError):
                pass  # the coordinator is away: the status says so
            time.sleep(_RETRY_S)

    def _observe(self, job: str) -> None:
        """Tell the events of a job until the connection to its coordinator ends."""
        assert self.question.coordinator is not None, "a page follows a coordinator"
        try:
            connection = dial(
                self.question.coordinator,
                self.question.secret,
                ConnectRequest(OBSERVER, COORDINATOR),
                Deadline(time.monotonic() + _CONNECT_S),
            )
        except TransportError:
            return
        channel = Channel(connection)
        try:
            send_message(channel, Observe(job))
            if self._has_lost:
                self._has_lost = False
                back = CoordinatorChanged(CoordinatorState.BACK)
                self._tell_event(back, "the coordinator answers again")
            poll = select.poll()
            poll.register(channel.fileno(), select.POLLIN)
            while True:
                poll.poll()
                while poll.poll(0):
                    for message in received_messages(channel):
                        if isinstance(message, Observed):
                            self._take(message.event)
                time.sleep(_READ_EVERY_S)
                self._is_watched.wait(_READ_UNWATCHED_S - _READ_EVERY_S)
        except (ChannelError, MessageError):
            return
        finally:
            channel.close()
            if not self._end:
                self._has_lost = True
                lost = CoordinatorChanged(CoordinatorState.LOST)
                self._tell_event(lost, "the coordinator does not answer any more")

    def _take(self, event: Event) -> None:
        if isinstance(event, WorkerStepped):
            if event.leads:  # one chip's word is enough
                is_number = event.loss is not None and math.isfinite(event.loss)
                self._new_steps.append((event.step, event.loss if is_number else None))
            return
        if isinstance(event, JobFinished | JobFailed):
            self._end = event_words(event)
        self._tell_event(event, event_words(event))

    def _tell_event(self, event: Event, words: str) -> None:
        """Tell an event now, and ask for the status: it has changed."""
        self._changed.set()
        encoded = plain(event)
        self._tell({"kind": "event", "at": time.time(), "words": words, "event": encoded})


def _line(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"


def _steps_document(steps: list[StepLoss]) -> dict[str, Any]:
    return {"kind": "steps", "steps": steps}


def status_document(status: JobStatus) -> dict[str, Any]:
    """Return what the page shows of a status, as a JSON value; addresses stay here."""
    generation = status.generation
    return {
        "kind": "status",
        "job": status.job,
        "shape": list(status.shape),
        "phase": str(status.phase),
        "step": status.step,
        "steps": status.n_steps,
        "steps_per_s": status.steps_per_s,
        "samples_per_s": status.samples_per_s,
        "generation": generation.number if generation else None,
        "members": [list(chip) for chip in status.members],
        "waiting": [list(chip) for chip in status.waiting],
        "cut": sorted(str(link) for link in generation.cut) if generation else [],
        "behind": [
            list(each.chip) for each in status.workers if (each.behind_s or 0.0) >= BEHIND_S
        ],
        "waits": [
            {
                "chips": [list(chip) for chip in wait.chips],
                "awaited": [list(chip) for chip in wait.awaited],
                "why": wait.why,
                "since_s": wait.since_s,
            }
            for wait in status.waits
        ],
        "changes": [
            {
                "ago_s": past.ago_s,
                "cause": str(past.change.cause),
                "took_s": past.change.took_s,
                "chips": past.change.chips,
            }
            for past in status.changes
        ],
        "answered_by": None if status.answered_by is None else list(status.answered_by),
        "failure": status.failure,
    }

"""The coordinator: hears of workers that come, go and complain, and says who trains together.

Its state is soft. Workers step without it; killed and started again it learns the job from them.
It is on no step's path: a worker is heard when it has something to say. Observers, such as the
launcher's display, get every event; so a job can be watched, and what watches it can be killed.
"""

import os
import queue
import selectors
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any, Final

from meshmend.errors import ChannelError
from meshmend.membership.generation import generation_from
from meshmend.membership.membership import Decision, Membership, Status, Timing
from meshmend.membership.stragglers import Stragglers
from meshmend.net.channel import Channel, Message
from meshmend.net.event_fd import clear
from meshmend.net.handshake import ConnectRequest
from meshmend.net.listener import Listener
from meshmend.topology.failures import Chip, Link, parse_failure
from meshmend.topology.mesh import Mesh

_log = getLogger(__name__)

COORDINATOR: Final = 0xFFFFFFFF  # the rank under which it is called
OBSERVER: Final = 0xFFFFFFFE
_FAREWELL_S: Final = 1.0


@dataclass(frozen=True)
class JobSpec:
    """What a coordinator is in spec of: a job on a mesh."""

    job: str
    mesh: Mesh
    board: tuple[int, ...]
    timing: Timing = field(default_factory=Timing)


@dataclass
class _Line:
    """A connection: of a worker once it has said which, of an observer, or of neither yet."""

    channel: Channel
    name: str
    heard: float
    chip: Chip | None = None
    is_observer: bool = False


class Coordinator:
    """Serves one job until all its workers have finished; `on_event` gets what observers get."""

    def __init__(
        self,
        listener: socket.socket,
        secret: bytes,
        spec: JobSpec,
        *,
        on_event: Callable[[Message], None] = lambda message: None,
    ) -> None:
        self._spec = spec
        self._on_event = on_event
        self._membership = Membership(spec.mesh, spec.timing, board=spec.board)
        self._lines: dict[int, _Line] = {}
        self._line_of: dict[Chip, _Line] = {}
        self._reasons: dict[Chip, str] = {}
        self._stragglers = Stragglers(spec.timing.straggler_timeout_s)
        self._callers: queue.SimpleQueue[tuple[socket.socket, ConnectRequest]] = queue.SimpleQueue()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._wake_fd, selectors.EVENT_READ)
        self._listener = Listener(
            listener, secret, COORDINATOR, name="the coordinator", admit=self._admit
        )

    def serve(self) -> None:
        """Return when all workers have finished and gone."""
        heartbeat_interval_s = self._spec.timing.heartbeat_timeout_s / 8
        looked = time.monotonic()
        while not (self._membership.is_over and not self._line_of):
            self._handle(self._patience(heartbeat_interval_s))
            now = time.monotonic()
            if now - looked > self._spec.timing.heartbeat_timeout_s / 2:
                # This process itself was held up: what it missed is not the workers' fault.
                for line in self._lines.values():
                    line.heard = now
                self._stragglers.excuse()
            looked = now
            self._drop_silent(now)
            self._drop_stuck(now)
            while (decision := self._membership.decide(now)) != Decision():
                self._carry_out(decision)

    def close(self) -> None:
        """Stop listening and hang up on everyone."""
        self._listener.close()
        for line in list(self._lines.values()):
            line.channel.close()
        self._selector.close()
        os.close(self._wake_fd)

    def _patience(self, heartbeat_interval_s: float) -> float:
        settled_at = self._membership.settled_at()
        if settled_at is None:
            return heartbeat_interval_s
        return min(heartbeat_interval_s, max(0.0, settled_at - time.monotonic()))

    def _admit(self, connection: socket.socket, request: ConnectRequest) -> None:
        self._callers.put((connection, request))
        os.eventfd_write(self._wake_fd, 1)

    def _handle(self, timeout_s: float) -> None:
        for key, events in self._selector.select(timeout_s):
            if key.fd == self._wake_fd:
                clear(self._wake_fd)
                continue
            line: _Line = key.data
            try:
                if events & selectors.EVENT_WRITE:
                    line.channel.flush()
                    self._watch(line)
                if events & selectors.EVENT_READ:
                    for message in line.channel.receive():
                        line.heard = time.monotonic()
                        self._take(line, message)
            except ChannelError as error:
                self._lose(line, str(error))
            except Exception as error:  # whatever one end sends, the others are served
                self._refuse(line, f"a message that makes no sense ({error!r})")
        # After the lines: a worker that died is gone before the one that takes its place is heard.
        while not self._callers.empty():
            self._open(*self._callers.get())

    def _open(self, connection: socket.socket, request: ConnectRequest) -> None:
        try:
            host, port = connection.getpeername()[:2]
        except OSError:  # it has gone already
            connection.close()
            return
        line = _Line(Channel(connection), f"{host}:{port}", time.monotonic())
        self._lines[line.channel.fileno()] = line
        self._selector.register(line.channel, selectors.EVENT_READ, line)

    def _watch(self, line: _Line) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if line.channel.is_full else 0)
        if line.channel.fileno() in self._lines:
            self._selector.modify(line.channel, events, line)

    def _send(self, line: _Line, message: Message) -> None:
        try:
            line.channel.send(message)
            self._watch(line)
        except ChannelError as error:
            self._lose(line, str(error))

    def _tell_observers(self, event: str, **facts: Any) -> None:
        message = {"kind": "event", "event": event, "clock": time.monotonic(), **facts}
        self._on_event(message)
        for line in list(self._lines.values()):
            if line.is_observer:
                self._send(line, message)

    def _take(self, line: _Line, message: Message) -> None:
        """Do what one message asks for."""
        kind = message["kind"]
        if kind == "observe":
            self._check_job(line, message)
            line.is_observer = True
        elif kind == "hello":
            self._greet(line, message)
        elif line.is_observer and kind in ("cut", "mend"):
            self._change_link(kind, message)
        elif line.is_observer and kind == "absent":
            self._membership.forgo(tuple(message["chip"]))
        elif line.is_observer and kind == "finish":
            self._membership.is_over = True
            self._end()
        elif line.chip is not None and kind == "status":
            status = status_from(message)
            self._membership.tell(line.chip, status, time.monotonic())
            self._repeat(line, status)
        elif line.chip is not None and kind == "done":
            self._tell_observers("done", **{"chip": line.chip, **message["facts"]})
        elif line.chip is not None and kind == "beat":
            generation, step = message["turn"]
            self._stragglers.note(line.chip, (int(generation), int(step)))
        elif kind != "beat":
            self._refuse(line, f"an unexpected message {kind!r}")

    def _check_job(self, line: _Line, message: Message) -> bool:
        if message["job"] == self._spec.job:
            return True
        self._refuse(line, f"it belongs to job {message['job']!r}, this is {self._spec.job!r}")
        return False

    def _greet(self, line: _Line, message: Message) -> None:
        """Take in a worker that says who it is."""
        chip = tuple(message["chip"])
        if not self._check_job(line, message):
            return
        if tuple(message["shape"]) != self._spec.mesh.shape or chip not in self._spec.mesh:
            self._refuse(line, f"chip {chip} of mesh {message['shape']} is not of this mesh")
            return
        if chip in self._line_of:
            # Either one of two is wrong, or the old one is about to be found dead: come back later.
            self._refuse(line, f"chip {chip} is taken by another worker", kind="later")
            return
        memory = generation_from(message["memory"]) if message["memory"] else None
        host, port = message["address"]
        why = self._membership.arrive(
            chip,
            (host, int(port)),
            status=status_from(message),
            memory=memory,
            now=time.monotonic(),
        )
        if why:
            self._turn_away(line, chip, why)
            return
        line.chip = chip
        self._line_of[chip] = line
        self._tell_observers("arrived", chip=chip)
        self._send(
            line, {"kind": "welcome", "heartbeat_timeout_s": self._spec.timing.heartbeat_timeout_s}
        )
        if self._membership.is_over:
            self._send(line, {"kind": "over"})
            return
        self._tell_waiting(announce=False)

    def _repeat(self, line: _Line, status: Status) -> None:
        """Give the word to begin to a member that missed it."""
        go, generation = self._membership.go, self._membership.generation
        if go is None or generation is None or line.chip not in generation.chips:
            return
        if status.ready and status.generation == go.generation != status.state_version:
            self._send(line, _go_message(go.generation, go.step, go.holders))

    def _change_link(self, kind: str, message: Message) -> None:
        link = parse_failure(message["link"])
        if not isinstance(link, Link):
            return
        if kind == "mend":
            self._membership.mend(link, time.monotonic())
            return
        for one, other in ((link.first, link.second), (link.second, link.first)):
            if one in self._line_of:
                self._send(self._line_of[one], {"kind": "sever", "chip": other})

    def _drop_silent(self, now: float) -> None:
        limit_s = self._spec.timing.heartbeat_timeout_s
        for line in list(self._lines.values()):
            if line.is_observer or now - line.heard <= limit_s:
                continue
            if line.chip is None:
                self._refuse(line, "it does not say who it is")
            else:
                self._turn_away(line, line.chip, f"it was silent for {now - line.heard:.1f} s")

    def _drop_stuck(self, now: float) -> None:
        generation = self._membership.generation
        if generation is None or self._membership.is_over:
            return
        for chip, behind_s in self._stragglers.stuck(generation.chips, now):
            if chip in self._line_of:
                why = f"its loop kept the others waiting for {behind_s:.1f} s"
                self._turn_away(self._line_of[chip], chip, why)

    def _turn_away(self, line: _Line, chip: Chip, why: str) -> None:
        """Part with a worker that counts as dead; it may come back as a new one."""
        _log.warning("chip %s was turned away: %s", chip, why)
        self._tell_observers("turned away", chip=chip, why=why)
        self._send(line, {"kind": "turned away", "why": why})
        self._lose(line, f"chip {chip} was turned away: {why}")

    def _refuse(self, line: _Line, why: str, *, kind: str = "refused") -> None:
        _log.warning("refused %s: %s", line.name, why)
        self._tell_observers("refused", who=line.name, why=why)
        self._send(line, {"kind": kind, "why": why})
        self._lose(line, f"{line.name} was refused: {why}")

    def _lose(self, line: _Line, why: str) -> None:
        """Forget a connection, and the worker behind it."""
        fd = line.channel.fileno()
        if self._lines.pop(fd, None) is None:
            return
        self._selector.unregister(line.channel)
        line.channel.close()
        if line.chip is not None and self._line_of.get(line.chip) is line:
            del self._line_of[line.chip]
            self._stragglers.forget(line.chip)
            reason = why if str(line.chip) in why else f"chip {line.chip} is gone"
            self._membership.leave(line.chip, reason, time.monotonic())
            if not self._membership.is_over:
                self._tell_observers("left", chip=line.chip, why=reason)

    def _carry_out(self, decision: Decision) -> None:
        """Say to everyone concerned what was decided."""
        if decision.generation is not None:
            message = {"kind": "generation", "generation": decision.generation.as_json()}
            for chip in decision.generation.chips:
                if chip in self._line_of:
                    self._send(self._line_of[chip], message)
            self._tell_observers(
                "forming",
                number=decision.generation.number,
                chips=decision.generation.chips,
                why=decision.why,
            )
            self._tell_waiting(announce=True)
        elif decision.go is not None:
            self._begin(decision)
        elif decision.is_over:
            self._end()

    def _end(self) -> None:
        """Send everyone home."""
        for line in list(self._line_of.values()):
            self._send(line, {"kind": "over"})

    def _begin(self, decision: Decision) -> None:
        go, generation = decision.go, self._membership.generation
        assert go is not None
        assert generation is not None
        for chip in generation.chips:
            if chip in self._line_of:
                self._send(self._line_of[chip], _go_message(go.generation, go.step, go.holders))
        self._tell_observers(
            "generation",
            number=generation.number,
            chips=generation.chips,
            waiting=self._membership.waiting(),
            cut=sorted(map(str, generation.cut)),
            step=go.step,
        )

    def _tell_waiting(self, *, announce: bool) -> None:
        """Say to those who wait why they do, once for each reason; observers hear it if asked."""
        waiting = self._membership.waiting()
        reasons = {chip: self._membership.reason_to_wait(chip) for chip in waiting}
        for chip, why in reasons.items():
            if chip in self._line_of and self._reasons.get(chip) != why:
                self._send(self._line_of[chip], {"kind": "wait", "why": why})
        if announce:
            for why in dict.fromkeys(reasons.values()):
                chips = [chip for chip in waiting if reasons[chip] == why]
                self._tell_observers("waiting", chips=chips, why=why)
        self._reasons = reasons


def status_from(message: Mapping[str, Any]) -> Status:
    """Return what a worker says of itself in a message."""
    return Status(
        generation=int(message["generation"]),
        ready=bool(message["ready"]),
        state_version=int(message["state_version"]),
        step=int(message["step"]),
        finished=bool(message["finished"]),
        lost=tuple(tuple(chip) for chip in message["lost"]),
    )


def _go_message(generation: int, step: int, holders: tuple[Chip, ...]) -> Message:
    return {"kind": "go", "generation": generation, "step": step, "holders": holders}

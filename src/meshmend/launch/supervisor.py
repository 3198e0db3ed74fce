"""Keeps the processes of a job running: a coordinator, and a step for each host.

A **step** is a process of the scheduler, such as srun, that runs a `meshmend agent` on a node. What
a scheduler says about a step cannot be relied on: srun of Slurm 22.05 goes on long after its
node has died. So the agent prints a line every second, and one with its exit code when it ends.
A step that prints no such line for some seconds counts as dead.

Sees processes, their lines and their exit codes only. Who trains together is for the coordinator
to decide.
"""

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from meshmend.launch.agent_lines import AgentLine, read_agent_line
from meshmend.launch.hang_check import HangCheck
from meshmend.launch.output_lines import say
from meshmend.transport.pacing import Backoff

_POLL_S: Final = 0.1
_FIRST_RESTART_S: Final = 0.2
_LONGEST_RESTART_S: Final = 3.0  # also how late a step may be when its node is back
_RAN_LONG_S: Final = 30.0  # a process that has run for so long was all right
_SILENT_S: Final = 5.0  # without a line of its agent a step counts as dead
_MOST_FAILURES: Final = 5  # of every step, in a row; an agent that gives up has tried as often
_GAVE_UP_S: Final = 60.0  # until a step whose agent gave up is started again
_LAST_STEPS_S: Final = 20.0  # for the steps to end by themselves once the job is over
_TERMINATION_S: Final = 3.0  # from SIGTERM to SIGKILL
_READ_BYTES: Final = 1 << 16

_GAVE_UP: Final = 1  # the exit code of an agent that no restart helps
_OVER: Final = frozenset([0, 1, 2])  # exit codes of a coordinator that is not to be started again


@dataclass(frozen=True)
class StepCommand:
    """A command that runs an agent; it is dead if no line comes for `starts_within_s` at first."""

    command: Sequence[str]
    environment: Mapping[str, str]
    starts_within_s: float = 300.0


@dataclass(frozen=True)
class SupervisedJob:
    """The commands of a job, each asked for at every start.

    The command of a step may change: a node that was down for long is no longer part of the job's
    allocation. A coordinator that is started again has other options than the first.
    `is_answered()` says whether the coordinator answers; one that hangs is killed.
    `kill(name)` ends what is left of a step whose process was killed. `beat()` is called several
    times a second while the job runs, and then `on_over()`.
    """

    coordinator: Callable[[], Sequence[str]]
    steps: Mapping[str, Callable[[], StepCommand]]
    kill: Callable[[str], None] = lambda name: None
    is_answered: Callable[[], bool] = lambda: True
    beat: Callable[[], None] = lambda: None
    on_over: Callable[[], None] = lambda: None


def supervise(job: SupervisedJob) -> int:
    """Run a job until its coordinator ends; return the coordinator's exit code.

    What dies before that is started again. Gives up, with exit code 1, when every step has failed
    several times in a row, or its agent has given up. On an exception, such as SIGTERM, all
    processes are ended before it is passed on.
    """
    supervisor = _Supervisor(job)
    try:
        try:
            code = supervisor.until_over()
        finally:
            job.on_over()
        supervisor.await_steps()
        return code
    finally:
        supervisor.end_all()


class _Restarts:
    """When a process is started next, and how often in a row it ended soon."""

    def __init__(self, number: int) -> None:
        self._backoff = Backoff(number, first_s=_FIRST_RESTART_S, longest_s=_LONGEST_RESTART_S)
        self._started = 0.0
        self.next_at = 0.0
        self.n_failures = 0

    def note_start(self, now: float) -> None:
        self._started = now

    def note_end(self, now: float, *, gave_up: bool = False) -> None:
        if now - self._started > _RAN_LONG_S:
            self._backoff.reset()
            self.n_failures = 0
        self.n_failures += _MOST_FAILURES if gave_up else 1
        self.next_at = now + (_GAVE_UP_S if gave_up else self._backoff.wait_s())


class _Step:
    """One step: its process while it runs, and what its agent said last."""

    def __init__(self, name: str, number: int, command: Callable[[], StepCommand]) -> None:
        self.name = name
        self._command = command
        self.process: subprocess.Popen[bytes] | None = None
        self.restarts = _Restarts(number)
        self.exit_code: int | None = None  # of its agent
        self._silent_at = 0.0  # when it counts as dead, unless a line comes before
        self._rest = b""

    def start(self, now: float) -> int:
        """Start the process; return the file descriptor of its output."""
        what = self._command()
        self.restarts.note_start(now)
        self._silent_at, self._rest = now + what.starts_within_s, b""
        self.exit_code = None
        self.process = subprocess.Popen(
            what.command,
            env=dict(what.environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
        )
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def is_silent(self, now: float) -> bool:
        return self.process is not None and now > self._silent_at

    def read(self, now: float) -> bool:
        """Print what the step printed, but for its agent's own lines; return False at the end."""
        assert self.process is not None
        assert self.process.stdout is not None
        data = os.read(self.process.stdout.fileno(), _READ_BYTES)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            match read_agent_line(line):
                case AgentLine(exit_code=None):
                    self._silent_at = now + _SILENT_S
                case AgentLine(exit_code=code):
                    self.exit_code = code
                case None:
                    sys.stdout.write(f"{line.decode(errors='replace')}\n")
        sys.stdout.flush()
        return bool(data)


class _Supervisor:
    def __init__(self, job: SupervisedJob) -> None:
        self._job = job
        self._selector = selectors.DefaultSelector()
        self._coordinator: subprocess.Popen[bytes] | None = None
        self._coordinator_restarts = _Restarts(0)
        self._hang_check = HangCheck(job.is_answered, 0.0)
        self._is_ending = False
        self._steps = [
            _Step(name, number, command) for number, (name, command) in enumerate(job.steps.items())
        ]

    def until_over(self) -> int:
        """Start and restart processes until the coordinator ends; return its exit code."""
        while True:
            now = time.monotonic()
            self._job.beat()
            if (code := self._handle_coordinator(now)) is not None:
                return code
            self._handle_steps(now)
            if all(step.restarts.n_failures >= _MOST_FAILURES for step in self._steps):
                say("every step has failed again and again; the job ends")
                return 1

    def await_steps(self) -> None:
        """Wait a while for the steps to end by themselves, because the job is over."""
        deadline = time.monotonic() + _LAST_STEPS_S
        while self._running() and time.monotonic() < deadline:
            self._read_steps(time.monotonic())

    def end_all(self) -> None:
        """End all processes that run: by SIGTERM, then by SIGKILL."""
        before = signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one must not interrupt
        self._is_ending = True
        running = [step.process for step in self._running() if step.process is not None]
        running += [self._coordinator] if self._coordinator is not None else []
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in running:
                process.send_signal(number)
            deadline = time.monotonic() + _TERMINATION_S
            while time.monotonic() < deadline and any(each.poll() is None for each in running):
                self._read_steps(time.monotonic(), timeout_s=_POLL_S / 4)
        for step in self._running():
            assert step.process is not None
            if step.process.wait() == -signal.SIGKILL:
                self._job.kill(step.name)
            self._reap(step, time.monotonic())
        self._selector.close()
        signal.signal(signal.SIGTERM, before)

    def _running(self) -> list[_Step]:
        return [step for step in self._steps if step.process is not None]

    def _handle_coordinator(self, now: float) -> int | None:
        """Start the coordinator if it does not run; return its exit code if the job is over."""
        if self._coordinator is None:
            if now >= self._coordinator_restarts.next_at:
                self._coordinator_restarts.note_start(now)
                self._hang_check = HangCheck(self._job.is_answered, now)
                self._coordinator = subprocess.Popen(
                    self._job.coordinator(), stdin=subprocess.DEVNULL
                )
            return None
        code = self._coordinator.poll()
        if code is None:
            if self._hang_check.is_hanging(now):
                say("the coordinator does not answer, and is killed")
                self._coordinator.kill()  # it acts on no other signal if it is stopped
            return None
        self._coordinator = None
        if code in _OVER:
            return code
        self._coordinator_restarts.note_end(now)
        say(f"the coordinator ended: {_how(code)}; it is started again")
        return None

    def _handle_steps(self, now: float) -> None:
        # Lines are read first: this process itself may have been held up, not the agents.
        self._read_steps(now)
        for step in self._steps:
            if step.process is None:
                if step.exit_code != 0 and now >= step.restarts.next_at:
                    self._selector.register(step.start(now), selectors.EVENT_READ, step)
            elif step.is_silent(now):
                say(f"{step.name} is silent, and counts as dead")
                step.process.kill()
                self._reap(step, now)
                self._job.kill(step.name)

    def _read_steps(self, now: float, timeout_s: float = _POLL_S) -> None:
        """Read the output of the steps for a short time; reap those that have ended."""
        for key, _ in self._selector.select(timeout_s):
            step: _Step = key.data
            if not step.read(now):
                self._reap(step, now)

    def _reap(self, step: _Step, now: float) -> None:
        assert step.process is not None
        assert step.process.stdout is not None
        self._selector.unregister(step.process.stdout.fileno())
        step.process.stdout.close()
        code = step.process.wait()
        step.process = None
        if step.exit_code != 0 and not self._is_ending:
            step.restarts.note_end(now, gave_up=step.exit_code == _GAVE_UP)
            wait_s = max(0.0, step.restarts.next_at - now)
            say(f"{step.name} ended: {_how(code)}; it is started again in {wait_s:.1f} s")


def _how(code: int) -> str:
    return f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"

"""Runs the workers of one host, and starts those again that die.

The agent imports torch once and forks one worker per chip, so that a worker that died is back in a
fraction of a second. It knows neither the coordinator nor a scheduler. Which generation its chips
are in is for the coordinator to decide.

A worker ends in one of these ways:

- exit code 0: the job is over for its chip.
- `RefusedError`, `JobFailedError` or `InputError`: a new worker would end in the same way. The
  agent ends the others and returns 1.
- another exception: it is started again, but the agent gives up after `_MOST_FAILURES` in a row.
- a signal: it is started again, always.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from meshmend.errors import InputError, JobFailedError, RefusedError, TerminatedError
from meshmend.launch.agent_lines import ALIVE_EVERY_S, print_agent_line
from meshmend.launch.children import SIGNAL_BASE, Child, Children
from meshmend.launch.output_lines import say
from meshmend.launch.worker import Place, elastic_rank, torchrun_variables, work
from meshmend.planning.environment import Environment
from meshmend.topology.failures import Chip
from meshmend.train.state.checkpoint import SAVE_NOTICE
from meshmend.transport.pacing import Backoff

_FIRST_RESTART_S: Final = 0.1  # from the death of a worker until it is started again
_LONGEST_RESTART_S: Final = 10.0
_RAN_LONG_S: Final = 30.0  # a worker that has run for so long was all right
_MOST_FAILURES: Final = 5  # exceptions of a chip's workers in a row
_MOST_QUESTIONS: Final = 30  # after SIGTERM, whether the job is ending: for some seconds
_HOPELESS: Final = 3  # the exit code of a worker that no restart helps


@dataclass(frozen=True)
class HostWorkers:
    """The workers of one host: each runs `body()` with its variables, in `n_threads` threads.

    If `is_supervised`, the agent prints the lines of `agent_lines`. SIGTERM then only makes the
    workers save a checkpoint, unless the scheduler ends the whole job, which `is_ending` asks.
    """

    variables_of: Mapping[Chip, Mapping[str, str]]
    body: Callable[[], int]
    n_threads: int = 1
    is_supervised: bool = False
    is_ending: Callable[[], bool] = lambda: False


@dataclass
class _Seat:
    """One chip of the host, its latest worker, and when to start the next."""

    chip: Chip
    child: Child
    started: float
    backoff: Backoff
    restart_at: float | None = None
    n_failures: int = 0

    @property
    def has_finished(self) -> bool:
        return self.child.code == 0


def run_workers(host: HostWorkers) -> int:
    """Run the workers of a host until they have finished; return 0, or 1 if that is hopeless.

    On an exception, such as SIGTERM, all workers are ended before it is passed on.
    """
    if host.is_supervised:
        SAVE_NOTICE.listen()
    agent = _Agent(host)
    try:
        return agent.run()
    finally:
        agent.close()


class _Agent:
    def __init__(self, host: HostWorkers) -> None:
        self._host = host
        self._children = Children()
        self._n_questions = 0  # since the last notice, whether the job is ending
        self._seats = [
            _Seat(chip, self._start(chip), time.monotonic(), _backoff(number))
            for number, chip in enumerate(host.variables_of)
        ]

    def run(self) -> int:
        """Serve the workers until all have finished or one of them is hopeless."""
        while not all(seat.has_finished for seat in self._seats):
            if self._host.is_supervised:
                print_agent_line()
            self._children.handle(self._timeout_s())
            self._end_with_job()
            for seat in self._seats:
                if seat.child.code and seat.restart_at is None and not self._plan_restart(seat):
                    return 1
                if seat.restart_at is not None and time.monotonic() >= seat.restart_at:
                    self._restart(seat)
        return 0

    def close(self) -> None:
        """End all workers, and print what they printed last."""
        if self._host.is_supervised:
            self._children.end_all(termination_s=0.0)  # SIGTERM only makes these workers save
        else:
            self._children.end_all()

    def _end_with_job(self) -> None:
        """Raise TerminatedError if the scheduler ends the whole job, and not only announces it."""
        if SAVE_NOTICE.is_given and self._host.is_supervised:
            if self._host.is_ending():
                raise TerminatedError
            self._n_questions += 1
            if self._n_questions >= _MOST_QUESTIONS:
                SAVE_NOTICE.is_given, self._n_questions = False, 0

    def _start(self, chip: Chip) -> Child:
        place = Place(
            chip,
            first=SAVE_NOTICE.listen if self._host.is_supervised else None,
            environment=self._host.variables_of[chip],
            n_threads=self._host.n_threads,
        )
        body = _with_exit_codes(self._host.body)
        return self._children.start(
            f"[{','.join(map(str, chip))}] ",
            lambda pipes, parent: work(body, place, pipes, parent),
        )

    def _timeout_s(self) -> float:
        """Return how long to wait for output and ends of workers until there is something to do."""
        restarts = [seat.restart_at for seat in self._seats if seat.restart_at is not None]
        until_restart_s = max(0.0, min(restarts) - time.monotonic()) if restarts else ALIVE_EVERY_S
        return min(ALIVE_EVERY_S, until_restart_s)

    def _plan_restart(self, seat: _Seat) -> bool:
        """Note when to start the worker of a chip again; return False if that is hopeless."""
        child = seat.child
        if child.traceback:
            print(child.traceback, end="", file=sys.stderr)
        if child.code == _HOPELESS:
            return False
        if child.ended - seat.started > _RAN_LONG_S:
            seat.backoff.reset()
            seat.n_failures = 0
        is_killed = child.code is not None and child.code > SIGNAL_BASE
        seat.n_failures = 0 if is_killed else seat.n_failures + 1
        if seat.n_failures >= _MOST_FAILURES:
            say(
                f"the worker of chip {seat.chip} has failed {seat.n_failures} times in a row; the "
                "agent gives up"
            )
            return False
        wait_s = seat.backoff.wait_s()
        seat.restart_at = time.monotonic() + wait_s
        say(
            f"the worker of chip {seat.chip} ended: {child.how_it_ended}; it is started again in "
            f"{wait_s:.1f} s"
        )
        return True

    def _restart(self, seat: _Seat) -> None:
        seat.restart_at, seat.started = None, time.monotonic()
        seat.child = self._start(seat.chip)


def _with_exit_codes(body: Callable[[], int]) -> Callable[[], int]:
    """Return a body that ends with `_HOPELESS`, and one line, after an error that would recur."""

    def run() -> int:
        try:
            return body()
        except (InputError, RefusedError, JobFailedError) as error:
            say(str(error))
            return _HOPELESS

    return run


def _backoff(number: int) -> Backoff:
    return Backoff(number, first_s=_FIRST_RESTART_S, longest_s=_LONGEST_RESTART_S)


def variables_of(environment: Environment, chips: Sequence[Chip]) -> dict[Chip, dict[str, str]]:
    """Return the environment variables of each chip's worker.

    LOCAL_RANK is its number among the workers of its host, by which a script that knows torchrun
    picks its GPU.
    """
    assert environment.settings is not None
    assert environment.coordinator is not None
    at_start = environment.settings.mesh
    return {
        chip: {
            **torchrun_variables(
                elastic_rank(chip, at_start),
                at_start.n_live,
                local_rank=number,
                local_world_size=len(chips),
                master=environment.coordinator,
            ),
            **replace(environment, chip=chip).to_environment(),
        }
        for number, chip in enumerate(chips)
    }

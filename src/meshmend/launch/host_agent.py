"""Runs the workers of one host, and starts those again that die.

The agent imports torch once and forks one worker per chip, so that a worker that died is back in a
fraction of a second. It knows neither the coordinator nor a scheduler. Which generation its chips
are in is for the coordinator to decide.

A worker ends in one of these ways:

- exit code 0: the job is over for its chip.
- `WrongChipError`: its chip is out of the job, and the others train on.
- another `RefusedError`, `JobFailedError` or `InputError`: a new worker would end in the same way.
  The agent ends the others and returns 1.
- another exception: it is started again, but the agent gives up after five in a row.
- a signal: it is started again, always.
"""

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from meshmend.errors import (
    InputError,
    JobFailedError,
    RefusedError,
    TerminatedError,
    WrongChipError,
)
from meshmend.launch.slurm_watch import ALIVE_EVERY_S, print_agent_line
from meshmend.launch.supervisor import (
    Child,
    Ending,
    KeptProcess,
    ProcessSpec,
    RestartPolicy,
    Supervisor,
    say,
)
from meshmend.launch.worker import Place, worker_variables
from meshmend.planning.environment import Environment
from meshmend.topology.failures import Chip
from meshmend.train.state.checkpoint import SAVE_NOTICE

_POLICY: Final = RestartPolicy(first_s=0.1, longest_s=10.0, most_failures=5)
_MOST_QUESTIONS: Final = 30  # after SIGTERM, whether the job is ending: for some seconds
_HOPELESS: Final = 3  # the exit code of a worker that no restart helps


@dataclass(frozen=True)
class HostWorkers:
    """The workers of one host: each runs `body()` with its variables, in `n_threads` threads.

    If `is_supervised`, the agent prints the lines of `slurm_watch`. SIGTERM then only makes the
    workers save a checkpoint, unless the scheduler ends the whole job, which `is_ending` asks.
    """

    variables_of: Mapping[Chip, Mapping[str, str]]
    body: Callable[[], int]
    n_threads: int = 1
    is_supervised: bool = False
    is_ending: Callable[[], bool] = lambda: False


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
        self._supervisor = Supervisor()
        self._n_questions = 0  # since the last notice, whether the job is ending
        specs = [
            ProcessSpec(f"the worker of chip {chip}", partial(self._start, chip), _judge, _POLICY)
            for chip in host.variables_of
        ]
        self._workers = [self._supervisor.keep(spec) for spec in specs]

    def run(self) -> int:
        """Serve the workers until all have finished or one of them is hopeless."""
        self._supervisor.restart_due()
        while not all(worker.is_done for worker in self._workers):
            if self._host.is_supervised:
                print_agent_line()
            self._supervisor.serve(self._timeout_s())
            self._end_with_job()
            self._supervisor.restart_due()
            if hopeless := [worker for worker in self._workers if worker.has_given_up]:
                self._say_why(hopeless[0])
                return 1
        return 0

    def close(self) -> None:
        """End all workers, and print what they printed last."""
        if self._host.is_supervised:
            self._supervisor.end_all(termination_s=0.0)  # SIGTERM only makes these workers save
        else:
            self._supervisor.end_all()

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
        return self._supervisor.fork_worker(_with_exit_codes(self._host.body), place)

    def _timeout_s(self) -> float:
        """Return how long to wait for output and ends of workers until there is something to do."""
        starts = [worker.start_at for worker in self._workers if worker.start_at is not None]
        until_start_s = max(0.0, min(starts) - time.monotonic()) if starts else ALIVE_EVERY_S
        return min(ALIVE_EVERY_S, until_start_s)

    @staticmethod
    def _say_why(worker: KeptProcess) -> None:
        assert worker.child is not None
        if worker.child.code != _HOPELESS:  # such a worker has said it itself
            say(
                f"{worker.spec.name} has failed {worker.n_failures} times in a row; the agent "
                "gives up"
            )


def _judge(worker: Child) -> Ending:
    """Return what the end of a worker means; print the exception that ended it, if one did."""
    if worker.traceback:
        print(worker.traceback, end="", file=sys.stderr)
    if worker.killed_by:
        return Ending.KILLED
    return {0: Ending.DONE, _HOPELESS: Ending.GAVE_UP}.get(worker.code or 0, Ending.FAILED)


def _with_exit_codes(body: Callable[[], int]) -> Callable[[], int]:
    """Return a body that ends with `_HOPELESS`, and one line, after an error that would recur."""

    def run() -> int:
        try:
            return body()
        except WrongChipError as error:
            say(str(error))
            return 0  # no restart helps, and the other chips of this host are wanted
        except (InputError, RefusedError, JobFailedError) as error:
            say(str(error))
            return _HOPELESS

    return run


def variables_of(environment: Environment, chips: Sequence[Chip]) -> dict[Chip, dict[str, str]]:
    """Return the environment variables of each chip's worker.

    LOCAL_RANK is its number among the workers of its host, by which a script that knows torchrun
    picks its GPU.
    """
    assert environment.coordinator is not None
    master = environment.coordinator
    return {
        chip: worker_variables(replace(environment, chip=chip), master, on_host=chips)
        for chip in chips
    }

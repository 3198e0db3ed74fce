"""A process of the lowest priority that makes plans before they are needed, as long as a job lives.

    python -m meshmend.planning.ahead_process PARENT

It is a new process, not a fork, because its parent may have threads and has imported torch, which
planning does not need. It imports the planner and loads its compiled loops once. For each task it
forks a process that makes the plans, and kills the one that makes those of the task before: so a
new generation costs neither imports nor a wait for the end of a search. Both die with their parent.
Training does not depend on them: where a plan is not in the folder, workers run a quick one until
it is.
"""

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from meshmend.planning.plan_request import PlanTask, decode_task, encode_task
from meshmend.processes import die_with_parent

MODULE: Final = "meshmend.planning.ahead_process"  # in the process itself, __name__ is __main__
_LOWEST_PRIORITY: Final = 19
_ONE_THREAD: Final = {
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
}
_TASK: Final = b"t"  # a message that comes with the file of a task


class AheadProcess:
    """A running process that makes plans; `wait` must be called once for each process.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self) -> None:
        # A file, not a pipe: no thread has to read while the process runs.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `wait`
        self._tasks, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            # A process group of its own, so that Ctrl-C ends the parent only. -P: nothing is
            # imported from the working directory.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", MODULE, str(os.getpid())],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
                env={**os.environ, **_ONE_THREAD},
                process_group=0,
            )
        except BaseException:
            self._errors.close()
            self._tasks.close()
            raise
        finally:
            theirs.close()
        self.pid = self._process.pid
        # From its first moment on: it starts while workers do.
        with suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, self.pid, _LOWEST_PRIORITY)

    def plan(self, task: PlanTask) -> None:
        """Make the plans of this task from now on, and no more of the task before.

        Raises:
            OSError: the process has ended, or takes no tasks.
        """
        with tempfile.TemporaryFile() as data:  # what is sent is short: the sender never waits
            data.write(encode_task(task))
            data.seek(0)
            flags = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL
            socket.send_fds(self._tasks, [_TASK], [data.fileno()], flags)

    def kill(self) -> None:
        """Kill the process if it still runs; `wait` must still be called."""
        self._process.kill()

    def wait(self) -> str:
        """Wait until the process has ended; return why it failed, or an empty text.

        A process that was killed has not failed.
        """
        code = self._process.wait()
        self._tasks.close()
        with self._errors:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
        if code <= 0:
            return ""
        return lines[-1] if lines else f"exit code {code}"


def main() -> None:
    """Make the plans of the latest task; end if the parent process ends, or if a plan fails."""
    die_with_parent(int(sys.argv[1]))
    # Numba loads SciPy, where it is installed, for linear algebra that no plan needs: 13 MB.
    sys.modules["scipy"] = None  # type: ignore[assignment]  # how Python marks an absent module
    from meshmend.planning.plan_cache import plan_ahead
    from meshmend.planning.warm_up import plans

    plans()  # loads compiled loops, which each forked process has then
    tasks, planner = socket.socket(fileno=0), 0
    while True:
        watched = [tasks.fileno()]
        if planner:
            watched.append(os.pidfd_open(planner))
        ready, _, _ = select.select(watched, [], [])
        if planner:
            os.close(watched[1])
        if tasks.fileno() in ready:
            if (task := _latest(tasks)) is None:
                return
            if planner:
                os.kill(planner, signal.SIGKILL)
                os.waitpid(planner, 0)
            planner = _fork(lambda: plan_ahead(task.path, task.request, begin=task.begin))
        else:
            code = os.waitstatus_to_exitcode(os.waitpid(planner, 0)[1])
            planner = 0
            if code > 0:
                sys.exit(code)


def _latest(tasks: socket.socket) -> PlanTask | None:
    """Return the last of the tasks that have come, None if no more will come."""
    latest = None
    while select.select([tasks], [], [], 0)[0]:
        message, files, _, _ = socket.recv_fds(tasks, len(_TASK), 1)
        if not message:
            return None
        with os.fdopen(files[0], "rb") as data:
            latest = decode_task(data.read())
    return latest


def _fork(body: Callable[[], None]) -> int:
    """Return the number of a new process that runs `body`, and ends with code 1 if that fails."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        die_with_parent(parent)
        body()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()

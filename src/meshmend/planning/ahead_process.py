"""A process of the lowest priority that makes plans before they are needed.

    python -m meshmend.planning.ahead_process PARENT < TASK

It is a new process, not a fork, because its parent may have threads and has imported torch, which
planning does not need. It dies with its parent. Training does not depend on it: where a plan is not
in the folder, workers run a quick one until it is.
"""

import os
import subprocess
import sys
import tempfile
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


class AheadProcess:
    """A running process that makes plans; `wait` must be called once for each process.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, task: PlanTask) -> None:
        # Files, not pipes: no thread has to read or write while the process runs.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  # closed by `wait`
        try:
            with tempfile.TemporaryFile() as data:
                data.write(encode_task(task))
                data.seek(0)
                # A process group of its own, so that Ctrl-C ends the parent only. -P: nothing is
                # imported from the working directory.
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", MODULE, str(os.getpid())],
                    stdin=data,
                    stdout=subprocess.DEVNULL,
                    stderr=self._errors,
                    env={**os.environ, **_ONE_THREAD},
                    process_group=0,
                )
        except BaseException:
            self._errors.close()
            raise
        self.pid = self._process.pid
        # From its first moment on: it starts while workers recover.
        with suppress(ProcessLookupError):
            os.setpriority(os.PRIO_PROCESS, self.pid, _LOWEST_PRIORITY)

    def kill(self) -> None:
        """Kill the process if it still runs; `wait` must still be called."""
        self._process.kill()

    def wait(self) -> str:
        """Wait until the process has ended; return why it failed, or an empty text.

        A process that was killed has not failed.
        """
        code = self._process.wait()
        with self._errors:
            self._errors.seek(0)
            lines = self._errors.read().decode(errors="replace").strip().splitlines()
        if code <= 0:
            return ""
        return lines[-1] if lines else f"exit code {code}"


def main() -> None:
    """Make the plans of the task on standard input; end early if the parent process ends."""
    die_with_parent(int(sys.argv[1]))
    # Numba loads SciPy, where it is installed, for linear algebra that no plan needs: 13 MB.
    sys.modules["scipy"] = None  # type: ignore[assignment]  # how Python marks an absent module
    from meshmend.planning.plan_cache import plan_ahead

    task = decode_task(sys.stdin.buffer.read())
    plan_ahead(task.path, task.request, begin=task.begin)


if __name__ == "__main__":
    main()

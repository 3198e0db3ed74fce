"""The processes that plan ahead, as the kernel lists them, and jobs that start none."""

from contextlib import suppress
from pathlib import Path

from meshmend.planning.ahead_process import MODULE

PLANNING_S = 300.0  # what a process of the lowest priority may need on a busy machine


def make_no_plans_ahead() -> None:
    """Let this process, and those that it forks, start no process that plans ahead.

    It imports the planner and plans for losses that most jobs of tests never have: that costs more
    than the job. Those jobs run quick plans after a loss.
    """
    from meshmend.launch.job_processes import JobProcesses
    from meshmend.train.core.host_planner import HostPlanner

    for planner in (JobProcesses, HostPlanner):
        planner.plan_ahead = lambda *_: None  # type: ignore[method-assign]


def planners_of(pid: int) -> list[int]:
    """Return the planners that a process started and that still run."""
    found = []
    for child in children_of(pid):
        with suppress(OSError):  # it has ended meanwhile
            if MODULE.encode() in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                found.append(child)
    return found


def children_of(pid: int) -> list[int]:
    """Return the processes that a process started and that still run."""
    numbers = [int(folder.name) for folder in Path("/proc").glob("[0-9]*")]
    return [each for each in numbers if _state_and_parent(each)[1] == pid and is_running(each)]


def is_running(pid: int) -> bool:
    """Whether there is such a process; one that has ended and that nobody asked for is none."""
    return _state_and_parent(pid)[0] not in ("", "Z", "X")


def _state_and_parent(pid: int) -> tuple[str, int]:
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return "", 0
    return words[0], int(words[1])

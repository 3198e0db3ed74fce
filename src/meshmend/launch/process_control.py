"""Carries out injected faults on the processes of a job: signals, restarts, cut links."""

import signal
from collections.abc import Callable, Sequence

from meshmend.launch.children import Child
from meshmend.launch.elastic_job import ElasticJob
from meshmend.launch.job_processes import JobProcesses
from meshmend.membership.faults.fault import COORDINATOR, Fault, Process
from meshmend.membership.messages import CutLink, MendLink, Message
from meshmend.topology.failures import Chip, Failure, Link


class ProcessControl:
    """The `JobControl` of a job on this machine; `send` sends a message to its coordinator."""

    def __init__(
        self, job: ElasticJob, processes: JobProcesses, send: Callable[[Message], None]
    ) -> None:
        self._job = job
        self._processes = processes
        self._send = send

    def kill(self, process: Process) -> None:
        """Kill a process; its end does not count as a failure."""
        child = self._child(process)
        if child is not None and child.code is None:
            child.is_end_expected = True
            child.signal(signal.SIGKILL)

    def stop(self, process: Process) -> None:
        """Stop a process with SIGSTOP, which it cannot catch."""
        self._signal(process, signal.SIGSTOP)

    def resume(self, process: Process) -> None:
        """Resume a stopped process with SIGCONT."""
        self._signal(process, signal.SIGCONT)

    def restart(self, chips: Sequence[Chip], self_injected: Sequence[Fault]) -> None:
        """Kill the workers of these chips that still run, then start new ones."""
        self._processes.kill_workers(chips)
        for chip in chips:
            self._processes.start_worker(chip, [fault.words for fault in self_injected])

    def cut(self, failure: Failure) -> None:
        """Ask both ends of a link to break their connection; in a testbed, fail its network."""
        if isinstance(failure, Link):
            self._send(CutLink(failure))
        if self._job.fail_network is not None:
            self._job.fail_network(failure)

    def mend(self, failure: Failure) -> None:
        """Tell the coordinator that a link is back; in a testbed, repair its network."""
        if isinstance(failure, Link):
            self._send(MendLink(failure))
        if self._job.repair_network is not None:
            self._job.repair_network(failure)

    def expect_deaths(self, chips: Sequence[Chip]) -> None:
        """Count the next end of the workers of these chips as injected, not as a failure."""
        for chip in chips:
            child = self._child(chip)
            if child is not None:
                child.is_end_expected = True

    def _signal(self, process: Process, number: int) -> None:
        child = self._child(process)
        if child is not None:
            child.signal(number)

    def _child(self, process: Process) -> Child | None:
        if process == COORDINATOR:
            return self._processes.coordinator
        return self._processes.workers.get(process)

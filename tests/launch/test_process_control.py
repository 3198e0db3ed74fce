"""What a fault does to real processes."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from waiting import until

pytest.importorskip("torch")

from meshmend.lab.testbed.bed import Testbed
from meshmend.launch.job_processes import JobProcesses, ProcessControl
from meshmend.launch.supervisor import Child
from meshmend.membership.messages import CutLink, MendLink, Message
from meshmend.topology.failures import Block, Failure, Link

CHIP, LINK = Block((1, 1), (1, 1)), Link((0, 0), (0, 1))


@dataclass
class ControlledJob:
    """A worker of chip (0, 0) and a coordinator, both asleep, and what the others were told."""

    worker: Child
    coordinator: Child
    told: list[Message] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)
    repaired: list[Failure] = field(default_factory=list)

    def control(self, *, is_testbed: bool = False) -> ProcessControl:
        bed = SimpleNamespace(fail=self.failed.append, repair=self.repaired.append)
        return ProcessControl(
            cast(JobProcesses, _Processes(self)),
            self.told.append,
            cast(Testbed, bed) if is_testbed else None,
        )


class _Processes:
    """The processes of a job, as far as a fault that starts none needs them."""

    def __init__(self, job: ControlledJob) -> None:
        self.coordinator = SimpleNamespace(child=job.coordinator)
        self.workers = {(0, 0): job.worker}


@pytest.fixture
def job() -> Iterator[ControlledJob]:
    line = [sys.executable, "-c", "import time; time.sleep(60)"]
    processes = [subprocess.Popen(line, start_new_session=True) for _ in range(2)]
    worker, coordinator = (Child(process.pid, -1, process.wait) for process in processes)
    yield ControlledJob(worker, coordinator)
    for process in processes:
        process.kill()
        process.wait()


def state_of(child: Child) -> str:
    """Return the state that Linux shows of a process: T is stopped, Z has ended."""
    return Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0]


def states_of(job: ControlledJob) -> set[str]:
    return {state_of(job.worker), state_of(job.coordinator)}


def test_a_worker_and_the_coordinator_are_stopped_and_resumed(job: ControlledJob) -> None:
    control = job.control()

    control.stop((0, 0))
    control.stop("coordinator")
    until(lambda: states_of(job) == {"T"}, why=lambda: f"{states_of(job)}")
    control.resume((0, 0))
    control.resume("coordinator")
    until(lambda: "T" not in states_of(job), why=lambda: f"{states_of(job)}")

    assert not job.worker.is_end_expected
    assert not job.coordinator.is_end_expected


def test_a_stopped_process_can_be_killed_and_its_end_is_expected(job: ControlledJob) -> None:
    control = job.control()

    control.stop("coordinator")
    control.kill("coordinator")

    until(lambda: state_of(job.coordinator) == "Z", why=lambda: state_of(job.coordinator))
    assert job.coordinator.is_end_expected
    assert not job.worker.is_end_expected


def test_a_process_that_has_ended_or_never_was_is_left_alone(job: ControlledJob) -> None:
    control = job.control()
    job.worker.code = 1

    for chip in ((0, 0), (1, 1)):
        control.kill(chip)
        control.stop(chip)
        control.resume(chip)

    assert not job.worker.is_end_expected
    assert state_of(job.worker) not in ("T", "Z")


def test_the_coordinator_hears_of_links_and_a_testbed_of_all_that_breaks(
    job: ControlledJob,
) -> None:
    for failure in (CHIP, LINK):
        job.control().cut(failure)
        job.control().mend(failure)
    n_told = len(job.told)
    for failure in (CHIP, LINK):
        job.control(is_testbed=True).cut(failure)
        job.control(is_testbed=True).mend(failure)

    assert n_told == 2
    assert job.told == [CutLink(LINK), MendLink(LINK)] * 2
    assert job.failed == job.repaired == [CHIP, LINK]


def test_deaths_that_are_expected_count_as_injected(job: ControlledJob) -> None:
    job.control().expect_deaths([(0, 0), (1, 1)])

    assert job.worker.is_end_expected
    assert state_of(job.worker) != "Z"

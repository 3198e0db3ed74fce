"""Hosts that share a network and nothing else: each has its own disk, processes and clocks.

A host is a chip of a testbed. A first process holds its namespaces; killing that process is a
power failure, and the next boot finds an empty disk.
"""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import meshmend
from meshmend.lab.testbed.bed import Testbed
from meshmend.topology.failures import Chip
from waiting import until

# The whole machine is read-only for a host, but for its own disk. The package, with what Numba has
# compiled, is what an image would hold.
_BOOT = """
mount -t proc proc /proc && mount --bind "$2" "$2" && mount -o remount,bind,ro / &&
mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs "$1" &&
mkdir "$1/tmp" "$1/home" && touch "$1/up" && exec sleep infinity
"""


class Host:
    """One host; `disk` is a path that all hosts have, each with its own file system there."""

    def __init__(self, bed: Testbed, chip: Chip, disk: Path, logs: Path) -> None:
        self.chip, self.disk = chip, disk
        self._bed, self._logs = bed, logs
        self._first: subprocess.Popen[bytes] | None = None
        self._pid = 0
        self._n_boots = 0

    def boot(self) -> None:
        """Start the host with an empty disk; it has been up for another time than any other."""
        self._n_boots += 1
        uptime_s = str(100_000 * self._n_boots + 10_000 * sum(self.chip) + self.chip[0])
        clocks = ["--time", "--monotonic", uptime_s, "--boottime", uptime_s]
        folders = [str(self.disk), str(Path(meshmend.__file__).parent)]
        line = ["unshare", "--mount", "--pid", "--fork", "--kill-child", *clocks]
        with (self._logs / f"boot {self.chip}").open("wb") as log:
            self._first = subprocess.Popen(
                self._bed.command(self.chip, [*line, "sh", "-c", _BOOT, "sh", *folders]),
                stdout=log,
                stderr=log,
            )
        until(self._is_up, why=lambda: (self._logs / f"boot {self.chip}").read_text())

    def start(
        self, name: str, *arguments: str, prefix: tuple[str, ...] = (), **environment: str
    ) -> "subprocess.Popen[bytes]":
        """Run a command of meshmend on this host; `log` returns what it prints."""
        user = ["--user", "--preserve-credentials"] if self._bed.is_user else []
        inside = ["--mount", "--pid", "--net", "--time"]
        line = ["nsenter", "--target", str(self._pid), *user, *inside, "--", *prefix]
        own = {"HOME": f"{self.disk}/home", "TMPDIR": f"{self.disk}/tmp"}
        with (self._logs / name).open("wb") as log:
            return subprocess.Popen(
                [*line, sys.executable, "-m", "meshmend", *arguments],
                stdout=log,
                stderr=log,
                env={**os.environ, **own, **environment},
            )

    def log(self, name: str) -> str:
        return (self._logs / name).read_text()

    def on_disk(self, name: str) -> Path:
        """Return the path by which this machine sees a file on the disk of the host."""
        return Path(f"/proc/{self._pid}/root{self.disk}") / name

    def collect(self, name: str, goal: Path) -> None:
        """Copy the files of a folder of this host into a folder of this machine.

        Process numbers begin anew with each boot, and with them the names of files.
        """
        goal.mkdir(exist_ok=True)
        for file in self.on_disk(name).iterdir():
            shutil.copy(file, goal / f"{file.stem}.{self._n_boots}{file.suffix}")

    def lose_power(self, keep: str, goal: Path) -> None:
        """Kill all processes of the host; copy the files of a folder before the disk is gone."""
        for pid in self._processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        until(lambda: not self._processes())
        self.collect(keep, goal)
        self.down()

    def down(self) -> None:
        """Kill all processes of the host."""
        if self._first is not None:
            with suppress(ProcessLookupError):
                os.kill(self._pid or self._first.pid, signal.SIGKILL)  # the others die with it
            self._first.wait()
            self._first = None

    def _is_up(self) -> bool:
        assert self._first is not None
        assert self._first.poll() is None, (self._logs / f"boot {self.chip}").read_text()
        children = Path(f"/proc/{self._first.pid}/task/{self._first.pid}/children")
        self._pid = int((children.read_text().split() or ["0"])[0])
        return self._pid > 0 and self.on_disk("up").exists()

    def _processes(self) -> list[int]:
        """Return all processes of the host but the first, with which its disk would go."""
        own = Path(f"/proc/{self._pid}/ns/pid").stat().st_ino
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                if entry.name.isdigit() and (entry / "ns/pid").stat().st_ino == own:
                    is_zombie = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
                    found += [] if is_zombie else [int(entry.name)]
        return [pid for pid in found if pid != self._pid]


@contextmanager
def booted_hosts(bed: Testbed, chips: tuple[Chip, ...], folder: Path) -> Iterator[dict[Chip, Host]]:
    """Yield a host for each chip; skip the test where no host can have its own disk and clocks."""
    for program in ("unshare", "nsenter", "mount"):
        if shutil.which(program) is None:
            pytest.skip(f"hosts need {program}, from util-linux")
    if not Path("/proc/self/ns/time").exists():
        pytest.skip("hosts with clocks of their own need time namespaces, Linux 5.6 or later")
    (folder / "disk").mkdir()
    (folder / "logs").mkdir()
    hosts = {chip: Host(bed, chip, folder / "disk", folder / "logs") for chip in chips}
    try:
        for host in hosts.values():
            host.boot()
        yield hosts
    finally:
        for host in hosts.values():
            host.down()


def real_clock_ahead(hours: Mapping[Chip, int], chip: Chip) -> tuple[str, ...]:
    """Return the words before a command that let a host's wall clock be hours away.

    The monotonic clock and the times of files stay as they are.
    """
    if shutil.which("faketime") is None:
        pytest.skip("clocks that are hours apart need faketime: apt-get install faketime")
    return ("env", "NO_FAKE_STAT=1", "faketime", "--exclude-monotonic", "-f", f"{hours[chip]:+d}h")

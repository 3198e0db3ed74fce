"""What the live page costs a job of 4x4 chips, and how soon an event is on it, in Chromium.

    python benchmarks/live_page.py [--pairs 30] [--seconds 4.6] [chips] [cores]

`chips` is a job whose steps compute on accelerators: its workers sleep for 0.15 s in each step, and
the page may take what the sums leave of the cores. `cores` trains a ResNet on the cores that server
and browser use too, as on a machine where one tries a job out.

In one job the page is shown and hidden in turn, after a pause in which it opens. While it is hidden
its server is stopped (SIGSTOP), so that neither takes anything. Two neighbouring spans are a pair,
and every other pair begins with the page shown. So whatever else changes slowly on the machine
changes both spans of a pair. The figure is the mean over the pairs, with its standard error. It is
`reached` if the mean and two errors are within 1 %, `missed` if the mean less two errors is not,
else `not resolved`. The host of a virtual machine may take cores away for a while: a pair in which
it took more than 1 % of their time does not count, whatever it shows. The default takes under six
minutes. It needs the extra `explore`, Playwright and Debian's Chromium.
"""

import argparse
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import sync_playwright

from meshmend.errors import BenchmarkError
from record import record

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))  # they start pages too
from process_tree import with_descendants
from served_page import served_page
from training_script import training_script
from waiting import until

_CHROMIUM: Final = "/usr/bin/chromium"
_MOST: Final = 0.01  # what a page may add to a step
_MOST_STOLEN: Final = 0.01  # by the host of a virtual machine, in a pair that counts
_STOLEN: Final = 8  # which word of /proc/stat says it
_SETTLE_S: Final = 0.6  # what opening costs is not what watching costs
_KILLS: Final = 3
_BETWEEN_KILLS_S: Final = 3.0
_COMPUTE_S: Final = 0.15
_IDLE_S: Final = 0.05  # of processor time: a server that plans takes more in a second
_ON_4X4: Final = ["--mesh", "4x4", "--explore"]

# Run in the page: what a browser does when its tab is hidden, or seen again.
_HIDE: Final = """(hidden) => {
  Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""
# It remembers by the clock when one more chip is shown to have left.
_WATCH: Final = """() => {
  const left = () => document.querySelectorAll("#job-events [data-event=left]").length;
  const before = left();
  delete window.shownAt;
  new MutationObserver((changes, observer) => {
    if (left() <= before) return;
    window.shownAt = Date.now() / 1000;
    observer.disconnect();
  }).observe(document.getElementById("job-events"), { childList: true });
}"""


@dataclass(frozen=True)
class Span:
    """Seconds in which the page was shown or hidden: which bytes of the log they wrote.

    The processor time is that of the job, of the page's server and of the browser.
    """

    is_shown: bool
    log_bytes: tuple[int, int]
    wall_s: float
    cpu_s: tuple[float, float, float]
    stolen: float  # the part of the cores' time that the host of a virtual machine took


@dataclass(frozen=True)
class Pair:
    """The mean step, and the processor time of a second, in two neighbouring spans."""

    hidden_step_s: float
    shown_step_s: float
    hidden_cpu: tuple[float, ...]
    shown_cpu: tuple[float, ...]
    stolen: float

    @property
    def added(self) -> float:
        """The part that the page adds to a step."""
        return self.shown_step_s / self.hidden_step_s - 1


class WatchedJob:
    """A job, the server of its page, and the page in a browser; the page is shown at first."""

    def __init__(self, launcher: int, log: Path, page: Any) -> None:
        self.launcher, self._log, self.page = launcher, log, page
        (server,) = (pid for pid in _children(launcher) if "\0explore\0" in _read(pid, "cmdline"))
        self._server = with_descendants(server)
        job = [pid for pid in with_descendants(launcher) if pid not in self._server]
        known = {os.getpid(), *job, *self._server}
        browser = [pid for pid in with_descendants(os.getpid()) if pid not in known]
        self._groups = (job, self._server, browser)
        self._used_s: dict[int, float] = {}  # by process; of one that has ended, all that it took

    def show(self, is_shown: bool) -> None:
        """Show the page, or hide it and stop its server."""
        if is_shown:
            self._signal_server(signal.SIGCONT)
        self.page.evaluate(_HIDE, not is_shown)
        if not is_shown:
            self._signal_server(signal.SIGSTOP)

    def span(self, is_shown: bool, seconds: float) -> Span:
        """Return what happens in the next seconds."""
        began, before, cpu = time.monotonic(), self._log.stat().st_size, self._cpu_s()
        stolen_s = _stolen_s()
        time.sleep(seconds)
        used = tuple(now - then for now, then in zip(self._cpu_s(), cpu, strict=True))
        written = before, self._log.stat().st_size
        wall_s = time.monotonic() - began
        stolen = (_stolen_s() - stolen_s) / (wall_s * (os.cpu_count() or 1))
        return Span(is_shown, written, wall_s, (used[0], used[1], used[2]), stolen)

    def step_s(self, span: Span) -> float:
        """Return the mean step of a span."""
        with self._log.open("rb") as log:
            log.seek(span.log_bytes[0])
            text = log.read(span.log_bytes[1] - span.log_bytes[0])
        events = map(json.loads, text.decode().splitlines())
        times = [each["t"] for each in events if each["event"] == "step"]
        return float(times[-1] - times[0]) / (len(times) - 1)

    def _cpu_s(self) -> list[float]:
        for pid in (pid for group in self._groups for pid in group):
            with suppress(FileNotFoundError, ProcessLookupError):
                self._used_s[pid] = _used_s(pid)
        return [sum(self._used_s.get(pid, 0.0) for pid in group) for group in self._groups]

    def _signal_server(self, number: int) -> None:
        for pid in self._server:
            os.kill(pid, number)


def main() -> None:
    """Measure the jobs that the arguments name, print a line for each figure, and record them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("jobs", nargs="*", choices=[*_JOBS, []])
    parser.add_argument("--pairs", type=int, default=30)
    parser.add_argument("--seconds", type=float, default=4.6)
    wanted = parser.parse_args()
    print(f"load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    figures = {
        name: _measured(name, wanted.pairs, wanted.seconds) for name in wanted.jobs or ["chips"]
    }
    print(record("live_page", figures))


def _measured(name: str, n_pairs: int, seconds: float) -> dict[str, Any]:
    """Return the figures of a job that is watched, after printing them."""
    print(f"{name}: {n_pairs} pairs of spans of {seconds:g} s", flush=True)
    with _watched_job(_JOBS[name]) as job:
        pairs = []
        for number in range(n_pairs):
            spans = [
                _span_of(job, is_shown, seconds)
                for is_shown in ((False, True) if number % 2 else (True, False))
            ]
            pairs.append(_pair(job, *sorted(spans, key=lambda span: span.is_shown)))
            took = f"the host took {100 * pairs[-1].stolen:.1f} % of the cores"
            print(f"  pair {number + 1}: {_percent(pairs[-1].added)}, {took}", flush=True)
        job.show(True)
        delays = [_kill_shown_s(job) for _ in range(_KILLS)]
    return _summary(pairs, delays)


def _span_of(job: WatchedJob, is_shown: bool, seconds: float) -> Span:
    job.show(is_shown)
    time.sleep(_SETTLE_S)
    return job.span(is_shown, seconds)


def _pair(job: WatchedJob, hidden: Span, shown: Span) -> Pair:
    def per_second(span: Span) -> tuple[float, ...]:
        return tuple(used / span.wall_s for used in span.cpu_s)

    steps_s = job.step_s(hidden), job.step_s(shown)
    stolen = max(hidden.stolen, shown.stolen)
    return Pair(*steps_s, per_second(hidden), per_second(shown), stolen)


def _summary(pairs: list[Pair], delays: list[float]) -> dict[str, Any]:
    """Print and return what was found."""
    added = [pair.added for pair in pairs if pair.stolen <= _MOST_STOLEN]
    if not added:
        raise BenchmarkError("the host took the cores away in every pair: try again later")
    mean, error = statistics.mean(added), _standard_error(added)
    step_s = statistics.median(pair.hidden_step_s for pair in pairs)
    found = _verdict(mean, error)
    print(
        f"  {len(added)} of {len(pairs)} pairs count: an open page adds {_percent(mean)} "
        f"± {100 * error:.2f} % (median {_percent(statistics.median(added))}) to a step of "
        f"{step_s:.3f} s; at most 1 %: {found}"
    )
    for place, who in enumerate(("job", "server", "browser")):
        hidden, shown = (
            1e3 * statistics.mean(cpu[place] for cpu in each)
            for each in ([p.hidden_cpu for p in pairs], [p.shown_cpu for p in pairs])
        )
        print(f"  {who}: {hidden:.1f} ms of processor time a second, {shown:.1f} with the page")
    print(f"  a kill is on the page after {max(delays):.2f} s (at most 0.3 s)", flush=True)
    return {
        "added": mean,
        "n_counted": len(added),
        "standard_error": error,
        "verdict": found,
        "step_s": step_s,
        "pairs": [asdict(pair) for pair in pairs],
        "kill_on_page_s": delays,
    }


def _verdict(mean: float, error: float) -> str:
    if mean + 2 * error <= _MOST:
        return "reached"
    return "missed" if mean - 2 * error > _MOST else "not resolved"


def _standard_error(values: list[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.inf


def _percent(part: float) -> str:
    return f"{100 * part:+.2f} %"


def _chips_job(folder: Path) -> list[str]:
    script = folder / "script.py"
    compute = f"time.sleep({_COMPUTE_S})"
    script.write_text(training_script("batch=64, steps=1000000", compute), encoding="utf-8")
    return ["run", "--elastic", *_ON_4X4, "--run-dir", str(folder / "run"), str(script)]


def _cores_job(folder: Path) -> list[str]:
    endless = ["--steps", "1000000", "--save-every", "0"]
    return ["train", *_ON_4X4, *endless, "--run-dir", str(folder / "run")]


_JOBS: Final[dict[str, Callable[[Path], list[str]]]] = {"chips": _chips_job, "cores": _cores_job}


@contextmanager
def _watched_job(command: Callable[[Path], list[str]]) -> Iterator[WatchedJob]:
    """Yield a job that has begun, and whose page has its first plan."""
    with sync_playwright() as driver, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        browser = driver.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox"])
        with served_page(*command(folder), folder=folder) as served:
            page = browser.new_page(viewport={"width": 1200, "height": 900})
            page.goto(served.address)
            until(lambda: "training" in page.inner_text("#job-title"))
            # On cores that the job fills, the plan of the page takes its time: planners give way.
            until(lambda: page.get_attribute("#answer", "data-stage") != "none")
            job = WatchedJob(served.pid, folder / "run" / "events.jsonl", page)
            until(lambda: job.span(True, 1.0).cpu_s[1] < _IDLE_S)  # its planners have ended
            try:
                yield job
            finally:
                job.show(True)  # a server that is stopped could not end
        browser.close()


def _kill_shown_s(job: WatchedJob) -> float:
    """Kill a worker; return the seconds until the page shows that it has left."""
    job.page.evaluate(_WATCH)
    own = _read(job.launcher, "cmdline")  # a worker is a fork of the launcher
    worker = max(child for child in _children(job.launcher) if _read(child, "cmdline") == own)
    killed_at = time.time()
    os.kill(worker, signal.SIGKILL)
    until(lambda: job.page.evaluate("window.shownAt !== undefined"))
    time.sleep(_BETWEEN_KILLS_S)
    return float(job.page.evaluate("shownAt")) - killed_at


def _stolen_s() -> float:
    """Return for how many seconds the host has kept cores from this machine since it started."""
    return int(Path("/proc/stat").read_text().split()[_STOLEN]) / os.sysconf("SC_CLK_TCK")


def _used_s(pid: int) -> float:
    fields = _read(pid, "stat").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _children(pid: int) -> list[int]:
    return [int(child) for child in _read(pid, f"task/{pid}/children").split()]


def _read(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


if __name__ == "__main__":
    main()

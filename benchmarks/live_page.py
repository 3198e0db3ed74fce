"""What the live page costs a job of 4x4 chips, and how soon an event is on it, in Chromium.

    python benchmarks/live_page.py [--pairs 12] [--seconds 10] [own] [shared]

`own` gives the browser a core of its own, as an operator's laptop does; the job and the page's
server share the other cores. `shared` lets all run on all cores, as on a machine where one tries a
job out. A pair is a span in which nobody watches and no server runs, and one with a server and an
open page, in turn. It needs the extra `explore`, Playwright and Debian's Chromium.

What else runs on the machine disturbs single spans, so a figure comes with its standard error.
Processor time bears a busy machine better than step times do, so it is compared as well.
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
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import sync_playwright

from record import record

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))  # they start pages too
from process_tree import with_descendants
from served_page import ServedPage, served_page
from waiting import until

_CHROMIUM: Final = "/usr/bin/chromium"
_SETTLE_S: Final = 3.0  # what opening costs is not what watching costs
_KILLS: Final = 3
_TRAIN: Final = ["train", "--mesh", "4x4", "--steps", "1000000", "--save-every", "0", "--explore"]

# Runs in the page: remembers by the clock when one more chip is shown to have left.
_WATCH = """() => {
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
class Placement:
    """On which cores the job and the page's server run, and on which the browser."""

    job: tuple[int, ...]
    browser: tuple[int, ...]


@dataclass(frozen=True)
class Span:
    """The mean step of some seconds, and the processor time that each part took for a step."""

    step_s: float
    job_s: float
    server_s: float = 0.0
    browser_s: float = 0.0


@dataclass(frozen=True)
class RunningJob:
    """A job: its launcher, the log of its steps, and what a page needs to follow it."""

    launcher: int
    events: Path
    coordinator: str
    secret: str

    def step_times(self) -> list[float]:
        lines = self.events.read_text(encoding="utf-8").splitlines()[:-1]
        return [each["t"] for each in map(json.loads, lines) if each["event"] == "step"]

    def span(self, seconds: float, server: ServedPage | None = None) -> Span:
        """Return the figures of the next seconds."""
        groups = [with_descendants(self.launcher)]
        if server is not None:
            groups.append(with_descendants(server.pid))
            known = {os.getpid(), *groups[0], *groups[1]}
            groups.append([pid for pid in with_descendants(os.getpid()) if pid not in known])
        n_before, used_before = len(self.step_times()), [_used_s(pids) for pids in groups]
        time.sleep(seconds)
        used_s = [_used_s(pids) - before for pids, before in zip(groups, used_before, strict=True)]
        times = self.step_times()[n_before:]
        n_steps = len(times) - 1
        return Span((times[-1] - times[0]) / n_steps, *(each / n_steps for each in used_s))


def main() -> None:
    """Measure what the arguments name, print a line for each figure, and record them."""
    parser = argparse.ArgumentParser()
    parser.add_argument("placements", nargs="*", default=["own", "shared"])
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--seconds", type=float, default=10.0)
    wanted = parser.parse_args()
    cores = tuple(sorted(os.sched_getaffinity(0)))
    placements = {"own": Placement(cores[:-1], cores[-1:]), "shared": Placement(cores, cores)}
    print(f"load of this machine: {os.getloadavg()[0]:.1f} on {len(cores)} cores", flush=True)
    figures = {
        name: _measured(placements[name], wanted.pairs, wanted.seconds)
        for name in wanted.placements
    }
    print(record("live_page", figures))


def _measured(placement: Placement, n_pairs: int, seconds: float) -> dict[str, Any]:
    """Return the figures of a job that is watched, after printing them."""
    print(f"job on cores {placement.job}, browser on {placement.browser}", flush=True)
    with (
        _on_cores(placement.browser),  # what this process starts inherits them
        sync_playwright() as driver,
        tempfile.TemporaryDirectory() as folder,
    ):
        browser = driver.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox"])
        with _running_job(Path(folder), placement) as job:
            pairs = []
            for number in range(n_pairs):
                spans = {}
                for is_watched in (False, True) if number % 2 else (True, False):
                    with ExitStack() as stack:
                        server = None
                        if is_watched:
                            opened = _open_page(browser, job, placement)
                            _, server = stack.enter_context(opened)
                        spans[is_watched] = job.span(seconds, server)
                pairs.append((spans[False], spans[True]))
                print(f"  pair {number + 1}: {_percent(_step_ratio(*pairs[-1]))}", flush=True)
            with _open_page(browser, job, placement) as (page, _):
                delays = [_kill_shown_s(page, job.launcher) for _ in range(_KILLS)]
        browser.close()
    return _summary(placement, pairs, delays)


def _step_ratio(alone: Span, watched: Span) -> float:
    return watched.step_s / alone.step_s


def _cpu_ratio(alone: Span, watched: Span) -> float:
    return (watched.job_s + watched.server_s) / alone.job_s


def _summary(
    placement: Placement, pairs: list[tuple[Span, Span]], delays: list[float]
) -> dict[str, Any]:
    """Print and return what was found."""
    steps, cpu = ([ratio(*pair) for pair in pairs] for ratio in (_step_ratio, _cpu_ratio))
    print(f"  an open page makes a step {_estimate(steps)} longer (at most 1 %)")
    print(
        f"  job and server take {_estimate(cpu)} more processor time for a step than the job alone"
    )
    for who in ("server_s", "browser_s"):
        part = statistics.median(getattr(watched, who) / alone.job_s for alone, watched in pairs)
        print(f"  {who.removesuffix('_s')}: {100 * part:.2f} % of the job's processor time")
    print(f"  a kill is on the page after {max(delays):.2f} s (at most 0.3 s)", flush=True)
    return {
        "placement": asdict(placement),
        "step_ratio": statistics.mean(steps),
        "step_ratio_error": _error(steps),
        "cpu_ratio": statistics.mean(cpu),
        "cpu_ratio_error": _error(cpu),
        "pairs": [[asdict(span) for span in pair] for pair in pairs],
        "kill_on_page_s": delays,
    }


def _estimate(ratios: list[float]) -> str:
    """Return the mean of ratios with its standard error, and their median."""
    return (
        f"{_percent(statistics.mean(ratios))} ± {100 * _error(ratios):.2f} % "
        f"(median {_percent(statistics.median(ratios))})"
    )


def _error(ratios: list[float]) -> float:
    return statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else math.nan


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.2f} %"


@contextmanager
def _running_job(folder: Path, placement: Placement) -> Iterator[RunningJob]:
    """Yield a job that nobody watches: the server that it came with is ended."""
    with ExitStack() as stack:
        with _on_cores(placement.job):
            served = served_page(*_TRAIN, "--run-dir", str(folder / "run"), folder=folder)
            launcher = stack.enter_context(served).pid
        (server,) = _servers(launcher)
        words = _read(server, "cmdline").split("\0")
        variables = dict(
            each.split("=", 1) for each in _read(server, "environ").split("\0") if each
        )
        job = RunningJob(
            launcher,
            folder / "run" / "events.jsonl",
            words[words.index("--coordinator") + 1],
            variables["MESHMEND_SECRET"],
        )
        until(lambda: job.events.exists() and len(job.step_times()) > 20)
        os.kill(server, signal.SIGTERM)
        until(lambda: not _servers(launcher))
        yield job


@contextmanager
def _open_page(
    browser: Any, job: RunningJob, placement: Placement
) -> Iterator[tuple[Any, ServedPage]]:
    """Yield a page of a job that has been open for a while, and the server behind it."""
    with ExitStack() as stack:
        with _on_cores(placement.job):
            served = served_page(
                "explore",
                "--coordinator",
                job.coordinator,
                environment={"MESHMEND_SECRET": job.secret},
            )
            server = stack.enter_context(served)
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.goto(server.address)
        until(lambda: "training" in page.inner_text("#job-title"))
        # On cores that the job fills, the plan of the page takes its time: planners give way.
        with suppress(AssertionError):
            until(lambda: page.get_attribute("#answer", "data-stage") != "none", timeout_s=20)
        time.sleep(_SETTLE_S)
        yield page, server
        page.close()


@contextmanager
def _on_cores(cores: tuple[int, ...]) -> Iterator[None]:
    """Let this process, and those that it starts, run on these cores until the end of the block."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _used_s(pids: list[int]) -> float:
    fields = [_read(pid, "stat").rpartition(")")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")


def _servers(launcher: int) -> list[int]:
    """Return the process that serves the page of a launcher, if there is one."""
    return [pid for pid in _children(launcher) if "\0explore\0" in _read(pid, "cmdline")]


def _children(pid: int) -> list[int]:
    return [int(child) for child in _read(pid, f"task/{pid}/children").split()]


def _read(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text()


def _kill_shown_s(page: Any, launcher: int) -> float:
    """Kill a worker; return the seconds until the page shows that it has left."""
    page.evaluate(_WATCH)
    own = _read(launcher, "cmdline")  # a worker is a fork of the launcher
    worker = max(child for child in _children(launcher) if _read(child, "cmdline") == own)
    killed_at = time.time()
    os.kill(worker, signal.SIGKILL)
    until(lambda: page.evaluate("window.shownAt !== undefined"))
    time.sleep(_SETTLE_S)
    return float(page.evaluate("shownAt")) - killed_at


if __name__ == "__main__":
    main()

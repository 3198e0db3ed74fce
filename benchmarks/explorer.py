"""How fast the explorer page is, measured in Chromium: pictures, clicks, dragging, a live job.

    python benchmarks/explorer.py [pictures] [live]

`pictures` opens 32x32 and 16x16x16 and clicks boards dead. `live` trains on 4x4 chips, kills a
worker, and compares the steps with and without an open page. It needs the extra `explore`,
Playwright and Debian's Chromium, and a quiet machine: workers, planner and browser share its cores.
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import sync_playwright

from meshmend.errors import BenchmarkError

_CHROMIUM: Final = "/usr/bin/chromium"
_WAIT_S: Final = 300.0
_SPANS: Final = 5  # with a page and without one
_SPAN_S: Final = 12.0

# Runs in the page: drags the mesh for two seconds, and returns pictures a second and the longest.
_DRAG = """() => new Promise((resolve) => {
  const canvas = document.getElementById("canvas"), times = [], begun = performance.now();
  const step = (now) => {
    times.push(now);
    const turn = (now - begun) / 300;
    canvas.dispatchEvent(new PointerEvent("pointermove", { pointerId: 1, bubbles: true,
      clientX: 300 + 90 * Math.sin(turn), clientY: 420 + 60 * Math.cos(turn) }));
    if (now - begun < 2000) requestAnimationFrame(step);
    else resolve([1000 * (times.length - 1) / (times.at(-1) - times[0]),
      Math.max(...times.slice(1).map((time, place) => time - times[place]))]);
  };
  requestAnimationFrame(step);
})"""

# Runs in the page: remembers by the clock when the first event of a kind is shown.
_WATCH = """() => new MutationObserver((changes, observer) => {
  if (!document.querySelector("#job-events [data-event=left]")) return;
  window.shownAt = Date.now() / 1000;
  observer.disconnect();
}).observe(document.getElementById("job-events"), { childList: true })"""


def main() -> None:
    """Measure what the arguments name, and print one line for each figure."""
    wanted = sys.argv[1:] or ["pictures", "live"]
    print(f"load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox"])
        if "pictures" in wanted:
            _measure_pictures(browser, "32x32", most_s=0.7)
            _measure_pictures(browser, "16x16x16", most_s=3.0)
        if "live" in wanted:
            _measure_live(browser)
        browser.close()


def _measure_pictures(browser: Any, mesh: str, *, most_s: float) -> None:
    with _started(["explore", "--mesh", mesh], Path.cwd()) as (process, lines):
        address = _address(lines, process)
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.goto(address)
        _until(lambda: page.evaluate("performance.getEntriesByName('first answer').length > 0"))
        page.reload()  # the planner is warm now, as it is for all but the first page
        _until(lambda: page.evaluate("performance.getEntriesByName('picture').length > 0"))
        picture_ms = page.evaluate("performance.getEntriesByName('picture')[0].startTime")
        _say(f"{mesh}: first picture after opening", picture_ms / 1e3, 1.0)
        _until(lambda: page.evaluate("performance.getEntriesByName('first answer').length > 0"))
        took = [_click_s(page, place) for place in range(5)]
        _say(f"{mesh}: a click answered, median of 5", statistics.median(took), most_s)
        box = page.locator("#canvas").bounding_box()
        page.mouse.move(box["x"] + 300, box["y"] + 200)
        page.mouse.down()
        rate, longest_ms = page.evaluate(_DRAG)
        page.mouse.up()
        print(
            f"{mesh}: {rate:.1f} pictures a second while dragged (60), longest {longest_ms:.0f} ms"
        )
        page.close()


def _click_s(page: Any, place: int) -> float:
    """Fail another board as a click does; return the seconds until its first answer is shown."""
    before = page.evaluate("performance.getEntriesByName('first answer').length")
    page.focus("#canvas")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown", "ArrowDown")[: 4 if place else 3]:
        page.keyboard.press(key)
    page.keyboard.press("Enter")
    _until(lambda: page.evaluate("performance.getEntriesByName('first answer').length") > before)
    took_ms = page.evaluate("performance.getEntriesByName('first answer').at(-1).duration")
    return float(took_ms) / 1e3


def _measure_live(browser: Any) -> None:
    options = ["train", "--mesh", "4x4", "--steps", "1000000", "--save-every", "0", "--explore"]
    with tempfile.TemporaryDirectory() as folder:
        command = [*options, "--run-dir", f"{folder}/run"]
        with _started(command, Path(folder)) as (process, lines):
            address = _address(lines, process)
            events = Path(folder) / "run" / "events.jsonl"
            _until(lambda: len(_step_times(events)) > 20)
            spans = _alternated(browser, address, events)
            ratio = statistics.median(with_page / without for with_page, without in spans)
            print(f"live 4x4: an open page makes a step {100 * (ratio - 1):+.1f} % longer (1 %)")
            page = browser.new_page()
            page.goto(address)
            _until(lambda: "training" in page.inner_text("#job-title"))
            time.sleep(3)
            for what, pids in (
                ("Chromium", _descendants(os.getpid()) - _descendants(process.pid)),
                ("the server of the page", _servers(process.pid)),
            ):
                print(f"live 4x4: {what} takes {100 * _cpu_share(pids):.2f} % of all cores (1 %)")
            page.evaluate(_WATCH)
            killed_at = time.time()
            os.kill(_newest_worker(process.pid), signal.SIGKILL)
            _until(lambda: page.evaluate("window.shownAt !== undefined"))
            _say("live 4x4: a kill is on the page after", page.evaluate("shownAt") - killed_at, 0.3)
            page.close()


def _alternated(browser: Any, address: str, events: Path) -> list[tuple[float, float]]:
    """Return mean step times with a page open and with none, in turn."""
    spans = []
    for _ in range(_SPANS):
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.goto(address)
        _until(lambda page=page: "training" in page.inner_text("#job-title"))  # type: ignore[misc]
        time.sleep(3)  # what opening costs is not what watching costs
        with_page = _mean_step_s(events)
        page.close()
        time.sleep(1)
        spans.append((with_page, _mean_step_s(events)))
    return spans


def _mean_step_s(events: Path) -> float:
    before = len(_step_times(events))
    time.sleep(_SPAN_S)
    times = _step_times(events)[before:]
    return statistics.mean(later - earlier for earlier, later in pairwise(times))


def _step_times(events: Path) -> list[float]:
    if not events.exists():
        return []
    lines = events.read_text(encoding="utf-8").splitlines()[:-1]
    return [each["t"] for each in map(json.loads, lines) if each["event"] == "step"]


def _descendants(pid: int) -> set[int]:
    """Return all processes that a process, or those that it started, have started."""
    found: set[int] = set()
    left = [pid]
    while left:
        for task in Path(f"/proc/{left.pop()}/task").glob("*/children"):
            children = {int(child) for child in task.read_text().split()} - found
            found |= children
            left += children
    return found


def _servers(launcher: int) -> set[int]:
    """Return the process that serves the page, and its planners."""
    own = [
        pid
        for pid in _descendants(launcher)
        if b"\0explore\0" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]
    return {*own, *(below for pid in own for below in _descendants(pid))}


def _cpu_share(pids: set[int]) -> float:
    """Return which part of all cores processes use; unlike step times it bears a busy machine."""

    def used_s() -> float:
        fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
        return sum(int(each[11]) + int(each[12]) for each in fields) / os.sysconf("SC_CLK_TCK")

    before, began = used_s(), time.monotonic()
    time.sleep(_SPAN_S)
    return (used_s() - before) / (time.monotonic() - began) / (os.cpu_count() or 1)


def _newest_worker(launcher: int) -> int:
    """Return the process of the worker that was forked last: its command is the launcher's."""
    own = Path(f"/proc/{launcher}/cmdline").read_bytes()
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return max(
        int(child) for child in children if Path(f"/proc/{child}/cmdline").read_bytes() == own
    )


@contextmanager
def _started(
    options: list[str], folder: Path
) -> Iterator[tuple["subprocess.Popen[str]", list[str]]]:
    """Yield a running command and the lines that it has printed so far."""
    lines: list[str] = []
    process = subprocess.Popen(
        [sys.executable, "-m", "meshmend", *options],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True)
    reader.start()
    try:
        yield process, lines
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(60)
        reader.join(60)


def _address(lines: list[str], process: "subprocess.Popen[str]") -> str:
    """Return the address of the page once it is printed."""

    def found() -> list[str]:
        if process.poll() is not None:
            raise BenchmarkError(f"the command ended: {''.join(lines)}")
        return [line.split()[-1] for line in lines if "http://127.0.0.1" in line]

    _until(lambda: bool(found()))
    return found()[0]


def _until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _WAIT_S
    while not is_so():
        if time.monotonic() > deadline:
            raise BenchmarkError(f"nothing came within {_WAIT_S:g} s")
        time.sleep(0.01)


def _say(what: str, took_s: float, most_s: float) -> None:
    print(f"{what} {took_s:.2f} s (at most {most_s:g} s)", flush=True)


if __name__ == "__main__":
    main()

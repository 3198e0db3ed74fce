"""How fast the explorer page is, measured in Chromium: pictures, clicks, dragging.

    python benchmarks/explorer.py

Opens 32x32 and 16x16x16 and clicks boards dead. With names of files that `meshmend explore
--export` wrote, it opens and clicks these instead, without a network. It needs the extra
`explore`, Playwright and Debian's Chromium, and a quiet machine: planner and browser share its
cores. `live_page.py` measures what the page costs a running job.
"""

import os
import statistics
import sys
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import sync_playwright

sys.path.append(str(Path(__file__).parents[1] / "tests" / "helpers"))  # they start pages too
from served_page import served_page
from waiting import until

_CHROMIUM: Final = "/usr/bin/chromium"

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


def main() -> None:
    """Measure, and print one line for each figure."""
    print(f"load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=_CHROMIUM, args=["--no-sandbox"])
        for name in sys.argv[1:]:
            _measure_file(browser, Path(name))
        if not sys.argv[1:]:
            _measure_pictures(browser, "32x32", most_s=0.7)
            _measure_pictures(browser, "16x16x16", most_s=3.0)
        browser.close()


def _measure_file(browser: Any, path: Path) -> None:
    context = browser.new_context(offline=True, viewport={"width": 1200, "height": 900})
    page = context.new_page()
    page.goto(path.resolve().as_uri())
    until(lambda: page.evaluate("performance.getEntriesByName('picture').length > 0"))
    picture_ms = page.evaluate("performance.getEntriesByName('picture')[0].startTime")
    size = f"{path.name} ({path.stat().st_size / 1e6:.1f} MB)"
    _say(f"{size}: first picture after opening", picture_ms / 1e3, 1.0)
    took = [_click_s(page, place) for place in range(5)]
    _say(f"{size}: the slowest of 5 clicks", max(took), 0.3)
    context.close()


def _measure_pictures(browser: Any, mesh: str, *, most_s: float) -> None:
    with served_page("explore", "--mesh", mesh) as served:
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.goto(served.address)
        until(lambda: page.evaluate("performance.getEntriesByName('first answer').length > 0"))
        page.reload()  # the planner is warm now, as it is for all but the first page
        until(lambda: page.evaluate("performance.getEntriesByName('picture').length > 0"))
        picture_ms = page.evaluate("performance.getEntriesByName('picture')[0].startTime")
        _say(f"{mesh}: first picture after opening", picture_ms / 1e3, 1.0)
        until(lambda: page.evaluate("performance.getEntriesByName('first answer').length > 0"))
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
    until(lambda: page.evaluate("performance.getEntriesByName('first answer').length") > before)
    took_ms = page.evaluate("performance.getEntriesByName('first answer').at(-1).duration")
    return float(took_ms) / 1e3


def _say(what: str, took_s: float, most_s: float) -> None:
    print(f"{what} {took_s:.2f} s (at most {most_s:g} s)", flush=True)


if __name__ == "__main__":
    main()

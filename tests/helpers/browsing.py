"""A running explorer, and a page of it in a real browser."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from served_page import served_page
from waiting import HANG_S, until

CHROMIUM = Path("/usr/bin/chromium")  # Debian's
# As in the page's geometry.js and view.js: from chip to chip, the room around them, the most zoom.
_PITCH, _GAP, _LARGEST = 20.0, 2.2, 4.0
# Runs in the page: the contrast of each text with the nearest background that is painted.
_CONTRASTS = """() => {
  const parts = (colour) => (colour.match(/[\\d.]+/g) ?? []).map(Number);
  const light = (colour) => parts(colour).slice(0, 3).map((value) => value / 255)
    .map((value) => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4)
    .reduce((sum, value, place) => sum + value * [0.2126, 0.7152, 0.0722][place], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = getComputedStyle(at).backgroundColor;
      if (parts(colour).length === 3 || parts(colour)[3] === 1) return colour;
    }
    return "rgb(255,255,255)";
  };
  return [...document.querySelectorAll("body *")]
    .filter((each) => each.checkVisibility() && [...each.childNodes].some((node) =>
      node.nodeType === 3 && node.textContent.trim()) && !(each instanceof SVGElement))
    .map((each) => {
      const pair = [light(getComputedStyle(each).color), light(behind(each))];
      return [each.outerHTML.slice(0, 80), (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05)];
    });
}"""
QUESTION = {
    "mesh": "4x4",
    "wrap": "none",
    "fail": [],
    "payload": "1MB",
    "fabric": "reference",
    "algorithm": "auto",
}


@contextmanager
def explorer(cache: Path, *options: str, **environment: str) -> Iterator[str]:
    """Yield the address of an explorer that has loaded its planner."""
    need_web_server()
    variables = {"XDG_CACHE_HOME": str(cache), **environment}
    with served_page("explore", *options, environment=variables) as page:
        fetch(page.address + "warm")
        yield page.address


@contextmanager
def live_job(folder: Path, *command: str) -> Iterator[str]:
    """Yield the address of the live page of a job that runs until the end of the block."""
    need_web_server()
    with served_page(*command, folder=folder) as page:
        yield page.address


def need_web_server() -> None:
    for package in ("starlette", "uvicorn"):
        pytest.importorskip(package, reason="the page needs: pip install 'meshmend[explore]'")


def fetch(address: str, **headers: str) -> tuple[int, bytes]:
    """Return the status and the body of a page."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with urllib.request.urlopen(
            urllib.request.Request(address, headers=named), timeout=HANG_S
        ) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def asked(address: str, what: str, **changes: Any) -> list[dict[str, Any]]:
    """Return the answers to a question, without reports of progress."""
    body = json.dumps({**QUESTION, **changes}).encode()
    request = urllib.request.Request(address + what, data=body, method="POST")
    with urllib.request.urlopen(request, timeout=HANG_S) as stream:
        answers = [json.loads(line) for line in stream]
    return [answer for answer in answers if answer["kind"] != "progress"]


@dataclass
class Browsed:
    """A page in the browser, and what went wrong on it."""

    page: Any
    problems: list[str] = field(default_factory=list)

    def hear_line(self, line: Any) -> None:
        if line.type == "error":
            self.problems.append(line.text)

    def hear_error(self, error: Any) -> None:
        self.problems.append(str(error))

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def wait_for(self, selector: str) -> None:
        self.page.wait_for_selector(selector, timeout=HANG_S * 1000)

    def wait_until(self, script: str) -> None:
        """Wait until an expression is true; the page's own policy forbids to evaluate it there."""
        until(lambda: self.page.evaluate(script), why=lambda: f"not so: {script}")

    def faint_texts(self) -> list[Any]:
        """Return the elements whose text has a contrast below 4.5, with that contrast."""
        return [each for each in self.page.evaluate(_CONTRASTS) if each[1] < 4.5]

    def answered(self) -> None:
        """Wait for an answer to the latest question."""
        self.wait_for("#answer:not([data-stage=none]), #problem:not([hidden])")
        assert self.page.get_attribute("#answer", "data-stage") != "none", self.text("#problem")

    def click_mesh(self, right: float, down: float) -> None:
        """Click at a place of the picture, given in parts of its width and height."""
        canvas = self.page.locator("#canvas")
        box = canvas.bounding_box()
        canvas.click(position={"x": right * box["width"], "y": down * box["height"]})

    def click_chip(self, shape: tuple[int, int], row: float, column: float) -> None:
        """Click on a chip of a 2-D mesh that fits its picture; halves are between two chips."""
        canvas = self.page.locator("#canvas")
        box = canvas.bounding_box()
        rows, columns = shape
        size = [(columns - 1 + _GAP) * _PITCH, (rows - 1 + _GAP) * _PITCH]
        scale = min(box["width"] / size[0], box["height"] / size[1], _LARGEST)
        at = [(column + _GAP / 2) * _PITCH, (row + _GAP / 2) * _PITCH]
        canvas.click(
            position={
                "x": (box["width"] - scale * size[0]) / 2 + scale * at[0],
                "y": (box["height"] - scale * size[1]) / 2 + scale * at[1],
            }
        )


@contextmanager
def browser() -> Iterator[Any]:
    """Yield Chromium, driven by Playwright; skip where one of them is absent."""
    api = pytest.importorskip(
        "playwright.sync_api", reason="pages are tested with: pip install playwright"
    )
    if not CHROMIUM.exists():
        pytest.skip(f"pages are tested with Debian's chromium, but there is no {CHROMIUM}")
    with api.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=str(CHROMIUM), args=["--no-sandbox"])
        try:
            yield chromium
        finally:
            chromium.close()


# Pages that no test uses now, by their browser and options: to make one takes longer than to load
# the explorer, which keeps nothing in a browser.
_idle: dict[tuple[Any, str], list[Any]] = {}


@contextmanager
def browsed(chromium: Any, address: str, **options: Any) -> Iterator[Browsed]:
    """Yield a page that is open; it must end without an error on its console."""
    options = {"viewport": {"width": 1200, "height": 900}, "accept_downloads": True, **options}
    idle = _idle.setdefault((chromium, json.dumps(options, sort_keys=True)), [])
    found = Browsed(idle.pop() if idle else chromium.new_context(**options).new_page())
    told = {"console": found.hear_line, "pageerror": found.hear_error}
    for event, hear in told.items():
        found.page.on(event, hear)
    found.page.goto(address)
    yield found
    assert not found.problems, found.problems
    found.page.goto("about:blank")
    for event, hear in told.items():
        found.page.remove_listener(event, hear)
    idle.append(found.page)  # not that of a test that failed

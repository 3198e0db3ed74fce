"""What the page looks like, compared by structure: panels, controls, legend, and what is painted.

`page_structure.json` holds the structure at three settings. Pixels and heights depend on fonts, so
they are not in it. If a change of the page is meant, the failing test names the file to copy there.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from browsing import Browsed, browsed, explorer

KEPT = Path(__file__).parent / "page_structure.json"
SETTINGS: dict[str, dict[str, Any]] = {
    "1200 px": {"viewport": {"width": 1200, "height": 900}},
    "600 px": {"viewport": {"width": 600, "height": 900}},
    "dark": {"viewport": {"width": 1200, "height": 900}, "color_scheme": "dark"},
}
QUESTION = "mesh=4x4&wrap=none&payload=1MB&fabric=reference&algorithm=trees&fail=2x2@0,2&fail=0,0"

# Runs in the page: where its panels are across the page, what they hold, and what its legend says.
STRUCTURE = """() => {
  const width = document.documentElement.clientWidth;
  const isShown = (each) => each.checkVisibility() && each.getBoundingClientRect().height > 0;
  const across = (each) => {
    const box = each.getBoundingClientRect();
    return [box.left, box.right].map((value) => Math.round(100 * value / width) / 100);
  };
  const panels = [...document.querySelectorAll("main > *, #canvas, #legend")].filter(isShown);
  return {
    panels: panels.map((each) => ({ id: each.id, across: across(each),
      controls: [...each.querySelectorAll("button, input, select")].filter(isShown).length })),
    legend: [...document.querySelectorAll("#legend .key")].map((key) => [
      key.textContent.trim().replace(/\\s+/g, " "),
      ...[...key.querySelectorAll(".swatch")].map((one) => getComputedStyle(one).backgroundColor),
    ]),
    colours: ["body", "section", "#status"].map((name) => {
      const style = getComputedStyle(document.querySelector(name));
      return [name, style.color, style.backgroundColor];
    }),
  };
}"""

# Runs in the page: pairs of panels that lie over each other.
OVERLAPS = """() => {
  const panels = [...document.querySelectorAll("main > *")];
  const boxes = panels.filter((each) => each.checkVisibility())
    .map((each) => [each.id, each.getBoundingClientRect()]);
  return boxes.flatMap(([one, a], place) => boxes.slice(place + 1)
    .filter(([, b]) => Math.min(a.right, b.right) - Math.max(a.left, b.left) > 1
      && Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top) > 1).map(([other]) => [one, other]));
}"""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory, chromium: Any) -> Iterator[str]:
    with explorer(tmp_path_factory.mktemp("cache")) as found:
        yield found


def saved_picture(page: Browsed, folder: Path) -> ElementTree.Element:
    """Return the root of the SVG file that the page saves."""
    with page.page.expect_download() as waiting:
        page.page.click("#get-svg")
    path = folder / "picture.svg"
    waiting.value.save_as(path)
    return ElementTree.parse(path).getroot()


def picture_structure(page: Browsed, folder: Path) -> dict[str, Any]:
    """Return what the picture consists of: its names, and how many marks of each kind are where."""
    root = saved_picture(page, folder)
    marks: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for each in root.iter("{http://www.w3.org/2000/svg}path"):
        # Loads are lines, with a colour for each shade; other marks are filled.
        filled, width = each.get("fill"), each.get("stroke-width")
        kind = f"lines of width {width}" if filled == "none" else f"fill {filled}"
        starts = re.findall(r"M(-?[\d.]+) (-?[\d.]+)", each.get("d", ""))
        marks[kind] += [(float(x), float(y)) for x, y in starts]
    names = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    corners = {
        kind: [[min(axis), max(axis)] for axis in zip(*at, strict=True)]
        for kind, at in sorted(marks.items())
    }
    return {
        "size": [root.get("width"), root.get("height")],
        "names": " ".join(map(str, names)),
        "marks": {kind: {"count": len(marks[kind]), "across": at} for kind, at in corners.items()},
    }


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_page_has_the_kept_structure(
    setting: str, address: str, chromium: Any, tmp_path: Path
) -> None:
    options = {**SETTINGS[setting], "reduced_motion": "reduce"}  # trees would still be growing
    with browsed(chromium, f"{address}#{QUESTION}", **options) as page:
        page.wait_for("#answer[data-stage=searched]")
        page.wait_until("document.querySelectorAll('#curve polyline').length > 2")
        found = page.page.evaluate(STRUCTURE)
        found["loads"] = picture_structure(page, tmp_path)
        page.page.select_option("#show", "flows")
        page.wait_until("document.querySelector('#part').options.length > 2")
        found["flows"] = picture_structure(page, tmp_path)
        overlaps = page.page.evaluate(OVERLAPS)

    file = tmp_path / "page_structure.json"
    kept = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    file.write_text(json.dumps({**kept, setting: found}, indent=1) + "\n", encoding="utf-8")
    assert overlaps == []
    assert found == kept.get(setting), f"if this is meant, copy {file} to {KEPT}"


@pytest.mark.parametrize("wrap", ["none", "0", "1", "all"])
def test_names_of_rows_and_columns_stand_clear_of_links_that_wrap_around(
    wrap: str, address: str, chromium: Any, tmp_path: Path
) -> None:
    with browsed(chromium, f"{address}#mesh=4x12&wrap={wrap}&payload=1MB&algorithm=trees") as page:
        page.answered()
        root = saved_picture(page, tmp_path)

    points = [
        (float(x), float(y))
        for path in root.iter("{http://www.w3.org/2000/svg}path")
        for x, y in re.findall(r"[ML](-?[\d.]+) (-?[\d.]+)", path.get("d", ""))
    ]
    left, top = (min(axis) for axis in zip(*points, strict=True))
    names = list(root.iter("{http://www.w3.org/2000/svg}text"))
    rows = [each for each in names if each.get("text-anchor") == "end"]
    assert (len(names), len(rows)) == (16, 4)
    assert all(5 < float(each.get("x", "nan")) < left for each in rows)
    columns = [each for each in names if each not in rows]
    assert all(5 < float(each.get("y", "nan")) < top for each in columns)

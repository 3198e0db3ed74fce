"""The explorer page in a real browser: clicks, keys, answers, downloads, looks, who is refused."""

import csv
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from xml.etree import ElementTree

import pytest

from browsing import Browsed, browsed, explorer, fetch
from meshmend import load_plan
from waiting import until

# Runs in the page: the controls that have no name for a screen reader.
UNNAMED = """() => [...document.querySelectorAll("button, input, select, canvas, [tabindex]")]
  .filter((each) => !(each.getAttribute("aria-label") || each.textContent.trim()
    || each.labels?.[0]?.textContent.trim()) || (each instanceof HTMLInputElement
    && !each.labels.length)).map((each) => each.outerHTML)"""
# The structure of the page at three settings. Pixels and heights depend on fonts: they are not in
# it. If a change of the page is meant, the failing test names the file to copy there.
KEPT = Path(__file__).parent / "page_structure.json"
SETTINGS: dict[str, dict[str, Any]] = {
    "1200 px": {"viewport": {"width": 1200, "height": 900}},
    "600 px": {"viewport": {"width": 600, "height": 900}},
    "dark": {"viewport": {"width": 1200, "height": 900}, "color_scheme": "dark"},
}
STRUCTURED = "mesh=4x4&wrap=none&payload=1MB&fabric=reference&algorithm=trees&fail=2x2@0,2&fail=0,0"

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
    with explorer(tmp_path_factory.mktemp("cache"), "--mesh", "8x8", "--payload", "10MB") as found:
        yield found


@pytest.fixture
def page(address: str, chromium: Any) -> Iterator[Browsed]:
    with browsed(chromium, address) as found:
        found.answered()
        yield found


def figures(page: Browsed) -> dict[str, str]:
    cards = page.page.locator("#figures > div").all()
    return {
        card.locator("span").first.inner_text(): card.locator("b").inner_text() for card in cards
    }


def test_a_board_that_is_clicked_dead_changes_the_plan_and_undo_brings_it_back(
    page: Browsed,
) -> None:
    assert figures(page)["chips that sum"] == "64"

    page.click_mesh(0.5, 0.5)

    page.wait_until("document.querySelector('#figures').innerText.includes('60')")
    assert page.page.input_value("#fail") in {"2x2@2,2", "2x2@2,4", "2x2@4,2", "2x2@4,4"}
    page.wait_until("document.querySelector('#figures').innerText.includes('the hole costs')")

    page.page.click("#undo")

    page.wait_until("document.querySelector('#figures').innerText.includes('64')")
    assert page.page.input_value("#fail") == ""


def test_the_searched_plan_follows_with_a_table_and_a_curve(page: Browsed) -> None:
    page.wait_for("#answer[data-stage=searched]")
    page.wait_until("document.querySelectorAll('#curve polyline').length > 4")

    rows = page.page.locator("#table tbody tr").all_inner_texts()
    names = [row.split("\t")[0] for row in rows]
    assert {"trees", "rings-nd", "rank-ring", "ft-two-d"} <= set(names)
    assert "limit" in page.text("#limit-words").lower()
    assert "counted exactly" in page.text("#proof-words")


def test_the_keyboard_fails_a_chip_a_link_and_says_so(page: Browsed) -> None:
    page.page.focus("#canvas")
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        page.page.keyboard.press(key)
    assert page.text("#cursor").startswith("Chip 1,1: alive")
    page.page.check("input[name=tool][value=chip]")
    page.page.focus("#canvas")
    page.page.keyboard.press("Enter")
    assert page.text("#cursor") == "Chip 1,1: failed"

    page.page.check("input[name=tool][value=link]")
    page.page.focus("#canvas")
    page.page.keyboard.press("ArrowUp")
    page.page.keyboard.press("Enter")

    assert page.page.input_value("#fail") == "1,1 link:0,1-0,2"
    page.answered()
    page.page.keyboard.press("Control+z")
    assert page.page.input_value("#fail") == "1,1"


def test_the_address_restores_the_question(page: Browsed, chromium: Any) -> None:
    page.page.fill("#fail", "2x2@2,2 link:0,0-0,1")
    page.page.press("#fail", "Enter")
    page.page.select_option("#show", "flows")
    page.answered()

    with browsed(chromium, page.page.url) as again:
        again.answered()
        assert again.page.input_value("#fail") == "2x2@2,2 link:0,0-0,1"
        assert again.page.input_value("#show") == "flows"
        assert again.page.is_visible("#phase")


def test_the_schedule_plays_and_is_scrubbed_by_slice(page: Browsed) -> None:
    page.wait_for("#answer[data-stage=searched]")
    page.page.select_option("#show", "schedule")
    page.wait_until("document.querySelector('#slice').options.length > 2")
    page.page.fill("#time", "60")
    assert " of " in page.text("#time-words")

    page.page.click("#play")

    page.wait_until("Number(document.querySelector('#time').value) > 62")
    page.page.click("#play")
    page.page.select_option("#slice", "1")
    page.wait_until("document.querySelector('#time-words').textContent.length > 5")


def test_play_runs_at_once_and_the_sentence_says_what_the_hole_costs(page: Browsed) -> None:
    assert page.text("#headline").startswith("All 64\u00a0chips are alive")
    page.page.fill("#fail", "2x2@2,2")
    page.page.press("#fail", "Enter")
    page.wait_until("document.querySelector('#headline').innerText.includes('Without meshmend')")
    words = page.text("#headline").replace("\u00a0", " ")
    assert re.match(r"4 chips died\. The sum of 10 MB takes [\d.]+ us, [\d.]+ % longer", words)

    page.page.click("#play")

    page.wait_until("Number(document.querySelector('#time').value) > 2")
    assert page.page.input_value("#show") == "schedule"


def test_the_map_of_what_hurts_most_covers_every_chip_and_link(page: Browsed) -> None:
    page.page.select_option("#machine", "Trn2 host")
    page.wait_until("document.querySelector('#mesh').value === '4x4'")
    page.page.select_option("#show", "heat")

    # A torus whose chips are all alike: each costs the same, and so does each link.
    page.wait_until("/longer|costs anything/.test(document.querySelector('#legend').textContent)")
    page.wait_until("!document.querySelector('#legend').textContent.includes('so far')")


def test_a_click_slows_a_link_and_a_second_one_mends_it(page: Browsed) -> None:
    page.page.check("input[name=tool][value=slow]")
    page.page.focus("#canvas")
    page.page.keyboard.press("ArrowRight")
    page.page.keyboard.press("Enter")

    assert page.page.input_value("#slow") == "link:0,0-0,1=0.25"
    page.wait_until("document.querySelector('#headline').innerText.includes('knowing the speeds')")
    assert page.text("#headline").startswith("1\u00a0link is slow.")
    assert "slow link" in page.text("#legend")
    page.page.keyboard.press("Enter")
    assert page.page.input_value("#slow") == ""
    page.page.keyboard.press("Enter")
    page.page.click("#repair")
    assert page.page.input_value("#slow") == ""


def test_what_runs_is_one_choice_for_sums_tiles_and_all_to_all(page: Browsed) -> None:
    page.page.fill("#fail", "1,1")
    page.page.select_option("#work", "tile 2x2")
    page.wait_until("document.querySelector('#headline').innerText.includes('3\\u00a0spares')")
    assert "15" in page.text("#figures")
    assert {"colour 0", "colour 3"} <= set(page.text("#legend").splitlines())
    page.page.select_option("#show", "flows")
    assert page.page.locator("#phase option").all_inner_texts()[-1] == "colour 3"

    page.page.select_option("#work", "all-to-all")
    page.wait_until("document.querySelector('#headline').innerText.includes('every block')")
    assert page.page.input_value("#show") == "load"
    assert page.page.locator("#algorithm option").all_inner_texts() == ["auto", "pairs", "relays"]
    page.page.press("#play", "Enter")
    page.wait_until("Number(document.querySelector('#time').value) > 2")

    page.page.press("#undo", "Enter")
    page.wait_until("document.querySelector('#work').value === 'tile 2x2'")


@pytest.mark.parametrize(
    ("link", "why"),
    [
        ("mesh=4x4&collective=banana", "banana"),
        ("mesh=4x4&slow=link:0,0-0,1=7", "a speed from 0.001 to 1"),
        ("mesh=4x4&tile=9x9", "take a smaller tile"),
        ("mesh=4x4&collective=all-to-all&tile=2x2", "tiles have a plan of their own"),
        ("mesh=32x32&collective=all-to-all", "at most 512 chips"),
    ],
)
def test_layers_that_cannot_be_are_one_sentence(
    address: str, chromium: Any, link: str, why: str
) -> None:
    with browsed(chromium, f"{address}#{link}") as page:
        page.wait_for("#problem:not([hidden])")
        assert why in page.text("#problem")


def test_next_hops_of_a_chip_are_listed(page: Browsed) -> None:
    page.page.select_option("#show", "hops")
    page.page.focus("#canvas")
    page.page.keyboard.press("ArrowDown")

    page.wait_until("document.querySelectorAll('#hops-table tbody tr').length === 63")
    assert "Next hops of chip 0,0" in page.text("#hops-title")
    assert page.page.locator("#hops-table tbody tr").first.inner_text().split()[:2] == [
        "0,1",
        "right",
    ]


def test_downloads_can_be_read_back(page: Browsed, tmp_path: Path) -> None:
    def saved(button: str) -> Path:
        with page.page.expect_download() as waiting:
            page.page.click(button)
        path = tmp_path / str(waiting.value.suggested_filename)
        waiting.value.save_as(path)
        return path

    assert load_plan(saved("#get-plan")).schedule.n_ranks == 64
    assert saved("#get-svg").read_text().startswith("<svg")
    assert saved("#get-png").read_bytes().startswith(b"\x89PNG")
    with saved("#get-csv").open() as file:
        assert len(list(csv.DictReader(file))) == 2 * 2 * 8 * 7


def test_bad_input_is_one_sentence_and_the_page_goes_on(page: Browsed) -> None:
    page.page.fill("#payload", "10 apples")
    page.page.press("#payload", "Enter")
    page.wait_until("!document.querySelector('#problem').hidden")
    assert "apples" in page.text("#problem")

    page.page.fill("#payload", "10MB")
    page.page.press("#payload", "Enter")

    page.answered()
    assert not page.page.is_visible("#problem")


@pytest.mark.parametrize(
    ("link", "why"),
    [
        ("mesh=banana", "A mesh is written 16x32, but got “banana”."),
        ("mesh=99999999999x9&payload=-5", "at most 4096 chips"),
        ("mesh=4x4&wrap=7", "Wrap is none, all, or axes from 0 to 1, but got “7”."),
        ("mesh=4x4&fail=<img src=x onerror=alert(1)>", "The mesh has no chip “<img"),
        ("mesh=2x2&fail=2x2@0,0", "at least one live chip"),
        ("mesh=4x4&payload=-5", "-5"),
    ],
)
def test_a_link_with_nonsense_is_one_sentence_and_the_page_goes_on(
    address: str, chromium: Any, link: str, why: str
) -> None:
    with browsed(chromium, f"{address}#{link}&show=nothing") as page:
        page.wait_for("#problem:not([hidden])")
        assert why in page.text("#problem")
        assert page.page.input_value("#show") == "load"
        until(lambda: page.text("#status") == "No answer.")
        page.page.select_option("#show", "schedule")
        page.page.press("#canvas", "ArrowDown")
        page.click_mesh(0.5, 0.5)

        changes = {"mesh": "2x3", "wrap": "none", "payload": "1MB", "fail": ""}
        page.page.evaluate(
            "(changes) => { for (const [name, value] of Object.entries(changes)) "
            "document.getElementById(name).value = value; }",
            changes,
        )
        page.page.press("#mesh", "Enter")

        page.wait_until("document.querySelector('#canvas').ariaLabel.startsWith('Mesh 2x3,')")
        page.answered()
        assert not page.page.is_visible("#problem")


def test_an_algorithm_that_does_not_support_the_hole_says_why(page: Browsed) -> None:
    page.page.fill("#fail", "1,1")
    page.page.select_option("#algorithm", "ring-1d")

    page.wait_until("document.querySelector('#problem').textContent.includes('ring-1d')")
    page.page.select_option("#algorithm", "auto")
    page.answered()


@pytest.mark.parametrize("width", [1200, 600, 360])
def test_the_page_is_legible_in_both_schemes_at_every_width(
    address: str, chromium: Any, width: int
) -> None:
    with browsed(chromium, address, viewport={"width": width, "height": 900}) as found:
        found.answered()

        behind = set()
        for scheme in ("dark", "light"):  # the last is the default of other tests
            found.page.emulate_media(color_scheme=scheme)
            assert found.faint_texts() == []
            behind.add(found.page.evaluate("getComputedStyle(document.body).backgroundColor"))
        assert len(behind) == 2
        assert found.page.evaluate(UNNAMED) == []
        assert found.page.evaluate("document.documentElement.scrollWidth") <= width


def test_meshes_of_any_number_of_axes_are_drawn_and_planned(page: Browsed) -> None:
    for mesh in ("4x4x4", "1x9", "7", "2x3x4x2", "1x1"):
        page.page.fill("#mesh", mesh)
        page.page.press("#mesh", "Enter")
        page.wait_until(f"document.querySelector('#canvas').ariaLabel.startsWith('Mesh {mesh},')")

        page.answered()
        assert not page.page.is_visible("#problem")
        assert page.page.is_visible("#layer") == (mesh in {"4x4x4", "2x3x4x2"})


def test_strangers_are_refused(address: str) -> None:
    parts = urlsplit(address)
    root = f"http://{parts.netloc}/"

    for wrong in (root, root + "start", root + "x" * 32 + "/", root + parts.path[1:9] + "/"):
        status, body = fetch(wrong)
        assert status == 403
        assert b"token" in body
    assert fetch(address + "start", Host="evil.example:80")[0] == 403
    assert fetch(address + "start", Origin="http://evil.example")[0] == 403
    assert fetch(address + "start", Origin=f"http://{parts.netloc}")[0] == 200
    assert json.loads(fetch(address + "start")[1])["question"]["mesh"] == "8x8"


def test_a_page_of_another_site_can_neither_read_nor_frame_it(address: str, chromium: Any) -> None:
    context = chromium.new_context()
    stranger = context.new_page()
    stranger.goto("data:text/html,<p>another site</p>")

    refused = stranger.evaluate(
        "(at) => fetch(at).then(() => 'read', () => 'refused')", address + "start"
    )

    assert refused == "refused"
    context.close()


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
    with browsed(chromium, f"{address}#{STRUCTURED}", **options) as page:
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

"""The explorer in one file: in a browser without a network, and its plans around every hole."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from browsing import Browsed, browsed
from meshmend.cli.main import run_line
from meshmend.errors import InputError
from meshmend.pages.explore.explorer_question import question_of
from meshmend.pages.explore.kept_page import KeptPage, kept_page
from meshmend.pages.explore.single_holes import broken_meshes
from meshmend.planning.progress import no_progress
from meshmend.topology.failures import format_shape
from meshmend.topology.mesh import Mesh, format_wrap

# Runs in the page: what it would draw for each of some holes.
PLANS = """async (holes) => {
  const { ask, getJson } = await import("asker.js"), { question } = await getJson("start");
  const plans = [];
  for (const [fail, slow] of holes)
    for await (const answer of ask("first", { ...question, fail, slow })) plans.push(answer);
  return plans;
}"""


def kept(mesh: str, wrap: str = "none", fail: tuple[str, ...] = (), **options: Any) -> KeptPage:
    words = {"mesh": mesh, "wrap": wrap, "fail": list(fail), "payload": "1MB"}
    question = question_of({**words, "fabric": "reference", "algorithm": "auto"})
    return kept_page(question, progress=no_progress, **{"most_bytes": 8_000_000, **options})


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, chromium: Any) -> str:
    path = tmp_path_factory.mktemp("kept") / "page.html"
    path.write_text(kept("6x6", fail=("2x2@0,2",)).text, encoding="utf-8")
    return path.as_uri()


@pytest.fixture
def page(file: str, chromium: Any) -> Iterator[Browsed]:
    with browsed(chromium, file, offline=True) as found:
        found.answered()
        yield found


def test_it_opens_on_the_hole_and_a_click_moves_the_hole(page: Browsed) -> None:
    assert page.page.input_value("#fail") == "2x2@0,2"
    assert "32" in page.text("#figures")

    page.click_chip((6, 6), 4, 4)

    page.wait_until("document.querySelector('#fail').value === '2x2@4,4'")
    page.answered()
    page.page.click("#undo")
    page.wait_until("document.querySelector('#fail').value === '2x2@0,2'")
    page.page.click("#repair")
    page.wait_until("document.querySelector('#figures').innerText.includes('36')")


def test_its_schedule_plays_without_a_server(page: Browsed) -> None:
    page.click_chip((6, 6), 4, 4)
    page.page.select_option("#show", "schedule")
    page.wait_until("document.querySelector('#slice').options.length > 1")
    page.page.click("#play")
    page.wait_until("Number(document.querySelector('#time').value) > 2")


def test_an_address_with_a_hole_that_it_has_no_plan_for_is_one_sentence(
    file: str, chromium: Any
) -> None:
    with browsed(chromium, f"{file}#mesh=6x6&fail=0,0&fail=3,3", offline=True) as page:
        page.wait_for("#problem:not([hidden])")
        assert "meshmend explore --mesh 6x6" in page.text("#problem")


@pytest.mark.parametrize(("mesh", "wrap"), [("4x6", "none"), ("4x4", "0"), ("4x3x2", "all")])
def test_every_hole_has_trees_that_reach_every_live_chip_over_live_links(
    mesh: str, wrap: str, tmp_path: Path, chromium: Any
) -> None:
    made = kept(mesh, wrap)
    path = tmp_path / "page.html"
    path.write_text(made.text, encoding="utf-8")
    full = question_of(json.loads(re.findall(r'"question":(\{.*?\})', made.text)[0])).mesh
    broken = [each for unit in made.holes for each in broken_meshes(full, unit)]

    with browsed(chromium, path.as_uri(), offline=True) as page:
        words = [[list(map(str, part)) for part in (each.failures(), each.slow)] for each in broken]
        answers = page.page.evaluate(PLANS, words)

    assert made.left_out == {}
    plans = [each for each in answers if each["kind"] == "plan"]
    assert len(plans) == len(broken) == len(answers) / 2
    for each, plan in zip(broken, plans, strict=True):
        check_trees(each, plan)
        check_slow_links(each, plan)


def check_trees(mesh: Mesh, plan: dict[str, Any]) -> None:
    """Check that each part is a tree over the live chips, and that loads are those of the trees."""
    n_ports = 2 * len(mesh.shape)
    number = {chip: place for place, chip in enumerate(Mesh(mesh.shape, mesh.wrap).live)}
    after = {
        number[chip] * n_ports + port: number[mesh.live[there]]
        for rank, chip in enumerate(mesh.live)
        for port, there in enumerate(mesh.neighbor_ranks[rank].tolist())
        if there >= 0
    }
    stranded = set(map(tuple, plan["stranded"]))
    assert len(stranded) == mesh.n_live - plan["ranks"]
    summing = {number[chip] for chip in mesh.live if chip not in stranded}
    (flow,) = plan["flows"]
    used = set()
    for part in flow["parts"]:
        next_of = {channel // n_ports: after[channel] for channel in part}  # fails if not alive
        assert len(next_of) == len(part) == plan["ranks"] - 1
        (root,) = summing - set(next_of)
        for chip in next_of:
            at, steps = chip, 0
            while at != root:
                at, steps = next_of[at], steps + 1
                assert steps < mesh.n_chips
        used.update(part)
    loaded = {channel for channel, load in enumerate(plan["loads"]) if load > 0}
    assert used <= loaded <= set(after)


def check_slow_links(mesh: Mesh, plan: dict[str, Any]) -> None:
    """Check that a slow link carries less than others: the plan was turned onto this link."""
    n_ports = 2 * len(mesh.shape)
    for rank, port in np.argwhere(mesh.port_speeds < 1).tolist():
        number = int(np.ravel_multi_index(mesh.live[rank], mesh.shape))
        assert plan["loads"][number * n_ports + port] <= 0.26 * plan["max_load"]


@pytest.mark.parametrize("layer", [{"tile": "1x2"}, {"collective": "all-to-all"}])
def test_tiles_and_an_all_to_all_are_kept_for_every_hole(
    layer: dict[str, str], tmp_path: Path, chromium: Any
) -> None:
    words = {"mesh": "2x4", "wrap": "none", "payload": "1MB", "fabric": "reference"}
    question = question_of({**words, "algorithm": "auto", **layer})
    made = kept_page(question, most_bytes=8_000_000, progress=no_progress)
    path = tmp_path / "page.html"
    path.write_text(made.text, encoding="utf-8")
    holes = ["0,0", "1,3", "1,2"]

    with browsed(chromium, path.as_uri(), offline=True) as page:
        page.answered()
        assert next(iter(layer.values())) in page.text("h1")
        answers = page.page.evaluate(PLANS, [[[hole], []] for hole in holes])
        page.page.select_option("#show", "heat")
        page.wait_until("document.querySelector('#legend').textContent.includes('alone')")

    assert made.left_out == {}
    plans = [each for each in answers if each["kind"] == "plan"]
    for hole, plan in zip(holes, plans, strict=True):
        if "tile" not in layer:
            assert plan["algorithm"] in {"pairs", "relays"}
            continue
        dead = int(np.ravel_multi_index(tuple(map(int, hole.split(","))), (2, 4)))
        tiling = plan["tiling"]
        assert tiling["tile_of"][dead] == -1
        check_tiles(np.array(tiling["tile_of"]), np.array(tiling["colour_of"]))


def check_tiles(tile_of: NDArray[np.int64], colour_of: NDArray[np.int64]) -> None:
    """Check that the chips of each tile are neighbours and have all colours."""
    assert set(tile_of) == {-1, 0, 1, 2}
    for tile in range(3):
        chips = np.flatnonzero(tile_of == tile)
        assert sorted(colour_of[chips]) == [0, 1]
        rows, columns = np.divmod(chips, 4)
        assert rows.max() - rows.min() + columns.max() - columns.min() == 1


def test_what_has_no_room_is_counted_and_the_file_keeps_below_the_limit() -> None:
    whole = kept("6x6")
    most_bytes = len(kept("1x1").text) + 10_000
    part = kept("6x6", most_bytes=most_bytes)

    assert sum(whole.holes.values()) == 9 + 6 + 36 + 60 + 60
    assert len(part.text) < most_bytes + 500
    assert part.holes["board"] == 9
    assert part.left_out["link"] > 0
    assert sum(part.holes.values()) + sum(part.left_out.values()) == sum(whole.holes.values())
    with pytest.raises(InputError, match="--export-size"):
        kept("6x6", most_bytes=10_000)


def test_a_search_falls_back_on_trees_where_the_algorithm_does_not_support_a_hole(
    tmp_path: Path, chromium: Any
) -> None:
    words = {"mesh": "2x3", "wrap": "none", "fail": [], "payload": "1MB", "fabric": "reference"}
    question = question_of({**words, "algorithm": "ring-1d"})
    made = kept_page(question, most_bytes=8_000_000, search=True, progress=no_progress)
    path = tmp_path / "page.html"
    path.write_text(made.text, encoding="utf-8")

    with browsed(chromium, path.as_uri(), offline=True) as page:
        page.wait_until("document.querySelectorAll('#table tbody tr').length > 4")
        answers = page.page.evaluate(PLANS, [[[], []], [["0,0"], []]])

    assert [each["algorithm"] for each in answers if each["kind"] == "plan"] == ["ring-1d", "trees"]


def test_it_holds_nothing_that_needs_a_network() -> None:
    text = kept("2x2").text

    assert "Content-Security-Policy" in text
    assert not re.search(r'(src|href)="(?!data:)', text)
    assert format_wrap((False, False)) in text
    assert format_shape((2, 2)) in text


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--export", "page.pdf"], "page.pdf"),
        (["--export", "no/such/dir/page.html", "--coordinator", "a:1"], "--coordinator"),
        (["--export", "page.html", "--export-size", "many"], "many"),
        (["--search"], "--search is for --export"),
        (["--export", "page.html", "--mesh", "99x99"], "4096"),
        (["--export", "page.html", "--mesh", "4x4", "--tile", "5x5"], "take a smaller tile"),
        (["--export", "page.html", "--collective", "all-gather"], "all-to-all"),
        (["--tile", "2x2", "--coordinator", "a:1"], "--tile"),
    ],
)
def test_bad_options_are_one_line(
    options: list[str],
    why: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_line(["explore", *options]) == 2
    assert why in capsys.readouterr().err
    assert not list(tmp_path.iterdir())

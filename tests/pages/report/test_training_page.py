"""The report of a training run: whole, self-contained, bounded in size, true to the events."""

import math
from functools import lru_cache
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend.membership.events import (
    ConnectionRefused,
    FaultHappened,
    SampleCounts,
    StateRestored,
    TimedEvent,
)
from meshmend.pages.draw.chart import Flag, decimated, flags, ticks_inside
from meshmend.pages.report.training_page import MAX_LANES, lanes, training_page
from meshmend.pages.report.training_run import training_run
from meshmend.topology.mesh import Mesh
from strategies import broken_meshes
from training_events import (
    all_chips,
    at,
    chips_without,
    end,
    generation,
    lines,
    long_run,
    short_run,
    start,
    step,
)

FULL = chips_without("4x4")


class _Outline(HTMLParser):
    """Checks that tags nest, and gathers what a page would load and what it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.classes: list[str] = []
        self.words: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._seen(tag, attrs)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._seen(tag, attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def _seen(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loads += [name for name, _ in attrs if name in {"src", "href", "xlink:href"}]
        self.classes += [value or "" for name, value in attrs if name == "class"]


def outline_of(page: str) -> _Outline:
    outline = _Outline()
    outline.feed(page)
    outline.close()
    assert not outline.open
    assert not outline.loads
    assert outline.tags.isdisjoint({"script", "link", "img", "iframe", "object"})
    assert "url(" not in page
    assert "@import" not in page
    return outline


def page_of(*events: TimedEvent) -> str:
    return training_page(training_run(lines(events)))


@lru_cache
def short_page() -> str:
    return page_of(*short_run())


def test_page_tells_what_the_run_did() -> None:
    outline = outline_of(short_page())

    text = " ".join(outline.words)
    for words in (
        "Training tiny ResNet on 4x4", "2.26 → 0.236", "6,400", "0 lost, 0 repeated", "equal",
        "16 → 12 → 16", "accuracy", "kill 2x2@0,2", "repair 2x2@0,2", "0.41 s", "1.70 s",
        "Chip (0, 2) hung up. Lost 2x2@0,2.", "Joined 2x2@0,2.",
        "board 0,2", "samples per second", "All 10 events but the steps", "checkpoint of step 50",
    ):  # fmt: skip
        assert words in text
    assert "Generation 2: 12 chips" in outline.words
    assert outline.classes.count("flag") == 4  # two faults in each of two charts
    assert outline.classes.count("chip failed") == 4
    assert outline.classes.count("fewer") == 1
    assert outline.classes.count("lane") == 3 + 3  # three boards whole, one in three pieces


def test_page_of_a_script_of_ones_own_does_not_guess_its_number_of_steps() -> None:
    def steps_figure(n_steps: int) -> str:
        page = page_of(start(steps=n_steps), generation(1, 1, all_chips((4, 4))), step(2, 7, 0.5))
        return " ".join(outline_of(page).words).partition("training loss")[0]

    assert "steps 7 of 100" in steps_figure(100)
    assert "steps 7 of" not in steps_figure(0)


def test_page_of_a_long_run_stays_small_and_shows_every_fault() -> None:
    page = page_of(*long_run())

    assert len(page) < 500_000
    text = " ".join(outline_of(page).words)
    assert "All 60 one by one" in text
    assert "training goes on without it" in text
    assert "different meshes, the most used first" in text


def test_page_of_a_large_mesh_that_changes_often_stays_below_two_megabytes() -> None:
    whole = all_chips((32, 32))
    changes = [
        generation(float(n), n, whole[:at] + whole[at + 8 :], step=n)
        for n, at in enumerate(range(0, 1000, 20), 1)
    ]

    page = page_of(start(mesh="32x32"), *changes, step(60.0, 1, 1.0, chips=1016))

    assert len(page) < 2_000_000
    assert "43 rarer meshes not shown" in " ".join(outline_of(page).words)


def test_page_of_thousands_of_faults_stays_small_and_says_what_it_leaves_out() -> None:
    """Eight thousand took five megabytes, most of it flags that lay on each other."""
    died = [at(float(n), FaultHappened("a worker died", n, None, ((0, 0),))) for n in range(9000)]

    page = page_of(start(), generation(1.0, 1, FULL), *died, step(9001.0, 1, 1.0))

    text = " ".join(outline_of(page).words)
    assert "The first 2000 of 9000 one by one" in text
    assert "... and 7000 more; events.jsonl has them all" in text
    assert len(page) < 2_500_000


@pytest.mark.parametrize("n_events", [1, 2, 3, 40])
def test_page_of_a_run_cut_short_is_whole_and_says_so(n_events: int) -> None:
    text = " ".join(outline_of(page_of(*short_run()[:n_events])).words)

    assert "was stopped or still runs" in text
    assert "nan" not in text


def test_page_shows_words_of_others_as_words() -> None:
    evil = "<script>alert(1)</script>"
    fault = at(1, FaultHappened(evil))
    refused = at(1, ConnectionRefused(who=evil, why=evil))

    page = page_of(start(model=evil), generation(0, 1, FULL, why=evil), fault, refused)

    assert evil not in page
    assert sum(words.count(evil) for words in outline_of(page).words) >= 6


def test_page_of_diverged_replicas_and_lost_samples_is_red() -> None:
    samples = SampleCounts(used=64, lost=3, repeated=0)
    bad = end(2, 1, math.nan, math.nan, replicas_equal=False, samples=samples)

    outline = outline_of(page_of(start(), generation(0, 1, FULL), step(1, 1, math.nan), bad))

    assert outline.classes.count("value bad") == 2
    assert {"differ", "3 lost, 0 repeated"} <= set(outline.words)


def test_waiting_chips_and_cut_links_are_named() -> None:
    waiting = {"waiting": FULL[12:], "cut": ("link:0,0-0,1",), "step": 5, "why": "cut off"}

    page = page_of(start(), generation(0, 1, FULL), generation(3, 2, FULL[:12], **waiting))

    text = " ".join(outline_of(page).words)
    assert "Waiting: 1x4@3,0. Without link:0,0-0,1." in text
    assert "alive, waiting" not in text  # each board still has chips at work
    assert "partly at work" in text


@given(broken_meshes())
def test_lanes_cover_every_chip_once_or_there_are_none(mesh: Mesh) -> None:
    own = lanes(mesh)

    assert len(own) <= MAX_LANES
    chips = [chip for lane in own for chip in lane.chips]
    assert not own or sorted(chips) == all_chips(mesh.shape)


@pytest.mark.parametrize(
    ("shape", "n_lanes", "name"),
    [((4, 4), 4, "board 0,0"), ((8, 16), 32, "board 0,0"), ((16, 16), 32, "host 0,0"),
     ((4,), 4, "chip 0"), ((2, 2, 2), 8, "chip 0,0,0"), ((32, 32), 0, "")],
)  # fmt: skip
def test_lanes_are_the_parts_that_fail_together(
    shape: tuple[int, ...], n_lanes: int, name: str
) -> None:
    own = lanes(Mesh(shape))

    assert len(own) == n_lanes
    assert not own or own[0].name == name


@pytest.mark.parametrize(
    ("shape", "tile", "n_lanes"), [((4, 4), "1x2", 8), ((4, 4, 2), "2x2x1", 8), ((8, 8), "1x1", 16)]
)
def test_in_a_job_with_tiles_lanes_are_tiles(
    shape: tuple[int, ...], tile: str, n_lanes: int
) -> None:
    own = lanes(Mesh(shape), tile)

    assert len(own) == n_lanes
    assert own[0].name.startswith("tile 0,0") or n_lanes == 16  # boards, where tiles are too many
    assert sorted(chip for lane in own for chip in lane.chips) == all_chips(shape)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=300), st.integers(4, 40))
def test_decimation_keeps_ends_and_extremes(values: list[float], n_most: int) -> None:
    y = np.array(values)
    x = np.arange(len(y), dtype=np.float64)

    kept_x, kept_y = decimated(x, y, n_most)

    assert len(kept_x) <= n_most
    assert (np.diff(kept_x) > 0).all()
    assert (kept_x[0], kept_x[-1]) == (x[0], x[-1])
    assert (kept_y.min(), kept_y.max()) == (y.min(), y.max())
    assert (y[kept_x.astype(int)] == kept_y).all()


@given(st.floats(-1e6, 1e6), st.floats(1e-6, 1e6), st.integers(3, 15))
def test_ticks_lie_inside_the_range_and_are_few(low: float, span: float, n_most: int) -> None:
    ticks = ticks_inside(low, low + span, n_most)

    assert len(ticks) <= n_most
    slack = 1e-6 * (abs(low) + span)
    assert all(low - slack <= tick <= low + span + slack for tick in ticks)


@given(st.lists(st.floats(0, 900), max_size=80))
def test_every_flag_has_its_line_and_numbers_do_not_touch(places: list[float]) -> None:
    own = [Flag(x, number, "#c8321e", "kill") for number, x in enumerate(sorted(places), 1)]

    marks = "".join(flags(own, 0, 100))

    assert marks.count('class="flag"') == len(places)
    boxes = [part.split('"') for part in marks.split("<rect x=")[1:]]
    edges = [(float(part[1]), float(part[1]) + float(part[5])) for part in boxes]
    assert all(one[1] <= other[0] + 0.02 for one, other in pairwise(edges))


def test_the_page_tells_what_was_redone_what_is_wrong_and_what_was_not_checked() -> None:
    ending = end(
        *(2, 1, 1.0, 1.0),
        replicas_equal=None,
        redone=2,
        restores=(StateRestored(step=15, lost=17),),
        history_faults=("two histories <b>",),
        unchecked=("the ledger of chip (0, 1) ends at step 1",),
    )

    page = training_page(training_run(lines([start(), step(1, 1, 1.0), ending])))

    assert "the state after step 17 was lost; 2 steps were done again after step 15" in page
    assert "two histories &lt;b&gt;" in page
    assert "the ledger of chip (0, 1) ends at step 1" in page
    assert "not checked" in page

"""The paper's tables again: what the prediction may know, its algebra, and how it is shown."""

import json
import re
from dataclasses import replace
from functools import lru_cache, partial
from html.parser import HTMLParser
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import meshmend.lab.paper.reproduction
from meshmend.cli.paper import reproduce_command
from meshmend.errors import InputError
from meshmend.lab.paper.paper_tables import BERT, PAPER_ROWS, RESNET, PaperRow, PaperWorkload
from meshmend.lab.paper.prediction import (
    PLACES,
    Batch,
    Cell,
    Prediction,
    Setting,
    StepTiming,
    broken_mesh,
    predicted,
    timing,
)
from meshmend.lab.paper.reproduction import (
    Reproduction,
    calibrated_links,
    printed_growth,
    reproduction,
)
from meshmend.lab.paper.reproduction_page import reproduction_page
from meshmend.planning.target import Question
from meshmend.topology.fabric import fabric
from meshmend.topology.mesh import Mesh

TPU = fabric("tpu-v3")
SMALL = PaperWorkload("Small", 400_000, "made up")
STAND_INS = (
    PaperRow(SMALL, (6, 6), 2.0, 2.1, 0.95, 0.10, 0.14, note="Made up & small."),
    PaperRow(SMALL, (6, 12), 1.0, 1.1, 0.94, 0.19, 0.22),
)
shares = st.floats(0.01, 0.6)
times = st.floats(1e-6, 1.0)
batches: st.SearchStrategy[Batch] = st.sampled_from(["per chip", "global"])


@lru_cache
def stand_in(quick: bool = False) -> Reproduction:
    return reproduction(TPU, STAND_INS, quick=quick)


def prediction_of(row: PaperRow, full_s: float, broken_s: float, batch: Batch) -> Prediction:
    return Prediction(
        row, Setting(TPU, batch=batch), StepTiming(full_s, 1), StepTiming(broken_s, 1)
    )


@pytest.mark.parametrize("row", PAPER_ROWS, ids=lambda row: f"{row.workload.name}-{row.shape}")
def test_printed_efficiency_follows_from_the_printed_times_or_the_row_says_so(
    row: PaperRow,
) -> None:
    """The times are printed to a hundredth of a minute: about 0.9 % of a ratio of two."""
    follows = abs(row.efficiency_of_times - row.relative_efficiency) < 0.009

    assert follows == (row.note == "")


def test_the_row_that_does_not_follow_is_bert_on_512_chips() -> None:
    (row,) = (row for row in PAPER_ROWS if row.note)

    assert (row.workload, row.full_chips, row.broken_chips) == (BERT, 512, 504)
    assert round(row.efficiency_of_times, 3) == 1.005


def test_table_2_alone_gives_an_efficiency_by_hand() -> None:
    """A step of 10 with 1 of allreduce becomes one of 11.25 with 2.25: 9 are 80 % of it."""
    row = replace(PAPER_ROWS[0], full_overhead=0.1, broken_overhead=0.2)

    assert row.efficiency_of_overheads == pytest.approx(10 / 11.25)


def test_payloads_are_the_bytes_of_the_gradients() -> None:
    assert RESNET.payload_bytes == 102_228_128
    assert BERT.payload_bytes == 672_452_216


def test_prediction_by_hand() -> None:
    """1 ms is a tenth of a step, so a step computes 9 ms; 2 ms then are 2 of 11."""
    row = replace(PAPER_ROWS[0], full_overhead=0.1)

    same_per_chip = prediction_of(row, 1e-3, 2e-3, "per chip")
    assert same_per_chip.compute_s == pytest.approx(9e-3)
    assert same_per_chip.overhead.predicted == pytest.approx(2 / 11)
    assert same_per_chip.efficiency.predicted == pytest.approx(10 / 11)
    assert same_per_chip.minutes.predicted == pytest.approx(1.80 * 512 / 504 * 11 / 10)
    same_global = prediction_of(row, 1e-3, 2e-3, "global")
    assert same_global.overhead.predicted == pytest.approx(2 / (2 + 9 * 512 / 504))
    assert same_global.minutes.predicted == pytest.approx(1.80 * (2 + 9 * 512 / 504) / 10)


@given(shares, shares, times, times, batches)
def test_no_fault_tolerant_cell_enters_a_prediction(
    full_share: float, broken_share: float, full_s: float, broken_s: float, batch: Batch
) -> None:
    row = replace(PAPER_ROWS[0], full_overhead=full_share)
    other = replace(row, broken_overhead=broken_share, broken_minutes=99.0, relative_efficiency=0.1)

    ours, theirs = (prediction_of(each, full_s, broken_s, batch) for each in (row, other))

    assert ours.overhead.predicted == theirs.overhead.predicted
    assert ours.minutes.predicted == theirs.minutes.predicted
    assert ours.efficiency.predicted == theirs.efficiency.predicted


@given(shares, times, times, st.floats(0.1, 10), batches)
def test_only_the_ratio_of_the_two_times_enters_a_prediction(
    share: float, full_s: float, broken_s: float, factor: float, batch: Batch
) -> None:
    row = replace(PAPER_ROWS[0], full_overhead=share)

    one = prediction_of(row, full_s, broken_s, batch)
    other = prediction_of(row, factor * full_s, factor * broken_s, batch)

    assert one.overhead.predicted == pytest.approx(other.overhead.predicted)
    assert one.minutes.predicted == pytest.approx(other.minutes.predicted)


@given(shares, times)
def test_a_hole_that_costs_no_time_costs_no_efficiency(share: float, time_s: float) -> None:
    row = replace(PAPER_ROWS[0], full_overhead=share)

    same = prediction_of(row, time_s, time_s, "per chip")

    assert same.overhead.predicted == pytest.approx(share)
    assert same.efficiency.predicted == pytest.approx(1)


def test_differences_are_predicted_less_printed() -> None:
    cell = Cell(printed=2.0, predicted=1.9, full_mesh=1.8)

    assert cell.difference == pytest.approx(-0.1)
    assert cell.relative_difference == pytest.approx(-0.05)


@pytest.mark.parametrize(
    ("place", "hole"),
    [
        ("middle", "4x2@6,14"),
        ("left edge", "4x2@6,0"),
        ("top edge", "4x2@0,14"),
        ("corner", "4x2@0,0"),
        ("turned", "2x4@6,14"),
    ],
)
def test_holes_lie_where_their_place_says(place: str, hole: str) -> None:
    assert broken_mesh((16, 32), place) == Mesh((16, 32)).without(hole)
    assert place in PLACES


def test_broken_mesh_refuses_an_unknown_place() -> None:
    with pytest.raises(InputError, match=r"a place needs one of middle, .* but got 'moon'"):
        broken_mesh((16, 32), "moon")


def test_growth_between_meshes_by_hand() -> None:
    """A tenth and a fifth of a step are 1/9 and 1/4 of its compute time, which halves."""
    small = replace(PAPER_ROWS[0], full_overhead=0.1)
    large = replace(PAPER_ROWS[1], full_overhead=0.2)

    assert printed_growth(small, large) == pytest.approx((1 / 4) / 2 / (1 / 9))


@pytest.mark.parametrize("hop_latency_s", [1e-6, 2.5e-6, 6e-6])
def test_calibration_finds_the_hop_latency_behind_the_shares(hop_latency_s: float) -> None:
    """Shares made up from simulated times give back the latency that they were made with."""
    hidden = TPU.with_(hop_latency_s=hop_latency_s)
    small, large = STAND_INS
    small_s, large_s = (
        timing(Question(Mesh(row.shape), float(SMALL.payload_bytes), hidden), "row-pair").time_s
        for row in STAND_INS
    )
    compute_s = 9 * small_s
    small = replace(small, full_overhead=0.1)
    large = replace(large, full_overhead=large_s / (large_s + compute_s / 2))

    links = calibrated_links(small, large, TPU, "row-pair")

    assert links.printed == pytest.approx(large_s / small_s)
    assert links.printed_low < links.printed < links.printed_high
    assert links.fabric is not None
    assert links.fabric.hop_latency_s == pytest.approx(hop_latency_s, abs=0.26e-6)


def test_calibration_says_so_where_no_latency_fits() -> None:
    small, large = STAND_INS

    links = calibrated_links(small, replace(large, full_overhead=0.9), TPU, "row-pair")

    assert links.fabric is None
    assert links.summary()["hop_latency_s"] is None


def test_readings_differ_from_the_main_one_in_one_point_each() -> None:
    result = stand_in()

    for reading in result.readings:
        setting = reading.predictions[0].setting
        changed = [
            name
            for name in Setting.__dataclass_fields__
            if getattr(setting, name) != getattr(result.setting, name)
        ]
        assert len(changed) == 1, reading.words


def test_a_reading_like_another_takes_its_slices_for_what_both_run() -> None:
    setting = Setting(TPU)
    row = STAND_INS[0]
    main = predicted(row, setting)
    marked = replace(main, full=StepTiming(1.0, 3), broken=StepTiming(1.0, 5))

    corner = predicted(row, replace(setting, place="corner"), like=marked)
    assert (corner.full.slices, corner.broken.slices) == (3, 5)
    ring = predicted(row, replace(setting, full_algorithm="ring-1d"), like=marked)
    alone = predicted(row, replace(setting, full_algorithm="ring-1d"))
    assert (ring.full, ring.broken.slices) == (alone.full, 5)
    serial = predicted(row, replace(setting, pipelined=False), like=marked)
    assert (serial.full.slices, serial.broken.slices) == (1, 1)


def test_best_of_ours_is_never_slower_than_the_papers_scheme() -> None:
    result = stand_in()

    for row, our in zip(result.paper, result.ours, strict=True):
        assert our.broken.time_s <= row.broken.time_s
        assert our.full == row.full


def test_quick_run_has_the_same_tables_and_nothing_else() -> None:
    full, quick = stand_in(), stand_in(quick=True)

    assert quick.paper == full.paper
    assert quick.ours == full.ours
    assert not quick.readings
    assert quick.links is None


class _Outline(HTMLParser):
    """Checks that tags nest, and gathers what a page would load and what it shows."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []
        self.n_pictures = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [name for name, _ in attrs if name in {"src", "href", "xlink:href"}]
        self.n_pictures += tag == "svg"
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("quick", [False, True])
def test_page_is_whole_and_loads_nothing(quick: bool) -> None:
    page = reproduction_page(stand_in(quick))
    outline = _Outline()

    outline.feed(page)

    assert not outline.open
    assert not outline.loads
    assert outline.n_pictures == 12  # two charts, ten figures
    assert "Made up &amp; small." in page
    assert ("hole in a corner" in page) != quick


@pytest.fixture
def small_command(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    """The command on the stand-in rows."""
    module = meshmend.lab.paper.reproduction
    monkeypatch.setattr(module, "reproduction", partial(reproduction, rows=STAND_INS))
    app = typer.Typer()
    app.command()(reproduce_command)
    return app


def test_command_prints_every_cell_and_the_note(small_command: typer.Typer) -> None:
    result = CliRunner().invoke(small_command, [], catch_exceptions=False)

    assert result.exit_code == 0
    for row in stand_in().paper:
        assert f"{100 * row.overhead.predicted:.2f}" in result.stdout
        assert f"{row.minutes.difference:+.3f}" in result.stdout
        assert f"{row.efficiency.predicted:.3f}" in result.stdout
    assert "* Small on 36 chips: Made up & small." in result.stdout
    assert "of 4 cells of table 1 lie within the 2% by which the paper's runs vary" in result.stdout


def test_command_prints_json_and_writes_the_page(
    small_command: typer.Typer, tmp_path: Path
) -> None:
    page = tmp_path / "deep" / "page.html"

    result = CliRunner().invoke(
        small_command, ["--json", "--quick", "-o", str(page)], catch_exceptions=False
    )

    document = json.loads(result.stdout)
    assert result.stdout.count("\n") == 1
    assert document == stand_in(quick=True).summary()
    assert document["paper_scheme"][0]["overhead"]["printed"] == 0.14
    assert document["notes"] == ["Made up & small."]
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.slow
def test_page_of_the_docs_shows_what_the_command_prints() -> None:
    """All figures of docs/reproduction.md stand in its block, which is the command's output."""
    docs = Path(__file__).parents[3] / "docs" / "reproduction.md"
    match = re.search(r"```text\n(fabric .*?)```", docs.read_text(encoding="utf-8"), re.DOTALL)
    assert match is not None
    app = typer.Typer()
    app.command()(reproduce_command)

    result = CliRunner().invoke(app, [], catch_exceptions=False)

    assert result.stdout == match[1], "run meshmend reproduce and paste it into the page"

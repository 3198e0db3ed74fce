"""The page of a running job: who may watch it, and a real job that is watched through a kill."""

import json
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from browsing import Browsed, browsed, explorer, fetch, live_job
from meshmend.cli.main import run_line
from meshmend.membership.status_client import StatusQuestion
from meshmend.pages.explore.live_feed import LiveFeed
from ports import free_port
from served_coordinator import served_coordinator
from training_script import training_script
from waiting import HANG_S, until

SECRET = "only the chips of this test know"


def first_news(address: str) -> dict[str, object]:
    with urllib.request.urlopen(address + "live", timeout=HANG_S) as stream:
        while True:
            news: dict[str, object] = json.loads(stream.readline() or b"{}")
            if news.get("kind") == "status":
                return news


def test_a_coordinator_is_watched_and_takes_no_faults(tmp_path: Path) -> None:
    with (
        served_coordinator("2x3", SECRET.encode()) as (host, port),
        explorer(tmp_path, "--coordinator", f"{host}:{port}", MESHMEND_SECRET=SECRET) as address,
    ):
        start = json.loads(fetch(address + "start")[1])
        news = first_news(address)
        body = json.dumps({"fault": "kill 0,0"}).encode()
        with pytest.raises(urllib.error.HTTPError, match="400") as refused:
            urllib.request.urlopen(address + "fault", data=body, timeout=HANG_S)
        why = json.load(refused.value)["why"]
        refused.value.close()

    assert start["live"]
    assert not start["allow_faults"]
    assert start["question"]["mesh"] == "2x3"
    assert news["phase"] == "gathering"
    assert news["members"] == []
    assert "--allow-faults" in why


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--coordinator", "127.0.0.1:1"], "nobody answers"),
        (["--coordinator", "nowhere"], "--coordinator needs HOST:PORT"),
        (["--coordinator", "127.0.0.1:1", "--mesh", "4x4"], "leave --mesh, --fail, --slow"),
        (["--mesh", "0x4"], "positive extents"),
        (["--mesh", "100x100"], "at most 4096 chips"),
        (["--algorithm", "magic"], "there is no algorithm 'magic'"),
        (["--port", "1"], "cannot listen on port 1"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_exit_code_2(
    options: list[str],
    why: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("starlette", reason="needs: pip install 'meshmend[explore]'")
    monkeypatch.setenv("MESHMEND_SECRET", SECRET)
    if "--port" in options and os.geteuid() == 0:
        pytest.skip("root may listen on any port")

    assert run_line(["explore", *options]) == 2

    said = capsys.readouterr().err
    assert why in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (
            ["explore"],
            "meshmend explore needs starlette, but it is not installed; run: pip install",
        ),
        (["train", "--explore"], "--explore needs starlette, but it is not installed"),
    ],
)
def test_without_the_web_server_one_line_says_what_to_install(
    command: list[str],
    why: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "starlette", None)

    assert run_line(command) == 2
    assert why in capsys.readouterr().err


def test_faults_need_a_page_and_a_page_an_elastic_job(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_line(["train", "--allow-faults"]) == 2
    assert "--allow-faults needs --explore" in capsys.readouterr().err
    assert run_line(["run", "--mesh", "2x2", "--explore", "script.py"]) == 2
    assert "need --elastic" in capsys.readouterr().err


def test_a_fault_of_several_lines_is_refused() -> None:
    injected: list[str] = []
    feed = LiveFeed(StatusQuestion(None, (), b""), injected.append)

    with pytest.raises(Exception, match="one line"):
        feed.inject({"fault": "kill 0,0\nkill 0,1"})
    feed.inject({"fault": "kill 0,0"})

    assert injected == ["kill 0,0"]


# Runs in the page: what a browser does when its tab is hidden, or seen again.
HIDE = """(hidden) => {
  Object.defineProperty(document, "hidden", { value: hidden, configurable: true });
  document.dispatchEvent(new Event("visibilitychange"));
}"""
ENDLESS = ("--steps", "1000000", "--save-every", "0")


@pytest.fixture(scope="module")
def scripted(chromium: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browsed]:
    """The live page of a script of our own under `run --elastic`, on 2x3 chips."""
    folder = tmp_path_factory.mktemp("a job")
    script = folder / "the script.py"
    script.write_text(training_script("batch=12, steps=1000000", "time.sleep(0.02)"))
    options = ["--elastic", "--mesh", "2x3", "--set", "timing.heartbeat_timeout=3"]
    run = ["run", *options, "--explore", "--allow-faults", str(script)]
    with live_job(folder, *run) as address, browsed(chromium, address) as found:
        until(lambda: "training" in found.text("#job-title"))
        until(lambda: chips_that_train(found) == "6")
        yield found


def chips_that_train(found: Browsed) -> str:
    """Return the figure on the page, or an empty text while there is none."""
    after = found.text("#job-figures").partition("chips that train")[2].split()
    return after[0] if after else ""


def step_of(found: Browsed) -> int:
    return int(found.text("#job-figures").split("step", 1)[1].split()[0])


def repair(found: Browsed, row: float, column: float) -> None:
    """Repair by a click what failed, and wait until all six chips train without a hole."""
    found.page.select_option("#fault", "repair")
    found.click_chip((2, 3), row, column)
    until(lambda: found.page.input_value("#fail") == "")
    until(lambda: chips_that_train(found) == "6")


def test_a_chip_that_is_killed_by_a_click_leaves_and_comes_back(scripted: Browsed) -> None:
    page = scripted.page
    page.check("input[name=tool][value=chip]")
    page.select_option("#fault", "kill")

    scripted.click_chip((2, 3), 0, 0)

    until(lambda: page.input_value("#fail") == "0,0")
    until(lambda: chips_that_train(scripted) == "5")
    assert "chip (0, 0) is gone" in scripted.text("#job-events")
    until(lambda: page.locator("#job-loss polyline").count())
    repair(scripted, 0, 0)


def test_a_link_that_is_cut_by_a_click_is_planned_around_while_all_chips_train(
    scripted: Browsed,
) -> None:
    page = scripted.page
    page.check("input[name=tool][value=link]")
    page.select_option("#fault", "kill")  # a link has one way to fail: it is cut

    scripted.click_chip((2, 3), 0, 1.5)

    until(lambda: page.input_value("#fail") == "link:0,1-0,2")
    until(lambda: "failed link" in scripted.text("#legend"))
    until(lambda: chips_that_train(scripted) == "6")
    before = step_of(scripted)
    until(lambda: step_of(scripted) > before + 5)
    repair(scripted, 0, 1.5)


def test_a_hidden_page_takes_nothing_from_the_job_and_catches_up_when_it_is_seen(
    scripted: Browsed,
) -> None:
    page = scripted.page
    with page.expect_event("requestfailed", lambda request: request.url.endswith("/live")):
        page.evaluate(HIDE, True)
    before = step_of(scripted)

    with page.expect_request("**/live"):
        page.evaluate(HIDE, False)

    until(lambda: step_of(scripted) > before)
    assert "chip (0, 0) is gone" in scripted.text("#job-events")  # the past is told again


@pytest.mark.slow
def test_a_chip_that_is_hung_by_a_click_is_left_behind(scripted: Browsed) -> None:
    page = scripted.page
    page.check("input[name=tool][value=chip]")
    page.select_option("#fault", "hang")

    scripted.click_chip((2, 3), 1, 2)

    until(lambda: page.input_value("#fail") == "1,2")
    until(lambda: chips_that_train(scripted) == "5")
    repair(scripted, 1, 2)


@pytest.mark.slow
def test_a_page_that_opens_late_shows_what_happened_before(
    scripted: Browsed, chromium: Any
) -> None:
    page = scripted.page
    page.check("input[name=tool][value=chip]")
    page.select_option("#fault", "kill")
    scripted.click_chip((2, 3), 1, 0)
    until(lambda: chips_that_train(scripted) == "5")
    repair(scripted, 1, 0)

    with browsed(chromium, page.url) as late:
        until(lambda: "chip (1, 0) is gone" in late.text("#job-events"))
        until(lambda: late.page.locator("#job-loss polyline").count())
        until(lambda: chips_that_train(late) == "6")


@pytest.mark.slow
def test_a_page_says_that_its_server_is_away_and_that_another_took_its_place(
    tmp_path: Path, chromium: Any
) -> None:
    with served_coordinator("2x3", SECRET.encode()) as (host, port), ExitStack() as pages:
        options = ["--coordinator", f"{host}:{port}", "--port", str(free_port())]
        with explorer(tmp_path, *options, MESHMEND_SECRET=SECRET) as address:
            page = pages.enter_context(browsed(chromium, address))
            until(lambda: "gathering" in page.text("#job-title"))

        until(lambda: "server is away" in page.text("#job-title"))
        with explorer(tmp_path, *options, MESHMEND_SECRET=SECRET):
            until(lambda: "started anew" in page.text("#job-title"))
        page.problems.clear()  # a browser logs every request that is refused


@pytest.mark.slow
def test_two_pages_of_one_job_show_the_same_fault(scripted: Browsed, chromium: Any) -> None:
    with browsed(chromium, scripted.page.url) as other:
        until(lambda: chips_that_train(other) == "6")
        other.page.check("input[name=tool][value=chip]")
        other.page.select_option("#fault", "kill")

        other.click_chip((2, 3), 0, 2)

        for page in (scripted, other):
            until(lambda page=page: page.page.input_value("#fail") == "0,2")  # type: ignore[misc]
        repair(other, 0, 2)
        until(lambda: chips_that_train(scripted) == "6")


@pytest.mark.slow
def test_training_is_watched_through_the_kill_and_the_repair_of_a_board(
    tmp_path: Path, chromium: Any
) -> None:
    train = ["train", "--mesh", "2x4", *ENDLESS, "--explore", "--allow-faults"]
    with live_job(tmp_path, *train) as address, browsed(chromium, address) as found:
        page = found.page
        until(lambda: "training" in found.text("#job-title"))
        until(lambda: page.locator("#job-loss polyline").count())
        page.check("input[name=tool][value=board]")

        found.click_chip((2, 4), 0, 3)

        until(lambda: page.input_value("#fail") == "2x2@0,2")
        until(lambda: chips_that_train(found) == "4")
        assert page.locator("#job-events [data-event=left]").count() >= 4
        page.select_option("#fault", "repair")
        found.click_chip((2, 4), 0, 3)
        until(lambda: page.input_value("#fail") == "")
        until(lambda: chips_that_train(found) == "8")


@pytest.mark.slow
def test_the_page_of_a_job_without_allow_faults_has_no_fault_to_click(
    tmp_path: Path, chromium: Any
) -> None:
    train = ["train", "--mesh", "2x2", *ENDLESS, "--explore"]
    with live_job(tmp_path, *train) as address, browsed(chromium, address) as found:
        until(lambda: chips_that_train(found) == "4")
        assert not found.page.is_visible("#fault")
        assert found.page.locator("input[name=tool]:visible").count() == 1  # it looks

        found.click_chip((2, 2), 0, 0)

        assert found.text("#cursor").startswith("Chip 0,0: training")

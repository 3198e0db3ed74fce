"""The page of a running job: who may watch it, and a real job that is watched through a kill."""

import json
import os
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from browsing import browsed, browser, explorer, fetch
from meshmend.cli.main import run_line
from meshmend.explore.live_feed import LiveFeed
from meshmend.launch.status_client import StatusQuestion
from served_coordinator import served_coordinator
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
        (["--coordinator", "127.0.0.1:1", "--mesh", "4x4"], "leave --mesh and --fail out"),
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
        (["explore"], "meshmend explore needs starlette and uvicorn; install with: pip install"),
        (["train", "--explore"], "--explore needs starlette and uvicorn; install with"),
    ],
)
def test_without_the_web_server_one_line_says_what_to_install(
    command: list[str],
    why: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("meshmend.cli.live_page.find_spec", lambda name: None)

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


@contextmanager
def training(folder: Path) -> Iterator[str]:
    """Yield the address of the live page of a job that trains on 2x4 chips."""
    pytest.importorskip("uvicorn", reason="the page needs: pip install 'meshmend[explore]'")
    options = ["--mesh", "2x4", "--steps", "1000000", "--save-every", "0"]
    lines: list[str] = []
    process = subprocess.Popen(
        [sys.executable, "-m", "meshmend", "train", *options, "--explore", "--allow-faults"],
        cwd=folder,
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    reader = threading.Thread(target=lambda: lines.extend(process.stderr or ()), daemon=True)
    reader.start()
    try:
        until(lambda: any("live page" in line for line in lines), why=lambda: "".join(lines))
        yield next(line.split()[-1] for line in lines if "live page" in line)
    finally:
        process.terminate()  # SIGINT is ignored where these tests run in the background
        process.wait(timeout=HANG_S)
        reader.join(HANG_S)
        process.stderr.close()


def test_a_live_job_is_watched_through_a_kill_and_a_repair(tmp_path: Path) -> None:
    with browser() as chromium, training(tmp_path) as address, browsed(chromium, address) as found:
        page = found.page
        until(lambda: "training" in found.text("#job-title"))
        until(lambda: page.locator("#job-loss polyline").count())
        page.check("input[name=tool][value=board]")

        found.click_mesh(0.6, 0.45)

        until(lambda: page.input_value("#fail") == "2x2@0,2")
        until(lambda: "4\n" in found.text("#job-figures").split("chips that train")[1])
        assert page.locator("#job-events [data-event=left]").count() >= 4
        page.select_option("#fault", "repair")
        found.click_mesh(0.6, 0.45)
        until(lambda: page.input_value("#fail") == "")
        until(lambda: "8\n" in found.text("#job-figures").split("chips that train")[1])

"""What a scrape of the metrics every second costs the steps of a real job.

A coordinator and an agent with two workers train a small model on this machine. The metrics are
scraped every second for some seconds, then not, and so on, in one run. Each worker stamps its
steps, and a pause between two stamps counts for the time in which it lies.
"""

import os
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from meshmend.errors import BenchmarkError
from meshmend.transport.listener import listening

_MESH = "1x2"
_SCRAPE_EVERY_S = 1.0
_START_S = 120.0  # for the first step, on a busy machine
_SCRIPT = """
import sys, time, torch
from meshmend.train import Job

torch.manual_seed(0)
inputs = torch.randn(512, 256)
dataset = torch.utils.data.TensorDataset(inputs, inputs @ torch.randn(256, 1))
model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Tanh(), torch.nn.Linear(256, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
job = Job(model, optimizer, dataset, batch=64, steps=10_000_000)
stamps = open(sys.argv[1], "w", 1)
for inputs, labels in job:
    loss = torch.nn.functional.mse_loss(model(inputs), labels)
    optimizer.zero_grad()
    loss.backward()
    if job.step(loss) and job.is_leader:
        stamps.write(f"{time.monotonic()}\\n")
"""

Span = tuple[float, float]


def scrape_cost(n_pairs: int, span_s: float) -> dict[str, Any]:
    """Return how much longer steps take while the metrics are scraped every second.

    Raises:
        BenchmarkError: the job does not train.
    """
    with tempfile.TemporaryDirectory(prefix="scrape-") as name, ExitStack() as stack:
        folder = Path(name)
        url = _start_job(folder, stack)
        stamps = folder / "stamps"
        _await_steps(stamps)
        spans: list[tuple[Span, Span]] = []
        for pair in range(n_pairs):
            if pair % 2 == 0:
                with_scrapes, without = _scraped(url, span_s), _quiet(span_s)
            else:
                without, with_scrapes = _quiet(span_s), _scraped(url, span_s)
            spans.append((with_scrapes, without))
        times = [float(line) for line in stamps.read_text().splitlines()[:-1]]
    return _figures(times, spans)


def _figures(times: list[float], spans: list[tuple[Span, Span]]) -> dict[str, Any]:
    pauses = [(_pauses(times, scraped), _pauses(times, quiet)) for scraped, quiet in spans]
    ratios = [statistics.mean(scraped) / statistics.mean(quiet) for scraped, quiet in pauses]
    scraped_s = [pause for scraped, _ in pauses for pause in scraped]
    quiet_s = [pause for _, quiet in pauses for pause in quiet]
    return {
        "mean_ratio": statistics.mean(ratios),
        "standard_error": statistics.stdev(ratios) / len(ratios) ** 0.5,
        "ratio_of_medians": statistics.median(scraped_s) / statistics.median(quiet_s),
        "median_step_s": statistics.median(quiet_s),
        "n_steps": (len(scraped_s), len(quiet_s)),
        "ratio_of_pairs": ratios,
    }


def _pauses(times: list[float], span: Span) -> list[float]:
    inside = [at for at in times if span[0] <= at <= span[1]]
    return [after - before for before, after in pairwise(inside)]


def _start_job(folder: Path, stack: ExitStack) -> str:
    """Start the processes of the job; return the URL of its metrics."""
    ports = []
    for _ in range(2):
        with listening("127.0.0.1") as listener:
            ports.append(listener.getsockname()[1])
    here, metrics = (f"127.0.0.1:{port}" for port in ports)
    script = folder / "script.py"
    script.write_text(_SCRIPT, encoding="utf-8")
    job = ("--mesh", _MESH, "--board", "1x1")
    lines = (
        ("coordinator", *job, "--listen", here, "--metrics", metrics),
        (
            "agent",
            *job,
            "--coordinator",
            here,
            "--chips",
            f"{_MESH}@0,0",
            script,
            folder / "stamps",
        ),
    )
    environment = {**os.environ, "MESHMEND_SECRET": secrets.token_hex(16)}
    for line in lines:
        process = subprocess.Popen(
            [sys.executable, "-m", "meshmend", *map(str, line)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        stack.callback(process.wait)
        stack.callback(process.terminate)
    return f"http://{metrics}/metrics"


def _await_steps(stamps: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        with suppress(FileNotFoundError):
            if len(stamps.read_text().splitlines()) > 100:
                return
        time.sleep(0.1)
    raise BenchmarkError(f"the job has not done 100 steps within {_START_S:g} s")


def _scraped(url: str, span_s: float) -> Span:
    """Scrape every second for some seconds; return when that was."""
    began = time.monotonic()
    for number in range(int(span_s / _SCRAPE_EVERY_S)):
        time.sleep(max(0.0, began + number * _SCRAPE_EVERY_S - time.monotonic()))
        urllib.request.urlopen(url, timeout=60).read()
    time.sleep(max(0.0, began + span_s - time.monotonic()))
    return began, time.monotonic()


def _quiet(span_s: float) -> Span:
    began = time.monotonic()
    time.sleep(span_s)
    return began, time.monotonic()

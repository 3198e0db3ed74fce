"""What it costs to be ready for failures while nothing fails: elastic against static, step by step.

    python benchmarks/ready_cost.py elastic|static STEPS FOLDER

trains once, one worker per chip, each of which leaves its figures in the folder. Both kinds use
the same model, samples, flat gradients and plan; `ready_cost` runs them in turns.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from meshmend.config import JobConfig, MeshConfig, RunConfig
from meshmend.errors import BenchmarkError
from recovery_marks import BATCH, MESH, N_WORKERS, output_of

WARM_UP = 20  # steps that do not count: pages are copied, plans for failures are made
HOW = (
    "time between two steps of the first chip; elastic: Job under run_elastic, no checkpoints; "
    'static: init_process_group("meshmend"), the same flat gradients and plan; processor time: of '
    "all workers together"
)
_RUN_S = 600.0

Figures = dict[str, Any]


def ready_cost(n_pairs: int, n_steps: int, show: Callable[[str], None]) -> Figures:
    """Return the ratio of step times, elastic to static, over runs that take turns.

    Raises:
        BenchmarkError: a run failed.
    """
    runs: dict[str, list[Figures]] = {"elastic": [], "static": []}
    for pair in range(n_pairs):
        for kind in ("elastic", "static") if pair % 2 == 0 else ("static", "elastic"):
            runs[kind].append(_one_run(kind, n_steps))
            show(f"{kind}: {1e3 * runs[kind][-1]['median_s']:.2f} ms a step")
    pauses = {kind: [each for run in runs[kind] for each in run.pop("pauses_s")] for kind in runs}
    ratios = _ratios(runs, "median_s")
    return {
        "n_steps": n_steps,
        "runs": runs,
        "ratio": statistics.median(pauses["elastic"]) / statistics.median(pauses["static"]),
        "ratio_of_pairs": ratios,
        "standard_error": _standard_error(ratios),
        "cpu_ratio": statistics.median(_ratios(runs, "cpu_s")),
        "elastic_s": statistics.median(pauses["elastic"]),
        "static_s": statistics.median(pauses["static"]),
    }


def _ratios(runs: dict[str, list[Figures]], what: str) -> list[float]:
    pairs = zip(runs["elastic"], runs["static"], strict=True)
    return [elastic[what] / static[what] for elastic, static in pairs]


def _standard_error(ratios: list[float]) -> float | None:
    return statistics.stdev(ratios) / len(ratios) ** 0.5 if len(ratios) > 1 else None


def _one_run(kind: str, n_steps: int) -> Figures:
    with tempfile.TemporaryDirectory(prefix="ready-") as folder:
        command = [sys.executable, __file__, kind, str(WARM_UP + n_steps), folder]
        output_of(command, for_s=_RUN_S)
        answers = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    if len(answers) != N_WORKERS:
        raise BenchmarkError(f"{kind}: {len(answers)} of {N_WORKERS} workers told their figures")
    pauses = next(answer["pauses_s"] for answer in answers if answer["leads"])
    return {
        "median_s": statistics.median(pauses),
        "mean_s": statistics.mean(pauses),
        "cpu_s": sum(answer["cpu_s"] for answer in answers) / n_steps,
        "pauses_s": pauses,
    }


class Watch:
    """The times at which one worker ended its steps."""

    def __init__(self) -> None:
        self._ends: list[float] = []
        self._cpu_before_s = 0.0

    def step(self) -> None:
        """Take the time: a step is done."""
        if len(self._ends) == WARM_UP:
            self._cpu_before_s = time.process_time()
        self._ends.append(time.monotonic())

    def write(self, folder: Path, *, leads: bool) -> None:
        """Leave the figures of the steps that count in a folder."""
        cpu_s = time.process_time() - self._cpu_before_s
        ends = self._ends[WARM_UP - 1 :]
        pauses = [after - before for before, after in pairwise(ends)]
        figures = {"leads": leads, "pauses_s": pauses, "cpu_s": cpu_s}
        (folder / f"{os.getpid()}.json").write_text(json.dumps(figures), encoding="utf-8")


def elastic(n_steps: int, folder: Path) -> int:
    """Train with the runtime that survives failures; return an exit code."""
    import torch

    from meshmend.lab.workloads.registry import workload
    from meshmend.lab.workloads.workload import preload
    from meshmend.launch.elastic import run_elastic
    from meshmend.launch.job_processes import ElasticJob
    from meshmend.train.torch.gradients import Gradients

    torch.set_num_threads(1)
    preload()
    work = workload("resnet")
    model = work.model()
    (folder / "run" / "ledger").mkdir(parents=True)
    outcome = run_elastic(
        ElasticJob(
            JobConfig(mesh=MeshConfig(shape=MESH), job=RunConfig(run_dir=str(folder / "run"))),
            body=lambda: _elastic_worker(work, model, n_steps, folder),
            on_event=lambda event: None,
            sums=Gradients(model).sizes,
        )
    )
    if not outcome.is_finished:
        print(outcome.why, file=sys.stderr)
    return 0 if outcome.is_finished else 1


def _elastic_worker(work: Any, model: Any, n_steps: int, folder: Path) -> int:
    from meshmend.train import Job

    watch = Watch()
    optimizer = work.optimizer(model)
    job = Job(model, optimizer, work.dataset, batch=BATCH, steps=n_steps)
    for batch in job:
        loss = work.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()
        job.step(loss)
        watch.step()
    watch.write(folder, leads=job.is_leader)
    return 0


def static(n_steps: int, folder: Path) -> int:
    """Train with the backend that knows of no failures; return an exit code."""
    import torch

    from meshmend.lab.workloads.workload import preload
    from meshmend.launch.script import run_job
    from meshmend.launch.worker import Script

    torch.set_num_threads(1)
    preload()
    script = Script(__file__, ("static-worker", str(n_steps), str(folder)))
    return run_job(JobConfig(mesh=MeshConfig(shape=MESH)), script)


def static_worker(n_steps: int, folder: Path) -> int:
    """Be one worker of `static`."""
    import torch.distributed as dist

    from meshmend.lab.workloads.registry import workload
    from meshmend.lab.workloads.workload import batch_of
    from meshmend.train.data.samples import Order, share_of
    from meshmend.train.torch.gradients import Gradients

    watch = Watch()
    work = workload("resnet")
    model = work.model()
    optimizer = work.optimizer(model)
    dist.init_process_group("meshmend")
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    gradients, order = Gradients(model), Order(len(work.dataset))
    for step in range(n_steps):
        share = share_of(step * BATCH, BATCH, rank, n_ranks)
        samples = order.samples(share.start, share.stop).tolist()
        loss = work.loss(model, batch_of(work.dataset, samples))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's stubs
        gradients.gather(float(loss.detach()), share.n_samples / BATCH)
        for bucket in gradients.buckets:
            dist.all_reduce(bucket.flat)
        gradients.scatter()
        optimizer.step()
        watch.step()
    watch.write(folder, leads=rank == 0)
    dist.barrier()
    dist.destroy_process_group()
    return 0


_KINDS = {"elastic": elastic, "static": static, "static-worker": static_worker}

if __name__ == "__main__":
    if len(sys.argv) != 4 or sys.argv[1] not in _KINDS:
        sys.exit("ready_cost needs elastic or static, STEPS, FOLDER; see recovery.py --part cost")
    sys.exit(_KINDS[sys.argv[1]](int(sys.argv[2]), Path(sys.argv[3])))

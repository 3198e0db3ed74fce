"""One job that survives a thousand faults, its loss laid over that of an undisturbed run.

    python benchmarks/thousand_kills.py [--kills 1000] [--seed 1] [--json] [--folder FOLDER]

A small GPT learns Python's help texts on 4x4 processes. Kills of boards, chips and the coordinator,
hangs, slow chips, cut links and repairs are drawn from one seed; each comes as soon as the job has
gone on a step or two after the one before. Then the same steps undisturbed, 200 steps of both in
float64, and the same faults for torchft and for Gloo's own reconfigure, as far as they have what
the faults hit.

Asked: no sample lost or repeated, replicas equal bit for bit, the running mean of the loss within
1 % of the undisturbed run's at every point, in float64 each loss within 1e-9.

All that is known is in the folder at any time. A run that was interrupted prints what it has; the
same command with its folder goes on with the parts that are missing.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

import meshmend
from meshmend.config import JobConfig, RunConfig, TrainingConfig
from meshmend.errors import BenchmarkError, MeshmendError
from meshmend.launch.training import train
from meshmend.launch.worker import compute_in_one_thread
from meshmend.membership.events import FaultHappened, StepFinished, TimedEvent, read_events
from meshmend.membership.faults.fault import Fault, FaultKind
from meshmend.membership.job_view import JobView, Recovery
from meshmend.pages.report.training_run import RunFault, TrainingRun, training_run
from meshmend.planning.compile_once import compile_once
from meshmend.topology.failures import board_shape
from meshmend.topology.text import mesh_config, parse_mesh
from meshmend.train.data.audit import audit
from random_faults import FaultDriver, FaultSource
from record import record
from recovery_marks import ENVIRONMENT, started
from recovery_torchft import torchft_python
from small_gpt import in_float64, small_gpt
from thousand_kills_picture import PICTURE, picture

MESH = parse_mesh("4x4")
BATCH = 32
WINDOW = 100  # steps of a running mean
STEPS_64 = 200
OTHERS_TIMEOUT_S = 2.0  # for all their timeouts: as long as ours for heartbeats and links
MOST_OFF, MOST_OFF_64 = 0.01, 1e-9
_STALL_S = 180  # without a step: the run has failed
_FOR_EVER = 10**9
_REST_STEPS = 30  # without faults at the end of a run of so many steps
_LEAST_TOLD = 0.5  # of the losses; a wrong one that is not told makes those after it wrong
_UNUSED_STEPS = 5  # a link that no plan uses is not missed by then
_UNUSED_S = 5.0

Figures = dict[str, Any]
Floats = NDArray[np.float64]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=1000, help="faults; repairs come on top")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", action="store_true", help="print figures as JSON")
    parser.add_argument(
        "--folder", type=Path, help="for all files; one that exists is gone on with"
    )
    parser.add_argument("--part", action="append", choices=list(PARTS), help="only this; repeat")
    parser.add_argument("--other-kills", type=int, default=100, help="faults for other programs")
    parser.add_argument(
        "--gloo-python",
        default=sys.executable,
        help="an interpreter with torch 2.14 or newer, for Gloo's reconfigure",
    )
    parser.add_argument("--no-write", action="store_true", help="no result file, no picture")
    options = parser.parse_args()
    if options.kills < 1:
        parser.error(f"--kills needs a number of at least 1, but got {options.kills}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was started is ended first
    folder = options.folder or Path(tempfile.mkdtemp(prefix="thousand-kills-"))
    folder.mkdir(parents=True, exist_ok=True)
    say(f"thousand_kills: all files are in {folder}")
    load_before = os.getloadavg()
    try:
        failed = run_parts(options, folder)
    except (KeyboardInterrupt, SystemExit):
        failed = {"interrupted": "this run was interrupted"}
    results: Figures = {
        "kills": options.kills,
        "seed": options.seed,
        "load_average": {"before": load_before, "after": os.getloadavg()},
        **figures(folder, options.kills, failed),
    }
    print(json.dumps(results, indent=1) if options.json else "\n".join(table(results)))
    if "ours" in results and not options.no_write:
        say(f"written {record('thousand_kills', results)}")
        PICTURE.write_text(picture(results), encoding="utf-8")
        say(f"written {PICTURE}")
    return 1 if results["trouble"] else 0


def run_parts(options: argparse.Namespace, folder: Path) -> dict[str, str]:
    """Run the parts that the folder does not have yet; return why some failed."""
    compute_in_one_thread()
    compile_once(lambda: say("thousand_kills: compiling for the first use on this machine ..."))
    failed = {}
    for name in options.part or PARTS:
        if (folder / name / DONE).exists():
            continue
        shutil.rmtree(folder / name, ignore_errors=True)  # it was interrupted
        try:
            PARTS[name](options, folder)
            (folder / name / DONE).touch()
        except MeshmendError as error:
            failed[name] = str(error)
            say(f"{name}: failed: {error}")
        finally:
            signal.alarm(0)
    return failed


DONE = "done"


def run_kills(options: argparse.Namespace, folder: Path) -> None:
    """Train through all faults."""
    driver = FaultDriver(_source(options.seed), options.kills)
    _train("kills", folder, options.seed, driver=driver)


def run_calm(options: argparse.Namespace, folder: Path) -> None:
    """Train as many steps as the run with faults did, undisturbed."""
    _train("calm", folder, options.seed, steps=_steps_of(folder / "kills"))


def run_kills64(options: argparse.Namespace, folder: Path) -> None:
    """Train some steps in float64, through as many faults as come meanwhile."""
    driver = FaultDriver(_source(options.seed), _FOR_EVER, last_step=STEPS_64 - _REST_STEPS)
    _train("kills64", folder, options.seed, driver=driver, steps=STEPS_64, wide=True)


def run_calm64(options: argparse.Namespace, folder: Path) -> None:
    """Train the same steps in float64, undisturbed."""
    _train("calm64", folder, options.seed, steps=_steps_of(folder / "kills64"), wide=True)


def run_torchft(options: argparse.Namespace, folder: Path) -> None:
    """Train with torchft through faults of the same seed.

    Raises:
        BenchmarkError: it cannot be installed, or does not get through.
    """
    _run_other("torchft", str(torchft_python()), options, folder)


def run_gloo(options: argparse.Namespace, folder: Path) -> None:
    """Train on Gloo's own reconfigure through faults of the same seed.

    Raises:
        BenchmarkError: this torch has none, or it does not get through.
    """
    _run_other("gloo", options.gloo_python, options, folder)


def _run_other(name: str, python: str, options: argparse.Namespace, folder: Path) -> None:
    own, n_faults = folder / name, min(options.kills, options.other_kills)
    own.mkdir()
    command = [python, str(Path(__file__).with_name(f"{name}_kills.py")), str(own)]
    command += [str(each) for each in (options.seed, n_faults, BATCH, OTHERS_TIMEOUT_S)]
    progress = Progress(name, n_faults)
    n_heard = 0
    ours = str(Path(meshmend.__file__).parents[1])  # the other interpreter may not have it
    with started(command, own, {**ENVIRONMENT, "PYTHONPATH": ours}) as leader:
        while leader.poll() is None:
            time.sleep(0.5)
            events = read_events(_lines(own)) if (own / _EVENTS).exists() else ()
            for timed in events[n_heard:]:
                progress.hear(timed)
            n_heard = len(events)
    progress.end()
    if leader.returncode:
        words = (own / "output").read_text(errors="replace").strip().splitlines()
        raise BenchmarkError(words[-1] if words else f"it ended with code {leader.returncode}")


PARTS: dict[str, Callable[[argparse.Namespace, Path], None]] = {
    "kills": run_kills,
    "calm": run_calm,
    "kills64": run_kills64,
    "calm64": run_calm64,
    "torchft": run_torchft,
    "gloo": run_gloo,
}
OTHERS = ("torchft", "gloo")


def _steps_of(folder: Path) -> int:
    """Return how many steps the run in a folder did.

    Raises:
        BenchmarkError: it did none.
    """
    n_steps = _read(folder).n_done if (folder / _EVENTS).exists() else 0
    if not n_steps:
        raise BenchmarkError("the run with faults, which comes first, has no step")
    return n_steps


def _source(seed: int) -> FaultSource:
    return FaultSource(MESH, board_shape(len(MESH.shape)), random.Random(seed))


def _train(
    name: str,
    folder: Path,
    seed: int,
    *,
    driver: FaultDriver | None = None,
    steps: int = _FOR_EVER,
    wide: bool = False,
) -> None:
    """Train in the folder of a part, with the faults that a driver hands out.

    Raises:
        BenchmarkError: it did not finish, or did no step for too long.
    """
    workload = small_gpt(seed)
    by_step = steps != _FOR_EVER
    n_asked = steps if by_step or driver is None else driver.n_asked
    progress = Progress(name, n_asked, by_step=by_step)
    trained = train(
        in_float64(workload) if wide else workload,
        JobConfig(
            mesh=mesh_config(MESH),
            job=RunConfig(run_dir=str(folder / name), check_every_step=True),
            training=TrainingConfig(steps=steps, batch=BATCH, seed=seed),
        ),
        progress.hear,
        more_faults=partial(_next_faults, driver, by_step) if driver is not None else None,
    )
    progress.end()
    if trained.failure:
        raise BenchmarkError(trained.failure)


def _next_faults(
    driver: FaultDriver, goes_on: bool, view: JobView, elapsed_s: float
) -> tuple[Fault, ...] | None:
    """Return the faults that are due; after the last one the job ends, or goes on to its end."""
    faults = driver.next_faults(
        view.step,
        elapsed_s,
        has_recovered=has_recovered(view),
        holders=frozenset(view.generation.chips) if view.generation else None,
    )
    return () if faults is None and goes_on else faults


def has_recovered(view: JobView) -> bool:
    """Whether a job has recovered from all faults but those of links that no plan uses."""

    def is_unused(fault: Recovery) -> bool:
        is_link = fault.kind in (FaultKind.CUT, FaultKind.REPAIR) and not fault.chips
        is_long_ago = view.step >= (fault.at_step or 0) + _UNUSED_STEPS
        return is_link and fault.detected is None and is_long_ago

    return all(is_unused(fault) for fault in view.open_faults())


class Progress:
    """A bar on the standard error, and an alarm that ends a run which does no step for too long."""

    def __init__(self, name: str, n_asked: int, *, by_step: bool = False) -> None:
        self._name, self._n_asked, self._by_step = name, n_asked, by_step
        self._step = self._n_faults = 0
        self._loss = float("nan")
        self._began = self._shown_at = time.monotonic()
        signal.signal(signal.SIGALRM, self._stall)
        signal.alarm(_STALL_S)

    def hear(self, timed: TimedEvent) -> None:
        """Take up an event of the run."""
        event = timed.event
        if isinstance(event, StepFinished):
            signal.alarm(_STALL_S)
            self._step, self._loss = event.step, event.loss or float("nan")
        elif isinstance(event, FaultHappened):
            self._n_faults += event.kind != "repair"
        if time.monotonic() > self._shown_at + (0.2 if sys.stderr.isatty() else 30.0):
            self._show()

    def end(self) -> None:
        """Show how it ended."""
        signal.alarm(0)
        self._show()
        say("")

    def _show(self) -> None:
        self._shown_at = time.monotonic()
        n_done = self._step if self._by_step else self._n_faults
        share = min(1.0, n_done / self._n_asked)
        elapsed_s = self._shown_at - self._began
        left_s = elapsed_s / share - elapsed_s if share else float("nan")
        bar = "#" * round(30 * share) + "." * (30 - round(30 * share))
        words = (
            f"{self._name:8} [{bar}] {n_done}/{self._n_asked}  step {self._step}, "
            f"{self._n_faults} faults, loss {self._loss:.3f}, {elapsed_s:.0f} s, "
            f"{left_s:.0f} s left"
        )
        is_terminal = sys.stderr.isatty()
        print(
            f"\r{words}\x1b[K" if is_terminal else words,
            end="" if is_terminal else "\n",
            file=sys.stderr,
            flush=True,
        )

    def _stall(self, *_: object) -> None:
        raise BenchmarkError(f"no step for {_STALL_S} s after step {self._step}")


# Figures, from the files of the folder alone.


def figures(folder: Path, n_asked: int, failed: dict[str, str]) -> Figures:
    """Return all figures of the runs in a folder, and in `trouble` what is not as it should be."""
    runs = {name: _read(folder / name) for name in PARTS if (folder / name / _EVENTS).exists()}
    results: Figures = {"failed": failed}
    if "kills" in runs:
        calm = runs.get("calm")
        results["ours"] = {
            **run_figures(runs["kills"], calm),
            **history(folder / "kills", runs["kills"]),
        }
        results["curves"] = curves(runs)
    if "kills64" in runs:
        results["float64"] = run_figures(runs["kills64"], runs.get("calm64"))
        results["float64"] |= history(folder / "kills64", runs["kills64"])
    for name in [each for each in OTHERS if each in runs]:
        results[name] = run_figures(runs[name], runs.get("calm"), is_ours=False)
        results[name] |= noted_history(folder / name / "done.jsonl")
    return {**results, "trouble": trouble(results, n_asked)}


_EVENTS = "events.jsonl"


def _read(folder: Path) -> TrainingRun:
    return training_run(_lines(folder))


def _lines(folder: Path) -> list[str]:
    return (folder / _EVENTS).read_text(encoding="utf-8").splitlines()


def run_figures(run: TrainingRun, calm: TrainingRun | None, *, is_ours: bool = True) -> Figures:
    """Return what the events of a run tell: faults, time lost by kind, loss, goodput.

    The undisturbed run is ours. What another program loses is measured by its own usual step.
    """
    pace_s = _pace_s(calm if calm is not None and is_ours else run)
    lost: dict[str, list[float]] = defaultdict(list)
    back: dict[str, list[float]] = defaultdict(list)
    for fault, lost_s in zip(run.faults, time_lost(run, pace_s), strict=True):
        lost[fault.kind_words].append(lost_s)
        if fault.is_recovered and not is_unnoticed(fault):
            back[fault.kind_words].append(fault.recovered_s)
    hits = [s for kind, times in lost.items() if kind != "repair" for s in times]
    steps = run.n_done
    result: Figures = {
        "faults": sum(not fault.is_repair for fault in run.faults),
        "repairs": sum(fault.is_repair for fault in run.faults),
        "workers_killed": sum(len(each.chips) for each in run.faults if each.kind == "kill"),
        "unrecovered": [
            each.fault
            for each in run.faults
            if not each.is_recovered and not is_unnoticed(each) and run.end is not None
        ][:20],
        "unexpected": [each.fault for each in run.faults if each.kind is None][:20],
        "links_cut_by_nobody": sorted(_cut_by_nobody(run)),
        "steps": steps,
        "chips_least": int(run.steps.chips.min()) if steps else 0,
        "took_s": _work_s(run),
        "step_s": pace_s,
        "lost_median_s": _median(hits),
        "lost_worst_s": max(hits, default=None),
        "final_loss": _finite(float(run.steps.loss[-WINDOW:].mean())) if steps else None,
        "kinds": {
            kind: {
                "count": len(lost[kind]),
                "lost_median_s": _median(lost[kind]),
                "lost_worst_s": max(lost[kind]),
                "recovered_median_s": _median(back[kind]),
                "recovered_worst_s": max(back[kind], default=None),
            }
            for kind in sorted(lost)
        },
    }
    if calm is not None and len(calm.steps):
        calm_s = steps * (_work_s(calm) / calm.n_done if is_ours else pace_s)
        result["goodput"] = calm_s / result["took_s"] if result["took_s"] else None
        result["lost_mean_s"] = max(0.0, result["took_s"] - calm_s) / max(1, result["faults"])
        result["losses_told"] = told_share(run, calm)
        result["loss_off"], result["mean_off"] = distances(run, calm)
    return result


def _cut_by_nobody(run: TrainingRun) -> set[str]:
    """Return the links that counted as cut although no fault cut them: they were sound."""
    counted = {str(link) for each in run.generations for link in each.mesh.failed_links}
    cut = {each.fault.removeprefix("cut ") for each in run.faults if each.kind is FaultKind.CUT}
    return counted - cut


def time_lost(run: TrainingRun, pace_s: float) -> list[float]:
    """Return how long training stood still for each fault: its longest pause less a usual step."""
    ends = np.sort(run.steps.at_s)
    result = []
    for fault in run.faults:
        recovered_s = fault.recovered_s if fault.is_recovered else 0.0
        if is_unnoticed(fault):
            result.append(0.0)
            continue
        first = int(np.searchsorted(ends, fault.at_s, side="right"))
        last = int(np.searchsorted(ends, fault.at_s + recovered_s, side="left"))
        pauses = np.diff(ends[max(0, first - 1) : last + 1])
        result.append(max(0.0, float(pauses.max(initial=0.0)) - pace_s))
    return result


def is_unnoticed(fault: RunFault) -> bool:
    """Whether a link was cut or repaired that no plan used: it is noticed with the next change."""
    is_link = fault.kind in (FaultKind.CUT, FaultKind.REPAIR) and not fault.chips
    return is_link and not fault.detected_s <= _UNUSED_S


def told_share(run: TrainingRun, calm: TrainingRun) -> float:
    """Return the part of the steps of two runs whose loss both tell."""
    n_both = min(run.n_done, calm.n_done)
    return len(np.intersect1d(run.steps.step, calm.steps.step)) / n_both if n_both else 0.0


def distances(run: TrainingRun, calm: TrainingRun) -> tuple[float | None, float | None]:
    """Return how far the losses of two runs are apart at most, and their running means, relative.

    Of the steps whose loss both tell: that of a step whose leader was killed before it told, or
    told a coordinator that was killed, is not known. None if more than half are not known.
    """
    _, ours, theirs = np.intersect1d(run.steps.step, calm.steps.step, return_indices=True)
    if told_share(run, calm) < _LEAST_TOLD:
        return None, None
    loss, calm_loss = run.steps.loss[ours], calm.steps.loss[theirs]
    means, calm_means = running_mean(loss), running_mean(calm_loss)
    off, mean_off = np.abs(loss - calm_loss).max(), np.abs(means / calm_means - 1).max()
    return float(off), float(mean_off)  # not finite if a loss is not


def running_mean(values: Floats, window: int = WINDOW) -> Floats:
    """Return the mean of each value and those before it, as many as the window holds."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(0, ends - window)
    means: Floats = (sums[ends] - sums[starts]) / (ends - starts)
    return means


def history(folder: Path, run: TrainingRun) -> Figures:
    """Return what the ledgers of a run prove."""
    found = audit(folder / "ledger", [timed.event for timed in read_events(_lines(folder))])
    return {
        "is_finished": run.end is not None,
        "samples": {"used": found.used, "lost": found.lost, "repeated": found.repeated},
        "replicas_equal": found.replicas_equal,
        "steps_hashed": found.hashed,
        "history_faults": list(found.faults),
        "unchecked": list(found.unchecked),
        "restores": len(found.restores),
    }


def noted_history(path: Path) -> Figures:
    """Return what another program's workers noted: steps, and checksums of their models."""
    digests: dict[int, set[int]] = defaultdict(set)
    in_vain = 0
    for line in path.read_text(encoding="utf-8").splitlines():
        _, _, (what, step, _, _, _, digest) = json.loads(line)
        in_vain += what == "no commit"
        if what == "step":
            digests[step].add(digest)
    missing = max(digests, default=0) - len(digests)
    return {
        "samples": {"used": BATCH * len(digests), "lost": BATCH * missing, "repeated": "-"},
        "replicas_equal": all(len(each) == 1 for each in digests.values()),
        "votes_lost": in_vain,
        "skipped": "cut links, kills and freezes of the coordinator: it has no such parts, or one",
    }


def trouble(results: Figures, n_asked: int) -> list[str]:
    """Return what is not as it was asked, in sentences; nothing of a part that was not run."""
    found = [f"{name}: {why}" for name, why in results["failed"].items() if name not in OTHERS]
    for name in ("ours", "float64"):
        if name not in results:
            continue
        own, samples = results[name], results[name]["samples"]
        if samples["lost"] or samples["repeated"]:
            found.append(f"{name}: {samples['lost']} samples lost, {samples['repeated']} repeated")
        if own["replicas_equal"] is not True:
            found.append(f"{name}: the replicas are not known to be equal")
        found += [f"{name}: {words}" for words in own["history_faults"] + own["unchecked"]]
        found += [f"{name}: did not recover from {words}" for words in own["unrecovered"]]
        found += [f"{name}: was not asked for: {words}" for words in own["unexpected"]]
        if own["restores"]:
            found.append(f"{name}: the state was lost {own['restores']} times")
    ours, wide = results.get("ours", {}), results.get("float64", {})
    if ours and ours["faults"] < n_asked:
        found.append(f"ours: {ours['faults']} of {n_asked} faults were injected")
    for own, key, most, words in (
        (ours, "mean_off", MOST_OFF, "the running mean of the loss"),
        (wide, "loss_off", MOST_OFF_64, "the loss in float64"),
    ):
        if key in own and not (own[key] is not None and own[key] <= most):
            found.append(f"{words} is off by {own[key]}, asked at most {most:g}")
    return found


def curves(runs: dict[str, TrainingRun]) -> Figures:
    """Return the running means of the loss, and the chips at work, at up to 1000 steps each.

    Those with faults and undisturbed are of the steps whose loss both tell, so that they compare.
    """
    result: Figures = {}
    for name, other in (("kills", "calm"), ("calm", "kills"), *zip(OTHERS, OTHERS, strict=True)):
        if name not in runs or not len(steps := runs[name].steps):
            continue
        both = np.isin(steps.step, runs.get(other, runs[name]).steps.step)
        means = running_mean(steps.loss[both])
        chosen = np.unique(np.linspace(0, len(means) - 1, 1000).astype(np.int64))
        parts = np.array_split(steps.chips[both], len(chosen))
        result[name] = {
            "step": steps.step[both][chosen].tolist(),
            "loss": [round(float(value), 6) for value in means[chosen]],
            "chips_least": [int(part.min()) for part in parts],
            "chips_mean": [round(float(part.mean()), 2) for part in parts],
        }
    return result


def _pace_s(run: TrainingRun) -> float:
    ends = np.sort(run.steps.at_s)
    return float(np.median(np.diff(ends))) if len(ends) > 1 else 0.0


def _work_s(run: TrainingRun) -> float:
    return float(run.steps.at_s.max()) - run.first_work_s if len(run.steps) else 0.0


def _median(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


# What people read.


def table(results: Figures) -> list[str]:
    """Return the lines that all this is for."""
    lines = []
    if "ours" in results:
        ours = results["ours"]
        lines += [
            f"{ours['faults']} faults and {ours['repairs']} repairs on {MESH}, a small GPT, seed "
            f"{results['seed']}: {ours['workers_killed']} workers killed, {ours['steps']} steps in "
            f"{ours['took_s']:.0f} s, never fewer than {ours['chips_least']} chips",
            "",
            f"{'fault':20}{'count':>7}{'lost: median':>14}{'worst':>9}"
            f"{'recovered: median':>19}{'worst':>9}",
        ]
        for kind, own in ours["kinds"].items():
            lines.append(
                f"{kind:20}{own['count']:>7}{_s(own['lost_median_s']):>14}"
                f"{_s(own['lost_worst_s']):>9}{_s(own['recovered_median_s']):>19}"
                f"{_s(own['recovered_worst_s']):>9}"
            )
        lines.append("")
    lines.append(
        f"{'':10}{'faults':>7}{'lost: median':>14}{'mean':>9}{'worst':>9}{'goodput':>9}"
        f"{'samples lost':>14}{'repeated':>10}{'replicas':>10}{'loss off':>10}"
    )
    lines += [_row(name, results[name]) for name in ("ours", "float64", *OTHERS) if name in results]
    lines.append(
        "lost: the longest pause between two steps less a usual step; goodput: how long the"
    )
    lines.append(
        "undisturbed run took for the same steps, over how long this one did; loss off: running"
    )
    lines.append(
        f"mean of {WINDOW} steps, relative to the undisturbed run's (in float64: each loss)"
    )
    for name in [each for each in OTHERS if each in results]:
        lines.append(f"{name}: its goodput is by its own usual step; no run of it is undisturbed")
        lines.append(f"{name}: without {results[name]['skipped']}")
    if links := results.get("ours", {}).get("links_cut_by_nobody"):
        lines.append(f"ours: sound links that counted as cut: {', '.join(links)}")
    lines += [f"{name}: failed: {why}" for name, why in results["failed"].items()]
    lines += [f"NOT AS ASKED: {words}" for words in results["trouble"]]
    if "ours" in results and not results["trouble"]:
        lines.append("all as asked")
    return lines


def _row(name: str, own: Figures) -> str:
    samples = own.get("samples") or {"lost": "?", "repeated": "?"}
    equal = {True: "equal", False: "DIFFER", None: "?"}[own.get("replicas_equal")]
    off = own.get("loss_off" if name == "float64" else "mean_off")
    words = "?" if off is None else f"{off:.1e}" if name == "float64" else f"{off:.2%}"
    goodput = "?" if own.get("goodput") is None else f"{own['goodput']:.0%}"
    return (
        f"{name:10}{own['faults']:>7}{_s(own['lost_median_s']):>14}{_s(own.get('lost_mean_s')):>9}"
        f"{_s(own['lost_worst_s']):>9}{goodput:>9}{samples['lost']:>14}{samples['repeated']:>10}"
        f"{equal:>10}{words:>10}"
    )


def _s(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds:.2f} s"


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())

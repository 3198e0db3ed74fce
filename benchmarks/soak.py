"""Chaos for a given time and seed: random faults on a training job, and a table of recoveries.

    python benchmarks/soak.py --minutes 10 --seed 1

Fails on the first divergence, lost or repeated sample, or stall; at the end also on a process that
is left over, and on memory or descriptors that grow.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from meshmend.faults.fault import Fault
from meshmend.faults.random_faults import random_faults
from meshmend.launch.training import Training, train
from meshmend.membership.events import (
    ChipsWaiting,
    FaultHappened,
    FaultRecovered,
    JobFailed,
    StateLost,
    StateRestored,
    StepFinished,
    TimedEvent,
    WorkerTurnedAway,
)
from meshmend.planning.settings import Settings
from meshmend.report.event_words import event_words
from meshmend.topology.failures import board_shape
from meshmend.topology.text import parse_mesh
from meshmend.train.ledger import audit
from meshmend.workloads.registry import workload
from record import record

STALL_S = 15.0
_SHOWN = (
    *(FaultHappened, FaultRecovered, WorkerTurnedAway, ChipsWaiting),
    *(StateLost, StateRestored, JobFailed),
)
_PAGE_MB = os.sysconf("SC_PAGESIZE") / 1e6
_WARM_S = 30.0
_MOST_NEW_FDS = 6
_MOST_NEW_MB = 30.0


@dataclass
class Watch:
    """What a second pair of eyes sees of a run: progress, memory, descriptors, bits."""

    folder: Path
    last_step_at: float = float("inf")
    steps: int = 0
    longest_pause_s: float = 0.0
    faults: list[dict[str, object]] = field(default_factory=list)
    worker_samples: dict[int, list[tuple[float, int, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    names: dict[int, str] = field(default_factory=dict)
    is_over: bool = False

    def hear(self, timed: TimedEvent) -> None:
        """Take up an event of the run."""
        event = timed.event
        if isinstance(event, StepFinished):
            now = time.monotonic()
            self.longest_pause_s = max(self.longest_pause_s, now - min(now, self.last_step_at))
            self.last_step_at, self.steps = now, self.steps + 1
        elif isinstance(event, _SHOWN):
            print(f"{timed.t:8.1f} s  {event_words(event)}", flush=True)

    def look(self) -> None:
        """Look every second until the run is over; end the process when it goes wrong."""
        beat, seen = 0, set[str]()
        while not self.is_over:
            time.sleep(1.0)
            beat += 1
            pause_s = time.monotonic() - self.last_step_at
            if pause_s > STALL_S and not self.is_over:
                self._fail(f"no step for {pause_s:.1f} s")
            if beat % 5 == 0:
                self._sample()
            if beat % 20 == 0:
                found = audit(self.folder / "ledger")
                # The last steps may still be under way: their lines come one by one. So a fault
                # of the history counts when the next look finds it too.
                if found.split or found.repeated or seen & set(found.faults):
                    self._fail(f"the ledgers say {found}")
                seen = set(found.faults)

    def growth(self) -> list[str]:
        """Return which processes grew, in words."""
        found = []
        for pid, samples in self.worker_samples.items():
            # How many chips live changes all the time: what grows has a higher crest at the end.
            warm = [sample for sample in samples if sample[0] > samples[0][0] + _WARM_S]
            third = len(warm) // 3
            if third < 4:
                continue
            fds, last_fds = (
                max(each[1] for each in part) for part in (warm[:third], warm[-third:])
            )
            mb, last_mb = (max(each[2] for each in part) for part in (warm[:third], warm[-third:]))
            if last_fds > fds + _MOST_NEW_FDS:
                found.append(f"{self.names[pid]}: {fds} descriptors became {last_fds}")
            if last_mb > mb + _MOST_NEW_MB:
                found.append(f"{self.names[pid]}: {mb:.0f} MB became {last_mb:.0f}")
        return found

    def left_over(self) -> list[int]:
        """Return the processes that were seen and are still there."""
        return [pid for pid in self.worker_samples if Path(f"/proc/{pid}").exists()]

    def _sample(self) -> None:
        for pid in _children(os.getpid()):
            try:
                n_fds = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
                pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
            except (OSError, IndexError):
                continue
            self.worker_samples[pid].append((time.monotonic(), n_fds, pages * _PAGE_MB))
            n_threads = sum(1 for _ in Path(f"/proc/{pid}/task").iterdir())
            self.names.setdefault(pid, f"process {pid} of {n_threads} threads")

    def _fail(self, why: str) -> None:
        print(f"soak: FAILED: {why}; the run is in {self.folder}", file=sys.stderr, flush=True)
        os._exit(1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mesh", default="4x4")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--keep", action="store_true", help="keep the run's folder")
    options = parser.parse_args()
    mesh = parse_mesh(options.mesh)
    for_s = options.minutes * 60
    faults = random_faults(mesh, board_shape(len(mesh.shape)), for_s=for_s, seed=options.seed)
    folder = Path(tempfile.mkdtemp(prefix="meshmend-soak-")) / "run"
    print(f"soak: {len(faults)} faults in {for_s:.0f} s on {mesh}, seed {options.seed}; {folder}")
    return _soak(options, mesh_text=options.mesh, faults=faults, folder=folder)


def _soak(
    options: argparse.Namespace, *, mesh_text: str, faults: tuple[Fault, ...], folder: Path
) -> int:
    watch = Watch(folder)
    threading.Thread(target=watch.look, daemon=True).start()
    trained = train(
        Training(
            workload=workload("resnet", "tiny", norm="group"),
            settings=Settings(parse_mesh(mesh_text)),
            run_dir=folder,
            steps=10**9,
            batch=options.batch,
            faults=faults,
            save_every=200,
            checks=True,
            for_s=options.minutes * 60,
        ),
        watch.hear,
    )
    watch.is_over = True
    return _verdict(options, watch, trained.answer, trained.failure)


def _verdict(
    options: argparse.Namespace, watch: Watch, answer: dict[str, object], failure: str
) -> int:
    found = audit(watch.folder / "ledger")
    rows = answer["faults"]
    assert isinstance(rows, list)
    by_kind: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row["recovered_s"] is not None:
            by_kind[row["fault"].split()[0]].append(row["recovered_s"])
    print(f"\n{'fault':10} {'count':>6} {'median s':>9} {'worst s':>9}")
    for kind, times in sorted(by_kind.items()):
        print(f"{kind:10} {len(times):6} {statistics.median(times):9.2f} {max(times):9.2f}")
    trouble = [failure] if failure else []
    trouble += [f"{found}"] if found.is_wrong else []
    trouble += watch.growth()
    trouble += [f"processes are left over: {pids}" for pids in [watch.left_over()] if pids]
    summary = {
        "minutes": options.minutes,
        "seed": options.seed,
        "mesh": options.mesh,
        "faults": len(rows),
        "steps": found.steps,
        "samples": {"used": found.used, "lost": found.lost, "repeated": found.repeated},
        "steps_hashed": found.hashed,
        "steps_split": list(found.split),
        "steps_redone": found.redone,
        "restores": [restore._asdict() for restore in found.restores],
        "history_faults": list(found.faults),
        "unchecked": list(found.unchecked),
        "longest_pause_s": round(watch.longest_pause_s, 2),
        "recovered_s": {
            kind: {"count": len(times), "median": statistics.median(times), "worst": max(times)}
            for kind, times in sorted(by_kind.items())
        },
        "trouble": trouble,
    }
    print(json.dumps(summary, indent=2))
    record("soak", summary)
    print("soak: FAILED" if trouble else "soak: passed")
    return 1 if trouble else 0


def _children(parent: int) -> list[int]:
    path = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(pid) for pid in path.read_text().split()]


if __name__ == "__main__":
    raise SystemExit(main())

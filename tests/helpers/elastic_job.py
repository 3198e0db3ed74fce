"""A small training job on a mesh of processes, as a script of its own: forks need a quiet parent.

    python elastic_job.py FOLDER '{"mesh": "4x4", "steps": 40, "inject": ["kill 2x2@0,2 at 10"]}'

With `"gate": [30, [["generation", 12], ["arrived", null]]]` no chip gets past step 30 before such
events have come in this order, where a number asks for so many chips; the steps after it are slow.
So a test does not depend on how fast steps are.

Prints one JSON object: how it ended, the events, and what the ledgers say.
"""

import json
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from waiting import HANG_S


def elastic(folder: Path, **options: Any) -> dict[str, Any]:
    """Run a job in a process of its own and return what it printed."""
    command = [sys.executable, __file__, str(folder), json.dumps(options)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    result["stderr"] = done.stderr
    return result


def of_kind(result: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    """Return the events of one kind."""
    return [event for event in result["events"] if event["event"] == kind]


def losses(result: dict[str, Any]) -> dict[int, float]:
    """Return the loss of each step."""
    return {event["step"]: event["loss"] for event in of_kind(result, "step")}


def is_seen(event: dict[str, Any], kind: str, n_chips: int | None) -> bool:
    """Return whether an event is of a kind and, where it matters, of so many chips."""
    return event["event"] == kind and n_chips in (None, len(event.get("chips", ())))


def main() -> None:
    import torch
    from torch.nn.functional import cross_entropy

    from meshmend.faults.fault import parse_fault
    from meshmend.launch.elastic import run_elastic
    from meshmend.launch.elastic_job import ElasticJob
    from meshmend.membership.events import EVENTS, TimedEvent, event_line
    from meshmend.membership.timing import Timing
    from meshmend.planning.settings import Settings
    from meshmend.topology.text import parse_mesh
    from meshmend.train.checkpoint import Saving
    from meshmend.train.gradients import Gradients
    from meshmend.train.job import Job
    from meshmend.train.ledger import audit

    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(options.get("seed", 0))
    inputs, labels = torch.randn(500, 32), torch.randint(0, 10, (500,))
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))
    if options.get("batch_norm"):
        model.insert(1, torch.nn.BatchNorm1d(64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    saving = (
        Saving(folder / "checkpoints", options["save_every"]) if "save_every" in options else None
    )
    resume = Path(options["resume"]) if "resume" in options else None

    gate = folder / "gate"
    gate_step, gate_events = options.get("gate", (None, []))

    def body() -> int:
        job = Job(
            model,
            optimizer,
            list(zip(inputs, labels, strict=True)),
            batch=options.get("batch", 48),
            steps=options["steps"],
            policy=options.get("policy", "constant"),
            saving=saving,
            resume=resume,
        )
        for features, classes in job:
            loss = cross_entropy(model(features), classes)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch's stubs
            while job.step_number == gate_step and not gate.exists():
                time.sleep(0.01)
            if gate_step is not None and job.step_number > gate_step:
                time.sleep(0.05)
            job.step(loss)
        return 0

    mesh = parse_mesh(options["mesh"], fail=options.get("fail", ()))
    events: list[TimedEvent] = []

    def take(timed: TimedEvent) -> None:
        events.append(timed)
        if gate_events and is_seen(json.loads(event_line(timed)), *gate_events[0]):
            del gate_events[0]
            if not gate_events:
                gate.touch()

    outcome = run_elastic(
        ElasticJob(
            settings=Settings(mesh),
            body=body,
            run_dir=folder,
            on_event=take,
            faults=tuple(parse_fault(text, mesh) for text in options.get("inject", ())),
            timing=Timing(heartbeat_timeout_s=options.get("heartbeat_timeout_s", 60.0)),
            sums=Gradients(model).sizes(),
            checks=True,
        )
    )
    result = {
        "finished": outcome.is_finished,
        "why": outcome.why,
        "chips": outcome.chips,
        "faults": [EVENTS.encode(each.event()) for each in outcome.recoveries],
        "audit": asdict(audit(folder / "ledger")),
        "events": [json.loads(event_line(event)) for event in events],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

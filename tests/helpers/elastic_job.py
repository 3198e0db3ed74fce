"""A small training job on a mesh of processes, as a script of its own: forks need a quiet parent.

    python elastic_job.py FOLDER '{"mesh": "4x4", "steps": 40, "inject": ["kill 2x2@0,2 at 10"]}'

With `"gate": [30, [["generation", 12], ["arrived", null]]]` no chip gets past step 30 before such
events have come in this order, where a number asks for so many chips; the steps after it are slow.
So a test does not depend on how fast steps are. With `"framework": "jax"` it is a `JaxJob`. With
`"data"` the samples have random noise, and come from a data set (`"augmented"`) or a stream
(`"stream alone"`), or from a `DataLoader` of either (`"loader"`, `"stream"`). With
`"shard_optimizer"` the chips share the optimizer's state. `"optimizer"` is adamw, lars or lamb.
With `"slow_link"`, such as `[[0, 0], [0, 1]]`, the chips watch their links, and the kernel counts
four times the usual time for this one; each chip writes down the speeds that it knows in each step.
With `"checksum"` the data of sums has checksums. With `"compute_s"` each share takes so long, as on
an accelerator, with `"sample_s"` each sample. With `"masters"` the model is of bfloat16, and the
optimizer has its weights in float32.

Prints one JSON object: how it ended, the events, and what the ledgers say.
"""

import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from forked_script import JAX, TORCH, run_forked

Training = tuple[Callable[[], int], Sequence[tuple[int, str]]]


def elastic(folder: Path, **options: Any) -> dict[str, Any]:
    """Run a job in a process of its own and return what it printed."""
    imported = JAX if options.get("framework") == "jax" else TORCH
    done = run_forked(__file__, str(folder), json.dumps(options), imported=imported)
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


def check_same_losses(
    result: dict[str, Any], other: dict[str, Any], *, after: int = 0, **tolerance: float
) -> None:
    """Compare the losses of the steps that both jobs tell of, which are not all on a busy machine.

    Raises:
        AssertionError: that many are told of by one alone, or the first loss that differs.
    """
    ours, theirs = (
        {at: loss for at, loss in losses(job).items() if at > after} for job in (result, other)
    )
    both = ours.keys() & theirs.keys()
    assert len(both) > max(len(ours), len(theirs)) / 2
    for step in sorted(both):
        close = math.isclose(ours[step], theirs[step], **(tolerance or {"rel_tol": 1e-4}))
        assert close, (step, ours[step], theirs[step])


def is_seen(event: dict[str, Any], kind: str, n_chips: int | None) -> bool:
    """Return whether an event is of a kind and, where it matters, of so many chips."""
    return event["event"] == kind and n_chips in (None, len(event.get("chips", ())))


def torch_job(folder: Path, options: dict[str, Any], gate: "Gate") -> Training:
    """Return the loop of a PyTorch job, and the sizes of its sums."""
    import torch
    from torch.nn.functional import cross_entropy

    from meshmend.train.torch.gradients import Gradients
    from meshmend.train.torch.job import Job

    torch.set_num_threads(1)
    torch.manual_seed(options.get("seed", 0))
    torch.set_default_dtype(getattr(torch, options.get("dtype", "float32")))
    inputs, labels = torch.randn(500, 32), torch.randint(0, 10, (500,))
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 10))
    if options.get("batch_norm"):
        model.insert(1, torch.nn.BatchNorm1d(64))
    if options.get("masters"):
        model, inputs = model.to(torch.bfloat16), inputs.to(torch.bfloat16)
    optimizer = named_optimizer(model, options.get("optimizer", "adamw"))
    bucket_bytes = options.get("bucket_bytes")

    def body() -> int:
        samples = list(zip(inputs, labels, strict=True))
        dataset = noisy_samples(samples, options["data"]) if "data" in options else samples
        more = arguments(folder, options)
        more["shard_optimizer"] = bool(options.get("shard_optimizer"))
        more["master_weights"] = bool(options.get("masters"))
        if "mirror_domains" in options:
            more["mirror_domains"] = options["mirror_domains"]
        job = Job(model, optimizer, dataset, bucket_bytes=bucket_bytes, **more)
        if "slow_link" in options:
            count_as_slow(job, options["slow_link"])
        for features, classes in job:
            if "slow_link" in options:
                write_known_speeds(folder, job)
            found = model(features)
            loss = cross_entropy(found.float() if options.get("masters") else found, classes)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch's stubs
            gate.wait(job.step_number)
            time.sleep(options.get("compute_s", 0.0))
            time.sleep(options.get("sample_s", 0.0) * len(features))
            job.step(loss)
        return 0

    return body, Gradients(model, bucket_bytes).sizes


def count_as_slow(job: Any, ends: list[list[int]]) -> None:
    """Let the kernel of each chip count as if all links were busy, and one of them slow."""
    exchange = job._core._exchange
    slow, n_looks = [tuple(end) for end in ends], itertools.count(1)

    def counted() -> dict[int, tuple[int, int]]:
        look, mine = next(n_looks), job._core._environment.chip
        return {
            seat: (10**9 * look, 10**9 * look * (4 if {mine, chip} == set(slow) else 1))
            for chip, seat in exchange._seats.items()
        }

    exchange.transport.work_done = counted


def write_known_speeds(folder: Path, job: Any) -> None:
    """Write down the speeds that a chip knows at the beginning of a step, and its plans' speeds."""
    exchange, chip = job._core._exchange, ",".join(map(str, job._core._environment.chip))
    with (folder / f"speeds.{chip}").open("a") as file:
        planned = " ".join(map(str, sorted(exchange.mesh.slow)))
        generation, known = exchange.generation_number, job._core._watch.found("")
        file.write(f"{generation} {job.step_number} {known or 'none'} {planned or 'none'}\n")


def named_optimizer(model: Any, name: str) -> Any:
    """Return an optimizer of a model."""
    import torch

    from meshmend.train.sharding.layerwise import LAMB, LARS, layerwise_groups

    if name == "lars":
        return LARS(layerwise_groups(model), lr=1.0)
    if name == "lamb":
        return LAMB(layerwise_groups(model), lr=1e-2)
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def noisy_samples(samples: list[Any], kind: str) -> Any:
    """Return samples with noise of three random generators, as a data set, a loader or a stream."""
    import random

    import numpy as np
    import torch
    from torch.utils.data import DataLoader, Dataset, IterableDataset

    def noisy(sample: Any) -> Any:
        noise = random.random() + np.random.rand() + torch.rand(())
        return sample[0] + noise, sample[1]

    class Noisy(Dataset[Any]):
        def __len__(self) -> int:
            return len(samples)

        def __getitem__(self, index: int) -> Any:
            time.sleep(0.0005)
            return noisy(samples[index])

    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return map(noisy, samples)

    if kind == "augmented":
        return Noisy()
    if kind == "stream alone":
        return Stream()
    is_loader = kind == "loader"
    return DataLoader(Noisy() if is_loader else Stream(), num_workers=2 if is_loader else 1)


def jax_job(folder: Path, options: dict[str, Any], gate: "Gate") -> Training:
    """Return the loop of a JAX job, and the sizes of its sums; each chip prints its compilations.

    Half of the hidden values are dropped, by random keys of the samples.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax

    from meshmend.train.jax.job import JaxJob
    from meshmend.train.jax.program import FlatTree

    random = np.random.default_rng(options.get("seed", 0))
    inputs, labels = random.normal(size=(500, 32)), random.integers(0, 10, 500)
    dtype = jnp.dtype(options.get("dtype", "float32"))
    params = {
        "hidden": (random.normal(size=(32, 64)) / 6).astype(dtype),
        "output": (random.normal(size=(64, 10)) / 8).astype(np.float32),
    }

    def losses(params: Any, batch: Any, keys: Any) -> Any:
        features, classes = batch
        hidden = jnp.tanh(features @ params["hidden"])
        kept = jax.vmap(lambda key: jax.random.bernoulli(key, shape=(64,)))(keys)
        logits = jnp.where(kept, 2 * hidden, 0) @ params["output"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, classes)

    def body() -> int:
        counted: list[str] = []
        jax.monitoring.register_event_duration_secs_listener(
            lambda event, *_, **__: counted.append(event) if "backend_compile" in event else None
        )
        dataset = (inputs.astype(np.float32), labels)
        optimizer = optax.adamw(1e-3)
        more = arguments(folder, options)
        job = JaxJob(params, optimizer, losses, dataset, random_keys=True, **more)
        n_before = len(counted)
        for batch in job:
            gate.wait(job.step_number)
            time.sleep(options.get("sample_s", 0.0) * len(batch[0]))
            job.step(batch)
        print(f"compiled {n_before} programs, then {len(counted) - n_before}", file=sys.stderr)
        return 0

    return body, FlatTree.of(params).sizes()


def arguments(folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments that jobs of both frameworks have."""
    from meshmend.train.state.checkpoint import Saving

    every = options.get("save_every")
    return {
        "batch": options.get("batch", 48),
        "steps": options["steps"],
        "policy": options.get("policy", "constant"),
        "saving": Saving(folder / "checkpoints", every) if every else None,
        "resume": Path(options["resume"]) if "resume" in options else None,
        "check_shares": options.get("check_shares"),
        "on_wrong_result": options.get("on_wrong_result"),
        "shares": options.get("shares"),
    }


class Gate:
    """No chip gets past a step before some events have come; the steps after it are slow."""

    def __init__(self, file: Path, step: int | None, events: list[Any]) -> None:
        self._file, self._step, self._events = file, step, events

    def wait(self, step: int) -> None:
        while step == self._step and not self._file.exists():
            time.sleep(0.01)
        if self._step is not None and step > self._step:
            time.sleep(0.05)

    def take(self, event: dict[str, Any]) -> None:
        if self._events and is_seen(event, *self._events[0]):
            del self._events[0]
            if not self._events:
                self._file.touch()


def main() -> None:
    from meshmend.config import JobConfig, LocalConfig, MeshConfig, RunConfig, SumConfig, Timing
    from meshmend.launch.elastic import run_elastic
    from meshmend.launch.job_processes import ElasticJob
    from meshmend.membership.events import TimedEvent, event_line
    from meshmend.train.data.audit import audit
    from meshmend.transport.codec import plain
    from planners import make_no_plans_ahead

    folder, options = Path(sys.argv[1]), json.loads(sys.argv[2])
    make_no_plans_ahead()
    gate = Gate(folder / "gate", *options.get("gate", (None, [])))
    make = jax_job if options.get("framework") == "jax" else torch_job
    body, sums = make(folder, options, gate)
    events: list[TimedEvent] = []

    def take(timed: TimedEvent) -> None:
        events.append(timed)
        gate.take(json.loads(event_line(timed)))

    outcome = run_elastic(
        ElasticJob(
            JobConfig(
                mesh=MeshConfig(shape=options["mesh"], fail=tuple(options.get("fail", ()))),
                job=RunConfig(run_dir=str(folder), check_every_step=True),
                sums=SumConfig(
                    checksum=bool(options.get("checksum")), watch_links="slow_link" in options
                ),
                timing=Timing(
                    heartbeat_timeout_s=options.get("heartbeat_timeout_s", 60.0),
                    holder_timeout_s=options.get("holder_timeout_s", 60.0),
                ),
                local=LocalConfig(inject=tuple(options.get("inject", ()))),
            ),
            body=body,
            on_event=take,
            sums=sums,
        )
    )
    result = {
        "finished": outcome.is_finished,
        "why": outcome.why,
        "chips": outcome.chips,
        "faults": [plain(each.event()) for each in outcome.recoveries],
        "audit": asdict(audit(folder / "ledger")),
        "events": [json.loads(event_line(event)) for event in events],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()

"""Runs a benchmark: contenders take turns on one network, payload by payload.

In every round each contender runs once, so that other work of the machine slows all of them alike.
OpenMPI starts its own processes, so all its repetitions run together at the end.
"""

import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from meshmend.errors import BenchmarkError, InputError
from meshmend.lab.bench.contenders import ITEM_BYTES, Network
from meshmend.lab.bench.link_figures import measured_fabric
from meshmend.lab.bench.openmpi import OpenMpi, openmpi_repetitions, why_unavailable
from meshmend.lab.bench.runners import AUTO, Gloo, Planned, import_torch, planned
from meshmend.lab.bench.worker_pool import Repetition, WorkerPool
from meshmend.lab.testbed.bed import Testbed
from meshmend.planning.pricing import Question
from meshmend.planning.progress import ProgressCallback, ProgressShares
from meshmend.schedule.algorithms import algorithm
from meshmend.simulator.limit import limit
from meshmend.topology.fabric import Fabric
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh

PEERS = ("gloo", "openmpi")

Runner = Planned | Gloo | OpenMpi


@dataclass(frozen=True)
class BenchmarkRequest:
    """What to measure; without `link_bandwidth` the workers use loopback, not a testbed."""

    mesh: Mesh
    payloads: tuple[int, ...]
    algorithms: tuple[str, ...] = (AUTO,)
    peers: tuple[str, ...] = ()
    link_bandwidth: float | None = None
    repeat: int = 5

    def __post_init__(self) -> None:
        if self.repeat < 1:
            raise InputError(f"--repeat needs 1 or more, but got {self.repeat}")
        if small := [size for size in self.payloads if size < ITEM_BYTES]:
            raise InputError(f"--payload needs {ITEM_BYTES} bytes or more, but got {small[0]}")
        if unknown := [peer for peer in self.peers if peer not in PEERS]:
            raise InputError(f"--compare needs {' or '.join(PEERS)}, but got {unknown[0]!r}")
        part = largest_part(self.mesh)
        if part.n_live < 2:
            raise InputError(f"bench needs two connected chips or more, but got {self.mesh}")
        for name in self.algorithms:
            if name != AUTO:
                algorithm(name).check(part)


@dataclass(frozen=True)
class Result:
    """The times of one contender, without those of the first repetition, which warms up."""

    name: str
    detail: str
    times_s: tuple[float, ...]
    predicted_s: float | None
    correct: bool

    @property
    def median_s(self) -> float:
        return statistics.median(self.times_s)


@dataclass(frozen=True)
class PayloadResults:
    """The results for one payload; `limit_s` is None if the request names no link bandwidth."""

    payload_bytes: int
    limit_s: float | None
    results: tuple[Result, ...]

    def ratio(self, time_s: float) -> float | None:
        """Return a time divided by the limit, or None if there is no limit."""
        return None if self.limit_s is None else time_s / self.limit_s


@dataclass(frozen=True)
class BenchmarkResults:
    """The results of a request: the measured links, and one entry of `sweep` per payload.

    `absent` says, by name, why a contender was not measured.
    """

    request: BenchmarkRequest
    fabric: Fabric
    sweep: tuple[PayloadResults, ...]
    absent: dict[str, str]


def run_benchmark(request: BenchmarkRequest, progress: ProgressCallback) -> BenchmarkResults:
    """Measure what the request asks for on this machine, now, and return the results.

    Raises:
        InputError: this machine cannot make the testbed, or Gloo is wanted and torch is missing.
        BenchmarkError: a contender did not finish.
    """
    part = largest_part(request.mesh)
    if "gloo" in request.peers:
        progress("importing torch")
        import_torch()
    absent = {}
    if "openmpi" in request.peers and (reason := why_unavailable()):
        absent["openmpi"] = reason
    progress("building the network")
    with (
        nullcontext()
        if request.link_bandwidth is None
        else Testbed.up(request.mesh, link_bandwidth=request.link_bandwidth) as bed
    ):
        network = Network(part, bed)
        fabric = measured_fabric(network, progress)
        turn = ProgressShares(progress, len(request.payloads)).in_turn()
        sweep = tuple(
            _measure_payload(request, network, fabric, size, absent, next(turn))
            for size in request.payloads
        )
    return BenchmarkResults(request, fabric, sweep, absent)


def _measure_payload(
    request: BenchmarkRequest,
    network: Network,
    fabric: Fabric,
    size: int,
    absent: dict[str, str],
    progress: ProgressCallback,
) -> PayloadResults:
    n_elements = size // ITEM_BYTES
    payload_bytes = n_elements * ITEM_BYTES
    question = Question(network.mesh, payload_bytes, fabric)
    predicts = network.bed is not None
    ours = [
        # The fractions of a plan's progress are not fractions of the benchmark's progress.
        planned(name, question, predicts=predicts, progress=lambda step, part=None: progress(step))
        for name in request.algorithms
    ]
    runners: list[Planned | Gloo] = [*ours]
    if "gloo" in request.peers:
        runners.append(Gloo(n_elements))
    repetitions = _rounds(network, runners, request.repeat, progress)
    results = [
        _result(runner, measured) for runner, measured in zip(runners, repetitions, strict=True)
    ]
    if "openmpi" in request.peers and "openmpi" not in absent:
        progress("openmpi")
        mpi = OpenMpi(n_elements)
        try:
            results.append(_result(mpi, openmpi_repetitions(network, mpi, request.repeat + 1)))
        except BenchmarkError as error:  # the results of the others still count
            absent["openmpi"] = str(error)
    return PayloadResults(
        payload_bytes, _limit_s(request, network.mesh, payload_bytes), tuple(results)
    )


def _rounds(
    network: Network, runners: Sequence[Planned | Gloo], repeat: int, progress: ProgressCallback
) -> list[list[Repetition]]:
    repetitions: list[list[Repetition]] = [[] for _ in runners]
    with WorkerPool(network, runners) as pool:
        for turn in range(repeat + 1):
            for runner, measured in zip(runners, repetitions, strict=True):
                step = f"{runner.name}: {f'{turn} of {repeat}' if turn else 'warming up'}"
                progress(step, sum(map(len, repetitions)) / (len(repetitions) * (repeat + 1)))
                measured.append(pool.measure(runner))
    return repetitions


def _result(runner: Runner, repetitions: Sequence[Repetition]) -> Result:
    return Result(
        name=runner.name,
        detail=runner.detail,
        times_s=tuple(repetition.time_s for repetition in repetitions[1:]),
        predicted_s=runner.predicted_s,
        correct=all(repetition.correct for repetition in repetitions),
    )


def _limit_s(request: BenchmarkRequest, mesh: Mesh, payload_bytes: int) -> float | None:
    """Return the physical limit at the requested link bandwidth, without packet headers."""
    if request.link_bandwidth is None:
        return None
    requested = Fabric(
        "requested", request.link_bandwidth, hop_latency_s=0.0, message_overhead_s=0.0
    )
    return limit(mesh, requested, payload_bytes).time_s

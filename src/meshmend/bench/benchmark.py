"""A race: contenders one after another, round after round, on one network; then the figures.

Rounds are interleaved, so that whatever else the machine does hits all contenders alike; OpenMPI,
which brings its own processes, runs as a block at the end.
"""

import statistics
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from meshmend.bench.contenders import ITEM_BYTES, Network
from meshmend.bench.link_figures import measured_fabric
from meshmend.bench.openmpi import OpenMpi, mpi_laps, why_not
from meshmend.bench.runners import AUTO, Gloo, Planned, import_torch, planned
from meshmend.bench.worker_pool import Lap, WorkerPool
from meshmend.errors import BenchmarkError, InputError
from meshmend.limits.limit import limit
from meshmend.planning.pricing import Question
from meshmend.planning.progress import ProgressCallback, ProgressShares
from meshmend.schedule.algorithms import algorithm
from meshmend.testbed.bed import Testbed
from meshmend.topology.fabric import Fabric
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh

PEERS = ("gloo", "openmpi")

Runner = Planned | Gloo | OpenMpi


@dataclass(frozen=True)
class BenchmarkRequest:
    """What to measure: `link_bandwidth` None is loopback, without a network of links."""

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
    """What one contender took: all repetitions but the first, which warms up."""

    name: str
    detail: str
    times_s: tuple[float, ...]
    predicted_s: float | None
    correct: bool

    @property
    def median_s(self) -> float:
        return statistics.median(self.times_s)


@dataclass(frozen=True)
class Race:
    """The results for one payload; `limit_s` is None where no link rate was asked for."""

    payload_bytes: int
    limit_s: float | None
    results: tuple[Result, ...]

    def ratio(self, time_s: float) -> float | None:
        """Return a time over the limit, where there is one."""
        return None if self.limit_s is None else time_s / self.limit_s


@dataclass(frozen=True)
class BenchmarkResults:
    """All races of a request, the link figures measured first, and who could not take part."""

    request: BenchmarkRequest
    fabric: Fabric
    races: tuple[Race, ...]
    absent: dict[str, str]


def run_benchmark(request: BenchmarkRequest, progress: ProgressCallback) -> BenchmarkResults:
    """Return the races that were wished for, run now on this machine.

    Raises:
        InputError: the machine cannot make the testbed, or lacks torch for Gloo.
        BenchmarkError: a contender did not finish.
    """
    part = largest_part(request.mesh)
    if "gloo" in request.peers:
        progress("importing torch")
        import_torch()
    absent = {}
    if "openmpi" in request.peers and (reason := why_not()):
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
        races = tuple(
            _race(request, network, fabric, size, absent, next(turn)) for size in request.payloads
        )
    return BenchmarkResults(request, fabric, races, absent)


def _race(
    request: BenchmarkRequest,
    network: Network,
    fabric: Fabric,
    size: int,
    absent: dict[str, str],
    progress: ProgressCallback,
) -> Race:
    n_elements = size // ITEM_BYTES
    payload_bytes = n_elements * ITEM_BYTES
    question = Question(network.mesh, payload_bytes, fabric)
    predicts = network.bed is not None
    ours = [
        # What a plan tells of its parts is no part of the race.
        planned(name, question, predicts=predicts, progress=lambda step, part=None: progress(step))
        for name in request.algorithms
    ]
    runners: list[Planned | Gloo] = [*ours]
    if "gloo" in request.peers:
        runners.append(Gloo(n_elements))
    laps = _rounds(network, runners, request.repeat, progress)
    results = [_result(runner, own) for runner, own in zip(runners, laps, strict=True)]
    if "openmpi" in request.peers and "openmpi" not in absent:
        progress("openmpi")
        mpi = OpenMpi(n_elements)
        try:
            results.append(_result(mpi, mpi_laps(network, mpi, request.repeat + 1)))
        except BenchmarkError as error:  # what the others did still counts
            absent["openmpi"] = str(error)
    return Race(payload_bytes, _limit_s(request, network.mesh, payload_bytes), tuple(results))


def _rounds(
    network: Network, runners: Sequence[Planned | Gloo], repeat: int, progress: ProgressCallback
) -> list[list[Lap]]:
    laps: list[list[Lap]] = [[] for _ in runners]
    with WorkerPool(network, runners) as pool:
        for turn in range(repeat + 1):
            for runner, own in zip(runners, laps, strict=True):
                told = f"{runner.name}: {f'{turn} of {repeat}' if turn else 'warming up'}"
                progress(told, sum(map(len, laps)) / (len(laps) * (repeat + 1)))
                own.append(pool.lap(runner))
    return laps


def _result(runner: Runner, laps: Sequence[Lap]) -> Result:
    return Result(
        name=runner.name,
        detail=runner.detail,
        times_s=tuple(lap.time_s for lap in laps[1:]),
        predicted_s=runner.predicted_s,
        correct=all(lap.right for lap in laps),
    )


def _limit_s(request: BenchmarkRequest, mesh: Mesh, payload_bytes: int) -> float | None:
    """Return the physical limit at the link rate that was asked for, headers not counted."""
    if request.link_bandwidth is None:
        return None
    asked = Fabric("asked", request.link_bandwidth, hop_latency_s=0.0, message_overhead_s=0.0)
    return limit(mesh, asked, payload_bytes).time_s

"""Several sums in flight on a testbed: many small ones next to one large one, and DDP next to Gloo.

Every part alternates its contenders in one run, and prints medians and their ratio.

    python benchmarks/in_flight.py --repeat 9
    python benchmarks/in_flight.py --only ddp --bandwidth 50Mbit
"""

import argparse
import os
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from meshmend.errors import BenchmarkError
from meshmend.lab.bench.contenders import (
    Buffer,
    Contender,
    Network,
    Participant,
    Run,
    import_torch,
)
from meshmend.lab.bench.worker_pool import WorkerPool
from meshmend.lab.testbed.bed import Testbed
from meshmend.planning.catalogue import Catalogue, CollectiveCall, payload_class, proved_schedule
from meshmend.planning.plan import AUTO
from meshmend.planning.settings import SMALL_WINDOW_BYTES, Settings
from meshmend.schedule.table import Collective
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from meshmend.units import parse_bandwidth
from record import record

_HOLE, _SQUARE = ("4x4", "2x2@0,2"), ("2x2", "")
_N_SUMS, _SUM_ELEMENTS = 100, 16_000  # 64 KB each
_SUM = CollectiveCall("allreduce")
_TIMEOUT_S = 60.0
_LAYERS, _WIDTH = 16, 255  # 16 layers of 255 KB: 4 MB
_BUCKET_MB = 1
_MOST_SMALL, _MOST_DDP = 1.5, 0.8  # the ratios to reach


@dataclass(frozen=True, eq=False)
class Sums:
    """Sums of equal parts of the payload, as a job plans them; at once or one after another."""

    name: str
    mesh: Mesh
    n_sums: int
    at_once: bool = True
    n_elements: int = _N_SUMS * _SUM_ELEMENTS
    checked: Collective | None = Collective.ALLREDUCE

    def ready(self, participant: Participant) -> Run:
        """Connect to the peers and return a function that sums."""
        catalogue = Catalogue(self.mesh, AUTO, 0, participant.rank)
        task = catalogue.task(_SUM, self.n_elements // self.n_sums, "float32")
        participant.connect(task.program.peers, timeout_s=_TIMEOUT_S)
        transport = participant.transport

        def run(buffer: Buffer) -> Buffer:
            parts = [part.view(np.uint8) for part in buffer.reshape(self.n_sums, -1)]
            if not self.at_once:
                for part in parts:
                    transport.run(task, part, timeout_s=_TIMEOUT_S)
                return buffer
            for pending in [transport.start(task, part, timeout_s=_TIMEOUT_S) for part in parts]:
                pending.wait()
            return buffer

        return run


@dataclass(frozen=True, eq=False)
class DdpStep:
    """A forward and a backward pass of a small model under DDP, whose gradients are 4 MB."""

    name: str
    mesh: Mesh
    n_elements: int = 0
    checked: Collective | None = None

    def ready(self, participant: Participant) -> Run:
        """Make the process groups if there are none; return a function that takes one step."""
        import torch
        from torch.nn.parallel import DistributedDataParallel

        group = _process_group(self.name, self.mesh, participant)
        torch.manual_seed(0)
        layers = [torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(_LAYERS)]
        model = DistributedDataParallel(
            torch.nn.Sequential(*layers), bucket_cap_mb=_BUCKET_MB, process_group=group
        )
        inputs = torch.randn(4, _WIDTH)

        def step(buffer: Buffer) -> Buffer:
            model.zero_grad()
            model(inputs).sum().backward()
            return buffer

        for _ in range(3):  # DDP makes its buckets anew after the first step
            step(np.zeros(0, dtype=np.float32))
        return step


def _process_group(name: str, mesh: Mesh, participant: Participant) -> Any:
    import torch
    import torch.distributed

    import meshmend.torch  # noqa: F401  # registers the backend

    dist: Any = torch.distributed
    if not dist.is_initialized():
        torch.set_num_threads(1)
        os.environ["GLOO_SOCKET_IFNAME"] = participant.interface
        store = dist.FileStore(str(participant.folder / "ddp"), participant.n_ranks)
        dist.init_process_group(
            "gloo", store=store, rank=participant.rank, world_size=participant.n_ranks
        )
    if name == "gloo":
        return dist.group.WORLD
    bind, _ = participant.addresses[participant.rank]
    # As a job with --testbed has it: without a fabric nobody else knows that the links are slow.
    settings = Settings(mesh, bind=bind, window_bytes=SMALL_WINDOW_BYTES)
    return dist.new_group(backend="meshmend", pg_options=settings)


def measured(
    network: Network, contenders: Sequence[Contender], repeat: int
) -> dict[str, list[float]]:
    """Return the times of each contender, taken in turn, without the first round.

    Raises:
        BenchmarkError: a sum was wrong, or did not end.
    """
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    with WorkerPool(network, contenders) as pool:
        for turn in range(repeat + 1):
            for contender in contenders:
                found = pool.measure(contender)
                if not found.correct:
                    raise BenchmarkError(f"{contender.name} gave a wrong sum")
                if turn:
                    times[contender.name].append(found.time_s)
    return times


def _figures(times: dict[str, list[float]], over: str) -> dict[str, Any]:
    """Return medians, and the ratios to one contender in the same round."""
    ratios = {
        name: [mine / base for mine, base in zip(found, times[over], strict=True)]
        for name, found in times.items()
    }
    return {
        "median_s": {name: statistics.median(found) for name, found in times.items()},
        f"median_of_{over}": {name: statistics.median(each) for name, each in ratios.items()},
        "times_s": times,
    }


def small_sums(mesh: Mesh, bandwidth: float, repeat: int) -> dict[str, Any]:
    """Return what 100 sums of 64 KB take next to one of 6.4 MB."""
    contenders = [
        Sums("one", mesh, 1),
        Sums("in-flight", mesh, _N_SUMS),
        Sums("in-turn", mesh, _N_SUMS, at_once=False),
    ]
    for contender in contenders:  # the workers inherit the plans
        n_bytes = 4 * contender.n_elements // contender.n_sums
        proved_schedule(mesh, AUTO, _SUM, payload_class(_SUM, n_bytes))
    with Testbed.up(mesh, link_bandwidth=bandwidth) as bed:
        return _figures(measured(Network(mesh, bed), contenders, repeat), "one")


def ddp_steps(mesh: Mesh, bandwidth: float, repeat: int) -> dict[str, Any]:
    """Return what a step of DDP takes on our backend next to Gloo."""
    import_torch()
    contenders = [DdpStep("gloo", mesh), DdpStep("meshmend", mesh)]
    proved_schedule(mesh, AUTO, _SUM, payload_class(_SUM, _BUCKET_MB << 20))
    with Testbed.up(mesh, link_bandwidth=bandwidth) as bed:
        return _figures(measured(Network(mesh, bed), contenders, repeat), "gloo")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["sums", "ddp"])
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--bandwidth", default="50Mbit")
    arguments = parser.parse_args()
    bandwidth = parse_bandwidth(arguments.bandwidth)
    figures: dict[str, Any] = {"link_bandwidth": arguments.bandwidth}
    for shape, fail in (_HOLE, _SQUARE) if arguments.only != "ddp" else ():
        mesh = parse_mesh(shape, fail=[fail] if fail else [])
        found = figures[f"sums on {mesh}"] = small_sums(mesh, bandwidth, arguments.repeat)
        ratio = found["median_of_one"]
        print(f"{mesh}: 100 sums of 64 KB, of one of 6.4 MB ({found['median_s']['one']:.3f} s):")
        print(f"  in flight {ratio['in-flight']:.3f} (at most {_MOST_SMALL})")
        print(f"  one at a time {ratio['in-turn']:.3f}")
    if arguments.only != "sums":
        mesh = parse_mesh(_HOLE[0], fail=[_HOLE[1]])
        found = figures[f"DDP on {mesh}"] = ddp_steps(mesh, bandwidth, arguments.repeat)
        ratio = found["median_of_gloo"]["meshmend"]
        print(
            f"{mesh}: DDP, 4 MB in buckets of 1 MB: Gloo {found['median_s']['gloo']:.3f} s a step"
        )
        print(f"  ours {ratio:.3f} of it (at most {_MOST_DDP})")
    if arguments.only is None:
        print(f"written {record('in_flight', figures)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""What `dist.all_reduce` of a script takes over what `meshmend bench` measures for the same plan.

    python benchmarks/script_sums.py [--mesh 4x4] [--fail 2x2@0,2] [--testbed 50Mbit] [--json]

The same processes run both in turns, as `bench` does: each starts at a time named in advance, and a
figure is the median from the first start to the last end. Without `--testbed` they are on loopback.
`all_reduce` goes through torch.distributed and our process group, which plans for the fabric that
was measured; `bench` runs its plan on the connections alone. The testbed needs root.
"""

import json
import os
import statistics
from dataclasses import dataclass
from typing import Any

from meshmend.errors import BenchmarkError
from meshmend.lab.bench.contenders import (
    ITEM_BYTES,
    Buffer,
    Contender,
    Network,
    Participant,
    Run,
    planned,
)
from meshmend.lab.bench.link_figures import measured_fabric
from meshmend.lab.bench.worker_pool import WorkerPool
from meshmend.lab.testbed.bed import Testbed
from meshmend.launch.script import preload_modules
from meshmend.planning.catalogue import CollectiveCall, payload_class, proved_schedule
from meshmend.planning.plan import AUTO
from meshmend.planning.settings import Settings
from meshmend.planning.target import Question
from meshmend.schedule.table import Collective
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from meshmend.units import format_bytes, parse_bandwidth, parse_bytes
from record import parser_of, record

_PRELOAD = ("meshmend.torch", "meshmend.torch.group_factory", "torch.distributed.rpc")
_PAYLOADS = "64KiB,256KiB,1MiB,4MiB"
_SUM = CollectiveCall("allreduce")


@dataclass(frozen=True, eq=False)
class AllReduce:
    """A script's sum: `dist.all_reduce` on a process group that knows this fabric."""

    mesh: Mesh
    n_elements: int
    fabric: str
    name: str = "all_reduce"
    checked: Collective | None = Collective.ALLREDUCE

    def ready(self, participant: Participant) -> Run:
        """Make the process group if there is none; return a function that calls torch."""
        import torch
        import torch.distributed

        dist: Any = torch.distributed
        if not dist.is_initialized():
            torch.set_num_threads(1)
            os.environ["GLOO_SOCKET_IFNAME"] = participant.interface
            store = dist.FileStore(str(participant.folder / "store"), participant.n_ranks)
            bind = participant.addresses[participant.rank][0]
            dist.init_process_group(
                "meshmend",
                store=store,
                rank=participant.rank,
                world_size=participant.n_ranks,
                pg_options=Settings(self.mesh, bind=bind, fabric=self.fabric),
            )

        def run(buffer: Buffer) -> Buffer:
            dist.all_reduce(torch.from_numpy(buffer))
            return buffer

        return run


def measured(mesh: Mesh, bed: Testbed | None, sizes: list[int], repeat: int) -> dict[str, Any]:
    """Return the median times of both for each payload, and their ratio.

    Raises:
        BenchmarkError: a sum was wrong, or did not end.
    """
    network = Network(mesh, bed)
    fabric = measured_fabric(network, lambda _: None)
    figures = fabric.figures if bed is not None else ""
    algorithm = Settings(mesh, fabric=figures).planned_algorithm
    pairs: list[tuple[Contender, Contender]] = []
    for size in sizes:
        question = Question(mesh, size, fabric)
        plain = planned(AUTO, question, predicts=bed is not None, progress=lambda *_: None)
        proved_schedule(mesh, algorithm, _SUM, payload_class(_SUM, size))  # workers inherit it
        pairs.append((plain, AllReduce(mesh, size // ITEM_BYTES, figures)))
    times: list[tuple[list[float], list[float]]] = [([], []) for _ in pairs]
    with WorkerPool(network, [each for pair in pairs for each in pair]) as pool:
        for turn in range(repeat + 1):
            for pair, of_pair in zip(pairs, times, strict=True):
                for contender, found in zip(pair, of_pair, strict=True):
                    repetition = pool.measure(contender)
                    if not repetition.correct:
                        raise BenchmarkError(f"{contender.name} gave a wrong sum")
                    if turn:
                        found.append(repetition.time_s)
    rows = []
    for size, (plain_s, script_s) in zip(sizes, times, strict=True):
        ratios = [mine / base for mine, base in zip(script_s, plain_s, strict=True)]
        rows.append(
            {
                "payload_bytes": size,
                "bench_s": statistics.median(plain_s),
                "all_reduce_s": statistics.median(script_s),
                "median_ratio": statistics.median(ratios),
            }
        )
    return {"mesh": str(mesh), "fabric": figures, "rows": rows}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--mesh", default="4x4")
    parser.add_argument("--fail", action="append", default=[])
    parser.add_argument("--testbed", help="the rate of its links; without one on loopback")
    parser.add_argument("--payload", default=_PAYLOADS)
    parser.add_argument("--repeat", type=int, default=15)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    preload_modules(_PRELOAD)  # the workers inherit them
    mesh = parse_mesh(arguments.mesh, fail=arguments.fail)
    sizes = [int(parse_bytes(each)) for each in arguments.payload.split(",")]
    if arguments.testbed:
        with Testbed.up(mesh, link_bandwidth=parse_bandwidth(arguments.testbed)) as bed:
            figures = measured(mesh, bed, sizes, arguments.repeat)
    else:
        figures = measured(mesh, None, sizes, arguments.repeat)
    if arguments.json:
        print(json.dumps(figures))
    else:
        print(f"{mesh}, {figures['fabric'] or 'loopback'}")
        for row in figures["rows"]:
            print(
                f"{format_bytes(row['payload_bytes']):>8}  bench {row['bench_s'] * 1e3:.2f} ms  "
                f"all_reduce {row['all_reduce_s'] * 1e3:.2f} ms  {row['median_ratio']:.3f}"
            )
    if not arguments.no_write:
        record("script_sums", figures)


if __name__ == "__main__":
    main()

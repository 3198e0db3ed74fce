"""Plans that other programs make for a mesh: ForestColl's trees, and TACOS's all-gathers.

Neither program is part of this project, and nothing here builds one. ForestColl is Python: a folder
with its checkout is enough. TACOS 1.2 is a C++ library with one example, whose mesh is a constant;
its writer makes MSCCL XML. A folder holds one such file for each mesh, named as `file_name` says,
whose rank n is the n-th live chip in row-major order.
"""

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meshmend.planning.formats.xml_import import schedule_from_xml
from meshmend.planning.plan import Plan, planned
from meshmend.planning.target import Target
from meshmend.schedule.table import COPY, REDUCE, Collective, Schedule
from meshmend.topology.mesh import Mesh

# Runs in the folder of ForestColl: links on standard input, trees on standard output.
_FORESTCOLL = """
import sys
import networkx
from pipeline_allgather import optimal_pipeline_spanning_trees, spanning_trees_to_xml
graph = networkx.DiGraph()
for line in sys.stdin:
    graph.add_edge(*(tuple(map(int, chip.split(","))) for chip in line.split()), capacity=1)
(_, k), (trees, chunks) = optimal_pipeline_spanning_trees(graph, set(graph.nodes()))
print(spanning_trees_to_xml(trees, chunks, k))
"""
_MOST_CHIPS = 64  # of ForestColl, which takes minutes for 8x8


@dataclass(frozen=True, eq=False)
class OtherPlan:
    """A proved plan of another program, or in `why_not` the reason that there is none."""

    plan: Plan | None
    why_not: str = ""
    planning_s: float | None = None


def file_name(shape: str, wrap: str, fail: str) -> str:
    """Return how a file for a mesh is called: `8x8-torus-less-2x2-2-2.xml`."""
    less = f"-less-{fail}".replace("@", "-").replace(",", "-") if fail else ""
    return f"{shape}{'-torus' if wrap == 'all' else ''}{less}.xml"


def forestcoll_plan(folder: Path | None, mesh: Mesh, *, patience_s: float) -> OtherPlan:
    """Return the allreduce over the trees that ForestColl finds for the links of a mesh."""
    if folder is None or not (folder / "pipeline_allgather.py").is_file():
        return OtherPlan(None, "no checkout; name it with --forestcoll DIR")
    if mesh.n_live > _MOST_CHIPS:
        return OtherPlan(None, f"is not run on more than {_MOST_CHIPS} chips")
    names = [",".join(map(str, chip)) for chip in mesh.live]
    links = [(names[a], names[b]) for a, b in mesh.links.tolist()]
    lines = "".join(f"{a} {b}\n{b} {a}\n" for a, b in links)
    began = time.perf_counter()
    try:
        done = subprocess.run(
            [sys.executable, "-c", _FORESTCOLL],
            cwd=folder,
            input=lines,
            capture_output=True,
            text=True,
            timeout=patience_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return OtherPlan(None, f"found no trees within {patience_s:g} s")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no reason"])[-1]
        return OtherPlan(None, f"failed: {last}")
    took_s = time.perf_counter() - began
    text = done.stdout[done.stdout.index("<") :]
    return OtherPlan(planned(mesh, schedule_from_xml(text, mesh), Target()), planning_s=took_s)


def tacos_plan(folder: Path | None, mesh: Mesh, name: str) -> OtherPlan:
    """Return the allreduce whose second half is the all-gather that TACOS wrote for a mesh."""
    if folder is None:
        return OtherPlan(None, "no files of TACOS; name their folder with --tacos DIR")
    file = folder / name
    if not file.is_file():
        return OtherPlan(None, f"no file {name}")
    gather = schedule_from_xml(file.read_text(encoding="utf-8"), mesh)
    planned(mesh, gather, Target())  # what TACOS wrote is proved as it is
    return OtherPlan(planned(mesh, allreduce_of(gather), Target()))


def allreduce_of(gather: Schedule) -> Schedule:
    """Return an all-gather with its own reverse before it: sums go back the way that copies take.

    TACOS's paper makes its allreduce like this. Each rank gets a chunk once, so the way of a chunk
    is a tree, and its reverse adds up everything at its owner.
    """
    there, back = np.arange(gather.n_rows)[::-1], np.arange(gather.n_rows)
    n_rows = gather.n_rows
    return Schedule(
        algorithm=gather.algorithm,
        collective=Collective.ALLREDUCE,
        n_ranks=gather.n_ranks,
        cuts=gather.cuts,
        owners=gather.owners,
        src=np.concatenate([gather.dst[there], gather.src[back]]),
        dst=np.concatenate([gather.src[there], gather.dst[back]]),
        lo=np.concatenate([gather.lo[there], gather.lo[back]]),
        hi=np.concatenate([gather.hi[there], gather.hi[back]]),
        op=np.repeat(np.array([REDUCE, COPY], dtype=np.uint8), n_rows),
    )

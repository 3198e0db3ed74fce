"""Plans that other programs make for a mesh: ForestColl's trees, and TACOS's all-gathers.

Neither program is part of this project, and nothing here builds one. ForestColl is Python: a folder
with its checkout is enough. TACOS is a C++ library. A folder holds what it found: all-gathers as
MSCCL XML, any number for each mesh, with other numbers of chunks and other draws. The name of a
file is the mesh's, as `mesh_name` says, and then anything after a dot: `8x8-torus.draw-2.xml`. Rank
n is the n-th live chip in row-major order.
"""

import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from meshmend.planning.formats.xml_import import schedule_from_xml
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
class OtherPlans:
    """Allreduces of another program, or in `why_not` the reason that there are none."""

    sums: tuple[Schedule, ...] = ()
    why_not: str = ""
    planning_s: float | None = None


def mesh_name(shape: str, wrap: str, fail: str) -> str:
    """Return how files for a mesh begin: `8x8-torus-less-2x2-2-2`."""
    less = f"-less-{fail}".replace("@", "-").replace(",", "-") if fail else ""
    return f"{shape}{'-torus' if wrap == 'all' else ''}{less}"


def forestcoll_plans(folder: Path | None, mesh: Mesh, *, patience_s: float) -> OtherPlans:
    """Return the allreduce over the trees that ForestColl finds for the links of a mesh."""
    if folder is None or not (folder / "pipeline_allgather.py").is_file():
        return OtherPlans(why_not="no checkout; name it with --forestcoll DIR")
    if mesh.n_live > _MOST_CHIPS:
        return OtherPlans(why_not=f"is not run on more than {_MOST_CHIPS} chips")
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
        return OtherPlans(why_not=f"found no trees within {patience_s:g} s")
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no reason"])[-1]
        return OtherPlans(why_not=f"failed: {last}")
    took_s = time.perf_counter() - began
    text = done.stdout[done.stdout.index("<") :]
    return OtherPlans((schedule_from_xml(text, mesh),), planning_s=took_s)


def tacos_plans(folder: Path | None, mesh: Mesh, name: str) -> OtherPlans:
    """Return the allreduces whose second halves are the all-gathers that TACOS found."""
    if folder is None:
        return OtherPlans(why_not="no files of TACOS; name their folder with --tacos DIR")
    files = sorted(folder.glob(f"{name}.*xml"))
    if not files:
        return OtherPlans(why_not=f"no file {name}.xml")
    gathers = (schedule_from_xml(file.read_text(encoding="utf-8"), mesh) for file in files)
    return OtherPlans(tuple(allreduce_of(gather) for gather in gathers))


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


def half_of(allreduce: Schedule, collective: Collective) -> Schedule:
    """Return the rows of an allreduce that add up, a reduce-scatter, or those that copy.

    Each rank owns what it holds the sum of.
    """
    rows = allreduce.op == (REDUCE if collective is Collective.REDUCE_SCATTER else COPY)
    columns = {name: getattr(allreduce, name)[rows] for name in ("src", "dst", "lo", "hi", "op")}
    return replace(allreduce, collective=collective, phases=(), **columns)

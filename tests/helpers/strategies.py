"""Meshes and schedules to draw from: broken meshes, aligned holes, tables right and wrong."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from meshmend.schedule.table import SUMS, Collective, Schedule, even_cuts, index_dtype
from meshmend.topology.failures import Block, Link, SlowLink
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh

Row = tuple[int, int, int, int, int]  # src, dst, lo, hi, op


@st.composite
def broken_meshes(draw: st.DrawFn, *, min_side: int = 1) -> Mesh:
    """Meshes and tori of one to three axes that lost chips and links, perhaps in pieces."""
    shape = tuple(draw(st.lists(st.integers(min_side, 5), min_size=1, max_size=3)))
    wrap = tuple(draw(st.lists(st.booleans(), min_size=len(shape), max_size=len(shape))))
    mesh = Mesh(shape, wrap)
    failed = draw(st.sets(st.sampled_from(mesh.live), max_size=mesh.n_chips // 3))
    links = [Link.between(mesh.live[one], mesh.live[two]) for one, two in mesh.links]
    cut = draw(st.sets(st.sampled_from(links), max_size=len(links) // 4)) if links else set()
    return replace(mesh, failed=frozenset(failed), failed_links=frozenset(cut))


def with_slow_links(mesh: Mesh, seed: int, *, of: int) -> Mesh:
    """Return a mesh some of whose links, at most so many, have a speed in thousandths."""
    rng = np.random.default_rng(seed)
    chosen = rng.permutation(mesh.links)[: int(rng.integers(of, endpoint=True))].tolist()
    return mesh.slowed(
        *(
            SlowLink(Link(mesh.live[one], mesh.live[two]), int(rng.integers(50, 1001)) / 1000)
            for one, two in chosen
        )
    )


def connected_meshes(*, min_side: int = 1) -> st.SearchStrategy[Mesh]:
    """Meshes and tori of one to three axes that lost chips and links, cut down to one part."""
    return broken_meshes(min_side=min_side).map(largest_part)


@st.composite
def meshes_with_dead_blocks(
    draw: st.DrawFn, *, max_side: int = 12, wrap: bool = True, max_dead: int | None = None
) -> Mesh:
    """Connected 2-D meshes (and tori) of even sides that lost whole aligned 2x2 blocks."""
    rows, cols = (2 * draw(st.integers(1, max_side // 2)) for _ in range(2))
    wraps = draw(st.tuples(st.booleans(), st.booleans())) if wrap else (False, False)
    origins = [(row, col) for row in range(0, rows, 2) for col in range(0, cols, 2)]
    most = len(origins) - 1 if max_dead is None else min(max_dead, len(origins) - 1)
    dead = draw(st.sets(st.sampled_from(origins), max_size=most))
    blocks = (Block((2, 2), origin) for origin in sorted(dead))
    return largest_part(Mesh((rows, cols), wraps).without(*blocks))


def aligned_regions(shape: tuple[int, int]) -> Iterator[Block]:
    """Yield every 2k x 2 and 2 x 2k region on even rows and columns that leaves a live chip."""
    tall = [(size, 2) for size in range(2, shape[0] + 1, 2)]
    wide = [(2, size) for size in range(4, shape[1] + 1, 2)]
    for size in (*tall, *wide):
        if size != shape:
            for row in range(0, shape[0] - size[0] + 1, 2):
                for col in range(0, shape[1] - size[1] + 1, 2):
                    yield Block(size, (row, col))


def even_shapes(max_side: int) -> Iterator[tuple[int, int]]:
    """Yield every 2-D shape of even sides from 2 up to the largest."""
    sides = range(2, max_side + 1, 2)
    return ((rows, cols) for rows in sides for cols in sides)


def schedule_from(
    rows: Iterable[Row],
    *,
    n_ranks: int,
    n_chunks: int,
    collective: Collective = Collective.ALLREDUCE,
    owners: Sequence[int] | None = None,
) -> Schedule:
    """Return the schedule with these rows, right or wrong; rank 0 owns all chunks if not said."""
    table = np.array(list(rows), dtype=np.int64).reshape(-1, 5)
    dtype = index_dtype(n_ranks, n_chunks)
    columns = np.ascontiguousarray(table[:, :4].T).astype(dtype)
    return Schedule(
        algorithm="by hand",
        collective=collective,
        n_ranks=n_ranks,
        cuts=even_cuts(n_chunks),
        owners=np.array([0] * n_chunks if owners is None else owners, dtype=np.int32),
        src=columns[0],
        dst=columns[1],
        lo=columns[2],
        hi=columns[3],
        op=table[:, 4].astype(np.uint8),
    )


def rows_of(schedule: Schedule) -> list[Row]:
    """Return the rows of a schedule as plain numbers."""
    columns = (schedule.src, schedule.dst, schedule.lo, schedule.hi, schedule.op)
    return list(zip(*(column.tolist() for column in columns), strict=True))


@st.composite
def tables(draw: st.DrawFn, *, max_rows: int = 30) -> Schedule:
    """Schedules of random rows: few ranks and chunks, so that rows conflict; mostly wrong."""
    n_ranks, n_chunks = draw(st.integers(2, 5)), draw(st.integers(1, 6))
    pair = st.lists(st.integers(0, n_ranks - 1), min_size=2, max_size=2, unique=True)
    bounds = st.lists(st.integers(0, n_chunks), min_size=2, max_size=2, unique=True).map(sorted)
    drawn = draw(st.lists(st.tuples(pair, bounds, st.integers(0, 1)), max_size=max_rows))
    owners = draw(st.lists(st.integers(0, n_ranks - 1), min_size=n_chunks, max_size=n_chunks))
    return schedule_from(
        [(src, dst, lo, hi, op) for (src, dst), (lo, hi), op in drawn],
        n_ranks=n_ranks,
        n_chunks=n_chunks,
        collective=draw(st.sampled_from(list(SUMS))),
        owners=owners,
    )

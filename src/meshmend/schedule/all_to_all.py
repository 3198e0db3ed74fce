"""All-to-all: every chip has a block for every other. `pairs` sends them straight, `relays` around.

A block lies in the payload where its sender and its receiver agree (`Schedule.partners`). Blocks
arrive in a scratch buffer, because those that have not left yet lie in the same places. At the end
each chip puts what arrived into its payload.

**`relays`**. Routes around a hole hug it: on 8x8 less 2x2 the busiest link carries 1.6 times as
much as it has to. So some blocks stop at a third chip. Which ones is searched for: block after
block takes the way, straight or over one chip, that adds the least to the links that are busiest.
Few chips have few blocks, so there each is cut into parts with a way of their own.
"""

from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.errors import UnsupportedError
from meshmend.kernels import kernel
from meshmend.schedule.table import COPY, Collective, Rows, Schedule, check_n_rows, schedule_of
from meshmend.topology.mesh import Mesh
from meshmend.topology.pair_cut import pair_cut
from meshmend.topology.routes import Routes, routes_for
from meshmend.topology.symmetry import stand_in

_ARRIVED: Final = 1  # the buffer in which blocks arrive; relays keep theirs in those after it
_MOST_BUFFERS: Final = 255  # a row names its buffers in one byte
_MOST_RELAYED_CHIPS: Final = 1024  # beyond, a schedule has tens of millions of rows
_PARTS_OF_ALL: Final = 128  # a chip has at least so many parts of blocks, for even loads ...
_MOST_PARTS: Final = 4  # ... but a block no more than this
_PASSES: Final = 6  # each block chooses its way again so often, ...
_PASSES_OF_MANY: Final = 2  # ... where there are many chips so often
_SHARPNESS: Final = 12  # loads count by this power: the busiest channels count alone, almost
_DETOUR: Final = 6  # a way may have so many hops more than the straight one
_NEAR_LEAST: Final = 1.01  # of the least load of the busiest channel: good enough
_IDLE: Final = 0.95  # a straight way whose channels all have less than this of it is kept
_MOST_ALL_TRIED: Final = 256  # up to so many chips a part tries to stop at each ...
_N_TRIED: Final = 32  # ... beyond, at so many of them in each pass

_Ranks = NDArray[np.int64]


def pairs(mesh: Mesh, collective: Collective) -> Schedule:
    """Return the all-to-all in which every block goes straight to its chip.

    Raises:
        UnsupportedError: too many chips.
    """
    check_n_rows("pairs", mesh.n_live, 2 * mesh.n_live * (mesh.n_live - 1))
    source, target = _all_pairs(mesh)
    return _schedule("pairs", mesh, collective, source, target, np.full_like(source, -1), 1)


def check_relays(mesh: Mesh) -> None:
    """Raise UnsupportedError if the search for relays would take too long."""
    if mesh.n_live > _MOST_RELAYED_CHIPS:
        raise UnsupportedError(
            f"relays needs at most {_MOST_RELAYED_CHIPS} chips, but got {mesh}; use 'pairs'"
        )


def relays(mesh: Mesh, collective: Collective) -> Schedule:
    """Return the all-to-all in which blocks stop at a third chip where that evens out the links.

    Raises:
        UnsupportedError: too many chips.
    """
    check_relays(mesh)
    n_parts = min(_MOST_PARTS, -(-_PARTS_OF_ALL // mesh.n_live))
    source, target = (np.repeat(ranks, n_parts) for ranks in _all_pairs(mesh))
    over = _searched_ways(mesh, n_parts)
    return _schedule("relays", mesh, collective, source, target, over, n_parts)


@lru_cache(maxsize=8)  # `auto` prices it, and then builds it
def _searched_ways(mesh: Mesh, n_parts: int) -> _Ranks:
    """Return the chip where each part of each pair's block stops, -1 for none."""
    source, target = _all_pairs(mesh)
    routes = _all_routes(_straight_routes(mesh))
    source, target = np.repeat(source, n_parts), np.repeat(target, n_parts)
    generator = np.random.default_rng(0)
    order = generator.permutation(len(source))
    candidates, n_tried, n_passes = stand_in(mesh).ranks.copy(), mesh.n_live, _PASSES
    if n_tried > _MOST_ALL_TRIED:
        n_tried, n_passes = _N_TRIED, _PASSES_OF_MANY
        # Each part takes the next few of a long list. Source follows source, because the routes of
        # one lie together in memory.
        candidates = generator.permuted(np.tile(candidates, (n_tried, 1)), axis=1).reshape(-1)
        order = order[np.argsort(generator.permutation(mesh.n_live)[source[order]], kind="stable")]
    over, least_load = np.full(len(source), -1), max(1.0, n_parts * pair_cut(mesh).blocks)
    speeds, parts = mesh.port_speeds.reshape(-1), (source, target, order)
    _choose_ways(routes, speeds, parts, candidates, n_tried, n_passes, least_load, over)
    over.flags.writeable = False
    return over


@lru_cache(maxsize=2)  # they are large
def _straight_routes(mesh: Mesh) -> Routes:
    return routes_for(mesh, *_all_pairs(mesh))


@lru_cache(maxsize=64)
def straight_blocks(mesh: Mesh) -> float:
    """Return how many blocks the busiest channel carries if all go straight.

    Those of a slow channel count as the time that they take on others.
    """
    if mesh.n_live == 1:
        return 0.0
    mesh = stand_in(mesh).mesh
    speeds = mesh.port_speeds.reshape(-1)
    n_blocks = np.bincount(_straight_routes(mesh).channels, minlength=len(speeds))
    return float((n_blocks / speeds).max())


def _all_pairs(mesh: Mesh) -> tuple[_Ranks, _Ranks]:
    """Return the two ranks of every pair of different ranks, in the same order on all images."""
    source, target = np.nonzero(~np.eye(mesh.n_live, dtype=np.bool_))
    ranks = stand_in(mesh).ranks
    return ranks[source], ranks[target]


def _all_routes(routes: Routes) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """Return where the hops of rank a to rank b begin, at a x ranks + b, and the hops."""
    n_hops = np.zeros((routes.n_ranks, routes.n_ranks), dtype=np.int64)
    n_hops[routes.src, routes.dst] = routes.hops
    return np.concatenate([[0], np.cumsum(n_hops)]), routes.channels


@kernel
def _choose_ways(routes, speeds, parts, candidates, n_tried, n_passes, least_load, over):  # type: ignore[no-untyped-def]
    """Let part after part choose its way, in `over` the chip where it stops, -1 for none.

    `loads` is how long each channel is busy, in the time that a part takes on a link of speed 1,
    and `prices` what it costs to make it busier. Nobody can make all of them less busy than
    `least_load`.
    """
    first, channels = routes
    source, target, order = parts
    n_ranks = int(np.sqrt(len(first) - 1))
    hops = np.diff(first).astype(np.int16).reshape(n_ranks, n_ranks)
    hops_from, hops_to = hops, hops.T.copy()
    times, scale = 1.0 / speeds, 1.0 / least_load
    loads, prices = np.zeros(len(speeds)), np.zeros(len(speeds))
    for part in range(len(source)):
        _add(first, channels, times, loads, prices, scale, source[part] * n_ranks + target[part], 1)
    at = 0
    for _ in range(n_passes):
        if loads.max() <= _NEAR_LEAST * least_load:
            return
        for part in order:
            here, there, now = source[part], target[part], over[part]
            straight = here * n_ranks + there
            if now < 0 and _busiest(first, channels, loads, straight) < _IDLE * least_load:
                continue
            _move(first, channels, times, loads, prices, scale, n_ranks, here, there, now, -1)
            least, best = _cost(first, channels, times, prices, straight, np.inf), -1
            most_hops = hops[here, there] + _DETOUR
            for number in range(n_tried):
                chip = candidates[at + number] if number or now < 0 else now
                if chip in (here, there):
                    continue
                if hops_from[here, chip] + hops_to[there, chip] > most_hops:
                    continue
                one, other = here * n_ranks + chip, chip * n_ranks + there
                cost = _cost(first, channels, times, prices, one, least)
                if cost < least:
                    cost += _cost(first, channels, times, prices, other, least - cost)
                if cost < least:
                    least, best = cost, chip
            at = (at + n_tried) % len(candidates)
            over[part] = best
            _move(first, channels, times, loads, prices, scale, n_ranks, here, there, best, 1)


@kernel
def _move(first, channels, times, loads, prices, scale, n_ranks, here, there, over, by):  # type: ignore[no-untyped-def]
    """Add a part to the loads of its way, or take it away."""
    if over < 0:
        _add(first, channels, times, loads, prices, scale, here * n_ranks + there, by)
    else:
        _add(first, channels, times, loads, prices, scale, here * n_ranks + over, by)
        _add(first, channels, times, loads, prices, scale, over * n_ranks + there, by)


@kernel
def _add(first, channels, times, loads, prices, scale, pair, by):  # type: ignore[no-untyped-def]
    """Add a message to the loads of its route: behind a slow link it is slow everywhere."""
    time = 0.0
    for hop in range(first[pair], first[pair + 1]):
        channel = channels[hop]
        time = max(time, times[channel])
        loads[channel] += by * time
        prices[channel] = ((loads[channel] + times[channel]) * scale) ** _SHARPNESS


@kernel
def _cost(first, channels, times, prices, pair, most):  # type: ignore[no-untyped-def]
    """Return what a message costs on its route, or more than `most` if it is more."""
    cost, time = 0.0, 0.0
    for hop in range(first[pair], first[pair + 1]):
        time = max(time, times[channels[hop]])
        cost += time * prices[channels[hop]]
        if cost > most:
            break
    return cost


@kernel
def _busiest(first, channels, loads, pair):  # type: ignore[no-untyped-def]
    """Return how busy the busiest channel of a route is."""
    most = 0.0
    for hop in range(first[pair], first[pair + 1]):
        most = max(most, loads[channels[hop]])
    return most


def _schedule(
    name: str,
    mesh: Mesh,
    collective: Collective,
    source: _Ranks,
    target: _Ranks,
    over: _Ranks,
    n_parts: int,
) -> Schedule:
    """Return the schedule of parts of blocks that go over a chip each, or straight; those of a
    block follow one another."""
    n_ranks = mesh.n_live
    part = np.arange(len(source)) % n_parts
    chunk = (source + target) % n_ranks * n_parts + part
    stops = over >= 0
    buffer = _relay_buffers(over, chunk, n_ranks * n_parts)
    if buffer.max(initial=_ARRIVED) > _MOST_BUFFERS:
        raise UnsupportedError(
            f"{name} needs at most {_MOST_BUFFERS} buffers, but {mesh} needs {buffer.max()}"
        )
    straight = _sends(source[~stops], target[~stops], chunk[~stops])
    there = _sends(source[stops], over[stops], chunk[stops], dst_buffer=buffer[stops])
    onward = _sends(over[stops], target[stops], chunk[stops], src_buffer=buffer[stops])
    return schedule_of(
        [
            ("to relays", there),
            ("straight", straight),
            ("from relays", onward),
            ("put away", _put_away(n_ranks, n_parts)),
        ],
        algorithm=name,
        collective=collective,
        owners=np.repeat(np.arange(n_ranks), n_parts),
        n_ranks=n_ranks,
    )


def _relay_buffers(over: _Ranks, chunk: _Ranks, n_chunks: int) -> _Ranks:
    """Return in which buffer each part waits at its relay: no two of one chunk in the same."""
    buffer = np.full(len(over), _ARRIVED)
    stops = np.flatnonzero(over >= 0)
    place = over[stops] * n_chunks + chunk[stops]
    by_place = np.argsort(place, kind="stable")
    sorted_place = place[by_place]
    number = np.arange(len(place)) - np.searchsorted(sorted_place, sorted_place)
    buffer[stops[by_place]] = _ARRIVED + 1 + number
    return buffer


def _sends(
    source: _Ranks,
    target: _Ranks,
    chunk: _Ranks,
    *,
    src_buffer: _Ranks | int = 0,
    dst_buffer: _Ranks | int = _ARRIVED,
) -> Rows:
    return Rows(source, target, chunk, chunk + 1, COPY, src_buffer, dst_buffer)


def _put_away(n_ranks: int, n_parts: int) -> Rows:
    """Return the rows that copy what arrived into the payload; a chip's own block is there.

    Each copies one chunk. Then a block keeps its place however many slices there are.
    """
    rank, chunk = (each.reshape(-1) for each in np.mgrid[0:n_ranks, 0 : n_ranks * n_parts])
    others = chunk // n_parts != 2 * rank % n_ranks
    rank, chunk = rank[others], chunk[others]
    return Rows(rank, rank, chunk, chunk + 1, COPY, _ARRIVED, 0)

"""Trees whose leaves fill the gaps of the channels, so that links carry more than their pace.

A long pipeline has a pace: every tree sends a slice up each of its links, and one down, in the same
time. A channel waits for the first slice that comes down until it has been up and down the trees,
and it has nothing to send up any more while the last slice takes that way. These are its two
**gaps**. Only leaves can fill them. A leaf waits for nobody, so it may send many slices ahead; and
nobody waits for what comes down to a leaf, so that may come after all else. So a link may carry a
tree more than the pace allows, if the tree ends there at a leaf and the gap is long enough.

With even loads every link, also those of a corner, carries as much as the mesh needs on average.
With filled gaps a corner carries only its own share, and the others carry more: on 32x32 the pace
is 14 of 28 trees instead of 14 of 27.

**Straight** trees (`straight_trees`) are bent: a move away from the line of a rank counts as if
links needed more, so most ranks stay where they are.

The **goal** is the pace, as a number of trees. The **gap** is a part of the time in which the whole
payload passes at this pace. `docs/design/0002-trees.md` derives what a link needs. Knows nothing
of bytes and seconds.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from meshmend.kernels import kernel, plain_kernel
from meshmend.trees.tree_forest import (
    DEPTH,
    HEIGHT,
    LINK,
    NEIGHBOR,
    PORT,
    Forest,
    Ints,
    Words,
    may_move,
    move,
    random_below,
    reroot,
)

# Found by trying, on 32x32 less 4x2 with 28 trees, where about a million moves suffice.
#
# Simulated annealing at one temperature: a move after which links need so much more is still made
# with probability 1/e. With twice as much the search never ends, with half of it, it takes longer.
_TEMPERATURE_TREES = 0.1
_MOVES_PER_RANK_AND_TREE = 140
_MOVES_PER_LOOK: Final = 512  # after so many moves the links that need too much are listed again
_MOVES_PER_SHIFT: Final = 300  # after so many a tree's root moves, if it may
_PICKS_PER_ANYWHERE = 2  # one pick of so many is anywhere, the others at such a link
# Straight trees are bent as they cool down. With half of this price three times as many ranks
# leave their lines, and 5 MB take 1 % longer; with twice as much few meshes succeed.
_BENT_TREES = 0.2
_HOT_TREES, _COLD_TREES = 0.25, 0.02
_PICKS_PER_ANYWHERE_IF_STRAIGHT = 8
_MOST_PASSES_BACK: Final = 20
_RANDOM_ONE: Final = 1 << 20  # random numbers below this stand for 0 to 1
_ROUNDING: Final = 1e-9

# Kinds of uses of a link by a rank: its trees in which other ranks hang below it, and the others.
_BRANCH: Final = 0
_LEAF: Final = 1

Uses = NDArray[np.int32]  # (ranks, ports, kinds): in how many trees the rank hangs on the port


def fill_gaps(forest: Forest, *, goal: float, caps: Ints, gap: float) -> float:
    """Change a forest until no link needs more than the goal; return the most that a link needs.

    No tree becomes deeper than its entry of `caps`, if it was not before. Random moves hang ranks
    on other parents and shift roots; the more a move makes links need, the more rarely it is made.
    Gives up after a number of moves that grows with ranks x trees.
    """
    n_ranks, n_trees = forest.state.shape[:2]
    n_moves = _MOVES_PER_RANK_AND_TREE * n_ranks * n_trees
    search = _Search(n_moves, _TEMPERATURE_TREES, _TEMPERATURE_TREES, 0.0, _PICKS_PER_ANYWHERE)
    lines = np.full((n_ranks, n_trees), -1, dtype=np.int32)
    return goal + _filled(forest, goal, caps, gap, search, lines)[0]


def bend(forest: Forest, *, goal: float, gap: float, moves_per_rank_and_tree: int) -> float:
    """Bend straight trees until no link needs more than the goal; return what links need too much.

    That is a sum over all links, 0.0 if the search succeeded. No tree becomes deeper, and roots
    stay. Few ranks leave their lines: random moves, the more rarely made the more they make links
    need, and then every rank goes back that can.
    """
    n_ranks, n_trees = forest.state.shape[:2]
    n_moves = moves_per_rank_and_tree * n_ranks * n_trees
    picks = _PICKS_PER_ANYWHERE_IF_STRAIGHT
    search = _Search(n_moves, _HOT_TREES, _COLD_TREES, _BENT_TREES, picks)
    caps: Ints = forest.state[:, :, DEPTH].max(axis=0)
    lines = forest.state[:, :, PORT].copy()
    return _filled(forest, goal, caps, gap, search, lines)[1]


@dataclass(frozen=True)
class _Search:
    """How long to search, at what temperatures, and at what price a rank leaves its line."""

    n_moves: int
    hot: float
    cold: float
    bent: float
    picks_per_anywhere: int


def _filled(
    forest: Forest, goal: float, caps: Ints, gap: float, search: _Search, lines: Ints
) -> tuple[float, float]:
    """Change a forest; return by how much the most crowded link needs too much, and all links."""
    roots = np.argmin(forest.state[:, :, PORT], axis=0).astype(np.int32)
    arrays = (forest.ways, forest.state, forest.load, _uses(forest), roots, forest.random)
    numbers = (search.n_moves, search.hot, search.cold, search.bent, search.picks_per_anywhere)
    most, in_all = _fill(*arrays, lines, float(goal), caps, gap, *numbers)
    return float(most), float(in_all)


@kernel
def _fill(
    ways: Ints,
    state: Ints,
    load: Ints,
    uses: Uses,
    roots: Ints,
    random: Words,
    lines: Ints,
    goal: float,
    caps: Ints,
    gap: float,
    n_moves: int,
    hot: float,
    cold: float,
    bent: float,
    picks_per_anywhere: int,
) -> tuple[float, float]:
    """Do what `_filled` says. `lines` has the port of each rank's line in each tree, -1: none."""
    n_ranks, n_ports, n_trees = len(ways), ways.shape[1], state.shape[1]
    scratch = np.empty((2, n_ranks), np.int32)
    crowded = np.empty((n_ranks * n_ports, 2), np.int32)
    n_crowded, temperature = 0, hot
    for attempt in range(n_moves):
        if attempt % _MOVES_PER_LOOK == 0:
            n_crowded = _list_crowded(ways, uses, goal, gap, crowded)
            temperature = hot * (cold / hot) ** (attempt / n_moves)
            if n_crowded == 0 and temperature < 2 * cold:
                break
        if attempt % _MOVES_PER_SHIFT == 0 and bent == 0:
            k, p = random_below(random, n_trees), random_below(random, n_ports)
            if _may_be_root(ways, state, roots[k], k, p, caps[k]):
                _shift(
                    ways, state, uses, random, roots, k, p, goal, gap, temperature, scratch
                )  # fmt: skip
            continue
        v, k = _pick(ways, state, random, crowded, n_crowded, picks_per_anywhere)
        p, o = state[v, k, PORT], random_below(random, n_ports)
        if p < 0 or o == p or ways[v, o, NEIGHBOR] < 0:
            continue
        worse = _hang_uses(ways, state, uses, v, k, o, goal, gap, 1)
        worse += bent * (int(p == lines[v, k]) - int(o == lines[v, k]))
        if _is_made(random, worse, temperature) and may_move(ways, state, v, k, o, caps[k]):
            load[ways[v, p, LINK]] -= 1
            load[ways[v, o, LINK]] += 1
            move(ways, state, v, k, o, scratch[0])
        else:
            _hang_uses(ways, state, uses, v, k, o, goal, gap, -1)
    if bent > 0:
        _go_back(ways, state, load, uses, lines, goal, caps, gap, scratch[0])
    most, in_all = 0.0, 0.0
    for v in range(n_ranks):
        for p in range(n_ports):
            if ways[v, p, NEIGHBOR] > v:
                too_much = _too_much(ways, uses, v, p, goal, gap)
                if too_much > _ROUNDING:
                    most, in_all = max(most, too_much), in_all + too_much
    return most, in_all


@plain_kernel
def _go_back(
    ways: Ints,
    state: Ints,
    load: Ints,
    uses: Uses,
    lines: Ints,
    goal: float,
    caps: Ints,
    gap: float,
    stack: Ints,
) -> None:
    """Let ranks go back to their lines where links then need no more."""
    for _ in range(_MOST_PASSES_BACK):
        n_back = 0
        for v in range(len(ways)):
            for k in range(state.shape[1]):
                p, o = state[v, k, PORT], lines[v, k]
                if p < 0 or o == p:
                    continue
                worse = _hang_uses(ways, state, uses, v, k, o, goal, gap, 1)
                if worse <= _ROUNDING and may_move(ways, state, v, k, o, caps[k]):
                    load[ways[v, p, LINK]] -= 1
                    load[ways[v, o, LINK]] += 1
                    move(ways, state, v, k, o, stack)
                    n_back += 1
                else:
                    _hang_uses(ways, state, uses, v, k, o, goal, gap, -1)
        if n_back == 0:
            return


def _uses(forest: Forest) -> Uses:
    """Count the uses of each rank's ports."""
    uses = np.zeros((*forest.ways.shape[:2], 2), dtype=np.int32)
    rank, tree = np.nonzero(forest.state[:, :, PORT] >= 0)
    port, height = forest.state[rank, tree, PORT], forest.state[rank, tree, HEIGHT]
    np.add.at(uses, (rank, port, np.where(height > 0, _BRANCH, _LEAF)), 1)
    return uses


@plain_kernel
def _kind(height: int) -> int:
    return _BRANCH if height > 0 else _LEAF


@plain_kernel
def _too_much(ways: Ints, uses: Uses, v: int, p: int, goal: float, gap: float) -> float:
    """Return by how much more than the goal the link behind port p of rank v needs.

    What goes up from v leaves a gap before anything comes down, what goes up to v another one. A
    gap is as long as the part of the pace that the trees of its way leave, and leaves fill it.
    """
    w, q = ways[v, p, NEIGHBOR], p ^ 1
    up = uses[v, p, _BRANCH] + uses[v, p, _LEAF]
    down = uses[w, q, _BRANCH] + uses[w, q, _LEAF]
    ahead = min(float(uses[v, p, _LEAF]), max(0.0, gap * (goal - up)))
    last = min(float(uses[w, q, _LEAF]), max(0.0, gap * (goal - down)))
    return float(max(0.0, up + down - ahead - last - goal))


@plain_kernel
def _list_crowded(ways: Ints, uses: Uses, goal: float, gap: float, crowded: Ints) -> int:
    """Fill `crowded` with rank and port of each link that needs too much, return how many do."""
    n_crowded = 0
    for v in range(len(ways)):
        for p in range(ways.shape[1]):
            w = ways[v, p, NEIGHBOR]
            if w > v and _too_much(ways, uses, v, p, goal, gap) > _ROUNDING:
                crowded[n_crowded, 0], crowded[n_crowded, 1] = v, p
                n_crowded += 1
    return n_crowded


@plain_kernel
def _pick(
    ways: Ints,
    state: Ints,
    random: Words,
    crowded: Ints,
    n_crowded: int,
    picks_per_anywhere: int,
) -> tuple[int, int]:
    """Return a rank and a tree to move: anywhere, or one that uses a link that needs too much."""
    k = random_below(random, state.shape[1])
    if n_crowded == 0 or random_below(random, picks_per_anywhere) == 0:
        return random_below(random, len(ways)), k
    which = random_below(random, n_crowded)
    v, p = crowded[which, 0], crowded[which, 1]
    w = ways[v, p, NEIGHBOR]
    for _ in range(state.shape[1]):
        if state[v, k, PORT] == p:
            return int(v), k
        if state[w, k, PORT] == p ^ 1:
            return int(w), k
        k = (k + 1) % state.shape[1]
    return int(v), k


@plain_kernel
def _is_made(random: Words, worse: float, temperature: float) -> bool:
    if worse <= 0:
        return True
    return bool(random_below(random, _RANDOM_ONE) < _RANDOM_ONE * np.exp(-worse / temperature))


@plain_kernel
def _hang_uses(
    ways: Ints, state: Ints, uses: Uses, v: int, k: int, o: int, goal: float, gap: float, by: int
) -> float:
    """Count the uses as if v hung on its port o in tree k; return how much more links need.

    With `by` -1 the counts become again what they were. The old parent may become a leaf, the new
    one may cease to be one.
    """
    p, kind = state[v, k, PORT], _kind(state[v, k, HEIGHT])
    old, new = ways[v, p, NEIGHBOR], ways[v, o, NEIGHBOR]
    worse = _use(ways, uses, v, p, kind, -by, goal, gap)
    worse += _use(ways, uses, v, o, kind, by, goal, gap)
    out = state[old, k, PORT]
    if out >= 0 and _n_children(ways, state, old, k) == 1:
        worse += _use(ways, uses, old, out, _BRANCH, -by, goal, gap)
        worse += _use(ways, uses, old, out, _LEAF, by, goal, gap)
    out = state[new, k, PORT]
    if out >= 0 and state[new, k, HEIGHT] == 0:
        worse += _use(ways, uses, new, out, _LEAF, -by, goal, gap)
        worse += _use(ways, uses, new, out, _BRANCH, by, goal, gap)
    return float(worse)


@plain_kernel
def _use(
    ways: Ints, uses: Uses, v: int, p: int, kind: int, by: int, goal: float, gap: float
) -> float:
    """Change one count; return how much more the link needs."""
    before = _too_much(ways, uses, v, p, goal, gap)
    uses[v, p, kind] += by
    return float(_too_much(ways, uses, v, p, goal, gap) - before)


@plain_kernel
def _n_children(ways: Ints, state: Ints, v: int, k: int) -> int:
    n_children = 0
    for q in range(ways.shape[1]):
        w = ways[v, q, NEIGHBOR]
        n_children += w >= 0 and state[w, k, PORT] == q ^ 1
    return n_children


@plain_kernel
def _may_be_root(ways: Ints, state: Ints, root: int, k: int, p: int, cap: int) -> bool:
    """Whether tree k stays within `cap` if the child of its root behind port p becomes the root."""
    child = ways[root, p, NEIGHBOR]
    if child < 0 or state[child, k, PORT] != p ^ 1:
        return False
    return bool(max(state[child, k, HEIGHT], _height_beside(ways, state, root, k, p) + 1) <= cap)


@plain_kernel
def _height_beside(ways: Ints, state: Ints, root: int, k: int, p: int) -> int:
    """Return the height of a root without what hangs behind its port p."""
    height = 0
    for q in range(ways.shape[1]):
        w = ways[root, q, NEIGHBOR]
        if q != p and w >= 0 and state[w, k, PORT] == q ^ 1:
            height = max(height, state[w, k, HEIGHT] + 1)
    return int(height)


@plain_kernel
def _shift(
    ways: Ints,
    state: Ints,
    uses: Uses,
    random: Words,
    roots: Ints,
    k: int,
    p: int,
    goal: float,
    gap: float,
    temperature: float,
    scratch: Ints,
) -> None:
    """Make the child behind port p of the root the root of tree k, unless that is too bad."""
    root, child = roots[k], ways[roots[k], p, NEIGHBOR]
    was = _kind(state[child, k, HEIGHT])
    becomes = _kind(_height_beside(ways, state, root, k, p))
    worse = _use(ways, uses, child, p ^ 1, was, -1, goal, gap)
    worse += _use(ways, uses, root, p, becomes, 1, goal, gap)
    if _is_made(random, worse, temperature):
        roots[k] = child
        reroot(ways, state, k, child, scratch[0], scratch[1])
    else:
        _use(ways, uses, child, p ^ 1, was, 1, goal, gap)
        _use(ways, uses, root, p, becomes, -1, goal, gap)

"""Runs MSCCL XML as its runtime would, in any order: written for the tests, from its rules alone.

A thread block runs its steps in order. A step waits for the step that `depid` and `deps` name. A
send waits while its connection holds a message; a receive waits for one. Everything else may
happen in any order, here a random one.
"""

from collections import deque
from random import Random
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray


def run_msccl(text: str, seed: int) -> list[NDArray[np.int64]]:
    """Return what each rank holds at the end; it began with powers of its own number."""
    root, random = ElementTree.fromstring(text), Random(seed)
    n_chunks = int(root.attrib["nchunksperloop"])
    gpus = {int(gpu.attrib["id"]): gpu for gpu in root}
    cells = {rank: np.full(n_chunks, 3 * rank + 1, dtype=np.int64) for rank in gpus}
    for rank in cells:
        cells[rank] += np.arange(n_chunks) * 1000
    links: dict[tuple[int, int, int], deque[NDArray[np.int64]]] = {}
    blocks = [(rank, tb) for rank, gpu in gpus.items() for tb in gpu]
    done = {(rank, int(tb.attrib["id"])): 0 for rank, tb in blocks}
    waiting = list(blocks)
    while waiting:
        random.shuffle(waiting)
        moved = False
        for rank, tb in waiting:
            at = done[rank, int(tb.attrib["id"])]
            if at < len(tb) and _run(tb[at].attrib, tb.attrib, rank, (cells, links, done)):
                done[rank, int(tb.attrib["id"])] += 1
                moved = True
        waiting = [(r, tb) for r, tb in waiting if done[r, int(tb.attrib["id"])] < len(tb)]
        assert moved or not waiting, "the program stands still"
    assert not any(links.values()), "messages are left over"
    return [cells[rank] for rank in sorted(cells)]


def _run(step, block, rank, state) -> bool:  # type: ignore[no-untyped-def]
    cells, links, done = state
    if int(step["depid"]) >= 0 and done[rank, int(step["depid"])] <= int(step["deps"]):
        return False
    if step["type"] == "nop":
        return True
    chunks = slice(int(step["srcoff"]), int(step["srcoff"]) + int(step["cnt"]))
    if step["type"] == "s":
        link = links.setdefault((rank, int(block["send"]), int(block["chan"])), deque())
        if link:
            return False
        link.append(cells[rank][chunks].copy())
        return True
    link = links.setdefault((int(block["recv"]), rank, int(block["chan"])), deque())
    if not link:
        return False
    if step["type"] == "rrc":
        cells[rank][chunks] += link.popleft()
    else:
        assert step["type"] == "r"
        cells[rank][chunks] = link.popleft()
    return True

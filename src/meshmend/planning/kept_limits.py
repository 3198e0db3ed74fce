"""Limits on disk: on thousands of chips a packing number takes longer than all of the answer.

A file holds what was computed; the fabric and the mesh are the question's own.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np

from meshmend.errors import MeshmendError
from meshmend.planning.choose import question_key
from meshmend.planning.kept_json import keep_json
from meshmend.planning.pricing import Question
from meshmend.simulator.exits import Exit
from meshmend.simulator.limit import Limit
from meshmend.simulator.packing_number import PackingNumber

_FEW_CHIPS = 256  # up to here it is computed as fast as it is read


def kept_or_computed_limit(
    folder: Path | None, question: Question, computed: Callable[[], Limit]
) -> Limit:
    """Return the limit that was kept for a question, or compute it and keep it."""
    if folder is None or question.mesh.n_live <= _FEW_CHIPS:
        return computed()
    path = folder / "limits" / f"{question_key(question)}.json"
    limit = _kept_limit(path, question)
    if limit is None:
        limit = computed()
        _keep_limit(path, limit)
    return limit


def _kept_limit(path: Path, question: Question) -> Limit | None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        part_of = np.array(document["part_of"], dtype=np.int32)
        ways = tuple(Exit(**way) for way in document["exits"])
        if not all(0 <= way.rank < question.mesh.n_live for way in ways):
            return None
        return Limit(
            fabric=question.fabric,
            payload_bytes=question.payload_bytes,
            packing=PackingNumber(question.mesh, float(document["lower"]), part_of),
            collective=question.collective,
            exits=ways,
            **document["seconds"],
        )
    except (MeshmendError, AssertionError, OSError, ValueError, KeyError, TypeError, IndexError):
        return None  # no limit, or a damaged one: compute it again


def _keep_limit(path: Path, limit: Limit) -> None:
    """Keep a limit on disk, where that is possible."""
    document = {
        "lower": limit.packing.lower,
        "part_of": limit.packing.part_of.tolist(),
        "exits": [asdict(way) for way in limit.exits],
        "seconds": {
            "bandwidth_s": limit.bandwidth_s,
            "latency_s": limit.latency_s,
            "chip_s": limit.chip_s,
            "update_s": limit.update_s,
        },
    }
    keep_json(path, document)

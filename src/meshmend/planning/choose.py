"""`auto`: the fastest algorithm and its parameters for a mesh, payload and fabric.

By simulation, with bounds that rule most algorithms out before they are simulated. What was
found is kept, in memory and, if a folder is given, on disk, so that the second question is free.
"""

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

from meshmend.planning.pricing import Question, Tell, price, supported_names, tree_schedule_of
from meshmend.planning.tree_choice import TreeShape
from meshmend.schedule.algorithms import algorithm
from meshmend.schedule.table import Collective, Schedule
from meshmend.topology.fabric import Fabric
from meshmend.topology.mesh import Mesh

_CLASSES_PER_OCTAVE = 8  # payloads within 4.4 % of each other share their answer
_VERSION = 1

_known: dict[str, "Choice"] = {}


@dataclass(frozen=True)
class Choice:
    """What `auto` runs: an algorithm, its packing if it is made of trees, and the slices."""

    algorithm: str
    slices: int
    shape: TreeShape | None = None


def choose(
    mesh: Mesh,
    fabric: Fabric,
    payload_bytes: float,
    *,
    cache_dir: Path | None = None,
    tell: Tell = lambda step: None,
) -> Choice:
    """Return the fastest algorithm for a connected mesh, among all that do it.

    The answer is that for the payload class, an eighth of an octave wide.
    """
    typical = payload_class_bytes(payload_bytes)
    key = _key(mesh, fabric, typical)
    choice = _known.get(key) or _from_disk(cache_dir, key)
    if choice is None:
        choice = _found(Question(mesh, typical, fabric), tell)
        _to_disk(cache_dir, key, choice)
    _known[key] = choice
    return choice


def chosen_schedule(mesh: Mesh, choice: Choice, collective: Collective) -> Schedule:
    """Return the schedule of a choice; for a half, every rank owns an equal part where trees do."""
    if choice.shape is None:
        return algorithm(choice.algorithm).build(mesh, collective)
    return tree_schedule_of(mesh, choice.shape, collective)


def payload_class_bytes(payload_bytes: float) -> float:
    """Return the payload that stands for its class."""
    if payload_bytes < 1:
        return 0.0
    return float(2 ** (round(math.log2(payload_bytes) * _CLASSES_PER_OCTAVE) / _CLASSES_PER_OCTAVE))


def _found(question: Question, tell: Tell) -> Choice:
    best = None
    for name in supported_names(question.mesh):
        result = price(question, name, below_s=best and best.time_s, tell=tell)
        if result is not None and (best is None or result.time_s < best.time_s):
            best = result
    assert best is not None, "trees do every connected mesh"
    return Choice(best.name, best.simulation.slices, best.shape)


def _key(mesh: Mesh, fabric: Fabric, payload_bytes: float) -> str:
    figures = asdict(fabric)
    for words in ("name", "source", "usual_mesh"):
        figures.pop(words)
    text = json.dumps([_VERSION, str(mesh), figures, payload_bytes])
    return hashlib.sha256(text.encode()).hexdigest()


def _from_disk(cache_dir: Path | None, key: str) -> Choice | None:
    if cache_dir is None:
        return None
    try:
        document = json.loads((cache_dir / f"{key}.json").read_text(encoding="utf-8"))
        shape = document["shape"]
        return Choice(
            str(document["algorithm"]),
            int(document["slices"]),
            None if shape is None else TreeShape(int(shape["n_trees"]), shape["depth_slack"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None  # no answer, or not one of ours: find it anew


def _to_disk(cache_dir: Path | None, key: str, choice: Choice) -> None:
    if cache_dir is None:
        return
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        draft = cache_dir / f"{key}.part"
        draft.write_text(json.dumps(asdict(choice)), encoding="utf-8")
        draft.replace(cache_dir / f"{key}.json")
    except OSError:
        pass  # a cache that cannot be written costs time, not answers

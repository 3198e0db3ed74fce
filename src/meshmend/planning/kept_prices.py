"""Prices on disk: the same question again needs no search and no simulation.

`choose` keeps which algorithm is fastest for a class of payloads. A price is kept for one payload,
because times differ within a class. It has the figures that are shown; whoever needs the whole
simulation, such as a trace, gets it by asking again without the kept price.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from meshmend.planning.choose import question_key
from meshmend.planning.kept_json import keep_json
from meshmend.planning.packed_trees import TreeShape
from meshmend.planning.pricing import Price, PriceFigures, Question
from meshmend.planning.tree_formula import Pipeline
from meshmend.simulator.rules import PhaseTime


@dataclass(frozen=True)
class NamedQuestion:
    """What an algorithm, a baseline or `auto` costs, with the best slices or with so many."""

    question: Question
    name: str
    slices: int | None = None


def kept_or_found(folder: Path | None, asked: NamedQuestion, found: Callable[[], Price]) -> Price:
    """Return the price that was kept for a question, or find it and keep it."""
    if folder is None:
        return found()
    path = folder / "prices" / f"{_key(asked)}.json"
    price = _kept_price(path, found)
    if price is None:
        price = found()
        _keep_price(path, price)
    return price


def _kept_price(path: Path, found: Callable[[], Price]) -> Price | None:
    """Return the price in a file, or None; `found` finds it again."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        figures, shape = document["figures"], document["shape"]
        phases = tuple(PhaseTime(**phase) for phase in figures.pop("phases"))
        return Price(
            name=str(document["name"]),
            figures=PriceFigures(**figures, phases=phases),
            simulated=lambda: found().simulation,
            n_chips=int(document["n_chips"]),
            pipeline=Pipeline(**document["pipeline"]),
            detail=str(document["detail"]),
            shape=None if shape is None else TreeShape(**shape),
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # no price, or a damaged one: find it again


def _keep_price(path: Path, price: Price) -> None:
    """Keep a price on disk, where that is possible."""
    document = {
        "name": price.name,
        "figures": asdict(price.figures),
        "n_chips": price.n_chips,
        "pipeline": asdict(price.pipeline),
        "detail": price.detail,
        "shape": None if price.shape is None else asdict(price.shape),
    }
    keep_json(path, document)


def _key(asked: NamedQuestion) -> str:
    """Return the name of a price's file."""
    text = json.dumps([question_key(asked.question), asked.name, asked.slices])
    return hashlib.sha256(text.encode()).hexdigest()

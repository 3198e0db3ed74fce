"""Prices of `auto` on disk: the same question again needs no search and no simulation.

`choose` keeps which algorithm is fastest for a class of payloads. A price is kept for one payload,
because times differ within a class. It has the figures that are shown; whoever needs the whole
simulation, such as a trace, gets it by asking again without the kept price.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from meshmend.planning.choose import question_key
from meshmend.planning.packed_trees import TreeShape
from meshmend.planning.pricing import Price, PriceFigures, Question
from meshmend.planning.tree_formula import Pipeline
from meshmend.simulator.rules import PhaseTime


def kept_price(folder: Path | None, question: Question, found: Callable[[], Price]) -> Price | None:
    """Return the price that was kept for a question, or None; `found` finds it again."""
    if folder is None:
        return None
    try:
        document = json.loads(_path(folder, question).read_text(encoding="utf-8"))
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


def keep_price(folder: Path | None, question: Question, price: Price) -> None:
    """Keep a price on disk, where that is possible."""
    if folder is None:
        return
    document = {
        "name": price.name,
        "figures": asdict(price.figures),
        "n_chips": price.n_chips,
        "pipeline": asdict(price.pipeline),
        "detail": price.detail,
        "shape": None if price.shape is None else asdict(price.shape),
    }
    path = _path(folder, question)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(".part")
        draft.write_text(json.dumps(document), encoding="utf-8")
        draft.replace(path)
    except OSError:
        pass  # without it the next question takes longer, but gets the same answer


def _path(folder: Path, question: Question) -> Path:
    return folder / "prices" / f"{question_key(question)}.json"

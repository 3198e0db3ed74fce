"""The answers to a failed chip: the four of the paper's introduction, and mixtures of them."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from meshmend.errors import InputError
from meshmend.forecast.walk_arrays import GO_ON, IN_LARGEST_BOX, WAIT

_MIXTURE = re.compile(r"fault-tolerant:(\d{1,4})\+spares")


@dataclass(frozen=True)
class Answer:
    """What a job does about holes: wait, run in a box or go on; whether and when spares fill them.

    Spares are switched in when there are more than `holes_before_spares` holes.
    """

    name: str
    on_holes: int
    uses_spares: bool = False
    holes_before_spares: int = 0


FIRE_FIGHTER = Answer("fire-fighter", WAIT)
SUB_MESH = Answer("sub-mesh", IN_LARGEST_BOX)
SPARES = Answer("spares", WAIT, uses_spares=True)
FAULT_TOLERANT = Answer("fault-tolerant", GO_ON)
FOUR = (FIRE_FIGHTER, SUB_MESH, SPARES, FAULT_TOLERANT)
_NAMED = {
    answer.name: answer
    for answer in (
        *FOUR,
        Answer("spares+sub-mesh", IN_LARGEST_BOX, uses_spares=True),
        Answer("spares+fault-tolerant", GO_ON, uses_spares=True),
    )
}
WORDS = {
    "fire-fighter": "wait until all is repaired",
    "sub-mesh": "train in the largest intact box",
    "spares": "switch in spares; wait if there are none",
    "fault-tolerant": "go on around the hole",
    "spares+sub-mesh": "switch in spares; without any, train in the largest intact box",
    "spares+fault-tolerant": "switch in spares; without any, go on around the hole",
}


def answer_named(name: str) -> Answer:
    """Return the answer of this name; `fault-tolerant:2+spares` goes on with up to 2 holes.

    Raises:
        InputError: there is no such answer.
    """
    if name in _NAMED:
        return _NAMED[name]
    if match := _MIXTURE.fullmatch(name):
        return Answer(name, GO_ON, uses_spares=True, holes_before_spares=int(match[1]))
    known = ", ".join([*_NAMED, "fault-tolerant:2+spares"])
    raise InputError(f"--answer needs one of {known}, but got {name!r}")


def answers_named(names: Iterable[str]) -> tuple[Answer, ...]:
    """Return the answers of these names, each once."""
    return tuple(dict.fromkeys(answer_named(name) for name in names))


def words_of(answer: Answer) -> str:
    """Return what an answer does, in a few words."""
    if answer.name in WORDS:
        return WORDS[answer.name]
    return f"go on with up to {answer.holes_before_spares} holes, then switch in spares"

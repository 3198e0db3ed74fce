"""Faults of any kind that a mesh of 4x4 chips can have, for property tests."""

from typing import assert_never

from hypothesis import strategies as st

from meshmend.membership.faults.fault import (
    COORDINATOR,
    MAX_S,
    MAX_STEP,
    MIN_S,
    Fault,
    FaultKind,
    Moment,
    Part,
)
from meshmend.topology.failures import Block, Link
from meshmend.topology.text import parse_mesh

MESH = parse_mesh("4x4")
LINKS = [Link(chip, other) for chip in MESH.live for other in MESH.neighbors(chip) if chip < other]


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    """A block inside the mesh that leaves at least one chip."""
    origin = draw(st.tuples(st.integers(0, 3), st.integers(0, 3)))
    shape = tuple(draw(st.integers(1, 4 - at)) for at in origin)
    return Block(shape if shape != (4, 4) else (4, 3), origin)


@st.composite
def faults(draw: st.DrawFn, *, max_step: int = MAX_STEP, max_s: float = MAX_S) -> Fault:
    """A fault of any kind, at any step or time."""
    at_step, at_s = draw(
        st.tuples(st.integers(0, max_step), st.none())
        | st.tuples(st.none(), st.just(0.0) | st.floats(MIN_S, max_s))
    )
    duration = st.floats(MIN_S, max_s)
    kind = draw(st.sampled_from(FaultKind))
    block, link = draw(blocks()), draw(st.sampled_from(LINKS))
    match kind:
        case FaultKind.KILL:
            moment = draw(st.none() | st.sampled_from(Moment)) if at_s is None else None
            if moment is None and draw(st.booleans()):
                return Fault(kind, COORDINATOR, at_step, at_s)
            bucket = draw(st.integers(0, 99)) if moment is Moment.BUCKET else None
            return Fault(kind, block, at_step, at_s, moment=moment, bucket=bucket)
        case FaultKind.HANG | FaultKind.SLOW:
            return Fault(kind, block, at_step, at_s, for_s=draw(st.none() | duration))
        case FaultKind.FREEZE:
            return Fault(kind, COORDINATOR, at_step, at_s, for_s=draw(duration))
        case FaultKind.CUT:
            return Fault(kind, link, at_step, at_s)
        case FaultKind.REPAIR:
            return Fault(kind, draw(st.sampled_from([block, link])), at_step, at_s)
        case FaultKind.THROTTLE:
            step = draw(st.integers(0, max_step))
            return Fault(kind, block, step, for_s=draw(st.none() | duration))
        case FaultKind.FLIP | FaultKind.WRONG:
            step = draw(st.integers(0, max_step))
            part = draw(st.sampled_from(Part)) if kind is FaultKind.FLIP else None
            return Fault(kind, block, step, part=part)
        case FaultKind.CORRUPT:
            return Fault(kind, link, draw(st.integers(0, max_step)))
        case _:
            assert_never(kind)

"""Faults to inject into a run, as values and as `--inject` writes them.

kill 2x2@0,2 at 20                kill these workers when step 20 is done
kill 2x2@0,2 at 20 in reduce      the same, each in the middle of that part of the next step
kill coordinator at 40
hang 1,1 at 3.5s                  stop it 3.5 s after the start; it is not told
hang 1,1 at 30 for 5s             and let it go on after 5 s
slow 1,1 at 30 for 5s             let it run a third of the time only
cut link:0,1-0,2 at 30
repair 2x2@0,2 at 60              a board is back, or a link
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from meshmend.errors import InputError, TopologyError
from meshmend.topology.failures import Block, Chip, Failure, Link, parse_failure
from meshmend.topology.mesh import Mesh

COORDINATOR = "coordinator"
_FORM = re.compile(
    r"(?P<action>\w+)\s+(?P<target>\S+)\s+at\s+(?P<at>[\d.]+)(?P<unit>s?)"
    r"(\s+in\s+(?P<phase>\w+))?(\s+for\s+(?P<for>[\d.]+)s)?"
)
_HOW = 'write "kill 2x2@0,2 at 20", "hang 1,1 at 3.5s for 5s", "repair 2x2@0,2 at 60"'


class FaultKind(StrEnum):
    """What a fault does."""

    KILL = "kill"
    HANG = "hang"
    SLOW = "slow"
    CUT = "cut"
    REPAIR = "repair"


class Moment(StrEnum):
    """A part of a step in which a worker can be killed."""

    FORWARD = "forward"
    REDUCE = "reduce"
    UPDATE = "update"
    RECOVERY = "recovery"


@dataclass(frozen=True)
class Fault:
    """What to do to what, and when: once a step is done, or so long after the start."""

    kind: FaultKind
    target: Failure | str
    at_step: int | None = None
    at_s: float | None = None
    moment: Moment | None = None
    for_s: float | None = None

    def __str__(self) -> str:
        return f"{self.kind} {self.target}"

    @property
    def words(self) -> str:
        """The whole of it as `--inject` reads it."""
        at = f"{self.at_s:g}s" if self.at_step is None else f"{self.at_step}"
        moment = f" in {self.moment}" if self.moment else ""
        length = f" for {self.for_s:g}s" if self.for_s is not None else ""
        return f"{self} at {at}{moment}{length}"

    def chips(self) -> tuple[Chip, ...]:
        """Return the chips that are concerned."""
        return tuple(self.target.chips()) if isinstance(self.target, Block) else ()

    def is_due(self, step: int, elapsed_s: float) -> bool:
        """Whether the time has come."""
        if self.at_step is not None:
            return step >= self.at_step
        return self.at_s is not None and elapsed_s >= self.at_s


def parse_fault(text: str, mesh: Mesh) -> Fault:
    """Return the fault that an `--inject` argument names.

    Raises:
        InputError: it cannot be read, or names what the mesh does not have.
    """
    found = _FORM.fullmatch(text.strip())
    if not found or found["action"] not in set(FaultKind):
        raise InputError(f"--inject cannot read {text!r}; {_HOW}")
    try:
        at = float(found["at"])
        target: Failure | str = COORDINATOR
        if found["target"] != COORDINATOR:
            target = parse_failure(found["target"])
            mesh.without(target)
        moment = Moment(found["phase"]) if found["phase"] else None
        for_s = float(found["for"]) if found["for"] else None
    except TopologyError as error:
        raise InputError(f"--inject {text!r}: {error}") from None
    except ValueError:
        raise InputError(f"--inject cannot read {text!r}; {_HOW}") from None
    if not found["unit"] and at != int(at):
        raise InputError(f"--inject {text!r} needs a whole step, or seconds such as {at:g}s")
    fault = Fault(
        kind=FaultKind(found["action"]),
        target=target,
        at_step=None if found["unit"] else int(at),
        at_s=at if found["unit"] else None,
        moment=moment,
        for_s=for_s,
    )
    _check(fault, text)
    return fault


def _check(fault: Fault, text: str) -> None:
    is_link = isinstance(fault.target, Link)
    if fault.kind is FaultKind.CUT and not is_link:
        raise InputError(f"--inject {text!r} needs a link to cut, such as link:0,1-0,2")
    if fault.kind in (FaultKind.HANG, FaultKind.SLOW, FaultKind.KILL) and is_link:
        raise InputError(f"--inject {text!r} needs chips; a link is cut")
    if fault.for_s is not None and fault.kind not in (FaultKind.HANG, FaultKind.SLOW):
        raise InputError(f"--inject {text!r}: only a hang or a slow chip lasts for a time")
    if fault.target == COORDINATOR and fault.kind is not FaultKind.KILL:
        raise InputError(f"--inject {text!r}: the coordinator can be killed, nothing else")
    if fault.moment and (
        fault.kind is not FaultKind.KILL or fault.at_step is None or not fault.chips()
    ):
        raise InputError(f"--inject {text!r}: only a kill of chips at a step has a moment")

"""Faults to inject into a run: as values, and as text for `--inject`.

kill 2x2@0,2 at 20                    kill these workers when step 20 is done
kill 2x2@0,2 at 20 in reduce          the same, but during the reduce of the next step
kill 0,1 at 20 in bucket 3            the same, when the sum of its fourth bucket has begun
kill coordinator at 40
hang 1,1 at 3.5s                      stop a worker 3.5 s after the start; it gets no warning
hang 1,1 at 30 for 5s                 the same, and resume it after 5 s
slow 1,1 at 30 for 5s                 let a worker run only a third of the time, for 5 s
freeze coordinator at 20 for 5s       stop the coordinator and resume it after 5 s
cut link:0,1-0,2 at 30
flip gradient 0,1 at 40               flip one bit of what a chip computes in the next step
flip weights 0,1 at 40                the same in its weights; `state`: of its optimizer
flip sum 0,1 at 40                    the same in the sums as this chip has them
wrong 0,1 from 40                     flip one bit of what it computes, in one step of five
throttle 0,1 from 40                  let a chip compute at a third of its speed, on and on
throttle 0,1 from 40 for 20s          the same, for 20 s
corrupt link:0,1-0,2 at 40            change bytes on their way to the first chip, from then on
repair 2x2@0,2 at 60                  start the workers of a board again, or mend a link

Every `Fault` object is valid on some mesh. This module does not know how a fault is carried out.
"""

import re
from dataclasses import dataclass
from decimal import Decimal
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from meshmend.errors import InputError, TopologyError
from meshmend.topology.failures import Block, Chip, Failure, Link, parse_failure
from meshmend.transport.codec import LARGEST

if TYPE_CHECKING:
    from meshmend.topology.mesh import Mesh

CoordinatorName = Literal["coordinator"]
COORDINATOR: Final[CoordinatorName] = "coordinator"
Target = Failure | CoordinatorName
Process = Chip | CoordinatorName  # the worker of a chip, or the coordinator

MAX_STEP: Final = LARGEST  # events hold the step
MIN_S, MAX_S = 1e-9, 1e9  # a nanosecond; about thirty years
MAX_TEXT: Final = 200  # characters; a fault on a mesh of six axes takes at most about 100

_NUMBER = r"[0-9]+(?:\.[0-9]+)?"
_FORM: Final = re.compile(
    rf"(?P<kind>[a-z]+)(\s+(?P<part>gradient|weights|sum|state))?\s+(?P<target>\S+)\s+"
    rf"(?P<when>at|from)\s+(?P<at>{_NUMBER})(?P<unit>s?)"
    rf"(\s+in\s+(?P<moment>[a-z]+)(\s+(?P<bucket>[0-9]+))?)?(\s+for\s+(?P<for>{_NUMBER})s)?"
)
_HOW: Final = 'write "kill 2x2@0,2 at 20", "hang 1,1 at 3.5s for 5s", "repair 2x2@0,2 at 60"'


class FaultKind(StrEnum):
    """What a fault does."""

    KILL = "kill"
    HANG = "hang"
    SLOW = "slow"
    FREEZE = "freeze"
    CUT = "cut"
    REPAIR = "repair"
    FLIP = "flip"
    WRONG = "wrong"
    THROTTLE = "throttle"
    CORRUPT = "corrupt"


class _Rules(NamedTuple):
    """What the faults of a kind need, and whether chips train in another generation afterwards.

    `lasts`: whether they have a duration; None: they may. What a worker computes or gets, its own
    loop changes: such a fault is `in_loop`, and needs a step.
    """

    targets: tuple[type, ...]  # `str` is the coordinator
    target_words: str
    lasts: bool | None = None
    in_loop: bool = False
    changes: bool = False


_CHIPS: Final = (Block,), "chips, such as 1,1 or 2x2@0,2"
_LINK: Final = (Link,), "a link, such as link:0,1-0,2"
_RULES: Final = {
    FaultKind.KILL: _Rules((Block, str), "chips or the coordinator", lasts=False, changes=True),
    FaultKind.HANG: _Rules(*_CHIPS, changes=True),
    FaultKind.SLOW: _Rules(*_CHIPS),
    FaultKind.FREEZE: _Rules((str,), "the coordinator; to stop a chip, hang it", lasts=True),
    FaultKind.CUT: _Rules(*_LINK, lasts=False, changes=True),
    FaultKind.REPAIR: _Rules((Block, Link), "chips or a link", lasts=False, changes=True),
    FaultKind.FLIP: _Rules(*_CHIPS, lasts=False, in_loop=True),
    FaultKind.WRONG: _Rules(*_CHIPS, lasts=False, in_loop=True),
    FaultKind.THROTTLE: _Rules(*_CHIPS, in_loop=True),
    FaultKind.CORRUPT: _Rules(*_LINK, lasts=False, in_loop=True),
}
_TIME_WORDS: Final = {  # by `in_loop` and `lasts`
    (False, True): 'a duration, such as "for 5s"',
    (False, False): "no duration",
    (True, None): "a step",
    (True, False): "a step, and no duration",
}
_STEADY: Final = (FaultKind.WRONG, FaultKind.THROTTLE)  # from a step on
IN_LOOP: Final = frozenset(kind for kind, rules in _RULES.items() if rules.in_loop)


class Part(StrEnum):
    """What a flipped bit is a part of."""

    GRADIENT = "gradient"
    WEIGHTS = "weights"
    SUM = "sum"
    STATE = "state"


class Moment(StrEnum):
    """A part of a step in which a worker can kill itself."""

    FORWARD = "forward"
    BUCKET = "bucket"
    REDUCE = "reduce"
    GATHER = "gather"
    UPDATE = "update"
    RECOVERY = "recovery"
    REFILL = "refill"


@dataclass(frozen=True)
class Fault:
    """What to do, to which target, and when: after a step, or some seconds after the start.

    The moment `bucket` needs the number of a bucket of gradients, from 0: the worker is killed when
    the sum of that bucket has begun, while its backward pass goes on. A flip names the `part` whose
    bit it flips, in the step after `at_step`. A chip that is `wrong` flips one in every fifth step,
    and one with `throttle` computes at a third of its speed.

    Raises:
        InputError: this kind of fault does not fit its target, its times or its moment.
    """

    kind: FaultKind
    target: Target
    at_step: int | None = None
    at_s: float | None = None
    moment: Moment | None = None
    for_s: float | None = None
    bucket: int | None = None
    part: Part | None = None

    def __post_init__(self) -> None:
        rules = _RULES[self.kind]
        if not isinstance(self.target, rules.targets):
            raise InputError(f"{self.kind} needs {rules.target_words}, but got {self.target}")
        _check_times(self, rules)
        if self.moment and not (
            self.kind is FaultKind.KILL and self.at_step is not None and self.chips()
        ):
            raise InputError(
                f"{self} cannot have a moment: only a kill of chips at a step can, such as "
                '"kill 1,1 at 20 in reduce"'
            )
        if (self.moment is Moment.BUCKET) is (self.bucket is None):
            raise InputError(
                f"{self} needs a bucket's number in the moment bucket, and only there, such as "
                '"kill 1,1 at 20 in bucket 0"'
            )
        if (self.kind is FaultKind.FLIP) is (self.part is None):
            raise InputError(
                f"{self} needs one of {', '.join(Part)} after flip, and only there, such as "
                '"flip gradient 1,1 at 20"'
            )

    def __str__(self) -> str:
        part = f" {self.part}" if self.part else ""
        return f"{self.kind}{part} {self.target}"

    @property
    def is_in_loop(self) -> bool:
        """Whether the loop of a worker carries it out itself."""
        return self.kind in IN_LOOP

    @property
    def words(self) -> str:
        """The fault as text for `--inject`; `parse_fault` turns it into an equal fault."""
        at = f"{self.at_step}" if self.at_s is None else f"{_decimal(self.at_s)}s"
        bucket = "" if self.bucket is None else f" {self.bucket}"
        moment = f" in {self.moment}{bucket}" if self.moment else ""
        length = "" if self.for_s is None else f" for {_decimal(self.for_s)}s"
        when = "from" if self.kind in _STEADY else "at"
        return f"{self} {when} {at}{moment}{length}"

    def chips(self) -> tuple[Chip, ...]:
        """Return the chips whose workers this fault acts on."""
        return tuple(self.target.chips()) if isinstance(self.target, Block) else ()

    def processes(self) -> tuple[Process, ...]:
        """Return the processes that this fault acts on."""
        return (COORDINATOR,) if self.target == COORDINATOR else self.chips()

    def lost(self) -> frozenset[Chip]:
        """Return the chips that the job loses by this fault."""
        return frozenset(self.chips() if self.kind in (FaultKind.KILL, FaultKind.HANG) else ())

    def returned(self) -> frozenset[Chip]:
        """Return the chips that return to the job by this fault."""
        return frozenset(self.chips() if self.kind is FaultKind.REPAIR else ())

    def is_quiet(self, heartbeat_timeout_s: float) -> bool:
        """Whether the same chips train on without a new generation: none is missed for long."""
        is_short = self.for_s is not None and self.for_s < heartbeat_timeout_s
        return is_short or self.target == COORDINATOR or not _RULES[self.kind].changes

    def is_due(self, step: int, elapsed_s: float) -> bool:
        """Whether the fault is to be injected now, after this step and time."""
        if self.at_step is not None:
            return step >= self.at_step
        return self.at_s is not None and elapsed_s >= self.at_s


def parse_fault(text: str, mesh: "Mesh") -> Fault:
    """Return the fault that an `--inject` argument describes.

    Raises:
        InputError: the text cannot be read, or the mesh does not have its target.
    """
    if len(text) > MAX_TEXT:
        raise InputError(
            f"--inject needs a fault of at most {MAX_TEXT} characters, but got {len(text)}: "
            f"{text[:40]!r}..."
        )
    found = _FORM.fullmatch(text.strip()) if text.isascii() else None
    if not found or found["kind"] not in set(FaultKind):
        raise InputError(f"--inject cannot read {text!r}; {_HOW}")
    if (found["when"] == "from") is not (found["kind"] in _STEADY):
        raise InputError(
            f"--inject cannot read {text!r}; only wrong and throttle begin at a step and go on, as "
            'in "wrong 1,1 from 20"'
        )
    if found["moment"] and found["moment"] not in set(Moment):
        known = ", ".join(Moment)
        raise InputError(f"--inject cannot read {text!r}; write one of {known} after 'in'")
    if not found["unit"] and "." in found["at"]:
        raise InputError(
            f"--inject {text!r} needs an integer step, or seconds such as {found['at']}s"
        )
    try:
        return Fault(
            kind=FaultKind(found["kind"]),
            target=_target(found["target"], mesh),
            at_step=None if found["unit"] else int(found["at"]),
            at_s=float(found["at"]) if found["unit"] else None,
            moment=Moment(found["moment"]) if found["moment"] else None,
            for_s=float(found["for"]) if found["for"] else None,
            bucket=int(found["bucket"]) if found["bucket"] else None,
            part=Part(found["part"]) if found["part"] else None,
        )
    except (InputError, TopologyError) as error:
        raise InputError(f"--inject {text!r}: {error}") from None


def _target(text: str, mesh: "Mesh") -> Target:
    if text == COORDINATOR:
        return COORDINATOR
    failure = parse_failure(text)
    mesh.without(failure)  # raises if the mesh does not have this target
    return failure


def _check_times(fault: Fault, rules: _Rules) -> None:
    if (fault.at_step is None) is (fault.at_s is None):
        raise InputError(f"{fault} needs either a step or a time, not both or neither")
    if fault.at_step is not None and not 0 <= fault.at_step <= MAX_STEP:
        raise InputError(f"{fault} needs a step from 0 to {MAX_STEP}")
    if fault.at_s is not None and fault.at_s != 0 and not MIN_S <= fault.at_s <= MAX_S:
        raise InputError(f"{fault} needs a time of 0 s, or from {MIN_S:g} to {MAX_S:g} s")
    has_time = fault.at_step is not None or not rules.in_loop
    if not has_time or rules.lasts not in (None, fault.for_s is not None):
        raise InputError(f"{fault} needs {_TIME_WORDS[rules.in_loop, rules.lasts]}")
    if fault.for_s is not None and not MIN_S <= fault.for_s <= MAX_S:
        raise InputError(f"{fault} needs a duration from {MIN_S:g} to {MAX_S:g} s")


def _decimal(seconds: float) -> str:
    """Return a number without an exponent that `float` turns back into the same number."""
    text = f"{Decimal(repr(abs(float(seconds)))):f}"
    return text.rstrip("0").rstrip(".") if "." in text else text

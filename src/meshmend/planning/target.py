"""What a plan is made for, as a user names it: a collective, and a payload on a fabric.

With a mesh, that is the question which `auto` and every price answer.
"""

import hashlib
from dataclasses import dataclass
from functools import cache
from numbers import Integral, Real
from pathlib import Path
from typing import Final

from meshmend.errors import InputError, check_kind
from meshmend.planning.cache import Key
from meshmend.schedule.table import Collective
from meshmend.topology.fabric import FABRICS, Fabric
from meshmend.topology.fabric import fabric as fabric_named
from meshmend.topology.mesh import Mesh
from meshmend.units import parse_bytes

_MOST_BYTES: Final = 1e46  # more than words can say: 1e30 PiB
Payload = float | str  # bytes per chip, or words such as "100MB"


@dataclass(frozen=True)
class Target:
    """A payload on a fabric; by default about the gradients of a ResNet-50, on `reference`."""

    payload_bytes: float = 100e6
    fabric: Fabric = FABRICS["reference"]

    def __post_init__(self) -> None:
        if not 0 <= self.payload_bytes <= _MOST_BYTES:
            raise InputError(
                f"a payload needs to be 0 bytes or more, at most {_MOST_BYTES:g}, but got "
                f"{self.payload_bytes!s:.40}"
            )

    def with_(self, payload: Payload | None, fabric: Fabric | str | None) -> "Target":
        """Return this target with another payload or fabric, if given.

        Raises:
            InputError: the payload cannot be read, or the fabric is unknown.
        """
        return Target(
            self.payload_bytes if payload is None else _bytes_of(payload),
            self.fabric if fabric is None else _fabric_of(fabric),
        )


def collective_named(name: str | Collective) -> Collective:
    """Return the collective of this name.

    Raises:
        InputError: there is no such collective; the message lists all.
    """
    try:
        return Collective(name)
    except ValueError:
        raise InputError(
            f"there is no collective {name!r}; choose one of {', '.join(Collective)}"
        ) from None


def _bytes_of(payload: Payload) -> float:
    if isinstance(payload, str):
        return parse_bytes(payload)
    check_kind("a payload", "a number of bytes, or a text such as '25MB'", payload, Real)
    # Numbers of NumPy, such as the product of a shape, have bounds, and no place in a plan file.
    return int(payload) if isinstance(payload, Integral) else float(payload)


def _fabric_of(fabric: Fabric | str) -> Fabric:
    if isinstance(fabric, str):
        return fabric_named(fabric)
    check_kind("a fabric", "a Fabric, or the name of a preset such as 'tpu-v3'", fabric, Fabric)
    return fabric


_FOR_THE_READER: Final = ("name", "source", "usual_mesh")  # of a fabric
_PACKAGE: Final = Path(__file__).parents[1]
_ROOMS: Final = ("planning", "schedule", "simulator", "topology", "trees")


@cache
def code_digest() -> str:
    """Return a hash of the code that answers questions: answers of other code are not read."""
    digest = hashlib.sha256()
    for room in _ROOMS:
        for path in sorted((_PACKAGE / room).glob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True)
class Question:
    """What does a collective of this payload cost on this connected mesh and fabric?"""

    mesh: Mesh
    payload_bytes: float
    fabric: Fabric
    collective: Collective = Collective.ALLREDUCE

    def __post_init__(self) -> None:
        if not isinstance(self.collective, Collective):  # equal to one, but not the same object
            raise InputError(
                f"a question needs a Collective, but got {self.collective!r}; use "
                "collective_named(...)"
            )

    @property
    def n_halves(self) -> int:
        """How many halves of an allreduce the collective consists of: 1 or 2."""
        halves = (Collective.REDUCE_SCATTER, Collective.ALL_GATHER)
        return 1 if self.collective in halves else 2

    @property
    def key(self) -> Key:
        """What a cache knows the question by: the same for equal meshes, figures and payloads."""
        figures = {
            name: value
            for name, value in self.fabric.summary().items()
            if name not in _FOR_THE_READER
        }
        return (code_digest(), str(self.mesh), figures, self.payload_bytes, self.collective)

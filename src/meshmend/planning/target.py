"""What a plan is made for: a collective, and a payload on a fabric, as a user names them."""

import math
from dataclasses import dataclass

from meshmend.errors import InputError
from meshmend.schedule.table import Collective
from meshmend.topology.fabric import FABRICS, Fabric
from meshmend.topology.fabric import fabric as fabric_named
from meshmend.units import parse_bytes

Payload = float | str  # bytes per chip, or words such as "100MB"


@dataclass(frozen=True)
class Target:
    """A payload on a fabric; by default about the gradients of a ResNet-50, on `reference`."""

    payload_bytes: float = 100e6
    fabric: Fabric = FABRICS["reference"]

    def __post_init__(self) -> None:
        if not (math.isfinite(self.payload_bytes) and self.payload_bytes >= 0):
            raise InputError(f"a payload needs to be 0 bytes or more, but got {self.payload_bytes}")

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
    return parse_bytes(payload) if isinstance(payload, str) else payload


def _fabric_of(fabric: Fabric | str) -> Fabric:
    return fabric_named(fabric) if isinstance(fabric, str) else fabric

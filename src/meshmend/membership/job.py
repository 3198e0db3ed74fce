"""A job: what its coordinator serves, and the arguments that all its workers must share.

These arguments are small enough for a worker's first message. Each has a name, so that a refusal
can say which one differs. `train/state/fingerprint.py` makes the fingerprint of a model and its
data; this module only compares.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from msgspec.structs import fields

from meshmend.config import Timing
from meshmend.transport.codec import Count, Value, shown

if TYPE_CHECKING:  # `meshmend status` needs no NumPy
    from meshmend.topology.mesh import Mesh

NOT_COMPARED: Final = "not compared"  # the value of a text that a worker could not compute
_LONGEST_SHOWN: Final = 200  # characters of a value
_SHOWN_NAMES: Final = {
    "version": "meshmend's version",
    "dataset_length": "the length of the data set",
    "samples": "the digest of a few samples",
}


@dataclass(frozen=True)
class JobSpec:
    """The job that a coordinator serves: its name, mesh, board shape and timing.

    `version` is meshmend's on the coordinator's host, for those who ask.
    """

    job: str
    mesh: "Mesh"
    board: tuple[int, ...]
    timing: Timing = field(default_factory=Timing)
    version: str = ""


class JobFingerprint(Value, frozen=True):
    """The arguments of a worker's job; workers with different arguments cannot train together.

    `model` and `samples` are texts with counts and a digest: of the parameters' shapes and types,
    and of a few samples of the data set. `tile` is the shape of a replica of several chips, such as
    2x2; it is empty if each chip holds all of the state. `fabric` is the one that was given to plan
    for, if one was, `mesh` the whole one.
    """

    version: str
    steps: Count
    batch: Count
    seed: int
    policy: str
    model: str
    optimizer: str
    dataset_length: Count
    samples: str
    framework: str = "torch"
    tile: str = ""
    check_shares: Count = 0
    watch_links: bool = False
    shares: str = "equal"
    fabric: str = ""
    algorithm: str = ""
    mesh: str = ""

    def difference(self, other: "JobFingerprint") -> str:
        """Return in words the first argument in which a worker's fingerprint differs from this one.

        Return an empty text if none differs.
        """
        # Workers of two frameworks differ in everything: then this one says most.
        for each in sorted(fields(self), key=lambda each: each.name != "framework"):
            ours, theirs = getattr(self, each.name), getattr(other, each.name)
            if ours != theirs and NOT_COMPARED not in (ours, theirs):
                name = _SHOWN_NAMES.get(each.name, each.name)
                return f"{name} is {_text(theirs)} on that chip, but {_text(ours)} in this job"
        return ""


def _text(value: object) -> str:
    """Return a value as one line of limited length for an error message."""
    text = " ".join(str(value).split())
    return text if len(text) <= _LONGEST_SHOWN else shown(text)

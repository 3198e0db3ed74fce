"""What all workers of a job must have alike, small enough for their first message.

A value with a name for each thing, so that a refusal can say which one differs. Who makes one knows
the model and the data (`train/fingerprint.py`); this module only compares.
"""

from dataclasses import dataclass, fields
from typing import Final

from meshmend.net.codec import Count, shown

NOT_COMPARED: Final = "not compared"  # of a text that a worker could not find out
_LONGEST_SHOWN: Final = 200  # characters of a value
_WORDS: Final = {
    "version": "meshmend's version",
    "dataset_length": "the length of the data set",
    "samples": "the digest of a few samples",
}


@dataclass(frozen=True)
class JobFingerprint:
    """The arguments of a worker's job: two workers with different ones cannot train together.

    `model` and `samples` are texts with counts and a digest: of the parameters' shapes and types,
    and of a few samples of the data set.
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

    def difference(self, other: "JobFingerprint") -> str:
        """Return in words the first thing in which the fingerprint of a worker is not this one.

        Nothing if there is none.
        """
        for each in fields(self):
            ours, theirs = getattr(self, each.name), getattr(other, each.name)
            if ours != theirs and NOT_COMPARED not in (ours, theirs):
                name = _WORDS.get(each.name, each.name)
                return f"{name} is {_text(theirs)} there, and {_text(ours)} in this job"
        return ""


def _text(value: object) -> str:
    """Return a value as an error shows it: in one line, and not without end."""
    text = " ".join(str(value).split())
    return text if len(text) <= _LONGEST_SHOWN else shown(text)

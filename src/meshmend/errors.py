"""Every error that meshmend raises on purpose.

    MeshmendError
    ├── InputError              what the caller gave cannot be used: exit code 2
    │   ├── TopologyError       no such mesh, chip, link or region
    │   ├── UnsupportedError    this algorithm does not do this mesh
    │   ├── PlanFileError       a plan file that cannot be read, or is for another mesh
    │   └── UnitError           a number with a unit that cannot be read
    └── ProofError              a plan is wrong: exit code 1
        ├── VerificationError   a rank ends with the wrong data, or a hop is dead
        └── DeadlockError       routes wait for each other in a circle

Messages say who needs what, what it got, and what to do.
"""


class MeshmendError(Exception):
    """The root: catch this to catch everything that meshmend raises on purpose."""


class InputError(MeshmendError):
    """The caller's input cannot be used."""


class TopologyError(InputError):
    """A mesh, chip, link or region that does not exist or does not fit."""


class UnsupportedError(InputError):
    """An algorithm that does not do this mesh."""


class PlanFileError(InputError):
    """A plan file that cannot be read, or that is for another mesh."""


class UnitError(InputError):
    """A quantity whose text cannot be read."""


class ProofError(MeshmendError):
    """A plan that is wrong."""


class VerificationError(ProofError):
    """A rank ends with the wrong data, or a transfer crosses a dead hop."""


class DeadlockError(ProofError):
    """Routes that can wait for each other in a circle."""

"""Every error that meshmend raises on purpose.

    MeshmendError
    ├── InputError              what the caller gave cannot be used: exit code 2
    │   ├── TopologyError       no such mesh, chip, link or region
    │   ├── UnsupportedError    this algorithm does not support this mesh
    │   ├── PlanFileError       a plan file that cannot be read, or is for another mesh
    │   ├── UnitError           a number with a unit that cannot be read
    │   └── TestbedError        a testbed that is not there, is there already, or cannot be made
    ├── ProofError              a plan is wrong: exit code 1
    │   ├── VerificationError   a rank ends with the wrong data, or a hop is dead
    │   └── DeadlockError       routes wait for each other in a circle
    ├── TransportError          a collective did not finish on this rank
    │   ├── PeerLostError       the connection to a rank broke, or it never came up
    │   ├── MismatchError       ranks do not agree on what they are doing
    │   ├── StoppedError        `interrupt` was called
    │   ├── StalledError        nothing moved for the time allowed
    │   └── HandshakeError      the other end did not prove that it knows the secret
    ├── ChannelError            a control connection closed, or carries what is no message
    ├── MessageError            a control message or an event that its codec refuses
    ├── RefusedError            the coordinator does not want this worker
    ├── TurnedAwayError         the coordinator counts this worker as dead
    ├── JobFailedError          the job cannot go on: the state that counts is lost
    ├── CheckpointDamageError   a file of a checkpoint that is damaged
    └── BenchmarkError          a contender that did not finish

    TerminatedError (a BaseException, not a MeshmendError): SIGTERM asked this process to end

Messages say who needs what, what it got, and what to do.
"""


class MeshmendError(Exception):
    """The root: catch this to catch everything that meshmend raises on purpose."""


class InputError(MeshmendError):
    """The caller's input cannot be used."""


class TopologyError(InputError):
    """A mesh, chip, link or region that does not exist or does not fit."""


class UnsupportedError(InputError):
    """An algorithm does not support this mesh."""


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


class TestbedError(InputError):
    """A testbed that is not there, is there already, or cannot be made here."""

    __test__ = False  # not a test, whatever pytest thinks of the name


class TransportError(MeshmendError):
    """A collective did not finish; `rank` is the peer at fault, where one is known."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


class PeerLostError(TransportError):
    """The connection to a rank broke, or it never came up."""


class MismatchError(TransportError):
    """Ranks do not agree on what they are doing."""


class StoppedError(TransportError):
    """`interrupt` was called."""


class StalledError(TransportError):
    """Nothing moved for the time allowed."""


class HandshakeError(TransportError):
    """The other end did not prove that it knows the secret."""


class ChannelError(MeshmendError):
    """A control connection whose other end has closed, or sends what is no message."""


class MessageError(MeshmendError):
    """A control message or a run event that its codec refuses."""


class RefusedError(MeshmendError):
    """The coordinator does not want this worker."""


class TurnedAwayError(MeshmendError):
    """The coordinator counts this worker as dead; it may come back."""


class JobFailedError(MeshmendError):
    """The job cannot go on: the state that counts is lost."""


class CheckpointDamageError(MeshmendError):
    """A file of a checkpoint that is damaged."""


class BenchmarkError(MeshmendError):
    """A contender that did not finish."""


class TerminatedError(BaseException):
    """This process was asked to end by SIGTERM; no handler of mere errors holds it up."""

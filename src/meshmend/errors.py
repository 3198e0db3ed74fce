"""Every error that meshmend raises on purpose.

    MeshmendError
    ├── InputError              what the caller gave cannot be used: exit code 2
    │   ├── TopologyError       no such mesh, chip, link or region
    │   ├── UnsupportedError    this algorithm does not support this mesh
    │   ├── ResumeError         a folder of checkpoints that this job cannot go on from or write to
    │   ├── PlanFileError       a plan file that cannot be read, or is for another mesh
    │   ├── UnitError           a number with a unit that cannot be read
    │   ├── TensorShapeError    tensors that do not fit the collective; a RuntimeError too
    │   ├── ReconfigureError    handles or a uuid that do not fit; a RuntimeError too
    │   ├── MissingPackageError an optional package that is not installed; an ImportError too
    │   ├── NobodyAnswersError  neither the coordinator nor a worker of a job answers
    │   └── TestbedError        a testbed that does not exist, exists already, or cannot be made
    ├── ProofError              a plan is wrong: exit code 1
    │   ├── VerificationError   a rank ends with the wrong data, or a hop is dead
    │   └── DeadlockError       routes wait for each other in a circle
    ├── TransportError          a collective did not finish on this rank
    │   ├── PeerLostError       the connection to a rank broke, or it never came up
    │   ├── MismatchError       ranks do not agree on what they are doing
    │   ├── StoppedError        `interrupt` was called
    │   ├── StalledError        nothing moved for the time allowed
    │   └── HandshakeError      the other end did not prove that it knows the secret
    ├── ChannelError            a control connection closed, or carries no valid message
    ├── MessageError            a control message or an event that is not valid
    ├── RefusedError            the coordinator refuses this worker
    │   └── WrongChipError      its chip has computed wrong numbers; those beside it are wanted
    ├── TurnedAwayError         the coordinator counts this worker as dead
    ├── JobFailedError          the job cannot go on: the state that counts is lost
    ├── StateLostError          no chip of a generation has a part of the optimizer's state
    ├── NonFiniteError          the sums of a step are not finite
    ├── ReplicasDifferError     two chips of a job have different states
    ├── WrongResultError        a chip computes wrong numbers, and the job is to end
    ├── CheckpointDamageError   a file of a checkpoint that is damaged
    ├── LoaderError             a loader worker, which makes samples for a worker, died or hangs
    └── BenchmarkError          a contender of a benchmark did not finish

    TerminatedError (a BaseException, not a MeshmendError): SIGTERM asked this process to end

Messages say who needs what, what it got, and what to do.
"""

from collections.abc import Callable, Iterable
from functools import wraps
from numbers import Integral
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_Value = TypeVar("_Value")


def hides_frames(function: Callable[_P, _Value]) -> Callable[_P, _Value]:
    """Return a function whose input errors show the caller's lines, and none of ours.

    For what users call from a script: their line is wrong, so their line ends the traceback.
    """

    @wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _Value:
        try:
            return function(*args, **kwargs)
        except InputError as error:
            raise error.with_traceback(None) from None

    return called


def check_choice(name: str, value: str, choices: Iterable[str]) -> None:
    """Raise InputError unless a value is one of those that there are."""
    known = list(choices)
    if value not in known:
        raise InputError(f"{name} needs to be one of {', '.join(known)}, but got {value!r}")


def check_kind(who: str, what: str, value: object, kind: type | tuple[type, ...]) -> None:
    """Raise InputError unless a value is of a kind; `what` says what `who` needs."""
    if not isinstance(value, kind):
        raise InputError(f"{who} needs {what}, but got {value!r:.80}")


def check_count(
    who: str, name: str, value: object, *, least: int, most: int = (1 << 53) - 1
) -> None:
    """Raise InputError unless a value is a whole number in a range; a message can hold `most`."""
    if not isinstance(value, Integral) or int(value) < least:
        raise InputError(
            f"{who} needs {name} as a whole number of at least {least}, but got {value!r:.80}"
        )
    if int(value) > most:
        raise InputError(f"{who} needs {name} of at most {most}, but got {value}")


class MeshmendError(Exception):
    """The root: catch this to catch everything that meshmend raises on purpose."""


class InputError(MeshmendError):
    """The caller's input cannot be used."""


class TopologyError(InputError):
    """A mesh, chip, link or region does not exist or does not fit."""


class UnsupportedError(InputError):
    """An algorithm does not support this mesh."""


class ResumeError(InputError):
    """A folder of checkpoints cannot be resumed from, or belongs to another run."""


class PlanFileError(InputError):
    """A plan file cannot be read, or is for another mesh."""


class UnitError(InputError):
    """The text of a quantity cannot be read."""


class TensorShapeError(InputError, RuntimeError):
    """Tensors do not fit the collective; a RuntimeError as torch's other backends raise it."""


class ReconfigureError(InputError, RuntimeError):
    """Handles or uuid do not fit; a RuntimeError as torch's other backends raise it."""


class MissingPackageError(InputError, ImportError):
    """An optional package is not installed; code that catches ImportError catches this too."""


class NobodyAnswersError(InputError):
    """Neither the coordinator nor a worker of a job answers."""


class ProofError(MeshmendError):
    """A plan is wrong."""


class VerificationError(ProofError):
    """A rank ends with the wrong data, or a transfer crosses a dead hop."""


class DeadlockError(ProofError):
    """Routes can wait for each other in a circle."""


class TestbedError(InputError):
    """A testbed does not exist, exists already, or cannot be made on this machine."""

    __test__ = False  # its name looks like a test class to pytest


class TransportError(MeshmendError, RuntimeError):
    """A collective did not finish; `rank` is the peer at fault, where one is known.

    It is a RuntimeError too, because the other backends of torch.distributed raise that.
    """

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
    """A control connection closed, or carries no valid message."""


class MessageError(MeshmendError):
    """A control message or a run event is not valid."""


class RefusedError(MeshmendError):
    """The coordinator refuses this worker."""


class WrongChipError(RefusedError):
    """The coordinator refuses this worker: its chip has computed wrong numbers."""


class TurnedAwayError(MeshmendError):
    """The coordinator counts this worker as dead; it may join again."""


class JobFailedError(MeshmendError):
    """The job cannot go on: the state that counts is lost."""


class StateLostError(MeshmendError):
    """No chip of a generation has the optimizer's state of some share of the parameters."""


class NonFiniteError(MeshmendError):
    """What a step sums, gradients or changes of buffers, is not finite."""


class ReplicasDifferError(MeshmendError):
    """Two chips of a job have different states after the same step."""


class WrongResultError(MeshmendError):
    """A chip of a job computes wrong numbers, and the job is to end, or cannot tell which one."""


class CheckpointDamageError(MeshmendError):
    """A file of a checkpoint is damaged."""


class LoaderError(MeshmendError):
    """A loader worker, which makes samples for a worker, died or does not answer."""


class BenchmarkError(MeshmendError):
    """A contender of a benchmark did not finish."""


class TerminatedError(BaseException):
    """SIGTERM asked this process to end; `except Exception` does not catch this."""

"""Asks for the status of a job: the coordinator first, then its workers.

The coordinator has a short head start, because it knows more. A coordinator that is dead, hangs or
cannot be reached costs no more than that: then workers are asked, all at the same time.
"""

import queue
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from meshmend.errors import (
    ChannelError,
    HandshakeError,
    InputError,
    MessageError,
    NobodyAnswersError,
    TransportError,
)
from meshmend.membership.job_status import JobStatus, merged
from meshmend.membership.messages import (
    ASKER,
    AskStatus,
    Refused,
    StatusAnswer,
    TryLater,
    messages_before,
    send_message,
)
from meshmend.transport.channel import Channel
from meshmend.transport.handshake import ANYONE, ConnectRequest, Deadline, dial
from meshmend.transport.listener import Address

_HEAD_START_S: Final = 0.15  # of the coordinator
_MOST_ASKED: Final = 64  # workers in all
_AT_A_TIME: Final = 4  # of them, until one answers: each sends its whole generation
_NEXT_S: Final = 0.05  # between two such groups
_RETRY_S: Final = 0.05  # after an answerer that is busy


@dataclass(frozen=True)
class StatusQuestion:
    """What to ask whom: the coordinator, else the workers, which must know the secret.

    `job` None takes any job. `timeout_s` is for all of it. Once a worker has answered, the others
    have `gather_s` to do so too.
    """

    coordinator: Address | None
    workers: tuple[Address, ...]
    secret: bytes
    job: str | None = None
    timeout_s: float = 5.0
    gather_s: float = 0.2


@dataclass(frozen=True)
class _Reply:
    """What came of asking one address: a status, or the reason why there is none."""

    address: Address
    status: JobStatus | None = None
    why: str = ""
    is_refusal: bool = False


def ask_job(question: StatusQuestion) -> JobStatus:
    """Return the status of a job from its coordinator, or from its workers.

    Raises:
        NobodyAnswersError: neither answers in time.
        InputError: the one that answers has another secret, or another job.
    """
    deadline = time.monotonic() + question.timeout_s
    replies: queue.SimpleQueue[_Reply] = queue.SimpleQueue()
    n_asked, failed = 0, []
    if question.coordinator is not None:
        n_asked = _ask_all([question.coordinator], question, deadline, replies)
        reply = _next(replies, min(deadline, time.monotonic() + _HEAD_START_S))
        if reply is not None:
            if reply.status is not None or reply.is_refusal or not question.workers:
                return _status_of(reply)
            failed.append(reply)
    waiting = list(question.workers[:_MOST_ASKED])
    while waiting or len(failed) < n_asked:
        n_asked += _ask_all(waiting[:_AT_A_TIME], question, deadline, replies)
        del waiting[:_AT_A_TIME]
        until = min(deadline, time.monotonic() + _NEXT_S) if waiting else deadline
        if (reply := _next(replies, until)) is None:
            if until == deadline:
                break
        elif reply.status is not None:
            return _with_others(reply.status, question, deadline)
        else:
            failed.append(reply)
    refusals = [each for each in failed if each.is_refusal]
    raise _error([*refusals, *failed]) if failed else _silence(question)


def _status_of(reply: _Reply) -> JobStatus:
    if reply.status is None:
        raise _error([reply])
    return reply.status


def _error(failed: list[_Reply]) -> InputError:
    """Return the error for the first of these replies, all of which brought no status."""
    host, port = failed[0].address
    if failed[0].is_refusal:
        return InputError(f"{host}:{port} refuses to answer: {failed[0].why}")
    listed = "; ".join(dict.fromkeys(each.why for each in failed[:3]))
    return NobodyAnswersError(f"nobody answers: {listed}")


def _silence(question: StatusQuestion) -> InputError:
    asked = [question.coordinator] if question.coordinator else list(question.workers)
    listed = ", ".join(f"{host}:{port}" for host, port in asked[:3])
    return NobodyAnswersError(f"nobody answers at {listed} within {question.timeout_s:g} s")


def _with_others(first: JobStatus, question: StatusQuestion, deadline: float) -> JobStatus:
    """Return what a worker has answered, completed by the other members of its generation."""
    if first.answered_by is None or first.generation is None:
        return first
    own = {each.address for each in first.workers}
    others = [seat.address for seat in first.generation.seats if seat.address not in own]
    replies: queue.SimpleQueue[_Reply] = queue.SimpleQueue()
    until = min(deadline, time.monotonic() + question.gather_s)
    n_asked = _ask_all(others[:_MOST_ASKED], question, until, replies, is_brief=True)
    found = []
    while n_asked and (reply := _next(replies, until)) is not None:
        n_asked -= 1
        if reply.status is not None:
            found.append(reply.status)
    return merged(first, found)


def _ask_all(
    addresses: Iterable[Address],
    question: StatusQuestion,
    deadline: float,
    replies: "queue.SimpleQueue[_Reply]",
    *,
    is_brief: bool = False,
) -> int:
    """Ask each address in a thread of its own; return how many are asked."""
    message = AskStatus(question.job, is_brief)
    n_asked = 0
    for address in addresses:
        ask = threading.Thread(
            target=lambda at=address: replies.put(_ask(at, question.secret, message, deadline)),
            daemon=True,
        )
        ask.start()
        n_asked += 1
    return n_asked


def _next(replies: "queue.SimpleQueue[_Reply]", deadline: float) -> _Reply | None:
    try:
        return replies.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        return None


def _ask(address: Address, secret: bytes, message: AskStatus, deadline: float) -> _Reply:
    """Ask one address; one that is busy is asked again until the deadline."""
    while True:
        reply = _ask_once(address, secret, message, deadline)
        if reply is not None:
            return reply
        if time.monotonic() + _RETRY_S >= deadline:
            return _Reply(address, why=f"{address[0]}:{address[1]} closes the connection")
        time.sleep(_RETRY_S)


def _ask_once(
    address: Address, secret: bytes, message: AskStatus, deadline: float
) -> _Reply | None:
    """Return what came of one try; None if it is worth another one."""
    name = f"{address[0]}:{address[1]}"
    try:
        connection = dial(address, secret, ConnectRequest(ASKER, ANYONE), Deadline(deadline))
    except HandshakeError:
        return _Reply(address, why=f"what listens at {name} does not know the job's secret")
    except TransportError as error:
        is_busy = "during the handshake" in str(error)
        return None if is_busy else _Reply(address, why=_named(name, str(error)))
    channel = Channel(connection)
    try:
        send_message(channel, message)
        for answer in messages_before(channel, deadline):
            match answer:
                case StatusAnswer(status=status):
                    return _Reply(address, status)
                case Refused(why=why):
                    return _Reply(address, why=why, is_refusal=True)
                case TryLater():
                    return None
        return _Reply(address, why=f"{name} does not answer")
    except MessageError as error:
        return _Reply(address, why=str(error), is_refusal=True)
    except ChannelError:
        return None  # it was cut off, because others asked at the same time
    finally:
        channel.close()


def _named(name: str, why: str) -> str:
    return why if name in why else f"{name}: {why}"

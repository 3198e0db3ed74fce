"""Runs tasks over sockets: one authenticated connection per pair of ranks that exchange data.

It is a TCP connection between hosts, and one of the kernel's own between processes of one host.

Connections outlive collectives and generations. If a run is interrupted in the middle of a frame,
the rest of the frame is still sent later, and the receiver drops it. So the receiver always knows
where the next frame begins. A rank that gives up tells its peers why over the same connections.
"""

import os
import select
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Final

import numpy as np

from meshmend.errors import (
    InputError,
    MismatchError,
    PeerLostError,
    StalledError,
    StoppedError,
    TransportError,
)
from meshmend.transport import event_loop
from meshmend.transport.combine import bind_combine
from meshmend.transport.event_fd import clear, event_of, is_set
from meshmend.transport.event_loop import bind_checksum, header_checksum
from meshmend.transport.handshake import is_local
from meshmend.transport.in_flight import PendingRun, RunsInFlight
from meshmend.transport.listener import Address
from meshmend.transport.liveness import keep_alive, work_done
from meshmend.transport.peer_connections import PeerConnections, has_ended
from meshmend.transport.tasks import Bytes, Numbers, Task, describe_fingerprint

# Urgent data cannot overtake data in the buffers of the kernel, so few unsent bytes are there, and
# the receiver's window may be small: with a window of the kernel TCP queued 16 to 25 ms a hop over
# links of 50 Mbit/s, which cost trees a sixth of their time. A window that is smaller than what a
# link carries in a round trip is worse: then the link waits.
UNSENT_BYTES: Final = 1 << 13
_WORD: Final = 1 << 32

_REPORT_S: Final = 0.25  # for sending or reading the reason


class SocketTransport:
    """The connections of one rank, and the runs of tasks over them.

    Messages call a rank by `labels[rank]`. With `reports_failures`, a rank that fails sends the
    reason to its peers, which fail with the same text: every rank learns of a failure at once.
    Otherwise it sends nothing, and can continue after `renew`. A peer on another address may send
    `window_bytes` ahead; with 0, and on loopback, the kernel decides. A peer is lost when its
    kernel answers nothing for `link_timeout_s`; a busy peer is not lost. With 0 none ever is.

    A peer that sends a frame which cannot be right is lost too: every header has a checksum. With
    `sums_payloads`, which all ranks must then have, every payload has one as well.
    """

    def __init__(
        self,
        rank: int,
        labels: Sequence[str],
        secret: bytes,
        *,
        bind: str = "127.0.0.1",
        reports_failures: bool = False,
        window_bytes: int = 0,
        link_timeout_s: float = 0.0,
        sums_payloads: bool = False,
    ) -> None:
        self.rank = rank
        self._link_timeout_s = link_timeout_s
        self._labels = tuple(labels)
        self._reports_failures = reports_failures
        self._sockets: dict[int, socket.socket] = {}
        self._epochs: dict[int, int] = {}
        self._connected_in: dict[int, int] = {}  # by rank, the generation of the latest `connect`
        self._stop_fd = event_of(self)
        self._runs = RunsInFlight(
            len(labels),
            self._sockets,
            self._failure,
            stop_fd=self._stop_fd,
            link_timeout_s=link_timeout_s,
        )
        self._loop = self._runs.loop
        self._sums_payloads = event_loop.NEEDED if sums_payloads else event_loop.NOT_SENT
        self._loop.numbers[event_loop.SUMS_PAYLOADS] = self._sums_payloads
        self._links = self._loop.links
        self._drop(range(len(labels)))
        self._peer_connections = PeerConnections(
            rank,
            self._labels,
            secret,
            bind=bind,
            stop_fd=self._stop_fd,
            window_bytes=window_bytes,
            link_timeout_s=link_timeout_s,
            looks_for_callers=reports_failures,
        )
        self.address: Address = self._peer_connections.address
        bind_combine()
        bind_checksum()

    def connect(
        self,
        addresses: Mapping[int, Address],
        *,
        epochs: Mapping[int, int] | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        """Keep or make a connection to each of these ranks.

        With `epochs`, an old connection of another epoch is closed first, and both ends must name
        the same epoch. So a rank that left and joined again never uses its old connection.
        One that breaks is not made again in the same generation: what was on its way is lost, and
        the other end would wait for it. The next run finds it broken.

        Raises:
            PeerLostError: one cannot be reached in time. HandshakeError: the secrets differ.
            StoppedError: `interrupt` was called.
        """
        deadline = time.monotonic() + timeout_s
        in_use = self._runs.peers_in_use()  # if one of these is lost, its runs find out
        wanted = {peer: (epochs or {}).get(peer, 0) for peer in addresses if peer not in in_use}
        self._drop([peer for peer in wanted if not self._is_kept(peer, wanted[peer])])
        missing = [peer for peer in addresses if not self._is_linked(peer)]
        try:
            for peer in sorted(missing, reverse=True):  # dials first, then waits for calls
                epoch = wanted[peer]
                connection = self._peer_connections.connection(
                    peer, addresses[peer], deadline, epoch=epoch, generation=self.generation
                )
                self._link(peer, connection, epoch)
            self._connected_in |= dict.fromkeys(wanted, self.generation)
        except StoppedError:
            if not in_use:  # else the runs in flight have to see it too, until `renew`
                clear(self._stop_fd)
            raise

    def run(self, task: Task, payload: Bytes, *, timeout_s: float = 1800.0) -> None:
        """Send and receive what the task says, in place in the payload's bytes.

        Raises:
            PeerLostError, MismatchError, StoppedError, StalledError: see `transport`. The
            transport can then not run another task before `renew`.
        """
        self._runs.start(task, payload, timeout_s, wakes=False).wait()

    def start(
        self, task: Task, payload: Bytes, *, timeout_s: float = 1800.0, wakes: bool = True
    ) -> PendingRun:
        """Start what `run` does and return at once; any thread may call this.

        All ranks start their tasks in the same order. Up to 128 are in flight; the next one waits
        for room. If one fails, all that are in flight fail with it. With `wakes` false the caller
        waits for the run soon, so no thread is woken to drive it.
        """
        return self._runs.start(task, payload, timeout_s, wakes=wakes)

    def interrupt(self) -> None:
        """Make the current run or connect raise StoppedError, or the next one if there is none."""
        os.eventfd_write(self._stop_fd, 1)
        self._peer_connections.wake()

    def renew(self, generation: int) -> None:
        """Begin a new generation on the open connections; frames of older ones will be dropped.

        Runs that are still in flight fail with StoppedError.
        """
        if generation <= self.generation:
            raise InputError(
                f"renew needs a generation above {self.generation}, but got {generation}"
            )
        self._runs.stop()
        self._runs.renew(generation)
        self._loop.numbers[event_loop.SUMS_PAYLOADS] = self._sums_payloads
        self.drop(np.flatnonzero(self._links[:, event_loop.CLOSED]).tolist())
        self.drop([peer for peer, connection in self._sockets.items() if has_ended(connection)])
        clear(self._stop_fd)

    def drop(self, peers: Iterable[int]) -> None:
        """Close the connections to these ranks; `connect` makes new ones when needed.

        Runs that are still in flight fail with StoppedError.
        """
        self._runs.stop()
        self._drop(peers)

    def _drop(self, peers: Iterable[int]) -> None:
        for peer in peers:
            if connection := self._sockets.pop(peer, None):
                connection.close()
                del self._epochs[peer]
                self._connected_in.pop(peer, None)
            self._links[peer, : event_loop.SENT_BYTES] = 0  # that count never falls
            self._links[peer, [event_loop.FD, event_loop.IN_KEY, event_loop.OUT_KEY]] = -1

    def sever(self, peer: int) -> None:
        """Break the connection to a rank, as a cut link would; any thread may call this."""
        if connection := self._sockets.get(peer):
            with suppress(OSError):  # it may be broken already
                connection.shutdown(socket.SHUT_RDWR)

    def sum_payloads(self) -> None:
        """Send checksums of all payloads from now on, until the generation ends.

        A rank looks at those that come, whether it sends any or not. All it has to do with runs in
        flight is that some of their frames have checksums.
        """
        numbers = self._loop.numbers
        numbers[event_loop.SUMS_PAYLOADS] = max(event_loop.SENT, numbers[event_loop.SUMS_PAYLOADS])

    def corrupt(self, peer: int) -> None:
        """Change bits of all data that comes from a rank, until its connection is made anew.

        Below TCP's checksum nobody but a broken device can, so this end does it to what it has
        read, before it looks at its own checksum.
        """
        self._links[peer, event_loop.CORRUPTED] = 1

    def answer_askers(self, on_asker: Callable[[socket.socket], None], *, epoch: int = 0) -> None:
        """Pass on callers that want anyone in an epoch; `on_asker` runs in another thread.

        It must not block.
        """
        self._peer_connections.asked_epoch = epoch
        self._peer_connections.on_asker = on_asker

    def sent_bytes(self) -> dict[int, int]:
        """Return how many bytes each rank has got from this one; any thread may call this."""
        sent = self._links[:, event_loop.SENT_BYTES].tolist()
        return {peer: n_bytes for peer, n_bytes in enumerate(sent) if n_bytes}

    def work_done(self) -> dict[int, tuple[int, int]]:
        """Return for each connected rank what `liveness.work_done` says."""
        return {peer: work_done(each) for peer, each in list(self._sockets.items())}

    def check(self) -> None:
        """Raise StoppedError if `interrupt` was called: for a rank that waits for no peers."""
        if is_set(self._stop_fd):
            clear(self._stop_fd)
            raise StoppedError(f"{self._me} was told to stop")

    def close(self) -> None:
        """Close all connections and stop listening; runs in flight fail with StoppedError."""
        self._runs.close()
        self._peer_connections.close()
        for connection in self._sockets.values():
            connection.close()
        self._links[:, event_loop.FD] = -1

    def __enter__(self) -> "SocketTransport":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def generation(self) -> int:
        """The generation that was begun last with `renew`."""
        return int(self._loop.numbers[event_loop.GENERATION])

    @property
    def _me(self) -> str:
        return self._labels[self.rank]

    def _is_kept(self, peer: int, epoch: int) -> bool:
        """Whether the connection to a rank is of this epoch and open, or was in this generation.

        A peer that was interrupted while it connected has closed; it calls again in that epoch.
        """
        connection = self._sockets.get(peer)
        if connection is None or self._epochs.get(peer) != epoch:
            return False
        if self._connected_in.get(peer) == self.generation:
            return True
        if has_ended(connection):
            return False
        return self._peer_connections.choose_old(peer, epoch, self.generation)

    def _is_linked(self, peer: int) -> bool:
        return bool(self._links[peer, event_loop.FD] >= 0)

    def _link(self, peer: int, connection: socket.socket, epoch: int) -> None:
        try:
            self._set_up(connection)
        except OSError as error:  # the peer may have closed already
            connection.close()
            raise PeerLostError(
                f"{self._labels[peer]} hung up on {self._me}: {error.strerror}", peer
            ) from None
        self._sockets[peer], self._epochs[peer] = connection, epoch
        self._links[peer, event_loop.FD] = connection.fileno()

    def _set_up(self, connection: socket.socket) -> None:
        connection.setblocking(False)
        if is_local(connection):
            return  # its buffers are small, and the kernel sees at once when the peer is gone
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        if self._link_timeout_s:
            keep_alive(connection, self._link_timeout_s)

    def _failure(self, status: int, peer: int, timeout_s: float) -> TransportError:
        if status == event_loop.INTERRUPTED:
            return StoppedError(f"{self._me} was told to stop; begin a new generation with renew")
        error: TransportError
        if status == event_loop.TIMED_OUT:
            error = StalledError(f"{self._me} saw nothing move for {timeout_s:g} s")
        elif status == event_loop.LOST:
            error = PeerLostError(f"{self._labels[peer]} hung up on {self._me}", peer)
        elif status == event_loop.SILENT:
            error = PeerLostError(
                f"{self._labels[peer]} has answered nothing that {self._me} sent for "
                f"{self._link_timeout_s:g} s",
                peer,
            )
            self.sever(peer)
        elif status == event_loop.AHEAD:
            call = int(self._links[peer, event_loop.IN_WORDS + event_loop.CALL_WORD])
            error = PeerLostError(
                f"{self._labels[peer]} is in generation {call // _WORD}, of which {self._me} has "
                f"heard nothing for {self._link_timeout_s:g} s",
                peer,
            )
        elif status == event_loop.PEER_FAILED:
            error = self._peer_failed(peer)
        elif status == event_loop.BAD_FRAME:
            error = self._bad_frame(peer)
        else:
            error = self._mismatch(peer)
        if self._reports_failures:
            call = self.generation * _WORD + int(self._loop.numbers[event_loop.LAST_BEGUN])
            _report_failure(str(error), call, self._sockets, self._links)
        if status in (event_loop.PEER_FAILED, event_loop.BAD_FRAME, event_loop.AHEAD):
            self._links[peer, event_loop.CLOSED] = 1  # so that `renew` drops it
            self.sever(peer)
        return error

    def _bad_frame(self, peer: int) -> PeerLostError:
        self._links[peer, event_loop.CLOSED] = 0  # it can still be told why
        fault = int(self._links[peer, event_loop.FAULT])
        advice = ""
        if fault == event_loop.NOT_SUMMED:
            advice = "; switch checksums of payloads on in every process of the job, or in none"
        return PeerLostError(
            f"{self._labels[peer]} sent {self._me} {event_loop.FAULTS[fault]}{advice}", peer
        )

    def _peer_failed(self, peer: int) -> TransportError:
        """Return the error for a peer that sent why it gave up.

        Only ranks that report failures send that; from any other rank it cannot be right.
        """
        reason = _reported_reason(self._sockets[peer], self._links[peer])
        if self._reports_failures:
            return TransportError(reason or f"{self._labels[peer]} gave up", peer)
        return PeerLostError(f"{self._labels[peer]} gave up: {reason!r}", peer)

    def _mismatch(self, peer: int) -> MismatchError:
        """Return the error for a frame that belongs to no run as this rank runs it."""
        words = self._links[peer, event_loop.IN_WORDS :].tolist()
        call, theirs = words[event_loop.CALL_WORD], words[event_loop.FINGERPRINT_WORD]
        oldest, last = self._loop.numbers[[event_loop.OLDEST, event_loop.LAST_BEGUN]].tolist()
        number = call % _WORD if oldest <= call % _WORD <= last else oldest
        ours = int(self._loop.runs[number % event_loop.MOST_RUNS, event_loop.FINGERPRINT])
        return MismatchError(
            f"ranks disagree: {self._me} is in a {describe_fingerprint(ours)}, but "
            f"{self._labels[peer]} in a {describe_fingerprint(theirs)}; call the same collectives "
            "in the same order with tensors of one size and type on every rank",
            peer,
        )


def _report_failure(
    text: str, call: int, connections: Mapping[int, socket.socket], links: Numbers
) -> None:
    """Send every peer why this rank gives up; wait at most `_REPORT_S` for peers to read it."""
    reason = text.encode()[: event_loop.LONGEST_TEXT]
    header = np.array([call, event_loop.GAVE_UP, len(reason), 0, 0, 0])
    header[event_loop.CHECK_WORD] = header_checksum(header)
    unsent = {
        connection.fileno(): (connection, _tail_of(links[peer]) + header.tobytes() + reason)
        for peer, connection in connections.items()
        if not links[peer, event_loop.CLOSED]
    }
    poll = select.poll()
    for fd in unsent:
        poll.register(fd, select.POLLOUT)
    deadline = time.monotonic() + _REPORT_S
    while unsent and (left_s := deadline - time.monotonic()) > 0:
        for fd, _ in poll.poll(left_s * 1e3):
            connection, rest = unsent.pop(fd)
            try:
                rest = rest[connection.send(rest) :]
                if rest:
                    unsent[fd] = (connection, rest)
                    continue
                connection.shutdown(socket.SHUT_WR)
            except BlockingIOError:
                unsent[fd] = (connection, rest)
                continue
            except OSError:  # the peer has closed
                pass
            poll.unregister(fd)


def _tail_of(link: Numbers) -> bytes:
    """Return bytes that complete the frame in progress to a peer; their content is void."""
    if link[event_loop.OUT_KEY] == event_loop.NONE:
        return b""
    done = int(link[event_loop.OUT_DONE])
    words = link[event_loop.OUT_WORDS : event_loop.OUT_WORDS + event_loop.HEADER_WORDS]
    frame = event_loop.HEADER_BYTES + int(words[event_loop.LENGTH_WORD])
    header: bytes = words.tobytes()[done:]
    link[event_loop.OUT_KEY] = event_loop.NONE
    return header + bytes(frame - done - len(header))


def _reported_reason(connection: socket.socket, link: Numbers) -> str:
    """Read and return the reason that a peer sent when it gave up; empty if it sent none."""
    length = int(link[event_loop.IN_WORDS + event_loop.LENGTH_WORD])
    reason = b""
    deadline = time.monotonic() + _REPORT_S
    try:
        while len(reason) < length and (left_s := deadline - time.monotonic()) > 0:
            connection.settimeout(left_s)
            if not (part := connection.recv(length - len(reason))):
                break
            reason += part
    except OSError:
        pass
    return reason.decode(errors="replace")

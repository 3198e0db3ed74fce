"""The transports of a process group: sockets, or the messages of Gloo or NCCL."""

import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any, Protocol
from zlib import crc32

import numpy as np
import torch
from numpy.typing import NDArray

from meshmend.errors import PeerLostError, StalledError, StoppedError, TransportError
from meshmend.planning.settings import Settings
from meshmend.topology.failures import Chip
from meshmend.torch.call_arguments import dist
from meshmend.transport.combine import OPS
from meshmend.transport.handshake import ANYONE, ConnectRequest, Deadline, dial
from meshmend.transport.listener import Address, parse_address
from meshmend.transport.sockets import SocketTransport
from meshmend.transport.tasks import ADD, LOCAL_ADD, PUT, SEND, Task

Post = Callable[[list[torch.Tensor], int, int], Any]  # send or recv of a process group

_COMBINE: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "sum": torch.Tensor.add_,
    "product": torch.Tensor.mul_,
    "min": lambda kept, sent: torch.minimum(kept, sent, out=kept),
    "max": lambda kept, sent: torch.maximum(kept, sent, out=kept),
}


class MessageTransport:
    """Point-to-point messages of torch.distributed: Gloo's, and NCCL's by the same code.

    A key numbers one move of one slice. Messages between two ranks go in the order of their keys,
    because NCCL matches them by order alone. That order cannot block: the smallest unfinished key
    waits for nothing. Messages to higher ranks (`up`) and messages to lower ranks (`down`) use two
    groups, so that neither kind waits for the other. One thread per peer and direction waits for
    messages; the caller's thread does everything else.

    On a GPU, a message that is waited for is a running kernel. Some operations wait for all
    running kernels of the device: allocating memory, loading a kernel at its first use, using a
    stream that shares a hardware queue. They would wait for another chip, which may wait for this
    one. So all memory is allocated and all kernels are loaded before the first message, and there
    are few streams.

    After `interrupt` the groups cannot be used again: they still wait for their messages.
    """

    def __init__(self, rank: int, up: Any, down: Any, *, device_type: str = "cpu") -> None:
        self.device_type = device_type
        self.on_abort: Callable[[], None] = lambda: None
        self._rank = rank
        self._up = up
        self._down = down
        self._connected: set[int] = set()
        self._events: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()

    def start(self, task: Task, flat: torch.Tensor, *, timeout_s: float) -> Callable[[], None]:
        """Run a task in place in a flat tensor, one at a time; return what is left to do: nothing.

        Raises:
            PeerLostError: a message failed. StoppedError: `interrupt` was called.
            StalledError: no message was finished within `timeout_s`.
        """
        self._connect(task.program.peers, flat.device)
        if flat.is_cuda:
            _load_kernels(_op_of(task), flat.dtype, flat.device)
        run = _TaskRun(task, flat, self._events)
        _synchronize(flat)
        for peer in task.program.peers:
            out, back = (self._up, self._down) if peer > self._rank else (self._down, self._up)
            run.start(peer, out.send, back.recv)
        run.begin()
        while run.n_left > 0:
            try:
                key, what = self._events.get(timeout=timeout_s)
            except queue.Empty:
                raise StalledError(
                    f"rank {self._rank} saw nothing move for {timeout_s:g} s"
                ) from None
            if key == _STOP:
                raise StoppedError(f"rank {self._rank} was told to stop")
            if isinstance(what, Exception):
                raise PeerLostError(f"a message of rank {self._rank} failed: {what}")
            run.take(key, what)
        return lambda: None

    def work_done(self) -> Mapping[int, tuple[int, int]]:
        """Return nothing: the connections of other libraries are not known."""
        return {}

    def interrupt(self) -> None:
        """Interrupt a run: the one under way, or else the next one, raises StoppedError."""
        self._events.put((_STOP, None))

    def abort(self) -> None:
        """Interrupt a run; other ranks see nothing of it but that messages do not come."""
        self.interrupt()

    def _connect(self, peers: Iterable[int], device: torch.device) -> None:
        """Exchange a first message with each new peer.

        NCCL connects two ranks at their first message, and each end then waits for the other. All
        ranks go through the pairs in the same order, so no ranks wait for each other in a circle.
        """
        new = sorted(set(peers) - self._connected, key=lambda peer: sorted((peer, self._rank)))
        for peer in new:
            token = torch.zeros(1, device=device)
            for group, is_sender in (
                (self._up, peer > self._rank),
                (self._down, peer < self._rank),
            ):
                post = group.send if is_sender else group.recv
                try:
                    _exchange(post, token, peer)
                except Exception as error:
                    raise PeerLostError(
                        f"rank {self._rank} cannot reach rank {peer}: {error}", peer
                    ) from None
            self._connected.add(peer)

    def close(self) -> None:
        """Close both groups."""
        self._up = self._down = None


_STOP = -1
_POLL_S = 20e-6
_ALIGNMENTS = 16


def _exchange(post: Post, tensor: torch.Tensor, peer: int) -> None:
    """Send or receive one message; return when it is done.

    On a GPU it polls for the end. Waiting in a stream would block that stream, and a stream for
    each message would need more streams than the hardware has queues.
    """
    work = post([tensor], peer, 0)
    while tensor.is_cuda and not work.is_completed():
        time.sleep(_POLL_S)
    work.wait()


def _op_of(task: Task) -> str:
    return OPS[task.code % len(OPS)]


@cache
def _load_kernels(op: str, dtype: torch.dtype, device: torch.device) -> None:
    """Make CUDA load the kernels that combine two tensors now, not at their first use.

    There is one for each alignment that a part of a payload may have.
    """
    for at in range(_ALIGNMENTS):
        kept = torch.zeros(2 * _ALIGNMENTS, dtype=dtype, device=device)[at : at + _ALIGNMENTS]
        _COMBINE[op](kept, torch.zeros(_ALIGNMENTS, dtype=dtype, device=device))
    torch.cuda.synchronize(device)


def _synchronize(tensor: torch.Tensor) -> None:
    """Wait until other streams can read what was computed on a tensor."""
    if tensor.is_cuda:
        torch.cuda.current_stream(tensor.device).synchronize()


class _TaskRun:
    """One run of a task: which keys still wait, and which messages arrived early."""

    def __init__(
        self, task: Task, flat: torch.Tensor, events: "queue.SimpleQueue[tuple[int, Any]]"
    ) -> None:
        program, layout = task.program, task.layout
        itemsize = flat.element_size()
        self._program = program
        self._flat = flat
        self._events = events
        self._start, self._source = layout.start.tolist(), layout.source.tolist()
        self._n_elements = (layout.size // itemsize).tolist()
        self._scratch = flat.new_empty(layout.scratch_bytes // itemsize)
        self._needs = np.tile(program.needs, layout.n_slices).tolist()
        self._kind = np.tile(program.kind, layout.n_slices)
        self._peer = np.tile(program.peer, layout.n_slices)
        self._combine = _COMBINE[_op_of(task)]
        self._early: dict[int, torch.Tensor] = {}
        self.n_left = len(self._needs)
        self._has_bytes = layout.size > 0
        sends = self._kind == SEND
        self._unsent = {
            peer: np.flatnonzero(sends & (self._peer == peer)).tolist()[::-1]
            for peer in program.peers
        }
        self._outboxes: dict[int, queue.SimpleQueue[int]] = {
            peer: queue.SimpleQueue() for peer in program.peers
        }
        for key in np.flatnonzero(~sends & ~self._has_bytes).tolist():
            self._early[key] = flat[:0]
        comes = (self._kind == ADD) | (self._kind == PUT)
        incoming = np.flatnonzero(comes & self._has_bytes).tolist() if flat.is_cuda else []
        sizes = [self._n_elements[key] for key in incoming]
        self._buffers = dict(
            zip(incoming, flat.new_empty(sum(sizes)).split_with_sizes(sizes), strict=True)
        )

    def start(self, peer: int, send: Post, receive: Post) -> None:
        """Start the threads that exchange messages with one peer."""
        comes = (self._kind == ADD) | (self._kind == PUT)
        incoming = (self._peer == peer) & comes & self._has_bytes
        jobs = (
            (self._send_all, send, len(self._unsent[peer])),
            (self._receive_all, receive, np.flatnonzero(incoming).tolist()),
        )
        for job, post, what in jobs:
            threading.Thread(target=job, args=(peer, post, what), daemon=True).start()

    def begin(self) -> None:
        """Release every key that waits for nothing."""
        n_moves = self._program.n_moves
        for key in range(len(self._needs)):
            if self._program.needs[key % n_moves] == 0 and self._release(key):
                self._finish(key)

    def take(self, key: int, received: torch.Tensor | None) -> None:
        """Record that a key was sent, or apply what was received for it."""
        if received is not None:
            self._early[key] = received
            if self._needs[key] > 0:
                return
            self._apply(key)
        self._finish(key)

    def _finish(self, key: int) -> None:
        program = self._program
        done = [key]
        while done:
            key = done.pop()
            self.n_left -= 1
            move = key % program.n_moves
            span = slice(program.following_ptr[move], program.following_ptr[move + 1])
            for following in program.following[span].tolist():
                freed = key - move + following
                self._needs[freed] -= 1
                if self._needs[freed] == 0 and self._release(freed):
                    done.append(freed)

    def _release(self, key: int) -> bool:
        """Start a key that waits for nothing any more; return whether that finished it."""
        if self._kind[key] == SEND:
            unsent = self._unsent[int(self._peer[key])]
            while unsent and self._needs[unsent[-1]] == 0:
                self._outboxes[int(self._peer[key])].put(unsent.pop())
            return False
        if self._kind[key] < LOCAL_ADD and key not in self._early:
            return False
        self._apply(key)
        return True

    def _apply(self, key: int) -> None:
        part = self._place(key, self._start[key])
        if self._kind[key] >= LOCAL_ADD:
            received = self._place(key, self._source[key])
        else:
            received = self._early.pop(key)
        if self._kind[key] in {ADD, LOCAL_ADD}:
            self._combine(part, received)
        elif received.data_ptr() != part.data_ptr():
            part.copy_(received)
        _synchronize(part)

    def _place(self, key: int, start: int) -> torch.Tensor:
        """Return a key's bytes at a place in the payload, or in scratch if it is below zero."""
        flat, start = (self._flat, start) if start >= 0 else (self._scratch, ~start)
        first = start // flat.element_size()
        return flat[first : first + self._n_elements[key]]

    def _send_all(self, peer: int, send: Post, n_keys: int) -> None:
        for _ in range(n_keys):
            key = self._outboxes[peer].get()
            if not self._has_bytes[key]:
                self._events.put((key, None))
                continue
            self._attempt(key, send, self._place(key, self._start[key]), peer, None)

    def _receive_all(self, peer: int, receive: Post, keys: list[int]) -> None:
        for key in keys:
            part = self._place(key, self._start[key])
            is_free = self._kind[key] == PUT and self._needs[key] == 0
            buffer = self._buffers.get(key)
            target = part if is_free else torch.empty_like(part) if buffer is None else buffer
            self._attempt(key, receive, target, peer, target)

    def _attempt(
        self, key: int, post: Post, tensor: torch.Tensor, peer: int, what: torch.Tensor | None
    ) -> None:
        try:
            _exchange(post, tensor, peer)
        except Exception as error:
            self._events.put((key, error))
        else:
            self._events.put((key, what))


_SECRET_BYTES = 32
_TELL_S = 10.0  # to reach a rank that is told of an abort


class TensorTransport(Protocol):
    """Runs tasks on flat tensors of one kind of device.

    `on_abort` is called in another thread when a peer has aborted.
    """

    device_type: str
    on_abort: Callable[[], None]

    def start(self, task: Task, flat: torch.Tensor, *, timeout_s: float) -> Callable[[], None]:
        """Start a task in place; return what waits for it, which must be called soon."""

    def work_done(self) -> Mapping[int, tuple[int, int]]:
        """Return for each connected rank what `liveness.work_done` says, as far as it is known."""

    def interrupt(self) -> None:
        """Interrupt the run under way, or else the next one."""

    def abort(self) -> None:
        """Interrupt what is under way here, and make the other ranks call `on_abort`."""

    def close(self) -> None:
        """Close all connections."""


NO_DEVICE = "none"


class NoTransport:
    """Serves no kind of device, so that everything goes to Gloo."""

    device_type = NO_DEVICE

    def __init__(self) -> None:
        self.on_abort: Callable[[], None] = lambda: None

    def start(self, task: Task, flat: torch.Tensor, *, timeout_s: float) -> Callable[[], None]:
        """Refuse: no tensor is on such a device."""
        raise AssertionError("nothing runs on no device")

    def work_done(self) -> Mapping[int, tuple[int, int]]:
        """Return nothing: nothing was sent."""
        return {}

    def interrupt(self) -> None:
        """Do nothing: nothing is under way."""

    abort = close = interrupt


class SocketTensorTransport:
    """Moves CPU tensors by sockets, which it connects when a task first needs them."""

    device_type = "cpu"

    def __init__(
        self, transport: SocketTransport, addresses: Mapping[int, Address], secret: bytes
    ) -> None:
        self.on_abort: Callable[[], None] = lambda: None
        self._transport = transport
        self._connected: set[int] = set()  # a connection that breaks is not made again
        self._addresses = addresses
        self._secret = secret
        # Groups of one job may have one secret, and an address may be another group's by the time
        # that a call comes there. All ranks of a group know the same addresses.
        self._epoch = crc32(repr(sorted(addresses.items())).encode())
        transport.answer_askers(self._heard_of_abort, epoch=self._epoch)

    def start(self, task: Task, flat: torch.Tensor, *, timeout_s: float) -> Callable[[], None]:
        """Start a task in place in the tensor's memory; others may be in flight.

        A rank that cannot connect tells all others: they may wait for its call.
        """
        if not self._connected.issuperset(peers := task.program.peers):
            self._connect(peers, timeout_s)
        raw: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
        return self._transport.start(task, raw, timeout_s=timeout_s, wakes=False).wait

    def _connect(self, peers: Iterable[int], timeout_s: float) -> None:
        try:
            self._transport.connect(
                {peer: self._addresses[peer] for peer in peers}, timeout_s=timeout_s
            )
        except PeerLostError:
            self._tell_all_of_abort()
            raise
        self._connected.update(peers)

    def work_done(self) -> Mapping[int, tuple[int, int]]:
        """Return for each connected rank what `liveness.work_done` says."""
        return self._transport.work_done()

    def interrupt(self) -> None:
        """Interrupt the run under way, or else the next one."""
        self._transport.interrupt()

    def abort(self) -> None:
        """Interrupt the runs here, and call all other ranks, connected or not, to do the same."""
        self._transport.interrupt()
        self._tell_all_of_abort()

    def _tell_all_of_abort(self) -> None:
        for peer, address in self._addresses.items():
            if peer != self._transport.rank:
                threading.Thread(target=self._tell_of_abort, args=(address,), daemon=True).start()

    def _tell_of_abort(self, address: Address) -> None:
        """Call a rank as one who wants anyone: between ranks, that means only this."""
        request = ConnectRequest(self._transport.rank, ANYONE, self._epoch)
        with suppress(TransportError, OSError):  # it may be gone
            dial(address, self._secret, request, Deadline(time.monotonic() + _TELL_S)).close()

    def _heard_of_abort(self, connection: socket.socket) -> None:
        connection.close()
        self.on_abort()
        self._transport.interrupt()

    def close(self) -> None:
        """Close all connections."""
        self._transport.close()


def transport_of(
    settings: Settings, chips: Sequence[Chip], store: Any, rank: int, timeout: timedelta
) -> TensorTransport:
    """Return the transport that the settings name; all ranks call this at the same time.

    Messages call rank i by `chips[i]`, which may have another place in the settings' mesh.
    """
    n_ranks = len(chips)
    if settings.transport == "sockets":
        secret = _shared_secret(store, rank, settings.secret)
        transport = listening_transport(rank, chips, settings, secret)
        return SocketTensorTransport(
            transport, _all_addresses(store, rank, n_ranks, transport.address), secret
        )
    kind = dist.ProcessGroupGloo if settings.transport == "gloo" else dist.ProcessGroupNCCL
    up, down = (
        kind(dist.PrefixStore(way, store), rank, n_ranks, timeout) for way in ("up", "down")
    )
    device_type = "cpu" if settings.transport == "gloo" else "cuda"
    return MessageTransport(rank, up, down, device_type=device_type)


def listening_transport(
    rank: int, chips: Sequence[Chip], settings: Settings, secret: bytes
) -> SocketTransport:
    """Return a transport that listens at its address and knows no peers yet."""
    return SocketTransport(
        rank,
        [f"chip {chip} (rank {at})" for at, chip in enumerate(chips)],
        secret,
        bind=settings.bind,
        reports_failures=True,
        window_bytes=settings.window,
        sums_payloads=settings.checksum,
        link_timeout_s=settings.link_timeout_s,
    )


def _shared_secret(store: Any, rank: int, given: str) -> bytes:
    if given:
        return given.encode()
    if rank == 0:
        store.set("meshmend-secret", os.urandom(_SECRET_BYTES).hex())
    return bytes(store.get("meshmend-secret"))


def _all_addresses(store: Any, rank: int, n_ranks: int, address: Address) -> dict[int, Address]:
    """Publish this rank's address in the store; return the addresses of all ranks."""
    store.set(f"meshmend-address-{rank}", f"{address[0]}:{address[1]}")
    told = store.multi_get([f"meshmend-address-{peer}" for peer in range(n_ranks)])
    return {
        peer: parse_address(bytes(each).decode(), f"rank {peer}") for peer, each in enumerate(told)
    }

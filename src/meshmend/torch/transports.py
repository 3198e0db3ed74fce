"""The transports of a process group: sockets, or the messages of Gloo or NCCL."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed
from numpy.typing import NDArray

from meshmend.planning.settings import Settings
from meshmend.topology.failures import Chip
from meshmend.torch.message_transport import MessageTransport
from meshmend.transport.listener import Address
from meshmend.transport.sockets import SocketTransport
from meshmend.transport.transport import Task

# torch's stubs lack half of what c10d offers to a backend, so it is untyped here.
dist: Any = torch.distributed

_SECRET_BYTES = 32


class TensorTransport(Protocol):
    """Runs tasks on flat tensors of one kind of device."""

    device_type: str

    def start(self, task: Task, flat: torch.Tensor, *, timeout_s: float) -> Callable[[], None]:
        """Start a task in place; return what waits for it, which must be called soon."""

    def interrupt(self) -> None:
        """Interrupt the run under way, or else the next one."""

    def close(self) -> None:
        """Close all connections."""


class SocketTensorTransport:
    """Moves CPU tensors by sockets, which it connects when a task first needs them."""

    device_type = "cpu"

    def __init__(self, transport: SocketTransport, addresses: Mapping[int, Address]) -> None:
        self._transport = transport
        self._addresses = addresses

    def start(self, task: Task, flat: torch.Tensor, *, timeout_s: float) -> Callable[[], None]:
        """Start a task in place in the tensor's memory; others may be in flight."""
        peers = {peer: self._addresses[peer] for peer in task.program.peers}
        self._transport.connect(peers, timeout_s=timeout_s)
        raw: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
        return self._transport.start(task, raw, timeout_s=timeout_s, wakes=False).wait

    def interrupt(self) -> None:
        """Interrupt the run under way, or else the next one."""
        self._transport.interrupt()

    def close(self) -> None:
        """Close all connections."""
        self._transport.close()


def transport_of(options: Any, settings: Settings, chips: Sequence[Chip]) -> TensorTransport:
    """Return the transport that the settings name; all ranks call this at the same time."""
    store, rank, n_ranks = options.store, options.group_rank, options.group_size
    if settings.transport == "sockets":
        labels = [f"chip {chip} (rank {at})" for at, chip in enumerate(chips)]
        secret = _shared_secret(store, rank, settings.secret)
        transport = SocketTransport(
            rank,
            labels,
            secret,
            bind=settings.bind,
            reports_failures=True,
            window_bytes=settings.window_bytes,
            sums_payloads=settings.sums_payloads,
            link_timeout_s=settings.link_timeout_s,
        )
        return SocketTensorTransport(
            transport, _all_addresses(store, rank, n_ranks, transport.address)
        )
    kind = dist.ProcessGroupGloo if settings.transport == "gloo" else dist.ProcessGroupNCCL
    up, down = (
        kind(dist.PrefixStore(way, store), rank, n_ranks, options.timeout) for way in ("up", "down")
    )
    device_type = "cpu" if settings.transport == "gloo" else "cuda"
    return MessageTransport(rank, up, down, device_type=device_type)


def _shared_secret(store: Any, rank: int, given: str) -> bytes:
    if given:
        return given.encode()
    if rank == 0:
        store.set("meshmend-secret", os.urandom(_SECRET_BYTES).hex())
    return bytes(store.get("meshmend-secret"))


def _all_addresses(store: Any, rank: int, n_ranks: int, address: Address) -> dict[int, Address]:
    """Publish this rank's address in the store; return the addresses of all ranks."""
    store.set(f"meshmend-address-{rank}", f"{address[0]}:{address[1]}")
    result = {}
    for peer in range(n_ranks):
        host, _, port = store.get(f"meshmend-address-{peer}").decode().rpartition(":")
        result[peer] = (host, int(port))
    return result

"""Nodes of a Ray cluster: which is the head, which can be reached, which are reserved for hosts.

Ray takes some 15 s to notice that a node is gone. This module asks the node itself: its raylet
accepts connections as long as it lives. The kernel answers for it, so a busy node is not mistaken
for a dead one.
"""

import selectors
import socket
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from errno import EINPROGRESS
from typing import Any, Final

import ray
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)

from meshmend.errors import InputError
from meshmend.transport.listener import Address

_HEAD: Final = "node:__internal_head__"  # a resource that only the head node has
_NODE_LABEL: Final = "ray.io/node-id"  # a label that Ray gives every node


def head_node() -> str:
    """Return the number of the cluster's head node.

    Raises:
        InputError: the cluster has none.
    """
    for node in ray.nodes():
        if node["Alive"] and _HEAD in node["Resources"]:
            return str(node["NodeID"])
    raise InputError("a job needs a Ray cluster with a head node, but this one has none")


def lost_nodes(wanted: Collection[str], *, within_s: float) -> set[str]:
    """Return which of these nodes Ray counts as dead, or whose raylets accept no connection."""
    addresses = {
        str(node["NodeID"]): (str(node["NodeManagerAddress"]), int(node["NodeManagerPort"]))
        for node in ray.nodes()
        if node["Alive"]
    }
    asked = {node: addresses[node] for node in wanted if node in addresses}
    answered = _answering(set(asked.values()), within_s)
    return {node for node in wanted if asked.get(node) not in answered}


def _answering(addresses: Iterable[Address], within_s: float) -> set[Address]:
    """Return the addresses that accept a connection within this time; asks all at once."""
    found: set[Address] = set()
    deadline = time.monotonic() + within_s
    with selectors.DefaultSelector() as selector:
        for address in addresses:
            connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            connection.setblocking(False)
            if connection.connect_ex(address) in (0, EINPROGRESS):
                selector.register(connection, selectors.EVENT_WRITE, address)
            else:
                connection.close()
        while selector.get_map() and (left_s := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                connection = key.fileobj  # type: ignore[assignment]  # we registered sockets
                if connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    found.add(key.data)
                selector.unregister(connection)
                connection.close()
        for key in list(selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
    return found


@dataclass(frozen=True)
class Reservation:
    """Nodes that Ray was asked for, one for each of `hosts`; `excluded` must not be among them."""

    group: Any
    hosts: tuple[int, ...]
    excluded: frozenset[str]
    since: float

    def nodes(self) -> list[str] | None:
        """Return the number of each host's node, or None while Ray has not found them all."""
        table = placement_group_table(self.group)
        if table.get("state") != "CREATED":
            return None
        node_of = table["bundles_to_node_id"]
        return [str(node_of[bundle]) for bundle in range(len(self.hosts))]

    def cancel(self) -> None:
        """Give the nodes back; what is started there then reserves its own share."""
        remove_placement_group(self.group)


def reserve(
    hosts: tuple[int, ...],
    resources: Mapping[str, float],
    *,
    is_strict: bool,
    excluded: frozenset[str],
) -> Reservation:
    """Ask Ray for a node with these resources for each host; strict: no node for two hosts."""
    selector = {_NODE_LABEL: f"!in({','.join(sorted(excluded))})"} if excluded else {}
    group = placement_group(
        [dict(resources) for _ in hosts],
        strategy="STRICT_SPREAD" if is_strict else "SPREAD",
        bundle_label_selector=[selector for _ in hosts] if excluded else None,
    )
    return Reservation(group, hosts, excluded, time.monotonic())

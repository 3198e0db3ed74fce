"""Turns a mesh into commands for `ip` and `tc`: addresses, links, rates, and routes.

Pure: returns text, runs nothing. Chips are numbers here, as `names` gives them.

Routes are the shortest-path tables of `routing` (figures 1 and 2 of the paper). The way of a packet
depends on its destination alone, as a kernel's routing table needs it. A kernel drops packets where
chips would wait, so there are no virtual channels here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from meshmend.lab.testbed.names import CHIP_INTERFACE, address_of, intact, interface_of, number_of
from meshmend.topology.graph import components
from meshmend.topology.mesh import Mesh
from meshmend.topology.tables import all_pairs_tables

MTU_BYTES = 9000
# After an idle time a burst passes at full speed, so it holds only one packet. The limit is the
# queue: it is long enough to avoid drops.
_SHAPER = "burst 10kb limit 1mb"
# Instructions of classic BPF. The kernel has a random word at SKF_AD_OFF + SKF_AD_RANDOM.
_LOAD_RANDOM = f"32 0 0 {2**32 - 0x1000 + 56}"
_RETURN_DROP, _RETURN_PASS = "6 0 0 2", "6 0 0 0"


@dataclass(frozen=True, eq=False)
class LinkStates:
    """What one state of a mesh means to the kernel, for all chips of the shape.

    `is_up[chip, port]` says which ends of links are up; `ports[chip, destination]` is the port
    that a chip sends to a destination on, or -1.
    """

    is_up: NDArray[np.bool_]
    ports: NDArray[np.int8]


def link_states(mesh: Mesh) -> LinkStates:
    """Return which links are up and the routes within each connected part of the live chips.

    Speeds change no route: `slow` leaves those of the kernel as they are.
    """
    mesh = replace(mesh, slow=frozenset())
    number = np.array([number_of(mesh, chip) for chip in mesh.live])
    is_up = np.zeros((mesh.n_chips, mesh.neighbor_ranks.shape[1]), dtype=np.bool_)
    is_up[number] = mesh.neighbor_ranks >= 0
    ports = np.full((mesh.n_chips, mesh.n_chips), -1, dtype=np.int8)
    for chips in components(mesh):
        part = replace(mesh, failed=mesh.failed | (set(mesh.live) - set(chips)))
        inside = np.array([number_of(mesh, chip) for chip in part.live])
        ports[np.ix_(inside, inside)] = all_pairs_tables(part).ports[0].T
    return LinkStates(is_up, ports)


def link_commands(mesh: Mesh, namespace: Callable[[int], str]) -> str:
    """Return the `ip` commands that make all links of the shape, failed or not, still down."""
    full = intact(mesh)
    lines = []
    for one, other in full.links.tolist():
        ends = [
            f"name {interface_of(port)} mtu {MTU_BYTES} netns {namespace(chip)}"
            for chip, port in ((one, _port(full, one, other)), (other, _port(full, other, one)))
        ]
        lines.append(f"link add {ends[0]} type veth peer {ends[1]}")
    return _batch(lines)


def chip_commands(number: int) -> str:
    """Return the `ip` commands that give a chip its address, on a bridge without ports."""
    return _batch(
        [
            "link set dev lo up",
            f"link add name {CHIP_INTERFACE} mtu {MTU_BYTES} type bridge",
            f"link set dev {CHIP_INTERFACE} up",
            f"address add {address_of(number)}/32 dev {CHIP_INTERFACE}",
        ]
    )


def rate_commands(mesh: Mesh, link_bytes_per_s: float) -> Mapping[int, str]:
    """Return for each chip the `tc` commands that limit its ends of links to a rate.

    The rate of a slow link is that part of the others' which its speed says. A link that has a
    rate already gets another.
    """
    full = intact(mesh)
    commands = {}
    for chip in range(full.n_live):
        commands[chip] = _batch(
            [
                f"qdisc replace dev {interface_of(port)} root tbf rate "
                f"{round(8 * link_bytes_per_s * full.port_speeds[chip, port])}bit {_SHAPER}"
                for port in np.flatnonzero(full.neighbor_ranks[chip] >= 0).tolist()
            ]
        )
    return commands


def loss_commands(mesh: Mesh, source: int, goal: int, part: float) -> Mapping[int, str]:
    """Return the `tc` commands that drop this part of the packets of one direction of a link.

    The receiving end drops them, so the sender notices nothing, as with a cable that is broken in
    one direction. The filter is a classic BPF program: it drops a packet if a random word is below
    the part. What was dropped before no longer counts.
    """
    dev = interface_of(_port(intact(mesh), goal, source))
    lines = [f"qdisc replace dev {dev} ingress", f"qdisc del dev {dev} ingress"]
    if part > 0:
        instructions = [_RETURN_DROP]
        if part < 1:
            jump = f"53 1 0 {round(part * 2**32)}"  # over the next one, if the word is not below
            instructions = [_LOAD_RANDOM, jump, _RETURN_DROP, _RETURN_PASS]
        code = ",".join([str(len(instructions)), *instructions, ""])
        lines += [
            f"qdisc add dev {dev} ingress",
            f"filter add dev {dev} parent ffff: protocol all bpf da bytecode '{code}'",
        ]
    return {goal: _batch(lines)}


def change_commands(before: Mesh | None, after: Mesh) -> Mapping[int, str]:
    """Return the `ip` commands from one state to the next, for each chip that they concern.

    Without `before` nothing is assumed about links and routes. The kernel removes the routes over
    an interface that goes down, so there are no commands for those.
    """
    full = intact(after).neighbor_ranks
    new = link_states(after)
    old = (
        link_states(before)
        if before is not None
        else LinkStates(~new.is_up, np.full_like(new.ports, -1))
    )
    commands = {}
    for chip in range(after.n_chips):
        lines = [] if before is not None else ["route flush table main"]
        changed = np.flatnonzero((old.is_up[chip] != new.is_up[chip]) & (full[chip] >= 0))
        lines += [
            f"link set dev {interface_of(port)} {'up' if new.is_up[chip, port] else 'down'}"
            for port in changed.tolist()
        ]
        kept = np.where(_loses_route(old, new, chip), -1, old.ports[chip])
        lines += _route_lines(chip, kept, new.ports[chip], full[chip])
        if lines:
            commands[chip] = _batch(lines)
    return commands


def _loses_route(old: LinkStates, new: LinkStates, chip: int) -> NDArray[np.bool_]:
    """Return for each destination whether the old route left over an interface that goes down."""
    goes_down = np.append(old.is_up[chip] & ~new.is_up[chip], False)  # the last is port -1
    gone: NDArray[np.bool_] = goes_down[old.ports[chip]]
    return gone


def _route_lines(
    chip: int, old: NDArray[np.int8], new: NDArray[np.int8], neighbors: NDArray[np.int32]
) -> list[str]:
    lines = []
    for goal in np.flatnonzero(old != new).tolist():
        port = int(new[goal])
        if port < 0:
            lines.append(f"route del {address_of(goal)}/32")
            continue
        via, interface = address_of(int(neighbors[port])), interface_of(port)
        lines.append(
            f"route replace {address_of(goal)}/32 via {via} dev {interface} onlink "
            f"src {address_of(chip)}"
        )
    return lines


def _port(full: Mesh, here: int, there: int) -> int:
    return int(np.flatnonzero(full.neighbor_ranks[here] == there)[0])


def _batch(lines: list[str]) -> str:
    return "".join(f"{line}\n" for line in lines)

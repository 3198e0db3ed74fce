"""Tenstorrent's descriptions of machines: read as meshes, and written.

Both are protobuf text, as the public repository tt-metal has them. A **mesh graph descriptor** says
which mesh is wanted: extents, axes that are rings, cables per link. A **physical system
descriptor** says which chips and cables a machine really has, as its software found them; it has no
coordinates. So it is laid on the mesh that is wanted: a chip that is missing is a failed chip, a
link without cables a failed link, and a link with fewer cables than the others a slow one.
"""

import re
from collections import Counter, defaultdict, deque
from collections.abc import Iterator, Mapping
from typing import Any, Final

from meshmend.errors import InputError, TopologyError
from meshmend.topology.failures import Block, Chip, SlowLink
from meshmend.topology.mesh import Mesh

Message = dict[str, list[Any]]  # each field with all its values; a value may be a Message

_TOKEN: Final = re.compile(
    r"""\s+|\#[^\n]*|(?P<word>[A-Za-z0-9_.+-]+)|(?P<text>"(?:[^"\\\n]|\\.)*")|(?P<mark>[{}<>\[\]:,;])"""
)
_MOST_NESTED: Final = 32
_CABLES: Final = 4  # of each link
_MOST_TRIES: Final = 200_000  # to lay a machine on a mesh: about a second


def mesh_of_graph(text: str) -> Mesh:
    """Return the mesh of a mesh graph descriptor that instantiates one mesh.

        >>> print(mesh_of_graph('mesh_descriptors { name: "M0" device_topology { dims: [ 8, 4 ] '
        ...     'dim_types: [ RING, RING ] } }'))
        8x4 wrap all

    Raises:
        InputError: not such a descriptor, or one of several meshes.
    """
    root = _parsed(text)
    templates = {_one(each, "name", ""): each for each in root.get("mesh_descriptors", [])}
    if not templates:
        raise InputError("a mesh graph descriptor needs mesh_descriptors, but the file has none")
    instances = _instances(root)
    wanted = {_one(each, "mesh_descriptor", "") for each in instances} or set(templates)
    if len(instances) > 1 or len(wanted) > 1:
        raise InputError(
            f"meshmend reads one mesh, but the descriptor has {max(len(instances), len(wanted))}; "
            "leave one in it"
        )
    (name,) = wanted
    if name not in templates:
        raise InputError(f"the descriptor has no mesh_descriptors named {name!r}")
    if templates[name].get("express_connections"):
        raise InputError(f"meshmend knows no express connections, but mesh {name!r} has some")
    topology = _one(templates[name], "device_topology", {})
    dims = topology.get("dims", []) if isinstance(topology, dict) else []
    if not dims or not all(isinstance(each, int) for each in dims):
        raise InputError(
            f"mesh {name!r} needs device_topology {{ dims: [ ... ] }} of whole numbers"
        )
    types = [*topology.get("dim_types", []), *topology.get("types", [])]
    if len(types) > len(dims) or any(each not in ("LINE", "RING") for each in types):
        raise InputError(f"mesh {name!r} needs LINE or RING for each of its axes, but got {types}")
    return Mesh(tuple(dims), tuple("RING" in types[axis : axis + 1] for axis in range(len(dims))))


def graph_of_mesh(mesh: Mesh) -> str:
    """Return a mesh graph descriptor of a mesh; slow links stay, as cables that may be missing.

    Raises:
        InputError: the mesh has failed chips or links, which a descriptor cannot say.
    """
    if mesh.has_failures:
        raise InputError(
            f"a mesh graph descriptor has all its chips and links, but {mesh} has failures; "
            "export the mesh without them"
        )
    dims = ", ".join(map(str, mesh.shape))
    types = ", ".join("RING" if wraps else "LINE" for wraps in mesh.wrap)
    ones = ", ".join("1" for _ in mesh.shape)
    return (
        "mesh_descriptors {\n"
        '  name: "M0"\n'
        "  arch: WORMHOLE_B0\n"
        f"  device_topology {{ dims: [ {dims} ] dim_types: [ {types} ] }}\n"
        f"  host_topology {{ dims: [ {ones} ] }}\n"
        f"  channels {{ count: {_CABLES} policy: {'RELAXED' if mesh.slow else 'STRICT'} }}\n"
        "}\n"
        'top_level_instance { mesh { mesh_descriptor: "M0" mesh_id: 0 } }\n'
    )


def mesh_of_system(text: str, wanted: Mesh) -> tuple[Mesh, dict[int, Chip]]:
    """Return a wanted mesh as a machine has it, and where each of its chips lies on it.

    Chips are named by their numbers in the descriptor. There may be several ways to lay a machine
    on a mesh; all of them have the same cables on the same kinds of links, and one is taken.

    Raises:
        InputError: not a physical system descriptor, or a machine that does not lie on the mesh.
    """
    chips, cables = _system(_parsed(text))
    if len(chips) > wanted.n_chips:
        raise InputError(
            f"the machine has {len(chips)} chips, but {wanted} has {wanted.n_chips} places"
        )
    joined: dict[int, list[int]] = defaultdict(list)
    for one, other in cables:
        joined[one].append(other)
        joined[other].append(one)
    place_of = _laid(chips, joined, Mesh(wanted.shape, wanted.wrap))
    most = max(cables.values(), default=1)
    at = {place: chip for chip, place in place_of.items()}
    missing = [place for place in Mesh(wanted.shape).live if place not in at]
    mesh = wanted.without(*(Block((1,) * len(place), place) for place in missing))
    slow = []
    for link in Mesh(wanted.shape, wanted.wrap).live_links():
        ends = (link.first, link.second)
        if not all(end in at for end in ends):
            continue
        one, other = sorted(at[end] for end in ends)
        n_cables = cables.get((one, other), 0)
        if n_cables == 0:
            mesh = mesh.without(link)
        elif n_cables < most:
            slow.append(SlowLink(link, n_cables / most))
    return mesh.slowed(*slow), place_of


def _system(root: Message) -> tuple[list[int], Counter[tuple[int, int]]]:
    """Return a machine's chips, and the number of cables between each two that have some."""
    graphs = _one(root, "system_graph", {})
    if not isinstance(graphs, dict) or "asic_connectivity_graph" not in graphs:
        raise InputError(
            "a physical system descriptor needs system_graph { asic_connectivity_graph { ... } }, "
            "but the file has none"
        )
    ends: set[tuple[int, int, int, int]] = set()
    chips: set[int] = set()
    for host in graphs["asic_connectivity_graph"]:
        for graph in host.get("asic_topologies", []):
            chip = _number(graph, "asic_id")
            chips.add(chip)
            for edge in _one(graph, "topology", {}).get("asic_connections", []):
                other = _number(edge, "dst_asic_id")
                for cable in edge.get("eth_connections", []):
                    here, there = _number(cable, "src_chan"), _number(cable, "dst_chan")
                    one, two = sorted([(chip, here), (other, there)])
                    ends.add((*one, *two))
    chips.update(_number(each, "asic_id") for each in root.get("asic_descriptors", []))
    if not chips:
        raise InputError("a physical system descriptor needs chips, but the file has none")
    if unknown := sorted({each for end in ends for each in (end[0], end[2])} - chips):
        raise InputError(f"a cable leads to chip {unknown[0]}, which the descriptor does not have")
    return sorted(chips), Counter((one, other) for one, _, other, _ in ends)


def _laid(chips: list[int], joined: Mapping[int, list[int]], mesh: Mesh) -> dict[int, Chip]:
    """Return a place for each chip such that all cables lie on links of the mesh."""
    order, parent = _walk(chips, joined)
    if len(order) < len(chips):
        raise InputError(
            f"the machine's {len(chips)} chips are not all joined: {len(order)} are with chip "
            f"{chips[0]}; import each part for itself"
        )
    neighbors = {place: mesh.neighbors(place) for place in mesh.live}
    place_of: dict[int, Chip] = {}
    n_tries = 0

    def extend(number: int) -> bool:
        nonlocal n_tries
        n_tries += 1
        if number == len(order):
            return True
        if n_tries > _MOST_TRIES:
            return False
        chip, taken = order[number], set(place_of.values())
        known = [place_of[other] for other in joined[chip] if other in place_of]
        for place in neighbors[place_of[parent[chip]]] if number else mesh.live:
            if place not in taken and all(place in neighbors[other] for other in known):
                place_of[chip] = place
                if extend(number + 1):
                    return True
                del place_of[chip]
        return False

    if not extend(0):
        raise TopologyError(
            f"the machine's {len(chips)} chips do not lie on {mesh}: some cable joins chips that "
            "are no neighbours there; try another --mesh or --wrap"
        )
    return place_of


def _walk(chips: list[int], joined: Mapping[int, list[int]]) -> tuple[list[int], dict[int, int]]:
    """Return the chips in an order in which each has a cable to an earlier one, and to which.

    Of those that could be next, the one with most cables to earlier ones is: it has the fewest
    places to be.
    """
    order, parent = [chips[0]], {}
    seen = {chips[0]}
    waiting = deque(chips[1:])
    while waiting:
        best = max(waiting, key=lambda chip: sum(other in seen for other in joined[chip]))
        before = [other for other in joined[best] if other in seen]
        if not before:
            break
        parent[best] = before[0]
        order.append(best)
        seen.add(best)
        waiting.remove(best)
    return order, parent


def _instances(root: Message) -> list[Message]:
    """Return the meshes that a descriptor instantiates."""
    found = []
    for top in root.get("top_level_instance", []):
        found += top.get("mesh", [])
        for graph in top.get("graph", []):
            name = _one(graph, "graph_descriptor", "")
            for template in root.get("graph_descriptors", []):
                if _one(template, "name", "") == name:
                    found += [
                        mesh
                        for each in template.get("instances", [])
                        for mesh in (*each.get("mesh", []), *each.get("graph", []))
                    ]
    return found


def _one(message: Message, name: str, default: Any) -> Any:
    """Return the last value of a field, as protobuf does."""
    return message[name][-1] if message.get(name) else default


def _number(message: Message, name: str) -> int:
    value = _one(message, name, 0)
    if not isinstance(value, int):
        raise InputError(f"the descriptor's field {name} needs a whole number, but got {value!r}")
    return value


def _parsed(text: str) -> Message:
    """Return a protobuf text as a message.

    Raises:
        InputError: not protobuf text; the message has the line.
    """
    tokens = list(_tokens(text))
    at = 0

    def fail(what: str) -> InputError:
        where = f"line {tokens[at][1]}" if at < len(tokens) else "its end"
        return InputError(f"the descriptor is no protobuf text: {what} at {where}")

    def value(depth: int) -> Any:
        nonlocal at
        if at == len(tokens):
            raise fail("a value is missing")
        word = tokens[at][0]
        if word in ("{", "<"):
            at += 1
            return message("}" if word == "{" else ">", depth + 1)
        if word in ("}", ">", "[", "]", ":", ",", ";"):
            raise fail(f"{word!r} instead of a value")
        at += 1
        if word.startswith('"'):
            return word[1:-1]
        return int(word, 0) if re.fullmatch(r"-?(0x[0-9a-fA-F]{1,16}|[0-9]{1,20})", word) else word

    def message(end: str, depth: int) -> Message:
        nonlocal at
        if depth > _MOST_NESTED:
            raise fail(f"more than {_MOST_NESTED} messages within each other")
        fields: Message = defaultdict(list)
        while at < len(tokens) and tokens[at][0] != end:
            name = tokens[at][0]
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise fail(f"{name[:20]!r} instead of the name of a field")
            at += 1
            has_colon = at < len(tokens) and tokens[at][0] == ":"
            at += has_colon
            if at < len(tokens) and tokens[at][0] == "[":
                at += 1
                while at < len(tokens) and tokens[at][0] != "]":
                    fields[name].append(value(depth))
                    at += at < len(tokens) and tokens[at][0] == ","
                if at == len(tokens):
                    raise fail("a list without end")
                at += 1
            elif not has_colon and (at == len(tokens) or tokens[at][0] not in ("{", "<")):
                raise fail(f"no value of {name}")
            else:
                fields[name].append(value(depth))
            at += at < len(tokens) and tokens[at][0] in (",", ";")
        if end:
            if at == len(tokens):
                raise fail(f"a message without {end!r}")
            at += 1
        return dict(fields)

    return message("", 0)


def _tokens(text: str) -> Iterator[tuple[str, int]]:
    """Yield each word and mark with its line."""
    at, line = 0, 1
    while at < len(text):
        found = _TOKEN.match(text, at)
        if found is None:
            raise InputError(
                f"the descriptor is no protobuf text: {text[at : at + 10]!r} at line {line}"
            )
        if found.lastgroup is not None:
            yield found.group(), line
        line += found.group().count("\n")
        at = found.end()

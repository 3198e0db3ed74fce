"""The hosts of a job on a Ray cluster: an actor each, which runs an agent, on a live node.

Ray's actors are no children of any process here, so `HostSupervisor` is no `Supervisor` of
processes: Ray starts and restarts them, and only Ray knows the nodes.

A host whose node is lost gets another node, as soon as the cluster has one. So does a host whose
agent failed, such as one with a broken accelerator. Ray itself restarts the actor of a host whose
process died on a live node. This module knows no messages of the job: its caller says which chips
are connected.
"""

import os
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from errno import EINPROGRESS
from typing import Any, Final

import ray
from ray.exceptions import ActorDiedError, ActorUnschedulableError, RayError
from ray.util.placement_group import (
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from meshmend.config import SECRET
from meshmend.errors import InputError
from meshmend.launch.supervisor import say  # Ray shows these lines to the user of a job
from meshmend.topology.failures import Block, Chip
from meshmend.transport.codec import Value
from meshmend.transport.listener import Address
from meshmend.units import counted

NAMESPACE: Final = "meshmend"  # Ray's namespace of all actors of all jobs

# The new process ties itself to its parent: code between fork and exec is unsafe in a process with
# as many threads as one of Ray's.
_TIED_COMMAND: Final = (
    "import runpy, sys\n"
    "from meshmend.processes import die_with_parent\n"
    "die_with_parent(int(sys.argv.pop(1)))\n"
    "runpy.run_module('meshmend', run_name='__main__', alter_sys=True)\n"
)
_LOOP_MODULE: Final = "meshmend.launch.ray_processes"


@dataclass(frozen=True)
class HostSettings:
    """What all hosts of a job have in common.

    `options` are options of `meshmend agent`. `script` is the script and its arguments, or empty
    if the workers call the pickled function `loop`. `resources` are those of one host.
    """

    name: str
    blocks: tuple[Block, ...]
    options: tuple[str, ...]
    script: tuple[str, ...]
    resources: Mapping[str, float]
    secret: str = field(repr=False)
    loop: bytes = field(default=b"", repr=False)
    is_strict: bool = True


class RayHost:
    """The actor of one host; `code()` says whether its agent has ended, and how."""

    def __init__(self, settings: HostSettings, block: Block, coordinator: str) -> None:
        self._code: int | None = None
        script = settings.script
        if settings.loop:
            self._loop = os.fdopen(os.memfd_create("loop"), "wb", buffering=0)
            self._loop.write(settings.loop)
            script = ("-m", _LOOP_MODULE, f"/proc/{os.getpid()}/fd/{self._loop.fileno()}")
        where = ("--coordinator", coordinator, "--chips", str(block))
        command = ("agent", *where, *settings.options, *script)
        # The kernel kills a child when the thread that started it ends, so the same thread waits.
        threading.Thread(target=self._run, args=(command, settings.secret), daemon=True).start()

    def code(self) -> int | None:
        """Return the exit code of the agent, or None while it runs."""
        return self._code

    def _run(self, command: tuple[str, ...], secret: str) -> None:
        tied = [sys.executable, "-P", "-c", _TIED_COMMAND, str(os.getpid()), *command]
        self._code = subprocess.Popen(tied, env={**os.environ, SECRET.name: secret}).wait()


def start_host(
    settings: HostSettings, number: int, *, name: str, node: str, coordinator: str
) -> Any:
    """Start the actor of a host on a node, and return its handle without waiting for it."""
    return (
        ray.remote(RayHost)
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",  # so that it outlives the coordinator's process
            max_restarts=-1,
            max_task_retries=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            **_resource_options(settings.resources),
        )
        .remote(settings, settings.blocks[number], coordinator)
    )


def _resource_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return resources as the options of an actor, which has its own words for some of them."""
    words = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options: dict[str, Any] = {
        words[kind]: amount for kind, amount in resources.items() if kind in words
    }
    own = {kind: amount for kind, amount in resources.items() if kind not in words}
    return {"num_cpus": 0, **options, "resources": own}


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


_ASK_NODE_S: Final = 0.2  # between two questions to the node of a host without a connected chip
_ANSWER_S: Final = 1.0  # a node that has not answered by then is lost
_ASK_AGENT_S: Final = 1.0
_RENEW_S: Final = 5.0  # a node that was lost may be back, so a reservation is made anew
_SAY_S: Final = 30.0  # between two lines that say that nodes are missing


class HostPlacement(Value, frozen=True):
    """Where a host is: the name of its actor, and the number of the actor's node."""

    actor: str
    node: str


@dataclass
class _Host:
    """A host as its supervisor sees it; `question` asks its actor whether the agent has ended."""

    chips: frozenset[Chip]
    placement: HostPlacement | None = None
    handle: Any = None
    question: Any = None
    asked_agent: float = 0.0
    asked_node: float = 0.0
    is_lost: bool = False
    code: int | None = None
    failed_at: int | None = None  # the job's step when its agent failed last
    avoided: frozenset[str] = frozenset()  # the node where it failed


class HostSupervisor:
    """Places the hosts of a job on nodes, and places those again whose nodes are lost.

    `tick` does what is due and never waits for long. `placements` are those of an earlier
    supervisor of the same job, whose actors still run. `save` is called with the placements before
    an actor is started, so that the next supervisor finds every actor.
    """

    def __init__(
        self,
        settings: HostSettings,
        coordinator: str,
        hosts: Collection[frozenset[Chip]],
        *,
        placements: Collection[HostPlacement | None],
        save: Callable[[tuple[HostPlacement | None, ...]], None],
    ) -> None:
        self._settings = settings
        self._save = save
        self._coordinator = coordinator
        self._hosts = [_Host(chips) for chips in hosts]
        self._reservation: Reservation | None = None
        self._n_started = 0
        self._said_at = time.monotonic()
        self._is_ending = False
        self._step = 0
        self.failure = ""
        for host, placement in zip(self._hosts, placements, strict=False):
            if placement is not None:
                self._n_started = max(self._n_started, _number_in(placement.actor))
                self._find(host, placement)

    @property
    def is_over(self) -> bool:
        """Whether an agent has failed, or all have ended; a host that was lost at the end has."""
        return bool(self.failure) or all(
            host.code is not None or (self._is_ending and host.is_lost) for host in self._hosts
        )

    def tick(self, connected: Collection[Chip], step: int) -> None:
        """Do what is due while these chips are connected and the job has come to this step."""
        now = time.monotonic()
        self._step = step
        for host in self._hosts:
            if not host.chips.isdisjoint(connected):
                host.is_lost = False
        self._ask_agents(connected, now)
        self._ask_nodes(connected, now)
        if self._reservation is None:
            self._reserve()
        else:
            self._use_reservation(self._reservation, now)

    def watch_end(self) -> None:
        """Do what is due when the job is over: hosts that are lost now are not replaced."""
        self._is_ending = True
        now = time.monotonic()
        self._ask_agents((), now)
        self._ask_nodes((), now)

    def close(self) -> None:
        """Ask for no more nodes; the hosts stay."""
        if self._reservation is not None:
            self._reservation.cancel()

    def _find(self, host: _Host, placement: HostPlacement) -> None:
        """Take over the actor that an earlier supervisor started, if it exists."""
        if (handle := _actor(placement)) is not None:
            host.handle, host.placement = handle, placement

    def _ask_agents(self, connected: Collection[Chip], now: float) -> None:
        """Learn which agents have ended, and which actors Ray has given up."""
        for number, host in enumerate(self._hosts):
            if host.handle is None or host.code is not None:
                continue
            if host.question is None:
                is_due = now >= host.asked_agent + _ASK_AGENT_S
                if is_due and not host.chips.issubset(connected):
                    host.asked_agent = now
                    host.question = host.handle.code.options(max_task_retries=0).remote()
                continue
            answered, _ = ray.wait([host.question], timeout=0)
            if answered:
                self._take_answer(number, host)
                host.question = None

    def _take_answer(self, number: int, host: _Host) -> None:
        try:
            code = ray.get(host.question)
        except (ActorDiedError, ActorUnschedulableError) as error:
            host.is_lost = True
            if getattr(error, "actor_init_failed", False):
                self.failure = f"{self._name(number)} cannot be started: {error}"
            return
        except RayError:  # the actor is being restarted, or its node is lost
            return
        if code:
            self._take_failure(number, host, code)
        else:
            host.code = code

    def _take_failure(self, number: int, host: _Host, code: int) -> None:
        """Let a host whose agent failed try again, unless the whole job fails.

        It fails before its first step, after its last, and when all hosts failed at the same step.
        """
        why = f"the agent of {self._name(number)} ended with exit code {code}"
        host.failed_at = self._step
        is_hopeless = all(each.failed_at == self._step for each in self._hosts)
        if not self._step or self._is_ending or is_hopeless:
            self.failure = why
            return
        say(f"{why}; it tries again, on another node if there is one")
        end_hosts([host.placement])  # else it would keep the resources of its node
        host.handle = None
        host.is_lost, host.avoided = True, frozenset([_node(host)])

    def _ask_nodes(self, connected: Collection[Chip], now: float) -> None:
        """Learn which hosts without a connected chip have lost their nodes."""
        asked = [
            host
            for host in self._hosts
            if host.placement is not None
            and not host.is_lost
            and host.code is None
            and now >= host.asked_node + _ASK_NODE_S
            and host.chips.isdisjoint(connected)
        ]
        if not asked:
            return
        lost = lost_nodes({_node(host) for host in asked}, within_s=_ANSWER_S)
        for host in asked:
            host.asked_node = now
            if _node(host) in lost:
                host.is_lost = True
                say(f"node {_node(host)[:8]} of {self._name(self._hosts.index(host))} is lost")

    def _reserve(self) -> None:
        """Ask Ray for nodes: at first for all hosts together, later for one host at a time."""
        homeless = [
            number
            for number, host in enumerate(self._hosts)
            if host.code is None and (host.placement is None or host.is_lost)
        ]
        if not homeless:
            return
        is_first = all(host.placement is None for host in self._hosts)
        hosts = tuple(homeless if is_first else homeless[:1])
        taken = {_node(host) for host in self._hosts if host.placement and not host.is_lost}
        gone = lost_nodes({_node(host) for host in self._hosts if host.is_lost}, within_s=_ANSWER_S)
        for number in hosts:  # where it failed, it tries again only if no other node is found
            gone |= self._hosts[number].avoided
            self._hosts[number].avoided = frozenset()
        is_strict = self._settings.is_strict
        self._reservation = reserve(
            hosts,
            self._settings.resources,
            is_strict=is_strict,
            excluded=frozenset(gone | taken if is_strict else gone),
        )

    def _use_reservation(self, reservation: Reservation, now: float) -> None:
        """Start the hosts whose nodes Ray has found."""
        waiting = [self._hosts[number] for number in reservation.hosts]
        is_needed = any(host.placement is None or host.is_lost for host in waiting)
        nodes = reservation.nodes() if is_needed else None
        if nodes is None:
            is_old = bool(reservation.excluded) and now >= reservation.since + _RENEW_S
            if is_old or not is_needed:
                reservation.cancel()
                self._reservation = None
            self._say_what_is_missing(len(waiting), now)
            return
        reservation.cancel()
        self._reservation = None
        for number, node in zip(reservation.hosts, nodes, strict=True):
            self._start(number, node)

    def _start(self, number: int, node: str) -> None:
        host = self._hosts[number]
        end_hosts([host.placement])
        self._n_started += 1
        name = f"{self._settings.name} host {number} #{self._n_started}"
        host.placement = HostPlacement(name, node)
        host.is_lost, host.question = False, None
        host.asked_node = time.monotonic()
        self._save(tuple(each.placement for each in self._hosts))
        host.handle = start_host(
            self._settings, number, name=name, node=node, coordinator=self._coordinator
        )
        say(f"{self._name(number)} starts on node {node[:8]}")

    def _say_what_is_missing(self, n_hosts: int, now: float) -> None:
        if now >= self._said_at + _SAY_S:
            self._said_at = now
            each = ", ".join(
                f"{amount:g} {kind}" for kind, amount in self._settings.resources.items()
            )
            say(f"waiting for {counted(n_hosts, 'node')} of the Ray cluster with {each} each")

    def _name(self, number: int) -> str:
        return f"host {number} (chips {self._settings.blocks[number]})"


def end_hosts(placements: Collection[HostPlacement | None]) -> None:
    """Kill the actors of these hosts for good; their agents and workers die with them."""
    for placement in placements:
        if placement is not None and (handle := _actor(placement)) is not None:
            with suppress(RayError, ValueError):  # it is dead already
                ray.kill(handle, no_restart=True)


def _actor(placement: HostPlacement) -> Any:
    try:
        return ray.get_actor(placement.actor, namespace=NAMESPACE)
    except ValueError:  # there is none of this name
        return None


def _node(host: _Host) -> str:
    assert host.placement is not None
    return host.placement.node


def _number_in(actor: str) -> int:
    return int(actor.rpartition("#")[2])

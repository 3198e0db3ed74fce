"""Keeps every host of a job on a live node of a Ray cluster.

A host whose node is lost gets another node, as soon as the cluster has one. So does a host whose
agent failed, such as one with a broken accelerator. Ray itself restarts the actor of a host whose
process died on a live node. This module knows no messages of the job:
its caller says which chips are connected.
"""

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import ray
from ray.exceptions import ActorDiedError, ActorUnschedulableError, RayError

from meshmend.launch.output_lines import say  # Ray shows these lines to the user of a job
from meshmend.launch.ray_host import NAMESPACE, HostSettings, start_host
from meshmend.launch.ray_nodes import Reservation, lost_nodes, reserve
from meshmend.topology.failures import Chip
from meshmend.transport.codec import Value
from meshmend.units import counted

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

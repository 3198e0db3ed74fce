"""Play a neighbour-only schedule in SimGrid: run by `simgrid_compare.py` with SimGrid's Python.

    python3 benchmarks/simgrid_side.py < CASE.json

Reads rows, their dependencies and the fabric from standard input and prints the time in
seconds. Each directed link is a SimGrid link of its own, with an actor that sends what is ready
and one that receives. With `"queue": true` a link gets one message at a time, in order of slice
and row; otherwise all that are ready at once, and SimGrid shares the link among them.
"""

import heapq
import json
import sys
from typing import Any

from simgrid import (  # type: ignore[import-not-found]  # belongs to the system's Python
    Actor,
    Engine,
    LinkInRoute,
    Mailbox,
    NetZone,
    Semaphore,
    this_actor,
)

CONFIG = (
    "network/model:CM02",
    "network/crosstraffic:0",
    "network/TCP-gamma:0",
    "network/bandwidth-factor:1",
    "network/latency-factor:1",
    "network/weight-S:0",
)
Message = tuple[int, int]  # slice, row


class Play:
    """The messages that are ready on each link, and what each still waits for."""

    def __init__(self, case: dict[str, Any]) -> None:
        self.case = case
        self.pairs = sorted(set(zip(case["src"], case["dst"], strict=True)))
        self.ready: dict[tuple[int, int], list[Message]] = {pair: [] for pair in self.pairs}
        self.signal = {pair: Semaphore(0) for pair in self.pairs}
        n_rows, parts = len(case["src"]), range(case["slices"])
        self.to_send = {(s, r): len(case["before_send"][r]) for s in parts for r in range(n_rows)}
        self.to_write = {
            (s, r): 1 + len(case["before_write"][r]) for s in parts for r in range(n_rows)
        }
        self.after_left: list[list[int]] = [[] for _ in range(n_rows)]
        self.after_write: list[list[int]] = [[] for _ in range(n_rows)]
        self.after_send: list[list[int]] = [[] for _ in range(n_rows)]
        for row in range(n_rows):
            for before in case["before_send"][row]:
                self.after_send[before].append(row)
            for before in case["before_write"][row]:
                reads = case["src"][before] == case["dst"][row]
                (self.after_left if reads else self.after_write)[before].append(row)
        self.n_on = dict.fromkeys(self.pairs, 0)
        for row in range(n_rows):
            self.n_on[self.pair_of(row)] += case["slices"]
        self.end = 0.0

    def pair_of(self, row: int) -> tuple[int, int]:
        return self.case["src"][row], self.case["dst"][row]

    def make_ready(self, message: Message) -> None:
        pair = self.pair_of(message[1])
        heapq.heappush(self.ready[pair], message)
        self.signal[pair].release()

    def written_one(self, message: Message) -> None:
        """Count one thing that a message's writing waited for."""
        self.to_write[message] -= 1
        if self.to_write[message]:
            return
        self.end = max(self.end, Engine.clock)
        for row in self.after_send[message[1]]:
            following = (message[0], row)
            self.to_send[following] -= 1
            if not self.to_send[following]:
                self.make_ready(following)
        for row in self.after_write[message[1]]:
            self.written_one((message[0], row))

    def send(self, pair: tuple[int, int]) -> None:
        mailbox = Mailbox.by_name(f"{pair[0]}-{pair[1]}")
        comms = []
        for _ in range(self.n_on[pair]):
            self.signal[pair].acquire()
            message = heapq.heappop(self.ready[pair])
            held_s = self.case["hold_s"][message[1]]
            comms.append(mailbox.put_async(message, round(held_s * self.case["bandwidth"])))
            if self.case["queue"]:
                this_actor.sleep_for(held_s)
            for row in self.after_left[message[1]]:
                self.written_one((message[0], row))
        for comm in comms:
            comm.wait()

    def receive(self, pair: tuple[int, int]) -> None:
        mailbox = Mailbox.by_name(f"{pair[0]}-{pair[1]}")
        for _ in range(self.n_on[pair]):
            self.written_one(mailbox.get())


def main() -> None:
    """Build the platform, play, and print the time."""
    case = json.load(sys.stdin)
    options = [f"--cfg={option}" for option in CONFIG] + ["--log=root.thres:error"]
    engine = Engine([sys.argv[0], *options])
    zone = NetZone.create_full_zone("mesh")
    hosts = [zone.create_host(f"chip{rank}", 1e9) for rank in range(case["n_ranks"])]
    play = Play(case)
    for src, dst in play.pairs:
        link = zone.create_link(f"{src}-{dst}", case["bandwidth"])
        link.set_latency(case["latency"]).seal()
        ends = hosts[src].netpoint, hosts[dst].netpoint
        zone.add_route(*ends, None, None, [LinkInRoute(link)], False)
    zone.seal()
    for pair in play.pairs:
        receiver = Actor.create(f"receive {pair}", hosts[pair[1]], play.receive, pair)
        # A mailbox with a receiver takes messages as they come, whether or not one waits there.
        Mailbox.by_name(f"{pair[0]}-{pair[1]}").set_receiver(receiver)
        Actor.create(f"send {pair}", hosts[pair[0]], play.send, pair)
    for message, waits in sorted(play.to_send.items()):
        if not waits:
            heapq.heappush(play.ready[play.pair_of(message[1])], message)
    for pair, ready in play.ready.items():
        play.signal[pair] = Semaphore(len(ready))
    engine.run()
    print(play.end)


if __name__ == "__main__":
    main()

"""The launcher's connection to coordinators, of which one may take the place of another."""

import queue
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from meshmend.launch.observer import Observer
from meshmend.membership.messages import (
    COORDINATOR,
    CutLink,
    MendLink,
    Message,
    Observe,
    Repaired,
    received_messages,
)
from meshmend.topology.failures import parse_link
from meshmend.transport.channel import Channel
from meshmend.transport.listener import Address, Listener, listening
from waiting import HANG_S, until

SECRET = b"known to all of us"


@contextmanager
def coordinator(
    address: Address = ("127.0.0.1", 0),
) -> Iterator[tuple[Address, "queue.SimpleQueue[socket.socket]"]]:
    """Yield the address of a coordinator that reads nothing, and who has come."""
    come: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
    bound = listening(*address)
    listener = Listener(
        bound, SECRET, COORDINATOR, name="", admit=lambda each, _: come.put(each), n_expected=1
    )
    try:
        yield bound.getsockname()[:2], come
    finally:
        listener.close()


def test_a_coordinator_that_takes_the_place_of_another_is_told_the_links_once_more() -> None:
    """The one before may have died before it read that; all else is said once."""
    cut, mended = parse_link("link:0,0-0,1"), parse_link("link:1,0-1,1")
    supervisor: Any = SimpleNamespace(watch=lambda *_: None, unwatch=lambda _: None)
    with coordinator() as (address, come):
        observer = Observer("ours", address, SECRET, lambda *_: None, supervisor)
        for message in (CutLink(cut), CutLink(mended), MendLink(mended), Repaired((0, 0))):
            observer.send(message)
        observer.connect_and_send()
        come.get(timeout=HANG_S).close()
    observer.disconnect()
    with coordinator(address) as (_, come):
        observer.connect_and_send()
        channel = Channel(come.get(timeout=HANG_S))
        heard: list[Message] = []

        def has_heard_all() -> bool:
            heard.extend(received_messages(channel))
            return len(heard) >= 3

        until(has_heard_all)

        channel.close()
    observer.disconnect()
    assert heard == [Observe("ours"), CutLink(cut), MendLink(mended)]

"""Faults that a worker injects into itself."""

import os
import signal
import threading
from typing import Any

import pytest

from meshmend.membership.faults.fault import Moment, parse_fault
from meshmend.membership.faults.fault_injector import SelfInjection
from meshmend.topology.text import parse_mesh

MESH = parse_mesh("4x4")


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What this process would have been sent, and whether at once or a little later."""
    sent: list[tuple[str, int]] = []

    class SentLater:
        def __init__(self, delay_s: float, kill: Any, arguments: tuple[int, int]) -> None:
            assert 0 < delay_s < 0.1
            assert arguments[0] == os.getpid()
            self.number = arguments[1]

        def start(self) -> None:
            sent.append(("soon", self.number))

    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append(("now", number)))
    monkeypatch.setattr(threading, "Timer", SentLater)
    return sent


def injection(*texts: str) -> SelfInjection:
    return SelfInjection((1, 1), [parse_fault(text, MESH) for text in texts])


@pytest.mark.parametrize("moment", Moment)
def test_a_worker_kills_itself_once_in_the_moment_that_is_named(
    moment: Moment, signals: list[tuple[str, int]]
) -> None:
    number = " 3" if moment is Moment.BUCKET else ""
    faults = injection(f"kill 2x2@0,0 at 7 in {moment}{number}")

    for step in (6, 7, 7, 8):
        for each in Moment:
            for bucket in range(5) if each is Moment.BUCKET else [None]:
                faults.at(each, step, bucket=bucket)

    when = "soon" if moment in (Moment.REDUCE, Moment.GATHER) else "now"
    assert signals == [(when, signal.SIGKILL)]


def test_a_worker_leaves_alone_what_is_not_for_it(signals: list[tuple[str, int]]) -> None:
    faults = injection("kill 0,0 at 7 in update", "kill 1,1 at 7")

    for moment in Moment:
        faults.at(moment, 7)

    assert signals == []

"""Faults that a worker injects into itself."""

import os
import signal
import threading
from typing import Any

import pytest

from meshmend.membership.faults.fault import Moment, Part, parse_fault
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


def test_a_bit_is_flipped_once_in_the_step_after_the_one_that_is_named() -> None:
    faults = injection("flip sum 1,1 at 7", "flip state 0,0 at 7")

    flipped = [(part, step) for step in (6, 7, 7, 8) for part in Part if faults.flips(part, step)]

    assert flipped == [(Part.SUM, 7)]
    assert not faults.has_wrong_numbers


def test_a_chip_that_is_wrong_is_so_in_every_fifth_step() -> None:
    faults = injection("wrong 1,1 from 7")

    flipped = [(part, step) for step in range(20) for part in Part if faults.flips(part, step)]

    assert flipped == [(Part.GRADIENT, step) for step in (7, 12, 17)]
    assert faults.flips(Part.GRADIENT, 12)  # a step that is done again is wrong again

"""The process group of a generation: what is left of a try that a change of the mesh has ended."""

import socket
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed

import meshmend.torch  # noqa: F401  # registers the backend
from meshmend.config import COORDINATOR
from meshmend.errors import StoppedError
from meshmend.planning.settings import Settings
from meshmend.topology.text import parse_mesh
from meshmend.torch.group_factory import create_group
from meshmend.torch.late_gloo import InterruptibleStore, LateGloo
from meshmend.torch.transports import transport_of
from meshmend.train.torch.group_meeting import init_group, meet

dist: Any = torch.distributed  # its stubs lack the stores


class NotedStore(InterruptibleStore):
    """A store of a generation that is over before its second chip comes; it notes what is set."""

    def __init__(self) -> None:
        super().__init__(dist.HashStore(), lambda: True)
        self.keys: set[str] = set()

    def set(self, key: str, value: bytes) -> None:
        self.keys.add(key)
        super().set(key, value)


def keys_of_a_try() -> set[str]:
    store = NotedStore()
    with suppress(StoppedError):
        init_group(Settings(parse_mesh("1x2")), store, 0)
    assert not dist.is_initialized()
    return store.keys


def test_a_group_that_was_tried_before_meets_chips_that_try_for_the_first_time() -> None:
    first, second = keys_of_a_try(), keys_of_a_try()

    assert first
    assert first == second


def test_a_store_whose_chip_has_left_is_not_waited_for() -> None:
    """Rank 0 told its address, and went on to the next generation before others had connected."""
    with socket.create_server(("127.0.0.1", 0)) as gone:
        host, port = gone.getsockname()

    def told(payload: Any) -> bool:
        numbers = payload.view(np.int32)
        address = f"{host}:{port}".encode()
        numbers[: len(address)] = np.frombuffer(address, dtype=np.uint8)
        return True

    with pytest.raises(RuntimeError, match="the store of rank 0 cannot be reached"):
        meet(Settings(parse_mesh("1x2")), 1, told, lambda: False, is_new=False)


def test_a_group_is_made_and_left_though_a_chip_that_was_here_never_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peer has told its address, and left for the next generation before Gloo connected."""
    monkeypatch.setenv(COORDINATOR.name, "127.0.0.1:1")
    settings, store = Settings(parse_mesh("1x2")), dist.HashStore()
    timeout = timedelta(seconds=60)
    here = SimpleNamespace(
        store=store, group_rank=0, group_size=2, timeout=timeout, global_ranks_in_group=[]
    )
    with ThreadPoolExecutor() as threads:
        peer = threads.submit(transport_of, settings, settings.mesh.live, store, 1, timeout)
        group = create_group(here, settings)
        peer.result().close()
        waiting = threads.submit(group.send, [torch.ones(1)], 1, 0)
        assert not waiting.done()

        group.interrupt()

        with pytest.raises(StoppedError, match="the process group was left"):
            waiting.result()
    group.shutdown()


def test_who_brings_news_of_a_change_waits_for_no_new_thread() -> None:
    """On a busy machine a thread takes long to start: news would come that much later."""
    late = LateGloo(dist.HashStore(), 0, 2, timedelta(seconds=60))
    before = set(threading.enumerate())

    late.leave()

    assert set(threading.enumerate()) <= before
    with pytest.raises(StoppedError, match="the process group was left"):
        _ = late.backend
    late.close()


def test_who_leaves_a_group_does_not_wait_until_gloo_has_gone() -> None:
    """Gloo ends its threads first, which takes it 10 ms and more; a recovery waited for that."""
    late = LateGloo(dist.HashStore(), 0, 1, timedelta(seconds=60))
    gone_in: list[threading.Thread] = []
    is_gone = threading.Event()
    weakref.finalize(late.group, lambda: gone_in.append(threading.current_thread()))
    weakref.finalize(late.group, is_gone.set)

    late.close()

    assert is_gone.wait(10)
    assert gone_in[0] is not threading.current_thread()


LEAVES = """
from datetime import timedelta
import torch.distributed as dist
from meshmend.torch.late_gloo import LateGloo

for _ in range(4):
    LateGloo(dist.HashStore(), 0, 2, timedelta(seconds=60)).want()
"""


def test_a_process_ends_well_while_its_gloo_waits_for_a_peer() -> None:
    """The thread would ask the store through an interpreter that is gone."""
    ended = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, check=False)

    assert ended.returncode == 0, ended.stderr

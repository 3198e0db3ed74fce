"""The process group of a generation: what is left of a try that a change of the mesh has ended."""

from contextlib import suppress
from typing import Any

import torch.distributed

import meshmend.torch  # noqa: F401  # registers the backend
from meshmend.errors import StoppedError
from meshmend.planning.settings import Settings
from meshmend.topology.text import parse_mesh
from meshmend.torch.late_gloo import InterruptibleStore
from meshmend.train.torch.group_meeting import init_group

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

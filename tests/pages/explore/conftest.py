"""The browser of a module of tests: each of its pages has a context of its own."""

from collections.abc import Iterator
from typing import Any

import pytest

from browsing import browser


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    with browser() as found:
        yield found

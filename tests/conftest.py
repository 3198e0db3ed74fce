"""Hypothesis runs the same examples everywhere, and no test fails for being slow to compile.

`make test` tries a third of the examples that a test asks for, `make slow` all of them
(`--hypothesis-profile thorough`). Torch computes in one thread: a process that is forked from one
with more of them hangs.
"""

import os
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

import pytest
from hypothesis import settings

SHARE_OF_EXAMPLES, LEAST_EXAMPLES = 1 / 3, 10
# Processes end at about the same time if each begins with what takes longest.
LONGEST_FIRST = (
    "loops",
    "launch",
    "membership",
    "jax",
    "train",
    "torch",
    "forecast",
    "transport",
    "lab",
)

settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.register_profile("thorough", settings.get_profile("repeatable"))
settings.load_profile("repeatable")


@pytest.hookimpl(trylast=True)  # after Hypothesis has marked its tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the longest folders first, and let property tests try fewer examples."""
    folders = [*LONGEST_FIRST, ""]
    items.sort(
        key=lambda item: next(
            rank for rank, name in enumerate(folders) if not name or name in item.path.parts
        )
    )
    if config.getoption("--hypothesis-profile") == "thorough":
        return
    for item in items:
        if item.get_closest_marker("hypothesis"):
            _try_fewer(item)


def _try_fewer(item: pytest.Item) -> None:
    """Hypothesis has no way to scale what tests ask for: so its own attribute is replaced."""
    test: Any = item.obj  # type: ignore[attr-defined]  # a function
    if getattr(test, "tries_fewer", False):
        return  # parametrized tests share their function
    asked = getattr(test, "_hypothesis_internal_use_settings", settings())
    fewer = max(LEAST_EXAMPLES, round(asked.max_examples * SHARE_OF_EXAMPLES))
    n_examples = min(asked.max_examples, fewer)
    test._hypothesis_internal_use_settings = settings(asked, max_examples=n_examples)
    test.tries_fewer = True

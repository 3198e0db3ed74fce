"""Hypothesis runs the same examples everywhere, and no test fails for being slow to compile.

`make test` tries a third of the examples that a test asks for, `make slow` all of them
(`--hypothesis-profile thorough`). Torch computes in one thread: a process that is forked from one
with more of them hangs. What the collection of tests makes, modules above all, stays to the end, so
no garbage is looked for in it: not meanwhile, and not later.
"""

import gc
import os
from collections.abc import Generator, Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when torch is imported

import pytest
from hypothesis import settings

SHARE_OF_EXAMPLES, LEAST_EXAMPLES = 1 / 3, 10
# In each of the two kinds of rooms. Processes end at about the same time if each begins with what
# takes longest.
LONGEST_FIRST = (
    *("loops", "launch", "train", "torch", "transport"),
    *("explore", "membership", "planning", "jax", "test_documentation.py", "lab", "cli"),
    *("schedule", "simulator", "forecast", "test_kernels.py"),
)
WAITING = {"loops", "launch", "train", "torch", "transport"}  # for processes of their own, mostly

settings.register_profile("repeatable", deadline=None, derandomize=True, database=None)
settings.register_profile("thorough", settings.get_profile("repeatable"))
settings.load_profile("repeatable")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for garbage only in what tests make."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)  # after Hypothesis has marked its tests
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put files that wait and files that compute in turns, and try fewer examples."""
    tests = config.rootpath / "tests"
    turn_of = _turns(item.path.relative_to(tests) for item in items)
    items.sort(key=lambda item: turn_of[item.path.relative_to(tests)])
    if config.getoption("--hypothesis-profile") == "thorough":
        return
    for item in items:
        if item.get_closest_marker("hypothesis"):
            _try_fewer(item)


def _turns(files: Iterable[Path]) -> dict[Path, tuple[int, int]]:
    """Return when each file is taken: one that waits, one that computes, and so on.

    If all processes waited at first and all computed at last, cores would be idle, then too few.
    """
    longest = sorted(
        dict.fromkeys(files),
        key=lambda file: next(
            (rank for rank, name in enumerate(LONGEST_FIRST) if name in file.parts),
            len(LONGEST_FIRST),
        ),
    )
    kinds = groupby(sorted(longest, key=_computes), key=_computes)
    return {file: (turn, kind) for kind, own in kinds for turn, file in enumerate(own)}


def _computes(file: Path) -> bool:
    return WAITING.isdisjoint(file.parts)


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

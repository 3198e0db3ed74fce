"""Skips tests without the packages that they need, which are not imported to find out.

All processes of `make test` collect all tests: what a file imports then, each of them imports.
"""

from importlib.util import find_spec

import pytest


def needs(*packages: str) -> pytest.MarkDecorator:
    """Return a mark that skips a test where one of these packages is not installed."""
    missing = [name for name in packages if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")

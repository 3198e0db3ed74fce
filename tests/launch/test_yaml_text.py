"""The YAML that is written is read back as the same documents."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend.launch.kubernetes import yaml_text

yaml = pytest.importorskip("yaml")

TEXTS = st.text() | st.sampled_from(["yes", "No", "-c", "--mesh", "-", "1e3", "0x1", "a: b", "~"])
SCALARS = TEXTS | st.integers(-(2**31), 2**31) | st.booleans() | st.none()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3)
)


@given(st.lists(st.dictionaries(TEXTS, VALUES, min_size=1, max_size=3), min_size=1, max_size=3))
def test_documents_are_read_back_as_they_were(documents: list[dict[str, Any]]) -> None:
    assert list(yaml.safe_load_all(yaml_text(documents))) == documents


def test_words_are_plain_and_all_else_is_quoted() -> None:
    assert yaml_text([{"name": "train", "args": ["--lr", "0.1", "no"], "size": 4, "none": {}}]) == (
        'name: train\nargs:\n  - --lr\n  - "0.1"\n  - "no"\nsize: 4\nnone: {}\n'
    )

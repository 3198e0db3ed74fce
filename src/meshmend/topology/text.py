"""A mesh as the command line writes it, and back.

`parse_mesh("16x32", wrap="none", fail=["4x2@6,8"], slow=["link:0,0-0,1=0.25"])` and
`mesh_words(mesh)` undo each other.
"""

import re
from collections.abc import Iterable
from functools import cache
from typing import NotRequired, TypedDict

from meshmend.config import MeshConfig
from meshmend.errors import TopologyError
from meshmend.topology.failures import format_shape, parse_shape
from meshmend.topology.mesh import Mesh, format_wrap


def parse_mesh(
    text: str, *, wrap: str = "none", fail: Iterable[str] = (), slow: Iterable[str] = ()
) -> Mesh:
    """Return the mesh that `--mesh`, `--wrap` and the `--fail` and `--slow` arguments describe.

    Raises:
        TopologyError: a text that cannot be read, or a failure or a link outside the mesh.
    """
    try:
        shape = parse_shape(text)
    except ValueError:
        hint = "; write a small x" if "X" in text else ""
        raise TopologyError(
            f"--mesh needs positive extents joined by x, such as 16x32, but got {text!r}{hint}"
        ) from None
    return Mesh(shape, parse_wrap(wrap, len(shape))).without(*fail).slowed(*slow)


@cache
def parse_tile(text: str) -> tuple[int, ...]:
    """Return the extents that `2x2` names.

    Raises:
        TopologyError: not positive extents joined by x.
    """
    try:
        return parse_shape(text)
    except ValueError:
        hint = "; write a small x" if "X" in text else ""
        raise TopologyError(
            f"--tile needs positive extents joined by x, such as 2x2, but got {text!r}{hint}"
        ) from None


def configured_mesh(config: MeshConfig) -> Mesh:
    """Return the mesh that the settings of a job describe.

    Raises:
        TopologyError: a text that cannot be read, or a failure outside the mesh.
    """
    return parse_mesh(config.shape, wrap=config.wrap, fail=config.fail, slow=config.slow)


def parse_wrap(text: str, n_axes: int) -> tuple[bool, ...]:
    """Return one flag per axis for `none`, `all`, or axes such as `0,1`."""
    word = text.strip().lower()
    if word in {"none", "all"}:
        return (word == "all",) * n_axes
    if re.fullmatch(r"\d{1,9}(,\d{1,9})*", word):
        axes = {int(part) for part in word.split(",")}
        if max(axes) < n_axes:
            return tuple(axis in axes for axis in range(n_axes))
    raise TopologyError(
        f"--wrap needs none, all, or axes from 0 to {n_axes - 1} such as 0, but got {text!r}"
    )


class MeshWords(TypedDict):
    """A mesh as it is written: what `parse_mesh` takes; one without slow links has no `slow`."""

    shape: str
    wrap: str
    fail: list[str]
    slow: NotRequired[list[str]]


def mesh_words(mesh: Mesh) -> MeshWords:
    """Return the words that describe a mesh."""
    words: MeshWords = {
        "shape": format_shape(mesh.shape),
        "wrap": format_wrap(mesh.wrap),
        "fail": [str(failure) for failure in mesh.failures()],
    }
    if mesh.slow:  # else files are what they were before links had speeds
        words["slow"] = [str(each) for each in sorted(mesh.slow)]
    return words


def mesh_config(mesh: Mesh, board: tuple[int, ...] | None = None) -> MeshConfig:
    """Return the settings that describe a mesh, and its boards if they are given."""
    words = mesh_words(mesh)
    return MeshConfig(
        shape=words["shape"],
        wrap=words["wrap"],
        fail=tuple(words["fail"]),
        slow=tuple(words.get("slow", ())),
        board=format_shape(board or ()),
    )

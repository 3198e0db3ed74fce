"""How the checkpoints of one framework are written and read, as a value. Imports no framework."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, Protocol

State = Mapping[str, Any]


@dataclass(frozen=True)
class Origin:
    """Whose state a shard was cut from, so that shards of two histories are never put together.

    `digest` is `Learner.digest()` of the chip that wrote the shard: replicas that are equal have
    equal ones. The defaults stand for a state of no job, such as an imported one.
    """

    run: str = ""
    term: int = 0
    generation: int = 0
    chip: tuple[int, ...] = ()
    digest: str = ""


NO_ORIGIN: Final = Origin()


class AnyShard(Protocol):
    """One chip's part of a state, in any format."""

    @property
    def step(self) -> int:
        """The step of the state."""

    @property
    def number(self) -> int:
        """The number of this shard, from 0 on."""

    @property
    def n_shards(self) -> int:
        """How many shards make up the state."""

    @property
    def origin(self) -> Origin:
        """Whose state it was cut from."""


@dataclass(frozen=True)
class ShardFormat:
    """The format of a framework's checkpoints; `suffix` ends the names of its files.

    `cut(state, step=, shard=, n_shards=, origin=)` returns a shard of a state, as a copy.
    `write(shard, stream)` writes it, and `unpacked` returns the shard of these bytes. `merged`
    returns the state of all its shards. `is_tensor` tells the tensors of a state from its plain
    values. Optimizers that are `lazy` make their tensors in their first step.
    """

    framework: str
    suffix: str
    cut: Callable[..., Any]
    write: Callable[[Any, BinaryIO], None]
    unpacked: Callable[[bytes], Any]
    merged: Callable[[Sequence[Any]], dict[str, Any]]
    is_tensor: Callable[[Any], bool]
    lazy: bool = False

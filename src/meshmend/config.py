"""The settings of a job: one tree, `JobConfig`, in which each setting is written down once.

A leaf of the tree has a name, a type, a default, bounds, and a help text, and where they apply the
option of the command line and the environment variable that set it. From these come

- the options of the commands of jobs, such as `meshmend train` (`cli/options.py`),
- `--config job.toml` and `--set group.name=value`, which reach every leaf,
- the variables that a launcher sets for its workers (`JobConfig.variables`),
- the words by which a launcher starts coordinators, agents and workers (`command_words`),
- the tables of `docs/settings.md` and `docs/environment.md`.

What sets a leaf, the most important first: its option, `--set`, `--config`, its variable, its
default. Knows texts and numbers only: what a text such as `4x4` means is for the rooms above.
"""

import math
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Final, get_args, get_origin

from msgspec import Meta, Struct
from msgspec.structs import fields, replace

from meshmend.errors import InputError

PREFIX: Final = "MESHMEND_"
BACKEND: Final = "backend, worker"
WORKER: Final = "worker"

_LONGEST_S: Final = 1e6  # no clock of a job has to add up more
_LARGEST_PORT: Final = 0xFFFF
_LARGEST: Final = (1 << 53) - 1  # whole numbers up to here are exact in every JSON reader
# The unit that ends the name of a field, and its word; the name of the setting is without it.
_UNITS: Final = {"_s": "seconds", "_bytes": "bytes"}
_SWITCH: Final = {"1": True, "true": True, "0": False, "false": False}


def _leaf(
    words: str,
    *,
    least: float | None = None,
    most: float | None = None,
    option: str = "",
    metavar: str = "",
    variable: str = "",
    read_by: str = WORKER,
    empty: str = "",
    between: str = ";\n",
    one_of: tuple[str, ...] = (),
) -> Meta:
    """Return what is known of a leaf beside its name, type and default.

    It is an option if a command lists it (`COMMANDS`), named as the leaf unless `option` says how.
    `empty` says what an empty text, None, or an empty list means. `between` are the characters that
    separate the parts of a list in a variable or in `--set`. `one_of` has all texts that there are.
    """
    known = {
        "option": option,
        "metavar": metavar,
        "variable": f"{PREFIX}{variable}" if variable else "",
        "read_by": read_by,
        "empty": empty,
        "between": between,
        "least": least,
        "most": most,
        "one_of": one_of,
    }
    return Meta(description=words, extra=known)


class MeshConfig(Struct, frozen=True, kw_only=True):
    """Which chips there are, and which fail together."""

    shape: Annotated[
        str,
        _leaf(
            "Extents of the mesh, any number of axes: `4x4`.",
            option="mesh",
            metavar="RxC",
            variable="MESH",
            read_by=BACKEND,
            empty="must be set",
        ),
    ] = ""
    wrap: Annotated[
        str,
        _leaf(
            "Axes that wrap around: `none`, `all`, or `0,1`.",
            metavar="AXES",
            variable="WRAP",
            read_by=BACKEND,
        ),
    ] = "none"
    fail: Annotated[
        tuple[str, ...],
        _leaf(
            "What failed; repeat for more: `4x2@6,8` (block), `3,4` (chip), `link:3,4-3,5`, "
            "`board:3,4`, `host:3,4`.",
            metavar="WHAT",
            variable="FAIL",
            read_by=BACKEND,
            empty="nothing",
            between="; \t\n",
        ),
    ] = ()
    slow: Annotated[
        tuple[str, ...],
        _leaf(
            "Slow links, and the part of the bandwidth that they have; repeat for more: "
            "`link:3,4-3,5=0.25`.",
            metavar="LINK=SPEED",
            variable="SLOW",
            read_by=BACKEND,
            empty="none",
            between="; \t\n",
        ),
    ] = ()
    board: Annotated[
        str,
        _leaf(
            "The chips that fail and come back together.",
            metavar="RxC",
            variable="BOARD",
            empty="`2x2`; of `submit`, the chips of a host or pod",
        ),
    ] = ""


class RunConfig(Struct, frozen=True, kw_only=True):
    """The name of the job, and its files."""

    name: Annotated[
        str,
        _leaf(
            "The name of the job; workers of another job are refused.",
            option="job",
            metavar="NAME",
            variable="JOB",
        ),
    ] = "job"
    run_dir: Annotated[
        str,
        _leaf(
            "The folder of ledgers, plans, events and checkpoints.",
            metavar="FOLDER",
            variable="JOB_DIR",
            empty="`train`: a new one in `runs/`; `submit slurm`: `runs/slurm-JOB`; else none that "
            "stays, and no ledgers",
        ),
    ] = ""
    secret_file: Annotated[
        str,
        _leaf(
            f"A file with the text that all processes of the job must know; else "
            f"{PREFIX}SECRET holds it.",
            metavar="FILE",
            empty="none",
        ),
    ] = ""
    ready_dir: Annotated[
        str,
        _leaf(
            "A folder in which each worker keeps a file, such as `0-3`, while it trains; a file "
            "that is there when a worker starts is removed.",
            variable="READY_DIR",
            empty="no such files",
        ),
    ] = ""
    check_every_step: Annotated[
        bool, _leaf("Write a hash of each step's state into the ledger.", variable="CHECK")
    ] = False
    check_shares: Annotated[
        int,
        _leaf(
            "In one of K steps compute all twice: a chip with wrong numbers is left out. 0: never.",
            least=0,
            metavar="K",
            variable="CHECK_SHARES",
        ),
    ] = 0
    on_wrong_result: Annotated[
        str,
        _leaf(
            "Then: `restore`, `continue` or `stop`.",
            metavar="WHAT",
            variable="ON_WRONG_RESULT",
            one_of=("restore", "continue", "stop"),
        ),
    ] = "restore"
    shares: Annotated[
        str,
        _leaf(
            "Chips' samples: `equal`, or by `speed`.",
            metavar="HOW",
            variable="SHARES",
            one_of=("equal", "speed"),
        ),
    ] = "equal"


class SumConfig(Struct, frozen=True, kw_only=True):
    """How chips sum."""

    algorithm: Annotated[
        str,
        _leaf(
            "How to sum: `auto`, or a name that `meshmend algorithms` lists.",
            metavar="NAME",
            variable="ALGORITHM",
            read_by=BACKEND,
        ),
    ] = "auto"
    fabric: Annotated[
        str,
        _leaf(
            "The network that `auto` plans for: a name of `meshmend fabrics`, or a link's "
            "bandwidth, a hop's latency and a message's overhead: 6.15MB/s,44us,12us.",
            metavar="FABRIC",
            variable="FABRIC",
            read_by=BACKEND,
            empty="`reference`, in slices by the payload's size",
        ),
    ] = ""
    slices: Annotated[
        int,
        _leaf(
            "Slices of a payload; 0: by its size.", least=0, variable="SLICES", read_by="backend"
        ),
    ] = 0
    transport: Annotated[
        str,
        _leaf(
            "`sockets`, or `gloo` or `nccl`: their point-to-point messages.",
            variable="TRANSPORT",
            read_by="backend",
        ),
    ] = "sockets"
    bind: Annotated[
        str,
        _leaf(
            "The address to listen on.",
            metavar="ADDRESS",
            variable="BIND",
            read_by=BACKEND,
            empty="`worker` and `agent`: the one by which the coordinator is reached; else "
            "`127.0.0.1`",
        ),
    ] = ""
    window_bytes: Annotated[
        int,
        _leaf(
            "Bytes that a peer may send before they are read; 0: what a link of the fabric carries "
            "in two round trips, at least 20 kB, and without a fabric what the kernel decides.",
            least=0,
            variable="WINDOW",
            read_by=BACKEND,
        ),
    ] = 0
    checksum: Annotated[
        bool,
        _leaf(
            "Checksums on the data of sums too: a link that changes bytes is found and left out.",
            variable="CHECKSUM",
            read_by=BACKEND,
        ),
    ] = False
    watch_links: Annotated[
        bool,
        _leaf(
            "The chips of a job measure their fabric, and plan anew for links that are steadily "
            "slower than planned; not with tiles.",
            variable="WATCH_LINKS",
            read_by=WORKER,
        ),
    ] = False


_SHORTEST_HOLDER_TIMEOUT_S: Final = 0.2
_LEASE_SHARE: Final = 0.75  # of the holder timeout; the rest is for clocks that run differently


def _seconds(
    words: str, *, least: float = 0.0, most: float = _LONGEST_S, variable: str = ""
) -> Meta:
    return _leaf(words, least=least, most=most, variable=variable)


class Timing(Struct, frozen=True, kw_only=True):
    """The timeouts of a job, in seconds."""

    heartbeat_timeout_s: Annotated[
        float,
        _seconds(
            "Without a heartbeat for so long, a worker counts as dead; so does a coordinator "
            "without a sign of life.",
            least=0.2,
        ),
    ] = 2.0
    straggler_timeout_s: Annotated[
        float,
        _seconds(
            "A worker whose loop keeps the others waiting for so long counts as dead; 0: never.",
            most=1800.0,
        ),
    ] = 600.0
    link_timeout_s: Annotated[
        float,
        _seconds(
            "A connection whose other kernel does not answer for so long is lost, and its link "
            "counts as cut; a chip that is busy still answers.",
            least=0.5,
            variable="LINK_TIMEOUT",
        ),
    ] = 2.0
    holder_timeout_s: Annotated[
        float,
        _seconds(
            "If no connected worker holds the latest state: how long to wait for one, before going "
            "on from a checkpoint. Workers without word from the coordinator stop after three "
            "quarters of it.",
            least=_SHORTEST_HOLDER_TIMEOUT_S,
        ),
    ] = 60.0
    gather_s: Annotated[
        float, _seconds("How long the coordinator waits for all chips at the beginning.")
    ] = 120.0
    linger_s: Annotated[
        float,
        _seconds(
            "How long the coordinator stays when the job has finished, to tell a worker that comes "
            "late."
        ),
    ] = 0.0
    join_timeout_s: Annotated[
        float, _seconds("How long a new worker looks for a coordinator.", variable="JOIN_TIMEOUT")
    ] = 300.0
    alone_s: Annotated[
        float,
        _seconds(
            "How long a coordinator stays whose last worker has left, and a worker that holds a "
            "state calls a coordinator that gives no word; then they end with exit code 1.",
            least=1.0,
            variable="ALONE",
        ),
    ] = 1800.0
    wait_for_chip_s: Annotated[
        float,
        _seconds(
            "How long a new worker waits for a chip that has another worker.",
            variable="WAIT_FOR_CHIP",
        ),
    ] = 60.0
    settle_s: Annotated[
        float,
        _seconds(
            "How long the coordinator waits for more changes before it makes a new generation, as "
            "when a board dies chip by chip."
        ),
    ] = 0.02
    doubt_s: Annotated[
        float,
        _seconds(
            "From a complaint about a connection until the link counts as cut, if both ends live."
        ),
    ] = 0.15
    recall_s: Annotated[
        float,
        _seconds(
            "How long a coordinator that was started again waits for one more worker of the latest "
            "generation."
        ),
    ] = 1.0

    def __post_init__(self) -> None:
        if self.holder_timeout_s < _SHORTEST_HOLDER_TIMEOUT_S:
            raise InputError(
                f"a job needs a holder timeout of at least {_SHORTEST_HOLDER_TIMEOUT_S:g} s, but "
                f"got {self.holder_timeout_s:g}: chips that are cut off have to stop within it"
            )

    @property
    def lease_s(self) -> float:
        """How long a worker may step without word from its coordinator.

        It is shorter than the holder timeout: before the others go on from a checkpoint, those that
        hold the state but cannot be heard have stopped.
        """
        return _LEASE_SHARE * self.holder_timeout_s

    @property
    def alive_every_s(self) -> float:
        """How often the coordinator and its workers send each other a sign of life."""
        return alive_every_s(self.heartbeat_timeout_s, self.lease_s)


def alive_every_s(heartbeat_timeout_s: float, lease_s: float) -> float:
    """Return how often to send a sign of life, so that neither timeout passes by chance."""
    return min(heartbeat_timeout_s / 4, lease_s / 6)


class TrainingConfig(Struct, frozen=True, kw_only=True):
    """What `meshmend train` trains, and for how long."""

    framework: Annotated[str, _leaf("What to train with: `torch` or `jax`.", metavar="NAME")] = (
        "torch"
    )
    size: Annotated[str, _leaf("`tiny`, or `full`: ResNet-50, BERT-large.", metavar="SIZE")] = (
        "tiny"
    )
    norm: Annotated[
        str,
        _leaf(
            "The normalisation of ResNet: `batch`, or `group` (with SiLU for ReLU).",
            metavar="KIND",
            empty="`batch`, and `group` in JAX",
        ),
    ] = ""
    data: Annotated[
        str,
        _leaf(
            "Images in one folder per class, or text files.",
            metavar="FOLDER",
            empty="data from Python packages",
        ),
    ] = ""
    steps: Annotated[int, _leaf("How many steps to train.", least=1, metavar="N")] = 100
    batch: Annotated[int, _leaf("Samples of a step, over all chips.", least=1, metavar="N")] = 64
    batch_policy: Annotated[
        str,
        _leaf(
            "`constant`: always the same batch; `shrink`: a smaller batch while chips are missing."
        ),
    ] = "constant"
    lr: Annotated[
        float | None,
        _leaf("The learning rate, above 0.", metavar="RATE", empty="one that suits the model"),
    ] = None
    optimizer: Annotated[
        str,
        _leaf(
            "`sgd`, `adam`, `adamw`, `adagrad`, `rmsprop`, `lars` or `lamb`.",
            metavar="NAME",
            empty="one that suits the model",
        ),
    ] = ""
    master_weights: Annotated[
        bool,
        _leaf("The model has weights in bfloat16; the optimizer steps on float32 copies of them."),
    ] = False
    tile: Annotated[
        str,
        _leaf(
            "Each replica is a tile of several chips, such as `2x2`; for gpt.",
            metavar="RxC",
            empty="each chip has the whole model",
        ),
    ] = ""
    tensor_parallel: Annotated[
        bool, _leaf("With a tile of two axes: its second one splits the layers' matrices.")
    ] = False
    seed: Annotated[int, _leaf("The seed of model and samples.", metavar="N")] = 0


class SavingConfig(Struct, frozen=True, kw_only=True):
    """Checkpoints of `meshmend train`; a script names its own."""

    every: Annotated[
        int, _leaf("Steps between checkpoints; 0: none.", least=0, option="save-every", metavar="N")
    ] = 50
    resume: Annotated[
        str,
        _leaf(
            "Go on from an earlier run's checkpoint; `auto`: from that in --run-dir, if "
            "it has one.",
            metavar="FOLDER|auto",
            empty="begin anew",
        ),
    ] = ""


class ShardingConfig(Struct, frozen=True, kw_only=True):
    """Which state `meshmend train` keeps on some chips only."""

    optimizer: Annotated[
        bool,
        _leaf(
            "Keep the optimizer's state of each share of the parameters on two chips only.",
            option="shard-optimizer",
        ),
    ] = False
    mirror_domain: Annotated[
        tuple[str, ...],
        _leaf(
            "What never holds a share and its mirror: `board`, `host`, `row`, `column`, or blocks "
            "such as `4x2`; the most important first.",
            empty="`board` and `host`",
        ),
    ] = ()


class LocalConfig(Struct, frozen=True, kw_only=True):
    """What the launchers of this machine alone do: `meshmend train` and `meshmend run`."""

    inject: Annotated[
        tuple[str, ...],
        _leaf(
            'A fault to inject; repeat for more: "kill 2x2@0,2 at 20" (a step), '
            '"hang 1,1 at 3.5s", "slow 1,1 at 30 for 5s", "cut link:0,1-0,2 at 30", '
            '"repair 2x2@0,2 at 60", "kill coordinator at 40", '
            '"flip gradient 0,1 at 40", "wrong 0,1 from 40", "throttle 0,1 from 40".',
            metavar="FAULT",
            empty="none",
        ),
    ] = ()
    preload: Annotated[
        tuple[str, ...],
        _leaf(
            "Import this module once, before the workers start; repeat for more.",
            metavar="MODULE",
            empty="none",
        ),
    ] = ()
    testbed: Annotated[
        str,
        _leaf(
            "Put each worker into its chip's network, with links of e.g. `50Mbit`.",
            metavar="RATE",
            empty="none",
        ),
    ] = ""


class HostsConfig(Struct, frozen=True, kw_only=True):
    """How chips belong to hosts."""

    block: Annotated[
        str,
        _leaf(
            "The block of chips that one host or pod has; blocks tile the mesh.",
            option="hosts",
            metavar="RxC",
            empty="Slurm: `4x2`; Kubernetes: one chip",
        ),
    ] = ""


class SlurmConfig(Struct, frozen=True, kw_only=True):
    """What `meshmend submit slurm` asks Slurm for."""

    per_chip: Annotated[bool, _leaf("Run a step for each chip instead of each host.")] = False
    port: Annotated[
        int | None,
        _leaf(
            "The coordinator's port on the first node, which all nodes must reach.",
            least=1,
            most=_LARGEST_PORT,
            metavar="N",
            empty="a free one from 10000 to 32767",
        ),
    ] = None
    time: Annotated[str, _leaf("The time limit, as for sbatch.", metavar="TIME", empty="none")] = ""
    sbatch: Annotated[
        tuple[str, ...],
        _leaf(
            "A further option of sbatch, such as '--partition=long'; repeat for more.",
            metavar="OPTION",
            empty="none",
        ),
    ] = ()


class KubernetesConfig(Struct, frozen=True, kw_only=True):
    """What `meshmend submit job` and `submit jobset` ask Kubernetes for."""

    image: Annotated[
        str,
        _leaf("Image with meshmend, torch and the script.", metavar="IMAGE", empty="must be set"),
    ] = ""
    namespace: Annotated[str, _leaf("The namespace.", metavar="NAME", empty="the current one")] = ""
    secret: Annotated[
        str,
        _leaf(
            "The Secret whose key 'secret' holds the job's secret.",
            metavar="SECRET",
            empty="NAME-secret",
        ),
    ] = ""
    cpu: Annotated[
        str, _leaf("The cores that each worker pod requests.", metavar="8", empty="not asked")
    ] = ""
    memory: Annotated[
        str,
        _leaf("The memory of each worker pod, also its limit.", metavar="32Gi", empty="not asked"),
    ] = ""
    chips_resource: Annotated[
        tuple[str, ...],
        _leaf(
            "The devices of each worker pod; repeat for more.",
            metavar="google.com/tpu=4",
            empty="none",
        ),
    ] = ()
    mount: Annotated[
        tuple[str, ...],
        _leaf(
            "A PersistentVolumeClaim to mount in each worker pod; repeat for more.",
            metavar="CLAIM:/FOLDER",
            empty="none",
        ),
    ] = ()
    max_restarts: Annotated[
        int,
        _leaf(
            "Restarts of all pods together, after which Kubernetes ends the job.",
            least=0,
            most=2**31 - 1,
        ),
    ] = 1000


class JobConfig(Struct, frozen=True, kw_only=True):
    """All settings of a job."""

    mesh: MeshConfig = MeshConfig()
    job: RunConfig = RunConfig()
    sums: SumConfig = SumConfig()
    timing: Timing = Timing()
    training: TrainingConfig = TrainingConfig()
    saving: SavingConfig = SavingConfig()
    sharding: ShardingConfig = ShardingConfig()
    local: LocalConfig = LocalConfig()
    hosts: HostsConfig = HostsConfig()
    slurm: SlurmConfig = SlurmConfig()
    kubernetes: KubernetesConfig = KubernetesConfig()

    def get(self, key: str) -> Any:
        """Return the value of a setting."""
        leaf = LEAVES[key]
        return getattr(getattr(self, leaf.group), leaf.field)

    def with_(self, values: Mapping[str, Any]) -> "JobConfig":
        """Return these settings with some changed: `with_({"mesh.shape": "4x4"})`."""
        changed: dict[str, dict[str, Any]] = {}
        for key, value in values.items():
            changed.setdefault(LEAVES[key].group, {})[LEAVES[key].field] = value
        groups = {name: replace(getattr(self, name), **new) for name, new in changed.items()}
        return replace(self, **groups)

    def variables(self) -> dict[str, str]:
        """Return the variables that tell these settings to a worker; a default is an empty text.

        All variables of settings are there, so that none of the launcher's own values stays.
        """
        return {
            leaf.variable: "" if self.get(key) == leaf.default else leaf.text(self.get(key))
            for key, leaf in LEAVES.items()
            if leaf.variable
        }


@dataclass(frozen=True)
class Leaf:
    """One setting: `group.name`, which is the key of files and of `--set`, and all about it."""

    group: str
    field: str
    kind: type  # str, int, float, bool, or a tuple of texts
    default: Any
    words: str
    option: str
    metavar: str
    variable: str
    read_by: str
    empty: str
    between: str
    least: float | None
    most: float | None
    one_of: tuple[str, ...]

    @cached_property
    def unit(self) -> str:
        """The word of its unit, such as seconds; empty if it has none."""
        return next((word for end, word in _UNITS.items() if self.field.endswith(end)), "")

    @cached_property
    def key(self) -> str:
        """Its name in the tree, which has no unit: `timing.link_timeout`."""
        return _key(self.group, self.field)

    @cached_property
    def needs(self) -> str:
        """What a value of it must be, in words."""
        if self.kind is bool:
            return "1 or 0"
        if self.one_of:
            return f"one of {', '.join(self.one_of)}"
        if self.kind is str:
            return "a text"
        if self.kind is tuple:
            return "a list of texts"
        least, most = self.least, self.most
        bounds = (
            f" from {least:g} to {most:g}"
            if least is not None and most is not None
            else f" of at least {least:g}"
            if least is not None
            else ""
        )
        return f"{self.unit or ('a whole number' if self.kind is int else 'a number')}{bounds}"

    @property
    def default_words(self) -> str:
        """Its default as a page shows it."""
        return self.empty if self.default in ("", None, ()) else f"`{self.text(self.default)}`"

    def parse(self, value: object, source: str) -> Any:
        """Return a value that a person wrote, as an option, in a file or in a variable.

        Raises:
            InputError: it is no value of this setting; the line names the `source`.
        """
        found = self._read(value)
        if found is None:
            text = repr(value) if isinstance(value, str) else str(value)
            needs = f"at most {_LARGEST}" if self._is_too_large(value) else self.needs
            raise InputError(f"{source} needs {needs}, but got {text[:60]}")
        return found

    def text(self, value: Any) -> str:
        """Return the text from which `parse` makes this value."""
        if isinstance(value, bool):
            return "1" if value else "0"
        if isinstance(value, float):
            return short if float(short := f"{value:g}") == value else repr(value)
        if isinstance(value, tuple):
            return self.between[0].join(value)
        return "" if value is None else str(value)

    def _read(self, value: object) -> Any:
        """Return the value, or None if it cannot be one."""
        if self.kind is tuple:
            if isinstance(value, str):
                parts = re.split(f"[{re.escape(self.between)}]", value)
                return tuple(part.strip() for part in parts if part.strip())
            is_texts = isinstance(value, list | tuple) and all(isinstance(e, str) for e in value)
            return tuple(value) if is_texts else None  # type: ignore[arg-type]
        if self.kind is bool:
            return value if isinstance(value, bool) else _SWITCH.get(str(value).lower())
        if self.kind is str:
            is_known = value in self.one_of or not self.one_of
            return value if isinstance(value, str) and is_known else None
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            return None
        number = self._number(value)
        return number if number is not None and self._is_within(number) else None

    def _number(self, value: str | int | float) -> int | float | None:
        return _whole_number(value) if self.kind is int else _number(value)

    def _is_too_large(self, value: object) -> bool:
        """Whether a value is a number that is larger than any setting may be."""
        if self.kind not in (int, float) or not isinstance(value, str | int | float):
            return False
        number = self._number(value)
        return number is not None and self.most is None and _LARGEST < number < math.inf

    def _is_within(self, number: float) -> bool:
        least = -_LARGEST if self.least is None else self.least
        most = _LARGEST if self.most is None else self.most
        return math.isfinite(number) and least <= number <= most


def _whole_number(value: str | int | float) -> int | None:
    if isinstance(value, int):
        return value
    return int(value) if isinstance(value, str) and re.fullmatch("-?[0-9]{1,18}", value) else None


def _number(value: str | int | float) -> float | None:
    try:
        return float(value)
    except (ValueError, OverflowError):
        return None


@dataclass(frozen=True)
class Command:
    """What a command of the command line reads of the tree.

    `options` are the keys that are options of it; `reads` are further groups and keys that `--set`
    reaches.
    """

    options: tuple[str, ...]
    reads: tuple[str, ...] = ()

    def is_read(self, key: str) -> bool:
        """Whether the command reads a setting."""
        group = key.partition(".")[0]
        return key in self.options or key in self.reads or group in self.reads


def _key(group: str, field: str) -> str:
    """Return the name of a leaf in the tree: its field without a unit."""
    end = next((end for end in _UNITS if field.endswith(end)), "")
    return f"{group}.{field.removesuffix(end)}"


def _keys(*texts: str) -> tuple[str, ...]:
    return tuple(key for text in texts for key in text.split())


_MESH: Final = "mesh.shape mesh.wrap mesh.fail mesh.slow"
_PROCESS: Final = f"{_MESH} mesh.board job.name job.secret_file"
_CHECKS: Final = "job.check_shares job.on_wrong_result job.shares"
_SLURM: Final = "hosts.block slurm.per_chip slurm.port slurm.sbatch"
_JOIN: Final = "timing.join_timeout timing.wait_for_chip"  # of workers alone
_WORKER: Final = Command(
    _keys(_PROCESS, "job.run_dir sums.algorithm sums.fabric sums.bind"),
    reads=_keys("job sums timing.link_timeout timing.alone", _JOIN),
)
_KUBERNETES: Final = Command(
    _keys(
        "mesh.shape mesh.wrap mesh.board hosts.block job.run_dir kubernetes.image",
        "kubernetes.namespace kubernetes.secret kubernetes.cpu kubernetes.memory",
        "kubernetes.chips_resource kubernetes.mount",
    ),
    reads=_keys("sums timing kubernetes", _CHECKS),
)
COMMANDS: Final[Mapping[str, Command]] = {
    "train": Command(
        _keys(
            _MESH,
            "training.framework training.size training.norm training.data training.steps",
            "training.batch training.lr training.optimizer sharding.optimizer",
            "training.master_weights training.tile job.check_every_step",
            _CHECKS,
            "sums.checksum training.seed local.inject sums.algorithm local.testbed job.run_dir",
            "saving.every saving.resume",
        ),
        reads=_keys("mesh job sums timing training saving sharding local"),
    ),
    "run": Command(
        _keys(
            _MESH,
            "sums.algorithm sums.fabric local.preload local.testbed local.inject job.run_dir",
            _CHECKS,
            "sums.checksum",
        ),
        reads=_keys("mesh job sums timing local"),
    ),
    "coordinator": Command(
        _keys(_PROCESS, "job.run_dir"),
        reads=tuple(
            sorted({_key("timing", each.name) for each in fields(Timing)} - {*_keys(_JOIN)})
        ),
    ),
    "worker": _WORKER,
    "agent": Command((*_WORKER.options, "hosts.block"), _WORKER.reads),
    "submit slurm": Command(
        _keys(_MESH, "mesh.board job.run_dir", _SLURM, "slurm.time"),
        reads=_keys("sums timing", _CHECKS),
    ),
    "slurm-job": Command(
        _keys(_MESH, "mesh.board job.run_dir job.secret_file", _SLURM),
        reads=_keys("sums timing", _CHECKS),
    ),
    "submit job": _KUBERNETES,
    "submit jobset": _KUBERNETES,
    # No command: what `meshmend.launch.ray` reads.
    "ray": Command(
        options=(),
        reads=_keys(
            "mesh hosts sums timing job.name job.run_dir job.ready_dir job.check_every_step",
            _CHECKS,
        ),
    ),
}


def _leaves() -> Iterator[Leaf]:
    for group in fields(JobConfig):
        for field in fields(group.type):
            kind, meta = get_args(field.type)
            kinds = [each for each in get_args(kind) or (kind,) if each is not type(None)]
            base = tuple if get_origin(kind) is tuple else kinds[0]
            assert meta.description is not None
            known = dict(meta.extra)
            name = known.pop("option") or field.name.replace("_", "-")
            is_option = any(
                _key(group.name, field.name) in each.options for each in COMMANDS.values()
            )
            yield Leaf(
                group.name,
                field.name,
                base,
                field.default,
                meta.description,
                option=f"--{name}" if is_option else "",
                **known,
            )


LEAVES: Final[Mapping[str, Leaf]] = {leaf.key: leaf for leaf in _leaves()}


def command_words(command: str, config: JobConfig) -> list[str]:
    """Return the words that tell a command the settings that it reads and that are no defaults."""
    reader = COMMANDS[command]
    words: list[str] = []
    for key, leaf in LEAVES.items():
        value = config.get(key)
        if value == leaf.default or not reader.is_read(key):
            continue
        if key not in reader.options:
            words += ["--set", f"{key}={leaf.text(value)}"]
        elif leaf.kind is bool:
            words.append(leaf.option)
        else:
            for each in value if isinstance(value, tuple) else (value,):
                words += [leaf.option, leaf.text(each)]
    return words


def job_config(
    given: Mapping[str, object] | None = None,
    *,
    assignments: Sequence[str] = (),
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    command: str = "",
) -> JobConfig:
    """Return the settings of a job, each from the first of its sources that has it.

    These are the settings that were `given` by key, as options are, the `assignments` such as
    `timing.link_timeout=5`, the TOML `file`, the variables of the `environment`, the command's own
    `defaults`, and those of the tree.

    Raises:
        InputError: a value or a name cannot be used; the line says where it is.
    """
    values = dict(defaults or {})
    in_file = _read_file(file) if file is not None else {}
    assigned = dict(map(_assignment, assignments))
    for key in assigned:
        _check_key(key, "--set", command)
    for key in given or ():
        _check_key(key, "settings", command)
    for key, leaf in LEAVES.items():
        if given and given.get(key) is not None:
            values[key] = leaf.parse(given[key], leaf.option or key)
        elif key in assigned:
            values[key] = leaf.parse(assigned[key], f"--set {key}")
        elif key in in_file:
            values[key] = leaf.parse(in_file[key], f"{file}: {key}")
        elif leaf.variable and (text := (environment or {}).get(leaf.variable)):
            values[key] = leaf.parse(text, leaf.variable)
    return JobConfig().with_(values)


def _assignment(text: str) -> tuple[str, str]:
    key, found, value = text.partition("=")
    if not found:
        raise InputError(f"--set needs GROUP.NAME=VALUE, but got {text[:60]!r}")
    return key, value


def _check_key(key: str, source: str, command: str = "") -> None:
    if key not in LEAVES:
        similar = get_close_matches(key, LEAVES, n=1, cutoff=0.7)
        advice = f"did you mean {similar[0]}? " if similar else ""
        raise InputError(
            f"{source}: there is no setting {key[:60]!r}; {advice}docs/settings.md lists all"
        )
    if command and not COMMANDS[command].is_read(key):
        raise InputError(f"{source} {key} has no effect: meshmend {command} does not read it")


def read_toml(path: Path) -> dict[str, Any]:
    """Return what stands in the file of `--config`.

    Raises:
        InputError: it cannot be read, or is no TOML.
    """
    try:
        if path.is_char_device():
            raise InputError(f"cannot read --config {path}: it is a device, not a file")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read --config {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:  # of TOML or of UTF-8
        raise InputError(f"--config needs a TOML file, but {path} is none: {error}") from None


def _read_file(path: Path) -> dict[str, object]:
    """Return the settings in a TOML file by their keys.

    Raises:
        InputError: it cannot be read, or has a name that is no setting.
    """
    found: dict[str, object] = {}
    for group, inside in read_toml(path).items():
        if not isinstance(inside, dict):
            raise InputError(
                f"{path}: {group[:60]} needs to be in a group, such as [timing]; docs/settings.md "
                "lists the settings"
            )
        for name, value in inside.items():
            _check_key(f"{group}.{name}", str(path))
            found[f"{group}.{name}"] = value
    return found


@dataclass(frozen=True)
class Variable:
    """One environment variable; an empty value counts as not set."""

    name: str
    meaning: str
    default: str
    read_by: str

    def value_in(self, environment: Mapping[str, str]) -> str:
        """Return the variable's text in an environment, or an empty text."""
        return environment.get(self.name, "")


# These say which process of a job this is, and are no settings.
SECRET: Final = Variable(
    f"{PREFIX}SECRET",
    "A text of at least 16 bytes that every process of the job must know.",
    "backend: made by rank 0, in the store; worker, coordinator, status: must be set",
    "backend, worker, coordinator, status",
)
CHIP: Final = Variable(
    f"{PREFIX}CHIP",
    "This process's chip: `0,3`.",
    "a worker must know it",
    "worker, your script",
)
COORDINATOR: Final = Variable(
    f"{PREFIX}COORDINATOR",
    "`HOST:PORT` of the coordinator.",
    "none: this process trains alone",
    WORKER,
)
PLAN_AHEAD: Final = Variable(
    f"{PREFIX}PLAN_AHEAD",
    "`1`: the first worker of each host plans for what may fail next.",
    "`0`: the launcher does",
    WORKER,
)
INJECT: Final = Variable(
    f"{PREFIX}INJECT", "Faults that this worker injects into itself, one per line.", "none", WORKER
)
TESTBED_DIR: Final = Variable(
    f"{PREFIX}TESTBED_DIR",
    "The folder of the testbeds' records.",
    "`/run/meshmend` for root, else `$XDG_RUNTIME_DIR/meshmend`, else in the temporary folder",
    "testbed",
)
TTSIM: Final = Variable(
    PREFIX + "TTSIM",
    "The `libttsim.so` whose Wormhole chips are run on.",
    "none: `--library` names it",
    "wormhole",
)
PROCESS_VARIABLES: Final = (SECRET, CHIP, COORDINATOR, PLAN_AHEAD, INJECT)


def _setting_variable(key: str) -> Variable:
    leaf = LEAVES[key]
    return Variable(leaf.variable, leaf.words, leaf.default_words, leaf.read_by)


MESH: Final = _setting_variable("mesh.shape")
FAIL: Final = _setting_variable("mesh.fail")
TRANSPORT: Final = _setting_variable("sums.transport")
CHECKSUM: Final = _setting_variable("sums.checksum")
BIND: Final = _setting_variable("sums.bind")
READY_DIR: Final = _setting_variable("job.ready_dir")
CHECK_SHARES: Final = _setting_variable("job.check_shares")
SHARES: Final = _setting_variable("job.shares")
VARIABLES: Final = (
    *(_setting_variable(key) for key, leaf in LEAVES.items() if leaf.variable),
    *PROCESS_VARIABLES,
    TESTBED_DIR,
    TTSIM,
)

_warned: set[str] = set()  # the names that this process has told of, or its parent before a fork


def warn_of_unknown(environment: Mapping[str, str]) -> None:
    """Print one line for each variable that has our prefix but is not in the table."""
    known = [variable.name for variable in VARIABLES]
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in known and name not in _warned:
            _warned.add(name)
            similar = get_close_matches(name, known, n=1)
            advice = f"; did you mean {similar[0]}?" if similar else ""
            print(f"meshmend: there is no variable {name}, it is ignored{advice}", file=sys.stderr)


def variable_table() -> str:
    """Return the table of all variables in Markdown, as `docs/environment.md` shows it."""
    return _table(
        ("variable", "meaning", "default", "who reads it"),
        [(f"`{each.name}`", each.meaning, each.default, each.read_by) for each in VARIABLES],
    )


def settings_page() -> str:
    """Return the tables of all settings in Markdown, one for each group, for `docs/settings.md`."""
    parts = []
    for group in fields(JobConfig):
        rows = [
            (
                f"`{leaf.key}`",
                " ".join(f"`{name}`" for name in (leaf.option, leaf.variable) if name),
                leaf.words,
                leaf.default_words,
                leaf.needs if leaf.kind in (int, float) else "",
            )
            for leaf in LEAVES.values()
            if leaf.group == group.name
        ]
        table = _table(("setting", "also set by", "meaning", "default", "needs"), rows)
        parts.append(f"## {group.name}\n\n{group.type.__doc__}\n\n{table}")
    return "\n".join(parts)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in lines)
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)

"""The environment variables of meshmend: one table, the only place in `src` with their names.

Knows names and texts, not what the texts mean. `planning/environment.py` reads and writes the
variables of a job, `lab/testbed/records.py` reads those of a testbed.
`docs/environment.md` shows the same table.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

PREFIX: Final = "MESHMEND_"


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


BACKEND: Final = "backend, worker"
WORKER: Final = "worker"

MESH: Final = Variable(
    "MESHMEND_MESH", "extents of the mesh: `4x4`", "must be set, except to train alone", BACKEND
)
WRAP: Final = Variable(
    "MESHMEND_WRAP", "axes that wrap around: `none`, `all`, or `0,1`", "`none`", BACKEND
)
FAIL: Final = Variable(
    "MESHMEND_FAIL",
    "what failed, separated by blanks or semicolons: `2x2@0,2 3,3`",
    "nothing",
    BACKEND,
)
ALGORITHM: Final = Variable(
    "MESHMEND_ALGORITHM",
    "how to sum: `auto`, or a name that `meshmend algorithms` lists",
    "`auto`",
    BACKEND,
)
SLICES: Final = Variable(
    "MESHMEND_SLICES", "number of slices of a payload", "by its size", "backend"
)
TRANSPORT: Final = Variable(
    "MESHMEND_TRANSPORT",
    "`sockets`, or `gloo` or `nccl`: their point-to-point messages",
    "`sockets`",
    "backend",
)
BIND: Final = Variable("MESHMEND_BIND", "the address to listen on", "`127.0.0.1`", BACKEND)
WINDOW: Final = Variable(
    "MESHMEND_WINDOW",
    "bytes that a peer may send before they are read; 0 leaves it to the kernel. Raise it on fast "
    "links with a long round trip",
    "20000",
    BACKEND,
)
CHECKSUM: Final = Variable(
    "MESHMEND_CHECKSUM",
    "`1`: the data of sums has checksums, as headers always have; a damaged bit is then a lost "
    "link. All processes of a job need the same. For `sockets` only",
    "`0`",
    BACKEND,
)
SECRET: Final = Variable(
    "MESHMEND_SECRET",
    "a text of at least 16 bytes that every process of the job must know",
    "backend: made by rank 0, in the store; worker, coordinator, status: must be set",
    "backend, worker, coordinator, status",
)
CHIP: Final = Variable(
    "MESHMEND_CHIP", "this process's chip: `0,3`", "a worker must know it", "worker, your script"
)
COORDINATOR: Final = Variable(
    "MESHMEND_COORDINATOR",
    "`HOST:PORT` of the coordinator",
    "none: this process trains alone",
    WORKER,
)
JOB: Final = Variable("MESHMEND_JOB", "the name of the job", "none", WORKER)
JOB_DIR: Final = Variable(
    "MESHMEND_JOB_DIR",
    "the folder of ledgers and plans",
    "no ledgers; plans in the temporary folder",
    WORKER,
)
PLAN_AHEAD: Final = Variable(
    "MESHMEND_PLAN_AHEAD",
    "`1`: the first worker of each host plans for what may fail next",
    "`0`: the launcher does",
    WORKER,
)
BOARD: Final = Variable("MESHMEND_BOARD", "the chips that fail together: `2x2`", "`2x2`", WORKER)
JOIN_TIMEOUT: Final = Variable(
    "MESHMEND_JOIN_TIMEOUT", "seconds that a new worker looks for a coordinator", "300", WORKER
)
WAIT_FOR_CHIP: Final = Variable(
    "MESHMEND_WAIT_FOR_CHIP",
    "seconds that a new worker waits for a chip that has another worker",
    "60",
    WORKER,
)
INJECT: Final = Variable(
    "MESHMEND_INJECT",
    "faults that this worker injects into itself, one per line",
    "none",
    WORKER,
)
CHECK: Final = Variable(
    "MESHMEND_CHECK", "`1`: write a hash of the state into the ledger at every step", "`0`", WORKER
)
LINK_TIMEOUT: Final = Variable(
    "MESHMEND_LINK_TIMEOUT",
    "seconds without an answer of a peer's kernel until its connection counts as lost",
    "2",
    WORKER,
)
READY_DIR: Final = Variable(
    "MESHMEND_READY_DIR",
    "a folder in which each worker keeps a file, such as `0-3`, while it trains; a file that is "
    "there when a worker starts is removed",
    "no such files",
    WORKER,
)
TESTBED_DIR: Final = Variable(
    "MESHMEND_TESTBED_DIR",
    "the folder of the testbeds' records",
    "`/run/meshmend` for root, else `$XDG_RUNTIME_DIR/meshmend`, else in the temporary folder",
    "testbed",
)

VARIABLES: Final = (
    *(MESH, WRAP, FAIL, ALGORITHM, SLICES, TRANSPORT, BIND, WINDOW, CHECKSUM),
    *(SECRET, CHIP, COORDINATOR, JOB, JOB_DIR, PLAN_AHEAD, BOARD, JOIN_TIMEOUT, WAIT_FOR_CHIP),
    *(LINK_TIMEOUT, INJECT, CHECK, READY_DIR, TESTBED_DIR),
)

_warned: set[str] = set()  # the lines that this process has printed, or its parent before a fork


def warn_of_unknown(environment: Mapping[str, str]) -> None:
    """Print one line for each variable that has our prefix but is not in the table."""
    known = [variable.name for variable in VARIABLES]
    for name in sorted(environment):
        if name.startswith(PREFIX) and name not in known:
            similar = get_close_matches(name, known, n=1)
            advice = f"; did you mean {similar[0]}?" if similar else ""
            _warn_once(f"there is no variable {name}, it is ignored{advice}")


def variable_table() -> str:
    """Return the table of all variables in Markdown."""
    rows = [("variable", "meaning", "default", "who reads it"), ("---",) * 4]
    for variable in VARIABLES:
        columns = (variable.meaning, variable.default, variable.read_by)
        rows.append((f"`{variable.name}`", *columns))
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _warn_once(line: str) -> None:
    if line not in _warned:
        _warned.add(line)
        print(f"meshmend: {line}", file=sys.stderr)

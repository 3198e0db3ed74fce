"""The records of the testbeds that exist: one small file each, and one lock for all.

A record names the holder process by its number and its start time, so a number that the system
gave to another process is never mistaken for it. A record whose holder has ended is a leftover;
the kernel has already removed everything else.

Records live in the folder that the variable `TESTBED_DIR` names, else in `/run/meshmend` for root,
else in `$XDG_RUNTIME_DIR/meshmend`, else in a folder of the user's own under the temporary folder.
"""

import contextlib
import fcntl
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from meshmend.config import TESTBED_DIR
from meshmend.errors import TestbedError
from meshmend.files import DRAFT, write_whole
from meshmend.topology.failures import Chip, format_chip
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import mesh_words, parse_mesh


@dataclass(frozen=True)
class Record:
    """What other processes can know about a testbed.

    `settled` is false while its network is being changed; a record found unlocked and unsettled
    was left by a change that died halfway.
    """

    name: str
    mesh: str
    wrap: str
    fail: tuple[str, ...]
    slow: tuple[str, ...]
    link_bytes_per_s: float
    holder: int
    holder_start: int
    owner: int | None
    is_user: bool
    settled: bool = False
    loses: dict[str, float] = field(default_factory=dict)  # parts, by `way_of`

    def current_mesh(self) -> Mesh:
        """Return the mesh as it is now."""
        return parse_mesh(self.mesh, wrap=self.wrap, fail=self.fail, slow=self.slow)

    def with_mesh(self, mesh: Mesh, *, settled: bool) -> "Record":
        """Return this record with the failures and the slow links of a mesh."""
        words = mesh_words(mesh)
        slow = tuple(words.get("slow", ()))
        return replace(self, fail=tuple(words["fail"]), slow=slow, settled=settled)

    def with_loss(self, source: Chip, goal: Chip, part: float) -> "Record":
        """Return this record with another part of the packets of one way that are lost."""
        loses = {**self.loses, way_of(source, goal): part}
        return replace(self, loses={way: part for way, part in sorted(loses.items()) if part})

    @property
    def is_alive(self) -> bool:
        """Whether the holder still runs."""
        return start_time(self.holder) == self.holder_start


def record_of(mesh: Mesh, **fields: Any) -> Record:
    """Return the record of a testbed of this mesh; `fields` are its other fields."""
    words = mesh_words(mesh)
    fail, slow = tuple(words["fail"]), tuple(words.get("slow", ()))
    return Record(mesh=words["shape"], wrap=words["wrap"], fail=fail, slow=slow, **fields)


def way_of(source: Chip, goal: Chip) -> str:
    """Return one way of a link in words: 0,0>0,1."""
    return ">".join(format_chip(chip) for chip in (source, goal))


def start_time(process: int) -> int | None:
    """Return when a process started, in clock ticks since boot, or None if it has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return None
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


def run_dir() -> Path:
    """Return the folder of the records; it need not exist."""
    if chosen := TESTBED_DIR.value_in(os.environ):
        return Path(chosen)
    if os.geteuid() == 0:
        return Path("/run/meshmend")
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "meshmend"
    return Path(tempfile.gettempdir()) / f"meshmend-{os.geteuid()}"


def record_path(name: str) -> Path:
    """Return where the record of a testbed is kept.

    Raises:
        TestbedError: the name has other characters, or is too long.
    """
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", name):
        raise TestbedError(
            f"a testbed's name needs 1 to 64 letters, digits, dots, dashes, but got {name!r}"
        )
    return run_dir() / f"{name}.json"


@contextmanager
def locked() -> Iterator[None]:
    """Hold the lock on all records; afterwards remove their folder if it is empty."""
    folder = _locked_folder()
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            run_dir().rmdir()
        os.close(folder)


def _locked_folder() -> int:
    """Return an open, locked folder that nobody has removed while we waited for the lock."""
    path = run_dir()
    while True:
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise TestbedError(
                f"testbeds need the folder {path}, but: {error.strerror}; "
                f"set {TESTBED_DIR.name} to a folder of yours"
            ) from None
        fcntl.flock(folder, fcntl.LOCK_EX)
        held = os.fstat(folder)
        if held.st_uid != os.geteuid() or stat.S_IMODE(held.st_mode) & 0o022:
            os.close(folder)
            raise TestbedError(
                f"testbeds need the folder {path} to be writable by you alone, but it is not; "
                f"set {TESTBED_DIR.name} to a folder of yours"
            )
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino == held.st_ino:
                return folder
        os.close(folder)


def save(record: Record) -> None:
    """Write a record atomically; call this under the lock."""
    write_whole(record_path(record.name), json.dumps(asdict(record)), is_durable=False)


def load(name: str) -> Record:
    """Return the record of a live testbed.

    Raises:
        TestbedError: there is none.
    """
    record = _read(record_path(name))
    if record is None or not record.is_alive:
        raise TestbedError(
            f"there is no testbed {name!r}; up: {listed(live_records())}; "
            "make one with: meshmend testbed up"
        )
    return record


def live_records() -> tuple[Record, ...]:
    """Return the records of the testbeds whose holder runs, by name."""
    found = (_read(path) for path in sorted(run_dir().glob("*.json")))
    return tuple(record for record in found if record is not None and record.is_alive)


def sweep() -> tuple[str, ...]:
    """Remove records without a holder and return their names; call this under the lock."""
    swept = []
    for path in sorted(run_dir().glob("*.json")):
        record = _read(path)
        if record is None or not record.is_alive:
            path.unlink(missing_ok=True)
            swept.append(path.stem)
    for draft in run_dir().glob(f"*{DRAFT}"):
        draft.unlink(missing_ok=True)
    return tuple(swept)


def listed(records: tuple[Record, ...]) -> str:
    """Return the names of testbeds for a message."""
    return ", ".join(record.name for record in records) or "none"


def _read(path: Path) -> Record | None:
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        return Record(**fields | {key: tuple(fields[key]) for key in ("fail", "slow")})
    except (OSError, ValueError, KeyError, TypeError):
        return None

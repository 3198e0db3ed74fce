"""What the backend must know: the mesh, how to sum on it, and where to listen.

Read from the environment, or given as `pg_options` of `init_process_group`.

    MESHMEND_MESH        4x4
    MESHMEND_WRAP        none (default), all, or axes 0,1
    MESHMEND_FAIL        what failed, separated by blanks or semicolons: 2x2@0,2 3,3
    MESHMEND_ALGORITHM   auto (default), or a name that `meshmend algorithms` lists
    MESHMEND_SLICES      how many slices to cut payloads in; default: by their size
    MESHMEND_TRANSPORT   sockets (default), or gloo or nccl: their point-to-point messages
    MESHMEND_BIND        the address to listen on; default 127.0.0.1
    MESHMEND_WINDOW      bytes that a peer may send ahead; 0: up to the kernel; default 20000
    MESHMEND_SECRET      what every worker must know; default: made by rank 0, in the store
"""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from meshmend.errors import InputError
from meshmend.execute.sockets import WINDOW_BYTES
from meshmend.planning.plan import AUTO
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import mesh_words, parse_mesh

TRANSPORTS = ("sockets", "gloo", "nccl")
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Settings:
    """How a process group runs; `n_slices` 0 means by the size of the payload."""

    mesh: Mesh
    algorithm: str = AUTO
    n_slices: int = 0
    transport: str = "sockets"
    bind: str = LOOPBACK
    window_bytes: int = WINDOW_BYTES
    secret: str = ""

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise InputError(
                f"MESHMEND_TRANSPORT needs one of {', '.join(TRANSPORTS)}, but got "
                f"{self.transport!r}"
            )
        if self.n_slices < 0:
            raise InputError(f"MESHMEND_SLICES needs a positive number, but got {self.n_slices}")

    def environment(self) -> dict[str, str]:
        """Return the environment that `settings_from` reads back as these settings."""
        words = mesh_words(self.mesh)
        variables = {
            "MESHMEND_MESH": words["shape"],
            "MESHMEND_WRAP": words["wrap"],
            "MESHMEND_FAIL": " ".join(words["fail"]),
            "MESHMEND_ALGORITHM": self.algorithm,
            "MESHMEND_SLICES": str(self.n_slices),
            "MESHMEND_TRANSPORT": self.transport,
            "MESHMEND_BIND": self.bind,
            "MESHMEND_WINDOW": str(self.window_bytes),
        }
        return variables | ({"MESHMEND_SECRET": self.secret} if self.secret else {})


def settings_from(environment: Mapping[str, str] = os.environ) -> Settings:
    """Return the settings that an environment describes.

    Raises:
        InputError: there is no mesh in it, or something that cannot be read.
    """
    shape = environment.get("MESHMEND_MESH")
    if not shape:
        raise InputError(
            "the backend meshmend needs to know the mesh, but MESHMEND_MESH is not set; start the "
            "script with 'meshmend run --mesh 4x4 ...', or set MESHMEND_MESH=4x4 and, for what "
            "failed, MESHMEND_FAIL"
        )
    slices = environment.get("MESHMEND_SLICES") or "0"
    if not slices.isdecimal():
        raise InputError(f"MESHMEND_SLICES needs a whole number, but got {slices!r}")
    window = environment.get("MESHMEND_WINDOW") or str(WINDOW_BYTES)
    if not window.isdecimal():
        raise InputError(f"MESHMEND_WINDOW needs a whole number of bytes, but got {window!r}")
    return Settings(
        mesh=parse_mesh(
            shape,
            wrap=environment.get("MESHMEND_WRAP") or "none",
            fail=re.findall(r"[^;\s]+", environment.get("MESHMEND_FAIL", "")),
        ),
        algorithm=environment.get("MESHMEND_ALGORITHM") or AUTO,
        n_slices=int(slices),
        transport=environment.get("MESHMEND_TRANSPORT") or "sockets",
        bind=environment.get("MESHMEND_BIND") or LOOPBACK,
        window_bytes=int(window),
        secret=environment.get("MESHMEND_SECRET", ""),
    )

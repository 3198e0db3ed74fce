"""Settings of the backend: the mesh, how to sum on it, and where to listen.

They come from the environment (`planning/environment.py`), or from `pg_options` of
`init_process_group`.
"""

from typing import Final

from msgspec.structs import asdict, force_setattr

from meshmend.config import LEAVES, SECRET, TRANSPORT, SumConfig
from meshmend.errors import InputError
from meshmend.planning.catalogue import AUTO_ON_ONE_HOST, auto_on
from meshmend.planning.plan import AUTO
from meshmend.schedule.algorithm_names import check_fabric
from meshmend.topology.fabric import fabric as fabric_named
from meshmend.topology.mesh import Mesh
from meshmend.transport.handshake import check_secret

TRANSPORTS = ("sockets", "gloo", "nccl")
LOOPBACK = "127.0.0.1"
SMALL_WINDOW_BYTES: Final = 20_000  # two packets of the longest that networks pass, 9,000 bytes
_HOPS_AHEAD: Final = 4  # two round trips: one to see what was read, one to spare


class Settings(SumConfig, frozen=True):
    """How a process group sums on a mesh; with 0 `slices` the payload's size decides.

    Without an address to listen on, `bind` is that of loopback. A peer is lost when its kernel
    answers nothing for `link_timeout_s`; with 0 none ever is.
    """

    mesh: Mesh
    secret: str = ""
    link_timeout_s: float = 0.0

    @property
    def planned_algorithm(self) -> str:
        """The algorithm, or what `auto` is on a fabric or if all ranks share a host.

        Who listens on loopback cannot be reached from another host.
        """
        if self.fabric:
            return auto_on(self.fabric)
        is_one_host = self.transport == TRANSPORTS[0] and self.bind == LOOPBACK
        return AUTO_ON_ONE_HOST if is_one_host and self.algorithm == AUTO else self.algorithm

    @property
    def window(self) -> int:
        """How many bytes a peer may send before they are read; with 0 the kernel decides.

        Urgent data cannot overtake what the kernel has taken, so a known fabric gets as little as
        keeps its links busy. The kernel finds by itself what keeps an unknown one busy.
        """
        if self.window_bytes or not self.fabric:
            return self.window_bytes
        fabric = fabric_named(self.fabric)
        ahead = _HOPS_AHEAD * fabric.hop_latency_s * fabric.link_bandwidth_bytes_per_s
        return max(SMALL_WINDOW_BYTES, round(ahead))

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise InputError(
                f"{TRANSPORT.name} needs one of {', '.join(TRANSPORTS)}, but got {self.transport!r}"
            )
        if not self.algorithm:
            raise InputError(f"{LEAVES['sums.algorithm'].variable} needs a text, but got none")
        check_fabric(self.fabric, self.algorithm)
        force_setattr(self, "bind", self.bind or LOOPBACK)
        if self.secret:
            check_secret(self.secret, SECRET.name)
        for key, number in (("sums.slices", self.slices), ("sums.window", self.window_bytes)):
            if number < 0:
                raise InputError(f"{LEAVES[key].variable} needs 0 or more, but got {number}")


def settings_of(config: SumConfig, mesh: Mesh, *, secret: str = "") -> Settings:
    """Return what the settings of a job say about sums on a mesh."""
    return Settings(mesh, secret=secret, **asdict(config))

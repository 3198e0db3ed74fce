"""Settings of the backend: the mesh, how to sum on it, and where to listen.

They come from the environment (`planning/environment.py`), or from `pg_options` of
`init_process_group`.
"""

from dataclasses import dataclass

from meshmend.config import LEAVES, SECRET, TRANSPORT, SumConfig
from meshmend.errors import InputError
from meshmend.planning.catalogue import AUTO_ON_ONE_HOST
from meshmend.planning.plan import AUTO
from meshmend.topology.mesh import Mesh
from meshmend.transport.handshake import check_secret

TRANSPORTS = ("sockets", "gloo", "nccl")
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Settings:
    """How a process group runs; with `n_slices` 0 the payload's size decides.

    A peer is lost when its kernel answers nothing for `link_timeout_s`; with 0 none ever is. With
    `sums_payloads` the data of sums has checksums.
    """

    mesh: Mesh
    algorithm: str = AUTO
    n_slices: int = 0
    transport: str = TRANSPORTS[0]
    bind: str = LOOPBACK
    window_bytes: int = SumConfig().window_bytes
    sums_payloads: bool = False
    secret: str = ""
    link_timeout_s: float = 0.0

    @property
    def planned_algorithm(self) -> str:
        """The algorithm, or what `auto` is if all ranks share a host.

        Who listens on loopback cannot be reached from another host.
        """
        is_one_host = self.transport == TRANSPORTS[0] and self.bind == LOOPBACK
        return AUTO_ON_ONE_HOST if is_one_host and self.algorithm == AUTO else self.algorithm

    def __post_init__(self) -> None:
        if self.transport not in TRANSPORTS:
            raise InputError(
                f"{TRANSPORT.name} needs one of {', '.join(TRANSPORTS)}, but got {self.transport!r}"
            )
        for key, text in (("sums.algorithm", self.algorithm), ("sums.bind", self.bind)):
            if not text:
                raise InputError(f"{LEAVES[key].variable} needs a text, but got none")
        if self.secret:
            check_secret(self.secret, SECRET.name)
        for key, number in (("sums.slices", self.n_slices), ("sums.window", self.window_bytes)):
            if number < 0:
                raise InputError(f"{LEAVES[key].variable} needs 0 or more, but got {number}")


def settings_of(config: SumConfig, mesh: Mesh, *, bind: str = "", secret: str = "") -> Settings:
    """Return what the settings of a job say about sums on a mesh; `bind` is used if they do not."""
    return Settings(
        mesh,
        algorithm=config.algorithm,
        n_slices=config.slices,
        transport=config.transport,
        bind=config.bind or bind or LOOPBACK,
        window_bytes=config.window_bytes,
        sums_payloads=config.checksum,
        secret=secret,
    )


def sum_config(settings: Settings) -> SumConfig:
    """Return the settings of a job from which `settings_of` makes these."""
    return SumConfig(
        algorithm=settings.algorithm,
        slices=settings.n_slices,
        transport=settings.transport,
        bind=settings.bind,
        window_bytes=settings.window_bytes,
        checksum=settings.sums_payloads,
    )

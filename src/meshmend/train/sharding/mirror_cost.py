"""What mirrors cost a job whose chips share the update: bytes sent, memory, and time.

A mirror updates its copy by itself, with the sums that every chip of a training job has. So nothing
is sent to it. It costs the memory of a second share, and the time to update that share.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from meshmend.topology.failures import board_shape
from meshmend.topology.mesh import Mesh
from meshmend.train.sharding.mirror_placement import (
    DEFAULT_DOMAINS,
    check_domains,
    counted_domains,
    domains_of,
    mirrors_of,
)
from meshmend.train.sharding.update_shares import UpdateShares

STATE_PER_WEIGHT: Final = 2  # AdamW and LAMB keep two numbers for each weight


@dataclass(frozen=True)
class MirrorCost:
    """The cost of mirrors for each chip; of chips that differ, the most.

    `state_bytes` is what AdamW keeps without mirrors, `state_and_mirror_bytes` with them, and
    `unsharded_state_bytes` if the chips shared nothing. `update_s` is the time of a step that
    updating mirrors takes, None if it is not known how fast chips update. A job that sums by
    reduce-scatter would have to send `share_bytes` to each mirror in every step.
    """

    domains: tuple[str, ...]
    sent_bytes_per_step: int
    share_bytes: int
    state_bytes: int
    state_and_mirror_bytes: int
    unsharded_state_bytes: int
    update_s: float | None


def mirror_cost(
    mesh: Mesh,
    payload_bytes: int,
    update_bytes_per_s: float | None = None,
    *,
    domains: Sequence[str] = DEFAULT_DOMAINS,
) -> MirrorCost:
    """Return what mirrors cost on the live chips of a mesh, for weights of so many bytes.

    Raises:
        InputError: a domain is unknown, or no mirrors can be placed so.
    """
    board = board_shape(len(mesh.shape))
    check_domains(domains, mesh, board)
    counted = counted_domains(domains, {})
    mirror_of = mirrors_of(domains_of(counted, mesh.live, {}, board))
    shares = UpdateShares(payload_bytes, mirror_of)
    mirrored = [_length(shares.mirrored(rank)) for rank in range(shares.n_ranks)]
    kept = [_length(shares.kept(rank)) for rank in range(shares.n_ranks)]
    owned = _length([shares.owned(0)])
    return MirrorCost(
        tuple(counted),
        0,
        owned,
        STATE_PER_WEIGHT * owned,
        STATE_PER_WEIGHT * max(kept),
        STATE_PER_WEIGHT * payload_bytes,
        max(mirrored) / update_bytes_per_s if update_bytes_per_s else None,
    )


def _length(spans: Sequence[tuple[int, int]]) -> int:
    return sum(end - begin for begin, end in spans)

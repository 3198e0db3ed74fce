"""A worker that is connected to the coordinator."""

from dataclasses import dataclass

from meshmend.membership.messages import Status
from meshmend.topology.failures import Chip
from meshmend.transport.listener import Address


@dataclass
class ConnectedWorker:
    """A connected worker; `since` is 0 while it is not a member.

    `recalls`: it came with the latest generation that it received. Another one may have been told
    to wait, and then does not go on with a generation that was formed before it came.
    """

    chip: Chip
    address: Address
    status: Status
    connected_at: float
    since: int = 0
    recalls: bool = False

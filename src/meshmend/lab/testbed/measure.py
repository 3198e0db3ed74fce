"""Measures the rate of a testbed's link, to compare it with the rate asked for."""

import subprocess
import sys
from dataclasses import dataclass

from meshmend.errors import TestbedError
from meshmend.lab.testbed import transfer
from meshmend.lab.testbed.bed import Testbed
from meshmend.topology.failures import Link

_TRANSFER_S = 0.5
_LEAST_BYTES = 1 << 17  # a dozen packets: with fewer the first one weighs too much


@dataclass(frozen=True)
class LinkRate:
    """What TCP moved over one link, from its first chip to its second."""

    link: Link
    size_bytes: int
    time_s: float
    asked_bytes_per_s: float

    @property
    def measured_bytes_per_s(self) -> float:
        return self.size_bytes / self.time_s

    @property
    def ratio(self) -> float:
        """Measured over asked: headers take 0.7 %, so 0.993 is the most possible."""
        return self.measured_bytes_per_s / self.asked_bytes_per_s


def link_rate(bed: Testbed, link: Link | None = None) -> LinkRate:
    """Return the rate of a live link, by default the first, measured with half a second of TCP.

    Raises:
        TestbedError: the link is not up, or no data arrived.
    """
    chosen = _live_link(bed, link)
    rate = bed.link_bandwidth * bed.mesh.speed_of(chosen)
    size_bytes = max(_LEAST_BYTES, round(_TRANSFER_S * rate))
    script = [sys.executable, "-I", "-S", str(transfer.__file__)]
    address = bed.address(chosen.second)
    receiver = subprocess.Popen(
        bed.command(chosen.second, [*script, "receive", address]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with receiver:
        try:
            assert receiver.stdout is not None
            send = [*script, "send", address, receiver.stdout.readline().strip(), str(size_bytes)]
            limit_s = 10 + 4 * size_bytes / rate
            bed.run(chosen.first, send, check=True, capture_output=True, timeout=limit_s)
            words = receiver.communicate(timeout=limit_s)[0].split()
            return LinkRate(chosen, int(words[0]), float(words[1]), rate)
        except (subprocess.SubprocessError, IndexError, ZeroDivisionError):
            raise TestbedError(f"no data arrived over {chosen} of testbed {bed.name!r}") from None
        finally:
            receiver.kill()


def _live_link(bed: Testbed, link: Link | None) -> Link:
    mesh = bed.mesh
    live = mesh.live_links()
    if not live or (link is not None and link not in live):
        raise TestbedError(
            f"link_rate needs a link that is up in {mesh}, but got {link or 'no link at all'}"
        )
    return link or live[0]

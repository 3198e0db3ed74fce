"""The names of things in a testbed: chip numbers, addresses, interfaces.

Chips are numbered in row-major order of the shape, including failed ones. So number, address and
namespace stay the same when chips fail. The interface of a port is named after the direction of its
link: `up1` leads up axis 1.
"""

import ipaddress

import numpy as np

from meshmend.topology.failures import Chip
from meshmend.topology.mesh import Mesh

CHIP_INTERFACE = "chip"
_FIRST_ADDRESS = ipaddress.IPv4Address("10.0.0.1")


def intact(mesh: Mesh) -> Mesh:
    """Return the mesh without its failures: its ranks are the numbers of the chips."""
    return Mesh(mesh.shape, mesh.wrap, slow=mesh.slow)


def number_of(mesh: Mesh, chip: Chip) -> int:
    """Return the number of a chip among all chips of the shape."""
    return int(np.ravel_multi_index(chip, mesh.shape))


def address_of(number: int) -> str:
    """Return the address of a chip by its number."""
    return str(_FIRST_ADDRESS + number)


def interface_of(port: int) -> str:
    """Return the name of the interface of a port."""
    return f"{'up' if port % 2 else 'down'}{port // 2}"

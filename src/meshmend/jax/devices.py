"""Devices to chips: a `jax.sharding.Mesh` over the live chips of a mesh, in rank order.

TPU devices say where they sit (`coords`, `core_on_chip`); other devices are numbered. JAX's own
`create_device_mesh` wants a full box, so a mesh with holes is one long axis of chips.
"""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from meshmend.errors import InputError
from meshmend.topology.failures import Chip, format_chip
from meshmend.topology.graph import largest_part
from meshmend.topology.mesh import Mesh
from meshmend.topology.tiles import Tiling
from meshmend.units import some

Device = Any  # jax.Device, or a test's stand-in

CHIPS = "chips"  # the axis of all chips
DATA, MODEL = "data", "model"  # with tiles: the axis of tiles, and of the chips of a tile


def device_mesh(
    mesh: Mesh,
    devices: Sequence[Device] | None = None,
    *,
    axis_name: str = CHIPS,
    tile: str | Tiling | None = None,
) -> jax.sharding.Mesh:
    """Return a JAX mesh whose i-th device along `axis_name` sits on the i-th live chip of a plan.

    Chips that are cut off from the largest live part take no part, as in `plan`. Devices on failed
    chips are left out. Devices with coordinates go where these say: `coords[i]` counts along axis i
    of the mesh. Others are taken by number: one for each live chip, in rank order, or one for each
    chip of the shape. Where chips have several cores, a second axis `cores` numbers them: sum over
    it with `lax.psum(..., "cores")`, which leaves no chip.

    With a `tile` such as "2x2", or a tiling of the mesh, there are two axes instead: `data` numbers
    the tiles and `model` the chips of a tile by colour. Spares are left out.

    Raises:
        InputError: a live chip has no device, or the number of devices does not fit.
        TopologyError: the tile cannot be read, or none fits.
    """
    devices = jax.devices() if devices is None else list(devices)
    part = largest_part(mesh)
    if _have_places(devices):
        cores = _cores_by_place(mesh, part, devices)
    else:
        cores = [[device] for device in _by_number(mesh, part, devices)]
    grid = np.empty((len(cores), len(cores[0])), dtype=object)
    for rank, of_chip in enumerate(cores):
        grid[rank, :] = of_chip
    if tile is not None:
        return _tile_mesh(mesh, grid, tile)
    if grid.shape[1] == 1:
        return jax.sharding.Mesh(grid[:, 0], (axis_name,))
    return jax.sharding.Mesh(grid, (axis_name, "cores"))


def _tile_mesh(mesh: Mesh, grid: np.ndarray, tile: str | Tiling) -> jax.sharding.Mesh:
    tiling = mesh.tiles(tile) if isinstance(tile, str) else tile
    if grid.shape[1] > 1:
        raise InputError(
            f"device_mesh with tiles needs one core on every chip, but got {grid.shape[1]}"
        )
    ranks = [[tiling.mesh.rank_of[chip] for chip in each] for each in tiling.tiles]
    return jax.sharding.Mesh(grid[:, 0][np.array(ranks)], (DATA, MODEL))


def live_mesh(mesh: Mesh, devices: Sequence[Device] | None = None) -> Mesh:
    """Return a mesh less the chips that have no device: a missing device is a hole.

    Raises:
        InputError: the devices have no coordinates, or sit outside the mesh.
    """
    devices = jax.devices() if devices is None else list(devices)
    if not _have_places(devices):
        raise InputError(
            "live_mesh needs devices that say where they sit, such as those of a TPU; name the "
            "failed chips yourself with mesh.without(...)"
        )
    present = {_chip_of(device, mesh) for device in devices}
    missing = [chip for chip in mesh.live if chip not in present]
    return mesh.without(*(format_chip(chip) for chip in missing))


def _have_places(devices: Sequence[Device]) -> bool:
    """Whether devices say where they sit; what GPUs and CPUs may say is no place in a mesh."""
    return bool(devices) and all(
        hasattr(device, "coords") and device.platform not in {"cpu", "cuda", "gpu", "rocm"}
        for device in devices
    )


def _by_number(mesh: Mesh, part: Mesh, devices: Sequence[Device]) -> list[Device]:
    if len(devices) == part.n_live:
        return list(devices)
    if len(devices) == mesh.n_chips:
        numbers = np.ravel_multi_index(tuple(part.coordinates.T), mesh.shape)
        return [devices[number] for number in numbers]
    whole = "" if mesh.n_chips == part.n_live else f", or {mesh.n_chips}, one for each chip"
    raise InputError(
        f"device_mesh on {mesh} needs {part.n_live} devices, one for each live chip{whole}, but "
        f"got {len(devices)}"
    )


def _cores_by_place(mesh: Mesh, part: Mesh, devices: Sequence[Device]) -> list[list[Device]]:
    """Return the devices of each live chip in rank order, its cores by number."""
    found: dict[Chip, dict[int, Device]] = {}
    for device in devices:
        found.setdefault(_chip_of(device, mesh), {})[getattr(device, "core_on_chip", 0)] = device
    if missing := [chip for chip in part.live if chip not in found]:
        raise InputError(
            f"device_mesh needs a device on every live chip of {mesh}, but {some(missing)} "
            f"{'has' if len(missing) == 1 else 'have'} none; fail them with mesh.without(...), as "
            "live_mesh(mesh, devices) does"
        )
    counts = {len(found[chip]) for chip in part.live}
    if len(counts) > 1:
        raise InputError(
            f"device_mesh needs equally many cores on every live chip, but got from {min(counts)} "
            f"to {max(counts)}"
        )
    return [[found[chip][core] for core in sorted(found[chip])] for chip in part.live]


def _chip_of(device: Device, mesh: Mesh) -> Chip:
    """Return where a device sits; axes beyond those of the mesh must be of one chip."""
    coords = tuple(int(at) for at in device.coords)
    chip, rest = coords[: len(mesh.shape)], coords[len(mesh.shape) :]
    if any(rest) or chip not in mesh:
        raise InputError(
            f"device_mesh needs devices inside the mesh {mesh}, but {device} sits at {coords}"
        )
    return chip

"""Checks of `device_mesh` with stand-ins for TPU devices; `test_devices` runs this as a script."""

import sys
from dataclasses import dataclass

import jax

from meshmend.jax import device_mesh, live_mesh
from meshmend.topology.text import parse_mesh
from virtual_devices import refused, run_checks

HOLE = parse_mesh("4x4", fail=["2x2@0,2"])


@dataclass(frozen=True)
class Tpu:
    """What JAX tells of a TPU core."""

    id: int
    coords: tuple[int, ...]
    core_on_chip: int = 0
    process_index: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v4"


def cores(per_chip: int = 1, *, missing: frozenset[tuple[int, ...]] = frozenset()) -> list[Tpu]:
    """Return the cores of a 4x4 slice in an order that is not ours."""
    return [
        Tpu(10 * (4 * x + y) + core, (x, y, 0), core)
        for y in range(4)
        for x in range(4)
        for core in range(per_chip)
        if (x, y) not in missing
    ]


def check_by_number() -> None:
    devices = jax.devices()
    assert list(device_mesh(HOLE, devices[:12]).devices) == devices[:12]
    assert device_mesh(HOLE, devices[:12]).axis_names == ("chips",)
    whole = device_mesh(HOLE, devices[:16], axis_name="data")
    assert [device.id for device in whole.devices] == [0, 1, 4, 5, *range(8, 16)]
    assert whole.axis_names == ("data",)
    refused(
        "device_mesh on 4x4 less 2x2@0,2 needs 12 devices, one for each live chip, or 16, one for "
        "each chip, but got 13",
        lambda: device_mesh(HOLE, devices[:13]),
    )
    refused("device_mesh on 4x4 needs 16 devices", lambda: device_mesh(parse_mesh("4x4"), []))
    assert len(device_mesh(parse_mesh("4x4")).devices) == 16


def check_by_place() -> None:
    made = device_mesh(HOLE, cores())
    assert [device.coords[:2] for device in made.devices] == list(HOLE.live)
    missing = frozenset(HOLE.failed)
    assert list(device_mesh(HOLE, cores(missing=missing)).devices) == list(made.devices)
    refused(
        "needs a device on every live chip of 4x4 less 2x2@0,2, but (3, 3) has none",
        lambda: device_mesh(HOLE, cores(missing=frozenset([(3, 3)]))),
    )
    refused(
        "needs devices inside the mesh 2x2, but Tpu(id=80",
        lambda: device_mesh(parse_mesh("2x2"), cores()),
    )


def check_missing_devices_are_holes() -> None:
    missing = frozenset([(0, 2), (0, 3), (1, 2), (1, 3)])
    found = live_mesh(parse_mesh("4x4"), cores(missing=missing))
    assert found == HOLE
    assert live_mesh(parse_mesh("4x4"), cores()) == parse_mesh("4x4")
    refused("name the failed chips yourself", lambda: live_mesh(HOLE, jax.devices()))


def check_several_cores() -> None:
    made = device_mesh(HOLE, cores(2))
    assert made.axis_names == ("chips", "cores")
    assert made.devices.shape == (12, 2)
    for chip, of_chip in zip(HOLE.live, made.devices, strict=True):
        assert [core.coords[:2] for core in of_chip] == [chip, chip]
        assert [core.core_on_chip for core in of_chip] == [0, 1]
    refused("equally many cores", lambda: device_mesh(HOLE, cores(2)[1:]))


def check_cut_off_chips_take_no_part() -> None:
    mesh = parse_mesh("1x5", fail=["0,3"])
    assert len(device_mesh(mesh, jax.devices()[:3]).devices) == 3


CHECKS = {
    name.removeprefix("check_").replace("_", " "): check
    for name, check in list(globals().items())
    if name.startswith("check_")
}

if __name__ == "__main__":
    run_checks(CHECKS, sys.argv[1:])

"""Devices to chips: by place where devices have one, by number elsewhere, refused otherwise."""

from pathlib import Path

import pytest

from virtual_devices import needs_jax, outcomes

pytestmark = needs_jax

CHECKS = [
    "by number",
    "by place",
    "missing devices are holes",
    "several cores",
    "cut off chips take no part",
]


@pytest.fixture(scope="module")
def ended() -> dict[str, str]:
    return outcomes(Path(__file__).with_name("device_checks.py"), 16)


@pytest.mark.parametrize("check", CHECKS)
def test_devices_sit_on_chips(check: str, ended: dict[str, str]) -> None:
    assert ended[check] == "ok"


def test_no_check_is_left_out(ended: dict[str, str]) -> None:
    assert list(ended) == CHECKS

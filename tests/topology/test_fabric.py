"""Fabrics: the presets are there, and any figure can be replaced."""

from typing import Any

import pytest

from meshmend.errors import InputError
from meshmend.topology.fabric import FABRICS, Fabric, fabric


def test_every_machine_of_the_list_has_a_preset_with_a_source() -> None:
    assert list(FABRICS) == [
        "reference",
        *(f"tpu-{version}" for version in ("v2", "v3", "v4", "v5e", "v5p", "v6e", "v7")),
        "trainium2",
        "wormhole-galaxy",
        "dojo",
        "dgx-spark",
        "testbed-50mbit",
    ]
    assert all(preset.source and preset.usual_mesh for preset in FABRICS.values())
    assert all(fabric(name).name == name for name in FABRICS)


def test_the_reference_has_the_figures_that_results_are_compared_by() -> None:
    reference = fabric("reference")

    assert reference.link_bandwidth_bytes_per_s == 70e9
    assert reference.hop_latency_s == 0.5e-6
    assert reference.message_overhead_s == 50e-9
    assert reference.chip_bandwidth_bytes_per_s is None
    assert str(reference) == "reference: 70 GB/s a link, 500 ns a hop, 50 ns a message"


def test_an_override_stars_the_name_once_and_keeps_the_rest() -> None:
    faster = fabric("tpu-v3").with_(link_bandwidth_bytes_per_s=100e9)

    assert faster.name == "tpu-v3*"
    assert faster.link_bandwidth_bytes_per_s == 100e9
    assert faster.hop_latency_s == fabric("tpu-v3").hop_latency_s
    assert faster.with_(chip_bandwidth_bytes_per_s=1e12).name == "tpu-v3*"
    assert str(faster.with_(chip_bandwidth_bytes_per_s=1e12)).endswith(", 1 TB/s a chip")


def test_an_override_that_changes_nothing_is_the_preset() -> None:
    assert fabric("tpu-v3").with_() is fabric("tpu-v3")
    assert fabric("tpu-v3").with_(hop_latency_s=1e-6) is fabric("tpu-v3")


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ({"name": ""}, "Fabric needs a name"),
        ({"link_bandwidth_bytes_per_s": 0.0}, "fabric x needs a positive link_bandwidth"),
        ({"link_bandwidth_bytes_per_s": float("inf")}, "needs a positive link_bandwidth"),
        ({"hop_latency_s": -1e-6}, "needs zero or a positive hop_latency_s, but got -1e-06"),
        ({"message_overhead_s": float("nan")}, "needs zero or a positive message_overhead_s"),
        ({"chip_bandwidth_bytes_per_s": 0.0}, "needs a positive chip_bandwidth_bytes_per_s"),
        ({"hop_latency_s": "1us"}, "needs zero or a positive hop_latency_s, but got '1us'"),
        ({"queue_bytes": -1.0}, "needs zero or a positive queue_bytes, but got -1.0"),
        ({"processors": 2}, "its processors as Processors, but got 2"),
    ],
)
def test_impossible_figures_are_refused(figures: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "name": "x",
        "link_bandwidth_bytes_per_s": 1e9,
        "hop_latency_s": 0.0,
        "message_overhead_s": 0.0,
    }
    assert Fabric(**good).name == "x"

    with pytest.raises(InputError, match=message):
        Fabric(**(good | figures))


@pytest.mark.parametrize(
    "figures",
    [
        "6.15MB/s,44us,12us",
        "1.23GB/s,0s,1.2ns",
        "100B/s,2s,0s",
        "6.15MB/s,20us,12us,2,3us,865MB/s,250us",
        "6.15MB/s,20us,12us,18KB",
        "6.15MB/s,20us,12us,18KB,2,3us,865MB/s,250us",
    ],
)
def test_figures_are_written_as_they_are_read(figures: str) -> None:
    assert fabric(figures).figures == figures


def test_a_fabric_without_queues_names_none() -> None:
    assert "queue_bytes" not in fabric("reference").summary()
    assert fabric("6.15MB/s,20us,12us,18KB").summary()["queue_bytes"] == 18e3
    assert str(fabric("6.15MB/s,20us,12us,18KB")).endswith(", 12 us a message, 18 KB queued")


def test_a_fabric_without_processors_names_none() -> None:
    shared = fabric("6.15MB/s,20us,12us,2,3us,865MB/s,250us")

    assert "processors" not in fabric("reference").summary()
    assert shared.summary()["processors"] == {
        "n": 2, "message_s": 3e-6, "bytes_per_s": 865e6, "start_s": 250e-6,
    }  # fmt: skip
    assert str(shared).endswith(
        ", 12 us a message, 2 processors (250 us a chip, 3 us a message, 865 MB/s)"
    )


@pytest.mark.parametrize(
    ("figures", "message"),
    [
        ("6MB/s,2us,1us,2.5,3us,1GB/s,0s", "a whole number of processors, but got '2.5'"),
        ("6MB/s,2us,1us,0,3us,1GB/s,0s", "from one to 1048576 processors, but got 0"),
        ("6MB/s,2us,1us,99999999999999999999,3us,1GB/s,0s", "from one to 1048576 processors"),
        ("6MB/s,2us,1us,2,3us,0B/s,0s", "positive"),
        ("6MB/s,2us,1us,2,3us", "the number of processors that chips share"),
    ],
)
def test_impossible_processors_are_refused(figures: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        fabric(figures)


def test_an_unknown_fabric_is_refused_with_the_names_there_are() -> None:
    with pytest.raises(InputError, match=r"needs one of reference, tpu-v2, .* but got 'tpu-v9'"):
        fabric("tpu-v9")

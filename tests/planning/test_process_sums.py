"""Which plans processes sum by: what is named, else what copies few bytes."""

from meshmend.planning.catalogue import CollectiveCall, proved_schedule
from meshmend.planning.plan import plan
from meshmend.topology.text import parse_mesh

SUM = CollectiveCall("allreduce")
TORUS = parse_mesh("4x4", wrap="all", fail=["1,1"])
CLASS_BYTES = 1 << 17


def test_auto_sums_on_trees_where_a_mesh_would_send_whole_sums_of_regions() -> None:
    on_a_mesh = plan(TORUS, payload=CLASS_BYTES).schedule
    on_processes, _ = proved_schedule(TORUS, "auto", SUM, CLASS_BYTES)

    assert (on_a_mesh.algorithm, on_processes.algorithm) == ("regions-2", "trees")


def test_auto_takes_an_exchange_that_divides_sums_first() -> None:
    full = parse_mesh("4x4", wrap="all")

    assert proved_schedule(full, "auto", SUM, CLASS_BYTES)[0].algorithm == "exchange-1"


def test_auto_sums_on_trees_where_an_exchange_has_no_rings() -> None:
    open_mesh = parse_mesh("4x4")
    on_a_mesh = plan(open_mesh, payload=CLASS_BYTES).schedule
    on_processes, _ = proved_schedule(open_mesh, "auto", SUM, CLASS_BYTES)

    assert (on_a_mesh.algorithm, on_processes.algorithm) == ("exchange-1", "trees")


def test_an_exchange_that_is_named_is_taken() -> None:
    assert proved_schedule(TORUS, "exchange", SUM, CLASS_BYTES)[0].algorithm == "exchange"

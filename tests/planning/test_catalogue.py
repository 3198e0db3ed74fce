"""Plans of one rank of a mesh, and those that it makes for the mesh that comes next."""

import pytest

from meshmend.errors import InputError
from meshmend.planning.catalogue import Catalogue, CollectiveCall, is_remembered, payload_class
from meshmend.topology.mesh import Mesh

SUM, LAST = CollectiveCall("allreduce"), CollectiveCall("broadcast", root=11)
WHOLE, LEFT = Mesh((3, 4)), Mesh((3, 4)).without("1x1@1,1")


def test_what_was_called_on_a_mesh_is_planned_for_the_next() -> None:
    catalogue = Catalogue(WHOLE, "auto", 0, 0)
    catalogue.task(SUM, 50_000, "float32")
    catalogue.task(LAST, 10, "float32")

    catalogue.plan_alike(LEFT)

    assert is_remembered(LEFT, "auto", SUM, payload_class(SUM, 200_000))
    assert not is_remembered(LEFT, "auto", LAST, payload_class(LAST, 40))  # it has no rank 11


def test_what_has_no_plan_on_the_next_mesh_is_refused_when_it_is_called_there() -> None:
    catalogue = Catalogue(WHOLE, "two-d", 0, 0)
    catalogue.task(SUM, 50_000, "float32")

    catalogue.plan_alike(LEFT)

    with pytest.raises(InputError, match="two-d"):
        Catalogue(LEFT, "two-d", 0, 0).task(SUM, 50_000, "float32")

"""Reads a collective of another program, whichever of the XML formats it is in."""

from meshmend.planning.formats.forestcoll_import import FORESTCOLL_TAG, schedule_from_forestcoll
from meshmend.planning.formats.msccl_import import schedule_from_msccl
from meshmend.planning.formats.xml_reading import xml_root
from meshmend.schedule.table import Schedule
from meshmend.topology.mesh import Mesh


def schedule_from_xml(text: str, mesh: Mesh) -> Schedule:
    """Return the collective of MSCCL XML or of ForestColl's trees for a mesh; it is not proved yet.

    Raises:
        InputError: neither format, or what a table cannot hold.
    """
    root = xml_root(text)
    if root.tag == FORESTCOLL_TAG:
        return schedule_from_forestcoll(root, mesh)
    return schedule_from_msccl(root, mesh)

"""The paper's way to a sharded update, as a picture after figure 10: owners and forwarding.

The paper names it as future work: "the updated weights can be forwarded to the nodes that are
neighbors of the failed chips". The caption has its simulated time beside that of our trees.
"""

from meshmend.lab.paper.figure_steps import update_steps
from meshmend.pages.draw.mesh_picture import ground_keys
from meshmend.pages.draw.overlays import layout_keys
from meshmend.pages.draw.svg import framed
from meshmend.planning.pricing import TREES, Question, price
from meshmend.schedule.table import Collective
from meshmend.topology.fabric import FABRICS
from meshmend.topology.mesh import Mesh
from meshmend.trees.pairs import fault_tolerant_layout
from meshmend.units import format_time

_HOLED = Mesh((8, 8)).without("2x2@2,4")
_PAYLOAD_BYTES = 100e6


def update_figure() -> str:
    """Return the picture as an SVG document."""
    question = Question(_HOLED, _PAYLOAD_BYTES, FABRICS["reference"], Collective.SHARDED_UPDATE)
    theirs, ours = (price(question, name) for name in ("ft-two-d", TREES))
    assert theirs is not None, "without a time to beat there is always a price"
    assert ours is not None, "without a time to beat there is always a price"
    times = f"{format_time(theirs.time_s)}; trees hung from every chip: {format_time(ours.time_s)}"
    layout = fault_tolerant_layout(_HOLED)
    return framed(
        update_steps(_HOLED),
        title="After figure 10: a sharded update with forwarding",
        keys=[*layout_keys(layout), *ground_keys(_HOLED)],
        caption="Chips of the complete blue rings own the weights. The yellow neighbours of the "
        "failed chips forward their gradients to them and are handed the updated weights. "
        f"100 MB on reference: {times}.",
    )

"""What the page is told when it opens: the first question, and what there is to choose from."""

from typing import Any

from meshmend import __version__
from meshmend.pages.explore.explorer_question import (
    CHOICES,
    MOST_CHIPS,
    ExplorerQuestion,
    document_of,
)
from meshmend.topology.fabric import FABRICS
from meshmend.topology.failures import REGION_SHAPES


def page_start(
    question: ExplorerQuestion, *, is_live: bool = False, may_inject: bool = False
) -> dict[str, Any]:
    """Return the start of a page as a JSON value; a live page follows a job."""
    return {
        "version": __version__,
        "question": document_of(question),
        "algorithms": list(CHOICES),
        "fabrics": {name: str(preset) for name, preset in FABRICS.items()},
        "regions": {name: list(shape) for name, shape in REGION_SHAPES.items()},
        "most_chips": MOST_CHIPS,
        "live": is_live,
        "allow_faults": may_inject,
    }

"""What the page asks: a mesh, a payload, a fabric and an algorithm, in the words of the options.

A question is a value that crosses to the planner processes; its texts are checked once, here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from meshmend import __version__
from meshmend.errors import InputError
from meshmend.planning.plan import AUTO
from meshmend.planning.target import Target
from meshmend.schedule.algorithm_names import SUM_NAMES, check_algorithm_name
from meshmend.topology.fabric import FABRICS
from meshmend.topology.failures import REGION_SHAPES
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import mesh_words, parse_mesh

PAGE: Final = Path(__file__).parent / "page"  # its files
MOST_CHIPS: Final = 4096  # of a picture: 16x16x16
# Machines to begin with; their figures are those of the fabrics, see `meshmend fabrics`.
_MACHINES: Final = (
    {"name": "TPU v4 cube", "mesh": "4x4x4", "wrap": "all", "fabric": "tpu-v4"},
    {"name": "TPU v5e pod", "mesh": "16x16", "wrap": "all", "fabric": "tpu-v5e"},
    {"name": "Galaxy", "mesh": "8x4", "wrap": "all", "fabric": "wormhole-galaxy"},
    {"name": "Trn2 host", "mesh": "4x4", "wrap": "all", "fabric": "trainium2"},
    {"name": "Dojo tile", "mesh": "5x5", "wrap": "none", "fabric": "dojo"},
    {"name": "ring of 8", "mesh": "8", "wrap": "all", "fabric": "reference"},
)
CHOICES: Final = (AUTO, *SUM_NAMES)


@dataclass(frozen=True)
class ExplorerQuestion:
    """What does this algorithm cost for this target on this mesh?"""

    mesh: Mesh
    target: Target
    algorithm: str = AUTO

    def __post_init__(self) -> None:
        check_algorithm_name(self.algorithm, CHOICES)
        if self.mesh.n_chips > MOST_CHIPS:
            raise InputError(
                f"the explorer draws at most {MOST_CHIPS} chips, but {self.mesh} has "
                f"{self.mesh.n_chips}; `meshmend plan` and `simulate` take larger meshes"
            )
        if self.target.fabric.name.endswith("*"):
            raise InputError("the explorer takes the fabrics that `meshmend fabrics` lists")

    @property
    def full_mesh(self) -> Mesh:
        """The mesh before anything failed."""
        return Mesh(self.mesh.shape, self.mesh.wrap)


def question_of(document: Mapping[str, Any]) -> ExplorerQuestion:
    """Return the question that a JSON object of the page holds.

    Raises:
        InputError: a field is missing, is no text, or cannot be read.
    """
    words = {name: _text(document, name) for name in ("mesh", "wrap", "payload", "fabric")}
    fail = document.get("fail", [])
    if not isinstance(fail, list) or not all(isinstance(each, str) for each in fail):
        raise InputError(f"a question needs `fail` as a list of texts, but got {fail!r}")
    mesh = parse_mesh(words["mesh"], wrap=words["wrap"], fail=fail)
    target = Target().with_(words["payload"], words["fabric"])
    return ExplorerQuestion(mesh, target, _text(document, "algorithm"))


def document_of(question: ExplorerQuestion) -> dict[str, Any]:
    """Return the JSON object that `question_of` reads back."""
    words = mesh_words(question.mesh)
    return {
        "mesh": words["shape"],
        "wrap": words["wrap"],
        "fail": words["fail"],
        "payload": f"{question.target.payload_bytes:.0f}B",
        "fabric": question.target.fabric.name,
        "algorithm": question.algorithm,
    }


def _text(document: Mapping[str, Any], name: str) -> str:
    value = document.get(name)
    if not isinstance(value, str):
        raise InputError(f"a question needs the text `{name}`, but got {value!r}")
    return value


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
        "machines": list(_MACHINES),
        "most_chips": MOST_CHIPS,
        "live": is_live,
        "allow_faults": may_inject,
    }

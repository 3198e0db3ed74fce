"""What the page asks: a mesh, what runs on it, a payload and a fabric, in the words of the options.

A question is a value that crosses to the planner processes; its texts are checked once, here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from meshmend import __version__
from meshmend.errors import InputError
from meshmend.planning.plan import AUTO
from meshmend.planning.target import Question, Target, collective_named
from meshmend.schedule.algorithm_names import (
    ALGORITHM_NAMES,
    SUM_NAMES,
    check_algorithm_name,
)
from meshmend.schedule.table import Collective
from meshmend.topology.fabric import FABRICS
from meshmend.topology.failures import REGION_SHAPES
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import mesh_words, parse_mesh, parse_tile

PAGE: Final = Path(__file__).parent / "page"  # its files
MOST_CHIPS: Final = 4096  # of a picture: 16x16x16
# Machines to begin with; their figures are those of the fabrics, see `meshmend fabrics`.
_MACHINES: Final = (
    {"name": "TPU v4 cube", "mesh": "4x4x4", "wrap": "all", "fabric": "tpu-v4"},
    {"name": "TPU v5e pod", "mesh": "16x16", "wrap": "all", "fabric": "tpu-v5e"},
    {"name": "Galaxy", "mesh": "8x4", "wrap": "all", "fabric": "wormhole-galaxy"},
    {"name": "Trn2 host", "mesh": "4x4", "wrap": "all", "fabric": "trainium2"},
    {"name": "Dojo tile", "mesh": "5x5", "wrap": "none", "fabric": "dojo"},
    {"name": "Spark ring", "mesh": "3", "wrap": "all", "fabric": "dgx-spark"},
)
_MOST_CHIPS_OF_ALL_TO_ALL: Final = 512
_TILES: Final = ("1x2", "2x2", "2x4")  # that the page offers; others come from --tile
# The algorithms to choose from, by what runs.
CHOICES: Final = {
    Collective.ALLREDUCE: (AUTO, *SUM_NAMES),
    Collective.ALL_TO_ALL: (AUTO, *(name for name in ALGORITHM_NAMES if name not in SUM_NAMES)),
}


@dataclass(frozen=True)
class ExplorerQuestion:
    """What does this algorithm cost for this target on this mesh?

    With a `tile`, chips of one colour are summed, and the payload is that of a tile.
    """

    mesh: Mesh
    target: Target
    algorithm: str = AUTO
    collective: Collective = Collective.ALLREDUCE
    tile: str = ""

    def __post_init__(self) -> None:
        if self.collective not in CHOICES:
            raise InputError(
                f"the explorer shows {' and '.join(CHOICES)}, but got {self.collective}; "
                "`meshmend plan` and `simulate` take all collectives"
            )
        check_algorithm_name(self.algorithm, CHOICES[self.collective])
        if self.tile:
            parse_tile(self.tile)
            if self.algorithm != AUTO or self.collective is not Collective.ALLREDUCE:
                raise InputError(
                    f"tiles have a plan of their own, but got {self.collective} by "
                    f"{self.algorithm}; leave out the tile, or the algorithm and the collective"
                )
        if self.mesh.n_chips > MOST_CHIPS:
            raise InputError(
                f"the explorer draws at most {MOST_CHIPS} chips, but {self.mesh} has "
                f"{self.mesh.n_chips}; `meshmend plan` and `simulate` take larger meshes"
            )
        is_all_to_all = self.collective is Collective.ALL_TO_ALL
        if is_all_to_all and self.mesh.n_chips > _MOST_CHIPS_OF_ALL_TO_ALL:
            raise InputError(
                f"the explorer shows an all-to-all of at most {_MOST_CHIPS_OF_ALL_TO_ALL} chips, "
                f"but {self.mesh} has {self.mesh.n_chips}; `meshmend simulate` takes larger meshes"
            )
        if self.target.fabric.name.endswith("*"):
            raise InputError("the explorer takes the fabrics that `meshmend fabrics` lists")

    @property
    def full_mesh(self) -> Mesh:
        """The mesh before anything failed or became slow."""
        return Mesh(self.mesh.shape, self.mesh.wrap)

    def on(self, part: Mesh) -> Question:
        """Return what the planner is asked, for a connected mesh."""
        return Question(part, self.target.payload_bytes, self.target.fabric, self.collective)


def question_of(document: Mapping[str, Any]) -> ExplorerQuestion:
    """Return the question that a JSON object of the page holds.

    Raises:
        InputError: a field is missing, is no text, or cannot be read.
    """
    words = {name: _text(document, name) for name in ("mesh", "wrap", "payload", "fabric")}
    parts = {name: _texts(document, name) for name in ("fail", "slow")}
    mesh = parse_mesh(words["mesh"], wrap=words["wrap"], **parts)
    target = Target().with_(words["payload"], words["fabric"])
    more = {"collective": str(Collective.ALLREDUCE), "tile": "", **document}
    return ExplorerQuestion(
        mesh,
        target,
        _text(document, "algorithm"),
        collective_named(_text(more, "collective")),
        _text(more, "tile"),
    )


def document_of(question: ExplorerQuestion) -> dict[str, Any]:
    """Return the JSON object that `question_of` reads back."""
    words = mesh_words(question.mesh)
    return {
        "mesh": words["shape"],
        "wrap": words["wrap"],
        "fail": words["fail"],
        "slow": words.get("slow", []),
        "payload": f"{question.target.payload_bytes:.0f}B",
        "fabric": question.target.fabric.name,
        "algorithm": question.algorithm,
        "collective": str(question.collective),
        "tile": question.tile,
    }


def _text(document: Mapping[str, Any], name: str) -> str:
    value = document.get(name)
    if not isinstance(value, str):
        raise InputError(f"a question needs the text `{name}`, but got {value!r}")
    return value


def _texts(document: Mapping[str, Any], name: str) -> list[str]:
    value = document.get(name, [])
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise InputError(f"a question needs `{name}` as a list of texts, but got {value!r}")
    return value


def page_start(
    question: ExplorerQuestion, *, is_live: bool = False, may_inject: bool = False
) -> dict[str, Any]:
    """Return the start of a page as a JSON value; a live page follows a job."""
    own = question.target.fabric  # perhaps of the user's figures, which no preset has
    return {
        "version": __version__,
        "question": document_of(question),
        "algorithms": {str(each): list(names) for each, names in CHOICES.items()},
        "tiles": sorted({*_TILES, question.tile} - {""}),
        "fabrics": {each.name: str(each) for each in (*FABRICS.values(), own)},
        "regions": {name: list(shape) for name, shape in REGION_SHAPES.items()},
        "machines": list(_MACHINES),
        "most_chips": MOST_CHIPS,
        "live": is_live,
        "allow_faults": may_inject,
    }

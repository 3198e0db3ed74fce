"""The matrix of loops: which cells there are, how one row is run, and what its result must be.

A row is a style on a front. Its cells are the moments in which a chip is killed; one job goes
through several of them, with a repair after each, and is compared after each step with a plain
loop in one process, without meshmend. So a step that differs says which cell is wrong.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from forked_script import JAX, TORCH, run_forked
from jax_styles import JAX_STYLES
from styles import EXACT, STYLES

CHIPS: Final = ("0,0", "0,1", "1,0", "1,1")
MOMENTS: Final = ("forward", "backward", "sum", "update", "recovery")
MOMENTS_OF: Final[Mapping[str, tuple[str, ...]]] = {
    "job": MOMENTS,
    "group": MOMENTS,
    "trainer": MOMENTS,
    "jax": ("forward", "sum", "update", "recovery"),  # one program is forward and backward
}
# The last is what `torch.compile` would import on every chip.
_TORCH_AND_MORE: Final = (*TORCH, "meshmend.train.hf", "torch._inductor.compile_fx")
_APART: Final = 4  # steps from one kill to the next: redo, repair, gate
_FIRST: Final = 2  # steps before the first kill: calm
LOSS_OF_JAX: Final = 1e-6  # a JAX job sums losses in float32


@dataclass(frozen=True)
class Row:
    """A style on a front, and the moments to go through."""

    style: str
    front: str
    moments: tuple[str, ...]
    turn: int = 0  # which chips die: so that each moment also hits the chip that leads
    passes: int = 1
    tolerance: float = EXACT
    by_share: bool = False
    refused: str = ""
    like: str = ""  # a style that differs in nothing that a job sees

    def __str__(self) -> str:
        return f"{self.style}-{self.front}"

    def kills(self) -> list[tuple[int, str, str]]:
        """Return for each kill the steps done before it, its moment and its chip."""
        found = []
        for at, moment in enumerate(self.moments):
            step = _FIRST + _APART * at
            if moment == "recovery":
                found += [(step, "forward", "1,1"), (step, "recovery", "0,1")]
            else:
                # Running statistics are those of rank 0 in a process group.
                chips = CHIPS[1:] if self.by_share else CHIPS
                found.append((step, moment, chips[(self.turn + at) % len(chips)]))
        return found

    def steps(self) -> int:
        return _FIRST + _APART * len(self.moments)

    def arguments(self) -> dict[str, Any]:
        kills = self.kills()
        repairs = [f"repair {chip} at {at + 1}" for at, _, chip in kills]
        told = ("update", "recovery")  # the others are moments of the loop, not of meshmend
        injected = [f"kill {chip} at {at} in {what}" for at, what, chip in kills if what in told]
        return {
            "style": self.style,
            "front": self.front,
            "passes": self.passes,
            "steps": self.steps(),
            "kills": kills,
            "gates": sorted({at + 2 for at, _, _ in kills}),
            "inject": repairs + injected,
        }

    def moment_of(self, step: int) -> str:
        """Return the name of the cell that a step belongs to: the last kill before it is over."""
        at = min((step - 1 - _FIRST) // _APART, len(self.moments) - 1)
        if at < 0:
            return "calm"
        is_back = (step - 1 - _FIRST) % _APART >= 2
        return f"{self.moments[at]}, repair" if is_back else self.moments[at]


def check(row: Row, folder: Path) -> None:
    """Run a row and compare it with its reference.

    Raises:
        AssertionError: it says in which cell what differs.
    """
    (folder / "ledger").mkdir()
    script = str(Path(__file__).parent / "cell.py")
    imported = JAX if row.front == "jax" else _TORCH_AND_MORE
    done = run_forked(script, str(folder), json.dumps(row.arguments()), imported=imported)
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    notes = result["notes"]
    last = max((each["step"] for each in notes if "step" in each), default=0)
    if row.refused:
        assert not result["finished"], f"not refused, though it should say {row.refused!r}"
        assert row.refused in result["why"], result["why"]
        # What a loop does after its first step is seen in the second one.
        most = 1 if "must not step" in row.refused else 0
        assert last <= most, f"refused after step {last}"
        return
    ended = f"ended in step {last + 1} ({row.moment_of(last + 1)}): {result['why']}"
    assert result["finished"], f"{ended}\n{done.stderr[-3000:]}"
    _compare(row, notes, result["expected"])
    found = result["audit"]
    assert (found["steps"], found["split"]) == (row.steps(), []), found
    assert (found["lost"], found["repeated"]) == (0, 0), found
    n_whole = sum(n_chips == len(CHIPS) for n_chips in result["chips"])
    assert n_whole >= 1 + len(row.moments), f"the mesh was whole {n_whole} times only"


def _compare(row: Row, notes: Sequence[dict[str, Any]], expected: Sequence[Any]) -> None:
    for each in sorted(notes, key=lambda each: each.get("step", math.inf)):
        step = each.get("step", row.steps())
        _, state = expected[step - 1 if "step" in each else -1]
        for name, values in state.items():
            is_local = row.front == "group" and each["rank"] != 0 and "running" in name
            off = 0.0 if is_local else distance(each["state"][name], values)
            assert off <= row.tolerance, (
                f"{row.moment_of(step)}: {name} of chip {each['chip']} after step {step}: {off:.2g}"
            )
    for step, loss in _losses(row.front, notes):
        off = abs(loss - expected[step - 1][0])
        most = max(row.tolerance, LOSS_OF_JAX if row.front == "jax" else 0.0)
        assert off <= most, f"{row.moment_of(step)}: loss {step}: {off:.2g}"


def _losses(front: str, notes: Sequence[dict[str, Any]]) -> Iterator[tuple[int, float]]:
    """Yield the losses of whole batches: in a process group, the means of all chips' shares."""
    by_step: dict[tuple[int, int], dict[int, float]] = {}
    for each in notes:
        if "step" not in each:
            continue
        if front != "group":
            yield each["step"], each["loss"]
        by_step.setdefault((each["step"], each["n_chips"]), {})[each["rank"]] = each["loss"]
    for (step, n_chips), losses in by_step.items():
        if front == "group" and len(losses) == n_chips:
            yield step, sum(losses.values()) / n_chips


def distance(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return how far numbers are apart; where one is not finite, the other must be the same."""
    if len(ours) != len(theirs):
        return math.inf
    return max(
        (
            abs(one - other) if math.isfinite(one) and math.isfinite(other) else math.inf
            for one, other in zip(ours, theirs, strict=True)
            if one != other
        ),
        default=0.0,
    )


def rows() -> list[Row]:
    """Return all rows, with all moments of their fronts."""
    found = [
        Row(
            style.name,
            front,
            MOMENTS_OF[front],
            turn,
            style.passes,
            style.tolerance,
            style.by_share,
            style.refused.get(front, ""),
        )
        for turn, style in enumerate(STYLES)
        for front in style.fronts
    ]
    return found + [
        Row(style.name, "jax", MOMENTS_OF["jax"], turn, refused=style.refused, like=style.like)
        for turn, style in enumerate(JAX_STYLES)
    ]

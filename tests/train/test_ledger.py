"""The ledger: an honest run audits clean, and every mutant of it is found."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend.errors import InputError
from meshmend.train.ledger import Audit, Ledger, audit
from meshmend.train.samples import share_of

BATCH, STEPS = 10, 4


def train(folder: Path, n_chips: int = 3) -> None:
    """Write what chips write down that do four steps in generation 1."""
    ledgers = [Ledger(folder, (0, column)) for column in range(n_chips)]
    for step in range(1, STEPS + 1):
        for rank, ledger in enumerate(ledgers):
            ledger.tries(step, 1, share_of((step - 1) * BATCH, BATCH, rank, n_chips))
        for ledger in ledgers:
            ledger.did(step, 1, step * BATCH)
            ledger.holds(step, 1, f"bits{step}")
    for ledger in ledgers:
        ledger.close()


def file_of(folder: Path, column: int) -> Path:
    (path,) = folder.glob(f"0-{column}.*.txt")
    return path


@pytest.mark.parametrize("n_chips", [1, 3, 16])
def test_an_honest_run_loses_and_repeats_nothing(tmp_path: Path, n_chips: int) -> None:
    train(tmp_path, n_chips)

    assert audit(tmp_path) == Audit(
        steps=STEPS, used=STEPS * BATCH, lost=0, repeated=0, hashed=STEPS, split=()
    )


@pytest.mark.parametrize(
    ("mutate", "expected"),
    [
        (lambda text: text.replace("try 2 1 13 16 10\n", ""), {"used": 37, "lost": 3}),
        (lambda text: text.replace("try 2 1 13 16", "try 2 1 12 16"), {"repeated": 1}),
        (lambda text: text.replace("try 3 1 23 26", "try 3 1 24 26"), {"used": 39, "lost": 1}),
        (lambda text: text + "try 4 1 30 33 10\n", {"repeated": 3}),
        (lambda text: text.replace("hold 3 1 bits3", "hold 3 1 other"), {"split": (3,)}),
        (lambda text: text + "hold 4 2 other\n", {"split": (4,)}),
        (lambda text: text + "done 5 1 60\n", {"steps": 5, "lost": 20}),
    ],
    ids=["no share", "overlap", "gap", "twice", "other bits", "bits later", "nobody summed"],
)
def test_a_mutant_is_found(
    tmp_path: Path, mutate: Callable[[str], str], expected: dict[str, object]
) -> None:
    train(tmp_path)
    path = file_of(tmp_path, 1)
    before = path.read_text()
    path.write_text(mutate(before))
    assert path.read_text() != before

    result = audit(tmp_path)

    assert {name: getattr(result, name) for name in expected} == expected


def test_a_step_that_was_lost_with_its_chips_and_done_again_counts_once(tmp_path: Path) -> None:
    train(tmp_path)
    with file_of(tmp_path, 0).open("a") as ledger:  # chip (0, 0) alone goes back to step 4
        ledger.write("try 4 7 30 40 10\ndone 4 7 40\nhold 4 7 again\n")

    result = audit(tmp_path)

    assert (result.used, result.lost, result.repeated, result.split) == (40, 0, 0, ())


def test_a_try_that_came_to_nothing_does_not_count(tmp_path: Path) -> None:
    train(tmp_path)
    with file_of(tmp_path, 2).open("a") as ledger:
        ledger.write("try 5 1 46 50 10\ntry 5 2 40 50 10\n")

    assert audit(tmp_path).used == STEPS * BATCH


@given(st.integers(1, 30))
def test_a_torn_last_line_is_passed_over(tmp_path_factory: pytest.TempPathFactory, n: int) -> None:
    folder = tmp_path_factory.mktemp("ledger")
    train(folder)
    with file_of(folder, 1).open("a") as ledger:
        ledger.write("try 5 1 43 46 10 and much more"[:n])

    assert audit(folder).used == STEPS * BATCH


@pytest.mark.parametrize("line", ["done 5", "did 5 1 50", "", "try 1 2 3 4 5 6"])
def test_a_line_that_cannot_be_read_is_named(tmp_path: Path, line: str) -> None:
    train(tmp_path)
    with file_of(tmp_path, 1).open("a") as ledger:
        ledger.write(f"{line}\ndone 4 1 40\n")

    with pytest.raises(InputError, match=r"0-1\.\d+\.txt is no ledger: line 13 reads"):
        audit(tmp_path)


def test_words_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    (tmp_path / "0-0.1.txt").write_text("done five 1 50\n")

    with pytest.raises(InputError, match="is no ledger: line 1 reads"):
        audit(tmp_path)


def test_without_a_folder_nothing_is_written(tmp_path: Path) -> None:
    ledger = Ledger(None, (0, 0))

    ledger.did(1, 1, 10)
    ledger.close()

    assert list(tmp_path.iterdir()) == []


def test_an_empty_folder_holds_no_steps(tmp_path: Path) -> None:
    assert audit(tmp_path) == Audit(steps=0, used=0, lost=0, repeated=0, hashed=0, split=())

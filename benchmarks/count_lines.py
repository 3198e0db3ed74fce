"""Count the lines of src, room by room: files, all lines, and those of code.

    python benchmarks/count_lines.py [--before COMMIT]

Lines of code are those that are neither blank nor part of a docstring; comments count. `--before`
puts an earlier commit beside the work tree, its rooms under the names that they have now.
"""

import argparse
import ast
import io
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parent.parent
PACKAGE = "src/meshmend"
# Rooms of before, and the room in which their files are now.
MOVED = {
    "net": "transport",
    "execute": "transport",
    "overlay": "trees",
    "verify": "schedule",
    "lockstep": "schedule",
    "limits": "simulator",
    "routing": "topology",
    "faults": "membership",
    "formats": "planning",
    "draw": "pages",
    "report": "pages",
    "explore": "pages",
    "bench": "lab",
    "paper": "lab",
    "testbed": "lab",
    "workloads": "lab",
}
Sources = Iterator[tuple[str, str]]  # the path below the package, and the text


def of_work_tree() -> Sources:
    """Yield the sources as they are."""
    for path in sorted((ROOT / PACKAGE).rglob("*.py")):
        yield path.relative_to(ROOT / PACKAGE).as_posix(), path.read_text(encoding="utf-8")


def of_commit(commit: str) -> Sources:
    """Yield the sources of a commit."""
    packed = subprocess.run(
        ["git", "archive", commit, PACKAGE], cwd=ROOT, capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        for member in archive.getmembers():
            if member.name.endswith(".py") and (file := archive.extractfile(member)) is not None:
                path = PurePosixPath(member.name).relative_to(PACKAGE)
                yield path.as_posix(), file.read().decode()


def code_lines(text: str) -> int:
    """Return how many lines are neither blank nor part of a docstring."""
    lines = {number for number, line in enumerate(text.splitlines(), 1) if line.strip()}
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if node.body and ast.get_docstring(node, clean=False) is not None:
            first = node.body[0]
            lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def by_room(sources: Sources) -> dict[str, Counter[str]]:
    """Return files, lines and lines of code of each room, and of all."""
    found: dict[str, Counter[str]] = {}
    for path, text in sources:
        first, _, rest = path.partition("/")
        room = MOVED.get(first, first) if rest else "(no room)"
        counted = Counter(files=1, lines=len(text.splitlines()), code=code_lines(text))
        for name in (room, "all"):
            found.setdefault(name, Counter()).update(counted)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--before", metavar="COMMIT", help="an earlier commit to put beside")
    before = parser.parse_args().before
    tables = [by_room(of_commit(before))] if before else []
    tables.append(by_room(of_work_tree()))
    columns = ["files", "lines", "code"]
    heads = [f"{name} before" for name in columns] if before else []
    print("| room |", " | ".join([*heads, *columns]), "|")
    print("| --- |" + " ---: |" * (3 * len(tables)))
    rooms = sorted({room for table in tables for room in table} - {"all"})
    for room in (*rooms, "all"):
        figures = [table.get(room, Counter())[name] for table in tables for name in columns]
        print(f"| `{room}` |" if room[0] not in "(a" else f"| {room} |", end=" ")
        print(" | ".join(f"{figure:,}" for figure in figures), "|")


if __name__ == "__main__":
    main()

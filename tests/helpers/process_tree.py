"""A process and all that it started, as Linux lists them."""

from pathlib import Path


def with_descendants(pid: int) -> list[int]:
    """Return a process, and all that it or its children have started."""
    found = [pid]
    for each in found:
        for task in Path(f"/proc/{each}/task").glob("*/children"):
            found.extend(int(child) for child in task.read_text().split())
    return found

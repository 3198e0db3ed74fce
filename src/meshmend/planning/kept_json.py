"""Answers kept as JSON files: whole or not at all, and never a reason to fail."""

import json
from pathlib import Path

from meshmend.files import write_whole


def keep_json(path: Path, document: object) -> None:
    """Write a file that readers see whole or not at all; do nothing where that is not possible.

    Without the file the next question takes longer, but gets the same answer.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(document), is_durable=False)
    except OSError:
        pass

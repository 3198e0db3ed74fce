"""Answers kept on disk are whole or absent, and a disk that takes none is no error."""

import json
from pathlib import Path

from meshmend.planning.kept_json import keep_json


def test_a_kept_file_is_whole_and_leaves_no_draft(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "answer.json"
    keep_json(path, {"time_s": 1.5})

    assert json.loads(path.read_text(encoding="utf-8")) == {"time_s": 1.5}
    assert list(path.parent.iterdir()) == [path]


def test_where_nothing_can_be_written_nothing_happens(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder", encoding="utf-8")
    keep_json(tmp_path / "file" / "answer.json", {})

    assert (tmp_path / "file").read_text(encoding="utf-8") == "no folder"

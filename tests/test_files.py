"""A file that a user names is written whole, or in place where it cannot be replaced."""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from meshmend.cli.main import run_line
from meshmend.files import write_named


@contextmanager
def files_of_at_most(n_bytes: int) -> Iterator[None]:
    """As on a disk that is full: the kernel refuses to write more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_picture_that_does_not_fit_on_the_disk_leaves_the_one_before_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "mesh.svg"
    picture.write_text("the one before")

    with files_of_at_most(1000):
        assert run_line(["show", "--mesh", "4x4", "-o", str(picture)]) == 2

    assert f"cannot write {picture}: File too large" in capsys.readouterr().err
    assert picture.read_text() == "the one before"
    assert list(tmp_path.iterdir()) == [picture]


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path: Path) -> None:
    file, link, pipe = (tmp_path / name for name in ("file", "link", "pipe"))
    file.write_text("old")
    link.symlink_to(file)
    os.mkfifo(pipe)
    end = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    write_named(link, "new")
    write_named(pipe, b"through")

    assert link.is_symlink()
    assert file.read_text() == "new"
    assert os.read(end, 100) == b"through"
    assert pipe.is_fifo()
    os.close(end)


def test_a_file_that_cannot_be_replaced_is_written_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that is mounted, or lies in a folder where this user may make no file."""

    def refuse(*_: object) -> None:
        raise OSError(16, "Device or resource busy")

    file = tmp_path / "mounted"
    file.write_text("old")
    monkeypatch.setattr(Path, "replace", refuse)

    write_named(file, "new")

    assert file.read_text() == "new"
    assert list(tmp_path.iterdir()) == [file]

"""What is imported for forks is left alone by the garbage collector; what comes later is not."""

import gc
import subprocess
import sys

import pytest

from meshmend.processes import without_garbage


def test_what_is_loaded_is_frozen_and_the_collector_goes_on_after_the_outer_block() -> None:
    with without_garbage():
        kept = [[] for _ in range(1000)]  # type: ignore[var-annotated]
        with without_garbage():
            assert not gc.isenabled()
        assert not gc.isenabled()

    assert gc.isenabled()
    looked_at = {id(each) for each in gc.get_objects()}
    assert looked_at.isdisjoint(map(id, kept))


def test_the_collector_goes_on_after_an_error_and_nothing_is_frozen() -> None:
    kept: list[int] = []

    with pytest.raises(ValueError, match="no number"), without_garbage():
        int("no number")

    assert gc.isenabled()
    assert any(each is kept for each in gc.get_objects())


def test_nothing_is_frozen_at_the_end_of_a_process() -> None:
    program = (
        "import atexit, gc\n"
        "atexit.register(lambda: print(gc.get_freeze_count()))  # called after those below\n"
        "from meshmend.processes import without_garbage\n"
        "with without_garbage():\n    import json\n"
        "print(gc.get_freeze_count() > 0)\n"
    )

    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert ended.stdout == "True\n0\n", ended.stderr


def test_a_low_limit_of_open_files_is_raised_as_far_as_is_needed_or_refused() -> None:
    program = (
        "import resource\n"
        "from meshmend.errors import InputError\n"
        "from meshmend.processes import allow_open_files\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (150, 1000))\n"
        "for n in (20, 400, 30, 900):\n"
        "    try:\n"
        "        allow_open_files(n, 'who')\n"
        "    except InputError as error:\n"
        "        print(error)\n"
        "    print(*resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)

    assert done.stdout.splitlines() == [
        "150 1000",
        "528 1000",
        "528 1000",
        "who needs 1028 open files, but this machine allows a process 1000; raise its hard limit "
        "(ulimit -Hn, or LimitNOFILE of a service)",
        "528 1000",
    ]

"""Compiling ahead: what the second process leaves to a first plan, and nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_COMPILED = """
import json, numba.core.event as event
from meshmend import Mesh, plan

class Listener(event.Listener):
    names = []
    def on_start(self, event):
        self.names.append(event.data["dispatcher"].py_func.__module__)
    def on_end(self, event):
        pass

event.register("numba:compile", Listener())
plan(Mesh((8, 8)).without("2x2@2,2")).summary()
print(json.dumps(sorted({name for name in Listener.names if name.startswith("meshmend")})))
"""


@pytest.mark.slow
def test_a_plan_compiles_what_it_begins_with_and_finds_the_rest_compiled(tmp_path: Path) -> None:
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}

    subprocess.run([sys.executable, "-m", "meshmend.planning.warm_up"], env=environment, check=True)
    told = subprocess.run(
        [sys.executable, "-c", _COMPILED],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )

    layers = {name.split(".", 1)[1] for name in json.loads(told.stdout)}
    begins = {"topology", "trees", "simulator.packing_number", "schedule.hazards", "schedule.trees"}
    assert {name for name in layers if not name.startswith(tuple(begins))} == set()

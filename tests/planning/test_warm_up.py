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

_LOADED = """
import gc
from numba.core.dispatcher import Dispatcher
from meshmend import Mesh, plan
from meshmend.planning.warm_up import PARTS

def loaded():
    kernels = [each for each in gc.get_objects() if isinstance(each, Dispatcher)]
    ours = [each for each in kernels if each.py_func.__module__.startswith("meshmend")]
    return {f"{each.py_func.__qualname__}{sign}" for each in ours for sign in each.signatures}

for part in PARTS.values():
    part()
before = loaded()
mesh, torus = Mesh((4, 4)), Mesh((4, 4), wrap=(True, True))
holed, slow = mesh.without("2x2@0,2"), mesh.slowed("link:0,0-0,1=0.25")
for each in (mesh, torus, holed, slow):
    for payload in ("1KB", "10KB", "100KB", "1MB", "10MB"):
        plan(each, payload=payload)
print(*sorted(loaded() - before), sep="\\n")
"""


def test_who_compiled_all_that_workers_need_plans_for_any_payload_without_compiling() -> None:
    """A job of a small model sums some kilobytes, for which other trees win than for megabytes."""
    told = subprocess.run(
        [sys.executable, "-c", _LOADED], check=True, capture_output=True, text=True
    )

    assert told.stdout.split() == []


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

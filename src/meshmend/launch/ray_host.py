"""One host of a job on a Ray cluster: an actor that runs `meshmend agent` for a block of chips.

The agent starts the workers of the block, and starts those again that die. Ray starts this actor
again if its process dies: its constructor then starts the agent anew. No process outlives the
actor: the kernel kills the agent with it, and the workers with the agent.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from meshmend.config import SECRET
from meshmend.topology.failures import Block

NAMESPACE: Final = "meshmend"  # Ray's namespace of all actors of all jobs

# The new process ties itself to its parent: code between fork and exec is unsafe in a process with
# as many threads as one of Ray's.
_TIED_COMMAND: Final = (
    "import runpy, sys\n"
    "from meshmend.processes import die_with_parent\n"
    "die_with_parent(int(sys.argv.pop(1)))\n"
    "runpy.run_module('meshmend', run_name='__main__', alter_sys=True)\n"
)
_LOOP_MODULE: Final = "meshmend.launch.pickled_loop"


@dataclass(frozen=True)
class HostSettings:
    """What all hosts of a job have in common.

    `options` are options of `meshmend agent`. `script` is the script and its arguments, or empty
    if the workers call the pickled function `loop`. `resources` are those of one host.
    """

    name: str
    blocks: tuple[Block, ...]
    options: tuple[str, ...]
    script: tuple[str, ...]
    resources: Mapping[str, float]
    secret: str = field(repr=False)
    loop: bytes = field(default=b"", repr=False)
    is_strict: bool = True


class RayHost:
    """The actor of one host; `code()` says whether its agent has ended, and how."""

    def __init__(self, settings: HostSettings, block: Block, coordinator: str) -> None:
        self._code: int | None = None
        script = settings.script
        if settings.loop:
            self._loop = os.fdopen(os.memfd_create("loop"), "wb", buffering=0)
            self._loop.write(settings.loop)
            script = ("-m", _LOOP_MODULE, f"/proc/{os.getpid()}/fd/{self._loop.fileno()}")
        where = ("--coordinator", coordinator, "--chips", str(block))
        command = ("agent", *where, *settings.options, *script)
        # The kernel kills a child when the thread that started it ends, so the same thread waits.
        threading.Thread(target=self._run, args=(command, settings.secret), daemon=True).start()

    def code(self) -> int | None:
        """Return the exit code of the agent, or None while it runs."""
        return self._code

    def _run(self, command: tuple[str, ...], secret: str) -> None:
        tied = [sys.executable, "-P", "-c", _TIED_COMMAND, str(os.getpid()), *command]
        self._code = subprocess.Popen(tied, env={**os.environ, SECRET.name: secret}).wait()


def start_host(
    settings: HostSettings, number: int, *, name: str, node: str, coordinator: str
) -> Any:
    """Start the actor of a host on a node, and return its handle without waiting for it."""
    return (
        ray.remote(RayHost)
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",  # so that it outlives the coordinator's process
            max_restarts=-1,
            max_task_retries=-1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            **_resource_options(settings.resources),
        )
        .remote(settings, settings.blocks[number], coordinator)
    )


def _resource_options(resources: Mapping[str, float]) -> dict[str, Any]:
    """Return resources as the options of an actor, which has its own words for some of them."""
    words = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    options: dict[str, Any] = {
        words[kind]: amount for kind, amount in resources.items() if kind in words
    }
    own = {kind: amount for kind, amount in resources.items() if kind not in words}
    return {"num_cpus": 0, **options, "resources": own}

"""The text of a Slurm job file, which runs a job on hosts that may die and come back.

The file asks for nodes, makes the job's secret, and runs `meshmend slurm-job` on the first node.
That command does the rest (`slurm_job`).
"""

import re
import shlex
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from meshmend.errors import InputError

_SUBMIT_S: Final = 60.0

_TEXT: Final = """#!/bin/bash
{directives}

# {made_by}
set -euo pipefail

# The folder of this job, on a file system that all nodes see: secret, record, ledgers and plans.
run={run}
mkdir -p "$run"
if [ ! -s "$run/secret" ]; then
    (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \\n' > "$run/secret")
fi

# It starts the coordinator here and one step per {what}, and starts again what dies. It ends with
# the exit code of the job.
meshmend=({program})
exec "${{meshmend[@]}}" slurm-job {options} \\
    --run-dir "$run" --secret-file "$run/secret" \\
    {script}
"""


@dataclass(frozen=True)
class SlurmFile:
    """What a job file asks Slurm for, and the command that it runs.

    `program` starts meshmend; `options` are those of `meshmend slurm-job`; `script` is what
    workers run, with its arguments. Without a `run_dir` each job has a folder of its own. `extras`
    are further options of sbatch, each as it is written after `#SBATCH`.
    """

    name: str
    n_nodes: int
    n_chips_per_node: int
    program: tuple[str, ...]
    options: tuple[str, ...]
    script: tuple[str, ...]
    per_chip: bool = False
    time: str | None = None
    run_dir: str | None = None
    extras: tuple[str, ...] = ()
    made_by: str = ""

    def __post_init__(self) -> None:
        for option, text in (("--time", self.time or ""), *(("--sbatch", e) for e in self.extras)):
            if not text.isprintable():
                raise InputError(f"{option} needs one line of printable text, but got {text!r}")
        for text in self.extras:
            if not re.match(r"--?[A-Za-z]", text):
                raise InputError(
                    "--sbatch needs an option of sbatch such as '--partition=long', but got "
                    f"{text!r}"
                )

    def text(self) -> str:
        """Return the text of the job file."""
        return _TEXT.format(
            directives="\n".join(f"#SBATCH {directive}" for directive in self._directives()),
            made_by=self.made_by.translate(_ONE_LINE) or "Made by: meshmend submit slurm",
            run='"runs/slurm-$SLURM_JOB_ID"' if self.run_dir is None else shlex.quote(self.run_dir),
            what="chip" if self.per_chip else "host",
            program=shlex.join(self.program),
            options=shlex.join(self.options),
            script=shlex.join(self.script),
        )

    def _directives(self) -> Sequence[str]:
        n_tasks, n_cpus = 1, self.n_chips_per_node
        if self.per_chip:
            n_tasks, n_cpus = n_cpus, 1
        return (
            f"--job-name={re.sub(r'[^A-Za-z0-9._-]', '-', self.name)}",
            f"--nodes={self.n_nodes}",
            f"--ntasks-per-node={n_tasks}",
            f"--cpus-per-task={n_cpus}",
            "--no-kill",  # the others go on when a node dies
            "--requeue",  # after preemption, or the death of the first node
            "--open-mode=append",  # a requeued job keeps its earlier output
            *([f"--time={self.time}"] if self.time else []),
            *self.extras,
        )


_ONE_LINE = {ord("\n"): " ", ord("\r"): " "}


def submit(text: str) -> str:
    """Submit a job file with sbatch; return the number of the job.

    Raises:
        InputError: sbatch is not installed, or refuses the file.
    """
    try:
        done = subprocess.run(
            ["sbatch", "--parsable"], input=text, capture_output=True, text=True, timeout=_SUBMIT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise InputError(f"--run needs sbatch of Slurm, but: {error}") from None
    if done.returncode != 0:
        raise InputError(f"sbatch refuses the job file: {done.stderr.strip()}")
    return done.stdout.strip()

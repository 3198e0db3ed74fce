"""Measures OpenMPI's MPI_Allreduce on the same network, if Debian's OpenMPI is installed.

OpenMPI starts its own processes, so it does not run in the pool. It runs a small C program, which
is compiled into a temporary folder and started by mpirun with one process on each chip.
"""

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from meshmend.errors import BenchmarkError
from meshmend.lab.bench.contenders import LOOPBACK, Network
from meshmend.lab.bench.worker_pool import Repetition
from meshmend.scratch import scratch_folder

_SOURCE = r"""
#include <mpi.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static float operand(long rank, long i) { return (float)((i * (rank % 250 + 1) + rank) % 251); }

int main(int argc, char **argv) {
    MPI_Init(&argc, &argv);
    int rank, n_ranks;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &n_ranks);
    long n = atol(argv[1]), n_repetitions = atol(argv[2]);
    float *mine = malloc(4 * n), *sum = malloc(4 * n), *expected = calloc(n, 4);
    for (long i = 0; i < n; i++) {
        mine[i] = operand(rank, i);
        for (long other = 0; other < n_ranks; other++) expected[i] += operand(other, i);
    }
    for (long repetition = 0; repetition < n_repetitions; repetition++) {
        double start = now() + 0.02 + 0.001 * n_ranks;
        MPI_Barrier(MPI_COMM_WORLD);
        MPI_Bcast(&start, 1, MPI_DOUBLE, 0, MPI_COMM_WORLD);
        double left = start - now();
        if (left > 0) {
            struct timespec t = {(time_t)left, (long)(1e9 * (left - (time_t)left))};
            nanosleep(&t, NULL);
        }
        double began = now();
        MPI_Allreduce(mine, sum, (int)n, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD);
        double ended = now(), first, last;
        int right = 1, all_right;
        for (long i = 0; i < n; i++) right &= sum[i] == expected[i];
        MPI_Reduce(&began, &first, 1, MPI_DOUBLE, MPI_MIN, 0, MPI_COMM_WORLD);
        MPI_Reduce(&ended, &last, 1, MPI_DOUBLE, MPI_MAX, 0, MPI_COMM_WORLD);
        MPI_Reduce(&right, &all_right, 1, MPI_INT, MPI_LAND, 0, MPI_COMM_WORLD);
        if (rank == 0) {
            printf("{\"time_s\": %.9f, \"correct\": %s}\n", last - first,
                   all_right ? "true" : "false");
            fflush(stdout);
        }
    }
    MPI_Finalize();
    return 0;
}
"""

_LIMIT_S = 300.0


@dataclass(frozen=True)
class OpenMpi:
    """MPI_Allreduce with the algorithm that OpenMPI chooses."""

    n_elements: int
    name: str = "openmpi"
    detail: str = field(default="MPI_Allreduce, default algorithm")
    predicted_s: float | None = None


def why_unavailable() -> str | None:
    """Return why OpenMPI cannot be measured here, or None."""
    missing = [tool for tool in ("mpirun", "mpicc") if shutil.which(tool) is None]
    if not missing:
        return None
    return (
        f"--compare openmpi needs {' and '.join(missing)}, but they are not installed; "
        "install with: apt-get install openmpi-bin libopenmpi-dev"
    )


def openmpi_repetitions(
    network: Network, contender: OpenMpi, n_repetitions: int
) -> list[Repetition]:
    """Run OpenMPI and return this many timed repetitions.

    Raises:
        BenchmarkError: the program did not compile, start or finish; the message has the last line
            of its output.
    """
    with scratch_folder() as name:
        folder = Path(name)
        (folder / "allreduce.c").write_text(_SOURCE, encoding="utf-8")
        program = folder / "allreduce"
        _output_of(["mpicc", "-O2", "-o", str(program), str(folder / "allreduce.c")], folder)
        command = [
            *_mpirun(network, folder),
            str(program),
            str(contender.n_elements),
            str(n_repetitions),
        ]
        if network.bed is not None:
            command = network.bed.command(network.mesh.live[0], command)
        lines = [line for line in _output_of(command, folder).splitlines() if line.startswith("{")]
    repetitions = [Repetition(**json.loads(line)) for line in lines]
    if len(repetitions) != n_repetitions:
        raise BenchmarkError(f"openmpi printed {len(repetitions)} of {n_repetitions} repetitions")
    return repetitions


def _mpirun(network: Network, folder: Path) -> list[str]:
    """Return the command line of mpirun: one process a chip, TCP over the chip's interface."""
    addresses = [network.address(chip) for chip in network.mesh.live]
    settings = {
        "btl": "tcp,self",
        "btl_tcp_if_include": network.interface,
        "oob_tcp_if_include": network.interface,
        "mpi_yield_when_idle": "1",
    }
    if network.bed is None:
        where = ["--host", f"{LOOPBACK}:{len(addresses)}"]
    else:
        hosts = folder / "hosts"
        hosts.write_text("".join(f"{address} slots=1\n" for address in addresses))
        settings["plm_rsh_agent"] = str(_agent(network, folder))
        settings["plm_rsh_num_concurrent"] = str(max(128, len(addresses)))
        where = ["--hostfile", str(hosts)]
    options = [word for key, value in settings.items() for word in ("--mca", key, value)]
    return [
        *("mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"),
        *("-np", str(len(addresses)), *where, *options),
    ]


def _agent(network: Network, folder: Path) -> Path:
    """Write the script that mpirun calls instead of ssh: it runs a command on an address's chip.

    Each chip has its own temporary folder, as a host would: OpenMPI's daemons disturb each other if
    they share one.
    """
    assert network.bed is not None, "loopback needs no agent"
    cases = ""
    for number, chip in enumerate(network.mesh.live):
        chip_folder = folder / str(number)
        chip_folder.mkdir()
        shell = shlex.join(network.bed.command(chip, ["sh", "-c"]))
        cases += f'{network.address(chip)}) export TMPDIR={chip_folder}; exec {shell} "$*";;\n'
    script = folder / "agent"
    script.write_text(f'#!/bin/sh\nhost=$1\nshift\ncase "$host" in\n{cases}esac\nexit 1\n')
    script.chmod(0o700)
    return script


def _output_of(command: Sequence[str], folder: Path) -> str:
    """Return the standard output of a command.

    Raises:
        BenchmarkError: the command failed, or did not finish in time.
    """
    environment = {**os.environ, "HOME": str(folder), "TMPDIR": str(folder)}
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            env=environment,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BenchmarkError(f"openmpi did not finish within {_LIMIT_S:g} s") from None
    if result.returncode:
        lines = (result.stderr + result.stdout).splitlines()
        words = [line for line in lines if any(map(str.isalnum, line))]  # skips lines of dashes
        raise BenchmarkError(f"openmpi failed: {words[-1] if words else 'it printed no reason'}")
    return result.stdout

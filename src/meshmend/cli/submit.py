"""`meshmend submit`: prints what a scheduler needs to run a job, or submits it.

`submit slurm` prints a job file, which runs `meshmend slurm-job`; `submit jobset` and `submit job`
print Kubernetes manifests.
"""

import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshmend.cli.console import note, write_text
from meshmend.cli.options import (
    ModuleOption,
    ScriptArgument,
    ScriptArguments,
    check_script,
    command_group,
    context_of,
    job_command,
)

if TYPE_CHECKING:
    from meshmend.config import JobConfig
    from meshmend.launch.kubernetes import KubernetesJob

app = command_group(
    "Print what a scheduler needs to run a job that survives lost hosts, or submit it.",
    start_with="submit slurm --mesh 4x4 --hosts 2x2 train.py",
)


@job_command("submit slurm", needs=("mesh.shape",))
def slurm_command(
    config: "JobConfig",
    script: ScriptArgument,
    arguments: ScriptArguments = None,
    *,
    is_module: ModuleOption = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write the job file here.")
    ] = None,
    run: Annotated[
        bool, typer.Option("--run", help="Submit the job with sbatch, and print its number.")
    ] = False,
) -> int:
    """Print a Slurm job file for a script that loops over a meshmend.train.Job.

    The job starts a coordinator on its first node, and on each node the workers of one block of
    the mesh. Workers, nodes and the coordinator may die: the others go on, and what died is
    started again as soon as its node is back. A job that loses its first node, or that Slurm
    preempts, is requeued and goes on from its newest checkpoint. The exit code of the job is 0 if
    all steps were done.

    **Examples**

    - meshmend submit slurm --mesh 8x8 --hosts 4x2 train.py --lr 0.1 > job.sh

    - meshmend submit slurm --mesh 4x4 --hosts 2x2 --time 8:00:00 --sbatch "--partition=long" --run
      train.py
    """
    from meshmend.launch.slurm import SlurmJob, job_file, submit

    job = SlurmJob(config, (script, *(arguments or ())), is_module)
    _ = job.blocks()  # refuses hosts that do not tile the mesh
    check_script(script, "submit slurm", is_module=is_module)
    text = job_file(job, f"Made by: {shlex.join(['meshmend', *sys.argv[1:]])}")
    if output is not None:
        write_text(output, text)
    if run:
        print(submit(text))
    elif output is None:
        print(text, end="")
    return 0


@job_command("slurm-job", needs=("mesh.shape", "job.run_dir", "job.secret_file"))
def slurm_job_command(
    config: "JobConfig",
    script: ScriptArgument,
    arguments: ScriptArguments = None,
    *,
    is_module: ModuleOption = False,
) -> int:
    """Run a job inside a Slurm allocation; the job file of `meshmend submit slurm` calls this.

    It starts the coordinator, and one step per host or chip, and starts again what dies. It ends
    with the exit code of the coordinator. SIGTERM, as scancel sends it, ends everything.
    """
    from meshmend.errors import TerminatedError
    from meshmend.launch.slurm import Allocation, SlurmJob, supervise, supervised
    from meshmend.launch.termination import TERMINATED, terminable

    job = SlurmJob(config, (script, *(arguments or ())), is_module)
    try:
        with terminable():
            commands = supervised(job, Allocation.from_environment(os.environ))
            first, *_, last = [*commands.steps, *commands.steps]
            note(f"meshmend: {len(commands.steps)} steps, from {first} to {last}")
            return supervise(commands)
    except TerminatedError:
        note("meshmend: SIGTERM ends the job")
        return TERMINATED


# What differs from the defaults of other jobs: pods may wait in the queue, and a late one must
# still hear that the job is over.
_KUBERNETES_DEFAULTS = {"timing.gather": 600.0, "timing.linger": 86400.0, "timing.alone": 86400.0}
_OF_BOTH = """

A pod that fails is restarted or recreated alone, while the others train on. The coordinator has a
service, and keeps its record on a volume. The first lines say how to make the job's secret.

The manifests are checked against the published schemas. No cluster was at hand to run them.

**Examples**

- meshmend submit {kind} --mesh 4x4 --image my/training --name train train.py --lr 0.1

- meshmend submit {kind} --mesh 8x8 --hosts 2x2 --chips-resource google.com/tpu=4
  --image my/training --name train -o train.yaml train.py
"""
_KUBERNETES_HELP = {
    "jobset": "Print a job as a JobSet of Kubernetes; the cluster needs the JobSet controller."
    + _OF_BOTH.format(kind="jobset"),
    "job": "Print a job as two Jobs of Kubernetes: the coordinator, and all workers."
    + _OF_BOTH.format(kind="job"),
}


def _kubernetes_command(kind: str) -> Callable[..., int]:
    """Return the command that prints the manifests of a kind; its help is in _KUBERNETES_HELP."""

    @job_command(
        f"submit {kind}", defaults=_KUBERNETES_DEFAULTS, needs=("mesh.shape", "kubernetes.image")
    )
    def manifests_command(
        config: "JobConfig",
        script: ScriptArgument,
        arguments: ScriptArguments = None,
        *,
        name: Annotated[str, typer.Option("--name", metavar="NAME", help="The name of the job.")],
        is_module: ModuleOption = False,
        output: Annotated[
            Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write to this file.")
        ] = None,
    ) -> int:
        from meshmend.launch.kubernetes import KubernetesJob

        words = (*(("-m",) if is_module else ()), script, *(arguments or ()))
        text = _manifest_text(KubernetesJob(config.with_({"job.name": name}), words), kind)
        if output is None:
            sys.stdout.write(text)
        else:
            write_text(output, text)
            note(f"meshmend: wrote {output}; its first lines say what to run next")
        return 0

    return manifests_command


def _manifest_text(job: "KubernetesJob", kind: str) -> str:
    """Return the manifests as YAML, after comments that say how to make the secret and submit."""
    from meshmend.launch.kubernetes import (
        SECRET_KEY,
        indexed_job_manifests,
        jobset_manifests,
        yaml_text,
    )

    documents = {"jobset": jobset_manifests, "job": indexed_job_manifests}[kind](job)
    namespace = job.config.kubernetes.namespace
    kubectl = f"kubectl --namespace {namespace}" if namespace else "kubectl"
    comments = (
        f"meshmend submit {kind}: checked against the published schemas, never run on a cluster.",
        "First make the secret of the job, once; it is in no argument and in no file:",
        "  openssl rand -hex 32 | tr -d '\\n' |",
        f"    {kubectl} create secret generic {job.secret_name} "
        f"--from-file={SECRET_KEY}=/dev/stdin",
        f"Then submit this file: {kubectl} apply -f FILE",
        f"Follow the job: {kubectl} logs --follow --selector "
        f"app.kubernetes.io/instance={job.name},app.kubernetes.io/component=coordinator",
        f"End it: {kubectl} delete -f FILE",
    )
    return "".join(f"# {line}\n" for line in comments) + yaml_text(documents)


app.command("slurm", context_settings=context_of(slurm_command))(slurm_command)
for _kind, _words in _KUBERNETES_HELP.items():
    _command = _kubernetes_command(_kind)
    app.command(_kind, help=_words, context_settings=context_of(_command))(_command)

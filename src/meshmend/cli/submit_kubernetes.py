"""`meshmend submit jobset` and `meshmend submit job`: print the Kubernetes manifests of a job."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshmend.cli.console import note, write_text
from meshmend.cli.options import SCRIPT_LAST, ModuleOption, ScriptArgument, ScriptArguments
from meshmend.cli.settings import job_command

if TYPE_CHECKING:
    from meshmend.config import JobConfig
    from meshmend.launch.kubernetes import KubernetesJob

# What differs from the defaults of other jobs: pods may wait in the queue, and a late one must
# still hear that the job is over.
_DEFAULTS = {"timing.gather": 600.0, "timing.linger": 86400.0}
_SAME = """

A pod that fails is restarted or recreated alone, while the others train on. The coordinator has a
service, and keeps its record on a volume. The first lines say how to make the job's secret.

The manifests are checked against the published schemas. No cluster was at hand to run them.

**Examples**

- meshmend submit {kind} --mesh 4x4 --image my/training --name train train.py --lr 0.1

- meshmend submit {kind} --mesh 8x8 --hosts 2x2 --chips-resource google.com/tpu=4
  --image my/training --name train -o train.yaml train.py
"""
_HELP = {
    "jobset": "Print a job as a JobSet of Kubernetes; the cluster needs the JobSet controller."
    + _SAME.format(kind="jobset"),
    "job": "Print a job as two Jobs of Kubernetes: the coordinator, and all workers."
    + _SAME.format(kind="job"),
}


def _command(kind: str) -> Callable[..., int]:
    """Return the command that prints the manifests of a kind; its help is in _HELP."""

    @job_command(f"submit {kind}", defaults=_DEFAULTS, needs=("mesh.shape", "kubernetes.image"))
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


def register(app: typer.Typer) -> None:
    """Add the commands of Kubernetes to an app."""
    for kind, words in _HELP.items():
        app.command(kind, help=words, context_settings=SCRIPT_LAST)(_command(kind))


def _manifest_text(job: "KubernetesJob", kind: str) -> str:
    """Return the manifests as YAML, after comments that say how to make the secret and submit."""
    from meshmend.launch.kubernetes import SECRET_KEY, indexed_job_manifests, jobset_manifests
    from meshmend.launch.yaml_text import yaml_text

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

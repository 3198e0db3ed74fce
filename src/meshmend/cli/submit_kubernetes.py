"""`meshmend submit jobset` and `meshmend submit job`: print the Kubernetes manifests of a job."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from meshmend.cli.console import note, write_text
from meshmend.cli.options import SCRIPT_LAST, MeshOption, WrapOption, check_seconds, mesh_of
from meshmend.errors import InputError

if TYPE_CHECKING:
    from meshmend.launch.kubernetes import KubernetesJob

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


def manifests_command(
    context: typer.Context,
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="The script in the image, or with -m a module.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGS", help="Its arguments.")
    ] = None,
    *,
    mesh: MeshOption,
    image: Annotated[
        str,
        typer.Option("--image", metavar="IMAGE", help="Image with meshmend, torch and the script."),
    ],
    name: Annotated[str, typer.Option("--name", metavar="NAME", help="The name of the job.")],
    hosts: Annotated[
        str | None,
        typer.Option(
            "--hosts",
            metavar="RxC",
            help="The block of chips that one pod has; one chip unless given.",
        ),
    ] = None,
    wrap: WrapOption = "none",
    board: Annotated[
        str | None,
        typer.Option(
            "--board",
            metavar="RxC",
            help="The chips that fail and come back together; those of a pod, or 2x2.",
        ),
    ] = None,
    namespace: Annotated[
        str,
        typer.Option("--namespace", metavar="NAME", help="The namespace; else the current one."),
    ] = "",
    secret: Annotated[
        str,
        typer.Option(
            "--secret",
            metavar="SECRET",
            help="The Secret whose key 'secret' holds the job's secret; else NAME-secret.",
        ),
    ] = "",
    cpu: Annotated[
        str, typer.Option("--cpu", metavar="8", help="The cores that each worker pod requests.")
    ] = "",
    memory: Annotated[
        str,
        typer.Option(
            "--memory", metavar="32Gi", help="The memory of each worker pod, also its limit."
        ),
    ] = "",
    chips_resource: Annotated[
        list[str] | None,
        typer.Option(
            "--chips-resource",
            metavar="google.com/tpu=4",
            help="The devices of each worker pod; repeat for more.",
        ),
    ] = None,
    mount: Annotated[
        list[str] | None,
        typer.Option(
            "--mount",
            metavar="CLAIM:/FOLDER",
            help="A PersistentVolumeClaim to mount in each worker pod; repeat for more.",
        ),
    ] = None,
    run_dir: Annotated[
        str,
        typer.Option(
            "--run-dir",
            metavar="/FOLDER",
            help="Where workers keep ledgers and plans; use a mounted claim to share them.",
        ),
    ] = "",
    gather: Annotated[
        float,
        typer.Option(
            "--gather",
            callback=check_seconds,
            min=0.0,
            help="Seconds to wait for all pods at the beginning.",
        ),
    ] = 600.0,
    max_restarts: Annotated[
        int,
        typer.Option(
            "--max-restarts",
            min=0,
            max=2**31 - 1,
            help="Restarts of all pods together, after which Kubernetes ends the job.",
        ),
    ] = 1000,
    is_module: Annotated[
        bool, typer.Option("-m", "--module", help="SCRIPT is a module's name.")
    ] = False,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", metavar="FILE", help="Write to this file.")
    ] = None,
) -> None:
    # The help of both commands is in _HELP.
    from meshmend.launch.host_blocks import host_blocks, host_shape_from
    from meshmend.launch.hosts import board_from
    from meshmend.launch.kubernetes import KubernetesJob

    whole = mesh_of(mesh, wrap, None)
    host = host_shape_from(hosts, whole) if hosts else (1,) * len(whole.shape)
    host_blocks(whole, host)  # refuses a block that does not tile the mesh
    is_block = any(size > 1 for size in host)
    job = KubernetesJob(
        name=name,
        image=image,
        mesh=whole,
        host=host,
        arguments=(*(("-m",) if is_module else ()), script, *(arguments or ())),
        namespace=namespace,
        secret=secret,
        board=board_from(board, whole) if board else host if is_block else None,
        run_dir=run_dir,
        gather_s=gather,
        max_restarts=max_restarts,
        resources=_resources(cpu, memory, chips_resource or []),
        claims=tuple(_pair(text, ":", "--mount", "CLAIM:/FOLDER") for text in mount or ()),
    )
    text = _manifest_text(job, context.info_name or "")
    if output is None:
        sys.stdout.write(text)
    else:
        write_text(output, text)
        note(f"meshmend: wrote {output}; its first lines say what to run next")


def register(app: typer.Typer) -> None:
    """Add the commands of Kubernetes to an app."""
    for kind, words in _HELP.items():
        app.command(kind, help=words, context_settings=SCRIPT_LAST)(manifests_command)


def _resources(cpu: str, memory: str, chips: list[str]) -> tuple[tuple[str, str], ...]:
    named = [(name, value) for name, value in (("cpu", cpu), ("memory", memory)) if value]
    option, like = "--chips-resource", "NAME=COUNT such as google.com/tpu=4"
    return (*named, *(_pair(text, "=", option, like) for text in chips))


def _pair(text: str, separator: str, option: str, like: str) -> tuple[str, str]:
    first, found, second = text.partition(separator)
    if not (first and found and second):
        raise InputError(f"{option} needs {like}, but got {text!r}")
    return first, second


def _manifest_text(job: "KubernetesJob", kind: str) -> str:
    """Return the manifests as YAML, after comments that say how to make the secret and submit."""
    from meshmend.launch.kubernetes import SECRET_KEY, indexed_job_manifests, jobset_manifests
    from meshmend.launch.yaml_text import yaml_text

    documents = {"jobset": jobset_manifests, "job": indexed_job_manifests}[kind](job)
    kubectl = f"kubectl --namespace {job.namespace}" if job.namespace else "kubectl"
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

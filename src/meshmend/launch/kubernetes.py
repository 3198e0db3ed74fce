"""Kubernetes manifests of a job: a coordinator, one pod per host, and what they need.

Makes documents and starts nothing. Kubernetes restarts a container that fails, and recreates a pod
that is lost, without touching the other pods: the pods belong to one indexed Job, whose restart
policy is `OnFailure`. The other workers train on meanwhile.

No restart rule by exit code (`podFailurePolicy`) is used, because it needs the restart policy
`Never`. A failed container then costs a new pod, and a pod on a dead node is not replaced until
that node is back.

`yaml_text` writes the documents. A text is quoted unless it is plainly a word: so no reader takes a
text such as `yes` or `1e3` for something else, and the project needs no YAML library.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, Final

from meshmend.config import READY_DIR, SECRET, JobConfig, command_words
from meshmend.errors import InputError
from meshmend.launch.hosts import board_from, host_blocks, host_shape_from
from meshmend.topology.failures import format_shape
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import configured_mesh

PORT: Final = 7000
METRICS_PORT: Final = 9090
READY_FOLDER: Final = "/tmp/meshmend-ready"
SECRET_KEY: Final = "secret"

_RECORD_FOLDER: Final = "/var/lib/meshmend"
_RECORD_SIZE: Final = "1Gi"  # the smallest volume that most clouds make
_LOST_NODE_S: Final = 30  # Kubernetes waits 300 s by default before it replaces a lost node's pods
_GRACE_S: Final = 10  # workers end within 2 s of SIGTERM
_ALIVE_S: Final = 5  # between two questions to the coordinator whether it is alive
_KILL_S: Final = 1  # from SIGTERM, on which a stopped process does not act, to SIGKILL
_LONGEST_NAME: Final = 40  # Kubernetes appends up to 23 characters for the name of a pod

_NAME: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_QUANTITY: Final = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|[KMGTPE]i?)?")
_RESOURCE: Final = re.compile(r"([a-z0-9.-]+/)?[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?")

Document = dict[str, Any]


@dataclass(frozen=True)
class KubernetesJob:
    """What the manifests of a job need to know.

    `arguments` are what follows the options of `meshmend worker`: the script and its arguments.

    Raises:
        InputError: a setting has no meaning in Kubernetes, or the hosts do not tile the mesh.
    """

    config: JobConfig
    arguments: tuple[str, ...]

    def __post_init__(self) -> None:
        wanted = self.config.kubernetes
        _check_name("--name", self.name, longest=_LONGEST_NAME)
        _check_name("--namespace", wanted.namespace or "default")
        _check_name("--secret", self.secret_name)
        if not wanted.image or re.search(r"\s", wanted.image):
            raise InputError(f"--image needs the name of an image, but got {wanted.image!r}")
        host_blocks(self.mesh, self.host)  # refuses a block that does not tile the mesh
        for resource, quantity in self.resources:
            if not _RESOURCE.fullmatch(resource) or not _QUANTITY.fullmatch(quantity):
                raise InputError(
                    f"a resource needs a name and a quantity such as google.com/tpu=4 or "
                    f"memory=32Gi, but got {resource}={quantity}"
                )
        for claim, folder in self.claims:
            _check_name("--mount", claim)
            if not folder.startswith("/") or ":" in folder:
                raise InputError(f"--mount needs CLAIM:/FOLDER, but got {claim}:{folder}")

    @property
    def name(self) -> str:
        """The name of the job."""
        return self.config.job.name

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh of the job."""
        return configured_mesh(self.config.mesh)

    @cached_property
    def host(self) -> tuple[int, ...]:
        """The block of chips that one pod has."""
        block = self.config.hosts.block
        return host_shape_from(block, self.mesh) if block else (1,) * len(self.mesh.shape)

    @cached_property
    def of_processes(self) -> JobConfig:
        """The settings of its coordinator and workers: the chips of a pod fail together."""
        board = self.config.mesh.board
        if not board and prod(self.host) > 1:
            board = format_shape(self.host)
        if board:
            board = format_shape(board_from(board, self.mesh))
        return self.config.with_({"mesh.board": board})

    @cached_property
    def resources(self) -> tuple[tuple[str, str], ...]:
        """What one worker pod asks for: names and quantities."""
        wanted = self.config.kubernetes
        named = [(name, value) for name in ("cpu", "memory") if (value := getattr(wanted, name))]
        option, like = "--chips-resource", "NAME=COUNT such as google.com/tpu=4"
        return (*named, *(_pair(text, "=", option, like) for text in wanted.chips_resource))

    @cached_property
    def claims(self) -> tuple[tuple[str, str], ...]:
        """Volume claims, and where each is mounted."""
        mounts = self.config.kubernetes.mount
        return tuple(_pair(text, ":", "--mount", "CLAIM:/FOLDER") for text in mounts)

    @property
    def n_hosts(self) -> int:
        """The number of worker pods."""
        return self.mesh.n_chips // prod(self.host)

    @property
    def secret_name(self) -> str:
        """The name of the Secret that holds the job's secret."""
        return self.config.kubernetes.secret or f"{self.name}-secret"


def jobset_manifests(job: KubernetesJob) -> list[Document]:
    """Return the manifests of a job as one JobSet with a coordinator and workers.

    The JobSet is complete when all workers are: the coordinator may end before a script has saved
    its model. No failure restarts the whole set.
    """
    replicated = [
        {"name": "coordinator", "replicas": 1, "template": {"spec": _coordinator_spec(job)}},
        {"name": "workers", "replicas": 1, "template": {"spec": _worker_spec(job)}},
    ]
    spec = {
        "successPolicy": {"operator": "All", "targetReplicatedJobs": ["workers"]},
        "failurePolicy": {"maxRestarts": 0},
        "replicatedJobs": replicated,
    }
    jobset = _document(job, "jobset.x-k8s.io/v1alpha2", "JobSet", job.name, spec)
    return [*_beside(job), jobset]


def indexed_job_manifests(job: KubernetesJob) -> list[Document]:
    """Return the manifests of a job as two Jobs: the coordinator's, and one of all workers."""
    coordinator = _document(job, "batch/v1", "Job", _coordinator_name(job), _coordinator_spec(job))
    workers = _document(job, "batch/v1", "Job", job.name, _worker_spec(job))
    return [*_beside(job), coordinator, workers]


def _beside(job: KubernetesJob) -> list[Document]:
    """Return the volume of the coordinator's record, its service, and the disruption budget."""
    name = _coordinator_name(job)
    claim = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": _RECORD_SIZE}},
    }
    service = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,
        "selector": _labels(job, "coordinator"),
        "ports": [
            {"name": "coordinator", "port": PORT, "protocol": "TCP"},
            {"name": "metrics", "port": METRICS_PORT, "protocol": "TCP"},
        ],
    }
    # Of pods that belong to a Job, a budget can only say how many must stay.
    budget = {
        "minAvailable": job.n_hosts - 1,
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
        "selector": {"matchLabels": _labels(job, "worker")},
    }
    return [
        _document(job, "v1", "PersistentVolumeClaim", name, claim),
        _document(job, "v1", "Service", name, service),
        _document(job, "policy/v1", "PodDisruptionBudget", f"{job.name}-workers", budget),
    ]


def _coordinator_spec(job: KubernetesJob) -> Document:
    """Return the spec of the Job that runs the coordinator, with its record on a volume."""
    command = [
        *("meshmend", "coordinator", "--listen", f"0.0.0.0:{PORT}"),
        *("--state", f"{_RECORD_FOLDER}/record.json", "--metrics", f"0.0.0.0:{METRICS_PORT}"),
        *command_words("coordinator", job.of_processes),
    ]
    container = {
        "name": "coordinator",
        "image": job.config.kubernetes.image,
        "command": command,
        "env": [_secret_variable(job)],
        "ports": [
            {"name": "coordinator", "containerPort": PORT, "protocol": "TCP"},
            {"name": "metrics", "containerPort": METRICS_PORT, "protocol": "TCP"},
        ],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 5},
        # The kernel accepts connections for a process that hangs, so the answer is what counts.
        "livenessProbe": {
            "httpGet": {"path": "/metrics", "port": METRICS_PORT},
            "initialDelaySeconds": 30,
            "periodSeconds": _ALIVE_S,
            "timeoutSeconds": _ALIVE_S,
            "failureThreshold": 3,
            "terminationGracePeriodSeconds": _KILL_S,
        },
        "volumeMounts": [{"name": "record", "mountPath": _RECORD_FOLDER}, *_mounts(job)],
    }
    claim = {"claimName": _coordinator_name(job)}
    volumes = [{"name": "record", "persistentVolumeClaim": claim}, *_volumes(job)]
    return _job_spec(job, "coordinator", container, volumes, n_pods=1)


def _worker_spec(job: KubernetesJob) -> Document:
    """Return the spec of the indexed Job whose pod number k has the k-th block of chips."""
    n_chips = prod(job.host)
    command_name = "agent" if n_chips > 1 else "worker"
    command = [
        *("meshmend", command_name, "--coordinator", f"{_coordinator_name(job)}:{PORT}"),
        *("--bind", "$(POD_IP)"),
        *map(_literal, command_words(command_name, job.of_processes)),
        *map(_literal, job.arguments),
    ]
    pod_ip = {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}
    ready = f'test "$(ls {READY_FOLDER} | wc -l)" -ge {n_chips}'
    container = {
        "name": "worker",
        "image": job.config.kubernetes.image,
        "command": command,
        "env": [pod_ip, _secret_variable(job), {"name": READY_DIR.name, "value": READY_FOLDER}],
        "readinessProbe": {"exec": {"command": ["sh", "-c", ready]}, "periodSeconds": 5},
        **_resources(job),
        **({"volumeMounts": mounts} if (mounts := _mounts(job)) else {}),
    }
    return _job_spec(job, "worker", container, _volumes(job), n_pods=job.n_hosts)


def _job_spec(
    job: KubernetesJob,
    component: str,
    container: Mapping[str, Any],
    volumes: list[Document],
    *,
    n_pods: int,
) -> Document:
    tolerations = [
        {
            "key": f"node.kubernetes.io/{state}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": _LOST_NODE_S,
        }
        for state in ("not-ready", "unreachable")
    ]
    pod = {
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": _GRACE_S,
        "tolerations": tolerations,
        "containers": [dict(container)],
        **({"volumes": volumes} if volumes else {}),
    }
    return {
        "completionMode": "Indexed",
        "completions": n_pods,
        "parallelism": n_pods,
        "backoffLimit": job.config.kubernetes.max_restarts,
        "template": {"metadata": {"labels": _labels(job, component)}, "spec": pod},
    }


def _document(
    job: KubernetesJob, api_version: str, kind: str, name: str, spec: Document
) -> Document:
    namespace = {"namespace": where} if (where := job.config.kubernetes.namespace) else {}
    labels = {"app.kubernetes.io/name": "meshmend", "app.kubernetes.io/instance": job.name}
    metadata = {"name": name, **namespace, "labels": labels}
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, "spec": spec}


def _coordinator_name(job: KubernetesJob) -> str:
    return f"{job.name}-coordinator"


def _labels(job: KubernetesJob, component: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "meshmend",
        "app.kubernetes.io/instance": job.name,
        "app.kubernetes.io/component": component,
    }


def _secret_variable(job: KubernetesJob) -> Document:
    reference = {"name": job.secret_name, "key": SECRET_KEY}
    return {"name": SECRET.name, "valueFrom": {"secretKeyRef": reference}}


def _resources(job: KubernetesJob) -> Document:
    """Return what a worker pod requests; CPU has no limit, so that a pod may use idle cores."""
    if not job.resources:
        return {}
    limits = {name: quantity for name, quantity in job.resources if name != "cpu"}
    requests = dict(job.resources)
    return {"resources": {"requests": requests, **({"limits": limits} if limits else {})}}


def _mounts(job: KubernetesJob) -> list[Document]:
    return [
        {"name": f"mount-{number}", "mountPath": folder}
        for number, (_, folder) in enumerate(job.claims)
    ]


def _volumes(job: KubernetesJob) -> list[Document]:
    return [
        {"name": f"mount-{number}", "persistentVolumeClaim": {"claimName": claim}}
        for number, (claim, _) in enumerate(job.claims)
    ]


def _literal(argument: str) -> str:
    """Return an argument so that Kubernetes does not replace `$(NAME)` in it."""
    return argument.replace("$", "$$")


def _pair(text: str, separator: str, option: str, like: str) -> tuple[str, str]:
    first, found, second = text.partition(separator)
    if not (first and found and second):
        raise InputError(f"{option} needs {like}, but got {text!r}")
    return first, second


def _check_name(option: str, name: str, *, longest: int = 63) -> None:
    if not _NAME.fullmatch(name) or len(name) > longest:
        raise InputError(
            f"{option} needs lower-case letters, digits and dashes, a letter first, at most "
            f"{longest} characters, but got {name!r}"
        )


_WORD: Final = re.compile(r"(--?)?[A-Za-z/][A-Za-z0-9_./-]*")
_NOT_TEXT: Final = frozenset(["y", "n", "yes", "no", "on", "off", "true", "false", "null"])


def yaml_text(documents: Sequence[Mapping[str, Any]]) -> str:
    """Return documents as one YAML stream, separated by lines of three dashes."""
    return "---\n".join("".join(f"{line}\n" for line in _lines(each)) for each in documents)


def _lines(value: Any) -> Iterator[str]:
    """Yield the lines of a mapping or list that is not empty."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            name = _scalar(str(key))
            if _is_block(item):
                yield f"{name}:"
                yield from (f"  {line}" for line in _lines(item))
            else:
                yield f"{name}: {_scalar(item)}"
        return
    for item in value:
        if _is_block(item):
            first, *others = _lines(item)
            yield f"- {first}"
            yield from (f"  {line}" for line in others)
        else:
            yield f"- {_scalar(item)}"


def _is_block(value: Any) -> bool:
    return isinstance(value, Mapping | list | tuple) and len(value) > 0


def _scalar(value: Any) -> str:
    if not isinstance(value, str):
        return json.dumps(value)  # numbers, booleans, null and what is empty are written as in JSON
    if _WORD.fullmatch(value) and value.lower() not in _NOT_TEXT:
        return value
    return f'"{"".join(map(_character, value))}"'


def _character(character: str) -> str:
    """Return a character of a quoted text; all but printable ASCII is written as its number."""
    if character in '"\\':
        return f"\\{character}"
    return character if " " <= character <= "~" else f"\\U{ord(character):08x}"

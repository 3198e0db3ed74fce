"""Manifests for Kubernetes: valid by the published schemas, and what they promise."""

from pathlib import Path
from typing import Any

import pytest

from meshmend.cli.main import run_line
from meshmend.errors import InputError
from meshmend.launch.hosts import own_chips_from
from meshmend.topology.mesh import Mesh

yaml = pytest.importorskip("yaml")

LINE = ["--mesh", "4x4", "--image", "my/training:1", "--name", "train"]
HOSTS = ["--hosts", "2x2", "--cpu", "8", "--memory", "32Gi", "--chips-resource", "google.com/tpu=4"]
MOUNTS = ["--namespace", "ml", "--secret", "mine", "--mount", "data:/data", "--run-dir", "/data/r"]

Document = dict[str, Any]


def manifests(
    kind: str, capsys: pytest.CaptureFixture[str], *options: str
) -> tuple[str, list[Document]]:
    """Return the comments and documents that `meshmend submit` prints."""
    assert run_line(["submit", kind, *LINE, *options, "train.py", "--lr", "0.1"]) == 0
    text = capsys.readouterr().out
    comments = "".join(line for line in text.splitlines(True) if line.startswith("#"))
    return comments, list(yaml.safe_load_all(text))


def only(documents: list[Document], kind: str, name: str) -> Document:
    (found,) = [
        each for each in documents if each["kind"] == kind and each["metadata"]["name"] == name
    ]
    return found


def job_specs(documents: list[Document]) -> dict[str, Document]:
    """Return the specs of the coordinator's Job and of the workers' Job, in either form."""
    jobs = {each["metadata"]["name"]: each["spec"] for each in documents if each["kind"] == "Job"}
    if jobs:
        return {"coordinator": jobs["train-coordinator"], "workers": jobs["train"]}
    jobset = only(documents, "JobSet", "train")["spec"]
    return {each["name"]: each["template"]["spec"] for each in jobset["replicatedJobs"]}


def container_of(job: Document) -> Document:
    (container,) = job["template"]["spec"]["containers"]
    found: Document = container
    return found


@pytest.fixture(params=["jobset", "job"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("options", [[], [*HOSTS, *MOUNTS]], ids=["few", "all"])
def test_manifests_are_valid_by_the_schemas_of_kubernetes(
    kind: str, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """From version 1.27, the first with `unhealthyPodEvictionPolicy` on, to the newest known."""
    schemas = pytest.importorskip("kubernetes_validate")
    _, documents = manifests(kind, capsys, *options)
    plain = [each for each in documents if each["kind"] != "JobSet"]
    plain += [
        {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": spec}
        for name, spec in job_specs(documents).items()
    ]

    assert len(plain) >= 5
    for version in ("1.27", schemas.latest_version()):
        for document in plain:
            schemas.validate(document, version, strict=True)


def test_the_jobset_is_valid_by_the_published_model(capsys: pytest.CaptureFixture[str]) -> None:
    """The model drops fields that it does not know, so nothing may be missing afterwards."""
    models = pytest.importorskip("kubeflow_trainer_api.models.jobset_v1alpha2_job_set")
    _, documents = manifests("jobset", capsys, *HOSTS, *MOUNTS)
    jobset = only(documents, "JobSet", "train")

    read = models.JobsetV1alpha2JobSet.from_dict(jobset).to_dict()

    assert without_empty(read) == without_empty(jobset)


def without_empty(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_empty(item) for key, item in value.items() if item not in ({}, None)}
    return [without_empty(item) for item in value] if isinstance(value, list) else value


def test_schemas_find_a_field_that_does_not_exist(capsys: pytest.CaptureFixture[str]) -> None:
    schemas = pytest.importorskip("kubernetes_validate")
    _, documents = manifests("job", capsys)
    worker = only(documents, "Job", "train")
    schemas.validate(worker, "1.27", strict=True)

    worker["spec"]["template"]["spec"]["restartPolcy"] = "OnFailure"

    with pytest.raises(schemas.ValidationError):
        schemas.validate(worker, "1.27", strict=True)


def test_only_a_pod_that_failed_is_made_again(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, documents = manifests(kind, capsys, *HOSTS)
    jobs = job_specs(documents)

    assert (jobs["coordinator"]["completions"], jobs["workers"]["completions"]) == (1, 4)
    for job in jobs.values():
        assert job["completionMode"] == "Indexed"
        assert job["parallelism"] == job["completions"]
        assert job["backoffLimit"] == 1000
        assert job["template"]["spec"]["restartPolicy"] == "OnFailure"
        assert [each["tolerationSeconds"] for each in job["template"]["spec"]["tolerations"]] == [
            30,
            30,
        ]
    if kind == "jobset":
        spec = only(documents, "JobSet", "train")["spec"]
        assert spec["failurePolicy"] == {"maxRestarts": 0}
        assert spec["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["workers"]}


def test_service_and_budget_select_the_pods(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, documents = manifests(kind, capsys, *HOSTS)
    labels = {
        name: job["template"]["metadata"]["labels"] for name, job in job_specs(documents).items()
    }
    service = only(documents, "Service", "train-coordinator")["spec"]
    budget = only(documents, "PodDisruptionBudget", "train-workers")["spec"]

    assert labels["coordinator"] != labels["workers"]
    assert service["selector"] == labels["coordinator"]
    assert service["clusterIP"] == "None"
    assert budget["selector"] == {"matchLabels": labels["workers"]}
    assert budget["minAvailable"] == 3  # of four pods


def test_the_secret_comes_from_a_secret_and_is_in_no_argument(
    kind: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MESHMEND_SECRET", "the secret of whoever submits")
    comments, documents = manifests(kind, capsys, "--namespace", "ml")

    reference = {"secretKeyRef": {"name": "train-secret", "key": "secret"}}
    for job in job_specs(documents).values():
        variables = {each["name"]: each for each in container_of(job)["env"]}
        assert variables["MESHMEND_SECRET"]["valueFrom"] == reference
    assert "whoever submits" not in str(documents)
    assert "kubectl --namespace ml create secret generic train-secret" in comments
    assert "--from-file=secret=/dev/stdin" in comments


def test_the_coordinator_keeps_its_record_on_a_volume(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, documents = manifests(kind, capsys)
    coordinator = job_specs(documents)["coordinator"]
    container = container_of(coordinator)
    command = container["command"]
    (volume,) = coordinator["template"]["spec"]["volumes"]

    assert volume["persistentVolumeClaim"] == {"claimName": "train-coordinator"}
    only(documents, "PersistentVolumeClaim", "train-coordinator")
    record = command[command.index("--state") + 1]
    assert record.startswith(container["volumeMounts"][0]["mountPath"] + "/")


def test_a_coordinator_that_hangs_is_restarted(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """By a probe of its metrics; `test_late_and_ready` asks a frozen coordinator that question."""
    _, documents = manifests(kind, capsys)
    container = container_of(job_specs(documents)["coordinator"])
    probe, command = container["livenessProbe"], container["command"]
    ports = {each["containerPort"] for each in container["ports"]}
    service = only(documents, "Service", "train-coordinator")["spec"]

    assert probe["httpGet"] == {"path": "/metrics", "port": 9090}
    assert command[command.index("--metrics") + 1] == "0.0.0.0:9090"
    assert ports == {each["port"] for each in service["ports"]} == {7000, 9090}
    assert "livenessProbe" not in container_of(job_specs(documents)["workers"])


def test_a_pod_of_one_chip_runs_a_worker_and_a_pod_of_a_block_runs_an_agent(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, documents = manifests(kind, capsys)
    one = container_of(job_specs(documents)["workers"])["command"]
    _, documents = manifests(kind, capsys, "--hosts", "4x2")
    block = container_of(job_specs(documents)["workers"])["command"]

    assert one[:2] == ["meshmend", "worker"]
    assert one[-3:] == ["train.py", "--lr", "0.1"]
    assert block[:2] == ["meshmend", "agent"]
    assert block[block.index("--hosts") + 1] == "4x2"
    assert block[block.index("--board") + 1] == "4x2"
    assert job_specs(documents)["workers"]["completions"] == 2


def test_settings_reach_the_commands_of_the_pods_that_read_them(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("timing.link_timeout=7", "timing.holder_timeout=90", "kubernetes.max_restarts=3")
    _, documents = manifests(kind, capsys, *(word for each in given for word in ("--set", each)))
    specs = job_specs(documents)

    told = {name: " ".join(container_of(spec)["command"]) for name, spec in specs.items()}
    assert {spec["backoffLimit"] for spec in specs.values()} == {3}
    assert "--set timing.link_timeout=7 --set timing.holder_timeout=90" in told["coordinator"]
    assert "--set timing.gather=600 --set timing.linger=86400" in told["coordinator"]
    assert "--set timing.link_timeout=7 --set timing.alone=86400 train.py" in told["workers"]


@pytest.mark.parametrize(
    ("environment", "chips"),
    [
        ({"JOB_COMPLETION_INDEX": "0"}, ((0, 0), (0, 1))),
        ({"JOB_COMPLETION_INDEX": "3"}, ((1, 2), (1, 3))),
        ({"SLURM_NODEID": "1", "JOB_COMPLETION_INDEX": "3"}, ((0, 2), (0, 3))),
    ],
)
def test_a_host_has_the_block_of_its_number(
    environment: dict[str, str], chips: tuple[tuple[int, ...], ...]
) -> None:
    assert own_chips_from(None, "1x2", environment, Mesh((2, 4))) == chips


@pytest.mark.parametrize(
    ("chips", "hosts", "environment", "match"),
    [
        (None, None, {}, "either --chips, .* or --hosts, .*; it got neither"),
        (None, "1x2", {}, "none of SLURM_NODEID, JOB_COMPLETION_INDEX is set"),
        (None, "1x2", {"JOB_COMPLETION_INDEX": "4"}, "a host of 2x4, from 0 to 3, but it is '4'"),
        (None, "1x2", {"JOB_COMPLETION_INDEX": "-1"}, "from 0 to 3, but it is '-1'"),
        (None, "1x3", {"JOB_COMPLETION_INDEX": "0"}, "--hosts needs a block of chips that tiles"),
    ],
)
def test_an_agent_that_does_not_know_its_chips_is_refused(
    chips: str | None, hosts: str | None, environment: dict[str, str], match: str
) -> None:
    with pytest.raises(InputError, match=match):
        own_chips_from(chips, hosts, environment, Mesh((2, 4)))


def test_dollars_of_arguments_are_not_replaced_by_kubernetes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_line(["submit", "job", *LINE, "train.py", "$(HOME) $$5", "yes", "1e3", "a: b"]) == 0
    documents = list(yaml.safe_load_all(capsys.readouterr().out))

    command = container_of(job_specs(documents)["workers"])["command"]
    assert command[-4:] == ["$$(HOME) $$$$5", "yes", "1e3", "a: b"]


@pytest.mark.parametrize("mesh", ["1x8", "2x2x2", "5"])
def test_any_mesh_makes_as_many_pods_as_it_has_chips(
    mesh: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["--mesh", mesh, "--image", "i", "--name", "n", "--wrap", "all", "-m", "my.module"]
    assert run_line(["submit", "job", *line]) == 0
    documents = list(yaml.safe_load_all(capsys.readouterr().out))

    workers = only(documents, "Job", "n")["spec"]
    assert workers["completions"] == {"1x8": 8, "2x2x2": 8, "5": 5}[mesh]
    assert container_of(workers)["command"][-2:] == ["-m", "my.module"]


def test_manifests_are_written_to_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a folder" / "train.yaml"
    assert run_line(["submit", "jobset", *LINE, "-o", str(file), "train.py"]) == 0

    assert capsys.readouterr().out == ""
    assert list(yaml.safe_load_all(file.read_text()))[-1]["kind"] == "JobSet"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--hosts", "3x2"], "--hosts needs a block of chips that tiles the mesh 4x4"),
        (["--hosts", "two"], "--hosts needs a block of chips such as"),
        (["--hosts", "2"], "--hosts needs a block of chips that tiles the mesh 4x4"),
        (["--board", "2"], "--board needs a shape for 4x4"),
        (["--mesh", "4by4"], "--mesh needs positive extents"),
        (["--name", "Train"], "--name needs lower-case letters"),
        (["--name", "t" * 41], "at most 40 characters"),
        (["--namespace", "a b"], "--namespace needs lower-case letters"),
        (["--secret", "a/b"], "--secret needs lower-case letters"),
        (["--image", ""], "needs --image IMAGE, or kubernetes.image in --config"),
        (["--image", "a b"], "--image needs the name of an image"),
        (["--chips-resource", "tpu"], "--chips-resource needs NAME=COUNT"),
        (["--memory", "much"], "a resource needs a name and a quantity"),
        (["--mount", "data"], "--mount needs CLAIM:/FOLDER"),
        (["--mount", "data:here"], "--mount needs CLAIM:/FOLDER"),
        (["-o", "/proc/no/such"], "cannot write /proc/no/such"),
    ],
)
def test_what_makes_no_manifest_is_refused_in_one_line(
    kind: str, options: list[str], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_line(["submit", kind, *LINE, *options, "train.py"]) == 2

    shown = capsys.readouterr()
    (line,) = shown.err.splitlines()
    assert match in line
    assert shown.out == ""


def test_an_unknown_scheduler_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_line(["submit", "nomad", *LINE, "train.py"]) == 2
    assert "No such command 'nomad'" in capsys.readouterr().err

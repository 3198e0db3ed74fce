"""The metrics of a job as text, and the dashboard that shows them."""

import json
import re
from pathlib import Path

import pytest
from msgspec.structs import replace

from meshmend.membership.events import FabricMeasured
from meshmend.membership.generation import Generation, Seat
from meshmend.membership.job import JobFingerprint
from meshmend.membership.job_status import (
    RECOVERY_BUCKETS_S,
    ChipsWait,
    JobCounts,
    JobPhase,
    JobStatus,
    SharedArguments,
    WorkerSummary,
)
from meshmend.pages.report.metrics_text import SentBytes, families, metrics_text

DASHBOARD = Path(__file__).parents[3] / "examples" / "grafana" / "meshmend.json"
A, B, C = (0, 0), (0, 1), (1, 0)
SENT: SentBytes = {A: {B: 1000, C: 10}, B: {A: 2000}}


def worker(chip: tuple[int, int], behind_s: float | None = None) -> WorkerSummary:
    return WorkerSummary(chip, ("host", 1), 2, 7, behind_s=behind_s)


STATUS = JobStatus(
    job='a "job"',
    version="0.1",
    shape=(2, 2),
    phase=JobPhase.TRAINING,
    uptime_s=60.5,
    step=7,
    generation=Generation(2, (Seat(A, ("host", 1), 1), Seat(B, ("host", 2), 1))),
    step_ago_s=0.25,
    waits=(ChipsWait((C,), (), "its board must be complete", 12.5),),
    workers=(worker(A), worker(B, behind_s=3.0), worker(C)),
    arguments=(
        SharedArguments(JobFingerprint("0.1", 99, 64, 0, "constant", "m", "o", 5, "s"), (A, B, C)),
    ),
    fabric=FabricMeasured(6.15e6, 44e-6, 12e-6, 0),
    counts=JobCounts(
        steps=7, samples=448, refusals=1, recoveries=(0, 1, 2, *[0] * 7, 1), recovery_s=401.25
    ),
)


def values(text: str) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_the_text_holds_what_the_status_says() -> None:
    found = values(metrics_text(STATUS, SENT))

    assert found['meshmend_info{name="a \\"job\\"",mesh="2x2",version="0.1"}'] == 1
    assert found['meshmend_phase{phase="training"}'] == 1
    assert sum(found[name] for name in found if name.startswith("meshmend_phase")) == 1
    expected = {
        "step": 7,
        "target_steps": 99,
        "steps_total": 7,
        "samples_total": 448,
        "last_step_age_seconds": 0.25,
        "uptime_seconds": 60.5,
        "chips": 4,
        "live_chips": 2,
        "waiting_chips": 1,
        "behind_chips": 1,
        "generation": 2,
        "longest_wait_seconds": 12.5,
        "fabric_bandwidth_bytes": 6.15e6,
        "fabric_hop_seconds": 44e-6,
        "fabric_message_seconds": 12e-6,
        "refusals_total": 1,
        "sent_bytes_total": 3010,
        'link_sent_bytes_total{chip="0,0",peer="0,1"}': 1000,
    }
    assert {name: found[f"meshmend_{name}"] for name in expected} == expected


def test_recoveries_are_a_histogram_whose_buckets_add_up() -> None:
    found = values(metrics_text(STATUS, SENT))
    limits = [*(f"{each:g}" for each in RECOVERY_BUCKETS_S), "+Inf"]

    counts = [found[f'meshmend_recovery_seconds_bucket{{le="{limit}"}}'] for limit in limits]

    assert counts == [0, 1, 3, 3, 3, 3, 3, 3, 3, 3, 4]
    assert found["meshmend_recovery_seconds_count"] == 4
    assert found["meshmend_recovery_seconds_sum"] == 401.25


def test_a_job_that_has_not_begun_has_metrics_too() -> None:
    empty = JobStatus("job", "0.1", (4, 4, 4), JobPhase.GATHERING, 0.0, 0)

    found = values(metrics_text(empty, {}))

    assert (found["meshmend_chips"], found["meshmend_live_chips"]) == (64, 0)
    assert "meshmend_target_steps" not in found


def test_names_follow_the_conventions_and_every_family_has_one_help() -> None:
    listed = list(families(STATUS, SENT))

    assert len({each.name for each in listed}) == len(listed)
    for each in listed:
        assert re.fullmatch(r"meshmend_[a-z_]+", each.name)
        assert (each.kind == "counter") == each.name.endswith("_total")
        assert each.help.endswith(".")


def test_a_huge_mesh_has_the_total_only() -> None:
    many: SentBytes = {(row, 0): {(row, 1): 1} for row in range(6000)}

    found = values(metrics_text(STATUS, many))

    assert found["meshmend_sent_bytes_total"] == 6000
    assert not [name for name in found if name.startswith("meshmend_link")]


def test_prometheus_own_parser_reads_it() -> None:
    parser = pytest.importorskip(
        "prometheus_client.parser", reason="prometheus-client, of the extra dev, is not installed"
    )

    parsed = {
        each.name: each
        for each in parser.text_string_to_metric_families(
            metrics_text(replace(STATUS, job="back\\slash\nand line"), SENT)
        )
    }

    ours = {each.name.removesuffix("_total"): each for each in families(STATUS, SENT)}
    assert parsed.keys() == ours.keys()
    for name, each in ours.items():
        assert parsed[name].type == each.kind
        assert len(parsed[name].samples) == len(each.samples)
    assert parsed["meshmend_info"].samples[0].labels["name"] == "back\\slash\nand line"


def test_the_dashboard_uses_only_metrics_that_exist() -> None:
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [each["query"]["query"] for each in dashboard["templating"]["list"][1:]]

    used = {name for text in expressions for name in re.findall(r"meshmend_\w+", text)}

    written = {name.partition("{")[0] for name in values(metrics_text(STATUS, SENT))}
    assert len(used) > 15
    assert used <= written

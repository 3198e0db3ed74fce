"""`meshmend bench`: real processes, real sockets, and where the kernel grants it a real mesh."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend.errors import BenchmarkError, InputError
from meshmend.lab.bench import openmpi
from meshmend.lab.bench.benchmark import (
    BenchmarkRequest,
    BenchmarkResults,
    PayloadResults,
    Result,
    results_svg,
    run_benchmark,
    save,
    summary,
)
from meshmend.lab.bench.contenders import (
    Buffer,
    Network,
    Participant,
    Planned,
    Run,
    expected,
    operand,
    planned,
    total,
)
from meshmend.lab.bench.openmpi import OpenMpi, openmpi_repetitions
from meshmend.lab.bench.worker_pool import WorkerPool
from meshmend.lab.testbed import records
from meshmend.planning.progress import no_progress
from meshmend.planning.target import Question
from meshmend.schedule.table import Collective
from meshmend.topology.fabric import Fabric
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from testbeds import require_testbed
from waiting import until

FABRIC = Fabric("test", 1e8, 1e-5, 1e-5)
PAYLOAD = 1 << 16


@pytest.fixture(autouse=True)
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder of testbeds' records that no other test sees; no worker outlives a test."""
    monkeypatch.setenv("MESHMEND_TESTBED_DIR", str(tmp_path / "run"))
    of_other_tests = set(children())
    yield
    assert not records.live_records()
    assert not set(children()) - of_other_tests


def children() -> list[int]:
    """Return the processes that this one has started and that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            text = (entry / "stat").read_text() if entry.name.isdigit() else ""
        except OSError:
            continue
        state, parent = text.rpartition(")")[2].split()[:2] if text else ("", "")
        if parent == str(os.getpid()) and state != "Z":
            found.append(int(entry.name))
    return found


def ring(mesh: Mesh) -> Planned:
    """Return a contender that every small mesh has."""
    return planned("ring-1d", Question(mesh, PAYLOAD, FABRIC), predicts=True, progress=no_progress)


class Faulty:
    """A contender that does what its function says on rank 0 and nothing on the others."""

    name = "faulty"
    n_elements = 16
    checked = Collective.ALLREDUCE

    def __init__(self, fault: Callable[[], None]) -> None:
        self._fault = fault

    def ready(self, participant: Participant) -> Run:
        def run(buffer: Buffer) -> Buffer:
            if participant.rank == 0:
                self._fault()
            return buffer

        return run


def fail() -> None:
    """Raise an error."""
    raise ValueError("no reason")


def die() -> None:
    """End the process without a word."""
    os._exit(3)


@given(st.integers(1, 300), st.integers(1, 400))
def test_operands_add_up_to_the_same_bits_in_any_order(n_ranks: int, n_elements: int) -> None:
    parts = [operand(rank, n_elements) for rank in range(n_ranks)]

    backwards = np.zeros(n_elements, dtype=np.float32)
    for part in reversed(parts):
        backwards += part

    assert np.array_equal(backwards, total(n_ranks, n_elements))


def test_a_worker_pool_times_a_schedule_and_checks_its_sum() -> None:
    mesh = parse_mesh("2x2")
    contender = ring(mesh)

    with WorkerPool(Network(mesh), [contender]) as pool:
        repetitions = [pool.measure(contender) for _ in range(3)]

    assert all(repetition.correct and repetition.time_s > 0 for repetition in repetitions)


def test_a_worker_pool_sees_a_wrong_sum() -> None:
    contender = Faulty(lambda: None)

    with WorkerPool(Network(parse_mesh("1x2")), [contender]) as pool:
        assert not pool.measure(contender).correct


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (fail, r"the worker of chip \(0, 0\) failed in faulty: ValueError: no reason"),
        (die, r"the worker of chip \(0, 0\) died in faulty"),
    ],
)
def test_a_worker_that_fails_is_named(fault: Callable[[], None], message: str) -> None:
    contender = Faulty(fault)

    with (
        pytest.raises(BenchmarkError, match=message),
        WorkerPool(Network(parse_mesh("1x2")), [contender]) as pool,
    ):
        pool.measure(contender)


def test_bench_compares_with_the_plan_that_does_not_know_the_speeds() -> None:
    require_testbed()
    request = BenchmarkRequest(
        parse_mesh("3x3", slow=["link:0,0-0,1=0.1"]),
        (1 << 18,),
        link_bandwidth=50e6 / 8,
        repeat=2,
    )

    measured = run_benchmark(request, no_progress)

    point = measured.sweep[0]
    known, unknown = point.results
    assert (known.name, unknown.name) == ("auto", "auto, speeds unknown")
    assert known.correct
    assert unknown.correct
    assert point.limit_s == pytest.approx((1 << 18) / 6.25e6 / 1.1)
    assert known.predicted_s is not None
    assert unknown.predicted_s is not None
    assert 1.8 * known.predicted_s < unknown.predicted_s
    assert min(known.times_s) < min(unknown.times_s)  # by far: no busy machine turns it round


def test_bench_on_loopback_has_no_limit_and_no_prediction() -> None:
    request = BenchmarkRequest(
        parse_mesh("2x2"), (PAYLOAD, 2 * PAYLOAD + 3), peers=("gloo",), repeat=2
    )
    pytest.importorskip("torch")

    document = summary(run_benchmark(request, no_progress))

    assert [point["payload_bytes"] for point in document["sweep"]] == [PAYLOAD, 2 * PAYLOAD]
    for point in document["sweep"]:
        assert point["limit_s"] is None
        assert [result["name"] for result in point["results"]] == ["auto", "gloo"]
        for result in point["results"]:
            assert result["correct"]
            assert result["ratio_to_limit"] is None is result["predicted_s"]
            assert 0 < result["min_s"] <= result["median_s"] <= result["max_s"]


def test_blocks_of_an_all_to_all_are_all_different_and_exact() -> None:
    """So a block at the place of another is seen, also where a block has the period's length."""
    n_ranks, n_elements = 5, 5 * 251
    ranks = [expected(Collective.ALL_TO_ALL, r, n_ranks, n_elements) for r in range(n_ranks)]
    given_blocks = np.stack([each.given for each in ranks]).reshape(n_ranks, n_ranks, -1)
    got_blocks = np.stack([each.result for each in ranks]).reshape(n_ranks, n_ranks, -1)

    assert np.array_equal(got_blocks, given_blocks.transpose(1, 0, 2))
    assert len(np.unique(given_blocks.reshape(n_ranks**2, -1), axis=0)) == n_ranks**2
    assert given_blocks.max() < 1 << 24


def test_bench_measures_an_all_to_all_beside_gloo_and_checks_every_block() -> None:
    pytest.importorskip("torch")
    request = BenchmarkRequest(
        parse_mesh("2x3").without("0,1"),
        (1003,),
        algorithms=("auto", "pairs", "relays"),
        peers=("gloo",),
        repeat=1,
        collective=Collective.ALL_TO_ALL,
    )

    document = summary(run_benchmark(request, no_progress))

    assert document["collective"] == "all-to-all"
    assert document["payload_bytes"] == 1000  # a multiple of 5 chips x 4 bytes
    assert [each["name"] for each in document["results"]] == ["auto", "pairs", "relays", "gloo"]
    assert all(each["correct"] for each in document["results"])
    assert document["results"][-1]["detail"] == "torch.distributed all_to_all_single"


def test_blocks_that_arrive_in_the_wrong_place_are_seen() -> None:
    """A plan whose blocks stay where sender and receiver agreed is no all-to-all for its user."""
    mesh = parse_mesh("1x3")
    question = Question(mesh, 1200, FABRIC, Collective.ALL_TO_ALL)
    right = planned("pairs", question, predicts=False, progress=no_progress)
    wrong = replace(right, name="wrong", checked=Collective.ALLREDUCE)

    with WorkerPool(Network(mesh), [right, wrong]) as pool:
        assert pool.measure(right).correct
        assert not pool.measure(wrong).correct


def test_auto_on_loopback_is_what_a_process_group_takes_there() -> None:
    question = Question(parse_mesh("2x3").without("0,1"), 1e6, FABRIC)
    here = planned("auto", question, predicts=False, progress=no_progress)
    on_a_testbed = planned("auto", question, predicts=True, progress=no_progress)

    assert here.schedule.algorithm == "rank-ring"
    assert on_a_testbed.schedule.algorithm != "rank-ring"


def test_bench_on_a_testbed_stays_above_the_limit_and_near_the_simulator() -> None:
    require_testbed()
    request = BenchmarkRequest(
        parse_mesh("2x2"),
        (1 << 18,),
        algorithms=("auto", "ring-1d"),
        link_bandwidth=100e6 / 8,
        repeat=3,
    )

    measured = run_benchmark(request, no_progress)

    point = measured.sweep[0]
    limit_s = point.limit_s
    assert limit_s is not None
    assert limit_s == pytest.approx(0.75 * (1 << 18) / 12.5e6)
    for result in point.results:
        assert result.correct
        # Links carry a burst of 10 KB for free after idling.
        assert min(result.times_s) > 0.9 * limit_s
        assert result.predicted_s is not None
        assert result.predicted_s < 3 * min(result.times_s)


def test_openmpi_is_measured_where_it_is_installed() -> None:
    if reason := openmpi.why_unavailable():
        pytest.skip(reason)

    repetitions = openmpi_repetitions(Network(parse_mesh("1x2")), OpenMpi(1000), 2)

    assert len(repetitions) == 2
    assert all(repetition.correct and repetition.time_s > 0 for repetition in repetitions)


def test_openmpi_is_left_out_with_a_reason_where_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")

    assert "--compare openmpi needs mpirun and mpicc, but they are not installed" in str(
        openmpi.why_unavailable()
    )


def test_openmpi_that_fails_takes_nothing_from_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, text in (("mpicc", "exit 0"), ("mpirun", "echo out of luck; echo -----; exit 3")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    request = BenchmarkRequest(
        parse_mesh("1x2"), (PAYLOAD, PAYLOAD), ("ring-1d",), ("openmpi",), repeat=1
    )

    measured = run_benchmark(request, no_progress)

    assert [[each.name for each in point.results] for point in measured.sweep] == [["ring-1d"]] * 2
    assert measured.absent == {"openmpi": "openmpi failed: out of luck"}


@pytest.fixture
def measured() -> BenchmarkResults:
    """The results of two payloads, made up."""
    results = (
        Result("auto", "trees", (1.0, 1.2, 1.1), 1.05, correct=True),
        Result("gloo", "", (3.0, 2.0, 4.0), None, correct=True),
    )
    sweep = (PayloadResults(1000, 1.0, results), PayloadResults(2000, 2.0, results))
    request = BenchmarkRequest(parse_mesh("2x2", fail=["0,1"]), (1000, 2000), link_bandwidth=1e6)
    return BenchmarkResults(request, FABRIC, sweep, {})


def test_a_summary_has_the_median_and_its_ratio_to_the_limit(measured: BenchmarkResults) -> None:
    auto, gloo = summary(measured)["sweep"][1]["results"]

    assert (auto["median_s"], auto["min_s"], auto["max_s"]) == (1.1, 1.0, 1.2)
    assert auto["ratio_to_limit"] == pytest.approx(0.55)
    assert (gloo["median_s"], gloo["predicted_s"]) == (3.0, None)


def test_a_chart_has_a_curve_for_what_was_measured_and_what_was_predicted(
    measured: BenchmarkResults,
) -> None:
    picture = results_svg(measured)

    for name in (">auto<", ">auto, predicted<", ">gloo<", ">limit<"):
        assert name in picture
    assert picture.count('class="curve"') == 4


def test_one_payload_is_drawn_as_bars_with_predictions_marked(measured: BenchmarkResults) -> None:
    picture = results_svg(replace(measured, sweep=measured.sweep[:1]))

    assert picture.count('class="bar"') == 2
    assert picture.count('class="predicted"') == 1
    assert picture.count('class="limit"') == 1
    assert ">1.1<" in picture


@pytest.mark.parametrize("n_payloads", [1, 2])
def test_a_chart_of_loopback_explains_no_predictions(
    measured: BenchmarkResults, n_payloads: int
) -> None:
    on_loopback = replace(measured.request, link_bandwidth=None)

    picture = results_svg(replace(measured, request=on_loopback, sweep=measured.sweep[:n_payloads]))

    assert "Processes on loopback. Lower is better.<" in picture


def test_a_result_file_names_machine_versions_and_date(
    measured: BenchmarkResults, tmp_path: Path
) -> None:
    path = save(measured, tmp_path / "new")

    document = json.loads(path.read_text())
    assert path.name.startswith("bench-testbed-2x2-less-0-1-")
    assert {"date", "machine", "versions", "fabric", "sweep"} <= set(document)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"repeat": 0}, "--repeat needs 1 or more, but got 0"),
        ({"payloads": (3,)}, "--payload needs 4 bytes or more, but got 3"),
        ({"peers": ("nccl",)}, "--compare needs gloo or openmpi, but got 'nccl'"),
        ({"algorithms": ("magic",)}, "there is no algorithm 'magic'"),
        ({"mesh": Mesh((1, 1))}, "bench needs two connected chips or more, but got 1x1"),
        ({"mesh": Mesh((1, 3)), "algorithms": ("ring-1d",)}, "ring"),
        ({"collective": Collective.ALL_GATHER}, "bench measures allreduce or all-to-all, but got"),
        ({"collective": Collective.ALL_TO_ALL, "payloads": (15,)}, "needs 16 bytes or more"),
        (
            {"collective": Collective.ALL_TO_ALL, "algorithms": ("trees",)},
            "trees is an allreduce, but got the collective all-to-all",
        ),
        ({"algorithms": ("pairs",)}, "pairs is an all-to-all, but got the collective allreduce"),
        (
            {"collective": Collective.ALL_TO_ALL, "peers": ("openmpi",)},
            "--compare openmpi is of an allreduce only",
        ),
    ],
)
def test_a_request_that_cannot_be_met_is_refused(fields: dict[str, object], message: str) -> None:
    given = {"mesh": parse_mesh("2x2"), "payloads": (PAYLOAD,)} | fields

    with pytest.raises(InputError, match=message):
        BenchmarkRequest(**given)  # type: ignore[arg-type]  # on purpose of any type


def test_workers_end_with_a_bench_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "hang.py"
    script.write_text(
        "import time\n"
        "from meshmend.lab.bench.worker_pool import WorkerPool\n"
        "from meshmend.lab.bench.contenders import Network\n"
        "from meshmend.topology.text import parse_mesh\n"
        "with WorkerPool(Network(parse_mesh('1x2')), []) as pool:\n"
        "    print(*pool._pids, flush=True)\n"
        "    time.sleep(600)\n"
    )
    process = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    workers = process.stdout.readline().split()

    process.kill()
    process.communicate()

    assert len(workers) == 2
    until(lambda: not any(records.start_time(int(worker)) for worker in workers))

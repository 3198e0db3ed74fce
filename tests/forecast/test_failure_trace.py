"""Failure traces: read, merged, replayed on a mesh, and fitted."""

from pathlib import Path

import numpy as np
import pytest

from forecasts import DAY_S, FREE_JOB, prices_of, scenario
from meshmend.errors import InputError
from meshmend.forecast.failure_trace import (
    FailureTrace,
    Outage,
    fitted,
    read_trace,
    replayed,
    weibull_shape,
)
from meshmend.forecast.forecasting import FAULT_TOLERANT, FIRE_FIGHTER
from meshmend.forecast.machine import machine_of
from meshmend.forecast.scenario import RepairModel

LANL_HEAD = (
    "System,machine type,nodes,procstot,procsinnode,nodenum,nodenumz,node install,node prod,"
    "node decom,fru type,mem,cputype,memtype,num intercon,purpose,Prob Started,Prob Fixed,"
    "Down Time,Facilities,Hardware,Human Error,Network,Undetermined,Software,Same Event"
)


def lanl_row(system: int, node: int, start: str, end: str) -> str:
    return f"{system},cluster,49,6152,80,{node},{node},,,,,,,,,,{start},{end},6,,x,,,,,No"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "a trace.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_a_plain_trace_has_dates_or_seconds_and_its_outages_are_merged(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        "up,node,down\n200,b,100\n1970-01-01T00:02:30,a,1970-01-01T00:01:00\n300,b,150\n\n",
    )

    trace = read_trace(path)

    assert trace.outages == (Outage("a", 60.0, 150.0), Outage("b", 100.0, 300.0))
    assert (trace.nodes, trace.start_s, trace.end_s) == (("a", "b"), 60.0, 300.0)


def test_lanl_names_nodes_by_system_and_leaves_out_what_was_never_fixed(tmp_path: Path) -> None:
    rows = [
        LANL_HEAD,
        lanl_row(2, 0, "6/21/2005 10:54", "6/21/2005 11:00"),
        lanl_row(20, 0, "6/21/2005 12:00", "6/22/2005 12:00"),
        lanl_row(2, 1, "6/21/2005 12:00", ""),
    ]

    trace = read_trace(written(tmp_path, "\n".join(rows)))

    assert [outage.node for outage in trace.outages] == ["2.0", "20.0"]
    assert trace.outages[0].up_s - trace.outages[0].down_s == 360.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node,down,up\na,200,100\n", "line 2: the outage ends before its start"),
        ("node,down,up\na,soon,100\n", "a time is an ISO date or seconds, but got 'soon'"),
        ("node,down,up\na,nan,100\n", "a time needs to be finite"),
        ("node,down,up\na,1\n", "needs node, down and up"),
        ("when,who\n1,2\n", "needs a header with node, down and up"),
        ("node,down,up\n", "needs one outage or more"),
        ("", "needs a header"),
        ("a" * 200_000, "needs to be CSV, but field larger than field limit"),
        (f"{LANL_HEAD}\n{lanl_row(2, 0, 'June', '6/22/2005 12:00')}", "line 2"),
    ],
)
def test_a_trace_that_cannot_be_used_says_why(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_trace(written(tmp_path, text))


def test_a_replayed_trace_costs_exactly_its_outages() -> None:
    """Two hosts of eight are down for one and for two of four days."""
    asked = scenario(per_1000_days={"host": 1.0}, repair=RepairModel(DAY_S), job=FREE_JOB)
    outages = (Outage("n1", 0.0, DAY_S), Outage("n7", 2 * DAY_S, 4 * DAY_S))
    trace = FailureTrace(outages)

    found = replayed(trace, machine_of(asked), prices_of(asked), [FIRE_FIGHTER, FAULT_TOLERANT])

    assert (found.n_periods, found.period) == (4, "day")
    assert found.of("fire-fighter").goodput == pytest.approx(0.25, abs=1e-4)
    assert found.of("fault-tolerant").goodput == pytest.approx(1 - 3 / 4 / 8, abs=1e-4)


def test_a_trace_of_more_nodes_than_hosts_is_refused() -> None:
    asked = scenario("4x2", per_1000_days={"host": 1.0}, repair=RepairModel(DAY_S))
    trace = FailureTrace((Outage("a", 0, 1), Outage("b", 0, 1)))

    with pytest.raises(InputError, match="2 nodes that failed, but the mesh has 1 hosts"):
        replayed(trace, machine_of(asked), prices_of(asked), [FIRE_FIGHTER])


def test_a_fit_finds_the_rates_that_made_a_trace() -> None:
    rng = np.random.default_rng(1)
    outages = []
    for node in range(40):
        at = 100 * DAY_S * rng.weibull(0.7)
        while at < 4000 * DAY_S:
            up = at + DAY_S * float(rng.lognormal(-0.5, 1.0))
            outages.append(Outage(str(node), at, up))
            at = up + 100 * DAY_S * rng.weibull(0.7)
    trace = FailureTrace(tuple(sorted(outages, key=lambda outage: outage.down_s)))

    found = fitted(trace)

    assert found.failure_shape == pytest.approx(0.7, rel=0.1)
    assert found.repair_s == pytest.approx(DAY_S, rel=0.15)
    assert found.repair_sigma == pytest.approx(1.0, rel=0.1)
    mean_life_days = 100 * 1.2658  # gamma(1 + 1/0.7)
    assert found.failures_per_1000_host_days == pytest.approx(1000 / mean_life_days, rel=0.1)
    assert "--failures-per-1000-host-days" in found.describe()
    assert found.summary()["nodes"] == 40


def test_the_shape_of_equal_lives_is_at_the_end_of_the_range() -> None:
    assert weibull_shape(np.array([3.0, 3.0, 3.0, 3.0])) == pytest.approx(10.0, rel=1e-3)

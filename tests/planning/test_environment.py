"""A process's place in a job as environment variables, and back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshmend.config import (
    TESTBED_DIR,
    TTSIM,
    VARIABLES,
    JobConfig,
    MeshConfig,
    RunConfig,
    SumConfig,
    Timing,
)
from meshmend.errors import InputError
from meshmend.planning.environment import Environment, settings_from
from meshmend.planning.settings import TRANSPORTS
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import mesh_config
from strategies import broken_meshes

words = st.text(st.characters(codec="utf-8", exclude_characters="\0\n"), min_size=1)
hosts = st.text(st.characters(codec="utf-8", exclude_characters="\0\n:"), min_size=1)
counts = st.integers(0, (1 << 53) - 1)  # the largest that every JSON reader knows exactly
MESH = Mesh((4, 4))


@st.composite
def environments(draw: st.DrawFn) -> Environment:
    """Environments of workers, of the backend's processes, and of one that trains alone."""
    mesh, sums, chip = MeshConfig(), SumConfig(), None
    if draw(st.booleans()):
        broken = draw(broken_meshes())
        board = draw(st.none() | st.tuples(*[st.integers(1, 9)] * len(broken.shape)))
        mesh = mesh_config(broken, board)
        chip = draw(st.none() | st.sampled_from(Mesh(broken.shape).live))
        sums = SumConfig(
            algorithm=draw(words),
            slices=draw(counts),
            transport=draw(st.sampled_from(TRANSPORTS)),
            bind=draw(st.just("") | words),
            window_bytes=draw(counts),
            checksum=draw(st.booleans()),
        )
    return Environment(
        JobConfig(
            mesh=mesh,
            job=RunConfig(
                name=draw(words),
                run_dir=draw(st.just("") | words),
                ready_dir=draw(st.just("") | words),
                check_every_step=draw(st.booleans()),
            ),
            sums=sums,
            timing=Timing(
                link_timeout_s=draw(st.floats(0.5, 1e6)),
                join_timeout_s=draw(st.floats(0, 1e6)),
                wait_for_chip_s=draw(st.floats(0, 1e6)),
                alone_s=draw(st.floats(1, 1e6)),
            ),
        ),
        chip=chip,
        coordinator=draw(st.none() | st.tuples(hosts, st.integers(0, 65535))),
        secret=draw(st.just("") | st.text(min_size=16)),
        plans_ahead=draw(st.booleans()),
        faults=tuple(draw(st.lists(words))),
    )


@given(environments())
def test_an_environment_survives_being_written(environment: Environment) -> None:
    assert Environment.from_environment(environment.to_environment()) == environment


@given(environments(), environments())
def test_nothing_of_an_older_environment_is_left_over(old: Environment, new: Environment) -> None:
    variables = {**old.to_environment(), **new.to_environment()}

    assert Environment.from_environment(variables) == new


def test_every_variable_of_a_job_is_written() -> None:
    names = {each.name for each in VARIABLES if each not in (TESTBED_DIR, TTSIM)}

    assert set(Environment().to_environment()) == names
    assert set(Environment(JobConfig(mesh=mesh_config(MESH))).to_environment()) == names


def test_an_empty_environment_says_nothing() -> None:
    assert Environment.from_environment({}) == Environment()


@pytest.mark.parametrize(
    ("variables", "match"),
    [
        ({"MESHMEND_MESH": "4by4"}, "MESHMEND_MESH, .* need to describe a mesh, but: .* '4by4'"),
        ({"MESHMEND_WRAP": "5"}, "MESHMEND_WRAP and .* but: .* '5'"),
        ({"MESHMEND_FAIL": "9,9"}, "MESHMEND_FAIL need to describe a mesh, but: .*9, 9"),
        (
            {"MESHMEND_SLICES": "two"},
            "MESHMEND_SLICES needs a whole number of at least 0, but got 'two'",
        ),
        (
            {"MESHMEND_SLICES": "-1"},
            "MESHMEND_SLICES needs a whole number of at least 0, but got '-1'",
        ),
        ({"MESHMEND_WINDOW": "20kB"}, "MESHMEND_WINDOW needs bytes of at least 0, but got '20kB'"),
        ({"MESHMEND_TRANSPORT": "mpi"}, "MESHMEND_TRANSPORT needs one of .* but got 'mpi'"),
        ({"MESHMEND_CHIP": "a"}, "MESHMEND_CHIP needs a chip such as 0,1, but got 'a'"),
        ({"MESHMEND_CHIP": "4,0"}, "MESHMEND_CHIP needs a chip of 4x4 such as 0,1, but got '4,0'"),
        ({"MESHMEND_BOARD": "two"}, "MESHMEND_BOARD needs a shape such as 2x2, but got 'two'"),
        ({"MESHMEND_BOARD": "2"}, "MESHMEND_BOARD needs a shape for 4x4 such as 2x2, but got '2'"),
        ({"MESHMEND_COORDINATOR": "host"}, "MESHMEND_COORDINATOR needs HOST:PORT such as"),
        ({"MESHMEND_COORDINATOR": "a:70000"}, "needs HOST:PORT .* but got 'a:70000'"),
        ({"MESHMEND_PLAN_AHEAD": "yes"}, "MESHMEND_PLAN_AHEAD needs 1 or 0, but got 'yes'"),
        ({"MESHMEND_CHECK": "on"}, "MESHMEND_CHECK needs 1 or 0, but got 'on'"),
    ],
)
def test_a_bad_value_is_refused_in_one_line(variables: dict[str, str], match: str) -> None:
    with pytest.raises(InputError, match=match) as refused:
        Environment.from_environment({"MESHMEND_MESH": "4x4", **variables})

    assert "\n" not in str(refused.value)


def test_the_backend_says_that_it_needs_a_mesh() -> None:
    with pytest.raises(InputError, match=r"MESHMEND_MESH is not set; start the script with"):
        settings_from({})


def test_a_chip_needs_a_mesh_and_a_fault_needs_one_line() -> None:
    with pytest.raises(InputError, match="MESHMEND_CHIP needs a mesh, but MESHMEND_MESH is not"):
        Environment(chip=(0, 0))
    with pytest.raises(InputError, match="MESHMEND_INJECT needs one fault per line"):
        Environment(faults=("one\ntwo",))

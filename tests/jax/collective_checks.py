"""Checks of `meshmend.jax` that need virtual devices; `test_collectives` runs this as a script."""

import sys
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from meshmend import plan
from meshmend.errors import InputError, VerificationError
from meshmend.jax import (
    SumFrame,
    all_gather,
    all_to_all,
    allreduce,
    check_neighbours,
    device_mesh,
    pmean,
    reduce_scatter,
)
from meshmend.topology.mesh import Mesh
from meshmend.topology.text import parse_mesh
from virtual_devices import refused, run_checks

MESHES = {
    "12": parse_mesh("4x4", fail=["2x2@0,2"]),
    "60": parse_mesh("8x8", fail=["2x2@2,2"]),
    "252": parse_mesh("16x16", fail=["2x2@6,6"]),
    "3x5": parse_mesh("3x5", fail=["1,1"]),
    "2x3x4": parse_mesh("2x3x4", fail=["1,1,2"]),
    "torus": parse_mesh("4x4", wrap="all", fail=["2x2@1,1"]),
    "line": parse_mesh("1x5"),
    "link": parse_mesh("3x3", fail=["link:0,0-0,1", "link:1,1-1,2"]),
}
HOLE = MESHES["12"]

planned = cache(plan)


def on_chips(mesh: Mesh, function: Callable[..., Any], *, check_vma: bool = True) -> Any:
    """Return a function of arrays whose first axis is the chips, jitted."""
    devices = device_mesh(mesh, jax.devices()[: mesh.n_live])
    mapped = jax.shard_map(
        function, mesh=devices, in_specs=P("chips"), out_specs=P("chips"), check_vma=check_vma
    )
    return jax.jit(mapped)


def whole_numbers(mesh: Mesh, size: int = 1003) -> np.ndarray:
    return np.random.default_rng(0).integers(-4, 5, (mesh.n_live, size))


def varying(tree: Any) -> Any:
    """Return a replicated tree as one that `shard_map` takes for different on each device."""
    rank = lax.axis_index("chips")
    return jax.tree.map(lambda leaf: leaf + (0 * rank).astype(leaf.dtype), tree)


def summed(tree: Any) -> Any:
    return varying(jax.tree.map(lambda leaf: lax.psum(leaf, "chips"), tree))


def check_exact(name: str, algorithm: str, slices: int) -> None:
    """Whole numbers of three types are summed exactly, over links alone, to the same bits."""
    mesh = MESHES[name]
    made = planned(mesh, algorithm)
    numbers = whole_numbers(mesh)
    tree = {dtype: np.asarray(numbers, dtype) for dtype in ("float32", "bfloat16", "int32")}
    function = on_chips(mesh, partial(allreduce, plan=made, slices=slices))

    compiled = function.lower(tree).compile()
    ended = compiled(tree)

    use = check_neighbours(compiled, mesh, allow_routed=algorithm == "ft-two-d")
    assert use.are_counts_known
    assert not use.other_collectives
    for dtype, sums in ended.items():
        wanted = np.asarray(np.tile(numbers.sum(axis=0), (mesh.n_live, 1)), dtype)
        assert sums.dtype == dtype
        assert np.array_equal(np.asarray(sums), wanted), dtype


def check_tiles() -> None:
    """Chips of one colour are summed; the gradient is the sum of gradients."""
    mesh = MESHES["12"]
    made = plan(mesh, tile="2x2", payload="4KB")
    devices = device_mesh(mesh, jax.devices()[: mesh.n_live], tile="2x2")
    assert devices.axis_names == ("data", "model")
    assert devices.devices.shape == (3, 4)
    numbers = np.random.default_rng(0).integers(-4, 5, (3, 4, 103)).astype(np.float32)
    mapped = partial(
        jax.shard_map, mesh=devices, in_specs=P("data", "model"), out_specs=P("data", "model")
    )
    wanted = np.broadcast_to(numbers.sum(axis=0), numbers.shape)
    for slices in (1, 3):
        function = jax.jit(mapped(partial(allreduce, plan=made, axis_name="data", slices=slices)))
        assert np.array_equal(np.asarray(function(numbers)), wanted)
    turned = jax.jit(mapped(partial(allreduce, plan=made, axis_name=("model", "data"))))
    assert np.array_equal(np.asarray(turned(numbers)), wanted)
    mean = jax.jit(mapped(partial(pmean, plan=made)))(numbers)
    assert np.allclose(np.asarray(mean), wanted / 3)
    weights = np.random.default_rng(1).integers(-4, 5, numbers.shape).astype(np.float32)
    total = jax.jit(mapped(partial(allreduce, plan=made)))
    gradient = jax.grad(lambda x: (total(x) * weights).sum())(numbers)
    assert np.array_equal(np.asarray(gradient), np.broadcast_to(weights.sum(axis=0), numbers.shape))
    spare = plan(parse_mesh("3x3"), tile="2x2", payload="4KB")
    other = plan(mesh, tile="1x2", payload="4KB")
    for wrong, message in (
        (partial(allreduce, plan=made, backend="pallas"), "runs as permutes"),
        (partial(allreduce, plan=made, axis_name="model"), "over the axis 'data', but got 'model'"),
        (partial(allreduce, plan=other), "6 tiles of 2 chips .* but they have 3 and 4;"),
        (partial(allreduce, plan=spare), "needs all chips in tiles, but 1 are spares"),
    ):
        with pytest.raises(InputError, match=message):
            jax.jit(mapped(wrong))(numbers)


def check_same_bits() -> None:
    """Of numbers whose sums round, every replica still ends with the same bits."""
    numbers = np.random.default_rng(1).normal(size=(12, 999)).astype(np.float32)
    for algorithm in ("trees", "ft-two-d", "ring-1d", "rank-ring"):
        made = planned(HOLE, algorithm)
        ended = np.asarray(on_chips(HOLE, partial(allreduce, plan=made))(numbers))
        assert (ended.view(np.uint32) == ended.view(np.uint32)[0]).all(), algorithm
        assert np.allclose(ended[0], numbers.sum(axis=0), atol=1e-5)


def check_short_floats() -> None:
    """16-bit floats are added up in float32 and rounded once, unless another type is asked for."""
    numbers = np.asarray(np.random.default_rng(2).normal(size=(12, 500)), jnp.bfloat16)
    made = planned(HOLE, "trees")
    exact = numbers.astype(np.float64).sum(axis=0)

    ended = np.asarray(on_chips(HOLE, partial(allreduce, plan=made))(numbers))[0]
    rough_function = on_chips(HOLE, partial(allreduce, plan=made, accumulate=jnp.bfloat16))
    rough = np.asarray(rough_function(numbers))[0]

    rounded = exact.astype(np.float32).astype(jnp.bfloat16)
    assert (ended == rounded).mean() > 0.99
    errors = [np.abs(each.astype(np.float64) - exact).max() for each in (ended, rough)]
    assert errors[0] < 0.04 < errors[1]
    # XLA's CPU compiler widens bfloat16, so that its HLO does not tell what a TPU would move.
    text = rough_function.lower(numbers).as_text()
    assert "bf16" in next(line for line in text.splitlines() if "collective_permute" in line)


def check_trees() -> None:
    """Any tree agrees with `psum`: empty leaves, single numbers, truth values, complex ones."""
    made = planned(HOLE, "trees")
    random = np.random.default_rng(3)
    tree = {
        "matrix": np.asarray(random.normal(size=(12, 3, 5)), np.float32),
        "list": [np.zeros((12, 0)), np.arange(12, dtype=np.int8)],
        "complex": np.asarray(random.normal(size=(12, 2)) + 1j, np.complex64),
        "nothing": None,
    }
    ended = on_chips(HOLE, partial(allreduce, plan=made))(tree)
    wanted = on_chips(HOLE, summed)(tree)
    assert str(jax.tree.structure(ended)) == str(jax.tree.structure(wanted))
    for one, other in zip(jax.tree.leaves(ended), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert np.allclose(one, other, atol=1e-5)
    truths = np.arange(12) % 3 == 0
    assert np.asarray(on_chips(HOLE, partial(allreduce, plan=made))(truths)).tolist() == [4] * 12
    assert on_chips(HOLE, partial(allreduce, plan=made))({}) == {}
    single = on_chips(HOLE, lambda row: allreduce(row[0], made)[None])(np.arange(12.0))
    assert np.asarray(single).tolist() == [66.0] * 12


def check_not_a_number() -> None:
    """A nan or an infinity of one chip reaches all chips in its own place, and no other place."""
    numbers = np.zeros((12, 100), dtype=np.float32)
    numbers[3, 7], numbers[5, 50] = np.nan, np.inf

    ended = np.asarray(on_chips(HOLE, partial(allreduce, plan=planned(HOLE, "trees")))(numbers))

    assert np.isnan(ended[:, 7]).all()
    assert np.isinf(ended[:, 50]).all()
    assert np.isfinite(np.delete(ended, [7, 50], axis=1)).all()


def model(weights: dict[str, Any], rows: Any) -> Any:
    hidden = jnp.tanh(rows @ weights["in"] + weights["bias"])
    return jnp.mean((hidden @ weights["out"]) ** 2)


def check_gradients_of_a_model() -> None:
    """Gradients averaged by a plan agree with `pmean` to 1e-6, replicas bit for bit."""
    random = np.random.default_rng(4)
    weights = {
        "in": np.asarray(random.normal(size=(8, 16)) / 3, np.float32),
        "bias": np.zeros(16, np.float32),
        "out": np.asarray(random.normal(size=(16, 1)) / 4, np.float32),
    }
    rows = np.asarray(random.normal(size=(12 * 4, 8)), np.float32)
    made = planned(HOLE, "trees")

    def step(mean: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def local(rows: Any) -> Any:
            gradients = jax.grad(model)(varying(weights), rows)
            return jax.tree.map(lambda leaf: leaf[None], mean(gradients))

        return local

    ours = on_chips(HOLE, step(lambda tree: pmean(tree, made)))(rows)
    theirs = on_chips(HOLE, step(lambda tree: varying(lax.pmean(tree, "chips"))))(rows)

    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.abs(np.asarray(one) - np.asarray(other)).max() < 1e-6
        assert np.array_equal(one, np.broadcast_to(np.asarray(one)[0], one.shape))


def check_gradients_through_the_sum() -> None:
    """The gradient through a sum agrees with that through `psum`, whatever `check_vma` says."""
    check_gradients_of_sums(inside_vma=True, outside_vma=False)


def check_more_gradients() -> None:
    """What `check_gradients_through_the_sum` leaves out, because each case is compiled anew."""
    check_gradients_of_sums(inside_vma=False, outside_vma=True)


def check_gradients_of_sums(*, inside_vma: bool, outside_vma: bool) -> None:
    """Compare gradients that are taken inside and outside of the function of one chip."""
    made = planned(HOLE, "trees")
    random = np.random.default_rng(5)
    weights = np.asarray(random.normal(size=5), np.float32)
    rows = np.asarray(random.normal(size=(12 * 3, 5)), np.float32)

    def loss(total: Callable[[Any], Any], weights: Any, rows: Any) -> Any:
        return (total(jnp.tanh(rows @ weights)) ** 2).sum()

    def inside(total: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda rows: jax.grad(partial(loss, total))(varying(weights), rows)[None]

    def outside(total: Callable[[Any], Any], check_vma: bool) -> Any:
        def whole(weights: Any) -> Any:
            local = partial(loss, total, weights)
            return on_chips(HOLE, lambda rows: local(rows)[None], check_vma=check_vma)(rows).sum()

        return jax.grad(whole)(weights)

    def own(tree: Any) -> Any:
        return allreduce(tree, made)

    ours, theirs = (
        np.asarray(on_chips(HOLE, inside(total), check_vma=inside_vma)(rows))
        for total in (own, summed)
    )
    assert np.allclose(ours, theirs, rtol=1e-5, atol=1e-4)
    ours, theirs = (np.asarray(outside(total, outside_vma)) for total in (own, summed))
    assert np.allclose(ours, theirs, rtol=1e-5, atol=1e-4)


def check_means_of_whole_numbers() -> None:
    made = planned(HOLE, "trees")
    for numbers in (np.arange(12), np.arange(12.0)):
        ours = on_chips(HOLE, partial(pmean, plan=made))(numbers)
        theirs = on_chips(HOLE, lambda tree: varying(lax.pmean(tree, "chips")))(numbers)
        assert ours.dtype == theirs.dtype
        assert np.allclose(ours, theirs)


def check_parts() -> None:
    """Reduce-scatter and all-gather agree with JAX's own, and undo each other's shapes."""
    check_parts_of(HOLE, "ring-1d", 3)
    check_parts_of(MESHES["3x5"], "trees", None)
    check_truths_of(MESHES["torus"], "rank-ring")


def check_more_parts() -> None:
    """What `check_parts` leaves out, because each number of slices is compiled anew."""
    check_parts_of(HOLE, "ring-1d", None)
    check_parts_of(HOLE, "trees", None, 3)
    check_parts_of(MESHES["3x5"], "trees", 3)
    check_parts_of(MESHES["torus"], "rank-ring", None, 3)
    check_truths_of(HOLE, "trees")
    check_truths_of(HOLE, "ring-1d")
    check_truths_of(MESHES["3x5"], "trees")


def check_parts_of(mesh: Mesh, algorithm: str, *all_slices: int | None) -> None:
    n = mesh.n_live
    half = partial(plan, mesh, algorithm)
    scatter, gather = half(collective="reduce-scatter"), half(collective="all-gather")
    rows = np.random.default_rng(6).integers(-9, 9, (n * n * 2, 3)).astype(np.float32)
    tree = {"a": rows, "b": np.asarray(rows[:, 0], jnp.bfloat16)}
    for slices in all_slices:
        ours = on_chips(mesh, partial(reduce_scatter, plan=scatter, slices=slices))(tree)
        wanted = rows.reshape(n, 2 * n, 3).sum(axis=0)
        assert np.array_equal(ours["a"], wanted)
        assert np.array_equal(np.asarray(ours["b"], np.float32), wanted[:, 0])
        together = on_chips(
            mesh,
            lambda t: all_gather(t, gather, slices=slices)["a"][None],  # noqa: B023
        )(ours)
        assert np.array_equal(together, np.broadcast_to(wanted, (n, 2 * n, 3)))


def check_truths_of(mesh: Mesh, algorithm: str) -> None:
    gather = plan(mesh, algorithm, collective="all-gather")
    truths = np.random.default_rng(6).integers(0, 2, 2 * mesh.n_live).astype(bool)
    shown = on_chips(mesh, lambda t: all_gather(t, gather)[None])(truths)
    assert shown.dtype == bool
    assert np.array_equal(np.asarray(shown)[0], truths)


def check_gradients_of_parts() -> None:
    scatter = plan(HOLE, "trees", collective="reduce-scatter")
    rows = np.asarray(np.random.default_rng(7).normal(size=(12 * 12, 2)), np.float32)

    def ours(rows: Any) -> Any:
        return jax.grad(lambda each: (reduce_scatter(each, scatter) ** 2).sum())(rows)

    def theirs(rows: Any) -> Any:
        part = partial(lax.psum_scatter, axis_name="chips", scatter_dimension=0, tiled=True)
        return jax.grad(lambda each: (part(each) ** 2).sum())(rows)

    assert np.allclose(on_chips(HOLE, ours)(rows), on_chips(HOLE, theirs)(rows), atol=1e-4)


def check_blocks() -> None:
    """Blocks go where JAX's own all-to-all sends them, over links alone, and gradients back."""
    for name, algorithm in (
        ("12", "relays"),
        ("12", "pairs"),
        ("torus", "relays"),
        ("link", "pairs"),
    ):
        mesh = MESHES[name]
        n = mesh.n_live
        made = plan(mesh, algorithm, collective="all-to-all")
        numbers = np.random.default_rng(8).normal(size=(n * n * 2, 5)).astype(np.float32)
        tree = {"a": numbers, "b": np.asarray(numbers[:, 0], jnp.bfloat16), "none": numbers[:, :0]}
        compiled = on_chips(mesh, partial(all_to_all, plan=made)).lower(tree).compile()
        use = check_neighbours(compiled, mesh)
        assert not use.other_collectives
        ended = compiled(tree)
        exchange = partial(
            lax.all_to_all, axis_name="chips", split_axis=0, concat_axis=0, tiled=True
        )
        theirs = on_chips(mesh, lambda t: jax.tree.map(exchange, t))(tree)  # noqa: B023
        wanted = numbers.reshape(n, n, 2, 5).swapaxes(0, 1).reshape(numbers.shape)
        for leaf, own in ended.items():
            assert own.dtype == tree[leaf].dtype
            assert np.array_equal(own, theirs[leaf]), leaf
        assert np.array_equal(ended["a"], wanted)
    weights = np.random.default_rng(9).normal(size=numbers.shape).astype(np.float32)

    def gradient(exchanged: Callable[..., Any]) -> Any:
        def weighted(numbers: Any, weights: Any) -> Any:
            return jax.grad(lambda each: (exchanged(each) * weights).sum())(numbers)

        return on_chips(mesh, weighted)(numbers, weights)

    assert np.array_equal(gradient(partial(all_to_all, plan=made)), gradient(exchange))


def check_size_does_not_grow() -> None:
    """The program has one loop with as many permutes as there are colours, however many slices."""
    made = planned(HOLE, "trees")
    rows = np.zeros((12, 4000))
    sizes = []
    for slices in (1, 8, 32):
        text = on_chips(HOLE, partial(allreduce, plan=made, slices=slices)).lower(rows).as_text()
        assert text.count("collective_permute") == 4
        tables = [line for line in text.splitlines() if "dense<" in line]
        sizes.append(len(text) - sum(map(len, tables)))
    assert max(sizes) < 1.1 * min(sizes)


def check_wrong_pair_is_caught() -> None:
    """A permute between chips that are not neighbours is found in the compiled program."""
    pairs = [(0, 1), (1, 3), (6, 4)]  # (1, 1) to (0, 0) is no link
    compiled = (
        on_chips(HOLE, lambda row: lax.ppermute(row, "chips", pairs))
        .lower(np.zeros((12, 8)))
        .compile()
    )
    try:
        check_neighbours(compiled, HOLE)
    except VerificationError as error:
        assert "(2, 2) to (2, 0) (2 hops)" in str(error)  # noqa: PT017
    else:
        raise AssertionError("a wrong pair went unseen")
    use = check_neighbours(compiled, HOLE, allow_routed=True)
    assert use.routed == {((2, 2), (2, 0)): 2}
    assert use.bytes_per_link[(2, 2), (2, 1)] == 32
    whole = on_chips(HOLE, summed).lower(np.zeros((12, 8))).compile()
    assert check_neighbours(whole, HOLE).other_collectives == {"all-reduce": 1}


# As XLA writes it for TPUs: permutes that start and end, tiled layouts, loops in loops.
TPU_TEXT = """HloModule jit_f, is_scheduled=true, num_partitions=12

%inner.1 (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %start = (bf16[4,8]{1,0:T(8,128)(2,1)}, bf16[4,8]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}, u32[]) \
collective-permute-start(%x), channel_id=1, source_target_pairs={{0,1},{2,4}}, metadata={}
  %done = bf16[4,8]{1,0:T(8,128)(2,1)} collective-permute-done(%start)
}

%outer.1 (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %w1 = (s32[], bf16[4,8]) while(%t), condition=%c, body=%inner.1, \
backend_config={"known_trip_count":{"n":"5"}}
  ROOT %last = f32[] collective-permute(%y), channel_id=2, source_target_pairs={{1,3}}
}

ENTRY %main.9 (p: bf16[4,8]) -> bf16[4,8] {
  %w2 = (s32[], bf16[4,8]) while(%t), condition=%c, body=%outer.1TRIPS
  %all = f32[12]{0} all-gather-start(%z), dimensions={0}
}
"""


def check_text_of_a_tpu() -> None:
    """Permutes that start and end are read, loops in loops multiply, unknown counts are said."""
    text = TPU_TEXT.replace("TRIPS", "")
    counted = ', backend_config={"known_trip_count":{"n":"3"}}'
    use = check_neighbours(TPU_TEXT.replace("TRIPS", counted), HOLE)
    assert use.n_permutes == 3 * (5 + 1)
    assert use.are_counts_known
    assert use.bytes_per_link == {
        ((0, 0), (0, 1)): 3 * 5 * 64,
        ((1, 0), (2, 0)): 3 * 5 * 64,
        ((0, 1), (1, 1)): 3 * 4,
    }
    assert use.other_collectives == {"all-gather": 1}
    unknown = check_neighbours(text, HOLE)
    assert not unknown.are_counts_known
    assert unknown.n_permutes == 6
    odd = text.replace("source_target_pairs={{1,3}}", "source_target_pairs=[[1,3]]")
    refused("read 1 of 2 permutes", lambda: check_neighbours(odd, HOLE))
    beyond = text.replace("num_partitions=12", "num_partitions=14").replace("{2,4}", "{2,13}")
    outside = check_neighbours(beyond, MESHES["3x5"], allow_routed=True)
    assert ((0, 2), (2, 4)) in outside.routed


def check_bytes_of_loops() -> None:
    """Bytes per link count every round of the loop: steps x span, as the lowering says."""
    from meshmend.planning.lowering import lowered

    made = planned(HOLE, "trees")
    rows = np.zeros((12, 4000))
    compiled = on_chips(HOLE, partial(allreduce, plan=made, slices=8)).lower(rows).compile()

    use = check_neighbours(compiled, HOLE)

    program = lowered(made, payload_bytes=16000, slices=8).program
    assert use.n_permutes == program.n_steps * program.n_permutations
    assert len(use.bytes_per_link) == len(program.pairs) == 32
    assert set(use.bytes_per_link.values()) == {program.n_steps * 4000 / program.n_cells * 4}


def check_tables_are_swapped() -> None:
    """One executable sums around holes and failed links, whichever tables are put in."""
    whole = parse_mesh("4x4")
    room = SumFrame(whole, n_steps=99, n_cells=80)
    numbers = np.asarray(whole_numbers(whole), np.float32)
    devices = device_mesh(whole, jax.devices()[:16])
    function = jax.jit(
        jax.shard_map(
            room.allreduce, mesh=devices, in_specs=(P("chips"), P("chips")), out_specs=P("chips")
        )
    )
    tables = room.tables(planned(HOLE, "trees"))
    compiled = function.lower(numbers, tables).compile()
    check_neighbours(compiled, whole)
    for fail in ([], ["2x2@0,2"], ["2x2@2,0"], ["1,1"], ["link:0,0-0,1"]):
        mesh = parse_mesh("4x4", fail=fail)
        live = [whole.rank_of[chip] for chip in mesh.live]
        ended = np.asarray(compiled(numbers, room.tables(planned(mesh, "trees"))))
        assert np.array_equal(
            ended[live], np.tile(numbers[np.array(live)].sum(axis=0), (len(live), 1))
        )
    made = planned(HOLE, "trees")
    refused("room for 5 steps, but", lambda: SumFrame(whole, 5, 80).tables(made))
    refused("needs a plan between neighbours", lambda: room.tables(planned(HOLE, "rank-ring")))
    refused("plans for parts of that mesh", lambda: room.tables(planned(MESHES["3x5"], "trees")))
    half = plan(HOLE, "trees", collective="all-gather")
    refused("needs the plan of an allreduce", lambda: room.tables(half))
    refused("one step and one cell or more", lambda: SumFrame(whole, 0, 80))
    fewer = jax.tree.map(lambda table: table[:, :9], tables)
    refused("its own row of tables(plan), of shape (1, 99, 4)", lambda: function(numbers, fewer))
    of_other = SumFrame(whole, 99, 76).tables(made)
    refused("needs tables that it has made, but got those of", lambda: function(numbers, of_other))
    bare: Any = tables.tables
    refused("but got those of 'StepTables'", lambda: function(numbers, bare))
    short = SumFrame(HOLE, 99, 80)
    refused("plans for parts of that mesh", lambda: short.tables(planned(whole, "trees")))
    long_ring = planned(MESHES["60"], "ring-1d")
    refused("slices of 32 cells", lambda: SumFrame(parse_mesh("8x8"), 99, 80).tables(long_ring))


def check_refusals() -> None:
    made, rows = planned(HOLE, "trees"), np.zeros((12, 24))
    other = planned(MESHES["3x5"], "trees")
    scatter = plan(HOLE, "trees", collective="reduce-scatter")
    unequal = plan(HOLE, "ft-two-d", collective="reduce-scatter")
    refused(
        "a plan for 14 ranks needs as many devices along the axis 'chips', but it has 12",
        lambda: on_chips(HOLE, partial(allreduce, plan=other))(rows),
    )
    refused(
        "allreduce needs a plan of that collective",
        lambda: on_chips(HOLE, partial(allreduce, plan=scatter))(rows),
    )
    refused(
        "needs a backend among permutes",
        lambda: on_chips(HOLE, partial(allreduce, plan=made, backend="smoke"))(rows),
    )
    no_plan: Any = HOLE
    refused(
        "needs a plan, as of plan(mesh) or lockstep_plan(mesh, ...).plan, but got a Mesh",
        lambda: on_chips(HOLE, partial(allreduce, plan=no_plan))(rows),
    )
    refused(
        "inside of jax.shard_map over the axis 'rows', which is unknown here",
        lambda: on_chips(HOLE, partial(allreduce, plan=made, axis_name="rows"))(rows),
    )
    refused(
        "accumulate needs to be a type of floats, such as jnp.bfloat16, but got <class 'jax",
        lambda: on_chips(HOLE, partial(allreduce, plan=made, accumulate=jnp.int32))(
            rows.astype(jnp.bfloat16)
        ),
    )
    refused(
        "needs one slice or more, but got 0",
        lambda: on_chips(HOLE, partial(allreduce, plan=made, slices=0))(rows),
    )
    keys = jax.random.split(jax.random.key(0), 12)
    gather = plan(HOLE, "trees", collective="all-gather")
    for moved in (partial(allreduce, plan=made), partial(all_gather, plan=gather)):
        refused(
            "moves numbers, but got random keys; pass jax.random.key_data(keys)",
            partial(on_chips(HOLE, moved), keys),
        )
    refused(
        "first axis is a multiple of 12 ranks, but got the shape (1, 24)",
        lambda: on_chips(HOLE, partial(reduce_scatter, plan=scatter))(rows),
    )
    blocks = plan(HOLE, collective="all-to-all")
    refused(
        "all-to-all needs leaves whose first axis is a multiple of 12 ranks, but got the shape (5",
        lambda: on_chips(HOLE, partial(all_to_all, plan=blocks))(np.zeros(60)),
    )
    refused(
        "all-to-all needs a plan of that collective",
        lambda: on_chips(HOLE, partial(all_to_all, plan=made))(rows),
    )
    refused(
        "every rank owns an equal part",
        lambda: on_chips(HOLE, partial(reduce_scatter, plan=unequal))(np.zeros((144, 2))),
    )
    refused("optimized HLO, but got 'module'", lambda: check_neighbours("module", HOLE))
    text = on_chips(HOLE, summed).lower(rows).compile().as_text()
    refused("needs a program for 14 devices", lambda: check_neighbours(text, MESHES["3x5"]))


# They need arguments.
NO_CHECKS = {
    "check_exact",
    "check_neighbours",
    "check_parts_of",
    "check_truths_of",
    "check_gradients_of_sums",
}
CHECKS: dict[str, Callable[[], object]] = {
    **{
        f"exact {name} {algorithm} {slices}": partial(check_exact, name, algorithm, slices)
        for name, algorithms in (
            *((n, ("trees", "ft-two-d")) for n in ("12", "60", "252")),
            *((n, ("trees",)) for n in ("3x5", "2x3x4", "torus", "line", "link")),
        )
        for algorithm in algorithms
        for slices in (1, 8)
    },
    **{
        name.removeprefix("check_").replace("_", " "): check
        for name, check in list(globals().items())
        if name.startswith("check_") and name not in NO_CHECKS
    },
}

if __name__ == "__main__":
    run_checks(CHECKS, sys.argv[1:])

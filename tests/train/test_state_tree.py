"""A training state as named arrays and as bytes and back, bit for bit, whole and in shards."""

import json
import math
from collections import OrderedDict
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from meshmend.errors import CheckpointDamageError, InputError, ResumeError
from meshmend.train.state.checkpoint import load, read_step, save_shard
from meshmend.train.state.resume import resumable
from meshmend.train.state.shards import Origin, Shard, cut_shard, merged_state, read_shard, seal
from meshmend.train.state.state_tree import (
    ARRAYS,
    AS_BYTES,
    Framework,
    OwnedPieces,
    Part,
    Placement,
    decoded,
    encoded,
    merged,
    tree_of,
)
from meshmend.train.state.torch_state import TORCH

FLOAT8 = [kind for name in dir(torch) if "float8" in name for kind in [getattr(torch, name)]]
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool, *FLOAT8),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64),
    *(torch.complex64, torch.complex128),
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    """Tensors of any type and shape, of random bits, not all of them contiguous."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    n_bytes = math.prod(shape) * dtype.itemsize
    random = np.random.default_rng(draw(st.integers(0, 99)))
    flat = torch.empty(2 * n_bytes, dtype=torch.uint8)
    flat[:] = torch.from_numpy(random.integers(0, 2 if dtype is torch.bool else 256, 2 * n_bytes))
    values = flat.view(dtype)
    chosen = values[::2] if draw(st.booleans()) else values[: len(values) // 2]
    tensor = chosen.reshape(shape) if chosen.is_contiguous() else chosen.view(shape)
    return tensor.T if len(shape) == 2 and draw(st.booleans()) else tensor


PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.text(max_size=5)
)
KEYS = st.integers(0, 9) | st.text(max_size=3) | st.sampled_from(["__metadata__", "a.b", "0", ""])
TORCH_STATES = st.recursive(
    PLAIN | tensors(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
    ),
    max_leaves=10,
)
ARRAY_DTYPES = (
    "float32",
    "float64",
    "float16",
    "bool",
    "uint8",
    "int64",
    "complex64",
    "complex128",
)
ARRAY_STATES = st.dictionaries(
    KEYS,
    st.sampled_from(ARRAY_DTYPES).flatmap(
        lambda dtype: arrays_of.arrays(dtype, arrays_of.array_shapes(min_dims=0, max_side=4))
    )
    | PLAIN,
    max_size=5,
)
STATES = st.one_of(
    st.tuples(st.just(TORCH), TORCH_STATES), st.tuples(st.just(ARRAYS), ARRAY_STATES)
)
STATE = {"model": {"w": torch.arange(70.0)}, "progress": {"step": 3}, "empty": torch.zeros(0)}


def bits(leaf: Any) -> tuple[Any, ...]:
    if isinstance(leaf, np.ndarray):
        return leaf.dtype, leaf.shape, leaf.tobytes()
    flat = leaf.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
    return leaf.dtype, leaf.shape, flat.view(torch.uint8).numpy().tobytes()


def check_same(one: Any, other: Any) -> None:
    """Two states are the same in structure, types and bits."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor | np.ndarray):
        assert bits(one) == bits(other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert type(key) is type(next(each for each in other if each == key))
            check_same(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            check_same(left, right)
    else:
        assert repr(one) == repr(other)  # nan is nan, and 0.0 is not -0.0


def shards_of(state: Any, framework: Framework, n_shards: int) -> list[Shard]:
    """Return the shards of a state, as they are read from files."""
    return [
        read_shard(seal(cut_shard(state, framework, step=7, shard=at, n_shards=n_shards)).copy())
        for at in range(n_shards)
    ]


@settings(max_examples=120)
@given(STATES)
def test_what_is_unpacked_equals_what_was_packed_and_has_its_digest(
    case: tuple[Framework, Any],
) -> None:
    framework, state = case
    again = framework.unpacked(framework.packed(state))

    check_same(again, state)
    assert framework.digest(again) == framework.digest(state)


@settings(max_examples=80)
@given(STATES, st.integers(1, 9))
def test_the_shards_of_any_number_of_chips_make_up_the_state(
    case: tuple[Framework, Any], n_shards: int
) -> None:
    framework, state = case

    check_same(merged_state(shards_of(state, framework, n_shards), framework), state)


@settings(max_examples=40)
@given(TORCH_STATES, st.integers(2, 9))
def test_shards_have_equally_many_bytes_to_within_two_elements(state: Any, n_shards: int) -> None:
    def n_bytes(shard: Shard) -> int:
        length = int.from_bytes(bytes(shard.data[:8]), "little")
        return len(shard.data) - 8 - length

    sizes = [n_bytes(shard) for shard in shards_of(state, TORCH, n_shards)]
    assert max(sizes) - min(sizes) < 2 * 16 + 1


@settings(max_examples=30)
@given(TORCH_STATES)
def test_safetensors_reads_every_shard(state: Any) -> None:
    safetensors = pytest.importorskip("safetensors")
    for shard in shards_of(state, TORCH, 2):
        safetensors.deserialize(shard.data.tobytes())


def test_every_bit_that_flips_and_every_byte_that_is_missing_is_found() -> None:
    data = seal(cut_shard(STATE, TORCH, step=3, shard=0, n_shards=2)).tobytes()

    def read(mutant: bytes) -> Shard:
        return read_shard(np.frombuffer(mutant, dtype=np.uint8).copy())

    assert read(data).step == 3
    for at in range(len(data)):
        flipped = (
            data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
            for bit in (range(8) if at % 7 == 0 else [at % 8])
        )
        for mutant in (data[:at], data[:at] + data[at + 1 :], data + data[:at], *flipped):
            if mutant != data:
                with pytest.raises(CheckpointDamageError, match="its checksum"):
                    read(mutant)


def test_a_tensor_under_two_names_is_stored_once_and_comes_back_as_one() -> None:
    tied = torch.rand(1000)
    state = {"in": tied, "out": tied, "half": tied[:500], "conj": torch.ones(9) * 1j}
    state["mirrored"] = state["conj"].conj()
    packed = TORCH.packed(state)

    for again in (TORCH.unpacked(packed), merged_state(shards_of(state, TORCH, 2), TORCH)):
        assert again["in"] is again["out"]
        assert torch.equal(again["half"], tied[:500])
        assert torch.equal(again["mirrored"], state["mirrored"].resolve_conj())
    assert len(packed) < 1500 * 4 + 2000


def test_a_view_is_stored_without_the_memory_behind_it() -> None:
    assert len(TORCH.packed({"few": torch.rand(1_000_000)[:10]})) < 1000


def test_neither_bytes_nor_shards_share_memory_with_the_state() -> None:
    weight = torch.zeros(4)
    packed, (shard,) = TORCH.packed({"w": weight}), shards_of({"w": weight}, TORCH, 1)
    unpacked = TORCH.unpacked(packed)
    weight.fill_(1)
    packed[:] = 255

    assert torch.equal(unpacked["w"], torch.zeros(4))
    assert torch.equal(merged_state([shard], TORCH)["w"], torch.zeros(4))


def test_the_versions_of_a_modules_layers_are_kept() -> None:
    state = torch.nn.Sequential(torch.nn.BatchNorm1d(2)).state_dict()

    again = TORCH.unpacked(TORCH.packed(state))
    assert isinstance(again, OrderedDict)
    assert vars(again)["_metadata"] == vars(state)["_metadata"]


def test_a_parameter_that_learns_is_packed_as_its_values() -> None:
    (value,) = TORCH.unpacked(TORCH.packed([torch.nn.Parameter(torch.ones(2))]))

    assert value.tolist() == [1.0, 1.0]
    assert not value.requires_grad


def test_half_precision_of_accelerators_is_kept_in_arrays() -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kinds = (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3b11fnuz)
    state = {kind.__name__: np.ones((2, 3), dtype=kind) for kind in kinds}

    check_same(ARRAYS.unpacked(ARRAYS.packed(state)), state)
    check_same(merged_state(shards_of(state, ARRAYS, 3), ARRAYS), state)


@pytest.mark.parametrize("framework", [TORCH, ARRAYS])
def test_a_number_of_numpy_arrives_as_a_number_with_the_same_digest(framework: Framework) -> None:
    """A learning rate of `np.cos`, say."""
    state = [np.float64(0.1), np.float32(0.1), np.int64(3), np.bool_(True), np.str_("warm")]

    again = framework.unpacked(framework.packed(state))

    assert again == [0.1, float(np.float32(0.1)), 3, True, "warm"]
    assert [type(each) for each in again] == [float, float, int, bool, str]
    assert framework.digest(again) == framework.digest(state)


def test_tensors_arrive_in_the_memory_of_the_host_whatever_the_default_device() -> None:
    packed = TORCH.packed([torch.ones(2)])

    with torch.device("meta"):
        (again,) = TORCH.unpacked(packed)

    assert again.tolist() == [1.0, 1.0]


def test_one_bit_changes_the_digest() -> None:
    assert TORCH.digest({"w": torch.tensor([0.0])}) != TORCH.digest({"w": torch.tensor([-0.0])})
    assert ARRAYS.digest({"w": np.array([0.0])}) != ARRAYS.digest({"w": np.array([-0.0])})
    assert ARRAYS.digest({"w": np.array([0.0])}) == ARRAYS.digest({"w": np.array([0.0])})


@pytest.mark.parametrize("name", ["SGD", "AdamW", "RMSprop"])
def test_model_and_optimizer_go_on_alike_on_both_sides(name: str) -> None:
    def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
        options = {"momentum": 0.9} if name == "SGD" else {}
        return model, getattr(torch.optim, name)(model.parameters(), lr=0.1, **options)

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
        optimizer.zero_grad()
        inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
        model(inputs).square().sum().backward()
        optimizer.step()

    one, other = made(), made()
    step(*one, seed=1)
    states = TORCH.unpacked(TORCH.packed([part.state_dict() for part in one]))
    other[0].load_state_dict(states[0])
    other[1].load_state_dict(states[1])
    step(*one, seed=2)
    step(*other, seed=2)

    check_same([dict(part.state_dict()) for part in one], [dict(p.state_dict()) for p in other])


@pytest.mark.parametrize(
    ("state", "match"),
    [
        ({"rng": object()}, r"needs tensors, numbers, .*, but state\['rng'\] is a object; leave"),
        ([b"bytes"], r"state\[0\] is a bytes"),
        ({"a": [1, {2}]}, r"state\['a'\]\[1\] is a set"),
        (np.datetime64("2026-11-19"), "state is a date"),
        ({"a": {(1, 2): 3}}, r"needs texts and numbers as keys, but state\['a'\] has a tuple"),
        ({"a": torch.eye(2).to_sparse()}, r"needs dense tensors, but state\['a'\] is torch.spars"),
    ],
)
def test_what_is_neither_tensor_nor_plain_is_refused_by_name(state: Any, match: str) -> None:
    with pytest.raises(InputError, match=match):
        TORCH.packed(state)
    with pytest.raises(InputError, match=match):
        cut_shard(state, TORCH, step=0, shard=0, n_shards=1)


def test_a_shard_says_whose_it_is() -> None:
    origin = Origin("run", 2, 5, (1, 3), "d" * 32)
    place = {"step": 3, "shard": 1, "n_shards": 2}
    shard = read_shard(seal(cut_shard(STATE, TORCH, **place, origin=origin)).copy())

    assert (shard.step, shard.number, shard.n_shards) == (3, 1, 2)
    assert (shard.framework, shard.origin) == ("torch", origin)


@pytest.mark.parametrize("shard", [-1, 2])
def test_a_shard_that_is_none_of_them_is_refused(shard: int) -> None:
    with pytest.raises(InputError, match=f"needs shards 0 to 1, but got {shard}"):
        cut_shard(STATE, TORCH, step=3, shard=shard, n_shards=2)


def test_a_part_that_no_shard_has_is_damage() -> None:
    shards = shards_of(STATE, TORCH, 3)

    for missing in range(1, 3):
        with pytest.raises(CheckpointDamageError, match=r"lack a part of the state: model.w"):
            merged_state(shards[:missing] + shards[missing + 1 :], TORCH)
    with pytest.raises(CheckpointDamageError, match=r"lack a part of the state: model.w"):
        merged_state([*shards, shards_of(STATE, TORCH, 2)[1]], TORCH)


def test_pieces_that_chips_own_become_whole_whoever_has_them() -> None:
    values = torch.arange(12.0)
    shapes = [(3, 4), ()]

    def state(first: int, stop: int, **more: Any) -> dict[str, Any]:
        piece = (0, first, {"mean": values[first:stop], "step": torch.tensor(2.0), "lr": 0.5})
        return {"state": OwnedPieces(shapes, [piece, *more.get("pieces", [])]), "groups": [1]}

    states = [state(0, 5), state(5, 12, pieces=[(1, 0, {"mean": torch.tensor([7.0])})])]
    shards = [
        cut_shard(each, TORCH, step=1, shard=at, n_shards=2) for at, each in enumerate(states)
    ]

    found = merged_state([read_shard(seal(shard)) for shard in shards], TORCH)
    whole = {"mean": values.reshape(3, 4), "step": torch.tensor(2.0), "lr": 0.5}
    check_same(found, {"state": {0: whole, 1: {"mean": torch.tensor(7.0)}}, "groups": [1]})


@pytest.mark.parametrize("n_parts", [1, 2, 3, 5])
def test_parts_that_chips_of_a_tile_hold_become_whole(n_parts: int) -> None:
    """Five chips hold parts of four rows: the last holds none of them, and all hold the number."""
    whole, number = torch.arange(12.0).view(4, 3), torch.tensor(7.0)
    rows = -(-4 // n_parts)
    parts = [whole[at * rows : (at + 1) * rows] for at in range(n_parts)]
    states = [
        {"weight": Part(part, Placement(min(at * rows, 4) * 3, (4, 3))), "step": number}
        for at, part in enumerate(parts)
    ]
    shards = [
        cut_shard(state, TORCH, step=1, shard=at, n_shards=n_parts, origin=Origin(digest="same"))
        for at, state in enumerate(states)
    ]

    found = merged_state(shards, TORCH)

    assert torch.equal(found["weight"], whole)
    assert found["step"] == number
    if n_parts == 2:
        with pytest.raises(CheckpointDamageError, match="lack a part of the state: weight"):
            merged_state([shards[0], shards[0]], TORCH)


@given(
    st.tuples(*[st.integers(1, 6)] * 3),
    st.integers(1, 2),
    st.lists(st.integers(0, 6), max_size=2),
    st.lists(st.integers(0, 6), max_size=2),
    st.integers(1, 4),
)
def test_blocks_of_rows_and_columns_become_whole(
    shape: tuple[int, int, int], axis: int, rows: list[int], columns: list[int], n_pieces: int
) -> None:
    """As FSDP and tensor parallelism together split a tensor; the first block is there twice."""
    whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    cuts = [
        [0, *sorted({at for at in inner if 0 < at < size}), size]
        for inner, size in ((rows, shape[0]), (columns, shape[axis]))
    ]
    inner = math.prod(shape[axis + 1 :])
    states = []
    for top, bottom in pairwise(cuts[0]):
        for left, right in pairwise(cuts[1]):
            block = whole[top:bottom].narrow(axis, left, right - left)
            first = top * math.prod(shape[1:]) + left * inner
            run, stride = (right - left) * inner, shape[axis] * inner
            states.append({"weight": Part(block, Placement(first, shape, run, stride))})
    trees = [decoded(encoded(tree_of(state, TORCH.raw)))[0] for state in [*states, states[0]]]

    found, _ = merged(trees).arrays["weight"]

    bounds = [found.n_elements * at // n_pieces for at in range(n_pieces + 1)]
    pieces = [found.read(*between) for between in pairwise(bounds)]
    assert np.concatenate(pieces).tobytes() == whole.numpy().tobytes()
    if len(states) > 1:
        with pytest.raises(CheckpointDamageError, match="lack a part of the state: weight"):
            merged(trees[1:-1])


def test_tools_read_a_state_without_its_framework(tmp_path: Path) -> None:
    for shard in range(2):
        save_shard(tmp_path, STATE, TORCH, step=3, shard=shard, n_shards=2)

    found = read_step(tmp_path, 3, AS_BYTES)
    assert found.framework == "torch"
    array = found.state["model"]["w"]
    assert (array.dtype, array.shape) == ("float32", (70,))
    assert array.data.view(np.float32).tolist() == list(range(70))


def test_a_checkpoint_of_another_framework_is_not_read_but_named(tmp_path: Path) -> None:
    save_shard(tmp_path, STATE, TORCH, step=3, shard=0, n_shards=1)

    found, ((_, why),) = load(tmp_path, ARRAYS)

    assert found is None
    assert why == "another framework wrote it: it has a state of torch, but this job is of jax"


def test_a_later_version_is_refused_by_its_number() -> None:
    shard = cut_shard(STATE, TORCH, step=3, shard=0, n_shards=1)
    text = shard.data.tobytes().replace(b'"meshmend":"4"', b'"meshmend":"5"')
    later = Shard(3, 0, 1, "torch", Origin(), np.frombuffer(text, dtype=np.uint8).copy())

    with pytest.raises(CheckpointDamageError, match="of version 5 of the format, but this"):
        read_shard(seal(later))


@pytest.mark.parametrize("suffix", [".pt", ".bin"])
def test_a_checkpoint_of_before_this_format_is_refused_in_one_line_that_says_so(
    tmp_path: Path, suffix: str
) -> None:
    file = tmp_path / "step-00000010" / f"shard-000-of-001{suffix}"
    file.parent.mkdir()
    file.write_bytes(b"anything")

    with pytest.raises(ResumeError, match=f"a meshmend before 0.2 wrote it, in {suffix}") as raised:
        resumable(tmp_path, {}, TORCH, steps=20)
    assert len(str(raised.value).splitlines()) == 1


def test_the_json_of_a_shard_is_plain_text_that_names_the_arrays() -> None:
    data = cut_shard(STATE, TORCH, step=3, shard=0, n_shards=2).data.tobytes()
    head = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])

    assert head["model.w"] == {"dtype": "F32", "shape": [35], "data_offsets": [0, 140]}
    assert json.loads(head["__metadata__"]["pieces"]) == {"model.w": [0, [70]]}

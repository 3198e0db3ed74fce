"""The backend `pallas`: a plan as one TPU kernel of remote copies between chips.

`dma_program` says what each chip does in which order; this kernel does it. The payload stays in
HBM. A block that is sent goes from the sender's HBM into a slot in the receiver's VMEM. The
receiver fetches its own block, adds the two in a buffer in VMEM and stores the sum; or it stores
the block that landed. Semaphores count what arrived, what left, what was stored, and credits.

Needs a TPU, or Pallas' TPU interpreter (`pltpu.force_tpu_interpret_mode`).
"""

import math
from functools import partial
from typing import Any, Final, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from meshmend.errors import UnsupportedError
from meshmend.jax.permutes import AxisName, filled_buffer, with_own_transpose
from meshmend.planning.lowering import check_slices
from meshmend.planning.plan import Plan
from meshmend.schedule.priority import remaining_hops
from meshmend.schedule.table import Schedule
from meshmend.transport.dma_program import (
    ADD,
    BLOCK,
    BUFFER,
    CHANNEL,
    CREDIT,
    N_BUFFERS,
    N_SLOTS,
    OP,
    PUT,
    REUSED,
    SEND,
    SLOT,
    WAIT_SENT,
    WAIT_STORED,
    Bits,
    DmaProgram,
    dma_program,
    most_channels_in,
)

LANES: Final = 128  # the width of a TPU tile
MOST_BLOCK_BYTES: Final = 256 << 10
VMEM_BYTES: Final = 8 << 20  # for slots, a part of what every TPU has
WORDS_PER_GRID_STEP: Final = 1024
BLOCK_COST_S: Final = 3e-6  # what a step costs beside the links; a guess, not measured on a TPU
COLLECTIVE_ID: Final = 13  # tells XLA which kernels share a barrier semaphore

_OUT, _IN = 0, 2  # the lines of a program's channels
_LOGICAL = pl.DeviceIdType.LOGICAL


class _Refs(NamedTuple):
    """What the kernel works on: tables in SMEM, the payload in HBM, slots in VMEM, semaphores.

    The tables are this chip's lines of a `DmaProgram`, the words of one grid step at a time.
    `channels` names devices instead of ranks.
    """

    sizes: Any
    channels: Any
    words: Any
    payload: Any
    slots: Any
    buffers: Any  # where new values are made
    arrived: Any  # one semaphore per channel in and slot
    left: Any  # one semaphore per channel out and slot
    credits: Any  # one semaphore per channel out
    fetched: Any
    stored: Any  # one semaphore per buffer


def vector_sum(vector: jax.Array, plan: Plan, axis_name: AxisName, slices: int | None) -> jax.Array:
    """Return the sum of every chip's vector, by remote copies as the plan's schedule says.

    Blocks are about as large as a chunk of a slice; `kernel_slices` says how many slices, unless
    they are given. The kernel adds up 32-bit numbers and bfloat16, and shorter ones in 32 bits.

    Raises:
        InputError: no number of slices.
        UnsupportedError: TPU kernels cannot add the type.
    """
    check_slices(slices)
    if plan.schedule.n_ranks == 1:
        return vector
    dtype = _kernel_type(vector.dtype)
    slices = slices or kernel_slices(plan, vector.size * dtype.itemsize)
    block = block_shape(vector.size, dtype, plan.schedule, slices)
    return pallas_sum(vector.astype(dtype), plan.schedule, axis_name, block).astype(vector.dtype)


def kernel_slices(plan: Plan, n_bytes: int) -> int:
    """Return in how many slices the kernel sums a payload fastest, by a rough model.

    With a chain of c hops and blocks of b bytes, of which the busiest link carries n, a sum takes
    c + n steps of b / bandwidth + `BLOCK_COST_S` each. The best b balances the two.
    """
    remaining = remaining_hops(plan.schedule, plan.hazards, plan.placement.routes)
    busiest_bytes = plan.channel_loads.max() * n_bytes
    cost_bytes = BLOCK_COST_S * plan.target.fabric.link_bandwidth_bytes_per_s
    block_bytes = math.sqrt(busiest_bytes * cost_bytes / remaining.max())
    return max(1, round(n_bytes / (block_bytes * plan.schedule.n_chunks)))


def pallas_sum(
    vector: jax.Array, schedule: Schedule, axis_name: AxisName, block: tuple[int, int]
) -> jax.Array:
    """Return the sum of every rank's vector, moved in blocks of the given shape.

    The gradient is the sum of the gradients, by the same kernel.
    """
    program = dma_program(schedule, -(-vector.size // math.prod(block)))
    blocks = filled_buffer(vector, (program.n_blocks, *block), axis_name)
    return _summed(blocks, program, axis_name).reshape(-1)[: vector.size]


def block_shape(n_elements: int, dtype: Any, schedule: Schedule, slices: int) -> tuple[int, int]:
    """Return the shape of a block: about a chunk of a slice, in whole tiles.

    Slots for all channels into a rank fit into VMEM.
    """
    tile_rows = 32 // dtype.itemsize
    tile_bytes = tile_rows * LANES * dtype.itemsize
    n_slots = N_SLOTS * most_channels_in(schedule) + N_BUFFERS
    most_tiles = min(MOST_BLOCK_BYTES, VMEM_BYTES // n_slots) // tile_bytes
    tiles = -(-n_elements // (schedule.n_chunks * slices * tile_rows * LANES))
    return tile_rows * max(1, min(tiles, most_tiles)), LANES


def _kernel_type(dtype: Any) -> Any:
    """Return the type in which a TPU kernel adds up numbers of a type.

    Whole numbers wrap around, so adding them in more bits gives the same.
    """
    if dtype == jnp.bfloat16:
        return dtype
    wide = jnp.dtype(jnp.float32 if jnp.issubdtype(dtype, jnp.floating) else jnp.int32)
    if dtype.itemsize > wide.itemsize or not jnp.issubdtype(dtype, jnp.number):
        raise UnsupportedError(
            f"the backend pallas adds real numbers of at most 32 bits, but got {dtype}; use "
            "backend='permutes'"
        )
    return wide


def _call(blocks: jax.Array, program: DmaProgram, axis_name: AxisName) -> jax.Array:
    """Run the kernel on this chip's blocks, in place."""
    rank = lax.axis_index(axis_name)
    n_channels = program.channels.shape[2]
    out_peer, out_there, in_peer, in_there = jnp.asarray(program.channels)[rank]
    channels = (
        _device_ids(out_peer, axis_name),
        out_there,
        _device_ids(in_peer, axis_name),
        in_there,
    )
    n_grid_steps = -(-program.words.shape[1] // WORDS_PER_GRID_STEP)
    n_unused = n_grid_steps * WORDS_PER_GRID_STEP - program.words.shape[1]
    block = blocks.shape[1:]
    whole = pl.BlockSpec(memory_space=pltpu.SMEM)
    kept = pl.BlockSpec(memory_space=pltpu.HBM)
    dma = pltpu.SemaphoreType.DMA
    run = pl.pallas_call(
        _kernel,
        out_shape=jax.ShapeDtypeStruct(
            blocks.shape, blocks.dtype, manual_axis_type=jax.typeof(blocks).manual_axis_type
        ),
        grid=(n_grid_steps,),
        in_specs=[
            whole,
            whole,
            pl.BlockSpec((WORDS_PER_GRID_STEP,), lambda at: (at,), memory_space=pltpu.SMEM),
            kept,
        ],
        out_specs=kept,
        scratch_shapes=[
            pltpu.VMEM((n_channels, N_SLOTS, *block), blocks.dtype),
            pltpu.VMEM((N_BUFFERS, *block), blocks.dtype),
            dma((n_channels, N_SLOTS)),
            dma((n_channels, N_SLOTS)),
            pltpu.SemaphoreType.REGULAR((n_channels,)),
            dma(()),
            dma((N_BUFFERS,)),
        ],
        input_output_aliases={3: 0},
        compiler_params=pltpu.CompilerParams(collective_id=COLLECTIVE_ID, has_side_effects=True),
        name="meshmend_allreduce",
    )
    summed: jax.Array = run(
        jnp.asarray(program.sizes)[rank],
        jnp.concatenate(channels),
        jnp.asarray(np.pad(program.words, ((0, 0), (0, n_unused))))[rank],
        blocks,
    )
    return summed


_summed = with_own_transpose(_call)


def _device_ids(ranks: jax.Array, axis_name: AxisName) -> jax.Array:
    """Return the numbers by which remote copies know the devices of ranks.

    A device is known by its place in the whole mesh, axes in order, the last one fastest. Along the
    other axes a rank's device is where this one is.
    """
    sizes = jax.sharding.get_abstract_mesh().shape
    names = (axis_name,) if isinstance(axis_name, str) else axis_name
    places = jnp.unravel_index(ranks, tuple(sizes[name] for name in names))
    place_of = dict(zip(names, places, strict=True))
    ids: Any = 0
    for name, size in sizes.items():
        ids = ids * size + (place_of[name] if name in place_of else lax.axis_index(name))
    return ids.astype(jnp.int32)  # type: ignore[no-any-return]  # a mesh has axes


def _kernel(*refs: Any) -> None:
    """Meet the peers, then execute this chip's words, one after another."""
    on = _Refs(*refs[:3], *refs[4:])  # the payload that comes in is the one that goes out
    start = pl.program_id(0) * WORDS_PER_GRID_STEP

    pl.when(start == 0)(partial(_meet_peers, on))

    def execute(at: Any, carry: int) -> int:
        word = on.words[at]
        op = _number(word, OP)
        for code, action in _ACTIONS.items():
            pl.when(op == code)(partial(action, on, word))
        return carry

    lax.fori_loop(0, jnp.clip(on.sizes[0] - start, 0, WORDS_PER_GRID_STEP), execute, 0)


def _number(word: Any, bits: Bits) -> Any:
    return (word >> bits.shift) & bits.mask


def _peer(on: _Refs, *, table: int, channel: Any) -> tuple[Any, Any]:
    """Return the device at the other end of a channel out or in, and the channel's number there."""
    n_channels = on.channels.shape[0] // 4
    at = table * n_channels + channel
    return on.channels[at], on.channels[at + n_channels]


def _meet_peers(on: _Refs) -> None:
    """Wait until every peer is in this kernel: before that its slots may be another's memory.

    No peer is a whole kernel ahead, so what is counted is of this one: a peer ends with the sum,
    which needs blocks that this chip sends only after it met its peers.
    """
    barrier = pltpu.get_barrier_semaphore()

    def call(table: int, channel: Any, carry: int) -> int:
        device, _ = _peer(on, table=table, channel=channel)
        pl.semaphore_signal(barrier, 1, device_id=device, device_id_type=_LOGICAL)
        return carry

    lax.fori_loop(0, on.sizes[1], partial(call, _OUT), 0)
    lax.fori_loop(0, on.sizes[2], partial(call, _IN), 0)
    pl.semaphore_wait(barrier, on.sizes[1] + on.sizes[2])


def _remote_copy(on: _Refs, word: Any) -> Any:
    """Return the copy of a block into a slot of the receiver."""
    channel, slot = _number(word, CHANNEL), _number(word, SLOT)
    device, there = _peer(on, table=_OUT, channel=channel)
    return pltpu.make_async_remote_copy(
        src_ref=on.payload.at[_number(word, BLOCK)],
        dst_ref=on.slots.at[there, slot],
        send_sem=on.left.at[channel, slot],
        recv_sem=on.arrived.at[there, slot],
        device_id=device,
        device_id_type=_LOGICAL,
    )


def _send(on: _Refs, word: Any) -> None:
    copy = _remote_copy(on, word)

    @pl.when(_number(word, CREDIT) == 1)
    def _() -> None:
        pl.semaphore_wait(on.credits.at[_number(word, CHANNEL)], 1)

    pl.when(_number(word, REUSED) == 1)(copy.wait_send)
    copy.start()


def _wait_sent(on: _Refs, word: Any) -> None:
    _remote_copy(on, word).wait_send()


def _add(on: _Refs, word: Any) -> None:
    channel, slot, buffer = (_number(word, bits) for bits in (CHANNEL, SLOT, BUFFER))
    store = _store(on, word)
    pl.when(_number(word, REUSED) == 1)(store.wait)
    own = on.payload.at[_number(word, BLOCK)]
    fetch = pltpu.make_async_copy(own, on.buffers.at[buffer], on.fetched)
    fetch.start()
    _wait_arrived(on, channel, slot)
    fetch.wait()
    on.buffers[buffer] += on.slots[channel, slot]
    store.start()
    _give_credit(on, word)


def _put(on: _Refs, word: Any) -> None:
    channel, slot = _number(word, CHANNEL), _number(word, SLOT)
    store = _store(on, word)
    pl.when(_number(word, REUSED) == 1)(store.wait)
    _wait_arrived(on, channel, slot)
    on.buffers[_number(word, BUFFER)] = on.slots[channel, slot]
    store.start()
    _give_credit(on, word)


def _store(on: _Refs, word: Any) -> Any:
    """Return the copy of a new value from its buffer to its place."""
    buffer = _number(word, BUFFER)
    place = on.payload.at[_number(word, BLOCK)]
    return pltpu.make_async_copy(on.buffers.at[buffer], place, on.stored.at[buffer])


def _wait_stored(on: _Refs, word: Any) -> None:
    _store(on, word).wait()


def _wait_arrived(on: _Refs, channel: Any, slot: Any) -> None:
    """Wait until a block lies in a slot. A wait needs only the size of what it waits for."""
    landed = on.slots.at[channel, slot]
    pltpu.make_async_copy(landed, landed, on.arrived.at[channel, slot]).wait()


def _give_credit(on: _Refs, word: Any) -> None:
    """Tell the sender that a slot is free, unless it has nothing more to send into it."""
    device, there = _peer(on, table=_IN, channel=_number(word, CHANNEL))

    @pl.when(_number(word, CREDIT) == 1)
    def _() -> None:
        pl.semaphore_signal(on.credits.at[there], 1, device_id=device, device_id_type=_LOGICAL)


_ACTIONS: Final = {
    SEND: _send,
    ADD: _add,
    PUT: _put,
    WAIT_SENT: _wait_sent,
    WAIT_STORED: _wait_stored,
}

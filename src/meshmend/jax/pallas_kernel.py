"""The backend `pallas`: a plan as one TPU kernel of remote copies between chips.

`dma_program` says what each chip does in which order; this kernel does it. The payload stays in
HBM. A block that is sent goes from the sender's HBM into a slot in the receiver's VMEM. The
receiver adds it to its own block, which comes to VMEM and goes back, or writes it over its own.
Blocks are small enough for VMEM and as large as the pieces of a slice. Semaphores count what has
arrived, what has left, and credits.

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
from meshmend.jax.dma_program import (
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
)
from meshmend.planning.plan import Plan
from meshmend.schedule.table import Schedule

AxisName = str | tuple[str, ...]

LANES: Final = 128  # the width of a TPU tile
MOST_BLOCK_BYTES: Final = 256 << 10
VMEM_BYTES: Final = 8 << 20  # for slots, a part of what every TPU has
WORDS_PER_GRID_STEP: Final = 1024
COLLECTIVE_ID: Final = 13  # tells XLA which kernels share a barrier semaphore

_OUT, _IN = 0, 1  # the two halves of the table of channels


class _Refs(NamedTuple):
    """What the kernel works on: tables in SMEM, the payload in HBM, slots in VMEM, semaphores.

    `sizes` counts words, channels out and channels in. `channels` holds for each channel out its
    peer and its number there, then the same for channels in.
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

    Raises:
        UnsupportedError: TPU kernels cannot add the type.
    """
    if slices is None:
        pipeline = plan.pipeline or plan.predicted(vector.nbytes)
        slices = pipeline.slices
    most_in = int(np.bincount(_channels_in(plan.schedule), minlength=1).max())
    shape = block_shape(vector, plan.schedule.n_chunks * slices, most_in)
    return pallas_sum(vector, plan.schedule, axis_name, shape)


def pallas_sum(
    vector: jax.Array, schedule: Schedule, axis_name: AxisName, block: tuple[int, int]
) -> jax.Array:
    """Return the sum of every rank's vector, moved in blocks of the given shape.

    Its own derivative is again a sum over all ranks.
    """
    program = dma_program(schedule, max(1, -(-vector.size // math.prod(block))))

    @jax.custom_vjp
    def summed(vector: jax.Array) -> jax.Array:
        padding = program.n_blocks * math.prod(block) - vector.size
        blocks = jnp.pad(vector, (0, padding)).reshape(program.n_blocks, *block)
        return _call(blocks, program, axis_name).reshape(-1)[: vector.size]

    summed.defvjp(lambda vector: (summed(vector), None), lambda _, change: (summed(change),))
    return summed(vector)


def block_shape(vector: jax.Array, n_pieces: int, most_in: int) -> tuple[int, int]:
    """Return the shape of a block: about one of `n_pieces` parts of a vector, in whole tiles.

    With `most_in` channels into a chip, slots for all of them fit into VMEM.

    Raises:
        UnsupportedError: TPU kernels cannot add the type.
    """
    if vector.dtype.itemsize > 4 or jnp.issubdtype(vector.dtype, jnp.complexfloating):
        raise UnsupportedError(
            f"the backend pallas needs numbers of at most 32 bits, but got {vector.dtype}; "
            "use backend='permutes'"
        )
    tile_rows = 32 // vector.dtype.itemsize
    row_bytes = LANES * vector.dtype.itemsize
    most_bytes = min(MOST_BLOCK_BYTES, VMEM_BYTES // (N_SLOTS * most_in + N_BUFFERS))
    tiles = -(-vector.size // (n_pieces * tile_rows * LANES))
    most_tiles = most_bytes // (row_bytes * tile_rows)
    return tile_rows * max(1, min(tiles, most_tiles)), LANES


def _channels_in(schedule: Schedule) -> Any:
    """Return the receiver of each channel."""
    pairs = schedule.src.astype(np.int64) * schedule.n_ranks + schedule.dst
    return np.unique(pairs) % schedule.n_ranks


def _call(blocks: jax.Array, program: DmaProgram, axis_name: AxisName) -> jax.Array:
    """Run the kernel on this chip's blocks, in place."""
    rank = lax.axis_index(axis_name)
    n_channels = max(program.most_out, program.most_in)
    sizes = np.stack([program.n_words, program.n_out, program.n_in], axis=1)
    tables = (program.out_peer, program.out_there, program.in_peer, program.in_there)
    channels = [np.pad(t, ((0, 0), (0, n_channels - t.shape[1]))) for t in tables]
    n_grid_steps = -(-program.words.shape[1] // WORDS_PER_GRID_STEP)
    n_unused = n_grid_steps * WORDS_PER_GRID_STEP - program.words.shape[1]
    block = blocks.shape[1:]
    whole = pl.BlockSpec(memory_space=pltpu.SMEM)
    kept = pl.BlockSpec(memory_space=pltpu.HBM)
    dma = pltpu.SemaphoreType.DMA
    return pl.pallas_call(
        partial(_kernel, axis_name),
        out_shape=jax.ShapeDtypeStruct(blocks.shape, blocks.dtype),
        grid=(n_grid_steps,),
        in_specs=[
            whole,
            whole,
            pl.BlockSpec((WORDS_PER_GRID_STEP,), lambda at: (at,), memory_space=pltpu.SMEM),
            kept,
        ],
        out_specs=kept,
        scratch_shapes=[
            pltpu.VMEM((program.most_in, N_SLOTS, *block), blocks.dtype),
            pltpu.VMEM((N_BUFFERS, *block), blocks.dtype),
            dma((program.most_in, N_SLOTS)),
            dma((program.most_out, N_SLOTS)),
            pltpu.SemaphoreType.REGULAR((program.most_out,)),
            dma(()),
            dma((N_BUFFERS,)),
        ],
        input_output_aliases={3: 0},
        compiler_params=pltpu.CompilerParams(collective_id=COLLECTIVE_ID, has_side_effects=True),
        name="meshmend_allreduce",
    )(
        jnp.asarray(sizes)[rank],
        jnp.asarray(np.concatenate(channels, axis=1))[rank],
        jnp.asarray(np.pad(program.words, ((0, 0), (0, n_unused))))[rank],
        blocks,
    )


def _kernel(axis_name: AxisName, *refs: Any) -> None:
    """Meet the peers, then execute this chip's words, one after another."""
    sizes, channels, words, _, *rest = refs  # the payload comes in and goes out in one place
    on = _Refs(sizes, channels, words, *rest)
    start = pl.program_id(0) * WORDS_PER_GRID_STEP

    @pl.when(start == 0)
    def _() -> None:
        _meet_peers(on, axis_name)

    def execute(at: Any, carry: int) -> int:
        word = on.words[at]
        op = _number(word, OP)
        for code, action in _ACTIONS.items():
            pl.when(op == code)(partial(action, on, axis_name, word))
        return carry

    lax.fori_loop(0, jnp.clip(on.sizes[0] - start, 0, WORDS_PER_GRID_STEP), execute, 0)


def _number(word: Any, bits: Bits) -> Any:
    return (word >> bits.shift) & bits.mask


def _peer(on: _Refs, axis_name: AxisName, *, table: int, channel: Any) -> tuple[Any, Any]:
    """Return the device at the other end of a channel, and the channel's number there."""
    n_channels = on.channels.shape[0] // 4
    at = 2 * table * n_channels + channel
    return {axis_name: on.channels[at]}, on.channels[at + n_channels]


def _meet_peers(on: _Refs, axis_name: AxisName) -> None:
    """Wait until every peer is in this kernel: before that its slots may be another's memory."""
    barrier = pltpu.get_barrier_semaphore()

    def call(table: int, channel: Any, carry: int) -> int:
        device, _ = _peer(on, axis_name, table=table, channel=channel)
        pl.semaphore_signal(barrier, 1, device_id=device)
        return carry

    lax.fori_loop(0, on.sizes[1], partial(call, _OUT), 0)
    lax.fori_loop(0, on.sizes[2], partial(call, _IN), 0)
    pl.semaphore_wait(barrier, on.sizes[1] + on.sizes[2])


def _remote_copy(on: _Refs, axis_name: AxisName, word: Any) -> Any:
    """Return the copy of a block into a slot of the receiver."""
    channel, slot = _number(word, CHANNEL), _number(word, SLOT)
    device, there = _peer(on, axis_name, table=_OUT, channel=channel)
    return pltpu.make_async_remote_copy(
        src_ref=on.payload.at[_number(word, BLOCK)],
        dst_ref=on.slots.at[there, slot],
        send_sem=on.left.at[channel, slot],
        recv_sem=on.arrived.at[there, slot],
        device_id=device,
    )


def _send(on: _Refs, axis_name: AxisName, word: Any) -> None:
    copy = _remote_copy(on, axis_name, word)

    @pl.when(_number(word, CREDIT) == 1)
    def _() -> None:
        pl.semaphore_wait(on.credits.at[_number(word, CHANNEL)], 1)

    pl.when(_number(word, REUSED) == 1)(copy.wait_send)
    copy.start()


def _wait_sent(on: _Refs, axis_name: AxisName, word: Any) -> None:
    _remote_copy(on, axis_name, word).wait_send()


def _add(on: _Refs, axis_name: AxisName, word: Any) -> None:
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
    _give_credit(on, axis_name, word)


def _put(on: _Refs, axis_name: AxisName, word: Any) -> None:
    channel, slot = _number(word, CHANNEL), _number(word, SLOT)
    store = _store(on, word)
    pl.when(_number(word, REUSED) == 1)(store.wait)
    _wait_arrived(on, channel, slot)
    on.buffers[_number(word, BUFFER)] = on.slots[channel, slot]
    store.start()
    _give_credit(on, axis_name, word)


def _store(on: _Refs, word: Any) -> Any:
    """Return the copy of a new value from its buffer to its place."""
    buffer = _number(word, BUFFER)
    place = on.payload.at[_number(word, BLOCK)]
    return pltpu.make_async_copy(on.buffers.at[buffer], place, on.stored.at[buffer])


def _wait_stored(on: _Refs, axis_name: AxisName, word: Any) -> None:
    del axis_name  # a wait is local
    _store(on, word).wait()


def _wait_arrived(on: _Refs, channel: Any, slot: Any) -> None:
    """Wait until a block lies in a slot. A wait needs only the size of what it waits for."""
    landed = on.slots.at[channel, slot]
    pltpu.make_async_copy(landed, landed, on.arrived.at[channel, slot]).wait()


def _give_credit(on: _Refs, axis_name: AxisName, word: Any) -> None:
    """Tell the sender that a slot is free, unless it has nothing more to send into it."""
    device, there = _peer(on, axis_name, table=_IN, channel=_number(word, CHANNEL))

    @pl.when(_number(word, CREDIT) == 1)
    def _() -> None:
        pl.semaphore_signal(on.credits.at[there], 1, device_id=device)


_ACTIONS: Final = {
    SEND: _send,
    ADD: _add,
    PUT: _put,
    WAIT_SENT: _wait_sent,
    WAIT_STORED: _wait_stored,
}

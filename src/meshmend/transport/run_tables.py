"""The tables of one run of a task: made once per task, kept, and used again by later runs."""

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np

from meshmend.transport import frames
from meshmend.transport.rank_program import SEND, Numbers
from meshmend.transport.transport import Bytes, Task

_MOST_KEPT: Final = 8  # tables of one task; each holds memory for data that arrives early


@dataclass(frozen=True, eq=False)
class RunTables:
    """What one run changes while it runs: which keys wait, are ready, or are staged."""

    keys: Numbers
    heap: Numbers
    stack: Numbers
    staging: Bytes

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Where the tables are in memory, in the order of the columns of `runs`."""
        return tuple(each.ctypes.data for each in (self.keys, self.heap, self.stack))


class TaskTables:
    """What all runs of one task have in common, and the tables of runs that have ended."""

    def __init__(self, task: Task, n_links: int) -> None:
        program, layout = task.program, task.layout
        n_moves, n_keys = program.n_moves, len(layout.size)
        self._staging_bytes = layout.staging_bytes
        self._kept: list[RunTables] = []
        self.peers = np.array(program.peers, dtype=np.int64)
        self._moves = np.zeros((5, n_moves + 1), dtype=np.int64)
        self._moves[frames.FOLLOWING] = program.following_ptr
        self._moves[:4, :-1] = program.kind, program.row, program.peer, program.needs
        self._following = np.ascontiguousarray(program.following, dtype=np.int64)
        self._keys = np.zeros((frames.N_KEY_LINES, n_keys), dtype=np.int64)
        needs = np.tile(program.needs, layout.n_slices)
        self._keys[:4] = layout.start, layout.size, layout.staging_offset, needs
        self._keys[frames.SOURCE] = layout.source
        self._ports = _ports(task, self.peers, n_links)
        self._line = np.zeros(frames.N_RUN_COLUMNS, dtype=np.int64)
        self._line[: frames.N_KEYS + 1] = n_keys, 0, task.fingerprint, task.code, n_moves, n_keys
        self._line[frames.MOVES_AT] = self._moves.ctypes.data
        self._line[frames.FOLLOWING_AT] = self._following.ctypes.data

    def take(self) -> RunTables:
        """Return tables for a run that has not begun."""
        if self._kept:
            tables = self._kept.pop()
            tables.keys[:] = self._keys
            return tables
        n_keys = self._keys.shape[1]
        return RunTables(
            keys=self._keys.copy(),
            heap=np.empty(n_keys + 1, dtype=np.int64),
            stack=np.empty(n_keys + 1, dtype=np.int64),
            staging=np.empty(self._staging_bytes, dtype=np.uint8),
        )

    def give_back(self, tables: RunTables) -> None:
        """Keep the tables of a run that has ended for a later run."""
        if len(self._kept) < _MOST_KEPT:
            self._kept.append(tables)

    def enter(self, tables: RunTables, payload: Bytes, line: Numbers, ports: Numbers) -> None:
        """Write a run to its line of `runs` and its lines of `ports`."""
        line[:] = self._line
        line[frames.PAYLOAD] = payload.ctypes.data
        line[frames.STAGING] = tables.staging.ctypes.data
        line[frames.KEYS_AT : frames.STACK_AT + 1] = tables.addresses
        ports[self.peers] = self._ports


def _ports(task: Task, peers: Numbers, n_links: int) -> Numbers:
    """Return what a run exchanges with each of its peers when it begins."""
    program, n_slices = task.program, task.layout.n_slices
    is_send = program.kind == SEND
    n_sends = np.bincount(program.peer[is_send], minlength=n_links) * n_slices
    has_bytes = task.layout.size > 0
    sends, peer_of_key = np.tile(is_send, n_slices), np.tile(program.peer, n_slices)
    comes = np.tile(~is_send & ~program.is_local, n_slices) & has_bytes
    ports = np.zeros((n_links, frames.N_PORT_COLUMNS), dtype=np.int64)
    ports[:, frames.HEAP_BASE] = np.cumsum(n_sends) - n_sends
    ports[:, frames.UNSENT] = np.bincount(peer_of_key[sends & has_bytes], minlength=n_links)
    ports[:, frames.EXPECTED] = np.bincount(peer_of_key[comes], minlength=n_links)
    ports[:, frames.IS_USED] = 1
    return ports[peers]

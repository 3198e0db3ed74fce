"""A job of 4x4 processes on Gloo's own `reconfigure` that random faults hit.

    python gloo_kills.py FOLDER SEED N_FAULTS BATCH TIMEOUT_S

Gloo makes a group again. Who is in it, and who has which state, is left to its user: here the
process that leads the job decides, which is told at once who died, because it started them.
Workers that fail tell it in shared memory, and so do those that start. It waits for all that have
shown a sign of life within the timeout. Who is behind gets the state of one that is not. A worker
that waits for one which was not killed itself learns of the loss by its timeout: Gloo's `abort` (in
torch 2.15) returns at once and ends no collective that is under way. Needs torch 2.14 or newer.
"""

import io
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.sharedctypes import RawArray, RawValue
from typing import Any

import torch
import torch.distributed

from killed_job import MESH, Done, KilledJob, Note, Training, Work, digest_of, live, run
from meshmend.lab.workloads.workload import batch_of
from meshmend.torch.versions import HAS_PYTHON_BACKENDS
from meshmend.train.data.samples import Order, share_of
from meshmend.train.torch.gradients import Gradients

dist: Any = torch.distributed  # torch's stubs lack the stores

_SHOW_LIFE_S = 0.1


class Meeting:
    """Decides who trains together. Its memory is shared with the workers, which are forked."""

    def __init__(self, store: Any, timeout_s: float) -> None:
        self._store, self._timeout_s = store, timeout_s
        self.waits = RawArray("q", MESH.n_live)  # by rank: the process that waits for a group, or 0
        # The clock may count from the start of the machine: 0 may be less than a timeout ago.
        self.heard_at = RawArray("d", [-math.inf] * MESH.n_live)
        self.is_wanted = RawValue("b")  # members leave their group after the step in flight
        self.number = RawValue("q")  # of the last group

    def decide(self, pids: Mapping[int, int]) -> None:
        """Form a group of all that wait, unless one that lives is still to come."""
        waiting = [rank for rank, pid in pids.items() if self.waits[rank] == pid]
        if not waiting:
            return
        self.is_wanted.value = 1
        since = time.monotonic() - self._timeout_s
        if any(self.heard_at[rank] > since for rank in pids if rank not in waiting):
            return
        for rank in waiting:
            self.waits[rank] = 0
        self.is_wanted.value = 0
        self.number.value += 1
        members = [[rank, pids[rank]] for rank in sorted(waiting)]
        self._store.set(f"group {self.number.value}", json.dumps(members))


class Group:
    """A worker's side of the meeting, and its group."""

    def __init__(self, meeting: Meeting, port: int, rank: int, timeout_s: float) -> None:
        self._meeting, self._rank, self._timeout = meeting, rank, timedelta(seconds=timeout_s)
        self._number = meeting.number.value
        self._store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
        dist.init_process_group(
            "gloo",
            store=self._store,
            rank=rank,
            world_size=MESH.n_live,
            timeout=self._timeout,
            enable_reconfigure=True,
        )
        self._group = dist.group.WORLD
        self.among = self.share = 0
        threading.Thread(target=self._show_life, daemon=True).start()

    def meet(self, note: Note) -> None:
        """Wait for a group that this worker is in, and make it.

        Raises:
            RuntimeError: another one failed meanwhile.
        """
        own = [self._rank, os.getpid()]
        self._store.set(f"handle {own}", dist._get_reconfigure_handle())
        self._meeting.waits[self._rank] = os.getpid()
        note(Done("waits"))
        members: Sequence[list[int]] = ()
        while own not in members:
            self._number += 1
            while not self._store.check([f"group {self._number}"]):
                time.sleep(0.002)  # a wait in the store would end with its timeout
            members = json.loads(self._store.get(f"group {self._number}"))
        handles = [self._store.get(f"handle {each}").decode() for each in members]
        dist._reconfigure(self._number, handles, timeout=self._timeout).wait()
        self.among, self.share = len(members), members.index(own)

    def is_leaving(self) -> bool:
        """Return whether somebody wants to join."""
        return bool(self._meeting.is_wanted.value)

    def sum(self, tensor: torch.Tensor) -> None:
        self._group.allreduce([tensor]).wait()

    def spread(self, tensor: torch.Tensor, root: int) -> None:
        """Replace the tensor on all by that of one."""
        options = dist.BroadcastOptions()
        options.rootRank = root
        self._group.broadcast([tensor], options).wait()

    def _show_life(self) -> None:
        while True:
            self._meeting.heard_at[self._rank] = time.monotonic()
            time.sleep(_SHOW_LIFE_S)


class Replica:
    """The state of a worker: a model, its optimizer, and how many steps it has done."""

    def __init__(self, training: Training) -> None:
        self._training, self.model = training, training.model
        self._optimizer = training.work.optimizer(self.model)
        self._gradients = Gradients(self.model, n_notes=1)
        self._order = Order(len(training.work.dataset), training.seed)
        self._n_done = 0

    def catch_up(self, group: Group) -> None:
        """Take the state of one that has done the most steps, if this worker has done fewer."""
        steps = torch.zeros(group.among, dtype=torch.int64)
        steps[group.share] = self._n_done
        group.sum(steps)
        if steps.min() == steps.max():
            return
        root, data = int(steps.argmax()), io.BytesIO()
        if group.share == root:
            torch.save([self.model.state_dict(), self._optimizer.state_dict()], data)
        length = torch.tensor([len(data.getvalue())])
        group.spread(length, root)
        state = torch.zeros(int(length), dtype=torch.uint8)
        if group.share == root:
            state = torch.frombuffer(bytearray(data.getvalue()), dtype=torch.uint8)
        group.spread(state, root)
        if self._n_done < int(steps[root]):
            model, optimizer = torch.load(io.BytesIO(state.numpy().tobytes()), weights_only=True)
            self.model.load_state_dict(model)
            self._optimizer.load_state_dict(optimizer)
            self._n_done = int(steps[root])

    def step(self, group: Group, note: Note) -> bool:
        """Do a step with all; return whether all go on in this group."""
        work, n_batch = self._training.work, self._training.batch
        share = share_of(self._n_done * n_batch, n_batch, group.share, group.among)
        samples = self._order.samples(share.start, share.stop).tolist()
        loss = work.loss(self.model, batch_of(work.dataset, samples))
        self._optimizer.zero_grad()
        torch.autograd.backward(loss)
        self._gradients.gather(float(loss.detach()), share.n_samples / n_batch)
        self._gradients.notes[:] = group.is_leaving()
        for bucket in self._gradients.buckets:
            group.sum(bucket.flat)
        is_leaving = bool(self._gradients.notes[0])
        mean = self._gradients.scatter()
        self._optimizer.step()
        self._n_done += 1
        note(Done("step", self._n_done, group.among, group.share, mean, digest_of(self.model)))
        return not is_leaving


def train(meeting: Meeting, port: int, training: Training, timeout_s: float) -> Work:
    """Return the life of a worker."""

    def work(rank: int, note: Note) -> None:
        meeting.heard_at[rank] = time.monotonic()
        group, replica = Group(meeting, port, rank, timeout_s), Replica(training)
        note(Done("joined"))
        while True:
            try:
                group.meet(note)
                replica.catch_up(group)
                while replica.step(group, note):
                    pass
            except RuntimeError:  # what torch raises for a peer that is lost, and in vain
                note(Done("no commit", among=group.among))

    return work


def gloo(training: Training, timeout_s: float) -> tuple[Work, Callable[[KilledJob], None]]:
    """Return the life of a worker, and what decides who trains together."""
    port = start_store()
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    meeting = Meeting(store, timeout_s)
    work = train(meeting, port, training, timeout_s)
    return work, lambda job: meeting.decide(job.pids)


def start_store() -> int:
    """Fork a store that lives as long as this process, and return its port.

    Its server has threads, and of a process with threads a fork may hang.
    """
    reading, writing = os.pipe()
    if os.fork() == 0:
        live("store", lambda: _serve(writing))
    os.close(writing)
    port = int(os.read(reading, 100))
    os.close(reading)
    return port


def _serve(writing: int) -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.write(writing, str(store.port).encode())
    while True:
        time.sleep(60)  # it ends with the process that started it


if __name__ == "__main__":
    if not HAS_PYTHON_BACKENDS:
        sys.exit(f"torch {torch.__version__} has no reconfigure; it needs torch 2.14 or newer")
    sys.exit(run(gloo))

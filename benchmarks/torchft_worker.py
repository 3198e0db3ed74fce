"""Sixteen torchft replica groups of one worker each, forked from one process, and a lighthouse.

    .venv-torchft/bin/python torchft_worker.py FOLDER TIMEOUT_S

The loop is torchft's own way without its DDP wrapper: a quorum, forward and backward, an allreduce
of the flat gradients through its Manager, a vote, the optimizer. The global batch stays constant,
shared out over whoever is in the quorum.
"""

import os
import sys
import time
from datetime import timedelta
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from killed_job import Done, Note, Training, digest_of, live
from meshmend.lab.workloads.registry import workload
from meshmend.lab.workloads.workload import batch_of, preload
from meshmend.train.data.samples import Order, share_of
from meshmend.train.torch.gradients import Gradients
from recovery_marks import BATCH, N_WORKERS, SURVIVORS, Marks

HEARTBEAT_S = 0.1
TICK_S = 0.02

# Not installed where types are checked, and torch's stubs lack the stores.
torchft: Any = import_module("torchft")
coordination: Any = import_module("torchft.coordination")
process_group: Any = import_module("torchft.process_group")
dist: Any = torch.distributed


def main() -> None:
    folder, timeout_s = Path(sys.argv[1]), float(sys.argv[2])
    torch.set_num_threads(1)
    preload()
    work = workload("resnet")
    model = work.model()
    lighthouse = start_lighthouse(timeout_s, least=len(SURVIVORS))
    workers = []
    for rank in range(N_WORKERS):
        if (pid := os.fork()) == 0:
            worker = Worker(rank, lighthouse, timeout_s, least=len(SURVIVORS))
            training, note = Training(work, model, BATCH), partial(_mark, Marks(folder, rank))
            live(f"worker {rank}", partial(train, worker, training, note))
        workers.append(pid)
    for pid in workers:
        os.waitpid(pid, 0)


def _mark(marks: Marks, done: Done) -> None:
    marks.note(done.what, step=done.step, among=done.among)


def start_lighthouse(timeout_s: float, *, least: int) -> str:
    """Fork a lighthouse that lives as long as this process, and return its address."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        _serve(writing, timeout_s, least)
    os.close(writing)
    address = os.read(reading, 1000).decode()
    os.close(reading)
    return address


def _serve(writing: int, timeout_s: float, least: int) -> None:
    """Be the lighthouse, until the parent is gone."""
    parent = os.getppid()
    server = coordination.LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=least,
        join_timeout_ms=int(1000 * timeout_s),
        quorum_tick_ms=int(1000 * TICK_S),
        heartbeat_timeout_ms=int(1000 * timeout_s),
    )
    port = server.address().rpartition(":")[2]
    os.write(writing, f"http://127.0.0.1:{port}".encode())
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(0)


class Worker:
    """One replica group of one worker: its manager, and when that is to give up."""

    def __init__(self, rank: int, lighthouse: str, timeout_s: float, *, least: int) -> None:
        self.rank = rank
        self._least = least
        self._lighthouse = lighthouse
        self._timeout = timedelta(seconds=timeout_s)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def manager(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        """Return torchft's manager for a model and its optimizer."""

        def state() -> dict[str, Any]:
            return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

        def take_over(theirs: dict[str, Any]) -> None:
            model.load_state_dict(theirs["model"])
            optimizer.load_state_dict(theirs["optimizer"])

        return torchft.Manager(
            pg=process_group.ProcessGroupGloo(timeout=self._timeout),
            load_state_dict=take_over,
            state_dict=state,
            min_replica_size=self._least,
            use_async_quorum=False,  # who shares the batch out must know among how many
            timeout=self._timeout,
            quorum_timeout=timedelta(seconds=60),  # a quorum that fails ends the worker
            connect_timeout=timedelta(seconds=60),
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=self._store.port,
            lighthouse_addr=self._lighthouse,
            replica_id=f"chip{self.rank:02d}",
            hostname="127.0.0.1",
            heartbeat_interval=timedelta(seconds=HEARTBEAT_S),
            init_sync=False,
        )


def train(worker: Worker, training: Training, note: Note) -> None:
    """Train until killed."""
    work, model, n_batch = training.work, training.model, training.batch
    optimizer = work.optimizer(model)
    manager = worker.manager(model, optimizer)
    gradients, order = Gradients(model), Order(len(work.dataset), training.seed)
    note(Done("joined"))
    while True:
        manager.start_quorum()
        among, mine = manager.num_participants(), manager.participating_rank()
        step = manager.current_step()
        share = share_of(step * n_batch, n_batch, mine, among)
        batch = batch_of(work.dataset, order.samples(share.start, share.stop).tolist())
        loss = work.loss(model, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's stubs
        gradients.gather(float(loss.detach()), share.n_samples / n_batch)
        for bucket in gradients.buckets:
            manager.allreduce(bucket.flat, reduce_op=dist.ReduceOp.SUM).wait()
        if manager.should_commit():
            mean = gradients.scatter()
            optimizer.step()
            note(Done("step", step + 1, among, mine, mean, digest_of(model)))
        else:
            note(Done("no commit", step, among))


if __name__ == "__main__":
    main()

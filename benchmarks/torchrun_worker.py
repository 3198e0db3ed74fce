"""One worker of a plain DDP job over Gloo that saves every few steps, started by torchrun.

    torchrun ... torchrun_worker.py FOLDER SAVE_EVERY

A worker that is started again goes on from the last checkpoint.
"""

import os
import sys
from pathlib import Path

from recovery_marks import BATCH, Marks


def main() -> None:
    folder, save_every = Path(sys.argv[1]), int(sys.argv[2])
    rank = int(os.environ["RANK"])
    marks = Marks(folder, rank)
    marks.note("started")

    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from meshmend.lab.workloads.registry import workload
    from meshmend.lab.workloads.workload import batch_of
    from meshmend.train.data.samples import Order, share_of

    torch.set_num_threads(1)
    work = workload("resnet")
    model = work.model()
    optimizer = work.optimizer(model)
    marks.note("imported")
    dist.init_process_group("gloo")
    step = 0
    checkpoint = folder / "checkpoint.pt"
    if checkpoint.exists():
        state = torch.load(checkpoint)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    ddp = DistributedDataParallel(model)
    marks.note("joined")
    order, n_ranks = Order(len(work.dataset)), dist.get_world_size()
    while True:
        share = share_of(step * BATCH, BATCH, rank, n_ranks)
        samples = order.samples(share.start, share.stop).tolist()
        loss = work.loss(ddp, batch_of(work.dataset, samples))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's stubs
        optimizer.step()
        step += 1
        marks.note("step", step=step, among=n_ranks)
        if rank == 0 and step % save_every == 0:
            draft = checkpoint.with_suffix(".draft")
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": step}, draft)
            draft.replace(checkpoint)


if __name__ == "__main__":
    main()

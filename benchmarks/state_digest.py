"""What share of a step it costs to compare all chips' states, and to be able to take a step back.

    python benchmarks/state_digest.py

One chip in one thread, by the processor's clock, so that other programs count little. The share is
that of one digest in as many steps as `Job` makes between two comparisons. What it leaves out is
one small sum in all these steps, beside the sums that each step makes. The aim is 0.5 % at most.

An elastic group also copies the state before each step, so that a step that fails leaves no trace;
a `Job` needs no copy. The chip sums nothing here: a real step is longer, and the share smaller.
"""

import hashlib
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch

from meshmend.train.state.comparison import COMPARE_EVERY
from meshmend.train.state.digest import hash_bytes, total_of
from meshmend.train.torch.learner import TorchLearner
from meshmend.train.torch.state_before import StateBefore
from record import parser_of, record

N_BYTES, BATCH = 1 << 26, 8  # samples of one chip


def seconds(run: Callable[[], object], times: int) -> float:
    """Return the median processor time of a call."""
    run()
    found = []
    for _ in range(times):
        began = time.process_time()
        run()
        found.append(time.process_time() - began)
    return statistics.median(found)


def models() -> dict[str, tuple[torch.nn.Module, torch.Tensor]]:
    """Return models of several kinds with a batch for each."""
    linear = torch.nn.Linear
    deep = [layer for _ in range(30) for layer in (linear(64, 64), torch.nn.ReLU())]
    convolutions = [
        layer
        for width in (3, 32, 32, 32)
        for layer in (torch.nn.Conv2d(width, 32, 3), torch.nn.BatchNorm2d(32), torch.nn.ReLU())
    ]
    encoder = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
    return {
        "two layers of 1000": (
            torch.nn.Sequential(linear(1000, 1000), torch.nn.ReLU(), linear(1000, 1000)),
            torch.randn(BATCH, 1000),
        ),
        "30 layers of 64": (torch.nn.Sequential(*deep), torch.randn(BATCH, 64)),
        "convolutions": (torch.nn.Sequential(*convolutions), torch.randn(BATCH, 3, 16, 16)),
        "transformer": (torch.nn.TransformerEncoder(encoder, 2), torch.randn(BATCH, 16, 256)),
    }


def share(model: torch.nn.Module, batch: torch.Tensor) -> dict[str, float]:
    """Return what a step and a digest of the state of a model cost."""
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()

    step_s = seconds(step, 5)
    learner = TorchLearner(model, optimizer)
    digest_s = seconds(lambda: total_of(learner.begun_digest().wait()), 5)
    copy_s = seconds(StateBefore((model, optimizer)).capture, 5)
    return {
        "parameters": sum(each.numel() for each in model.parameters()),
        "step_ms": 1e3 * step_s,
        "digest_ms": 1e3 * digest_s,
        "share": digest_s / (COMPARE_EVERY * step_s),
        "copy_ms": 1e3 * copy_s,
        "copy_share": copy_s / step_s,
    }


def main() -> None:
    parser = parser_of(__doc__)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    data = np.random.default_rng(0).integers(0, 256, N_BYTES, dtype=np.uint8)
    rates = {
        "ours": N_BYTES / seconds(lambda: hash_bytes(data), 9) / 1e9,
        "blake2b": N_BYTES / seconds(lambda: hashlib.blake2b(data.data), 3) / 1e9,
    }
    print(", ".join(f"{name}: {rate:.2f} GB/s" for name, rate in rates.items()))
    shares = {name: share(*each) for name, each in models().items()}
    for name, found in shares.items():
        print(
            f"{name:20} step {found['step_ms']:7.2f} ms, digest {found['digest_ms']:6.2f} ms: "
            f"{found['share']:.3%} of a step, every {COMPARE_EVERY} steps; "
            f"elastic group's copy {found['copy_ms']:6.2f} ms: {found['copy_share']:.1%}"
        )
    if not arguments.no_write:
        figures = {"gigabytes_per_s": rates, "compare_every": COMPARE_EVERY, "models": shares}
        print(record("state_digest", figures))


if __name__ == "__main__":
    main()

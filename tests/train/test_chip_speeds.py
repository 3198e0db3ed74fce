"""Slow chips get fewer samples: soon, the same on all chips, and no others get fewer."""

import itertools
import random
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from commanding import meshmend_run
from elastic_job import elastic, losses, of_kind
from meshmend.topology.failures import Chip
from meshmend.train.core.chip_speeds import ChipSpeeds, NewSpeed
from meshmend.train.data.samples import counts_by_speed, share_by_speed, share_of

CHIPS: tuple[Chip, ...] = tuple(itertools.product(range(4), range(4)))
SLOW = CHIPS[5]


@given(st.integers(0, 300), st.lists(st.integers(1, 100), min_size=1, max_size=20))
def test_shares_by_speed_are_the_whole_batch_without_gaps(batch: int, speeds: list[int]) -> None:
    shares = [share_by_speed(7, batch, rank, tuple(speeds)) for rank in range(len(speeds))]

    assert shares[0].start == 7
    assert shares[-1].stop == 7 + batch
    assert all(a.stop == b.start for a, b in itertools.pairwise(shares))
    if batch >= len(speeds):
        assert all(share.n_samples > 0 for share in shares)


@given(st.integers(0, 300), st.integers(1, 20), st.integers(1, 100))
def test_chips_of_equal_speeds_have_the_shares_that_equal_shares_are(
    batch: int, n_ranks: int, speed: int
) -> None:
    speeds = (speed,) * n_ranks

    for rank in range(n_ranks):
        assert share_by_speed(7, batch, rank, speeds) == share_of(7, batch, rank, n_ranks)


@given(st.integers(3, 14), st.tuples(*3 * [st.integers(1, 100)]))
def test_no_other_shares_are_ready_earlier(batch: int, speeds: tuple[int, int, int]) -> None:
    def ready(counts: tuple[int, ...]) -> float:
        return max(count / speed for count, speed in zip(counts, speeds, strict=True))

    others = itertools.product(range(1, batch + 1), repeat=3)
    best = min(ready(counts) for counts in others if sum(counts) == batch)

    assert len(set(speeds)) == 1 or ready(counts_by_speed(batch, speeds)) == best


class Job:
    """Chips that compute samples, some slowly, on a machine that is busy."""

    def __init__(self, chips: tuple[Chip, ...] = CHIPS, *, noise: float = 0.0, seed: int = 0):
        self.chips, self.speeds, self.generation = chips, ChipSpeeds(), 1
        self._noise, self._random = noise, random.Random(seed)
        self.overhead = 0.0  # of a step, in samples

    def times(self, slow: Mapping[Chip, float], batch: int = 1024) -> list[float]:
        counts = counts_by_speed(batch, self.speeds.of(self.chips))
        return [
            1e-3 * slow.get(chip, 1) * (self.overhead + count)
            for chip, count in zip(self.chips, counts, strict=True)
        ]

    def step(self, slow: Mapping[Chip, float], batch: int = 1024) -> tuple[NewSpeed, ...]:
        noise = self._random.lognormvariate
        times = [each * noise(0.0, self._noise) for each in self.times(slow, batch)]
        counts = counts_by_speed(batch, self.speeds.of(self.chips))
        return self.speeds.conclude(self.generation, self.chips, counts, times)

    def found(self, n_steps: int, slow: Mapping[Chip, float]) -> list[tuple[int, NewSpeed]]:
        return [(step, new) for step in range(1, n_steps + 1) for new in self.step(slow)]


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_a_chip_at_a_third_of_the_speed_is_found_in_ten_steps_and_costs_little_more(
    noise: float,
) -> None:
    job, slow = Job(noise=noise), {SLOW: 3.0}
    equal = max(job.times(slow))

    ((step, new), *_) = job.found(60, slow)

    ideal = 1e-3 * 1024 / (15 + 1 / 3)
    assert (step, new.chip) == (10, SLOW)
    assert new.speed == pytest.approx(1 / 3, abs=0.04)
    assert equal > 2.8 * ideal
    assert max(job.times(slow)) <= 1.1 * ideal


@pytest.mark.parametrize("overhead", [2.0, 5.0, 10.0])
def test_a_part_of_the_time_that_does_not_depend_on_the_share_is_made_up_for(
    overhead: float,
) -> None:
    job, slow = Job(noise=0.02), {SLOW: 3.0}
    job.overhead = overhead

    job.found(400, slow)

    ideal = 1e-3 * ((1024 - 64 / 3) / 15 + overhead)  # about: the slow one has a third or less
    assert max(job.times(slow)) <= 1.1 * ideal


def test_a_chip_that_is_well_again_gets_its_share_back() -> None:
    job = Job(noise=0.05)
    job.found(30, {SLOW: 3.0})
    assert job.speeds.of([SLOW])[0] < 40

    ((_, new),) = job.found(100, {})

    assert new == NewSpeed(SLOW, 1.0)
    assert job.speeds.state() == ""


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_noise_moves_no_samples(noise: float) -> None:
    for seed in range(2):
        assert Job(noise=noise, seed=seed).found(1500, {}) == []


def test_what_slows_all_chips_or_a_chip_now_and_then_is_no_fault_of_one() -> None:
    job = Job()

    assert job.found(50, dict.fromkeys(CHIPS, 3.0)) == []
    for turn in range(100):
        assert job.step({SLOW: 9.0} if turn % 4 == 0 else {}) == ()


def test_half_of_the_chips_being_slow_is_found_too() -> None:
    job, slow = Job(), dict.fromkeys(CHIPS[:8], 2.0)

    assert {new.chip for _, new in job.found(20, slow)} == set(CHIPS[:8])


def test_a_share_of_one_sample_does_not_shrink_and_nothing_is_told_again_and_again() -> None:
    job = Job()

    told = [new for _ in range(300) for new in job.step({SLOW: 500.0}, batch=64)]

    assert len(told) == 1
    assert counts_by_speed(64, job.speeds.of(CHIPS))[5] == 1


def joined(job: Job, join: Callable[[ChipSpeeds], None]) -> list[bool]:
    """Return whether an old chip and one that joins have equal shares in the steps that follow."""
    new = ChipSpeeds()
    join(new)
    job.generation += 1
    equal = []
    for _ in range(60):
        equal.append(job.speeds.of(CHIPS) == new.of(CHIPS))
        counts, times = counts_by_speed(1024, job.speeds.of(CHIPS)), job.times({CHIPS[2]: 2.0})
        for each in (job.speeds, new):
            each.conclude(job.generation, CHIPS, counts, times)
    return equal


def test_a_chip_that_joins_has_the_same_shares_as_the_others_from_the_first_step_on() -> None:
    job = Job()
    job.found(17, {SLOW: 3.0})

    assert all(joined(job, lambda new: new.load({"speeds": job.speeds.state()})))


def test_one_that_joined_without_the_speeds_would_have_others() -> None:
    job = Job()
    job.found(17, {SLOW: 3.0})

    assert not all(joined(job, lambda new: new.load({})))


def test_a_chip_that_left_is_forgotten() -> None:
    job = Job()
    job.found(17, {SLOW: 3.0})

    job.chips, job.generation = tuple(chip for chip in CHIPS if chip != SLOW), 2
    job.step({})

    assert job.speeds.of([SLOW]) == (100,)


@pytest.mark.parametrize("framework", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
def test_a_job_with_a_slow_chip_trains_as_with_equal_shares_through_a_loss_and_a_repair(
    framework: str, tmp_path: Path
) -> None:
    """Chips compute the same shares: else samples would be lost, or used twice."""
    options = {"mesh": "2x2", "steps": 44, "dtype": "float64", "framework": framework}
    faults = ["throttle 0,1 from 2", "kill 1,1 at 18", "repair 1,1 at 22"]

    equal = elastic(tmp_path / "equal", **options)
    result = elastic(
        tmp_path / "speed",
        **options,
        shares="speed",
        sample_s=0.003,
        inject=faults,
        gate=[26, [["generation", 3], ["arrived", None]]],
    )

    assert result["finished"], result["why"]
    first, *_ = of_kind(result, "chip-slow")
    assert (first["chip"], first["by"], first["step"] <= 17) == ([0, 1], [0, 0], True)
    assert first["speed"] < 0.6
    audit = result["audit"]
    assert (audit["used"], audit["lost"], audit["repeated"]) == (44 * 48, 0, 0)
    assert (audit["faults"], audit["split"], audit["hashed"]) == ([], [], 44)
    if framework == "torch":  # JAX's weights of the last layer are of float32 here
        assert losses(result) == pytest.approx(losses(equal), abs=1e-9)


@pytest.mark.slow
def test_shares_by_speed_are_checked_as_others_are_and_a_resumed_job_begins_with_them(
    tmp_path: Path,
) -> None:
    options = {"mesh": "1x3", "shares": "speed", "sample_s": 0.003, "check_shares": 4}
    folder = tmp_path / "first"

    first = elastic(folder, **options, steps=16, save_every=16, inject=["throttle 0,1 from 0"])
    resumed = {"steps": 24, "resume": str(folder / "checkpoints")}
    again = elastic(tmp_path / "again", **options, **resumed)

    assert first["finished"], first["why"]
    assert again["finished"], again["why"]
    assert [event["chip"] for event in of_kind(first, "chip-slow")][:1] == [[0, 1]]
    assert of_kind(first, "turned away") == of_kind(again, "turned away") == []
    (file,) = (tmp_path / "again" / "ledger").glob("0-1.*")
    start, stop = first_share(file)
    assert stop - start <= 10  # of 48, where an equal share has 16
    for audit, n_steps in ((first["audit"], 16), (again["audit"], 8)):
        assert (audit["used"], audit["lost"], audit["repeated"]) == (n_steps * 48, 0, 0)
        assert (audit["faults"], audit["split"]) == ([], [])


_FLIPPED = """
import sys
import torch
from meshmend.train import Job
from meshmend.train.core.share_checks import is_check_step

torch.manual_seed(0)
dataset = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
job = Job(model, optimizer, dataset, batch=30, steps=16, shares="speed", {more})
speeds, to_flip = job._core._shares.speeds, True
for inputs, targets in job:
    loss = ((model(inputs) - targets) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    job.step(loss)
    if to_flip and job.step_number >= 5 and is_check_step(job.step_number, 4):
        to_flip = False
        if job.rank == 2:
            speeds._slow = {{(0, 0): 100 ^ 1 << 5}}
"""


def run_flipped(folder: Path, more: str) -> tuple[int, str]:
    """Run a job with shares by speed, in which a bit of one chip's copy of a speed flips."""
    script = folder / "script.py"
    script.write_text(_FLIPPED.format(more=more))
    ended = meshmend_run("--elastic", "--mesh", "1x3", str(script))
    return ended.returncode, ended.stderr


def test_a_bit_that_flips_in_a_speed_is_mended_before_a_sample_is_lost(tmp_path: Path) -> None:
    code, words = run_flipped(tmp_path, "check_shares=4")

    assert code == 0, words
    assert "chip (0, 2) differed from the others" in words
    assert "progress.speeds (equal against 0,0=68)" in words
    assert "16 steps; samples: 480 used, 0 lost, 0 repeated; replicas equal bit for bit" in words


@pytest.mark.slow
def test_without_checks_it_ends_the_job_at_the_next_comparison(tmp_path: Path) -> None:
    code, words = run_flipped(tmp_path, "compare_every=4")

    assert code == 1
    assert "chip (0, 2) against the other 2 chips, in progress.speeds (equal against" in words


def first_share(ledger: Path) -> tuple[int, int]:
    """Return the first share that a worker has tried."""
    lines = (line.split() for line in ledger.read_text().splitlines())
    _, _, _, start, stop, *_ = next(words for words in lines if words[0] == "try")
    return int(start), int(stop)

"""Workloads: real models that learn, whose loss is a mean over samples."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import run

import pytest
import torch
from PIL import Image

from meshmend.config import JobConfig, ShardingConfig
from meshmend.errors import InputError
from meshmend.lab.workloads.registry import workload
from meshmend.lab.workloads.workload import Batch, Scores, Workload, batch_of, preload
from meshmend.planning.plan_request import GATHER


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Small models are slower on many threads, and much slower on a busy machine."""
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(n_threads)


def n_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def train(work: Workload, n_steps: int, batch: int) -> torch.nn.Module:
    model = work.model()
    optimizer = work.optimizer(model)
    order = torch.randperm(n_steps * batch, generator=torch.Generator().manual_seed(0))
    for step in range(n_steps):
        chosen = order[step * batch : (step + 1) * batch] % len(work.dataset)
        optimizer.zero_grad()
        torch.autograd.backward(work.loss(model, batch_of(work.dataset, chosen.tolist())))
        optimizer.step()
    return model


@pytest.mark.parametrize(
    ("model", "size", "n_expected"),
    [
        ("resnet", "tiny", 19_810),
        ("resnet", "full", 25_557_032),
        ("bert", "tiny", 698_882),
        ("bert", "full", 336_226_108),
    ],
)
def test_a_model_has_as_many_parameters_as_published(
    model: str, size: str, n_expected: int
) -> None:
    work = workload(model, size)

    with torch.device("meta"):
        assert n_parameters(work.new_model()) == n_expected


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_a_tiny_resnet_learns_the_digits(norm: str) -> None:
    work = workload("resnet", norm=norm)

    scores = work.evaluate(train(work, n_steps=100, batch=64))
    assert scores["accuracy"] > 0.9


@pytest.mark.parametrize("model", ["resnet", "bert"])
def test_a_model_in_bfloat16_has_norms_in_float32_and_nearly_the_same_loss(model: str) -> None:
    exact, short = workload(model), workload(model, in_bfloat16=True)
    chosen = list(range(16))

    losses = [
        work.loss(work.model(), batch_of(work.dataset, chosen)).item() for work in (exact, short)
    ]

    types = {parameter.dtype for parameter in short.model().parameters()}
    assert types == {torch.bfloat16, torch.float32}
    assert losses[1] != losses[0]
    assert losses[1] == pytest.approx(losses[0], rel=0.05)


def test_a_launcher_knows_what_a_shared_update_gathers() -> None:
    work = workload("resnet")
    config = JobConfig(sharding=ShardingConfig(optimizer=True))

    alone = work.sum_sizes(JobConfig(), 16)
    *sums, (n_bytes, gathers) = work.sum_sizes(config, 16)

    assert sums == [*alone, (1, "int64")]
    assert gathers == GATHER
    assert n_bytes % 16 == 0
    assert 4 * work.n_parameters <= n_bytes < 8 * work.n_parameters


def test_a_tiny_bert_learns_words() -> None:
    work = workload("bert")

    before = work.evaluate(work.model())
    after = work.evaluate(train(work, n_steps=30, batch=16))
    assert before["word_loss"] == pytest.approx(7.62, abs=0.1)  # the logarithm of 2048 tokens
    assert after["word_loss"] < before["word_loss"] - 0.7
    assert after["accuracy"] > before["accuracy"]


@pytest.mark.parametrize("model", ["resnet", "bert"])
def test_the_loss_is_the_mean_over_samples_however_they_are_shared_out(model: str) -> None:
    work = workload(model, norm="group")
    made = work.model()

    whole = work.loss(made, batch_of(work.dataset, range(10)))
    parts = [work.loss(made, batch_of(work.dataset, part)) for part in (range(3), range(3, 10))]
    assert whole.item() == pytest.approx((3 * parts[0] + 7 * parts[1]).item() / 10, rel=1e-6)


@pytest.mark.parametrize("model", ["resnet", "bert"])
def test_a_model_is_the_same_every_time_and_another_for_another_seed(model: str) -> None:
    def weights(seed: int) -> torch.Tensor:
        parameters = workload(model, seed=seed).model().parameters()
        return torch.cat([parameter.detach().flatten() for parameter in parameters])

    torch.manual_seed(5)
    first, state = weights(0), torch.get_rng_state()
    assert torch.equal(weights(0), first)
    assert not torch.equal(weights(1), first)
    assert torch.equal(torch.get_rng_state(), state), "the caller's random numbers are its own"


@pytest.mark.parametrize("model", ["resnet", "bert"])
def test_every_parameter_gets_a_gradient(model: str) -> None:
    work = workload(model)
    made = work.model()

    torch.autograd.backward(work.loss(made, batch_of(work.dataset, range(2))))
    assert all(parameter.grad is not None for parameter in made.parameters())


def test_one_sample_is_enough_for_a_chip() -> None:
    work = workload("resnet", norm="batch")
    made = work.model()

    assert work.loss(made, batch_of(work.dataset, [0])).isfinite()


def test_neither_batch_statistics_nor_kinks_are_left_with_group_norm() -> None:
    kinds = {type(module) for module in workload("resnet", norm="group").model().modules()}

    assert {torch.nn.GroupNorm, torch.nn.SiLU} <= kinds
    assert not {torch.nn.BatchNorm2d, torch.nn.ReLU} & kinds


def test_evaluation_leaves_the_model_as_it_was() -> None:
    work = workload("resnet")
    model = work.model()
    before = {name: value.clone() for name, value in model.state_dict().items()}

    work.evaluate(model)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_folder_of_images_or_texts_can_be_learnt_from(tmp_path: Path) -> None:
    for name, colour in (("dark", 10), ("light", 200)):
        (tmp_path / name).mkdir()
        for at in range(4):
            Image.new("L", (9, 9), colour + at).save(tmp_path / name / f"{at}.png")
    (tmp_path / "text.txt").write_text("a rose is a rose is a rose " * 50)

    for model in ("resnet", "bert"):
        work = workload(model, data=tmp_path)
        assert str(tmp_path) in work.name
        assert work.loss(work.model(), batch_of(work.dataset, range(2))).isfinite()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"model": "vgg"}, "the model needs to be one of resnet, bert, gpt, but got 'vgg'"),
        ({"model": "bert", "size": "huge"}, "size needs to be one of tiny, full, but got 'huge'"),
        ({"model": "resnet", "norm": "none"}, "norm needs to be one of batch, group, but got"),
    ],
)
def test_unknown_names_are_refused(names: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        workload(**names)  # type: ignore[arg-type]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)

    with pytest.raises(InputError, match=r"resnet needs sklearn.datasets.*meshmend\[train\]"):
        workload("resnet")


def test_transformers_waits_until_a_workload_is_built() -> None:
    code = "import sys, meshmend.lab.workloads.registry; print('transformers' in sys.modules)"

    assert run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


def test_after_preload_a_workload_imports_nothing_large() -> None:
    preload()
    before = set(sys.modules)

    for model in ("resnet", "bert"):
        work = workload(model)
        work.optimizer(work.model())
    assert len(set(sys.modules) - before) < 20


@pytest.mark.parametrize(
    ("policy", "sizes"), [("constant", [4, 5, 6]), ("shrink", [4])], ids=["constant", "shrink"]
)
def test_a_launcher_computes_shares_of_all_sizes_that_a_loss_may_bring(
    policy: str, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("cuda", "hip", "xpu"):
        monkeypatch.setattr(torch.version, name, None)
    work, seen = workload("resnet"), []

    def scores(model: torch.nn.Module, batch: Batch) -> Scores:
        seen.append(len(batch[0]))
        return work.scores(model, batch)

    config = JobConfig().with_({"training.batch": 64, "training.batch_policy": policy})
    replace(work, scores=scores).preload(config, (16, 12))

    assert seen == sizes

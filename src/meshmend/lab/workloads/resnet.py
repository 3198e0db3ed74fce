"""ResNet as a workload: an untrained model of transformers, made from a configuration.

`full` is ResNet-50 as published: 3 channels, 1000 classes, 25,557,032 parameters. If the data has
fewer classes, the others stay unused. `tiny` has three stages of one block, and as many classes as
the data.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from meshmend.lab.workloads.images import ImageSource, digits, image_folder
from meshmend.lab.workloads.workload import Batch, Scores, Workload

if TYPE_CHECKING:
    from transformers import ResNetConfig

_TINY_RATE = 0.05
_FULL_RATE = 0.025  # for 64 samples per step; published: 0.1 for 256
_GROUP = 8  # channels per group in group normalisation
_IMAGENET_CLASSES = 1000


def tiny_resnet(data: Path | None, *, norm: str, seed: int) -> Workload:
    """Return a ResNet of 20 thousand parameters on the digits, or on small images of a folder."""
    from transformers import ResNetConfig

    source = digits() if data is None else image_folder(data, side=32)
    config = ResNetConfig(
        num_channels=1 if data is None else 3,
        embedding_size=8,
        hidden_sizes=[8, 16, 32],
        depths=[1, 1, 1],
        layer_type="basic",
        num_labels=source.n_classes,
    )
    return _resnet(source, config, name="tiny ResNet", rate=_TINY_RATE, norm=norm, seed=seed)


def full_resnet(data: Path | None, *, norm: str, seed: int) -> Workload:
    """Return ResNet-50 on a folder of images, or on digits enlarged to 64x64 in three channels."""
    from transformers import ResNetConfig

    source = digits(side=64, n_channels=3) if data is None else image_folder(data, side=224)
    config = ResNetConfig(num_labels=max(_IMAGENET_CLASSES, source.n_classes))
    return _resnet(source, config, name="ResNet-50", rate=_FULL_RATE, norm=norm, seed=seed)


def _resnet(
    source: ImageSource, config: "ResNetConfig", *, name: str, rate: float, norm: str, seed: int
) -> Workload:
    side = source.train[0][0].shape[-1]

    def model() -> torch.nn.Module:
        from transformers import ResNetForImageClassification

        made: torch.nn.Module = ResNetForImageClassification(config)
        if side < 32:
            _keep_resolution(made)
        if norm == "group":
            _use_group_norm(made)
            _use_smooth_activation(made)
        return made

    def optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)

    return Workload(
        f"{name} ({norm} norm) on {source.name}",
        source.train,
        source.held_out,
        model,
        optimizer,
        _scores,
        seed,
    )


def _scores(model: torch.nn.Module, batch: Batch) -> Scores:
    images, labels = batch
    logits = model(pixel_values=images).logits.float()  # also of a model in bfloat16
    return {
        "loss": functional.cross_entropy(logits, labels),
        "accuracy": (logits.detach().argmax(1) == labels).float().mean(),
    }


def _keep_resolution(model: torch.nn.Module) -> None:
    """Change the first layer as usual for small images: a 3x3 convolution and no pooling."""
    stem = model.get_submodule("resnet.embedder")
    wide = stem.get_submodule("embedder.convolution")
    assert isinstance(wide, torch.nn.Conv2d)
    narrow = torch.nn.Conv2d(wide.in_channels, wide.out_channels, 3, padding=1, bias=False)
    torch.nn.init.kaiming_normal_(narrow.weight, mode="fan_out", nonlinearity="relu")
    stem.get_submodule("embedder").convolution = narrow
    stem.pooler = torch.nn.Identity()


def _use_smooth_activation(model: torch.nn.Module) -> None:
    """Replace ReLU by SiLU, so that runs with other sum orders have the same loss curve.

    The slope of ReLU jumps at 0. In one step or another some value is so near 0 that rounding
    decides on which side it is; then curves that differed by 1e-7 differ by up to 1e-2 soon.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, torch.nn.ReLU):
                setattr(parent, name, torch.nn.SiLU())


def _use_group_norm(model: torch.nn.Module) -> None:
    """Replace batch by group normalisation: a sample's loss then ignores the rest of its batch."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, torch.nn.BatchNorm2d):
                channels = child.num_features
                setattr(parent, name, torch.nn.GroupNorm(channels // _GROUP, channels))

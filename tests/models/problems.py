"""A small fixed problem for each model, which it can memorise in a few seconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from retrograde import models


@dataclass(frozen=True)
class Problem:
    """Build a model with a memory mode, and the loss of a model on fixed data in the dtype of its parameters.

    In `steps` steps of Adam with the learning rate `rate`, the loss falls below `falls` times its first value.
    `has_exact` is False if its coupling has no exact form.
    """

    build: Callable[[Any], nn.Module]
    loss: Callable[[nn.Module], Tensor]
    steps: int = 40
    rate: float = 1e-2
    falls: float = 0.1
    has_exact: bool = True


def normal(model: nn.Module, *shape: int, seed: int = 1) -> Tensor:
    """Normal random numbers, the same each time, in the dtype of the model."""
    numbers = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return numbers.to(next(model.parameters()).dtype)


def whole(limit: int, *shape: int, seed: int = 1) -> Tensor:
    return torch.randint(limit, shape, generator=torch.Generator().manual_seed(seed))


def classification(side: int) -> Callable[[nn.Module], Tensor]:
    """The classes of twelve images of noise."""
    return lambda model: F.cross_entropy(model(normal(model, 12, 3, side, side)), whole(4, 12))


def translation(model: Any) -> Tensor:
    """The source backwards, after a start token; some of the source is padding."""
    source = 1 + whole(9, 4, 8)
    mask = torch.arange(8) < torch.tensor([[8], [8], [8], [6]])
    target = torch.cat([torch.zeros(4, 1, dtype=torch.int64), (source * mask).flip(1)], 1)
    return model.loss(source, target, mask)


def brighter_than_its_row_and_column(model: nn.Module) -> Tensor:
    images = normal(model, 3, 1, 6, 6)
    around = images.mean(-1, keepdim=True) + images.mean(-2, keepdim=True)
    return F.cross_entropy(model(images), (images > around)[:, 0].long())


def sound_of_video(model: nn.Module) -> Tensor:
    """The sound depends on the video only, the video on the mean of the sound; one clip is shorter."""
    video, audio = normal(model, 3, 5, 4), normal(model, 3, 7, 2, seed=2)
    mask = torch.arange(5) < torch.tensor([[5], [5], [3]])
    outputs = model({"video": video, "audio": audio}, {"video": mask})
    wanted = (video * mask[..., None]).mean((1, 2), keepdim=True).expand_as(audio)
    return F.mse_loss(outputs["audio"], 3 * wanted) + F.mse_loss(
        outputs["video"], audio.mean((1, 2), True).expand_as(video)
    )


def energies(model: nn.Module) -> Tensor:
    """The sum over pairs of points of an edge times their distance; one cloud lacks a point."""
    values, coords = normal(model, 6, 5, 2), normal(model, 6, 5, 3, seed=2)
    edges = normal(model, 6, 5, 5, 1, seed=3)
    mask = torch.arange(5) < torch.tensor([[5]] * 5 + [[4]])
    wanted = ((torch.cdist(coords, coords)[..., None] * edges).sum((2, 3)) * mask).sum(1) / 10
    return F.mse_loss((model(values, coords, mask, edges)[..., 0] * mask).sum(1), wanted)


def ring(nodes: int) -> Tensor:
    """Each node and the next one, both ways."""
    here = torch.arange(nodes)
    return torch.cat([torch.stack([here, (here + 1) % nodes]), torch.stack([(here + 1) % nodes, here])], 1)


def nodes_of_a_ring(model: nn.Module) -> Tensor:
    """Each node's label depends on itself and its neighbours."""
    nodes = normal(model, 24, 4)
    around = nodes.roll(1, 0) + nodes.roll(-1, 0)
    return F.cross_entropy(model(nodes, ring(24)), ((2 * nodes + around).sum(1) > 0).long())


PROBLEMS = {
    "ReversibleLM": Problem(
        lambda memory: models.ReversibleLM(12, 32, 4, 4, 2, memory=memory),
        lambda model: model.loss(whole(12, 4, 17)),
    ),
    "EncoderDecoder": Problem(
        lambda memory: models.EncoderDecoder(10, 10, 32, 2, 4, kv_heads=2, memory=memory), translation
    ),
    "AxialImageTransformer": Problem(
        lambda memory: models.AxialImageTransformer(1, 2, (6, 6), width=24, depth=2, heads=2, memory=memory),
        brighter_than_its_row_and_column,
    ),
    "RevNet": Problem(lambda memory: models.RevNet(4, widths=(8, 16), depths=(2, 2), memory=memory), classification(8)),
    "RevViT": Problem(
        lambda memory: models.RevViT(4, 8, 2, width=24, depth=3, heads=3, memory=memory), classification(8)
    ),
    "RevCol": Problem(
        lambda memory: models.RevCol(4, widths=(8, 12, 16), columns=4, memory=memory),
        classification(8),
        has_exact=False,
    ),
    "RevBiFPN": Problem(
        lambda memory: models.RevBiFPN(4, widths=(8, 12, 16), depth=2, memory=memory), classification(8)
    ),
    "MomentumResNet": Problem(
        lambda memory: models.MomentumResNet(4, widths=(8, 12), depths=(3, 3), memory=memory), classification(8)
    ),
    "TwoModalityTransformer": Problem(
        lambda memory: models.TwoModalityTransformer(
            {"video": 4, "audio": 2}, width=24, depth=2, heads=2, memory=memory
        ),
        sound_of_video,
    ),
    "PointCloudTransformer": Problem(
        lambda memory: models.PointCloudTransformer(2, 1, 1, width=24, depth=3, heads=2, memory=memory), energies
    ),
    "DeepGraphNetwork": Problem(
        lambda memory: models.DeepGraphNetwork(4, 2, width=24, depth=12, groups=3, memory=memory), nodes_of_a_ring
    ),
}

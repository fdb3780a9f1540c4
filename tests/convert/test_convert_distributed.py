"""Converted models under DDP and under FSDP2 of the whole model, in a group of one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from stock_models import Model, assert_same_bits, gradients
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from retrograde.convert import convert

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch was built without distributed")


@pytest.fixture(autouse=True)
def _group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def full(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients under the model's own names, as whole tensors."""
    return {
        name.removeprefix("module."): g.full_tensor() if hasattr(g, "full_tensor") else g
        for name, g in gradients.items()
    }


# A linear layer of three dimensions returns a view, which FSDP2 warns of; nothing here edits it.
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
@pytest.mark.parametrize("recipe", ["bdia", "two_stream"])
def test_a_wrapped_model_has_the_gradients_of_the_model(recipe: str, wrap: type[nn.Module]) -> None:
    model = Model(dropout=0.1).train()
    convert(model, recipe)
    batch = {"x": torch.randn(3, 6, 3)}
    expected = gradients(model, batch)
    assert_same_bits(full(gradients(wrap(model), batch)), expected)

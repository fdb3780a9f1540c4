"""Converted models under DDP and under FSDP2 of the whole model, in a group of one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from retrograde import convert
from small_models import Model, assert_same_bits, gradients

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


def shard_parts(model: Model) -> nn.Module:
    for layer in model.layers:
        for part in layer.children():
            if any(True for _ in part.parameters()):
                fully_shard(part)
    return fully_shard(model)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
@pytest.mark.parametrize("converted", ["before", "after"])
@pytest.mark.parametrize("recipe", ["bdia", "two_stream"])
def test_sharding_the_parts_of_layers_gives_the_gradients_of_the_model(recipe: str, converted: str) -> None:
    model, batch = Model(dropout=0.1).train(), {"x": torch.randn(3, 6, 3)}
    conversion = convert(model, recipe)
    expected = gradients(model, batch)
    if converted == "after":
        conversion.undo()
        shard_parts(model)
        convert(model, recipe)
    else:
        shard_parts(model)
    assert_same_bits(full(gradients(model, batch)), expected)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view tensor")
def test_a_layer_that_was_sharded_by_itself_is_refused_if_it_would_be_rewired() -> None:
    model, x = Model(), torch.randn(3, 6, 3)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    conversion = convert(model.train(), "bdia")
    with pytest.raises(RuntimeError, match=r"Layer was given to fully_shard by itself.* Shard its parts"):
        model(x)
    assert model.eval()(x).isfinite().all(), "in eval bdia changes nothing, and layers run in their own calls"
    model.train()
    with conversion.original():
        model(x).sum().backward()

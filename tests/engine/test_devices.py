"""No kind of device has code of its own. What runs on accelerators is in tests/device."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg

KINDS = ("cuda", "xpu", "mps")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_device_lets_its_generator_be_read_and_set_in_the_way_we_do(kind: str) -> None:
    """What runs without the device: that torch's module for it takes the calls that `_randomness` makes."""
    module = torch.get_device_module(kind)
    device = torch.device(kind)
    inspect.signature(module.get_rng_state).bind(device)
    inspect.signature(module.set_rng_state).bind(torch.empty(0), device)


@pytest.mark.parametrize("memory", ["store", "checkpoint", "offload", "reverse"])
def test_a_stack_on_the_meta_device_keeps_shapes_and_draws_nothing(memory: str) -> None:
    """A device without values, and without a generator: as large models are sized."""
    branches = [nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.3)) for _ in range(12)]
    blocks = [rg.two_stream(f, g) for f, g in zip(branches[::2], branches[1::2], strict=True)]
    stack = rg.ReversibleSequence(blocks, memory=memory).to("meta")  # type: ignore[arg-type]
    before = torch.get_rng_state()
    y = stack(torch.empty(8, 16, device="meta"))
    assert isinstance(y, Tensor)
    assert (y.shape, y.device.type) == ((8, 16), "meta")
    y.sum().backward()
    assert {p.grad.device.type for p in stack.parameters() if p.grad is not None} == {"meta"}
    assert torch.equal(torch.get_rng_state(), before)


def test_the_package_calls_no_kind_of_device_by_its_own_module() -> None:
    """torch.accelerator and torch.get_device_module serve all kinds; torch.cuda would serve one."""
    files = list(Path(rg.__file__).parent.rglob("*.py"))
    assert len(files) > 20
    named = [
        f"{f.name}: {hit}" for f in files for hit in re.findall(r"torch\.(?:cuda|xpu|mps)\b|\.cuda\(", f.read_text())
    ]
    assert not named

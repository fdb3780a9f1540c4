"""What no device made in Python can show: kernels of its own, streams that overlap, copies that really wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import retrograde as rg

pytestmark = pytest.mark.gpu


class Attention(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.read, self.write = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = [part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.read(x).chunk(3, -1)]
        mixed = F.scaled_dot_product_attention(*heads, dropout_p=0.2 if self.training else 0.0, is_causal=True)
        result: Tensor = self.write(mixed.transpose(1, 2).flatten(2))
        return result


@pytest.fixture
def accelerator() -> torch.device:
    device = torch.accelerator.current_accelerator(check_available=True)
    assert device is not None
    return device


def make(device: torch.device, **options: Any) -> tuple[rg.ReversibleSequence, Tensor]:
    torch.manual_seed(0)
    blocks = [rg.two_stream(Attention(), nn.Sequential(nn.Linear(64, 64), nn.GELU())) for _ in range(6)]
    stack = rg.ReversibleSequence(blocks, **options).to(device)
    return stack, torch.randn(4, 128, 64, device=device, requires_grad=True)


def gradients(stack: rg.ReversibleSequence, x: Tensor, memory: Any, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(5)
    with torch.autocast(x.device.type, dtype=dtype):
        y = stack(x, memory=memory)
    return list(torch.autograd.grad(y.float().square().mean(), [x, *stack.parameters()]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("memory", ["checkpoint", "offload", "reverse"])
def test_fused_attention_with_dropout_is_replayed_to_the_bit_on_a_grid(
    accelerator: torch.device, memory: str, dtype: torch.dtype
) -> None:
    stack, x = make(accelerator, exact=True)
    for found, wanted in zip(gradients(stack, x, memory, dtype), gradients(stack, x, "store", dtype), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("memory", ["store", "checkpoint", "offload", "reverse", "selective"])
def test_cuda_finds_no_wait_of_the_host_in_a_training_step(accelerator: torch.device, memory: str) -> None:
    if accelerator.type != "cuda":
        pytest.skip("only torch.cuda can raise where the host would wait")
    stack, x = make(accelerator)
    for _ in range(3):
        y = stack(x, memory=memory)
        y.backward(torch.ones_like(y))
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = stack(x, memory=memory)
        y.backward(torch.ones_like(y))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_offload_is_right_on_a_stream_of_its_own_while_another_computes(accelerator: torch.device) -> None:
    module = torch.get_device_module(accelerator)
    if not hasattr(module, "Stream"):
        pytest.skip(f"{accelerator.type} has one stream")
    stack, x = make(accelerator, exact=True)
    wanted = gradients(stack, x, "store", torch.bfloat16)
    noise = torch.randn(2048, 2048, device=accelerator)
    side = module.Stream()
    side.wait_stream(module.current_stream())
    for _ in range(20):
        noise = noise @ noise / 100  # keeps the first stream busy
    with module.stream(side):
        found = gradients(stack, x, "offload", torch.bfloat16)
    module.current_stream().wait_stream(side)
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one, other)

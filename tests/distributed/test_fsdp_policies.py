"""FSDP2's policies, two processes: mixed precision and offload."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

import retrograde as rg
from joined import follow, mean_loss, part
from retrograde.engine.torch_internals import VERSION
from shards import SHARDED, shard
from stacks import all_close, sample, twins
from team import in_processes

WIDTH = 16
HALF = torch.bfloat16


def branch() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def stack_of(memory: str, depth: int = 3) -> rg.ReversibleSequence:
    torch.manual_seed(0)
    return rg.ReversibleSequence(
        [rg.two_stream(branch(), branch()) for _ in range(depth)],
        memory=memory,  # type: ignore[arg-type]
    )


def gradients(model: nn.Module, autocast: bool = False) -> list[Tensor]:
    x = part(sample(8, 3, WIDTH, dtype=torch.float32, grad=False))
    with torch.autocast("cpu", HALF, enabled=autocast):
        y = model(x)
    mean_loss(y.float()).backward()
    return [y.detach(), *(p.grad.full_tensor() for p in model.parameters())]  # type: ignore[union-attr]


POLICIES: dict[str, tuple[str, dict[str, Any]]] = {
    "branches that cast their inputs": ("each branch", {}),
    "blocks that do not, under autocast": ("each block", {"cast_forward_inputs": False}),
    "a root that casts its input": ("the root", {}),
    "reduction in single precision": ("each branch", {"reduce_dtype": torch.float32}),
}


def sharded(memory: str, policy: str) -> nn.Module:
    way, options = POLICIES[policy]
    stack = stack_of(memory)
    mixed = MixedPrecisionPolicy(param_dtype=HALF, **options)
    if way != "each branch":
        return shard(stack, way, mp_policy=mixed)
    for block in stack.blocks:
        for step in block.steps:  # type: ignore[union-attr]
            fully_shard(step.branch, mp_policy=mixed)
    return fully_shard(stack)


CASTS_AGAIN = VERSION >= (2, 13)
NEEDS_CASTS = [
    pytest.param(name, marks=pytest.mark.skipif(way == "each branch" and not CASTS_AGAIN, reason="needs torch 2.13"))
    for name, (way, _) in POLICIES.items()
]


@pytest.mark.skipif(CASTS_AGAIN, reason="this torch casts again")
@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
@in_processes(2)
def test_fsdp_casting_a_branchs_inputs_is_refused_where_torch_does_not_cast_them_again(memory: str) -> None:
    with pytest.raises(ValueError, match=r"casts the inputs .* Use torch 2\.13 or later"):
        gradients(sharded(memory, "branches that cast their inputs"))
    gradients(sharded("store", "branches that cast their inputs"))


@pytest.mark.parametrize("policy", NEEDS_CASTS)
@in_processes(2)
def test_fsdp_mixed_precision_gives_the_bits_of_stored_activations_under_checkpoint(policy: str) -> None:
    autocast = "autocast" in policy
    ours, theirs = (gradients(sharded(memory, policy), autocast) for memory in ("checkpoint", "store"))
    assert ours[0].dtype == (HALF if "root" in policy else torch.float32)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("policy", [case for case in NEEDS_CASTS if "root" not in case.values[0]])
@in_processes(2)
def test_fsdp_mixed_precision_under_reverse_differs_by_rounding_of_single_precision_streams(policy: str) -> None:
    autocast = "autocast" in policy
    ours, theirs = (gradients(sharded(memory, policy), autocast) for memory in ("reverse", "store"))
    assert torch.equal(ours[0], theirs[0])
    all_close(ours, theirs, tolerance=2**-8)  # the last bit of a bfloat16


@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
@in_processes(2)
def test_fsdp_casting_a_blocks_inputs_is_reported_with_what_to_do(memory: str) -> None:
    stack = stack_of(memory)
    for block in stack.blocks:
        fully_shard(block, mp_policy=MixedPrecisionPolicy(param_dtype=HALF))
    fully_shard(stack)
    with pytest.raises(ValueError, match=r"Block 0: Stream 0 .*float32 into torch.bfloat16.*cast_forward_inputs=False"):
        gradients(stack)


@in_processes(2)
def test_fsdp_casting_a_blocks_outputs_is_reported() -> None:
    stack = stack_of("reverse")
    policy = MixedPrecisionPolicy(output_dtype=HALF, cast_forward_inputs=False)
    shard(stack, "each block", mp_policy=policy)
    with pytest.raises(ValueError, match=r"float32 into torch.bfloat16 after block 0 .*\(output_dtype=None\)"):
        gradients(stack)


@pytest.mark.parametrize("way", SHARDED)
@in_processes(2)
def test_fsdp_offload_gives_the_gradients_of_one_process(way: str) -> None:
    stack, reference = twins()
    follow(shard(stack, way, offload_policy=CPUOffloadPolicy(pin_memory=False)), reference)

"""The published sequences compared with ours, on the same small branches: every bit of the forward pass.

The branches are plain linear layers of odd width, whose bits depend on the memory layout of their input. Most published
models begin with a layer norm, whose bits do not.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from published import fresh, require
from systems import KINDS, SYSTEMS, System

pytestmark = pytest.mark.interop

DEPTH = 4
ROUTES = {"context": ((True, False),) * DEPTH}
ARGUMENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "routing_transformer": ("routing_transformer.reversible", {"args_route": ROUTES}),
    "nuwa_pytorch": ("nuwa_pytorch.reversible", {"args_route": ROUTES}),
    "axial_attention": ("axial_attention.reversible", {}),
    "reformer_pytorch": ("reformer_pytorch.reversible", {}),
    "lie_transformer_pytorch": ("lie_transformer_pytorch.reversible", {}),
    "nuwa_pytorch_video_audio": (
        "nuwa_pytorch.reversible_video_audio",
        {"block_types": [KINDS[i % 3] for i in range(DEPTH)]},
    ),
}


def published_module(name: str) -> ModuleType:
    package = ARGUMENTS[name][0].partition(".")[0]
    require(package)
    with fresh(package):
        return importlib.import_module(ARGUMENTS[name][0])


def outputs(system: System, forward: Any) -> list[Tensor]:
    system.module.forward = forward
    torch.manual_seed(3)
    return system.run(**system.inputs)


@pytest.mark.parametrize("name", SYSTEMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_the_bits_are_those_of_the_published_sequence(name: str, dtype: torch.dtype) -> None:
    module = published_module(name)
    torch.manual_seed(0)
    system = SYSTEMS[name](DEPTH)
    theirs: nn.Module = getattr(module, type(system.module).__name__)(system.branches, **ARGUMENTS[name][1])
    assert list(theirs.state_dict()) == list(system.module.state_dict())
    system.module.to(dtype)
    system.inputs = {key: value.to(dtype) for key, value in system.inputs.items()}
    ours = system.module.forward
    for training in (True, False):
        system.branches.train(training)
        theirs.train(training)
        expected = outputs(system, theirs.forward)
        with_grad = outputs(system, ours)
        with torch.no_grad():
            without_grad = outputs(system, ours)
        for a, b, c in zip(expected, with_grad, without_grad, strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a, c)

"""What would make the host wait for an accelerator: reading a number of a tensor, or comparing two tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import retrograde as rg
from retrograde.engine import exactness

WAITING = {torch.ops.aten._local_scalar_dense, torch.ops.aten.equal, torch.ops.aten.is_nonzero, torch.ops.aten.nonzero}


class Waits(TorchDispatchMode):
    """Counts the operators whose result the host reads."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        self.count += func.overloadpacket in WAITING  # type: ignore[attr-defined]
        return func(*args, **(kwargs or {}))


def branch() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.1), nn.Tanh())


@pytest.mark.parametrize("exact", [False, True], ids=["ordinary", "exact"])
@pytest.mark.parametrize("memory", ["store", "checkpoint", "reverse", "selective"])
def test_the_host_waits_at_most_once_per_call_and_only_for_the_range_of_an_exact_grid(
    memory: str, exact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []
    check = exactness._check_values
    monkeypatch.setattr(exactness, "_check_values", lambda *args: [reads.append(1), check(*args)][1])
    blocks = [rg.two_stream(branch(), branch()) for _ in range(8)]
    stack, x = rg.ReversibleSequence(blocks, memory=memory, exact=exact), torch.randn(4, 16)
    for _ in range(3):
        stack(x).sum().backward()
    reads.clear()
    with Waits() as waits:
        stack(x).sum().backward()
    assert waits.count == 0
    assert len(reads) == exact  # one transfer of all bounds


def test_an_operator_that_waits_is_counted() -> None:
    with Waits() as waits:
        assert Tensor([1.0]).item() == 1
        torch.equal(torch.ones(2), torch.ones(2))
    assert waits.count == 2

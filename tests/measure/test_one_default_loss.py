"""A model that is given without a loss is measured with the same one by every tool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.diagnose import examine, profile
from retrograde.measure import loss
from retrograde.planning import measured, plan


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, norm_first=True, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def stack() -> rg.ReversibleSequence:
    return rg.ReversibleSequence([rg.two_stream(nn.Linear(16, 16), nn.Linear(16, 16)) for _ in range(2)])


TOOLS: dict[str, Callable[[Tensor], Any]] = {
    "plan": lambda x: plan(stack(), x, "1GiB"),
    "measured": lambda x: measured(stack(), x),
    "examine": lambda x: examine(stack(), x),
    "profile": lambda x: profile(stack(), x),
    "convert": lambda x: rg.convert(encoder(), batch=x),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_a_tool_uses_the_default_loss_of_all_tools(tool: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Tensor] = []
    distance = loss._distance

    def noting(tensor: Tensor) -> Tensor:
        calls.append(tensor)
        return distance(tensor)

    monkeypatch.setattr(loss, "_distance", noting)
    TOOLS[tool](torch.randn(2, 5, 16))
    assert calls

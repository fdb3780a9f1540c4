"""Floating-point operations of the products in a step.

torch's FlopCounterMode wraps modules and their backward, and fails where one backward calls another, as in the
reversible libraries. Counting at the dispatcher does not depend on modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

# The only module that has dispatch modes, despite its underscore; as read in torch 2.13.
from torch.utils._python_dispatch import TorchDispatchMode

from .contenders import Run
from .settings import Network

aten = torch.ops.aten


def _product(a: Any, b: Any, *_: Any) -> int:
    return 2 * a.numel() * b.shape[-1]


def _added_product(_: Any, a: Any, b: Any, *rest: Any) -> int:
    return _product(a, b)


def _convolution(x: Any, weight: Any, *rest: Any) -> int:
    stride, padding, dilation = rest[1:4]
    sides = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, s, p, d in zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    ]
    return 2 * x.shape[0] * math.prod(sides) * weight.numel()


def _convolution_backward(grad: Any, _: Any, weight: Any, *rest: Any) -> int:
    wanted = sum(map(bool, rest[-1][:2]))  # the gradients of the input and of the weight
    return wanted * 2 * grad.shape[0] * math.prod(grad.shape[2:]) * weight.numel()


def _attention(q: Any, k: Any, v: Any, *rest: Any) -> int:
    return 2 * math.prod(q.shape[:-1]) * k.shape[-2] * (q.shape[-1] + v.shape[-1])


def _attention_backward(_: Any, q: Any, k: Any, v: Any, *rest: Any) -> int:
    """The scores a second time, and the gradients of scores, q, k and v."""
    return 2 * math.prod(q.shape[:-1]) * k.shape[-2] * (3 * q.shape[-1] + 2 * v.shape[-1])


FORMULAS: dict[Any, Callable[..., int]] = {
    aten.mm: _product,
    aten.bmm: _product,
    aten.addmm: _added_product,
    aten.baddbmm: _added_product,
    aten.convolution: _convolution,
    aten.convolution_backward: _convolution_backward,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
}


class FlopCounter(TorchDispatchMode):
    """Adds up the operations of the matrix products, convolutions and attention that run while it is on."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if formula := FORMULAS.get(func.overloadpacket):
            self.total += formula(*args)
        return func(*args, **(kwargs or {}))


def flops(run: Run, network: Network) -> int:
    with FlopCounter() as counter:
        run(network.x).sum().backward()
    return counter.total

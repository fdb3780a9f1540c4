"""Which results inside a branch memory="selective" saves: by name, as operators, or as a policy of torch's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch

SaveOps = Literal["attention", "projections", "products"] | Sequence[Any] | Callable[..., Any]

_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math",
)
_PROJECTIONS = ("mm", "addmm", "_scaled_mm", "convolution")
_NAMES = {
    "attention": _ATTENTION,
    "projections": _ATTENTION + _PROJECTIONS,
    "products": (*_ATTENTION, *_PROJECTIONS, "bmm", "baddbmm"),  # scores of attention that is not fused are large
}
_Operator = type(torch.ops.aten.mm.default)


def check_save_ops(save_ops: SaveOps) -> SaveOps:
    """What was given, if it says what to save."""
    if callable(save_ops) or (isinstance(save_ops, str) and save_ops in _NAMES):
        return save_ops
    if isinstance(save_ops, (list, tuple)) and all(isinstance(operator, _Operator) for operator in save_ops):
        return tuple(save_ops)
    raise ValueError(
        f"save_ops={save_ops!r} is not known; give {', '.join(map(repr, _NAMES))}, a list of operators "
        "(torch.ops.aten.mm.default), or a policy as torch.utils.checkpoint takes it."
    )


def operators_of(save_ops: SaveOps) -> frozenset[Any]:
    """The operators that a name or a list means."""
    if isinstance(save_ops, str):
        save_ops = [getattr(torch.ops.aten, name).default for name in _NAMES[save_ops] if hasattr(torch.ops.aten, name)]
    assert not callable(save_ops)
    return frozenset(save_ops)

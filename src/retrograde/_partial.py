"""Partial replay: what is dear to compute and cheap to hold is kept, the rest of a branch runs again.

Attention over long sequences costs time that grows with their square, and its result is as large as a stream.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import create_selective_checkpoint_contexts

_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_scaled_dot_product_attention_math",
)


def attention_kept() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """Contexts for a branch's first run, which keeps the results of attention, and for its replay, which takes them."""
    operators = [getattr(torch.ops.aten, name).default for name in _ATTENTION if hasattr(torch.ops.aten, name)]
    keeping, taking = create_selective_checkpoint_contexts(operators)
    return keeping, taking

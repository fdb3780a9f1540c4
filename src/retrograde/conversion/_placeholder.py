"""What stands for tensors that do not exist yet, or never will: the states between two converted layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from retrograde.engine.fake_internals import has_values

_ATTRIBUTES = (
    "shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_leaf", "grad_fn", "is_cuda", "is_cpu", "is_meta",
    "is_mps", "is_xpu", "is_sparse", "is_quantized", "is_nested", "itemsize", "nbytes",
)  # fmt: skip
_READABLE = {
    *(getattr(Tensor, name).__get__ for name in _ATTRIBUTES),
    Tensor.size, Tensor.dim, Tensor.ndimension, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.__len__,
    Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex, Tensor.element_size, Tensor.is_inference,
    Tensor.get_device, torch.is_floating_point, torch.is_complex, torch.numel,
}  # fmt: skip
"""What may be asked of a placeholder: all that is known without its values."""


class Placeholder(Tensor):
    """A tensor without values: its shape, dtype and device can be read; everything else raises `why_not`."""

    why_not: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _READABLE:
            return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        everything = [*args, *(kwargs or {}).values()]
        flat = [v for value in everything for v in (value if isinstance(value, (list, tuple)) else [value])]
        reason = next((v.why_not for v in flat if isinstance(v, Placeholder)), "A placeholder of a converted model")
        raise RuntimeError(f"{reason} ({getattr(func, '__name__', func)} was called on them.)")

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        return f"Placeholder(shape={tuple(self.shape)}, dtype={self.dtype})"


def placeholder(like: Tensor, shape: Sequence[int], why_not: str) -> Tensor:
    """A tensor without values, of the dtype and device of another.

    It contains NaN for code that looks past the class, and in a compiled graph, which knows no such classes. Nor do
    tensors without values.
    """
    nan = torch.full((), float("nan"), dtype=like.dtype, device=like.device).expand(tuple(shape))
    if torch.compiler.is_compiling() or not has_values(like):
        return nan
    substitute = nan.as_subclass(Placeholder)
    substitute.why_not = why_not
    return substitute

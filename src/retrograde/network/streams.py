"""Tensor → streams → tensor: split or duplicate, then mean, sum or concatenate, on any dimension."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

Split = Literal["duplicate", "chunk", "first"]
Merge = Literal["mean", "sum", "concat", "first"]

Streams = tuple[Tensor, ...]
Input = Tensor | Sequence[Tensor] | Mapping[Any, Tensor]
"""What a stack takes: a tensor to be split, or the streams in order or by name."""


_version = attrgetter("_version")


def version(tensor: Tensor | None) -> int:
    """The counter that autograd raises with every in-place edit; constant for inference tensors and for None.

    That of a lazy module's tensor is below all others until the tensor gets its shape.
    """
    if tensor is None:
        return 0
    if is_lazy(tensor):
        return -1
    return 0 if tensor.is_inference() else tensor._version


def versions(tensors: Iterable[Tensor]) -> list[int]:
    """The version counters of several tensors."""
    try:
        return list(map(_version, tensors))
    except RuntimeError:  # an inference tensor among them, which tracks no version
        return [version(t) for t in tensors]


def split_tensor(x: Tensor, count: int, split: Split, dim: int) -> Streams:
    """Make `count` streams of one tensor.

    "duplicate" hands the tensor to every stream, "chunk" its equal parts along `dim`, and
    "first" gives it to the first stream and zeros to the rest (a momentum's start).
    """
    if split == "duplicate":
        return (dense(x),) * count
    if split == "first":
        first = dense(x)
        return (first, *(torch.zeros_like(first) for _ in range(count - 1)))
    _check_dim(x, dim, "split")
    if x.shape[dim] % count:
        raise ValueError(
            f"The input of shape {tuple(x.shape)} does not split into {count} equal streams along "
            f"dim={dim}, which has {x.shape[dim]} entries. Pad it, choose another dim, or use split='duplicate'."
        )
    return tuple(dense(part) for part in x.chunk(count, dim))


def merge_streams(streams: Sequence[Tensor], merge: Merge, dim: int) -> Tensor:
    """Make one tensor of the streams again."""
    if merge == "first":
        return streams[0]
    if merge == "concat":
        _check_dim(streams[0], dim, "merge")
        return torch.cat(tuple(streams), dim)
    if any(s.shape != streams[0].shape for s in streams):
        raise ValueError(
            f"Streams of shapes {[tuple(s.shape) for s in streams]} have no {merge}. "
            "Use merge=None and merge them yourself, or merge='concat' along the dimension that differs."
        )
    total = streams[0]
    for stream in streams[1:]:
        total = total + stream
    return total if merge == "sum" else total / len(streams)


def dense(x: Tensor) -> Tensor:
    """The tensor, copied if it is strided otherwise than a freshly computed one.

    Kernels give other bits for strided than for contiguous input, and a recomputed stream is contiguous.
    """
    if x.is_contiguous() or x.is_sparse:
        return x
    if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return x
    if x.ndim == 5 and x.is_contiguous(memory_format=torch.channels_last_3d):
        return x
    return x.contiguous()


def _check_dim(x: Tensor, dim: int, verb: str) -> None:
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"Cannot {verb} a tensor of shape {tuple(x.shape)} along dim={dim}: it has {x.ndim} dims.")


def tracked(streams: Streams) -> Streams:
    """The streams, copied if they are inference tensors, which have no versions to compare."""
    return tuple(s.clone() if s.is_inference() else s for s in streams)


def replaced(streams: Streams, position: int, stream: Tensor) -> Streams:
    """The streams with another one at a position."""
    return (*streams[:position], stream, *streams[position + 1 :])


def cast_input(x: Input, dtype: torch.dtype) -> Input:
    """The input in another dtype, before it is split: gradients of the streams are summed in the wide one."""
    if isinstance(x, Tensor):
        return x.to(dtype)
    if isinstance(x, Mapping):
        return {name: stream.to(dtype) for name, stream in x.items()}
    return [stream.to(dtype) for stream in x]

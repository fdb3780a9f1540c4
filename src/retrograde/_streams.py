"""Tensor → streams → tensor: split or duplicate, then mean, sum or concatenate, on any dimension."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor

Split = Literal["duplicate", "chunk", "first"]
Merge = Literal["mean", "sum", "concat", "first"]

Streams = tuple[Tensor, ...]


def check_split(split: str) -> None:
    if split not in get_args(Split):
        raise ValueError(f"split={split!r} is not known; choose one of {', '.join(map(repr, get_args(Split)))}.")


def check_merge(merge: str | None) -> None:
    if merge is not None and merge not in get_args(Merge):
        known = ", ".join(map(repr, get_args(Merge)))
        raise ValueError(f"merge={merge!r} is not known; choose one of {known}, or None for the tuple of streams.")


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
    """The tensor, copied if its memory has holes or another order than a freshly computed one.

    Kernels give other bits for strided than for packed input, and what is rebuilt is packed.
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

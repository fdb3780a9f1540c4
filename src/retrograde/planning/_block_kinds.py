"""Which blocks are equal: the same structure, shapes, couplings and training flags."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor, nn

from retrograde.network.reachable import reachable

from ._block_run import BlockAlone

_PLAIN = (bool, int, float, str, torch.dtype, type(None))


def exact_kind(alone: BlockAlone) -> Hashable:
    """What two blocks have in common that need not both be measured."""
    steps = tuple((_identity(step.branch), repr(step.coupling)) for step in alone.block.each_step())
    return steps, _structure(alone.block, numbers=True), *_inputs(alone)


def kind(alone: BlockAlone) -> Hashable:
    """What two blocks have in common that differ in whole numbers at most, as layers do that know their own index."""
    steps = tuple(
        (repr(step.coupling), *(_reached(value) for value in reachable(step.branch)))
        for step in alone.block.each_step()
    )
    return steps, _structure(alone.block, numbers=False), *_inputs(alone)


def _inputs(alone: BlockAlone) -> tuple[Hashable, ...]:
    own = set(alone.own)
    parameters = tuple((tuple(p.shape), p.dtype, p in own) for p in alone.parameters)
    shapes = tuple((tuple(s.shape), s.dtype, s.requires_grad) for s in alone.streams)
    return parameters, shapes, tuple(alone.distinct[1]), alone.is_last


def _structure(part: nn.Module, *, numbers: bool) -> Hashable:
    """The modules of a part: classes, training flags, and the plain attributes (heads, window, probability)."""
    return tuple((type(m).__qualname__, m.training, _settings(m, numbers=numbers)) for m in part.modules())


def _settings(module: nn.Module, *, numbers: bool) -> Hashable:
    attributes = {name: value if isinstance(value, tuple) else (value,) for name, value in vars(module).items()}
    plain = {name: value for name, value in attributes.items() if all(isinstance(part, _PLAIN) for part in value)}
    return tuple((name, *(part for part in value if numbers or type(part) is not int)) for name, value in plain.items())


def _identity(branch: Any) -> Hashable:
    """Of a branch that is no module: what it runs, or itself if it closes over something."""
    if isinstance(branch, nn.Module):
        return None
    return id(branch if getattr(branch, "__closure__", None) else getattr(branch, "__code__", branch))


def _reached(value: Any) -> Hashable:
    """A value that a branch reaches: a module's structure, a function's code, a tensor's shape."""
    if isinstance(value, nn.Module):
        return _structure(value, numbers=False)
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype
    if isinstance(value, _PLAIN) and type(value) is not int:
        return value
    return type(value).__qualname__, id(getattr(value, "__code__", None))

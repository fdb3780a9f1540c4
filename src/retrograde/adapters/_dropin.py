"""What the drop-ins share: the published shell (keys, constructor, module identity) around the engine's blocks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from retrograde._block import Block
from retrograde._sequence import ReversibleSequence
from retrograde._step import Step


class Deterministic(nn.Module):
    """The published holder of one branch: it gives the branch's `state_dict` keys the prefix `net.`.

    The engine replays randomness by itself, and uses neither `record_rng` nor `set_rng`. They do
    what is published, for code of others that calls a `Deterministic` of its own.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self._recorded: tuple[Tensor, list[int], list[Tensor]] | None = None

    def forward(self, *args: Any, record_rng: bool = False, set_rng: bool = False, **kwargs: Any) -> Any:
        if record_rng:
            self._recorded = (torch.get_rng_state(), *get_device_states(*args))
        if not set_rng:
            return self.net(*args, **kwargs)
        if self._recorded is None:
            raise RuntimeError("set_rng=True needs an earlier call with record_rng=True; this Deterministic had none.")
        state, devices, device_states = self._recorded
        with torch.random.fork_rng(devices=devices):
            torch.set_rng_state(state)
            set_device_states(devices, device_states)
            return self.net(*args, **kwargs)


class Branch:
    """A published branch as a step calls it. Derived classes say how, in `__call__`.

    It is no module, so that it adds nothing to `state_dict`. The block that owns the branch's
    module binds it here, and does so again if another is put in its place.

    Args:
        letter: the branch's name in its block: f, g, j or k.
        dim: the dimension along which the published code reads this branch's input from a doubled
            tensor; None if it reads a tensor of its own.
    """

    module: nn.Module

    def __init__(self, letter: str, dim: int | None = None) -> None:
        self.letter = letter
        self.dim = dim

    def seen(self, x: Tensor) -> Tensor:
        """The input in the memory layout that the published code hands over."""
        return x if self.dim is None else second_half(x, self.dim)


class PublishedBlock(Block):
    """A block of the engine with the published keys: `f.net.*`, `g.net.*` and, with four branches, j and k."""

    def __init__(self, *steps: Step, **nets: nn.Module) -> None:
        super().__init__(*steps)
        for letter, net in nets.items():
            setattr(self, letter, Deterministic(net))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            for step in self.each_step():
                if isinstance(step.branch, Branch) and step.branch.letter == name:
                    step.branch.module = value


class PlainBlock(nn.Module):
    """The published irreversible twin of a block: plain autograd, on a tensor that holds both streams along `dim`."""

    dim: int

    def __init__(self, f: nn.Module, g: nn.Module) -> None:
        super().__init__()
        self.f = f
        self.g = g

    def forward(self, x: Tensor, f_args: Mapping[str, Any], g_args: Mapping[str, Any]) -> Tensor:
        first, second = torch.chunk(x, 2, dim=self.dim)
        first = first + self.f(second, **f_args)
        second = second + self.g(first, **g_args)
        return torch.cat([first, second], dim=self.dim)


class LayerDroppingSequence(ReversibleSequence):
    """A sequence with layer drop under its published name."""

    @property
    def layer_dropout(self) -> float:
        """The probability with which a block is left out of a call in training."""
        return max(self.layer_drop)

    @layer_dropout.setter
    def layer_dropout(self, probability: float) -> None:
        self.layer_drop = [float(probability)] * len(self.blocks)


def second_half(x: Tensor, dim: int) -> Tensor:
    """A copy of `x` where the second half of a doubled tensor would lie.

    The published modules carry both streams in one tensor, doubled along `dim`, and hand branches
    a view of a half. Matrix products give other bits for another stride or alignment, so equal
    bits need equal layouts.
    """
    shape = list(x.shape)
    shape[dim] *= 2
    width = x.shape[dim]
    return inside(torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=_order(x)), x, (dim, width))


def inside(room: Tensor, x: Tensor, *starts: tuple[int, int]) -> Tensor:
    """A copy of `x` inside of `room`, from (dimension, position) on."""
    for dim, start in starts:
        room = room.narrow(dim, start, x.shape[dim])
    return room.detach().copy_(x)


def _order(x: Tensor) -> torch.memory_format:
    if not x.is_contiguous():
        if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
            return torch.channels_last
        if x.ndim == 5 and x.is_contiguous(memory_format=torch.channels_last_3d):
            return torch.channels_last_3d
    return torch.contiguous_format


def branches_of(blocks: Iterable[Any], letters: str) -> list[tuple[nn.Module, ...]]:
    """The branches of each block, in whatever container they come; raises if a block has too few or too many."""
    found = []
    for i, block in enumerate(blocks):
        branches = tuple(block)
        if len(branches) != len(letters):
            raise ValueError(
                f"Block {i} has {len(branches)} branches ({', '.join(type(b).__name__ for b in branches)}), "
                f"but {len(letters)} are expected: {', '.join(letters)}."
            )
        found.append(branches)
    return found


def named(letter: str, net: object) -> str:
    """What messages call a branch."""
    return f"{letter} ({type(net).__name__})"

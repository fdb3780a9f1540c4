"""What the drop-ins share: the published shell (keys, constructor, module identity) around the engine's blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import get_device_states, set_device_states

from retrograde.engine.torch_internals import inside_function_transform
from retrograde.network.block import Block
from retrograde.network.step import Step
from retrograde.sequence import ReversibleSequence


class Deterministic(nn.Module):
    """The published holder of one branch: it gives the branch's `state_dict` keys the prefix `net.`.

    The engine restores the RNG state by itself, and uses neither `record_rng` nor `set_rng`. They work
    as published, for other code that calls a `Deterministic` itself.
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
    """A published branch as a step calls it: `target += branch(*sources)`. Derived classes say how, in `__call__`.

    It is not a module, so it adds nothing to `state_dict`. The block that owns the branch's
    module binds it here, and binds the new one when it is replaced.

    Args:
        letter: the branch's name in its block: f, g, j or k.
        target, sources: the streams that it updates and reads.
        dim: the dimension along which the published code reads this branch's input from a doubled
            tensor; None if it reads a tensor of its own.
    """

    module: nn.Module
    __call__: Callable[..., Any]

    def __init__(self, letter: str, target: int, sources: tuple[int, ...], dim: int | None = None) -> None:
        self.letter, self.target, self.sources, self.dim = letter, target, sources, dim

    def as_published(self, x: Tensor) -> Tensor:
        """The input in the memory layout in which the published code passes it."""
        return x if self.dim is None else second_half(x, self.dim)


class PublishedBlock(Block):
    """A block of the engine with the published keys: `f.net.*`, `g.net.*` and, with four branches, j and k."""

    def __init__(self, *branches: Branch, aux: Literal["none", "loss"] = "none", **nets: nn.Module) -> None:
        names = {letter: f"{letter} ({type(net).__name__})" for letter, net in nets.items()}
        super().__init__(*(Step(b, b.target, b.sources, aux=aux, name=names[b.letter]) for b in branches))
        for letter, net in nets.items():
            setattr(self, letter, Deterministic(net))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if isinstance(value, nn.Module):
            for step in self.each_step():
                if isinstance(step.branch, Branch) and step.branch.letter == name:
                    step.branch.module = value


class PlainBlock(nn.Module):
    """The published irreversible version of a block: plain autograd, on a tensor with both streams along `dim`."""

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
        """The probability with which a block is dropped in training."""
        return max(self.layer_drop)

    @layer_dropout.setter
    def layer_dropout(self, probability: float) -> None:
        self.layer_drop = [float(probability)] * len(self.blocks)


def second_half(x: Tensor, dim: int) -> Tensor:
    """A copy of `x` in the memory layout of the second half of a doubled tensor.

    The published modules hold both streams in one tensor, doubled along `dim`, and pass a view of
    a half to branches. Matrix products give other bits for another stride or alignment, so
    bit-identical results need identical layouts.
    """
    shape = list(x.shape)
    shape[dim] *= 2
    width = x.shape[dim]
    storage = torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=_memory_format(x))
    return copied_into(storage, x, (dim, width))


def copied_into(storage: Tensor, x: Tensor, *starts: tuple[int, int]) -> Tensor:
    """A copy of `x` that is a view of `storage`, from each (dimension, position) on.

    torch.func does not map edits of a tensor that it did not map itself, and has layouts of its own: a plain copy then.
    """
    if inside_function_transform():
        return x.clone()
    for dim, start in starts:
        storage = storage.narrow(dim, start, x.shape[dim])
    return storage.detach().copy_(x)


def _memory_format(x: Tensor) -> torch.memory_format:
    if not x.is_contiguous():
        if x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last):
            return torch.channels_last
        if x.ndim == 5 and x.is_contiguous(memory_format=torch.channels_last_3d):
            return torch.channels_last_3d
    return torch.contiguous_format


def branches_of(blocks: Iterable[Any], letters: str) -> list[tuple[nn.Module, ...]]:
    """The branches of each block, in whatever container they come; raises if a block has too few or too many."""
    all_branches: list[tuple[nn.Module, ...]] = [tuple(block) for block in blocks]
    for i, branches in enumerate(all_branches):
        if len(branches) != len(letters):
            raise ValueError(
                f"Block {i} has {len(branches)} branches ({', '.join(type(b).__name__ for b in branches)}), "
                f"but {len(letters)} are expected: {', '.join(letters)}."
            )
    return all_branches

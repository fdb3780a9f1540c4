"""The sizes at which contenders are compared, and the network of each.

A block is `y1 = x1 + f(x2)`, `y2 = x2 + g(y1)`; both streams start as x, and their mean is the output.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from .models import Attention, Convolution, Mlp, Multiply

Pairs = list[tuple[nn.Module, nn.Module]]
Kind = Literal["transformer", "multiply", "convolution"]


@dataclass(frozen=True)
class Network:
    """The branches of each block, an input, and the dimension along which two streams are concatenated."""

    pairs: Pairs
    x: Tensor
    dim: int

    @property
    def branches(self) -> list[nn.Module]:
        return [branch for pair in self.pairs for branch in pair]

    @property
    def leaves(self) -> list[Tensor]:
        """Everything that gets a gradient."""
        return [self.x, *(p for branch in self.branches for p in branch.parameters())]

    @property
    def pair_bytes(self) -> int:
        """The bytes of one pair of streams: the unit S in which memory is reported."""
        return 2 * self.x.nbytes

    def to(self, dtype: torch.dtype) -> Network:
        """The same network in another precision, in place; the input is a new leaf."""
        for branch in self.branches:
            branch.to(dtype)
        return replace(self, x=self.x.detach().to(dtype).requires_grad_())


@dataclass(frozen=True)
class Setting:
    """A size at which contenders are compared."""

    name: str
    kind: Kind
    depth: int
    width: int
    batch: int
    length: int  # of the sequence, or of a side of the image
    heads: int = 4
    threads: int = 1
    rounds: int = 30

    def build(self) -> Network:
        """The network, with the same weights each time."""
        torch.manual_seed(0)
        pairs: Pairs = [self._block() for _ in range(self.depth)]
        shape = (self.batch, self.length, self.width)
        if self.kind == "convolution":
            shape = (self.batch, self.width, self.length, self.length)  # type: ignore[assignment]
        return Network(pairs, torch.randn(*shape, requires_grad=True), 1 if self.kind == "convolution" else -1)

    def _block(self) -> tuple[nn.Module, nn.Module]:
        if self.kind == "multiply":
            return Multiply(self.width), Multiply(self.width)
        if self.kind == "convolution":
            return Convolution(self.width), Convolution(self.width)
        return Attention(self.width, self.heads), Mlp(self.width)

    def quick(self) -> Setting:
        """The same at a size that takes seconds: to check that everything works, not to measure."""
        return replace(
            self,
            depth=min(self.depth, 4),
            width=min(self.width, 32),
            batch=min(self.batch, 2),
            length=min(self.length, 16),
            rounds=3,
        )

    def describe(self) -> str:
        size = f"batch {self.batch}, length {self.length}, width {self.width}"
        if self.kind == "convolution":
            size = f"batch {self.batch}, {self.length}×{self.length} pixels, {self.width} channels"
        threads = "one thread" if self.threads == 1 else f"{self.threads} threads"
        return f"{self.kind} branches, depth {self.depth}, {size}, {threads}, {self.rounds} rounds"


def _by_name(*settings: Setting) -> dict[str, Setting]:
    return {setting.name: setting for setting in settings}


SETTINGS = _by_name(
    Setting("tiny", "transformer", depth=12, width=64, batch=2, length=64),
    Setting("multiply", "multiply", depth=48, width=8, batch=2, length=1, rounds=50),
    Setting("convolutions", "convolution", depth=12, width=64, batch=8, length=16, rounds=9),
    Setting("medium", "transformer", depth=12, width=256, batch=4, length=256, rounds=5),
    Setting("large", "transformer", depth=12, width=512, batch=1, length=512, heads=8, threads=2, rounds=5),
)
COMPILED = Setting("compiled", "transformer", depth=6, width=64, batch=2, length=64, rounds=20)


@dataclass(frozen=True)
class Sweep:
    """Depths at which one width is measured."""

    setting: Setting
    depths: tuple[int, ...]

    def at(self, depth: int) -> Setting:
        return replace(self.setting, depth=depth)

    def quick(self) -> Sweep:
        return Sweep(self.setting.quick(), (2, 4))


_NARROW = replace(SETTINGS["tiny"], width=16, length=32)
SLOPE = Sweep(SETTINGS["tiny"], (6, 12, 48, 192))
RESIDENT = Sweep(replace(SETTINGS["tiny"], width=32, batch=64), (12, 48))
GRADIENTS = Sweep(SETTINGS["tiny"], (12, 96))
GRADIENTS_DEEP = Sweep(_NARROW, (384,))

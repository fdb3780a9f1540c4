"""The recipes by which a residual network is made reversible: each says what a layer becomes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from retrograde._block import Block
from retrograde._step import Step
from retrograde._streams import Merge, Split
from retrograde.couplings import Additive, Coupling, Scaled

from ._bdia import SignedHalf

Calls = tuple[dict[str, Any], ...]


class Updates(Protocol):
    """A whole layer, or half of one."""

    layer: nn.Module

    def update(self, x: Tensor, arguments: Mapping[str, Any]) -> Tensor: ...


class Branch:
    """`own * x + rest * part(x)`, where the part is given what the model called this layer with.

    Args:
        part: a layer or half of one.
        index: the layer's number.
    """

    def __init__(self, part: Updates, index: int, *, own: float = 0.0, rest: float = 1.0) -> None:
        self.part, self.index, self.own, self.rest = part, index, own, rest
        self.layer = part.layer  # where a tape looks for training flags, buffers and edits

    def __call__(self, x: Tensor, calls: Calls, which: tuple[int, ...], dtype: torch.dtype) -> Any:
        update = self.part.update(x.to(dtype), calls[which[self.index]]).to(x.dtype)
        return self.mixed(x, update)

    def mixed(self, x: Tensor, update: Tensor) -> Any:
        update = update if self.rest == 1 else update * self.rest
        if self.own:
            update = update - x if self.own == -1 else update + self.own * x
        return update


class DrawnBranch(Branch):
    """The branch of BDIA. See NOTE [BDIA as a step]: (1 - γ) x + (1 + γ) h(x), where h(x) = layer(x) - x."""

    def mixed(self, x: Tensor, update: Tensor) -> Any:
        samples = (x.shape[0], *[1] * (x.ndim - 1)) if x.ndim else ()
        sign = torch.randint(0, 2, samples, device=x.device).to(x.dtype) * 2 - 1
        return sign, update * (1 + sign / 2) - sign * x


class Recipe(Protocol):
    """What a layer becomes."""

    @property
    def split(self) -> Split: ...
    @property
    def merge(self) -> Merge: ...
    @property
    def halves(self) -> bool:
        """Whether it takes the attention and the feed-forward of a layer apart, where they are found."""

    def rewires(self, training: bool) -> bool:
        """Whether it changes the network, in training or in eval."""

    def block(self, parts: Sequence[Updates], index: int, layers: int) -> Block:
        """The block that a layer becomes."""


@dataclass(frozen=True)
class BDIA:
    """Random averaging of two steps in training, the unchanged network in eval. One side bit an element and layer."""

    split: ClassVar[Split] = "duplicate"
    merge: ClassVar[Merge] = "first"
    halves: ClassVar[bool] = False

    def rewires(self, training: bool) -> bool:
        return training

    def block(self, parts: Sequence[Updates], index: int, layers: int) -> Block:
        if index == 0:  # the first layer has nothing before it to average with
            step = _step(Branch(parts[0], index, own=-1.0), Additive())
        else:
            step = _step(DrawnBranch(parts[0], index), SignedHalf())
        return Block(step, order=None if index == layers - 1 else (1, 0))


@dataclass(frozen=True)
class TwoStream:
    """The block of RevNet and Reformer with the layer's own attention and feed-forward; the streams' mean comes out.

    No side bits. The network is another one: fine-tune it.

    Args:
        scale: a factor of the updates. With 1 each enters one of two streams, and so the mean by half; with 2 the mean
            gets all of it.
    """

    scale: float = 1.0
    split: ClassVar[Split] = "duplicate"
    merge: ClassVar[Merge] = "mean"
    halves: ClassVar[bool] = True

    def rewires(self, training: bool) -> bool:
        return True

    def block(self, parts: Sequence[Updates], index: int, layers: int) -> Block:
        coupling = Additive() if self.scale == 1 else Scaled(scale=self.scale)
        if len(parts) == 1:
            return Block(_step(Branch(parts[0], index, own=-1.0), coupling), order=(1, 0))
        return Block(
            Step(Branch(parts[0], index), target=0, sources=(1,), coupling=coupling, name="attention"),
            Step(Branch(parts[1], index), target=1, sources=(0,), coupling=coupling, name="feed-forward"),
        )


@dataclass(frozen=True)
class Momentum:
    """`v = beta v + (1 - beta) h(x)`, then `x += v`: the residual network where beta is 0.

    Side bits an element and layer: log2(1 / beta), rounded up; 4 for 1/16.
    """

    beta: float = 1 / 16
    split: ClassVar[Split] = "first"
    merge: ClassVar[Merge] = "first"
    halves: ClassVar[bool] = False

    def rewires(self, training: bool) -> bool:
        return True

    def block(self, parts: Sequence[Updates], index: int, layers: int) -> Block:
        branch = Branch(parts[0], index, own=-1.0)
        return Block(
            Step(branch, target=1, sources=(0,), coupling=Scaled(self.beta, 1 - self.beta), name="velocity"),
            Step(_same, target=0, sources=(1,), name="position"),
        )


@dataclass(frozen=True)
class ScaledResidual:
    """MEFT's: `x[k+1] = keep x[k-1] + layer(x[k])`, nearly the layer itself where keep is small.

    Side bits an element and layer: log2(1 / keep), rounded up; 4 for 1/16.
    """

    keep: float = 1 / 16
    split: ClassVar[Split] = "duplicate"
    merge: ClassVar[Merge] = "first"
    halves: ClassVar[bool] = False

    def rewires(self, training: bool) -> bool:
        return True

    def block(self, parts: Sequence[Updates], index: int, layers: int) -> Block:
        step = _step(Branch(parts[0], index), Scaled(keep=self.keep))
        return Block(step, order=None if index == layers - 1 else (1, 0))


@dataclass(frozen=True)
class Annealed:
    """`x[k+1] = γ x[k-1] + (1 - γ) x[k] + (1 + γ) h(x[k])` with one γ, which training takes from 0 to 1.

    At 0 it is the network as it was, at 1 the leapfrog, which needs no side bits. In between they are
    log2(1 / γ) an element and layer, rounded up. See `Conversion.anneal`.
    """

    gamma: float = 0.0
    split: ClassVar[Split] = "duplicate"
    merge: ClassVar[Merge] = "first"
    halves: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.gamma and not 1 / 256 <= self.gamma <= 1:
            raise ValueError(f"gamma={self.gamma}: give 0, or a value from 1/256 to 1.")

    def rewires(self, training: bool) -> bool:
        return self.gamma > 0

    def block(self, parts: Sequence[Updates], index: int, layers: int) -> Block:
        gamma = self.gamma
        if index == 0 or not gamma:
            step = _step(Branch(parts[0], index, own=-1.0), Additive())
        else:
            step = _step(Branch(parts[0], index, own=-2 * gamma, rest=1 + gamma), Scaled(keep=gamma))
        return Block(step, order=None if index == layers - 1 else (1, 0))


def _step(branch: Branch, coupling: Coupling) -> Step:
    return Step(branch, target=0, sources=(1,), coupling=coupling, name="layer")


def _same(stream: Tensor) -> Tensor:
    return stream


RECIPES: dict[str, Recipe] = {
    "bdia": BDIA(),
    "two_stream": TwoStream(),
    "momentum": Momentum(),
    "scaled": ScaledResidual(),
    "annealed": Annealed(),
}


def recipe_named(recipe: str | Recipe) -> Recipe:
    """The recipe of a name; a recipe itself is returned as it is."""
    if not isinstance(recipe, str):
        return recipe
    if recipe not in RECIPES:
        raise ValueError(f"recipe={recipe!r} is not known; choose one of {', '.join(map(repr, RECIPES))}.")
    return RECIPES[recipe]

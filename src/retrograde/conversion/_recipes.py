"""The recipes that make a residual network reversible: each defines the block that a layer becomes."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from retrograde.couplings import Additive, Coupling, Replace, Scaled
from retrograde.engine.torch_internals import tree_flatten
from retrograde.network.block import Block
from retrograde.network.choices import check_choice
from retrograde.network.save_ops import SaveOps
from retrograde.network.step import Step
from retrograde.network.streams import Merge, Split

from ._bdia import SignedHalf
from ._caches import with_own_caches
from ._layers import OriginalLayer, Sublayer

Calls = tuple[dict[str, Any], ...]
Part = OriginalLayer | Sublayer
"""A whole layer, or one of its two sublayers."""


class Branch:
    """`own * x + rest * part(x)`, where the part gets the arguments with which the model called this layer.

    Args:
        part: a layer or one of its sublayers.
        index: the layer's index in the stack.
    """

    def __init__(self, part: Part, index: int, *, own: float = 0.0, rest: float = 1.0) -> None:
        self.part, self.index, self.own, self.rest = part, index, own, rest
        self.layer = part.layer  # where the engine looks for training flags, buffers and in-place edits

    def __call__(self, x: Tensor, calls: Calls, which: tuple[int, ...], dtype: torch.dtype) -> Any:
        update = self.part.update(x.to(dtype), calls[which[self.index]]).to(x.dtype)
        return self.mixed(x, update)

    def mixed(self, x: Tensor, update: Tensor) -> Any:
        update = update if self.rest == 1 else update * self.rest
        if self.own:
            update = update - x if self.own == -1 else update + self.own * x
        return update


class BDIABranch(Branch):
    """(1 - γ) x + (1 + γ) h(x), where h(x) = layer(x) - x and γ is drawn. See NOTE [BDIA as a step]."""

    def mixed(self, x: Tensor, update: Tensor) -> Any:
        samples = (x.shape[0], *[1] * (x.ndim - 1)) if x.ndim else ()
        sign = torch.randint(0, 2, samples, device=x.device).to(x.dtype) * 2 - 1
        return sign, update * (1 + sign / 2) - sign * x


class WholeBranch(Branch):
    """A layer as it is. The first tensor that it returns is the stream; `waiting_for_output` gets everything."""

    def __call__(self, x: Tensor, calls: Calls, which: tuple[int, ...], dtype: torch.dtype) -> Any:
        assert isinstance(self.part, OriginalLayer)
        waiting = getattr(_WAITING, "outputs", None)
        _WAITING.outputs = None  # before the layer runs: there may be others in it
        call = calls[which[self.index]]
        output = self.part(x, with_own_caches(call) if torch.is_grad_enabled() else call)
        if waiting is not None:
            waiting.append(output)
        hidden = next((value for value in tree_flatten(output)[0] if isinstance(value, Tensor)), None)
        if hidden is None:
            raise TypeError(
                f"{type(self.layer).__name__} returned a value of type {type(output).__name__} without a tensor in it, "
                "so there is nothing to recompute for it. Give its block memory='store'."
            )
        return hidden


_WAITING = threading.local()


def waiting_for_output() -> list[Any]:
    """A list to which the next `WholeBranch` that runs on this thread adds what its layer returns.

    Not a part of the context: a replay must not add to it, and what a call keeps must not refer to its outputs.
    """
    outputs: list[Any] = []
    _WAITING.outputs = outputs
    return outputs


class Recipe(ABC):
    """How a layer is made reversible.

    Attributes:
        in_training: whether training computes another function than the original network, in a sentence.
        in_eval: the same of eval.
        has_inverse: whether layers become invertible.
        split: how the two streams start, as in `ReversibleSequence`.
        merge: how they end.
        uses_sublayers: whether attention and feed-forward become separate branches, where they can be separated.
    """

    in_training: ClassVar[str] = "another function"
    in_eval: ClassVar[str] = "the same function as in training, another than the original one"
    has_inverse: ClassVar[bool] = True
    split: ClassVar[Split] = "duplicate"
    merge: ClassVar[Merge] = "first"
    uses_sublayers: ClassVar[bool] = False

    def rewires(self, training: bool) -> bool:
        """Whether it changes the network in training, or in eval."""
        return True

    @abstractmethod
    def block(self, parts: Sequence[Part], index: int, layers: int) -> Block:
        """The block that a layer becomes."""


@dataclass(frozen=True)
class Unchanged(Recipe):
    """The original network, in training and in eval, to the bit: no inverse, no grid, no extra bits.

    Layers are recomputed from their saved inputs: memory is "checkpoint" (also where "reverse" is given), "selective",
    "offload", "store", or a plan of these. Each layer runs when the model calls it, so that hidden states, hooks and
    code between the layers work as before.

    Args:
        save_ops: which results inside a layer "selective" saves, as in `Step`: then its replay computes the cheap
            rest. "projections" are most of a layer's time, and a third of its activations or less.
    """

    save_ops: SaveOps = "projections"
    in_training: ClassVar[str] = "the original function, to the bit"
    in_eval: ClassVar[str] = "the original function, to the bit"
    has_inverse: ClassVar[bool] = False

    def block(self, parts: Sequence[Part], index: int, layers: int) -> Block:
        branch = WholeBranch(parts[0], index)
        return Block(Step(branch, target=0, sources=(0,), coupling=Replace(), save_ops=self.save_ops, name="layer"))


@dataclass(frozen=True)
class BDIA(Recipe):
    """Random averaging of two steps in training, the original network in eval. One extra bit per element per layer."""

    in_training: ClassVar[str] = "another function, drawn at random in every call; its mean is near the original one"
    in_eval: ClassVar[str] = "the original function, to the bit"

    def rewires(self, training: bool) -> bool:
        return training

    def block(self, parts: Sequence[Part], index: int, layers: int) -> Block:
        if index == 0:  # the first layer has nothing before it to average with
            return _alternating(Branch(parts[0], index, own=-1.0), Additive(), layers)
        return _alternating(BDIABranch(parts[0], index), SignedHalf(), layers)


@dataclass(frozen=True)
class TwoStream(Recipe):
    """The block of RevNet and Reformer with the layer's own attention and feed-forward.

    The output is the mean of the streams. No extra bits are saved. The converted network computes another function:
    fine-tune it.

    Args:
        scale: a factor of the updates. With 1, each update enters one of the two streams, so half of it enters the
            mean; with 2, all of it does.
    """

    scale: float = 1.0
    merge: ClassVar[Merge] = "mean"
    uses_sublayers: ClassVar[bool] = True

    def block(self, parts: Sequence[Part], index: int, layers: int) -> Block:
        coupling = Additive() if self.scale == 1 else Scaled(scale=self.scale)
        if len(parts) == 1:
            return Block(_layer_step(Branch(parts[0], index, own=-1.0), coupling), order=(1, 0))
        return Block(
            Step(Branch(parts[0], index), target=0, sources=(1,), coupling=coupling, name="attention"),
            Step(Branch(parts[1], index), target=1, sources=(0,), coupling=coupling, name="feed-forward"),
        )


@dataclass(frozen=True)
class Momentum(Recipe):
    """`v = beta v + (1 - beta) h(x)`, then `x += v`: the residual network where beta is 0.

    After the last layer, `x += beta / (1 - beta) v`: what the velocity still holds of the updates, so that each of them
    enters the output in full. Each layer reads a state that lags behind by that much; nothing else differs from the
    original network. Extra bits per element per layer: log2(1 / beta), rounded up; 1 for 1/2, 4 for 1/16.
    """

    beta: float = 1 / 2
    split: ClassVar[Split] = "first"

    def __post_init__(self) -> None:
        if not 1 / 256 <= self.beta < 1:
            raise ValueError(f"beta={self.beta}: give a value from 1/256 to less than 1.")

    def block(self, parts: Sequence[Part], index: int, layers: int) -> Block:
        branch = Branch(parts[0], index, own=-1.0)
        steps = [
            Step(branch, target=1, sources=(0,), coupling=Scaled(self.beta, 1 - self.beta), name="velocity"),
            Step(_same, target=0, sources=(1,), name="position"),
        ]
        if index == layers - 1:
            rest = Scaled(scale=self.beta / (1 - self.beta))
            steps.append(Step(_same, target=0, sources=(1,), coupling=rest, name="rest of the velocity"))
        return Block(*steps)


@dataclass(frozen=True)
class ScaledResidual(Recipe):
    """The recipe of MEFT: `x[k+1] = keep x[k-1] + layer(x[k])`, nearly the original layer if keep is small.

    Extra bits per element per layer: log2(1 / keep), rounded up; 4 for 1/16.
    """

    keep: float = 1 / 16

    def block(self, parts: Sequence[Part], index: int, layers: int) -> Block:
        return _alternating(Branch(parts[0], index), Scaled(keep=self.keep), layers)


@dataclass(frozen=True)
class Annealed(Recipe):
    """`x[k+1] = γ x[k-1] + (1 - γ) x[k] + (1 + γ) h(x[k])` with one γ, which training moves from 0 to 1.

    At 0 it is the original network; at 1 it is the leapfrog scheme, which needs no extra bits. In between they are
    log2(1 / γ) per element per layer, rounded up. See `Conversion.anneal`.
    """

    gamma: float = 0.0

    def __post_init__(self) -> None:
        if self.gamma and not 1 / 256 <= self.gamma <= 1:
            raise ValueError(f"gamma={self.gamma}: give 0, or a value from 1/256 to 1.")

    def rewires(self, training: bool) -> bool:
        return self.gamma > 0

    def block(self, parts: Sequence[Part], index: int, layers: int) -> Block:
        gamma = self.gamma
        if index == 0 or not gamma:
            return _alternating(Branch(parts[0], index, own=-1.0), Additive(), layers)
        return _alternating(Branch(parts[0], index, own=-2 * gamma, rest=1 + gamma), Scaled(keep=gamma), layers)


def _alternating(branch: Branch, coupling: Coupling, layers: int) -> Block:
    """One step, which updates the older stream. The streams then swap roles, except after the last layer."""
    return Block(_layer_step(branch, coupling), order=None if branch.index == layers - 1 else (1, 0))


def _layer_step(branch: Branch, coupling: Coupling) -> Step:
    return Step(branch, target=0, sources=(1,), coupling=coupling, name="layer")


def _same(stream: Tensor) -> Tensor:
    return stream


RECIPES: dict[str, Recipe] = {
    "unchanged": Unchanged(),
    "bdia": BDIA(),
    "two_stream": TwoStream(),
    "momentum": Momentum(),
    "scaled": ScaledResidual(),
    "annealed": Annealed(),
}


def recipe_named(recipe: str | Recipe) -> Recipe:
    """The recipe with a name; a recipe itself is returned unchanged."""
    if not isinstance(recipe, str):
        return recipe
    check_choice("recipe", recipe, RECIPES)
    return RECIPES[recipe]

"""`Tiled`: a token-wise module that runs on a tile of its input at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from retrograde.engine.fake_internals import has_values
from retrograde.engine.replaying import replaying
from retrograde.engine.torch_internals import inside_function_transform

from ._tiled_node import TiledNode, TiledRun, check_not_sharded_inside, joined


class Tiled(nn.Module):
    """Runs a token-wise module on tiles of its input, and never holds the activations of more than one tile.

    The wide inner activations of a feed-forward set the peak of a transformer layer. Only the input is saved; the
    backward pass runs each tile once more. Gradients of the weights go back through autograd, summed over the tiles in
    float32 where the weights have lower precision. Inside `torch.compile` and `torch.func` the tiles are ordinary code.

    Args:
        module: a module of one tensor that treats every entry of `dim` alike, or a bound method of a module, which is
            then not registered here.
        size: how many entries of `dim` a tile has; the last tile may have fewer.
        dim: the dimension that is cut: by default that of the tokens in `(batch, tokens, width)`.

    Examples:
        >>> import torch, retrograde as rg
        >>> wide = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 8))
        >>> x = torch.randn(2, 10, 8)
        >>> torch.allclose(rg.nn.Tiled(wide, size=4)(x), wide(x), atol=1e-6)
        True
    """

    def __init__(self, module: Callable[[Tensor], Tensor], size: int, *, dim: int = -2) -> None:
        super().__init__()
        owner = module if isinstance(module, nn.Module) else getattr(module, "__self__", None)
        if not isinstance(owner, nn.Module):
            raise TypeError(
                f"Tiled got a {type(module).__name__}, whose weights it cannot know. Give an nn.Module, or a bound "
                "method of one."
            )
        if size < 1:
            raise ValueError(f"size={size}: a tile has at least one entry; give a whole number of 1 or more.")
        self.module = module
        self.size = size
        self.dim = dim
        self._is_checked = False

    def forward(self, x: Tensor) -> Tensor:
        owner = self.module if isinstance(self.module, nn.Module) else self.module.__self__  # type: ignore[attr-defined]
        weights = dict(owner.named_parameters())
        if torch.compiler.is_compiling() or inside_function_transform():
            return torch.cat([self.module(tile) for tile in x.split(self.size, self.dim)], self.dim)
        check_not_sharded_inside(owner)
        if not self._is_checked and x.shape[self.dim] > self.size and has_values(x):
            self._check_token_wise(owner, x)
        if not torch.is_grad_enabled() or not any(t.requires_grad for t in (x, *weights.values())):
            return joined((self.module(tile) for tile in x.split(self.size, self.dim)), x, self.dim)
        call = TiledRun(self.module, owner, self.size, self.dim, [*weights])
        output: Tensor = TiledNode.apply(call, x, *weights.values())  # type: ignore[no-untyped-call]
        return output

    @torch.no_grad()
    def _check_token_wise(self, owner: nn.Module, x: Tensor) -> None:
        """Raise if a tile alone gives something else than beside another one; in eval, as dropout would differ."""
        pair = x.narrow(self.dim, 0, min(2 * self.size, x.shape[self.dim]))
        flags = [(module, module.training) for module in owner.modules()]
        try:
            owner.eval()
            with replaying():
                together: Any = self.module(pair)
                alone = [self.module(tile) for tile in pair.split(self.size, self.dim)]
        finally:
            for module, flag in flags:
                module.training = flag
        if (
            not isinstance(together, Tensor)
            or together.shape[self.dim : self.dim + 1] != pair.shape[self.dim : self.dim + 1]
        ):
            raise TypeError(
                f"{type(owner).__name__} does not return one tensor with the {pair.shape[self.dim]} entries of "
                f"dim={self.dim} that it was given. Tiles are for modules that do; choose another dim or none."
            )
        apart = torch.cat(alone, self.dim)
        size, error = together.double().norm(), (together.double() - apart.double()).norm()
        if error > size * torch.finfo(together.dtype).eps ** 0.5:
            raise ValueError(
                f"{type(owner).__name__} mixes the entries of dim={self.dim}: a tile of {self.size} alone gives "
                f"a result that is {float(error / size):.1e} off from the same tile beside another. Tiles are for "
                "token-wise modules (feed-forwards, norms, projections); leave this one untiled, or choose another dim."
            )
        self._is_checked = bool(size > 0 and size.isfinite())

    def extra_repr(self) -> str:
        return f"size={self.size}, dim={self.dim}"

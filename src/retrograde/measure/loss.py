"""The loss of a model that is given without one, the same in every tool; and the check that a loss can be trained."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .batches import tensors_in

Loss = Callable[[Any], Tensor]


def default_loss(output: Any) -> Tensor:
    """The output's own `loss`, or the mean squared distance of its floating-point tensors from fixed random numbers.

    Not their mean square: behind a normalisation that is a constant, whose gradients are zero.
    """
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    tensors = [t for t in tensors_in(output) if t.is_floating_point()]
    if not tensors:
        raise ValueError(
            f"The model returned a value of type {type(output).__name__} without a floating-point tensor to make a "
            "loss of. Give a loss too: a function of the output that returns a scalar."
        )
    return torch.stack([_distance(t) for t in tensors]).sum()


def _distance(tensor: Tensor) -> Tensor:
    wide = tensor if tensor.dtype == torch.float64 else tensor.float()
    generator = torch.Generator().manual_seed(0)
    aim = torch.randn(wide.shape[-1:], generator=generator)  # one number per feature: a whole tensor would cost memory
    return (wide - aim.to(wide.device, wide.dtype)).square().mean()


def check_loss(loss: Any) -> Tensor:
    """The loss, if a backward pass can start from it."""
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
        raise ValueError(f"The loss is {kind}, and a training step starts from one number: return a scalar tensor.")
    if not loss.requires_grad:
        raise ValueError(
            "The loss does not require grad, so that there is no backward pass: all parameters that it depends on are "
            "frozen, or the model runs without gradients. Set requires_grad = True for what is trained."
        )
    return loss.reshape(())

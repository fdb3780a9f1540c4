"""The state around a run that is to leave no trace: generators and buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from . import _randomness as randomness


class Before:
    """Generators and buffers as they are now, to be put back."""

    def __init__(self, parts: Iterable[nn.Module], devices: Sequence[torch.device]) -> None:
        modules = [module for part in parts for module in part.modules()]
        own = randomness.owned(randomness.held_by(modules))
        self._states = [(g, randomness.read(g)) for g in [*randomness.everyday(devices), *randomness.rare(), *own]]
        self._buffers = [
            (module, name, buffer, buffer.clone())
            for module in modules
            for name, buffer in module.named_buffers(recurse=False)
        ]

    def restore(self) -> None:
        for generator, state in self._states:
            randomness.write(generator, state)
        for module, name, buffer, value in self._buffers:
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)
            if not torch.equal(buffer, value):  # others keep their version: an earlier call may have saved them
                with torch.no_grad():
                    buffer.copy_(value)

"""Whether a configuration can run on this machine at all: absurd sizes are refused before anything is built."""

from __future__ import annotations

from dataclasses import asdict, replace

import torch

from retrograde.measure.formatting import format_bytes
from retrograde.measure.free_memory import free_bytes
from retrograde.models import ReversibleLM

from ._config import Config, ConfigError, ModelConfig


def check_size(config: Config, vocabulary: int) -> None:
    """Raise if the weights alone, or a batch alone, need more memory than there is."""
    free = free_bytes(torch.device("cpu"))
    weights = count_weights(config, vocabulary) * torch.float32.itemsize
    rows = config.training.batch * (config.data.length + 1) * torch.long.itemsize
    needs = {f"training.batch = {config.training.batch} of data.length = {config.data.length}": rows}
    needs[f"A model of width {config.model.width} and depth {config.model.depth}"] = weights
    for what, bytes_needed in needs.items():
        if bytes_needed > free:
            raise ConfigError(
                f"{what} needs {format_bytes(bytes_needed)} for itself, and {format_bytes(free)} are free. Give "
                "smaller numbers."
            )


def count_weights(config: Config, vocabulary: int) -> int:
    """How many weights a model has, from those of models of one and two blocks without values."""
    try:
        one, two = (_count(replace(config.model, depth=depth), vocabulary) for depth in (1, 2))
    except (RuntimeError, TypeError, OverflowError) as error:  # a product of sizes that no tensor can have
        reason = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"A model of width {config.model.width}, with model.hidden = {config.model.hidden} and {vocabulary} "
            f"different tokens, is larger than any tensor can be ({reason}). Give smaller numbers."
        ) from None
    return one + (config.model.depth - 1) * (two - one)


def _count(config: ModelConfig, vocabulary: int) -> int:
    with torch.device("meta"):
        model = ReversibleLM(vocabulary, **asdict(config))
    return sum(p.numel() for p in model.parameters())

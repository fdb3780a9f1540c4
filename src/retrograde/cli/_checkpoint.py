"""A target from a folder that `save_pretrained` of transformers wrote: the model, and a random batch for it.

Nothing in the folder is run: its weights are read from safetensors only, and its class is one of transformers' own.
"""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import torch

from retrograde.measure.targets import Target, TargetError

SAMPLES, LENGTH = 2, 64
LANGUAGE = ("ForCausalLM", "ForMaskedLM", "LMHeadModel")  # endings of the classes whose labels are their tokens


def load_checkpoint(folder: Path) -> Target:
    """The model in a folder, with random tokens or pixels to run it on."""
    name = _architecture(folder)
    _refuse_pickle(folder)
    try:
        transformers: Any = importlib.import_module("transformers")
    except ModuleNotFoundError:
        raise TargetError(f"{folder} is a checkpoint of transformers: pip install transformers.") from None
    kind = getattr(transformers, name, None)
    if kind is None:
        raise TargetError(
            f"{folder} holds a {name}, which transformers {transformers.__version__} does not have. Code that comes "
            "with a checkpoint is not run; write a factory that makes the model: my_model.py:make."
        )
    try:
        model = kind.from_pretrained(folder, use_safetensors=True, local_files_only=True)
    except Exception as error:  # of the file, of its format, of shapes: whatever the loader raises
        raise TargetError(f"{folder} could not be read: {type(error).__name__}: {error}") from error
    return Target(str(folder), model, _batch(model, name))


def _architecture(folder: Path) -> str:
    path = folder / "config.json"
    if not path.is_file():
        raise TargetError(
            f"{folder} has no config.json. Name a folder that save_pretrained wrote, or a factory: my_model.py:make."
        )
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["architectures"][0])
    except (ValueError, KeyError, TypeError, IndexError):
        raise TargetError(f"{path} does not name the model's class under 'architectures'.") from None


def _refuse_pickle(folder: Path) -> None:
    if any(folder.glob("*.safetensors")):
        return
    pickles = sorted(path.name for ending in ("*.bin", "*.pt", "*.pth") for path in folder.glob(ending))
    only = f", only {', '.join(pickles)}. Loading a pickle can run code, so it is not read" if pickles else ""
    raise TargetError(
        f"{folder} has no weights in safetensors{only}. Save the model with model.save_pretrained(folder)."
    )


def _batch(model: Any, name: str) -> dict[str, Any]:
    """Random input of the kind that the model takes, the same every time."""
    generator = torch.Generator().manual_seed(0)
    config = model.config.get_text_config() if model.main_input_name == "input_ids" else model.config
    if model.main_input_name == "input_ids":
        length = min(LENGTH, getattr(config, "max_position_embeddings", LENGTH))
        tokens = torch.randint(config.vocab_size, (SAMPLES, length), generator=generator)
        return {"input_ids": tokens, "labels": tokens} if name.endswith(LANGUAGE) else {"input_ids": tokens}
    if model.main_input_name == "pixel_values" and isinstance(getattr(config, "image_size", None), int):
        shape = (SAMPLES, getattr(config, "num_channels", 3), config.image_size, config.image_size)
        return {"pixel_values": torch.randn(shape, generator=generator)}
    raise TargetError(
        f"A {name} takes {model.main_input_name}, for which no random batch can be made. Write a factory that returns "
        "the model and a batch: my_model.py:make."
    )

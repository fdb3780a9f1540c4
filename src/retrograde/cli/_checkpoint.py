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
NAMES_OF_CODE = {
    "auto_map", "custom_pipelines", "custom_generate", "attn_implementation", "_attn_implementation",
    "experts_implementation", "_experts_implementation", "kernel_config", "use_kernels",
}  # fmt: skip
LANGUAGE = ("ForCausalLM", "ForMaskedLM", "LMHeadModel")  # endings of the classes whose labels are their tokens


def load_checkpoint(folder: Path) -> Target:
    """The model in a folder, with random tokens or pixels to run it on."""
    name = _architecture(folder)
    _refuse_pickle(folder)
    try:
        transformers: Any = importlib.import_module("transformers")
    except ModuleNotFoundError:
        raise TargetError(f"{folder} is a checkpoint of transformers: pip install transformers.") from None
    kind: Any = getattr(transformers, name, None)
    if not _is_own_model(kind, transformers):
        raise TargetError(
            f"{folder} holds a {name}, which is no model of transformers {transformers.__version__} itself. Code that "
            "comes with a checkpoint is not run; write a factory that makes the model: my_model.py:make."
        )
    try:
        config = kind.config_class.from_dict(_without_code(_read_config(folder)))
        model = kind.from_pretrained(
            folder, config=config, use_safetensors=True, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # of the file, of its format, of shapes: whatever the loader raises
        raise TargetError(f"{folder} could not be read: {type(error).__name__}: {error}") from error
    return Target(str(folder), model, _batch(model, name))


def _is_own_model(kind: Any, transformers: Any) -> bool:
    """Whether this is a model that transformers defines: no Auto class, which may choose one in the folder."""
    base = getattr(transformers, "PreTrainedModel", ())
    return isinstance(kind, type) and issubclass(kind, base) and kind.__module__.startswith("transformers.models.")


def _without_code(config: Any) -> Any:
    """A config without what names code: classes in the folder, kernels and generation loops from elsewhere."""
    if isinstance(config, dict):
        return {key: _without_code(value) for key, value in config.items() if key not in NAMES_OF_CODE}
    return [_without_code(value) for value in config] if isinstance(config, list) else config


def _architecture(folder: Path) -> str:
    config = _read_config(folder)
    try:
        return str(config["architectures"][0])
    except (KeyError, TypeError, IndexError):
        raise TargetError(f"{folder / 'config.json'} does not name the model's class under 'architectures'.") from None


def _read_config(folder: Path) -> Any:
    path = folder / "config.json"
    if not path.is_file():
        raise TargetError(
            f"{folder} has no config.json. Name a folder that save_pretrained wrote, or a factory: my_model.py:make."
        )
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError, OSError) as error:
        raise TargetError(f"{path} is no JSON that can be read: {error}") from None


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

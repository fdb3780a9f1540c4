"""Saving models to a folder or to the Hugging Face Hub and loading them, where huggingface_hub is installed."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from typing_extensions import Self

_MISSING = "Models are saved to and loaded from the Hugging Face Hub by huggingface_hub: pip install 'retrograde[hf]'."


class _WithoutHub:
    """What the models have in the place of huggingface_hub's mixin where it is not installed."""

    def save_pretrained(self, save_directory: Any, **options: Any) -> Any:
        """Write the weights and the arguments of the model to a folder."""
        raise ImportError(_MISSING)

    def push_to_hub(self, repo_id: str, **options: Any) -> str:
        """Write the weights and the arguments of the model to a repository of the Hub."""
        raise ImportError(_MISSING)

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: Any, **options: Any) -> Self:
        """The model that was written to a folder, or to a repository of the Hub."""
        raise ImportError(_MISSING)


_Mixin = _WithoutHub
if not TYPE_CHECKING:
    with contextlib.suppress(ImportError):
        from huggingface_hub import PyTorchModelHubMixin as _Mixin


class HubModel(nn.Module, _Mixin):
    """A model with `save_pretrained`, `from_pretrained` and `push_to_hub`."""

"""timm and diffusers, which import names of torchvision that the models under test never use: it is stubbed."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

_MODULES = (
    "torchvision", "torchvision.transforms", "torchvision.transforms.functional", "torchvision.datasets",
    "torchvision.datasets.folder", "torchvision.ops", "torchvision.ops.misc", "torchvision.models",
    "torchvision.models.feature_extraction", "torchvision.io",
)  # fmt: skip


class _Named(type):
    """A class whose attributes are their names, as the members of an enumeration."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("_"):
            raise AttributeError(name)
        return name


class _Stub(ModuleType):
    """A module in which every name is an empty class."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = _Named(name, (), {})
        setattr(self, name, made)
        return made


@contextmanager
def _stubbed_torchvision() -> Iterator[None]:
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    for name in _MODULES:
        module = _Stub(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    try:
        yield
    finally:
        for name in _MODULES:
            del sys.modules[name]


def imported(package: str) -> Any:
    """The package; skips the test if it is not installed."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    with _stubbed_torchvision():
        return importlib.import_module(package)

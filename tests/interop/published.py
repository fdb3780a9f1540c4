"""The published packages, each twice: as it was published, and on retrograde. And how to compare the two."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde.adapters

TIGHT = 1e-12

NEEDS = {
    "routing_transformer": ("einops", "local_attention", "product_key_memory", "mixture_of_experts"),
    "lie_transformer_pytorch": ("einops",),
    "nuwa_pytorch": ("einops", "unfoldNd", "vector_quantize_pytorch", "ftfy", "regex", "tqdm", "PIL"),
    "axial_attention": (),
    "reformer_pytorch": ("einops", "local_attention", "product_key_memory", "axial_positional_embedding"),
}


TORCHVISION = {
    "torchvision": (),
    "torchvision.models": (),
    "torchvision.transforms": (),
    "torchvision.datasets": ("ImageFolder",),
    "torchvision.utils": ("make_grid", "save_image"),
}


def require(package: str) -> None:
    """Skip unless the package and all that it imports are installed."""
    missing = [name for name in (package, *NEEDS[package]) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs {', '.join(missing)}: install the extra 'interop' (see CONTRIBUTING)")


@contextlib.contextmanager
def stub_torchvision() -> Iterator[None]:
    """Stand in for torchvision, of which nuwa imports names that the models under test never use."""
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    for name, names in TORCHVISION.items():
        module = types.ModuleType(name)
        for attribute in names:
            setattr(module, attribute, object)
        sys.modules[name] = module
        if "." in name:
            setattr(sys.modules["torchvision"], name.partition(".")[2], module)
    try:
        yield
    finally:
        for name in TORCHVISION:
            del sys.modules[name]


@contextlib.contextmanager
def fresh(package: str) -> Iterator[None]:
    """Import the package anew inside, and forget it afterwards."""
    _forget(package)
    with stub_torchvision(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what third-party code does while it is imported is none of ours
        yield
    _forget(package)


def _forget(package: str) -> None:
    for name in [m for m in sys.modules if m == package or m.startswith(f"{package}.")]:
        del sys.modules[name]


class Twins:
    """A package as published and the same package, unmodified, on retrograde."""

    def __init__(self, package: str) -> None:
        require(package)
        with fresh(package):
            self.published = importlib.import_module(package)
        with fresh(package), retrograde.adapters.install(package):
            self.ours = importlib.import_module(package)

    def models(self, make: Callable[[Any], nn.Module], *, seed: int = 0) -> tuple[nn.Module, nn.Module]:
        """The same model from both, in float64, with the same weights: a published checkpoint loaded strictly."""
        with contextlib.redirect_stdout(io.StringIO()):
            torch.manual_seed(seed)
            theirs = make(self.published).double()
            ours = make(self.ours).double()
        assert list(theirs.state_dict()) == list(ours.state_dict()), "keys, in their order"
        ours.load_state_dict(theirs.state_dict(), strict=True)
        return theirs, ours


def sequences(model: nn.Module) -> list[Any]:
    """The drop-in sequences inside a model."""
    found = [m for m in model.modules() if isinstance(m, retrograde.ReversibleSequence)]
    assert found, "the model does not run on retrograde"
    return found


@contextlib.contextmanager
def stored(model: nn.Module) -> Iterator[nn.Module]:
    """The model in plain autograd: the same arithmetic, with every activation kept."""
    plans = [(s, s.memory) for s in sequences(model)]
    for sequence, _ in plans:
        sequence.memory = "store"
    try:
        yield model
    finally:
        for sequence, plan in plans:
            sequence.memory = plan


def run(model: nn.Module, loss: Callable[[nn.Module], Tensor], *, seed: int = 7) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients of all parameters that have one."""
    model.zero_grad()
    torch.manual_seed(seed)
    value = loss(model)
    value.backward()
    return value.detach(), gradients(model)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The greatest relative error of any parameter's gradient; infinite if one has none that should."""
    if set(found) != set(expected):
        return float("inf")
    worst = 0.0
    for name, wanted in expected.items():
        scale = wanted.norm()
        error = (found[name] - wanted).norm()
        worst = max(worst, float(error / scale) if scale > 0 else float(error))
    return worst

"""The published packages, each twice: the original, and on retrograde; and how to compare the two."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

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


def missing(package: str) -> list[str]:
    """Which of the package and all that it imports are not installed."""
    return [name for name in (package, *NEEDS[package]) if importlib.util.find_spec(name) is None]


def require(package: str) -> None:
    """Skip unless the package can be imported."""
    if names := missing(package):
        pytest.skip(f"needs {', '.join(names)}: install the extra 'interop'")


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
    """A context that imports the package anew, and removes it from `sys.modules` afterwards."""
    _forget(package)
    with stub_torchvision(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of third-party code while it is imported
        yield
    _forget(package)


def _forget(package: str) -> None:
    for name in [m for m in sys.modules if m == package or m.startswith(f"{package}.")]:
        del sys.modules[name]


class Twins:
    """The original of a package, and the same package, unmodified, on retrograde."""

    def __init__(self, package: str) -> None:
        require(package)
        with fresh(package):
            self.published = importlib.import_module(package)
        with fresh(package), retrograde.adapters.install(package):
            self.ours = importlib.import_module(package)

    def trio(self, make: Callable[[Any], nn.Module], *, dtype: torch.dtype = torch.float64) -> Trio:
        """The same model three times, with the same weights."""
        with contextlib.redirect_stdout(io.StringIO()):  # one of them prints a warning
            torch.manual_seed(0)
            models = [make(package).to(dtype) for package in (self.published, self.ours, self.ours)]
        trio = Trio(*models)
        for sequence in sequences(trio.plain):
            sequence.memory = "store"
        assert list(trio.theirs.state_dict()) == list(trio.ours.state_dict()), "keys, in their order"
        trio.ours.load_state_dict(trio.theirs.state_dict(), strict=True)
        trio.sync()
        return trio


@dataclass
class Trio:
    """A model as published, on retrograde, and in plain autograd: on retrograde with every activation stored."""

    theirs: nn.Module
    ours: nn.Module
    plain: nn.Module

    def sync(self) -> None:
        """Give all three the weights and buffers of ours."""
        for model in (self.theirs, self.plain):
            model.load_state_dict(self.ours.state_dict(), strict=True)

    def train(self, mode: bool = True) -> Trio:
        for model in (self.theirs, self.ours, self.plain):
            model.train(mode)
        return self


Loss = Callable[[Any], Tensor]


class Outcome(NamedTuple):
    """The result of one backward pass: the loss, and the gradients or the error that was raised."""

    loss: Tensor | None
    grads: dict[str, Tensor]
    error: str = ""


def run(model: nn.Module, loss: Loss, *, seed: int = 7) -> Outcome:
    """Differentiate a loss; errors of the published code are a result too."""
    model.zero_grad()
    torch.manual_seed(seed)
    value = None
    try:
        value = loss(model)
        value.backward()
    except (RuntimeError, TypeError, KeyError) as error:
        return Outcome(None if value is None else value.detach(), {}, f"{type(error).__name__}: {error}")
    return Outcome(value.detach(), gradients(model))


def compare(trio: Trio, loss: Loss, *, seed: int = 7) -> Outcome:
    """One step of all three from the same weights. Ours must be right; the outcome of theirs is returned.

    Right means: the bits of the published forward pass, and the gradients of plain autograd.
    """
    trio.sync()
    theirs = run(trio.theirs, loss, seed=seed)
    ours = run(trio.ours, loss, seed=seed)
    plain = run(trio.plain, loss, seed=seed)
    assert not ours.error, ours.error
    assert not plain.error, plain.error
    assert ours.loss is not None
    assert plain.loss is not None
    assert torch.equal(ours.loss, plain.loss)
    if theirs.loss is not None:
        assert torch.equal(ours.loss, theirs.loss), "forward bits"
    error = distance(ours.grads, plain.grads)
    assert error <= TIGHT, f"relative gradient error {error:.3g}"
    return theirs._replace(grads={"error": torch.tensor(distance(theirs.grads, plain.grads))})


def train(trio: Trio, loss: Loss, *, steps: int = 3) -> list[Outcome]:
    """A few steps of training, each from the weights that retrograde has reached."""
    optimiser = torch.optim.SGD(trio.ours.parameters(), lr=0.05)
    outcomes = []
    for step in range(steps):
        outcomes.append(compare(trio, loss, seed=step))
        optimiser.step()
    return outcomes


def sequences(model: nn.Module) -> list[Any]:
    """The drop-in sequences inside a model."""
    drop_ins = [m for m in model.modules() if isinstance(m, retrograde.ReversibleSequence)]
    assert drop_ins, "the model does not run on retrograde"
    return drop_ins


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def distance(given: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The greatest relative error of any parameter's gradient; infinite if one has none that should.

    Some gradients are zero except for rounding (a bias before a batch norm): those below a thousandth of the greatest
    gradient are compared with that thousandth.
    """
    if set(given) != set(expected):
        return float("inf")
    least = max(float(wanted.norm()) for wanted in expected.values()) / 1000
    return max(float((given[n] - wanted).norm()) / max(float(wanted.norm()), least) for n, wanted in expected.items())

"""What all tools share of a training step: the batch, the loss, the stack, the factory, the clock."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.measure import TargetError, arguments, default_loss, load, stacks_in, timing
from retrograde.measure.batches import call, own_arguments, tensors_in
from retrograde.measure.loss import check_loss
from retrograde.measure.stacks import the_stack
from retrograde.measure.training_step import loss_of, step_peak, step_seconds


class Sum(nn.Module):
    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return a + b


@pytest.mark.parametrize("batch", [(torch.ones(2), torch.ones(2)), {"a": torch.ones(2), "b": torch.ones(2)}])
def test_a_batch_has_positional_arguments_or_keyword_arguments(batch: Any) -> None:
    assert torch.equal(call(Sum(), batch), torch.full((2,), 2.0))


def test_a_tensor_is_the_only_argument() -> None:
    x = torch.ones(2)
    assert arguments(x) == ((x,), {})


def test_a_step_leaves_no_gradient_in_its_batch_and_does_not_use_up_its_graph() -> None:
    source = torch.ones(2, requires_grad=True)
    batch = {"a": 2 * source, "rest": [source, "text"]}
    _, kwargs = own_arguments(batch)
    assert kwargs["a"].is_leaf
    assert kwargs["a"].requires_grad
    assert kwargs["rest"][1] == "text"
    (kwargs["a"] * kwargs["rest"][0]).sum().backward()
    assert source.grad is None
    batch["a"].sum().backward()


@dataclass
class Output:
    logits: Tensor
    loss: Any = None


def test_tensors_are_collected_from_nested_outputs() -> None:
    a, b, c = torch.ones(1), torch.ones(2), torch.ones(3)
    assert [len(t) for t in tensors_in({"a": a, "rest": (Output(b, loss=None), ["text", c])})] == [1, 2, 3]


def test_the_default_loss_is_the_models_own_if_it_returns_one() -> None:
    own = torch.tensor(3.0, requires_grad=True)
    assert default_loss(Output(torch.ones(2), own)) is own
    assert default_loss({"logits": torch.ones(2), "loss": own}) is own


def test_the_default_loss_reaches_every_output_and_is_no_constant_behind_a_normalisation() -> None:
    x = torch.randn(4, 8, requires_grad=True)
    normalised = nn.functional.layer_norm(x, (8,))
    default_loss({"a": normalised, "rest": [normalised.half(), torch.ones(2, dtype=torch.int64)]}).backward()
    assert x.grad is not None
    assert x.grad.abs().min() > 1e-6
    assert default_loss(x).item() == default_loss(x).item()


def test_the_default_loss_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    default_loss(torch.ones(2))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("loss", "words"),
    [(torch.ones(2), r"a tensor of shape \(2,\)"), (1.0, "a float"), (torch.ones(()), "does not require grad")],
)
def test_a_loss_that_cannot_be_trained_is_refused(loss: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_loss(loss)


def stack(width: int = 4) -> rg.ReversibleSequence:
    return rg.ReversibleSequence([rg.two_stream(nn.Linear(width, width), nn.Linear(width, width))])


def test_stacks_are_known_by_their_names_in_the_model() -> None:
    model = nn.ModuleDict({"encoder": stack(), "decoder": nn.Sequential(stack())})
    assert list(stacks_in(model)) == ["encoder", "decoder.0"]
    assert the_stack(model, "decoder.0") is model["decoder"][0]
    assert the_stack(model, stacks_in(model)["encoder"]) is model["encoder"]
    alone = stack()
    assert the_stack(alone) is alone


def test_the_time_and_the_peak_of_a_step_are_those_of_a_forward_and_a_backward_pass() -> None:
    model, x = stack(), torch.randn(1000, 4)
    assert step_seconds(model, x) > 0
    assert all(p.grad is None for p in model.parameters())
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    assert step_peak(model, x) > gradients + 2 * x.numel() * x.element_size()
    assert loss_of(model, x, lambda y: y.sum()).item() == pytest.approx(model(x).sum().item())


def test_the_least_time_of_each_way_counts_and_ways_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_PATIENCE", 0.0)
    opened: list[str] = []
    times = iter(range(100, 0, -1))

    @contextmanager
    def way(name: str) -> Iterator[None]:
        opened.append(name)
        yield

    told: list[tuple[str, int, int]] = []
    least = timing.least_seconds(
        {name: partial(way, name) for name in "ab"}, lambda: float(next(times)), lambda *what: told.append(what)
    )
    assert opened == ["a", "b"] * timing.ROUNDS
    assert least == {"a": 91.0, "b": 89.0}
    assert told[-1] == ("the time of b", 5, 6)


FACTORY = """
import torch
from torch import nn

def make(batch=2, **more):
    return [nn.Linear(4, 4), torch.randn(batch, 4), *more.values()]

def numbered():
    return nn.Linear(4, 4), {1: torch.ones(2)}

def text():
    return nn.Linear(4, 4), "text"

def lossy():
    return nn.Linear(4, 4), torch.ones(4), 3

def optimised():
    return nn.Linear(4, 4), torch.ones(4), None, 3
"""


@pytest.fixture
def factory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "model.v2.py"  # as no import statement could write it
    path.write_text(FACTORY)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "model.v2", sys)  # so that it is taken out again
    return path


def test_a_file_is_run_whatever_its_name_and_its_factory_gets_the_sizes(factory: Path) -> None:
    target = load(f"{factory}:make", batch=7)
    assert target.batch.shape == (7, 4)
    assert (target.loss, target.optimizer) == (None, None)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("numbered", "has keys that are no strings"),
        ("text", "The batch that .*text returned is a str"),
        ("lossy", "The loss that .* is a int, not a function"),
        ("optimised", "The optimizer that .* is a int"),
        ("missing", "has no 'missing'. It defines make, numbered"),
        ("nn", "is a value of type module, not a function"),
    ],
)
def test_a_factory_that_returns_something_else_is_refused(factory: Path, name: str, words: str) -> None:
    with pytest.raises(TargetError, match=words):
        load(f"{factory}:{name}")

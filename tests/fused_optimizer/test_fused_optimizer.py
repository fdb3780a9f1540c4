"""The fused optimiser: the bits of the ordinary one, gradients that do not grow with depth, and what it refuses."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

import retrograde as rg
from retrograde.fused_optimizer import FusedOptimizer
from retrograde.fused_optimizer.spent_gradient import SpentGradient
from retrograde.measure import MemoryTracker
from stacks import MEMORIES, Noisy, in_threads, memory_of

SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
KINDS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (SGD, {"lr": 0.05}),
    "SGD, momentum": (SGD, {"lr": 0.05, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "SGD, Nesterov": (SGD, {"lr": 0.05, "momentum": 0.9, "nesterov": True}),
    "SGD, foreach": (SGD, {"lr": 0.05, "momentum": 0.9, "foreach": True}),
    "SGD, fused kernel": (SGD, {"lr": 0.05, "momentum": 0.9, "fused": True}),
    "Adam": (Adam, {"lr": 0.01}),
    "Adam, amsgrad": (Adam, {"lr": 0.01, "amsgrad": True, "weight_decay": 0.1}),
    "Adam, foreach": (Adam, {"lr": 0.01, "foreach": True}),
    "Adam, fused kernel": (Adam, {"lr": 0.01, "fused": True}),
    "AdamW": (AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    "AdamW, foreach": (AdamW, {"lr": 0.01, "weight_decay": 0.1, "foreach": True}),
    "AdamW, a tensor as lr": (AdamW, {"lr": torch.tensor(0.01)}),
    "Adagrad, which has a state at once": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.1}),
}


class Model(nn.Module):
    """An embedding that is also the head, blocks that share a branch, a weight as context, and a frozen weight."""

    def __init__(self, memory: str = "reverse", depth: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(9, 6).double()
        self.shift = nn.Parameter(torch.randn(6).double())
        self.idle = nn.Parameter(torch.randn(6).double())
        shared = Noisy()
        blocks = [rg.two_stream(Noisy(), shared if i % 2 else Noisy()) for i in range(depth)]
        self.stack = rg.ReversibleSequence(blocks, memory=memory_of(memory, depth))
        next(self.stack.parameters()).requires_grad_(False)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.stack(self.embed(tokens), shift=self.shift) @ self.embed.weight.T


def loss_of(y: Tensor) -> Tensor:
    """A loss that 20 large steps do not drive to infinity."""
    return -y.log_softmax(-1)[..., 0].mean()


def tokens(step: int) -> Tensor:
    return torch.randint(9, (4, 5), generator=torch.Generator().manual_seed(step))


def fused(model: nn.Module, kind: type[torch.optim.Optimizer] = SGD, **options: Any) -> FusedOptimizer:
    return FusedOptimizer(kind, model.named_parameters(), **{"lr": 0.05, **options})


def train(
    model: Model,
    optimizer: torch.optim.Optimizer,
    steps: int = 20,
    *,
    after_backward: Callable[[], Any] = lambda: None,
    seeds: bool = True,
) -> list[Tensor]:
    """An ordinary training loop; the losses."""
    losses = []
    for step in range(steps):
        if seeds:
            torch.manual_seed(step)
        optimizer.zero_grad()
        loss = loss_of(model(tokens(step)))
        loss.backward()
        after_backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def assert_same_bits(ours: Any, theirs: Any) -> None:
    ours, theirs = (torch.utils._pytree.tree_leaves(value) for value in (ours, theirs))
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other) if isinstance(other, Tensor) else one == other


def assert_same_training(
    ours: tuple[nn.Module, torch.optim.Optimizer], theirs: tuple[nn.Module, torch.optim.Optimizer]
) -> None:
    assert_same_bits(list(ours[0].parameters()), list(theirs[0].parameters()))
    state, expected = ours[1].state_dict(), theirs[1].state_dict()
    assert_same_bits(sorted(state["state"].items()), sorted(expected["state"].items()))
    assert [{**g, "param_names": 0} for g in state["param_groups"]] == [
        {**g, "param_names": 0} for g in expected["param_groups"]
    ]


# The bits of the ordinary optimiser


@pytest.mark.parametrize("clip", [None, 0.01])
@pytest.mark.parametrize("kind", KINDS)
def test_20_steps_give_the_bits_of_the_ordinary_optimiser(kind: str, clip: float | None) -> None:
    cls, options = KINDS[kind]
    model = Model()
    twin = copy.deepcopy(model)
    ordinary = cls(twin.parameters(), **options)
    optimizer = fused(model, cls, clip_value=clip, **options)
    theirs = train(twin, ordinary, after_backward=lambda: clip and clip_grad_value_(twin.parameters(), clip))
    ours = train(model, optimizer)
    assert_same_bits(ours, theirs)
    assert_same_training((model, optimizer), (twin, ordinary))
    assert len(set(map(float, ours))) == 20  # it trained


def test_clipping_by_value_changes_the_training() -> None:
    model = Model()
    twin = copy.deepcopy(model)
    train(model, fused(model, clip_value=0.01), 2)
    train(twin, fused(twin), 2)
    assert not torch.equal(model.shift, twin.shift)


@pytest.mark.parametrize("memory", MEMORIES)
def test_every_memory_mode_gives_the_bits_of_the_ordinary_optimiser(memory: str) -> None:
    model = Model(memory)
    twin = copy.deepcopy(model)
    ordinary, optimizer = AdamW(twin.parameters(), lr=0.01), fused(model, AdamW, lr=0.01)
    assert_same_bits(train(model, optimizer, 5), train(twin, ordinary, 5))
    assert_same_training((model, optimizer), (twin, ordinary))


def groups_of(model: Model) -> list[dict[str, Any]]:
    return [
        {"params": model.stack.parameters(), "weight_decay": 0.2},
        {"params": [model.embed.weight, model.shift], "lr": 0.2},
    ]


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 20),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step),
    ],
)
def test_groups_and_schedulers_give_the_bits_of_the_ordinary_optimiser(scheduler: Any) -> None:
    model = Model()
    twin = copy.deepcopy(model)
    pairs = []
    for each, optimizer in (
        (model, FusedOptimizer(AdamW, groups_of(model), lr=0.05)),
        (twin, AdamW(groups_of(twin), lr=0.05)),
    ):
        optimizer.add_param_group({"params": [each.idle], "lr": 1.0})
        plan = scheduler(optimizer)
        for step in range(20):
            torch.manual_seed(step)
            (loss_of(each(tokens(step))) + each.idle.sin().sum()).backward()
            optimizer.step()
            plan.step()
            optimizer.zero_grad()
        pairs.append((each, optimizer))
    assert_same_training(*pairs)


def test_the_state_moves_between_a_fused_and_an_ordinary_optimiser() -> None:
    """Half of the training with the one, half with the other."""

    def ordinary(model: Model) -> torch.optim.Optimizer:
        return AdamW(model.parameters(), lr=0.05)

    def new(model: Model) -> torch.optim.Optimizer:
        return FusedOptimizer(AdamW, model.parameters(), lr=0.05)

    ends = []
    for halves in ((ordinary, ordinary), (ordinary, new), (new, ordinary), (new, new)):
        model, state = Model(), None
        for make in halves:
            optimizer = make(model)
            if state is not None:
                optimizer.load_state_dict(state)
            train(model, optimizer, 5)
            state = copy.deepcopy(optimizer.state_dict())
            del optimizer
        ends.append((list(model.parameters()), sorted(state["state"].items())))
    assert_same_bits(ends, [ends[0]] * 4)


def test_a_state_that_is_replaced_is_the_one_that_is_used() -> None:
    model = Model()
    twin = copy.deepcopy(model)
    ordinary, optimizer = AdamW(twin.parameters(), lr=0.01), fused(model, AdamW, lr=0.01)
    for each, its in ((model, optimizer), (twin, ordinary)):
        train(each, its, 2)
        its.state = defaultdict(dict)
        train(each, its, 2)
    assert_same_training((model, optimizer), (twin, ordinary))


def test_clipping_by_norm_in_two_passes_gives_the_bits_of_clip_grad_norm() -> None:
    model = Model()
    twin = copy.deepcopy(model)
    ordinary, optimizer = AdamW(twin.parameters(), lr=0.01), fused(model, AdamW, lr=0.01, clip_norm=0.05)
    norms: list[Tensor] = []
    train(twin, ordinary, after_backward=lambda: norms.append(clip_grad_norm_(twin.parameters(), 0.05)))
    for step in range(20):
        torch.manual_seed(step)
        loss = loss_of(model(tokens(step)))
        with optimizer.norm_pass():
            loss.backward(retain_graph=True)
        assert all(p.grad is None for p in model.parameters())
        assert optimizer.norm is not None
        assert torch.equal(optimizer.norm, norms[step])
        loss.backward()
        optimizer.step()
    assert_same_training((model, optimizer), (twin, ordinary))
    assert min(norms) < 0.05 < max(norms)  # some steps clip, some do not


def test_a_parameter_that_is_unfrozen_later_is_trained_and_then_fused() -> None:
    model = Model()
    twin = copy.deepcopy(model)
    ordinary, optimizer = AdamW(twin.parameters(), lr=0.01), fused(model, AdamW, lr=0.01)
    for each, its in ((model, optimizer), (twin, ordinary)):
        train(each, its, 2)
        each.requires_grad_(True)
        train(each, its, 3)
    assert_same_training((model, optimizer), (twin, ordinary))
    loss_of(model(tokens(9))).backward()
    assert isinstance(next(model.stack.parameters()).grad, SpentGradient)


def test_sparse_gradients_are_stepped_as_by_the_ordinary_optimiser() -> None:
    model = nn.Embedding(9, 6, sparse=True)
    twin = copy.deepcopy(model)
    for each, optimizer in (
        (model, FusedOptimizer(torch.optim.SparseAdam, model.parameters(), lr=0.1)),
        (twin, torch.optim.SparseAdam(twin.parameters(), lr=0.1)),
    ):
        for step in range(5):
            optimizer.zero_grad()
            each(tokens(step)).sin().sum().backward()
            optimizer.step()
    assert_same_bits(model.weight, twin.weight)


def test_gradients_set_by_hand_are_stepped_by_step() -> None:
    model = Model()
    twin = copy.deepcopy(model)
    for each, optimizer in ((model, fused(model, clip_norm=0.1)), (twin, SGD(twin.parameters(), lr=0.05))):
        each.shift.grad, each.idle.grad = torch.ones(6).double(), torch.ones(6).double()
        if each is twin:
            clip_grad_norm_(each.parameters(), 0.1)
        optimizer.step()
    assert_same_bits([model.shift, model.idle], [twin.shift, twin.idle])
    assert model.shift.grad is None


def test_models_train_in_threads_of_their_own() -> None:
    models = [Model() for _ in range(3)]
    for model in models:
        model.eval()  # the draws of several threads from one generator have no fixed order
    alone = copy.deepcopy(models[0])
    train(alone, fused(alone), 5)
    in_threads(lambda i: train(models[i], fused(models[i]), 5, seeds=False) and None, 3)
    for model in models:
        assert_same_bits(list(model.parameters()), list(alone.parameters()))


# Memory


def peak_of_a_step(depth: int, make: Callable[[nn.Module], torch.optim.Optimizer], memory: str = "reverse") -> int:
    """The bytes of a step beyond weights and the optimiser's state; parameters are large compared with activations."""
    layers = [(nn.Linear(64, 64), nn.Linear(64, 64)) for _ in range(depth)]
    model = rg.ReversibleSequence([rg.two_stream(f, g) for f, g in layers], memory=memory)
    x, optimizer = torch.randn(4, 64), make(model)
    for _ in range(2):  # the first step makes the state
        with MemoryTracker(ignore=[model, x]) as tracker:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
    return tracker.peak


@pytest.mark.parametrize("kind", [SGD, Adam, AdamW])
def test_the_peak_of_a_whole_step_does_not_grow_with_depth(kind: Any) -> None:
    shallow, deep = (peak_of_a_step(depth, lambda m: fused(m, kind)) for depth in (4, 64))
    assert deep <= 1.01 * shallow
    ordinary = [peak_of_a_step(depth, lambda m: kind(m.parameters(), lr=0.05)) for depth in (4, 64)]
    assert ordinary[1] - ordinary[0] >= 2 * 60 * 64 * 64 * 4  # the gradients, at least
    assert deep < ordinary[1] / 10


def test_a_gradient_is_freed_before_the_next_one_is_complete() -> None:
    model = Model()
    optimizer = fused(model)
    alive: list[weakref.ref[Any]] = []
    most = 0

    def count(gradient: Tensor) -> None:
        nonlocal most
        alive.append(weakref.ref(gradient.untyped_storage()))
        most = max(most, sum(ref() is not None for ref in alive))

    parameters = [p for p in model.parameters() if p.requires_grad and p is not model.idle]
    for p in parameters:
        p.register_hook(count)
    loss_of(model(tokens(0))).backward()
    assert len(alive) >= len(parameters)
    assert most < len(parameters) / 2
    assert all(ref() is None for ref in alive)
    optimizer.step()
    assert all(p.grad is None for p in model.parameters())


def test_dropping_the_optimiser_frees_it_and_its_hooks_without_the_cycle_collector() -> None:
    model = Model()
    gc.collect()
    gc.disable()
    try:
        optimizer = fused(model, AdamW)
        train(model, optimizer, 2)
        gone = weakref.ref(optimizer)
        del optimizer
        assert gone() is None
        loss_of(model(tokens(0))).backward()
        assert model.shift.grad is not None
        assert not isinstance(model.shift.grad, SpentGradient)
        weight = weakref.ref(model.shift)
        del model
        assert weight() is None
    finally:
        gc.enable()


def test_after_detach_gradients_stay_and_step_is_the_ordinary_one() -> None:
    model = Model()
    twin = copy.deepcopy(model)
    ordinary, optimizer = AdamW(twin.parameters(), lr=0.05), fused(model, AdamW)
    train(model, optimizer, 3)
    optimizer.detach()
    train(twin, ordinary, 6)
    for step in range(3, 6):
        torch.manual_seed(step)
        loss_of(model(tokens(step))).backward()
        assert model.shift.grad is not None
        model.shift.grad.norm()
        optimizer.step()
    assert_same_training((model, optimizer), (twin, ordinary))

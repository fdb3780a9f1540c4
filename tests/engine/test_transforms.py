"""A stack under torch's transforms of programs: forward mode, functional_call, torch.func, autocast, anomaly mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import retrograde as rg
from stacks import (
    MEMORIES,
    RECOMPUTING,
    Mlp,
    Noisy,
    agree,
    all_close,
    loss_of,
    memory_of,
    plain,
    sample,
    seed_all,
    twins,
)

# torch's own: forward mode compiles some formulas with its old compiler when it first needs them.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

every_memory = pytest.mark.parametrize("memory", MEMORIES)


@every_memory
def test_forward_mode_gives_the_tangents_of_plain_autograd(memory: str) -> None:
    def scenario(model: Any) -> Any:
        x, shift = sample(4, 6), sample(6, seed=2)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, sample(4, 6, seed=3, grad=False))
            y, tangent = forward_ad.unpack_dual(model(dual, shift=shift))
        return y, tangent

    agree(*twins(Noisy, memory=memory), scenario)


@every_memory
def test_forward_mode_over_the_backward_gives_hessian_vector_products(memory: str) -> None:
    def scenario(model: Any) -> Any:
        x = sample(4, 6)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, sample(4, 6, seed=3, grad=False))
            grads = torch.autograd.grad(loss_of(model(dual)), [x, *model.parameters()])
            return [tuple(forward_ad.unpack_dual(g)) for g in grads]

    agree(*twins(memory=memory), scenario)


@every_memory
def test_gradcheck_holds_in_forward_mode_and_for_batched_gradients(memory: str) -> None:
    stack, _ = twins(lambda: Mlp(3), depth=2, memory=memory)
    assert torch.autograd.gradcheck(stack, [sample(2, 3)], check_forward_ad=True, check_batched_grad=True)


@every_memory
@pytest.mark.parametrize("branch", [Mlp, Noisy])
def test_batched_gradients_are_those_of_plain_autograd(memory: str, branch: Any) -> None:
    """A vectorised Jacobian: autograd walks the graph, and so replays branches, inside vmap."""

    def scenario(model: Any) -> Any:
        x = sample(2, 6)
        y = model(x)
        directions = sample(5, 2, 6, seed=3, grad=False)
        return torch.autograd.grad(y, [x, *model.parameters()], directions, is_grads_batched=True)

    agree(*twins(branch, memory=memory), scenario)


@every_memory
@pytest.mark.parametrize("vectorize", [False, True])
def test_the_jacobian_of_autograd_functional_is_that_of_plain_autograd(memory: str, vectorize: bool) -> None:
    def scenario(model: Any) -> Any:
        return torch.autograd.functional.jacobian(model, sample(2, 6), vectorize=vectorize)

    agree(*twins(memory=memory), scenario)


def fresh_parameters(model: nn.Module, kind: str) -> tuple[dict[str, Tensor], list[Tensor]]:
    """New tensors for a model's parameters, and the leaves that they come from."""
    leaves = [sample(*p.shape, seed=i) for i, p in enumerate(model.parameters())]
    made = leaves if kind == "leaf" else [leaf * 0.5 + leaf.sin() for leaf in leaves]
    return {name: t for (name, _), t in zip(model.named_parameters(), made, strict=True)}, leaves


@every_memory
@pytest.mark.parametrize("kind", ["leaf", "not a leaf"])
def test_functional_call_gives_the_gradients_to_the_tensors_it_was_given(memory: str, kind: str) -> None:
    def scenario(model: Any) -> Any:
        x = sample(4, 6)
        parameters, leaves = fresh_parameters(model, kind)
        y = functional_call(model, parameters, (x,))
        loss_of(y).backward()
        assert all(p.grad is None for p in model.parameters())
        return y, x.grad, [leaf.grad for leaf in leaves]

    agree(*twins(Noisy, memory=memory), scenario)


@every_memory
def test_functional_call_may_be_differentiated_twice_as_meta_learning_does(memory: str) -> None:
    def scenario(model: Any) -> Any:
        x, parameters = sample(4, 6), dict(model.named_parameters())
        for _ in range(2):
            inner = loss_of(functional_call(model, parameters, (x,)))
            slopes = torch.autograd.grad(inner, list(parameters.values()), create_graph=True)
            parameters = {n: p - 0.1 * s for (n, p), s in zip(parameters.items(), slopes, strict=True)}
        outer = loss_of(functional_call(model, parameters, (sample(4, 6, seed=2),)))
        outer.backward()
        return outer, x.grad

    agree(*twins(Noisy, depth=2, memory=memory), scenario)


@every_memory
def test_functional_call_twice_before_the_backward_keeps_the_parameters_apart(memory: str) -> None:
    def scenario(model: Any) -> Any:
        x = sample(4, 6)
        one, ones = fresh_parameters(model, "leaf")
        two, twos = fresh_parameters(model, "not a leaf")
        y = functional_call(model, one, (x,)) * functional_call(model, two, (x,)) * model(x)
        loss_of(y).backward()
        return y, x.grad, [t.grad for t in (*ones, *twos)]

    agree(*twins(Noisy, memory=memory), scenario)


@every_memory
def test_torch_func_transforms_give_what_they_give_for_plain_autograd(memory: str) -> None:
    def scenario(model: Any) -> Any:
        parameters = {n: p.detach() for n, p in model.named_parameters()}
        x, z = sample(2, 6, grad=False), sample(2, 6, seed=2, grad=False)

        def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            return loss_of(functional_call(model, parameters, (x,)))

        return (
            list(grad(loss)(parameters, x).values()),
            list(vmap(grad(loss), in_dims=(None, 0))(parameters, torch.stack([x, z])).values()),
            vmap(model)(torch.stack([x, z])),
            jvp(model, (x,), (z,)),
            vjp(model, x)[1](z),
            hessian(lambda x: loss(parameters, x))(x),
        )

    agree(*twins(depth=2, memory=memory), scenario)


@every_memory
def test_torch_func_transforms_take_a_stack_that_returns_its_streams(memory: str) -> None:
    def scenario(model: Any) -> Any:
        x, z = sample(2, 6, grad=False), sample(2, 6, seed=2, grad=False)
        batched, forward, reverse = vmap(model)(torch.stack([x, z])), jacfwd(model)(x), jacrev(model)(x)
        return tuple(batched), tuple(forward), tuple(reverse)

    agree(*twins(depth=2, memory=memory, merge=None), scenario)


@every_memory
def test_vmap_with_different_randomness_runs_dropout(memory: str) -> None:
    def scenario(model: Any) -> Any:
        return vmap(model, randomness="different")(sample(3, 2, 6))

    agree(*twins(Noisy, memory=memory), scenario)


class Single(nn.Module):
    """A branch in float32 that notes the dtype of what its linear layers return.

    Its updates lie on a grid, on which sums are exact, so that a recomputed stream is the first one to the bit.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 7), nn.Linear(7, 6)
        self.dtypes: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        h = self.inner(x)
        self.dtypes.append(h.dtype)
        u = self.outer(torch.tanh(h)).float()
        return u + (on_grid(u) - u).detach()


def on_grid(x: Tensor) -> Tensor:
    return (x * 64).round() / 64


def grid_sample() -> Tensor:
    return on_grid(sample(4, 6, dtype=torch.float32).detach()).requires_grad_()


@every_memory
@pytest.mark.parametrize("backward_inside", [False, True])
def test_a_backward_outside_autocast_replays_under_the_autocast_of_its_forward(
    memory: str, backward_inside: bool
) -> None:
    def scenario(model: Any) -> Any:
        x = grid_sample()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = model(x)
            if backward_inside:
                loss_of(y).backward()
        if not backward_inside:
            loss_of(y).backward()
            assert not torch.is_autocast_enabled("cpu")
        seen = {d for m in model.modules() if isinstance(m, Single) for d in m.dtypes}
        assert seen == {torch.bfloat16}
        return y, x.grad

    agree(*twins(Single, memory=memory), scenario, tolerance=0)


@every_memory
def test_a_backward_inside_autocast_replays_without_it_if_the_forward_had_none(memory: str) -> None:
    def scenario(model: Any) -> Any:
        x = grid_sample()
        loss = loss_of(model(x))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss.backward()
        seen = {d for m in model.modules() if isinstance(m, Single) for d in m.dtypes}
        assert seen == {torch.float32}
        return x.grad

    agree(*twins(Single, memory=memory), scenario, tolerance=0)


@every_memory
def test_autocast_inside_a_branch_is_replayed_with_it(memory: str) -> None:
    class Inside(Single):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x)

    def scenario(model: Any) -> Any:
        x = grid_sample()
        y = model(x)
        loss_of(y).backward()
        return y, x.grad

    agree(*twins(Inside, memory=memory), scenario, tolerance=0)


@every_memory
def test_a_grad_scaler_trains_a_stack_as_it_trains_plain_autograd(memory: str) -> None:
    def scenario(model: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
        losses = []
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(model(sample(4, 6, seed=step)))
            scaler.scale(loss * float("inf") if step == 1 else loss).backward()
            scaler.step(optimizer)
            scaler.update()
            losses.append(loss)
        return losses, scaler.get_scale(), list(model.parameters())

    stack, reference = twins(Noisy, memory=memory)
    seed_all()
    ours = scenario(stack)
    seed_all()
    theirs = scenario(reference)
    assert ours[1] == theirs[1] == 2048.0
    all_close([*ours[0], *ours[2]], [*theirs[0], *theirs[2]])


@every_memory
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
def test_anomaly_mode_changes_no_gradient(memory: str) -> None:
    def scenario(model: Any) -> Any:
        x = sample(4, 6)
        with torch.autograd.detect_anomaly():
            y = model(x)
            loss_of(y).backward()
        return y, x.grad

    agree(*twins(Noisy, memory=memory), scenario)


@every_memory
@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled", "ignore:Error detected in")
def test_anomaly_mode_finds_the_nan_of_a_branch(memory: str) -> None:
    class Rooted(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + (x * 0).sqrt()

    stack, _ = twins(Rooted, memory=memory)
    with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="'MulBackward0' returned nan"):
        loss_of(stack(sample(4, 6))).backward()


@pytest.mark.parametrize("memory", RECOMPUTING)
def test_functional_call_reaches_the_parameters_of_a_coupling(memory: str) -> None:
    """They are parameters of the stack like any other, and the inverse depends on them."""
    torch.manual_seed(0)
    pairs = [(Mlp(), Mlp()) for _ in range(3)]
    steps = [(rg.Step(f, 0, 1, coupling=Gate()), rg.Step(g, 1, 0, coupling=Gate())) for f, g in pairs]
    stack = rg.ReversibleSequence([rg.Block(*pair) for pair in steps], memory=memory_of(memory, 3))
    found = []
    for build in ("retrograde", "plain"):
        x, gate, offset = sample(4, 6), sample(6, seed=2), sample(6, seed=3)
        if build == "retrograde":
            given = {n: gate for n, _ in stack.named_parameters() if n.endswith("coupling.gate")}
            given |= {n: offset for n, _ in stack.named_parameters() if n.endswith("coupling.offset")}
            y = functional_call(stack, given, (x,))
        else:
            a = b = x
            for f, g in pairs:
                a = a * gate.exp() + offset + f(b)
                b = b * gate.exp() + offset + g(a)
            y = (a + b) / 2
        found.append((y, *torch.autograd.grad(loss_of(y), [x, gate, offset])))
    all_close(*found)


class Gate(rg.couplings.Coupling, nn.Module):
    """A coupling with parameters: `target * exp(gate) + offset + update`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.offset = nn.Parameter(torch.zeros(6).double()), nn.Parameter(torch.zeros(6).double())

    def combine(self, target: Tensor, update: Tensor) -> Tensor:
        return target * self.gate.exp() + self.offset + update

    def separate(self, combined: Tensor, update: Tensor) -> Tensor:
        return (combined - update - self.offset) * (-self.gate).exp()


def test_torch_func_grad_over_closed_over_tensors_is_that_of_plain_autograd() -> None:
    x, w = sample(4, 6, grad=False), sample(6, 6, seed=2, grad=False)

    def ours(w: Tensor) -> Tensor:
        block = rg.two_stream(lambda s: torch.tanh(s @ w), lambda s: (s @ w).sin())
        return loss_of(rg.ReversibleSequence([block] * 3)(x))

    def theirs(w: Tensor) -> Tensor:
        a, b = plain([(lambda s: torch.tanh(s @ w), lambda s: (s @ w).sin())] * 3, x)
        return loss_of((a + b) / 2)

    all_close([grad(ours)(w)], [grad(theirs)(w)])

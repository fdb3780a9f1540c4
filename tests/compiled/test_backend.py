"""torch.compile(model, backend="retrograde"): what the rule cuts has the gradients of the eager model, in float64.

The graphs are run as they are (`ByRule`); `test_backend_inductor.py` has code generated for a few of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from compiling import QUIET, WIDTH, ByRule, Mlp, Model, assert_close, breaks, gradients

pytestmark = QUIET


@pytest.fixture(autouse=True)
def _float64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def pairs(depth: int = 3, **options: Any) -> list[rg.Block]:
    return [rg.two_stream(Mlp(), Mlp(), **options) for _ in range(depth)]


@dataclass(frozen=True)
class Sines(rg.couplings.Coupling):
    """A user's own coupling, whose combine and separate have nothing in common with ours."""

    def combine(self, target: Tensor, update: Any) -> Tensor:
        return target * (2 + update.cos()) / 2 + update.sin()

    def separate(self, combined: Tensor, update: Any) -> Tensor:
        return (combined - update.sin()) * 2 / (2 + update.cos())


class Halves(rg.couplings.SideBitCoupling):
    """A user's own coupling with side bits: the sign of the target is kept aside."""

    def combine(self, target: Tensor, update: Any) -> Tensor:
        return target.abs() + update

    def side_bits(self, target: Tensor) -> Tensor:
        return target < 0

    def separate(self, combined: Tensor, update: Any, side_bits: Tensor | None = None) -> Tensor:
        assert side_bits is not None
        return (combined - update) * torch.where(side_bits, -1.0, 1.0)


class Normalised(nn.Module):
    """Running statistics, and a spectral norm, whose buffers take part in what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH, bias=False))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.inner(x))
        return y


class Counting(nn.Module):
    """Reads a buffer, edits it, and reads it again."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        before = x * torch.cos(self.seen)
        self.seen += torch.ones_like(self.seen)
        y: Tensor = torch.tanh(self.inner(before)) * torch.cos(self.seen)
        return y


class Router(nn.Module):
    """Decides by a comparison which of two layers it takes."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        takes_one = rg.decide(x.sum(-1, keepdim=True) > 0)
        return torch.where(takes_one, self.one(x), self.other(x))


class Cast(nn.Module):
    """Autocast on, off and on again inside of a branch."""

    def __init__(self, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        self.inner = Mlp()
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", self.dtype):
            y = self.inner(x)
            with torch.autocast("cpu", enabled=False):
                y = self.inner(y.to(x.dtype))
        return y.to(x.dtype)


class Single(Mlp):
    """A branch that computes in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x).double()


def with_loss(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.sin(), x.cos().mean()


class Supervised(Model):
    """A model with a loss on hidden states, and with the auxiliary losses of its branches."""

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        outputs = self.stack.run(self.enter(x), hidden=[0, 1])
        assert outputs.aux is not None
        return self.leave(outputs[0]) + outputs.hidden[0][1].tanh() * outputs.hidden[1][0].exp() + outputs.aux


class TwoStacks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stacks = nn.ModuleList(Model(pairs(2)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.stacks[1](self.stacks[0](x)) + self.stacks[1](x) * x
        return y


def tied() -> nn.Module:
    branch, other = Mlp(), Mlp()
    other.inner.weight.requires_grad_(False)
    return Model([rg.two_stream(branch, other), rg.two_stream(branch, Mlp()), rg.two_stream(branch, other)])


def hooked() -> nn.Module:
    model = Model(pairs(3))
    model.stack[1].register_forward_hook(lambda _, __, out: ((out[0][0].tanh(), out[0][1]), out[1]))
    return model


def with_context() -> nn.Module:
    class Shifted(Model):
        def forward(self, x: Tensor, **context: Any) -> Tensor:
            return super().forward(x, shift=self.enter(x).sin(), factor=0.5)

    return Shifted(pairs(3))


def two_modalities() -> nn.Module:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            blocks = [
                rg.Block(
                    rg.Step(Mlp(), "a", ("b", "c"), reads="sum"),
                    rg.Step(Mlp(), "b", ("a",)),
                    rg.Step(Mlp(), "c", ("a", "b"), reads="sum"),
                )
                for _ in range(3)
            ]
            self.stack = rg.ReversibleSequence(blocks, merge=None)

        def forward(self, x: Tensor) -> Tensor:
            a, b, c = self.stack({"a": x, "b": x.sin(), "c": x.cos()})
            return a * b + c

    return Both()


def nested() -> nn.Module:
    return Model([rg.two_stream(rg.ReversibleSequence(pairs(2)), Mlp()) for _ in range(3)])


PLAN = rg.Plan(["store", "reverse", "reverse", "checkpoint", "selective", "reverse"], anchors={2})

MODELS: dict[str, Callable[[], nn.Module]] = {
    "reverse": lambda: Model(pairs(3)),
    "checkpoint": lambda: Model(pairs(3), memory="checkpoint"),
    "store": lambda: Model(pairs(2), memory="store"),
    "selective": lambda: Model(pairs(3, save_ops="products"), memory="selective"),
    "a mixed plan with anchors": lambda: Model(pairs(6), memory=PLAN),
    "scaled": lambda: Model(pairs(3, coupling=rg.couplings.Scaled(0.9, 0.5))),
    "affine": lambda: Model(
        [rg.two_stream(Mlp(out=16), Mlp(out=16), coupling=rg.couplings.Affine(limit=2.0)) for _ in range(3)]
    ),
    "exact": lambda: Model(pairs(3), exact=True),
    "momentum": lambda: Model([rg.momentum(Mlp()) for _ in range(3)], split="first", merge="first"),
    "midpoint": lambda: Model([rg.midpoint(Mlp(), step=0.1) for _ in range(4)]),
    "grouped": lambda: Model([rg.grouped(Mlp(), Mlp(), Mlp()) for _ in range(2)]),
    "a stage transition": lambda: Model([*pairs(2), rg.transition(Mlp(), Mlp()), *pairs(2)]),
    "a stage transition, selective": lambda: Model(
        [*pairs(1), rg.transition(Mlp(), Mlp()), *pairs(1)], memory="selective"
    ),
    "several modalities": two_modalities,
    "a user's own coupling": lambda: Model(pairs(3, coupling=Sines())),
    "a user's own side bits": lambda: Model(pairs(3, coupling=Halves())),
    "buffers that are edited": lambda: Model([rg.two_stream(Counting(), Normalised()) for _ in range(3)]),
    "buffers, checkpointed": lambda: Model([rg.two_stream(Counting(), Mlp()) for _ in range(3)], memory="checkpoint"),
    "autocast": lambda: Model([rg.two_stream(Cast(), Mlp()) for _ in range(3)]),
    "autocast to float16": lambda: Model([rg.two_stream(Cast(torch.float16), Mlp()) for _ in range(3)]),
    "another dtype inside": lambda: Model([rg.two_stream(Single(), Single(), compute=torch.float32) for _ in range(3)]),
    "decisions": lambda: Model([rg.two_stream(Router(), Mlp()) for _ in range(3)]),
    "context with gradients": with_context,
    "auxiliary losses and hidden states": lambda: Supervised(
        [rg.two_stream(Mlp(), with_loss, aux="g") for _ in range(3)]
    ),
    "tied and frozen weights": tied,
    "several stacks": TwoStacks,
    "a stack inside a branch": nested,
    "a hook that changes a stream": hooked,
}


def loose(name: str) -> float:
    return 1e-2 if name.startswith("autocast") else 1e-4 if name == "another dtype inside" else 1e-9


@contextmanager
def refused_by_the_tape(model: Any) -> Iterator[None]:
    """A context in which a stack stores everything: a tape does not allow that a hook changes a stream."""
    plan, model.stack.memory = model.stack.memory, "store"
    yield
    model.stack.memory = plan


@pytest.mark.parametrize("name", MODELS)
def test_compiled_gradients_are_those_of_the_eager_model(name: str) -> None:
    torch.manual_seed(0)
    model, x = MODELS[name](), torch.randn(6, WIDTH, requires_grad=True)
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
    state = {key: value.clone() for key, value in model.state_dict().items()}
    with refused_by_the_tape(model) if "hook" in name else nullcontext():
        wanted = gradients(model, x, leaves)
    buffers = [b.clone() for b in model.buffers()]
    model.load_state_dict(state)
    backend = ByRule()
    assert_close(gradients(torch.compile(model, backend=backend, fullgraph=True), x, leaves), wanted, loose(name))
    assert backend.graphs == 1
    for found, expected in zip(model.buffers(), buffers, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)  # edited once


def test_exact_couplings_with_side_bits_give_the_bits_of_stored_activations() -> None:
    """Momentum on the grid: its multiplication forgets bits, which are saved. Streams are float32."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    model = Model([rg.momentum(Mlp(), gamma=0.5) for _ in range(4)], split="first", merge="first", exact=True)
    x = torch.randn(6, WIDTH, requires_grad=True)
    leaves = [x, *model.parameters()]
    eager, compiled = gradients(model, x, leaves), {}
    for memory in ("store", "reverse"):
        torch.compiler.reset()
        model.stack.memory = memory
        compiled[memory] = gradients(torch.compile(model, backend=ByRule(), fullgraph=True), x, leaves)
    assert all(torch.equal(a, b) for a, b in zip(compiled["reverse"], compiled["store"], strict=True))
    assert_close(compiled["reverse"], eager, 1e-5)


def saved_bytes(depth: int, **options: Any) -> int:
    """What the forward half of a compiled model saves, besides its inputs and what its regions hand on to it."""
    torch.compiler.reset()
    backend, x = ByRule(), torch.randn(6, WIDTH, requires_grad=True)
    torch.compile(Model(pairs(depth), **options), backend=backend, fullgraph=True)(x).sum().backward()
    return backend.saved[-1]


def test_what_is_saved_does_not_grow_with_depth_and_does_where_it_is_stored() -> None:
    assert saved_bytes(2) == saved_bytes(6)
    assert saved_bytes(6, memory="store") > saved_bytes(2, memory="store") > saved_bytes(2)


def test_an_anchor_costs_the_streams() -> None:
    """And the graph of the step before it, which its saved streams keep."""
    plain, anchored = saved_bytes(6), saved_bytes(6, memory=rg.Plan.uniform("reverse", 6, anchor_every=3))
    assert plain < anchored < saved_bytes(6, memory="store")


def test_a_new_plan_is_a_new_graph_and_the_same_call_is_none() -> None:
    backend, model, x = ByRule(), Model(pairs(2)), torch.randn(6, WIDTH, requires_grad=True)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for _ in range(2):  # gradients are accumulated
        compiled(x).sum().backward()
    assert backend.graphs == 1
    once = [p.grad.clone() / 2 for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model.stack.memory = "checkpoint"
    compiled(x).sum().backward()
    assert backend.graphs == 2
    assert_close([p.grad for p in model.parameters() if p.grad is not None], once, 1e-9)


def test_changing_lengths_compile_twice() -> None:
    """Once for the first length, once for any length."""
    backend, model = ByRule(), Model(pairs(2))
    compiled, leaves = torch.compile(model, backend=backend, fullgraph=True), list(model.parameters())
    for length in (4, 6, 9, 5, 12):
        x = torch.randn(2, length, WIDTH)
        assert_close(gradients(compiled, x, leaves), gradients(model, x, leaves), 1e-9)
    assert backend.graphs == 2


class Judged(Model):
    """A model whose output has the auxiliary losses of its branches in it."""

    def forward(self, x: Tensor, **context: Any) -> Tensor:
        y, aux = self.stack(self.enter(x))
        return self.leave(y) + aux  # type: ignore[no-any-return]


@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
def test_layer_drop_is_one_graph_that_drops_what_the_eager_model_drops(memory: str) -> None:
    """With gradients of zero where a block is dropped. The draw is the same: without a code generator, seeds agree."""
    torch.manual_seed(0)
    blocks = [rg.two_stream(Mlp(), with_loss, aux="g") for _ in range(4)]
    backend, model = ByRule(), Judged(blocks, layer_drop=[0.5, 0.5, 0.0, 0.9], memory=memory)
    compiled, x = torch.compile(model, backend=backend, fullgraph=True), torch.randn(6, WIDTH, requires_grad=True)
    leaves, dropped = [x, *model.parameters()], set()

    def grads(run: Callable[..., Tensor], seed: int) -> list[Tensor]:
        torch.manual_seed(seed)
        y = run(x)
        found = torch.autograd.grad((y.sin() * y).sum(), leaves, allow_unused=True)
        if run is model:
            dropped.update(
                i
                for i, block in enumerate(blocks)
                if found[[id(leaf) for leaf in leaves].index(id(next(block.parameters())))] is None
            )
        return [y.detach(), *(torch.zeros_like(p) if g is None else g for p, g in zip(leaves, found, strict=True))]

    for seed in range(6):
        wanted = grads(model, seed)  # first: what the steps learn in it is guarded
        assert_close(grads(compiled, seed), wanted, 1e-9)
    assert backend.graphs == 1
    assert dropped == {0, 1, 3}


def test_without_gradients_there_are_no_marks() -> None:
    model, x = Model(pairs(2)), torch.randn(6, WIDTH)
    compiled = torch.compile(model.requires_grad_(False), backend=ByRule(), fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), model(x))


OUTSIDE: dict[str, tuple[Callable[[], Model], str]] = {
    "a guard": (lambda: Model(pairs(2), guard=rg.Guard()), "a guard or another observer"),
    "rescaling": (lambda: Model(pairs(2), exact=True, overflow="rescale"), "overflow='rescale'"),
    "layer drop with buffers": (
        lambda: Model([*pairs(1), rg.two_stream(Normalised(), Mlp())], layer_drop=[0.0, 0.5]),
        "layer_drop may leave out block 1, whose branches have buffers",
    ),
    "a policy": (
        lambda: Model(pairs(2, save_ops=lambda *_, **__: False), memory="selective"),
        "block 0, Mlp has a policy as save_ops",
    ),
}


@pytest.mark.parametrize("name", OUTSIDE)
def test_what_cannot_be_in_a_graph_runs_on_its_tape_and_says_so_once(name: str) -> None:
    make, why = OUTSIDE[name]
    model, x = make(), torch.randn(6, WIDTH, requires_grad=True)
    leaves = [x, *model.stack.blocks[0].parameters()]
    wanted = gradients(model, x, leaves)
    compiled = torch.compile(model, backend=ByRule())
    with pytest.warns(RuntimeWarning, match=why) as warned:
        got = [gradients(compiled, x, leaves) for _ in range(2)]
    assert_close(got[0], wanted, 1e-9)
    assert sum("stays outside" in str(w.message) for w in warned) == 1
    assert breaks()


def test_a_separate_that_reads_its_target_is_refused_with_block_and_branch() -> None:
    class Cheats(rg.couplings.Coupling):
        def combine(self, target: Tensor, update: Any) -> Tensor:
            self.target = target
            return target.relu() + update

        def separate(self, combined: Tensor, update: Any) -> Tensor:
            return self.target * 1.0

    x = torch.randn(6, WIDTH, requires_grad=True)
    with pytest.raises(Exception, match="Block 1: Mlp: its inverse reads a stream that only the inverse would give"):
        torch.compile(Model(pairs(2, coupling=Cheats())), backend=ByRule())(x).sum().backward()

"""A two-stream stack and the same arithmetic as a plain loop, with the same weights; and how to compare the two."""

from __future__ import annotations

import copy
import inspect
import random
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor, nn

import retrograde as rg

MEMORIES = ("store", "checkpoint", "reverse", "mixed", "anchored")
RECOMPUTING = MEMORIES[1:]
TIGHT = 1e-12

Pair = tuple[Callable[..., Any], Callable[..., Any]]


def memory_of(name: str, depth: int) -> Any:
    """The `memory` argument that a name in MEMORIES stands for."""
    if name == "mixed":
        return [("reverse", "reverse", "checkpoint", "store", "offload")[i % 5] for i in range(depth)]
    if name == "anchored":
        return rg.Plan(("reverse",) * depth, anchors=frozenset(range(1, depth, 2)))
    return name


class Mlp(nn.Module):
    """Linear, tanh, dropout, linear; adds a context tensor and multiplies by another where they are given."""

    def __init__(self, width: int = 6, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 7).double()
        self.dropout = nn.Dropout(dropout)
        self.outer = nn.Linear(7, width).double()

    def forward(self, x: Tensor, shift: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        h = torch.tanh(self.inner(x if shift is None else x + shift))
        u = self.outer(self.dropout(h))
        return u if mask is None else u * mask


class Noisy(Mlp):
    """An Mlp with dropout."""

    def __init__(self, width: int = 6) -> None:
        super().__init__(width, dropout=0.4)


class Result(tuple[Tensor, ...]):
    """The streams that a plain run ends with, with what `retrograde.Outputs` carries beside them."""

    aux: Tensor | None
    hidden: dict[int, tuple[Tensor, ...]]


def plain(pairs: Iterable[Pair], x: Tensor | Sequence[Tensor], *, hidden: Sequence[int] = (), **context: Any) -> Result:
    """Two streams through pairs of branches: a plain loop in ordinary autograd, with nothing of retrograde's in it."""
    a, b = (x, x) if isinstance(x, Tensor) else x
    states: dict[int, tuple[Tensor, ...]] = {}
    losses: list[Tensor] = []
    for i, (f, g) in enumerate(pairs):
        a = a + _update(f(b, **_taken(f, context)), losses)
        b = b + _update(g(a, **_taken(g, context)), losses)
        states[i] = (a, b)
    result = Result((a, b))
    result.aux = torch.stack([loss.sum() for loss in losses]).sum() if losses else None
    result.hidden = {i: state for i, state in states.items() if i in hidden}
    return result


def _update(returned: Any, losses: list[Tensor]) -> Tensor:
    if isinstance(returned, tuple):
        losses.append(returned[1])
        return returned[0]
    return returned


def _taken(branch: Callable[..., Any], context: Mapping[str, Any]) -> dict[str, Any]:
    call = branch.forward if isinstance(branch, nn.Module) else branch
    return {name: value for name, value in context.items() if name in inspect.signature(call).parameters}


class Plain(nn.Module):
    """`plain` as a module that is called just as a stack is."""

    def __init__(self, pairs: Sequence[Pair], merge: str | None = "mean") -> None:
        super().__init__()
        self.pairs = list(pairs)
        self.branches = nn.ModuleList(b for pair in pairs for b in pair if isinstance(b, nn.Module))
        self.merge = merge

    def run(self, x: Tensor | Sequence[Tensor], *, hidden: Sequence[int] = (), **context: Any) -> Result:
        return plain(self.pairs, x, hidden=hidden, **context)

    def forward(self, x: Tensor | Sequence[Tensor], **context: Any) -> Any:
        result = self.run(x, **context)
        merged = tuple(result) if self.merge is None else (result[0] + result[1]) / 2
        return merged if result.aux is None else (merged, result.aux)


def twins(
    branch: Callable[[], Callable[..., Any]] = Mlp, depth: int = 3, memory: str = "reverse", **options: Any
) -> tuple[rg.ReversibleSequence, Plain]:
    """A stack of `depth` blocks of two fresh branches each, and the plain loop over copies of them."""
    torch.manual_seed(0)
    return twins_of([(branch(), branch()) for _ in range(depth)], memory, **options)


def twins_of(
    pairs: Sequence[Pair], memory: str = "reverse", *, merge: str | None = "mean", aux: Sequence[Any] = ()
) -> tuple[rg.ReversibleSequence, Plain]:
    """A stack of these pairs of branches, and the plain loop over a copy of them (with the same ties)."""
    reference = Plain(copy.deepcopy(list(pairs)), merge)
    blocks = [rg.two_stream(f, g, aux=aux) for f, g in pairs]
    return rg.ReversibleSequence(blocks, merge=merge, memory=memory_of(memory, len(pairs))), reference


def sample(*shape: int, seed: int = 1, grad: bool = True, dtype: torch.dtype = torch.float64) -> Tensor:
    """A fresh tensor, the same one each time."""
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return values.to(dtype).requires_grad_(grad)


def seed_all(seed: int = 5) -> None:
    """Start every global generator anew."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def agree(stack: nn.Module, reference: nn.Module, scenario: Callable[[Any], Any], *, tolerance: float = TIGHT) -> None:
    """The scenario gives the same on both: what it returns, gradients, buffers, and the generators' states."""
    ours, theirs = observe(stack, scenario), observe(reference, scenario)
    assert len(ours) == len(theirs)
    for (name, got), (_, expected) in zip(ours, theirs, strict=True):
        assert_close(got, expected, tolerance, name)


def observe(model: nn.Module, scenario: Callable[[Any], Any]) -> list[tuple[str, Any]]:
    """What is to be seen of a model after a scenario, each with a name."""
    seed_all()
    leaves, _ = torch.utils._pytree.tree_flatten(scenario(model))
    seen = [(f"result {i}", value) for i, value in enumerate(leaves)]
    seen += [(f"gradient of parameter {i}", p.grad) for i, p in enumerate(model.parameters())]
    seen += [(f"buffer {i}", b) for i, b in enumerate(model.buffers())]
    seen.append(("the state of torch's generator", torch.get_rng_state()))
    seen.append(("the state of Python's generator", hash(random.getstate())))
    seen.append(("the state of NumPy's generator", numpy.random.get_state()[1].tobytes()))
    return seen


def assert_close(got: Any, expected: Any, tolerance: float = TIGHT, name: str = "value") -> None:
    """Equal to a relative error, measured against the largest entry; what is not a float must be equal."""
    if not isinstance(expected, Tensor):
        assert got == expected, f"{name}: {got!r} for {expected!r}"
        return
    assert isinstance(got, Tensor), f"{name}: {got!r} for a tensor"
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype), f"{name}: {got.shape} for {expected.shape}"
    assert got.requires_grad == expected.requires_grad, f"{name}: requires_grad={got.requires_grad}"
    if not expected.numel():
        return
    if not expected.is_floating_point():
        assert torch.equal(got, expected), f"{name} differs"
        return
    got, expected = got.detach().double(), expected.detach().double()
    scale = expected.abs().max().item()
    error = (got - expected).abs().max().item()
    assert error <= tolerance * scale, f"{name}: off by {error:.3g}, where the largest entry is {scale:.3g}"


def all_close(got: Sequence[Any], expected: Sequence[Any], tolerance: float = TIGHT) -> None:
    """`assert_close` for each of two sequences of the same length."""
    assert len(got) == len(expected)
    for i, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert_close(one, other, tolerance, f"entry {i}")


def in_threads(work: Callable[[int], None], count: int) -> None:
    """Run `work(0)`, `work(1)`, … at once, and raise what any of them raised."""
    start, errors = threading.Barrier(count), []

    def run(i: int) -> None:
        start.wait()
        try:
            work(i)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def loss_of(y: Tensor) -> Tensor:
    """A loss that is no sum of squares, so that no gradient is zero by accident."""
    return (y.sin() * y).sum()


def train(model: Any, steps: int = 3) -> list[Any]:
    """A few steps of training: outputs and gradients of the input, with the gradients of parameters added up."""
    seen: list[Any] = []
    for step in range(steps):
        x = sample(5, 6, seed=step)
        y = model(x)
        loss_of(y).backward()
        seen += [y, x.grad]
    return seen


class Means(nn.Module):
    """Moves a buffer towards its input, then uses it: the value after the update enters the output."""

    how = "edit"

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()
        self.register_buffer("means", torch.ones(6).double())

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.how == "edit":
                self.means.mul_(0.5).add_(x.mean(0), alpha=0.5)
            elif self.how == "reassign":
                self.means = 0.5 * self.means + 0.5 * x.mean(0)
            elif self.how == "edit through .data":
                self.means.data.mul_(0.5).add_(x.mean(0), alpha=0.5)
            elif self.how == "batch_norm":
                torch.nn.functional.batch_norm(x, self.means, torch.ones(6).double(), training=True)
        return torch.tanh(self.linear(x) * self.means) + self.means


def stacked(branch: Any, depth: int = 3, **options: Any) -> rg.ReversibleSequence:
    """Two-stream blocks of a branch, in float64."""
    torch.manual_seed(0)
    return rg.ReversibleSequence([rg.two_stream(branch(), branch(), **options) for _ in range(depth)]).double()


def gradients(stack: Any, memory: Any, x: Tensor, between: Any = None, **context: Any) -> list[Any]:
    """The output and the gradients of a copy of the stack, to which something is done between forward and backward."""
    stack = copy.deepcopy(stack)
    x = x.detach().clone().requires_grad_()
    torch.manual_seed(3)
    y = stack(x, memory=memory, **context)
    parameters = list(stack.parameters())
    if between is not None:
        between(stack)
    loss_of(y).backward()
    return [y, x.grad, *(p.grad for p in parameters)]

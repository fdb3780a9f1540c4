"""torch's own lists of operators and modules (op_db, module_db) as branches, against plain autograd.

The lists are private to torch (`torch.testing._internal`): what is read of them is here. Each sample of an operator
becomes a branch that scales the sample by its stream and mixes the result into its update. Such a branch is the last
step of a block that is replayed, in two training calls: the second one is steady, and may stop early.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map

import retrograde as rg

MODES = ("reverse", "checkpoint", "selective", "offload", "anchored")
TOLERANCE = 1e-9

Case = tuple[str, Callable[[], nn.Module]]
"""The name of a case, and what makes its branch, the same one each time."""


class Listed(nn.Module):
    """Runs something on tensors that are scaled by the stream, and mixes all that comes out into the update.

    If it `ends_in_it`, nothing after it saves a tensor, so that a replay that stops early stops there.
    """

    ends_in_it = False

    def __init__(self, run: Any, given: tuple[Any, ...]) -> None:
        super().__init__()
        self.run = run
        if isinstance(run, nn.Module):
            self.module = run
        leaves, self._spec = tree_flatten(given)
        self._others = [None if _is_differentiable(leaf) else leaf for leaf in leaves]
        self.tensors = nn.ParameterDict(
            {str(i): nn.Parameter(leaf.detach()) for i, leaf in enumerate(leaves) if _is_differentiable(leaf)}
        )

    def forward(self, x: Tensor) -> Tensor:
        factor = 1 + 1e-3 * torch.tanh(x.mean())
        leaves = list(self._others)
        for place, tensor in self.tensors.items():
            leaves[int(place)] = tensor * factor.to(tensor.dtype)
        given = torch.utils._pytree.tree_unflatten(leaves, self._spec)
        before = torch.tanh(x)
        returned = self.run(*given[0], **given[1])
        if self.ends_in_it:
            return before + _spread(tree_flatten(returned)[0])
        return before * (1 + sum(map(_mixed, tree_flatten(returned)[0]), torch.zeros((), dtype=x.dtype)))


def _is_differentiable(leaf: Any) -> bool:
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided or leaf.is_nested:
        return False
    return leaf.requires_grad and (leaf.is_floating_point() or leaf.is_complex())


def _mixed(value: Any) -> Tensor:
    """A number of order 1 in which every entry of a result has its own part, and so its own gradient."""
    if not isinstance(value, Tensor) or not value.numel():
        return torch.zeros((), dtype=torch.float64)
    value = value.to_dense() if value.layout is not torch.strided else value
    value = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    flat = value.reshape(-1).to(torch.float64)
    total = (flat * torch.linspace(0.5, 1.5, flat.numel(), dtype=torch.float64)).sum()
    return total / (1 + total.detach().abs())


def _spread(values: list[Any]) -> Tensor:
    """An update of some entries of the first result, by operators that save nothing."""
    for value in values:
        if isinstance(value, Tensor) and value.dtype == torch.float64 and value.numel():
            flat = value.reshape(-1)
            return flat[:12].view(3, 4) if len(flat) >= 12 else flat[0].expand(3, 4)
    return torch.zeros(3, 4, dtype=torch.float64)


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def operators(limit: int | None) -> Iterator[tuple[str, Iterator[Case]]]:
    """All differentiable operators with their samples, at most `limit` of each, spread over the list."""
    from torch.testing._internal.common_methods_invocations import op_db

    for op in op_db:
        if op.supports_autograd and torch.float64 in op.supported_backward_dtypes("cpu"):
            yield _full_name(op), _operator_cases(op, limit)


def _full_name(op: Any) -> str:
    return f"{op.name}.{op.variant_test_name}" if op.variant_test_name else str(op.name)


def _operator_cases(op: Any, limit: int | None) -> Iterator[Case]:
    random.seed(0)
    torch.manual_seed(0)
    samples = list(islice(op.sample_inputs("cpu", torch.float64, requires_grad=True), 1 if limit == 1 else None))
    step = 1 if limit is None else max(1, -(-len(samples) // limit))
    for i in range(0, len(samples), step):
        sample = samples[i]
        given = ((sample.input, *sample.args), sample.kwargs)
        yield f"{_full_name(op)} {i}", lambda op=op, given=given: Listed(op.op, given)
        inplace = op.inplace_variant
        if inplace is not None and i == 0 and not sample.broadcasts_input:
            run = _InPlace(inplace)
            yield f"{_full_name(op)} {i} in place", lambda run=run, given=given: Listed(run, given)


class _InPlace:
    """An operator that edits its first argument."""

    def __init__(self, operator: Any) -> None:
        self._operator = operator

    def __call__(self, first: Any, *args: Any, **kwargs: Any) -> Any:
        return self._operator(tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, first), *args, **kwargs)


def modules(limit: int | None) -> Iterator[tuple[str, Iterator[Case]]]:
    """All modules with their inputs, in training and in evaluation."""
    from torch.testing._internal.common_modules import module_db

    for info in module_db:
        yield info.name, _module_cases(info, limit)


def _module_cases(info: Any, limit: int | None) -> Iterator[Case]:
    for training in (True, False) if info.train_and_eval_differ else (True,):
        random.seed(0)
        torch.manual_seed(0)
        inputs = info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=True, training=training)
        step = 1 if limit is None else max(1, -(-len(inputs) // limit))
        for i in range(0, len(inputs), step):
            yield f"{info.name} {i}{'' if training else ' eval'}", _module_maker(info, inputs[i], training)


def _module_maker(info: Any, given: Any, training: bool) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        torch.manual_seed(0)
        module = info.module_cls(*given.constructor_input.args, **given.constructor_input.kwargs)
        module = module.double().train(training)
        return Listed(module, (given.forward_input.args, given.forward_input.kwargs))

    return make


def check(make: Callable[[], nn.Module]) -> str | None:
    """What is wrong with a case; None if nothing is."""

    def make_last() -> nn.Module:
        branch = make()
        branch.ends_in_it = True  # type: ignore[assignment]
        return branch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        wrong = _compared(make, MODES)
        if wrong is None:
            wrong = _compared(make_last, ("checkpoint",))  # large results drown in a stream that is inverted
            return None if wrong is None or wrong.startswith("plain autograd") else f"as the last operator, {wrong}"
    return wrong


def _compared(make: Callable[[], nn.Module], modes: tuple[str, ...]) -> str | None:
    try:
        expected = _trained(make, "plain")
    except Exception as error:
        return f"plain autograd: {_described(error)}"
    if not all(torch.isfinite(t).all() for t in expected if t.is_floating_point()):
        return "plain autograd: not finite"
    for mode in modes:
        try:
            wrong = _difference(_trained(make, mode), expected)
        except Exception as error:
            wrong = _described(error)
        if wrong is not None:
            return f"{mode}: {wrong}"
    return None


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error) or ' ').splitlines()[0]}"


def _trained(make: Callable[[], nn.Module], mode: str) -> list[Tensor]:
    """Outputs, gradients, buffers and the generator after two training calls."""
    torch.manual_seed(0)
    pairs = [(Tiny(), make()), (Tiny(), Tiny())]
    memory: Any = rg.Plan(("reverse", "reverse"), anchors={1}) if mode == "anchored" else mode
    if mode == "plain":
        branches: Any = nn.ModuleList(branch for pair in pairs for branch in pair)
    else:
        blocks = [rg.two_stream(f, g, save_ops="products") for f, g in pairs]
        branches = rg.ReversibleSequence(blocks, merge=None, memory=memory)
    torch.manual_seed(1)
    seen: list[Tensor] = []
    for step in range(2):
        x = torch.linspace(-1, 1 + step, 12, dtype=torch.float64).view(3, 4).requires_grad_()
        a, b = (x, x)
        if mode == "plain":
            for f, g in pairs:
                a = a + f(b)
                b = b + g(a)
        else:
            a, b = branches((x, x))
        (a.sin() * b).sum().backward()
        seen += [a.detach(), b.detach(), x.grad]
    seen += [p.grad for p in branches.parameters() if p.grad is not None]
    return [*seen, *(b.detach().clone() for b in branches.buffers()), torch.get_rng_state()]


def _difference(got: list[Tensor], expected: list[Tensor]) -> str | None:
    if len(got) != len(expected):
        return f"{len(got)} tensors for {len(expected)}"
    for i, (one, other) in enumerate(zip(got, expected, strict=True)):
        if one.shape != other.shape or one.dtype != other.dtype:
            return f"tensor {i} is {tuple(one.shape)} {one.dtype} for {tuple(other.shape)} {other.dtype}"
        if not other.is_floating_point() and not other.is_complex():
            if not torch.equal(one, other):
                return f"tensor {i} differs"
        elif other.numel():
            error = float((one - other).abs().max() / (other.abs().max() + 1e-300))
            if not error <= TOLERANCE and float((one - other).abs().max()) > 1e-14:
                return f"tensor {i} is off by {error:.2g}"
    return None

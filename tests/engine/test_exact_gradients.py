"""Streams on a grid: gradients are, to the bit, those of stored activations."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

import retrograde as rg
from bits import (
    BRANCHES,
    CrossAttention,
    as_stored,
    assert_same_bits,
    differing,
    digest,
    loss_of,
    mlp,
    observed,
    stack_of,
    threads,
)

PRECISIONS: dict[str, dict[str, Any]] = {"float32": {}, "autocast": {"autocast": True}, "bfloat16 modules": {}}


def built(branch: str, precision: str, depth: int = 6) -> tuple[rg.ReversibleSequence, Tensor]:
    """A stack and its input; modules and input are of bfloat16 where the precision says so."""
    x = torch.randn(4, 5, 16)
    if precision != "bfloat16 modules":
        return stack_of(BRANCHES[branch], depth), x
    low = {"compute": torch.bfloat16, "stream_dtype": torch.float32}
    return stack_of(lambda: BRANCHES[branch]().bfloat16(), depth, **low), x.bfloat16()


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("branch", BRANCHES)
def test_gradients_are_those_of_stored_activations_to_the_bit(branch: str, precision: str, count: int) -> None:
    stack, x = built(branch, precision)
    with threads(count):
        as_stored(stack, x, **PRECISIONS[precision])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_without_a_grid_the_bits_differ(precision: str) -> None:
    """Else the comparison above would show nothing."""
    stack, x = built("mlp", precision, depth=24)
    stack.exact = False
    with torch.no_grad():
        for p in stack.parameters():
            p.mul_(3)
    assert differing(stack, x.repeat(8, 1, 1), **PRECISIONS[precision]) > 10


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_thousand_blocks_keep_every_bit(precision: str) -> None:
    low = precision == "bfloat16 modules"

    def branch() -> nn.Module:
        linear = nn.Linear(4, 4, dtype=torch.bfloat16 if low else torch.float32)
        return nn.Sequential(linear, nn.Tanh())

    pairs = [(branch(), branch()) for _ in range(20)]  # few, so that the test spends its time on depth
    compute = torch.bfloat16 if low else None
    blocks = [rg.two_stream(*pairs[i % 20], compute=compute) for i in range(1000)]
    stack = rg.ReversibleSequence(blocks, exact=True, grid_bits=14, stream_dtype=torch.float32)
    x = torch.randn(3, 4, dtype=torch.bfloat16 if low else torch.float32)
    as_stored(stack, x, **PRECISIONS[precision])


def test_two_sizes_at_which_two_threads_share_the_work() -> None:
    for shape in ((8, 160, 32), (3, 67, 32)):  # above and below what torch splits between threads
        with threads(2):
            as_stored(stack_of(lambda: mlp(32, dropout=0.1), 3), torch.randn(shape))


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
@pytest.mark.parametrize("memory", ["reverse", "checkpoint"])
def test_context_gets_the_same_gradient(memory: str, autocast: bool) -> None:
    stack = rg.ReversibleSequence([rg.two_stream(CrossAttention(), mlp()) for _ in range(5)], exact=True)
    encoded, mask = torch.randn(4, 7, 16), torch.rand(4, 7) > 0.6
    mask[:, 0] = False
    as_stored(stack, torch.randn(4, 5, 16), memory=memory, autocast=autocast, encoded=encoded, mask=mask)


PLANS: dict[str, Any] = {
    "checkpoint": "checkpoint",
    "mixed": ["reverse", "reverse", "checkpoint", "store", "reverse", "checkpoint"],
    "anchored": rg.Plan(("reverse",) * 6, anchors={2, 4}),
}


@pytest.mark.parametrize("plan", PLANS)
def test_every_plan_gives_the_same_bits(plan: str) -> None:
    as_stored(stack_of(BRANCHES["attention"]), torch.randn(4, 5, 16), memory=PLANS[plan])


def test_tied_branches_get_the_same_sum() -> None:
    f, g = mlp(dropout=0.2), mlp()
    stack = rg.ReversibleSequence([rg.two_stream(f, g) for _ in range(6)], exact=True)
    assert len(list(stack.parameters())) == 8
    as_stored(stack, torch.randn(4, 16))


def test_dropped_layers_leave_the_grid_as_it_is() -> None:
    stack = stack_of(lambda: mlp(dropout=0.2), 8, layer_drop=0.4)
    as_stored(stack, torch.randn(4, 16))
    seen = observed(stack, torch.randn(4, 16))
    assert sum(value is None for value in seen.values()), "nothing was dropped"


class WithLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branch = mlp()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        update = self.branch(x)
        return update, update.square().mean()


def test_auxiliary_losses_give_the_same_bits() -> None:
    stack = rg.ReversibleSequence([rg.two_stream(WithLoss(), mlp(), aux="f") for _ in range(6)], exact=True)
    as_stored(stack, torch.randn(4, 16), loss=lambda result: loss_of(result[0]) + result[1])


@pytest.mark.parametrize("dim", [0, 1, -1])
def test_chunks_of_an_input_give_the_same_bits(dim: int) -> None:
    """The second chunk of odd rows begins at an address that no fresh tensor has."""
    width = 16 if dim != -1 else 32
    stack = stack_of(split="chunk", merge="concat", dim=dim)
    as_stored(stack, torch.randn(6, 10, width + 1)[..., 1:] if dim else torch.randn(6, 3, width))


@pytest.mark.parametrize("layout", ["misaligned", "transposed", "expanded"])
def test_the_layout_of_the_input_changes_no_bit(layout: str) -> None:
    inputs = {
        "misaligned": torch.randn(4 * 5 * 16 + 3)[3:].view(4, 5, 16),
        "transposed": torch.randn(16, 5, 4).transpose(0, 2),
        "expanded": torch.randn(1, 1, 16).expand(4, 5, 16),
    }
    as_stored(stack_of(BRANCHES["attention"]), inputs[layout])


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_images_in_any_memory_format_give_the_same_bits(layout: torch.memory_format) -> None:
    def branch() -> nn.Module:
        return nn.Sequential(nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))

    stack = stack_of(branch).to(memory_format=layout)  # type: ignore[call-overload]
    as_stored(stack, torch.randn(3, 8, 7, 5).to(memory_format=layout))


def test_a_transition_leaves_the_grid_and_the_next_block_returns_to_it() -> None:
    first, second = [[rg.two_stream(mlp(w), mlp(w)) for _ in range(4)] for w in (16, 8)]
    middle = rg.transition(nn.Linear(16, 8), nn.Linear(16, 8))
    memory = ["reverse"] * 4 + ["checkpoint"] + ["reverse"] * 4
    stack = rg.ReversibleSequence([*first, middle, *second], memory=memory, exact=True)
    as_stored(stack, torch.randn(4, 16), memory=memory)


def test_a_block_that_replaces_one_of_its_streams_leaves_the_grid() -> None:
    half = rg.Block(rg.Step(mlp(), 0, 1), rg.Step(mlp(), 1, 1, coupling=rg.couplings.Replace()))
    memory = ["reverse", "checkpoint", *["reverse"] * 5]
    blocks = [rg.two_stream(mlp(), mlp()) for _ in range(6)]
    as_stored(
        rg.ReversibleSequence([blocks[0], half, *blocks[1:]], memory=memory, exact=True),
        torch.randn(4, 16),
        memory=memory,
    )


OTHER_BLOCKS = {
    "momentum": lambda: rg.momentum(mlp(), gamma=0.9),
    "midpoint": lambda: rg.midpoint(mlp(), step=0.25),
    "grouped": lambda: rg.grouped(mlp(), mlp(), mlp()),
    "scaled": lambda: rg.two_stream(mlp(), mlp(), coupling=rg.couplings.Scaled(0.1, 1.0)),
}


@pytest.mark.parametrize("kind", OTHER_BLOCKS)
def test_every_kind_of_block_has_an_exact_form(kind: str) -> None:
    stack = rg.ReversibleSequence([OTHER_BLOCKS[kind]() for _ in range(20)], exact=True)
    assert stack.exact
    as_stored(stack, torch.randn(4, 16))
    as_stored(stack, torch.randn(4, 16), autocast=True)


def test_a_stream_that_the_first_blocks_only_read_is_on_the_grid_as_well() -> None:
    blocks = [rg.Block(rg.Step(mlp(), 0, 1)) for _ in range(3)] + [rg.Block(rg.Step(mlp(), 1, 0)) for _ in range(3)]
    as_stored(rg.ReversibleSequence(blocks, exact=True), torch.randn(4, 16))


class Angle(nn.Module):
    """Tells 0.0 from -0.0, as a hash does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * torch.atan2(x, -torch.ones(4))


def test_an_entry_of_minus_zero_is_recomputed_with_its_sign() -> None:
    stack = rg.ReversibleSequence([rg.two_stream(Angle(), mlp(4)) for _ in range(2)], exact=True)
    as_stored(stack, torch.tensor([[-1e-9, 0.0, -0.0, 1e-9]]))


def test_a_loss_on_hidden_states_gives_the_same_bits() -> None:
    stack, x = stack_of(BRANCHES["attention"]), torch.randn(4, 5, 16)

    def gradients(memory: str) -> list[Tensor]:
        torch.manual_seed(1)
        outputs = stack.run(x, memory=memory, hidden=[1, 3])  # type: ignore[arg-type]
        loss = sum(loss_of(s) for state in (outputs, *outputs.hidden.values()) for s in state)
        return list(torch.autograd.grad(loss, list(stack.parameters())))

    assert list(map(digest, gradients("reverse"))) == list(map(digest, gradients("store")))


def test_second_derivatives_are_the_same_to_the_bit() -> None:
    stack, x = stack_of(depth=4), torch.randn(4, 16, requires_grad=True)

    def gradients(memory: str) -> list[Tensor]:
        (first,) = torch.autograd.grad(loss_of(stack(x, memory=memory)), x, create_graph=True)  # type: ignore[arg-type]
        return [first, *torch.autograd.grad(first.square().sum(), [x, *stack.parameters()], allow_unused=True)]

    found, wanted = gradients("reverse"), gradients("store")
    assert wanted[1].any()
    assert [g if g is None else digest(g) for g in found] == [g if g is None else digest(g) for g in wanted]


def test_a_retained_graph_gives_the_same_bits_twice() -> None:
    stack, x = stack_of(lambda: mlp(dropout=0.2)), torch.randn(4, 16)
    loss = loss_of(stack(x))
    first = torch.autograd.grad(loss, list(stack.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(stack.parameters()))
    assert list(map(digest, first)) == list(map(digest, second))


def test_gradients_pass_the_rounding_as_if_it_were_not_there() -> None:
    """In float64 the grid is fine enough that plain autograd, without a grid, is near."""
    stack = stack_of(lambda: mlp().double())
    x = torch.randn(4, 16, dtype=torch.float64)
    found = observed(stack, x)
    ordinary = copy.deepcopy(stack)
    ordinary.exact = False
    for name, wanted in observed(ordinary, x, memory="store").items():
        torch.testing.assert_close(found[name], wanted, rtol=1e-8, atol=1e-9)


def test_finite_differences_cannot_see_a_rounded_function() -> None:
    """Why no gradcheck is here: the function is made of stairs, and its gradient is that of the slope they follow."""
    stack, x = stack_of(depth=1), torch.full((1, 16), 0.25)
    step = 2.0**-19  # an eighth of the grid's spacing
    assert torch.equal(stack(x + step), stack(x))
    assert torch.autograd.functional.jacobian(stack, x).any()


def test_functional_call_replays_with_the_parameters_that_it_was_given() -> None:
    stack, x = stack_of(), torch.randn(4, 16)
    given = {name: (1.5 * p).detach().requires_grad_() for name, p in stack.named_parameters()}

    def gradients(memory: str) -> list[str]:
        loss = loss_of(functional_call(stack, given, (x,), {"memory": memory}))
        return list(map(digest, torch.autograd.grad(loss, list(given.values()))))

    assert gradients("reverse") == gradients("store")


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_forward_mode_and_torch_func_give_the_derivatives_of_the_backward_pass() -> None:
    stack, x, t = stack_of(lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh())), torch.randn(4, 16), torch.randn(4, 16)
    (wanted,) = torch.autograd.grad(loss_of(stack(y := x.clone().requires_grad_())), y)
    torch.testing.assert_close(torch.func.grad(lambda x: loss_of(stack(x)))(x), wanted)
    _, slope = torch.func.jvp(lambda x: loss_of(stack(x)), (x,), (t,))
    torch.testing.assert_close(slope, (wanted * t).sum())


def test_vmap_runs_an_exact_stack_on_each_entry() -> None:
    stack, x = stack_of(lambda: nn.Sequential(nn.Linear(16, 16), nn.Tanh())), torch.randn(3, 4, 16)
    torch.testing.assert_close(torch.vmap(stack)(x), torch.stack([stack(entry) for entry in x]), rtol=0, atol=2**-15)
    each = torch.vmap(torch.func.grad(lambda entry: loss_of(stack(entry))))(x)
    wanted = torch.stack([torch.func.grad(lambda entry: loss_of(stack(entry)))(entry) for entry in x])
    torch.testing.assert_close(each, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_compiled_branches_give_the_bits_that_they_give_stored() -> None:
    branch = torch.compile(nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()))
    stack = rg.ReversibleSequence([rg.two_stream(branch, branch) for _ in range(4)], exact=True)
    x = torch.randn(4, 16)

    def gradients(memory: str) -> list[str]:
        loss = loss_of(stack(x, memory=memory))  # type: ignore[arg-type]
        return list(map(digest, torch.autograd.grad(loss, list(stack.parameters()))))

    assert gradients("reverse") == gradients("store")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")
def test_an_exact_stack_is_exported_for_inference() -> None:
    stack, x = stack_of(depth=2).eval(), torch.randn(4, 16)
    with torch.no_grad():
        exported = torch.export.export(stack, (x,)).module()
        torch.testing.assert_close(exported(x), stack(x), rtol=0, atol=2**-15)


def test_copies_and_saved_stacks_stay_exact() -> None:
    stack, x = stack_of(exact=True, grid_bits=14), torch.randn(4, 16)
    wanted = observed(stack, x)
    assert_same_bits(observed(copy.deepcopy(stack), x), wanted)
    assert_same_bits(observed(pickle.loads(pickle.dumps(stack)), x), wanted)
    fresh = stack_of(exact=True, grid_bits=14)
    fresh.load_state_dict(stack.state_dict())
    assert_same_bits(observed(fresh, x), wanted)


def test_branches_of_another_dtype_are_cast_on_their_way_in_and_out() -> None:
    seen: list[torch.dtype] = []

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(x.dtype)
            return F.linear(x, self.weight)

    stack = stack_of(
        lambda: Watched(16, 16, dtype=torch.bfloat16), 2, compute=torch.bfloat16, stream_dtype=torch.float32
    )
    x = torch.randn(4, 16, dtype=torch.bfloat16, requires_grad=True)
    y = stack(x)
    loss_of(y).backward()
    assert set(seen) == {y.dtype, x.grad.dtype} == {torch.bfloat16}
    assert {s.dtype for s in stack.run(x)} == {torch.float32}

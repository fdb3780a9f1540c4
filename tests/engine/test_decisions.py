"""decide: what a branch chose in its first run, its replay takes over."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from bits import as_stored, digest, loss_of, mlp
from retrograde.engine.decisions import counting_flips
from retrograde.measure import MemoryTracker
from stacks import in_threads

WIDTH, EXPERTS = 8, 4


class Routed(nn.Module):
    """Sends each row to an expert that the last digits of the row decide on, so that rounding is sure to tip some."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.experts = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 4)
        self.forced: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x.sum(-1) * 2.0**20).round().long() % EXPERTS
        if self.how == "decide":
            chosen = rg.decide(chosen)
        elif self.how == "forced" and rg.is_replaying():
            chosen = self.forced.pop()
        elif self.how == "forced":
            self.forced.append(chosen)
        return torch.einsum("...w,...wv->...v", x, self.experts[chosen]).tanh()


def routed(how: str, depth: int = 12, **options: Any) -> rg.ReversibleSequence:
    torch.manual_seed(0)
    return rg.ReversibleSequence([rg.two_stream(Routed(how), mlp(WIDTH)) for _ in range(depth)], **options)


def gradients(stack: rg.ReversibleSequence, x: Tensor, memory: Any = None) -> list[Tensor]:
    return list(torch.autograd.grad(loss_of(stack(x, memory=memory)), list(stack.parameters())))


def distance(found: list[Tensor], wanted: list[Tensor]) -> float:
    difference = torch.cat([(a - b).flatten() for a, b in zip(found, wanted, strict=True)])
    return float(difference.norm() / torch.cat([b.flatten() for b in wanted]).norm())


def sample() -> Tensor:
    return torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(1))


def test_rounding_tips_decisions_and_decide_holds_them() -> None:
    x = sample()
    free, held = routed("free"), routed("decide")
    wanted = gradients(held, x, "store")
    with counting_flips() as flips:
        found = gradients(held, x)
    assert flips.compared == 12 * 32
    assert flips.rate > 0.05, "rounding must tip decisions, or this test sees nothing"
    assert distance(gradients(free, x), wanted) > 0.05
    assert distance(found, wanted) < 1e-4


def test_decide_gives_the_gradients_of_decisions_that_were_forced_by_hand() -> None:
    x = sample()
    assert list(map(digest, gradients(routed("decide"), x))) == list(map(digest, gradients(routed("forced"), x)))


def test_with_exact_streams_no_decision_flips() -> None:
    stack = routed("decide", exact=True)
    with counting_flips() as flips:
        as_stored(stack, sample())
    assert flips.compared > 0
    assert flips.flipped == 0


@pytest.mark.parametrize("memory", ["checkpoint", "store", ["reverse", "checkpoint", "store"] * 4])
def test_decisions_are_reused_in_every_memory_mode(memory: Any) -> None:
    stack, x = routed("decide"), sample()
    assert distance(gradients(stack, x, memory), gradients(stack, x, "store")) < 1e-4


def test_a_retained_graph_decides_the_same_twice() -> None:
    stack = routed("decide")
    loss = loss_of(stack(sample()))
    first = torch.autograd.grad(loss, list(stack.parameters()), retain_graph=True)
    second = torch.autograd.grad(loss, list(stack.parameters()))
    assert list(map(digest, first)) == list(map(digest, second))


def test_several_decisions_of_a_branch_come_back_in_order() -> None:
    seen: dict[bool, list[list[str]]] = {False: [], True: []}

    def branch(x: Tensor) -> Tensor:
        chosen = [rg.decide((x * 2.0**scale).sum(-1).round() % 2 == 0) for scale in (18, 19, 20)]
        seen[rg.is_replaying()].append(list(map(digest, chosen)))
        return x.tanh() * chosen[0][..., None] + x.sin() * chosen[1][..., None]

    stack = rg.ReversibleSequence([rg.two_stream(branch, torch.tanh) for _ in range(3)])
    loss_of(stack(sample().requires_grad_())).backward()
    assert len(seen[False]) == 3
    assert seen[True] == seen[False][::-1]


def test_decisions_inside_nested_stacks_are_reused() -> None:
    class Inner(nn.Module):
        def __init__(self, how: str) -> None:
            super().__init__()
            self.stack = routed(how, depth=2)

        def forward(self, x: Tensor) -> Tensor:
            return 0.5 * self.stack(x)

    def outer(how: str) -> rg.ReversibleSequence:
        torch.manual_seed(0)
        return rg.ReversibleSequence([rg.two_stream(Inner(how), mlp(WIDTH)) for _ in range(5)])

    def stored(stack: rg.ReversibleSequence) -> list[Tensor]:
        for block in stack.blocks:
            block.steps[0].branch.stack.memory = "store"  # type: ignore[union-attr, index]
        return gradients(stack, sample(), "store")

    wanted = stored(outer("decide"))
    assert distance(gradients(outer("free"), sample()), wanted) > 0.01
    assert distance(gradients(outer("decide"), sample()), wanted) < 1e-4


def test_threads_keep_their_own_decisions() -> None:
    stack = routed("decide")
    inputs = [torch.randn(32, WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    wanted = [gradients(stack, x, "store") for x in inputs]
    errors = [1.0] * 3

    def work(i: int) -> None:
        errors[i] = distance(gradients(stack, inputs[i]), wanted[i])

    in_threads(work, 3)
    assert max(errors) < 1e-4


def test_outside_of_a_stack_a_decision_is_the_value_itself() -> None:
    value = torch.arange(3)
    assert rg.decide(value) is value
    stack = routed("decide")
    with torch.no_grad():
        stack(sample())


def one(branch: Any) -> Tensor:
    """The loss of a stack in which a branch is replayed."""
    stack = rg.ReversibleSequence([rg.two_stream(branch, torch.tanh) for _ in range(2)])
    return loss_of(stack(sample().requires_grad_()))


def test_a_differentiable_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match=r"not a differentiable tensor of torch\.float32: decide on the indices"):
        one(lambda x: rg.decide(x.softmax(-1)) * x)


def test_deciding_more_or_less_often_in_a_replay_is_an_error() -> None:
    def more(x: Tensor) -> Tensor:
        chosen = [rg.decide(x.argmax(-1)) for _ in range(2 + rg.is_replaying())]
        return x.tanh() * chosen[0][:, None]

    def less(x: Tensor) -> Tensor:
        chosen = [rg.decide(x.argmax(-1)) for _ in range(2 - rg.is_replaying())]
        return x.tanh() * chosen[0][:, None]

    with pytest.raises(RuntimeError, match="more often in a replay than the 2 times"):
        one(more).backward()
    with pytest.raises(RuntimeError, match=r"1 times? in a replay"):
        one(less).backward()


def test_a_decision_of_another_shape_is_an_error() -> None:
    def branch(x: Tensor) -> Tensor:
        rows = rg.decide(torch.arange(3 + rg.is_replaying()))
        return x.tanh() * len(rows)

    with pytest.raises(RuntimeError, match="shape does not depend on the decision"):
        one(branch).backward()


def test_a_decision_that_was_edited_is_an_error() -> None:
    seen = SimpleNamespace(first=None)

    def branch(x: Tensor) -> Tensor:
        chosen = rg.decide(x.argmax(-1))
        seen.first = chosen if seen.first is None else seen.first
        return x.tanh() * chosen[:, None].clone()

    loss = one(branch)
    seen.first.add_(1)
    with pytest.raises(RuntimeError, match="edited in place before the backward pass"):
        loss.backward()


def test_decisions_cost_their_bytes_and_go_with_the_graph() -> None:
    held = {}
    for how in ("free", "decide"):
        stack, x = routed(how), sample()
        gradients(stack, x)
        with MemoryTracker(ignore=[stack, x]) as tracker:
            loss = loss_of(stack(x))
            held[how] = tracker.live
            del loss
            assert tracker.live == 0
    assert held["decide"] - held["free"] == 12 * 32 * 8  # an index of 8 bytes for each row and block

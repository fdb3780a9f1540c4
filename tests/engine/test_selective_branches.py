"""Partial replay of branches that do more than multiply: what cannot be taken again is computed again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import retrograde as rg
from stacks import Mlp, all_close, gradients, loss_of, sample, stacked


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_results_that_a_branch_edits_are_not_reused(kind: Any) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.over = kind(6, 6, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.over(x)[0]

    stack = stacked(Recurrent, save_ops="products")
    all_close(gradients(stack, "selective", sample(2, 3, 6)), gradients(stack, "store", sample(2, 3, 6)))


def test_an_activation_in_place_may_follow_a_product_that_is_saved() -> None:
    stack = stacked(lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6)), save_ops="products")
    all_close(gradients(stack, "selective", sample(4, 6)), gradients(stack, "store", sample(4, 6)))


class ScaledProduct(nn.Module):
    """Edits the result of a product in place: of a 3-d input without a bias, it is a view that torch does not track."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(6, 6, bias=False), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x).mul_(2)))


class ScaledScores(nn.Module):
    """Edits the scores of attention in place, a batched product of 4-d tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(6, 12)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.project(x).unflatten(-1, (2, 2, 3)).permute(2, 0, 3, 1, 4)
        scores = (q @ k.mT).div_(2)
        return (scores.softmax(-1) @ k).transpose(1, 2).flatten(-2)


class SplitProduct(ScaledProduct):
    """Edits one part of a product, cut by an operator whose parts raise no version of the whole."""

    def forward(self, x: Tensor) -> Tensor:
        one, other = torch.unsafe_split(self.inner(x), 3, -1)
        return self.outer(torch.cat([one.mul_(2), other.sin()], -1))


@pytest.mark.parametrize("branch", [ScaledProduct, ScaledScores, SplitProduct])
def test_a_saved_product_that_is_edited_through_a_view_is_computed_again(branch: Any) -> None:
    stack = stacked(branch, save_ops="products")
    all_close(gradients(stack, "selective", sample(2, 3, 6)), gradients(stack, "store", sample(2, 3, 6)))


@pytest.mark.parametrize("retain", [False, True])
def test_a_first_run_that_looks_for_what_to_keep_is_replayed_with_the_same_kernels(retain: bool) -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer = nn.Linear(5, 5), nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            return self.outer(F.gelu(self.inner(x.mT))).mT

    for keeps in ("attention", "products"):
        stack, x = stacked(Mixing, save_ops=keeps), sample(2, 5, 6)
        loss = loss_of(stack(x, memory="selective"))
        if retain:
            loss.backward(retain_graph=True)
            x.grad = None
        loss.backward()
        all_close([x.grad], gradients(stack, "store", sample(2, 5, 6))[1:2])


def test_a_table_that_the_first_run_fills_is_filled_by_its_replay_too() -> None:
    class Tabled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.table = nn.Linear(6, 6, bias=False), None

        def forward(self, x: Tensor) -> Tensor:
            if self.table is None:
                self.table = torch.ones(4, 3).double() @ torch.ones(3, 6).double()
            return torch.tanh(self.inner(x) + self.table)

    stack = stacked(Tabled, save_ops="products")
    all_close(gradients(stack, "selective", sample(4, 6)), gradients(stack, "store", sample(4, 6)))


def test_results_that_drew_random_numbers_are_not_saved() -> None:
    class Drawing(Mlp):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) * torch.rand_like(x) + torch.randn_like(x) * x

    stack = stacked(Drawing, save_ops=[torch.ops.aten.rand_like.default])
    all_close(gradients(stack, "selective", sample(4, 6)), gradients(stack, "store", sample(4, 6)))


@pytest.mark.parametrize("calls", ["tied", "two"])
def test_casts_that_autocast_cached_may_run_in_a_selective_replay(calls: str) -> None:
    torch.manual_seed(0)
    blocks = [rg.two_stream(Mlp().float(), Mlp().float(), save_ops="products") for _ in range(3)]
    stack = rg.ReversibleSequence(blocks[:1] * 3 if calls == "tied" else blocks, exact=True)
    found = []
    for memory in ("selective", "store"):
        x = sample(4, 6, dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = stack(x, memory=memory) + (stack(x * 2, memory=memory) if calls == "two" else 0)
        y.square().sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)

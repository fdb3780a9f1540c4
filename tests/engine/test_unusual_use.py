"""What people do with modules that nobody had in mind: gradients are those of plain autograd, or an error says why."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from stacks import Mlp, agree, all_close, gradients, loss_of, sample, stacked, twins

MODES = ("reverse", "selective", "checkpoint", "offload")


@pytest.mark.parametrize("memory", MODES)
def test_a_branch_that_keeps_a_tensor_of_its_graph_keeps_that_of_one_call(memory: str) -> None:
    class Balanced(Mlp):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            update = super().forward(x)
            self.balance = update.square().mean()
            return update

    stack = stacked(Balanced)
    counts = []
    for _ in range(4):
        for _ in range(5):
            y = stack(sample(4, 6), memory=memory)
            (loss_of(y) + sum(m.balance for m in stack.modules() if isinstance(m, Balanced))).backward()
        del y
        gc.collect()
        counts.append(sum(issubclass(type(thing), Tensor) for thing in gc.get_objects()))
    assert counts[-1] == counts[1]


@pytest.mark.parametrize("memory", MODES)
def test_dropout_that_begins_after_a_stored_block_that_draws_is_replayed(memory: str) -> None:
    stack = stacked(lambda: Mlp(dropout=0.3))
    late = [m for block in list(stack.blocks)[1:] for m in block.modules() if isinstance(m, nn.Dropout)]
    plan = ["store", memory, memory]
    for dropout in late:
        dropout.p = 0.0
    for _ in range(3):
        loss_of(stack(sample(4, 6), memory=plan)).backward()
    stack.zero_grad()
    for dropout in late:
        dropout.p = 0.3
    found = []
    for chosen in (plan, "store"):
        torch.manual_seed(3)
        x = sample(4, 6)
        loss_of(stack(x, memory=chosen)).backward()
        found.append([x.grad])
    all_close(*found)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(6, 2, batch_first=True)

    def forward(self, x: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.attend(x, key, value, need_weights=False)[0]


@pytest.mark.parametrize("which", ["a context of its own", "the input"])
@pytest.mark.parametrize("memory", MODES)
def test_inputs_of_a_branch_that_are_one_tensor_are_one_in_the_replay(memory: str, which: str) -> None:
    stack, found = stacked(Attending), []
    for mode in (memory, "store"):
        stack.zero_grad()
        x = sample(2, 5, 6)
        other = x if which == "the input" else sample(2, 5, 6, seed=4)
        loss_of(stack(x, memory=mode, key=other, value=other)).backward()
        found.append([x.grad, other.grad, *(p.grad.clone() for p in stack.parameters())])
    all_close(*found)


@pytest.mark.parametrize("memory", MODES)
def test_sources_that_are_one_tensor_are_one_in_the_replay(memory: str) -> None:
    class Reading(Attending):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x, y, y)

    torch.manual_seed(0)
    steps = [(rg.Step(Reading(), 0, (1, 2)), rg.Step(Mlp(), 1, (0,)), rg.Step(Mlp(), 2, (1,))) for _ in range(2)]
    stack = rg.ReversibleSequence([rg.Block(*each) for each in steps]).double()
    all_close(gradients(stack, memory, sample(2, 5, 6)), gradients(stack, "store", sample(2, 5, 6)))


def give_a_bias(stack: Any) -> None:
    for module in stack.modules():
        if isinstance(module, nn.Linear) and module.bias is None:
            module.bias = nn.Parameter(torch.ones(module.out_features).double())


def exchange_recurrent_weights(stack: Any) -> None:
    for module in stack.modules():
        if isinstance(module, nn.GRU):
            module.weight_hh_l0 = nn.Parameter(2 * module.weight_hh_l0.detach())


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.over = nn.Linear(6, 6, bias=False), nn.GRU(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.over(torch.tanh(self.inner(x)))[0]


@pytest.mark.parametrize("between", [give_a_bias, exchange_recurrent_weights])
@pytest.mark.parametrize("memory", MODES)
def test_what_is_given_between_forward_and_backward_does_not_reach_the_replay(memory: str, between: Any) -> None:
    stack = stacked(Gated)
    x = sample(2, 3, 6)
    all_close(gradients(stack, memory, x, between), gradients(stack, "store", x, between))


def test_a_parameter_that_went_between_forward_and_backward_is_gone_afterwards() -> None:
    stack = stacked(Mlp)
    loss = loss_of(stack(sample(4, 6)))
    layer = stack.blocks[0].steps[0].branch.inner
    bias = layer.bias.detach()
    del layer.bias
    layer.register_buffer("bias", bias)
    loss.backward()
    assert list(layer._parameters) == ["weight"]


@pytest.mark.parametrize("memory", MODES)
def test_a_buffer_that_the_first_forward_registers_is_updated_once_a_call(memory: str) -> None:
    class Late(Mlp):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            update = super().forward(x)
            if "mean" in self._buffers:
                self.mean = (self.mean + update.detach().mean(0)) / 2
            else:
                self.register_buffer("mean", torch.zeros(6).double())
            return torch.tanh(update - self.mean)

    def scenario(model: Any) -> list[Tensor]:
        seen = []
        for call in range(3):
            x = sample(4, 6, seed=call)
            y = model(x)
            loss_of(y).backward()
            seen += [y, x.grad]
        return seen

    agree(*twins(Late, memory=memory), scenario)


def test_a_step_that_was_exchanged_runs() -> None:
    stack = stacked(Mlp)
    before = stack(sample(4, 6))
    stack.blocks[1].steps[0] = rg.Step(Mlp().double(), 0, (1,))
    recomputed = rg.ReversibleSequence([rg.Block(*block.steps) for block in stack.blocks])
    assert torch.equal(stack(sample(4, 6)), recomputed(sample(4, 6)))
    assert not torch.equal(stack(sample(4, 6)), before)


def test_a_block_that_was_added_later_is_refused_with_the_reason() -> None:
    stack = stacked(Mlp)
    stack.blocks.append(rg.two_stream(Mlp(), Mlp()))
    with pytest.raises(ValueError, match=r"4 blocks, a memory plan for 3 .* blocks were added"):
        stack(sample(4, 6))


def test_a_stack_that_was_cut_short_runs_what_is_left() -> None:
    stack = stacked(Mlp)
    stack.blocks = stack.blocks[:2]
    all_close(gradients(stack, None, sample(4, 6)), gradients(stack, "store", sample(4, 6)))


def test_a_first_call_that_fails_does_not_end_drift_control() -> None:
    torch.manual_seed(0)
    blocks = [rg.two_stream(Mlp(), Mlp(), coupling=rg.couplings.Scaled(keep=0.01)) for _ in range(6)]
    stack = rg.ReversibleSequence(blocks, max_drift=1e-12)
    with pytest.raises(RuntimeError):
        stack(sample(4, 5))
    stack(sample(4, 6))
    assert stack.memory.anchors


@pytest.mark.parametrize("memory", MODES)
def test_backward_in_inference_mode_gives_the_gradients(memory: str) -> None:
    stack, found = stacked(Mlp), []
    for mode in (memory, "store"):
        stack.zero_grad()
        x = sample(4, 6)
        loss = loss_of(stack(x, memory=mode))
        with torch.inference_mode():
            loss.backward()
        found.append([x.grad.clone(), *(p.grad.clone() for p in stack.parameters())])
    all_close(*found)


def test_a_hook_that_edits_a_stream_in_place_is_refused() -> None:
    stack = stacked(Mlp, depth=4)

    def halve(block: nn.Module, args: Any) -> None:
        with torch.no_grad():
            args[0][1].mul_(0.5)

    stack.blocks[2].register_forward_pre_hook(halve)
    with pytest.raises(ValueError, match="edited a stream in place"):
        stack(sample(4, 6))


def test_an_input_in_another_layout_leaves_no_stream_in_it() -> None:
    stack = rg.ReversibleSequence([rg.momentum(Mlp())], split="first", merge=None)
    outputs = stack(sample(6, 4).T)
    assert all(stream.is_contiguous() for stream in outputs)


def test_a_gradient_of_torch_func_in_a_branch_is_refused_with_the_alternative() -> None:
    class Energy(Mlp):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            run = super().forward
            return torch.func.grad(lambda z: run(z).square().sum())(x)

    with pytest.raises(ValueError, match=r"create_graph=True"):
        stacked(Energy)(sample(4, 6))
    stack = stacked(Energy)
    loss_of(stack(sample(4, 6), memory="store")).backward()


class Offset(nn.Module):
    """Saves nothing of its input, so that an inference tensor may be one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6).double())

    def forward(self, x: Tensor) -> Tensor:
        return self.weight.sin() + x


@pytest.mark.parametrize("memory", ["store", "checkpoint", "reverse", "selective"])
def test_an_inference_tensor_may_be_the_input_where_autograd_allows_it(memory: str) -> None:
    branches = [Offset() for _ in range(4)]
    stack = rg.ReversibleSequence([rg.two_stream(f, g) for f, g in zip(branches[::2], branches[1::2], strict=True)])
    with torch.inference_mode():
        x = torch.randn(4, 6).double()
    gradients = torch.autograd.grad(stack(x, memory=memory).sum(), list(stack.parameters()))
    expected = torch.autograd.grad(stack(x.clone(), memory="store").sum(), list(stack.parameters()))
    assert all(map(torch.allclose, gradients, expected))

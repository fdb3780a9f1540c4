"""A module in tiles gives what the module gives, in less memory."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.measure import MemoryTracker


def wide(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, 8))


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    y = module(x)
    return [y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])]


def close(got: list[Tensor], wanted: list[Tensor], tolerance: float = 1e-12) -> None:
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("size", "dim"), [(1, -2), (3, 1), (2, 0), (100, 1)])
def test_tiles_give_the_output_and_gradients_of_the_module(size: int, dim: int) -> None:
    module = wide().double()
    x = torch.randn(4, 7, 8, dtype=torch.float64, requires_grad=True)
    close(gradients(rg.nn.Tiled(copy.deepcopy(module), size, dim=dim), x), gradients(module, x))


def test_double_backward_passes_gradgradcheck() -> None:
    tiled = rg.nn.Tiled(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double(), 2)
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(tiled, (x,))


def test_dropout_is_the_same_in_the_backward_pass() -> None:
    torch.manual_seed(0)
    tiled = rg.nn.Tiled(nn.Dropout(0.5), 3)
    x = torch.randn(2, 7, 8, requires_grad=True)
    y = tiled(x)
    state = torch.get_rng_state()
    (slope,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(slope, (y != 0) * 2.0)
    assert torch.equal(torch.get_rng_state(), state)


def test_hooks_on_parameters_run_once_and_frozen_weights_get_nothing() -> None:
    module = wide().double()
    tiled = rg.nn.Tiled(module, 2)
    module[1].weight.requires_grad_(False)
    calls: list[Tensor] = []
    module[4].weight.register_hook(lambda g: calls.append(g) or 2 * g)
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    tiled(x).sum().backward()
    assert len(calls) == 1
    torch.testing.assert_close(module[4].weight.grad, 2 * calls[0])
    assert module[1].weight.grad is None


def test_functional_call_gives_the_gradients_of_the_weights_it_was_given() -> None:
    module = wide().double()
    tiled = rg.nn.Tiled(module, 3)
    others = {f"module.{n}": (2 * p).detach().requires_grad_() for n, p in module.named_parameters()}
    x = torch.randn(2, 7, 8, dtype=torch.float64)
    got = torch.autograd.grad(torch.func.functional_call(tiled, others, x).sum(), list(others.values()))
    plain = {n.removeprefix("module."): p for n, p in others.items()}
    wanted = torch.autograd.grad(torch.func.functional_call(module, plain, x).sum(), list(others.values()))
    close(list(got), list(wanted))


@pytest.mark.parametrize("shape", [(2, 0, 8), (0, 7, 8)])
def test_empty_inputs_work(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    assert [t.shape for t in gradients(rg.nn.Tiled(wide(), 3), x)[:2]] == [x.shape, x.shape]


def test_the_peak_holds_the_activations_of_one_tile() -> None:
    x = torch.randn(1, 512, 8, requires_grad=True)
    peaks = []
    for module in (wide(), rg.nn.Tiled(wide(), 32)):
        gradients(module, x)
        with MemoryTracker(ignore=[module, x]) as memory:
            gradients(module, x)
        peaks.append(memory.peak)
    assert peaks[0] > 2 * 8 * x.nbytes > 8 * x.nbytes > peaks[1]


@pytest.mark.parametrize("memory", ["store", "checkpoint", "reverse"])
def test_stacks_of_tiled_branches_have_the_gradients_of_untiled_ones(memory: str) -> None:
    torch.manual_seed(0)
    plain = rg.ReversibleSequence([rg.two_stream(wide(), wide()) for _ in range(3)], memory="store").double()
    blocks = [rg.two_stream(*(rg.nn.Tiled(s.branch, 3) for s in b.steps)) for b in copy.deepcopy(plain).blocks]
    tiled = rg.ReversibleSequence(blocks, memory=memory).double()
    x = torch.randn(2, 7, 8, dtype=torch.float64, requires_grad=True)
    close(gradients(tiled, x), gradients(plain, x), 1e-11)


def test_gradients_of_bfloat16_weights_are_summed_in_float32() -> None:
    torch.manual_seed(0)
    module = nn.Linear(16, 16).bfloat16()
    x, pull = torch.randn(1, 4096, 16).bfloat16(), torch.randn(1, 4096, 16).bfloat16()
    exact = pull[0].double().T @ x[0].double()
    (got,) = torch.autograd.grad(rg.nn.Tiled(module, 8)(x), module.weight, pull)
    in_bfloat16 = torch.zeros_like(module.weight)
    for tile, slope in zip(x[0].split(8), pull[0].split(8), strict=True):
        in_bfloat16 = in_bfloat16 + slope.T @ tile
    assert (got.double() - exact).norm() < 0.25 * (in_bfloat16.double() - exact).norm()


class Mixes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(-2, keepdim=True)


def test_a_module_that_mixes_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Mixes mixes the entries of dim=-2.*leave this one untiled"):
        rg.nn.Tiled(Mixes(), 3)(torch.randn(2, 7, 8))


def test_a_module_that_changes_buffers_is_refused() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))
    with pytest.raises(RuntimeError, match="changed a buffer while it ran in tiles"):
        rg.nn.Tiled(module, 4, dim=0)(torch.randn(8, 8))


def test_impossible_arguments_are_refused_with_a_message() -> None:
    with pytest.raises(ValueError, match="size=0: a tile has at least one entry"):
        rg.nn.Tiled(wide(), 0)
    with pytest.raises(TypeError, match="whose weights it cannot know"):
        rg.nn.Tiled(torch.sin, 3)


class TiedWeights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


class LowRank(nn.Module):
    """A frozen layer with a trained addition of low rank, as LoRA has."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@pytest.mark.parametrize("make", [TiedWeights, LowRank, lambda: rg.nn.Tiled(wide(), 2)], ids=["tied", "lora", "nested"])
def test_tied_frozen_and_nested_weights_get_the_gradients_of_the_module(make: type[nn.Module]) -> None:
    module = make().double()
    tiled = rg.nn.Tiled(copy.deepcopy(module), 4)
    results = []
    for each in (tiled, module):
        x = torch.linspace(-1, 1, 208, dtype=torch.float64).view(2, 13, 8).requires_grad_()
        y = each(x)
        y.square().sum().backward()
        results.append([y, x.grad, *(p.grad for p in each.parameters() if p.grad is not None)])
    assert len(results[0]) > 3
    close(*results)


def test_autocast_casts_tiles_as_it_casts_the_module() -> None:
    module = nn.Sequential(nn.Linear(8, 64), nn.GELU(), nn.Linear(64, 8))
    x = torch.randn(2, 13, 8)
    with torch.autocast("cpu", torch.bfloat16):
        tiled, plain = rg.nn.Tiled(copy.deepcopy(module), 4)(x), module(x)
    assert tiled.dtype == plain.dtype == torch.bfloat16
    close([tiled], [plain], 2**-7)


def test_the_backward_pass_sees_the_training_flags_of_the_forward_pass() -> None:
    module = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)).double()
    x = torch.randn(2, 9, 8, dtype=torch.float64, requires_grad=True)
    slopes = []
    for mode in (True, False):
        module.train()
        torch.manual_seed(1)
        y = rg.nn.Tiled(module, 4)(x)
        module.train(mode)
        slopes += torch.autograd.grad(y.square().sum(), x)
    assert torch.equal(*slopes)

"""A coupling with side bits of its own, written outside of the package, trains to the bit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from bits import assert_same_bits, observed
from retrograde.couplings import Coupling, ExactCoupling, SideBitCoupling
from stacks import Mlp, loss_of, sample


class Doubling(SideBitCoupling):
    """`2 * target + update` in float64, which loses nothing but the sign of zero: that is its side bit."""

    def combine(self, target: Tensor, update: Tensor) -> Tensor:
        return 2 * target.abs() + update

    def side_bits(self, target: Tensor) -> Tensor:
        return target < 0

    def separate(self, combined: Tensor, update: Tensor, side_bits: Tensor | None = None) -> Tensor:
        assert side_bits is not None
        size = (combined - update) / 2
        return torch.where(side_bits, -size, size)


class Quartered(ExactCoupling, SideBitCoupling):
    """A quarter of the target, rounded down to the grid, plus the update; two bits of each entry are kept aside."""

    bits = 16

    def combine(self, target: Tensor, update: Tensor) -> Tensor:
        grid = self.grid(target.dtype)
        quarter = target / 4
        floored = torch.floor(quarter.detach() / grid.spacing) * grid.spacing
        return quarter + (floored - quarter).detach() + grid.round(update)

    def side_bits(self, target: Tensor) -> Tensor:
        return (target / self.grid(target.dtype).spacing).remainder(4).to(torch.uint8)

    def separate(self, combined: Tensor, update: Tensor, side_bits: Tensor | None = None) -> Tensor:
        assert side_bits is not None
        grid = self.grid(combined.dtype)
        return (combined - grid.round(update)) * 4 + side_bits * grid.spacing


def reference(pairs: list[tuple[nn.Module, nn.Module]], x: Tensor) -> Tensor:
    a = b = x
    for f, g in pairs:
        a = 2 * a.abs() + f(b)
        b = 2 * b.abs() + g(a)
    return (a + b) / 2


@pytest.mark.parametrize("memory", ["store", "checkpoint", "reverse", "selective"])
def test_a_coupling_with_side_bits_gives_the_gradients_that_autograd_gives(memory: str) -> None:
    pairs: list[tuple[nn.Module, nn.Module]] = [(Mlp(), Mlp()) for _ in range(4)]
    stack = rg.ReversibleSequence([rg.two_stream(f, g, coupling=Doubling()) for f, g in pairs], memory=memory)
    parameters = list(stack.parameters())
    given = torch.autograd.grad(loss_of(stack(sample(4, 6))), parameters)
    true = torch.autograd.grad(loss_of(reference(pairs, sample(4, 6))), parameters)
    for a, b in zip(given, true, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


def test_an_exact_coupling_with_side_bits_gives_the_bits_of_stored_activations() -> None:
    torch.manual_seed(0)
    blocks = [rg.two_stream(nn.Linear(6, 6), nn.Linear(6, 6), coupling=Quartered()) for _ in range(40)]
    stack, x = rg.ReversibleSequence(blocks), torch.randn(4, 6)
    assert stack.exact
    assert_same_bits(observed(stack, x, memory="reverse"), observed(stack, x, memory="store"))


def test_side_bits_that_do_not_bring_the_target_back_are_refused_when_first_used() -> None:
    class Forgetful(Doubling):
        def side_bits(self, target: Tensor) -> Tensor:
            return torch.zeros_like(target, dtype=torch.bool)

    stack = rg.ReversibleSequence([rg.two_stream(Mlp(), Mlp(), coupling=Forgetful())])
    with pytest.raises(ValueError, match=r"Block 0: Forgetful\.separate does not undo combine"):
        stack(sample(4, 6))


def test_a_class_that_lacks_a_method_cannot_be_made() -> None:
    class Half(Coupling):
        def combine(self, target: Tensor, update: Tensor) -> Tensor:
            return target + update

    with pytest.raises(TypeError, match="separate"):
        Half()  # type: ignore[abstract]


def test_an_object_that_is_no_coupling_is_refused_with_what_to_derive_from() -> None:
    class Duck:
        def combine(self, target: Tensor, update: Tensor) -> Tensor:
            return target + update

    with pytest.raises(TypeError, match=r"is no retrograde\.couplings\.Coupling\. Derive your class from it"):
        rg.Step(Mlp(), 0, 1, coupling=Duck())  # type: ignore[arg-type]

"""A branch that draws random numbers for the first time after many calls: the replay draws the same ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.engine import call, step_run
from retrograde.engine.torch_internals import cpu_rng_memory


class DrawsLater(nn.Module):
    """Scales by a random number from the moment that it is told to, in a way that no attribute shows."""

    def __init__(self, draw: Callable[[], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4, dtype=torch.float64)
        self.told: list[bool] = []
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x).tanh()
        return result * (1 + self.draw()) if self.told else result


DRAWS = {
    "one number": lambda: torch.rand((), dtype=torch.float64),
    "as many as bring the generator to the same position": lambda: torch.rand(624).mean().double(),
    "a normal number that was computed with the one before it": lambda: torch.randn(1).double(),
}


def gradients(stack: rg.ReversibleSequence, x: Tensor, memory: str) -> list[Tensor]:
    torch.manual_seed(0)
    torch.randn(1)  # the second of this pair of normal numbers waits in the generator
    return list(torch.autograd.grad(stack(x, memory=memory).sin().sum(), [x, *stack.parameters()]))


@pytest.mark.parametrize("knows_memory", [True, False], ids=["by its memory", "by its state"])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_first_draw_after_many_calls_is_replayed(
    draw: Callable[[], Tensor], knows_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not knows_memory:
        for module in (call, step_run):
            monkeypatch.setattr(module, "cpu_rng_memory", lambda: None)
    torch.manual_seed(1)
    branches = [DrawsLater(draw) for _ in range(6)]
    stack = rg.ReversibleSequence([rg.two_stream(f, g) for f, g in zip(branches[::2], branches[1::2], strict=True)])
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    for _ in range(3):
        gradients(stack, x, "reverse")
    branches[2].told.append(True)
    reverse = gradients(stack, x, "reverse")
    stored = gradients(stack, x, "store")
    for mine, plain in zip(reverse, stored, strict=True):
        torch.testing.assert_close(mine, plain, rtol=1e-10, atol=1e-12)


def test_the_memory_of_the_generator_changes_with_every_draw_and_with_nothing_else() -> None:
    before = cpu_rng_memory()
    if before is None:
        pytest.skip("not known with this torch or this C library")
    torch.default_generator.get_state()
    torch.rand(3, generator=torch.Generator())
    assert cpu_rng_memory() == before
    state = torch.get_rng_state()
    seen = {before}
    for draw in (torch.rand, torch.randn, torch.randn):
        draw(1)
        seen.add(cpu_rng_memory())
    torch.rand(624)
    seen.add(cpu_rng_memory())
    assert len(seen) == 5
    torch.set_rng_state(state)

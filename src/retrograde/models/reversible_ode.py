"""A differential equation, solved by steps that can be undone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from retrograde.memory import Memory
from retrograde.network.ready_made import midpoint
from retrograde.sequence import ReversibleSequence


class ReversibleODE(nn.Module):
    """The solution of `dx/dt = f(t, x)` at `t = span`, with the gradients of the solver's own steps.

    The explicit midpoint rule, `x[n+1] = x[n-1] + 2 h f(t[n], x[n])`, carries two states and gives the older one back
    by subtraction. Its memory does not grow with the number of steps, and on a grid (`exact=True`) what is
    recomputed is the solution to the bit, unlike that of an adjoint equation solved backwards. The rule is of second
    order. It is not stable for strongly damped equations: take `h` small compared with their decay time.

    Args:
        f: a module that is called with the time, a number, and the state, and returns a tensor like the state.
        steps: how many steps the solver takes, two or more.
        span: the time from the start to the end.
        time: "absolute" if `f` takes `(t, x)`, "none" if it takes `x` alone.
        exact: whether the states are on a grid, as in `ReversibleSequence`. In float32 its default spacing is 2^-16,
            which rounds the updates of very small steps; use float64 states for those.
        memory: as in `ReversibleSequence`, with one block per step but the first.

    Examples:
        >>> import torch
        >>> from retrograde.models import ReversibleODE
        >>> decay = ReversibleODE(nn.Linear(2, 2).double(), steps=100, time="none")
        >>> decay(torch.ones(3, 2, dtype=torch.float64)).shape
        torch.Size([3, 2])
    """

    def __init__(
        self,
        f: nn.Module,
        steps: int,
        *,
        span: float = 1.0,
        time: Literal["absolute", "none"] = "absolute",
        exact: bool = True,
        memory: Memory = "reverse",
    ) -> None:
        super().__init__()
        if steps < 2:
            raise ValueError(f"steps={steps}: the midpoint rule needs two steps or more.")
        self.f, self.time, self.h = f, time, span / steps
        blocks = [midpoint(self._slope(n * self.h), step=self.h) for n in range(1, steps)]
        self.stack = ReversibleSequence(blocks, merge=None, memory=memory, exact=exact)

    def forward(self, x: Tensor) -> Tensor:
        """The state at the end, of the state at the start."""
        half = x + self.h / 2 * self._slope(0.0)(x)
        second = x + self.h * self._slope(self.h / 2)(half)
        end: Tensor = self.stack((x, second))[1]
        return end

    def _slope(self, t: float) -> _Slope:
        return _Slope(self.f, t if self.time == "absolute" else None)


@dataclass(frozen=True, eq=False)
class _Slope:
    """A branch: `f` at a fixed time. It is no module, so that the model has the parameters of `f` once."""

    f: nn.Module
    t: float | None

    def __call__(self, x: Tensor) -> Tensor:
        slope: Tensor = self.f(x) if self.t is None else self.f(self.t, x)
        return slope

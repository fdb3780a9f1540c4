"""A compiler leaves the two additions that round an update to the grid as they are."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from compiling import QUIET
from retrograde.couplings import Exact
from retrograde.couplings.grid import Grid

pytestmark = [QUIET, pytest.mark.slow]


def awkward_updates(grid: Grid, dtype: torch.dtype) -> Tensor:
    """Ties between grid values, their neighbours, both zeros, subnormals, numbers past the range, and others."""
    ties = (torch.arange(-64, 65, dtype=torch.float64) + 0.5) * grid.spacing
    near = torch.cat([ties * (1 + 2.0**-20), ties * (1 - 2.0**-20)])
    large = torch.tensor([grid.limit * 2.0**i for i in range(-3, 4)], dtype=torch.float64)
    small = torch.tensor([0.0, -0.0, torch.finfo(dtype).tiny, torch.finfo(dtype).tiny / 8], dtype=torch.float64)
    random = torch.randn(4000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * grid.limit / 8
    return torch.cat([ties, near, large, -large, small, -small, random]).to(dtype)


def test_compiled_rounding_gives_the_bits_of_eager_rounding() -> None:
    """For updates of every dtype, in one graph. It fails where Inductor is allowed to reassociate."""
    coupling, cases = Exact(), []
    for update_dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        grid = coupling.grid(torch.float64 if update_dtype == torch.float64 else torch.float32)
        update = awkward_updates(grid, update_dtype).nan_to_num(posinf=1.0, neginf=-1.0)
        cases.append((grid, coupling.prepare(torch.randn(update.shape, dtype=grid.dtype)), update))

    def there_and_back(pairs: list[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
        combined = [coupling.combine(target, update) for target, update in pairs]
        return [(each, coupling.separate(each, update)) for each, (_, update) in zip(combined, pairs, strict=True)]

    pairs = [(target, update) for _, target, update in cases]
    compiled = torch.compile(there_and_back, fullgraph=True)(pairs)
    for (grid, target, _), (combined, back), (expected, expected_back) in zip(
        cases, compiled, there_and_back(pairs), strict=True
    ):
        assert torch.equal(combined, expected)
        assert torch.equal(back, expected_back)
        inside = combined.abs() < grid.limit
        assert torch.equal(back[inside], target[inside])

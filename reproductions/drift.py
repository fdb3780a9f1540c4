"""The drift of recomputed activations, and of the gradients with them, by depth and dtype.

Reversing subtracts what was added; in floating point that gives nearly the same number. Each stack is run with stored
and with reversed activations, and the gradients of its parameters are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

import retrograde as rg
from report import Page, Progress, read_options, run, table
from retrograde.engine.drift import relative_error
from small_models import reversible, transformer


@dataclass(frozen=True)
class Arithmetic:
    """The dtype of streams and parameters, whether branches run in bf16 by autocast, and the streams' grid."""

    name: str
    dtype: torch.dtype = torch.float32
    autocast: bool = False
    exact: bool = False

    def precision(self) -> AbstractContextManager[Any]:
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast)


ARITHMETICS = (
    Arithmetic("float32"),
    Arithmetic("bf16 autocast, float32 streams", autocast=True),
    Arithmetic("pure bf16", dtype=torch.bfloat16),
    Arithmetic("float32, exact", exact=True),
    Arithmetic("bf16 autocast, exact", autocast=True, exact=True),
)
TRUTH = Arithmetic("float64", dtype=torch.float64)


@dataclass(frozen=True)
class Size:
    width: int
    length: int
    batch: int
    depths: tuple[int, ...]
    seeds: tuple[int, ...]


QUICK = Size(width=16, length=4, batch=2, depths=(2, 12), seeds=(0,))
FULL = Size(width=64, length=32, batch=2, depths=(12, 48, 96, 192, 384, 1000), seeds=(0, 1, 2))


@dataclass(frozen=True)
class Measured:
    """Relative errors: of the recomputed first input, of the gradients of all blocks and of the first one.

    `rounding` is the error that stored activations have too, against float64; `equal` is the
    share of parameters whose gradients have the same bits as those of stored activations.
    """

    drift: float
    gradients: float
    first_block: float
    rounding: float
    equal: float


class FirstInput:
    """Records what the first branch of a stack reads in the first run, and what it reads in the replay."""

    def __init__(self, branch: nn.Module) -> None:
        self.true = self.recomputed = torch.empty(0)
        self._handle = branch.register_forward_pre_hook(self._record)

    def _record(self, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if rg.is_replaying():
            self.recomputed = inputs[0].detach().clone()
        else:
            self.true = inputs[0].detach().clone()

    def error(self) -> float:
        self._handle.remove()
        assert self.recomputed.numel(), "nothing was recomputed"
        return relative_error(self.recomputed, self.true)


def build(arithmetic: Arithmetic, size: Size, depth: int, seed: int) -> tuple[rg.ReversibleSequence, Tensor, Tensor]:
    """A stack, its input, and the direction of its output that is differentiated: the same numbers in every dtype."""
    torch.manual_seed(seed)
    stack = reversible(exact=arithmetic.exact)(transformer(size.width, depth))
    assert isinstance(stack, rg.ReversibleSequence)
    x, direction = torch.randn(2, size.batch, size.length, size.width).to(arithmetic.dtype)
    return stack.to(arithmetic.dtype), x, direction


def gradients(
    stack: rg.ReversibleSequence, x: Tensor, direction: Tensor, memory: Literal["store", "reverse"]
) -> list[Tensor]:
    output = stack(x, memory=memory)
    assert isinstance(output, Tensor)
    return list(torch.autograd.grad((output * direction).sum(), list(stack.parameters())))


def measure(arithmetic: Arithmetic, size: Size, depth: int, seed: int, truth: list[Tensor]) -> Measured:
    stack, x, direction = build(arithmetic, size, depth, seed)
    with arithmetic.precision():
        stored = gradients(stack, x, direction, "store")
        first_input = FirstInput(stack[0].each_step()[0].branch)  # type: ignore[arg-type]
        reversed_ = gradients(stack, x, direction, "reverse")
    first = len(list(stack[0].parameters()))
    equal = sum(torch.equal(a, b) for a, b in zip(stored, reversed_, strict=True)) / len(stored)
    return Measured(
        first_input.error(),
        relative_error(reversed_, stored),
        relative_error(reversed_[:first], stored[:first]),
        relative_error(stored, truth),
        equal,
    )


def worst(measured: Sequence[Measured]) -> Measured:
    """The largest errors over the seeds, and the smallest share of equal bits."""
    return Measured(
        max(m.drift for m in measured),
        max(m.gradients for m in measured),
        max(m.first_block for m in measured),
        max(m.rounding for m in measured),
        min(m.equal for m in measured),
    )


def sweep(size: Size) -> dict[tuple[str, int], Measured]:
    progress = Progress("Depth and seed", len(size.depths) * len(size.seeds))
    by_arithmetic: dict[tuple[str, int], Measured] = {}
    for depth in size.depths:
        measured: dict[str, list[Measured]] = {}
        for seed in size.seeds:
            truth = gradients(*build(TRUTH, size, depth, seed), "store")
            for arithmetic in ARITHMETICS:
                measured.setdefault(arithmetic.name, []).append(measure(arithmetic, size, depth, seed, truth))
            progress.step(f"depth {depth}, seed {seed}")
        by_arithmetic |= {(name, depth): worst(of_seeds) for name, of_seeds in measured.items()}
    return by_arithmetic


def error(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def row(name: str, depth: int, m: Measured) -> list[str]:
    errors = [error(m.drift), error(m.gradients), error(m.first_block)]
    return [name, str(depth), *errors, f"{m.equal:.1%}", error(m.rounding)]


def results(by_arithmetic: dict[tuple[str, int], Measured], size: Size) -> str:
    head = ["arithmetic", "depth", "drift of the first input", "gradients", "first block's", "same bits", "rounding"]
    return table(head, [row(a.name, depth, by_arithmetic[a.name, depth]) for a in ARITHMETICS for depth in size.depths])


def draw(by_arithmetic: dict[tuple[str, int], Measured], size: Size) -> Callable[[Any], None]:
    styles = dict(zip((a.name for a in ARITHMETICS), ("o-C0", "s-C1", "D-C3", "x--C0", "+--C1"), strict=True))

    def drawn(axes: Any) -> None:
        panels = zip(axes, ("drift", "gradients"), ("Input of the first block, recomputed", "Gradients"), strict=True)
        for panel, field, title in panels:
            for name, style in styles.items():
                values = [getattr(by_arithmetic[name, depth], field) for depth in size.depths]
                panel.plot(size.depths, values, style, markersize=7, label=name)
            panel.set_yscale("symlog", linthresh=1e-8)
            panel.set(xscale="log", xlabel="blocks", ylabel="relative error", title=title, ylim=(-2e-9, None))
            panel.set_xticks(size.depths, [str(depth) for depth in size.depths])
            panel.minorticks_off()
            panel.grid(alpha=0.3)
        axes[0].figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)

    return drawn


def main() -> None:
    options = read_options(__doc__)
    size = QUICK if options.quick else FULL
    page = Page("drift", "Drift by depth and dtype", options)
    by_arithmetic = sweep(size)
    page.add(
        f"Transformer blocks of width {size.width}, length {size.length}, batch {size.batch}; torch's default "
        f"initial weights, seeds {', '.join(map(str, size.seeds))}. The worst of the seeds is given. Errors are "
        "relative, the gradients of all parameters taken as one vector. *Gradients* compares reversed with stored "
        "activations; *rounding* is the error of those of stored activations against float64, the grid's rounding "
        "included, which reversing cannot reduce. *Same bits* is the share of parameters whose gradients are "
        "bit-identical to those of stored activations.",
        results(by_arithmetic, size),
    )
    page.draw(draw(by_arithmetic, size), panels=2)
    page.write()


if __name__ == "__main__":
    run(main)

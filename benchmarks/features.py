"""What each library gets right, by running it: gradients against plain autograd on the same arithmetic, in float64.

    python benchmarks/features.py [--output DIR]

Writes a dated page to benchmarks/results/. A cell is "yes", or what happened instead: how far gradients are off, how
often a buffer was updated, or the error.
"""

from __future__ import annotations

import argparse
import datetime
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from harness import machine
from harness.contenders import OURS_AND_TORCH, Contender, Run, merge, plain
from harness.peers import PEERS
from harness.settings import Network

WIDTH, DEPTH = 8, 4
SEEDED = "RevTorch, fix_random_seed=True"
NAMES = (
    "checkpoint, non-reentrant",
    "checkpoint, reentrant",
    "RevTorch",
    SEEDED,
    "MemCNN",
    "RevLib",
    "retrograde reverse",
)
RIGHT = 1e-9


class Branch(nn.Module):
    """Linear, batch norm or dropout if asked for, tanh.

    Libraries that seed the generator themselves have masks of their own: `drawn` notes the masks, and a reference is
    given those of the first run as `given`.
    """

    def __init__(self, *, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH) if norm else nn.Identity()
        self.dropout = dropout
        self.notes: dict[str, list[Tensor]] = {"drawn": [], "given": []}

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.norm(self.linear(x).flatten(0, 1)).view_as(x))
        if not self.dropout:
            return y
        given = self.notes["given"]
        mask = given.pop(0) if given else (torch.rand_like(y) > self.dropout) / (1 - self.dropout)
        self.notes["drawn"].append(mask.detach())
        return y * mask


def network(**options: object) -> Network:
    torch.manual_seed(0)
    pairs = [(Branch(**options).double(), Branch(**options).double()) for _ in range(DEPTH)]  # type: ignore[arg-type]
    return Network(list(pairs), torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True), -1)


def gradients(net: Network, loss: Callable[[], Tensor]) -> list[Tensor]:
    for leaf in net.leaves:
        leaf.grad = None
    torch.manual_seed(1)
    loss().backward()
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.clone() for leaf in net.leaves]


def distance(got: list[Tensor], wanted: list[Tensor]) -> str:
    off = torch.cat([(a - b).flatten() for a, b in zip(got, wanted, strict=True)]).norm()
    error = float(off / torch.cat([b.flatten() for b in wanted]).norm())
    return "yes" if error < RIGHT else f"off by {error:.2g}"


def by_gradients(make: Callable[[], Network], loss: Callable[[Run, Network], Tensor]) -> Callable[[Contender], str]:
    def check(contender: Contender) -> str:
        net, other = make(), make()
        run, reference = contender.build(net), plain(other)
        got = gradients(net, lambda: loss(run, net))
        for branch, same in zip(net.branches, other.branches, strict=True):
            same.notes["given"] += branch.notes["drawn"]  # those of the first run come first  # type: ignore[union-attr, operator, index]
        return distance(got, gradients(other, lambda: loss(reference, other)))

    return check


def once(run: Run, net: Network) -> Tensor:
    return run(net.x * 1.0).square().sum()


def twice(run: Run, net: Network) -> Tensor:
    return run(net.x * 1.0).square().sum() + run(net.x * 2.0).square().sum()


def penalty(run: Run, net: Network) -> Tensor:
    x = net.x * 1.0
    (slope,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
    return slope.square().sum()


def statistics(contender: Contender) -> str:
    """How often a training step updates the statistics of batch norm."""
    net = network(norm=True)
    contender.build(net)(net.x * 1.0).sum().backward()
    (updates,) = {int(module.num_batches_tracked) for b in net.branches for module in [b.norm]}  # type: ignore[union-attr, arg-type]
    return "yes" if updates == 1 else f"updated {updates} times"


def one_gradient(contender: Contender) -> str:
    net, other = network(), network()
    wanted = torch.autograd.grad(plain(other)(other.x * 1.0).sum(), other.leaves)
    return distance(list(torch.autograd.grad(contender.build(net)(net.x * 1.0).sum(), net.leaves)), list(wanted))


CHECKS: dict[str, Callable[[Contender], str]] = {
    "plain gradients": by_gradients(network, once),
    "dropout": by_gradients(lambda: network(dropout=0.3), once),
    "dropout, two calls before one backward": by_gradients(lambda: network(dropout=0.3), twice),
    "batch norm updated once": statistics,
    "`torch.autograd.grad`": one_gradient,
    "double backward": by_gradients(network, penalty),
}


def seeded_revtorch(net: Network) -> Run:
    """RevTorch as its documentation has it for branches that draw."""
    from revtorch import ReversibleBlock, ReversibleSequence

    blocks = [ReversibleBlock(f, g, split_along_dim=net.dim, fix_random_seed=True) for f, g in net.pairs]
    stack = ReversibleSequence(nn.ModuleList(blocks))
    return lambda x: merge(stack(torch.cat([x, x], net.dim)), net.dim)


def cell(check: Callable[[Contender], str], contender: Contender) -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return check(contender)
    except ModuleNotFoundError:
        return "not installed"
    except Exception as error:  # whatever a library raises is the answer
        return f"error: {type(error).__name__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).resolve().parent / "results")
    folder: Path = parser.parse_args().output
    seeded = Contender(SEEDED, "peer", seeded_revtorch, package="RevTorch")
    contenders = {c.name: c for c in (*OURS_AND_TORCH, *PEERS, seeded)}
    rows = [f"| {name} | {' | '.join(cell(c, contenders[name]) for c in CHECKS.values())} |" for name in NAMES]
    today = datetime.date.today().isoformat()
    packages = {c.package for c in contenders.values() if c.package and c.name in NAMES}
    text = "\n".join(
        [
            f"# What each library gets right, {today}",
            "",
            "`python benchmarks/features.py`: gradients against plain autograd on the same arithmetic, in float64.",
            "",
            f"- commit: {machine.commit()}; torch {torch.__version__}; "
            + ", ".join(f"{p} {machine.version(p)}" for p in sorted(packages)),
            "",
            f"| | {' | '.join(CHECKS)} |",
            f"|---|{'---|' * len(CHECKS)}",
            *rows,
            "",
        ]
    )
    (folder / f"{today}-features.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

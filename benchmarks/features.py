"""What each library gets right, by running it: gradients against plain autograd on the same arithmetic, in float64.

    python benchmarks/features.py [--output DIR]

Writes a dated page to benchmarks/results/. A cell is "yes", or what happened instead: how far gradients are off, how
often a buffer was updated, or the error.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
import types
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch._functorch.config as functorch_config  # the only place of the budget, as read in torch 2.13
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from harness import machine
from harness.contenders import EXACT, OURS_AND_TORCH, Contender, Run, merge, pair, plain
from harness.peers import PEERS
from harness.settings import Network

WIDTH, DEPTH = 8, 4
SEEDED = "RevTorch, fix_random_seed=True"
DEEP = 48
BUDGET = "torch.compile, activation budget 0.0"
NAMES = (
    BUDGET,
    "checkpoint, non-reentrant",
    "checkpoint, reentrant",
    "RevTorch",
    SEEDED,
    "MemCNN",
    "RevLib",
    "retrograde reverse",
    EXACT,
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


def network(*, depth: int = DEPTH, **options: object) -> Network:
    torch.manual_seed(0)
    pairs = [(Branch(**options).double(), Branch(**options).double()) for _ in range(depth)]  # type: ignore[arg-type]
    return Network(list(pairs), torch.randn(2, 3, WIDTH, dtype=torch.float64, requires_grad=True), -1)


def gradients(net: Network, loss: Callable[[], Tensor]) -> list[Tensor]:
    for leaf in net.leaves:
        leaf.grad = None
    torch.manual_seed(1)
    loss().backward()
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad.clone() for leaf in net.leaves]


def distance(got: list[Tensor], wanted: list[Tensor], *, right: float = RIGHT) -> str:
    off = torch.cat([(a - b).flatten() for a, b in zip(got, wanted, strict=True)]).norm()
    error = float(off / torch.cat([b.flatten() for b in wanted]).norm())
    return "yes" if error < right else f"off by {error:.2g}"


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


def same_bits(contender: Contender) -> str:
    """Whether gradients in float32 are those of stored activations, to the bit, in a deep network."""
    net, other = network(depth=DEEP).to(torch.float32), network(depth=DEEP).to(torch.float32)
    run, stored = contender.build(net), pair(other)
    if contender.name == EXACT:  # the reference has the same arithmetic: its own grid
        stored = contender.build(other)
        stored.memory = "store"  # type: ignore[attr-defined]
    got, wanted = gradients(net, lambda: run(net.x * 1.0).sum()), gradients(other, lambda: stored(other.x * 1.0).sum())
    return "yes" if all(map(torch.equal, got, wanted)) else distance(got, wanted, right=0.0)


class Model(nn.Module):
    """A run and its branches as one module."""

    def __init__(self, net: Network, run: Run) -> None:
        super().__init__()
        self.branches = nn.ModuleList(net.branches)
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x)


def in_ddp(contender: Contender) -> str:
    """One process, a branch that is used twice, and one that is not used: what the reducer must cope with."""
    net, other = network(), network()
    for each in (net, other):
        each.pairs[2] = each.pairs[0]
    model = Model(net, contender.build(net))
    model.unused = nn.Linear(1, 1)
    parallel = nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    got = gradients(net, lambda: parallel(net.x * 1.0).square().sum())
    reference = plain(other)
    return distance(got, gradients(other, lambda: once(reference, other)))


def in_fsdp(contender: Contender) -> str:
    """`fully_shard` on every branch, on one process."""
    net, other = network(), network()
    for branch in net.branches:
        fully_shard(branch)
    run, reference = contender.build(net), plain(other)
    for leaf in net.leaves:
        leaf.grad = None
    once(run, net).backward()
    got = [leaf.grad.full_tensor() if isinstance(leaf.grad, DTensor) else leaf.grad for leaf in net.leaves]
    wanted = gradients(other, lambda: once(reference, other))
    missing = sum(each is None for each in got)
    return f"{missing} gradients missing" if missing else distance(got, wanted)  # type: ignore[arg-type]


def compiled(contender: Contender) -> str:
    """In one graph, with dropout: the gradient against a finite difference, since compiled code draws other masks."""
    torch._dynamo.reset()
    net = network(dropout=0.3)
    for branch in net.branches:
        branch.forward = types.MethodType(_dropped, branch)  # type: ignore[union-attr]
    backend = "retrograde" if contender.name.startswith("retrograde") else "inductor"
    run = contender.build(net)
    run = run if contender.name == BUDGET else torch.compile(run, backend=backend, fullgraph=True)
    x = net.x.detach().requires_grad_()
    direction = torch.randn_like(x)

    def loss(shift: float) -> Tensor:
        torch.manual_seed(1)
        return run(x + shift * direction).square().sum()

    (grad,) = torch.autograd.grad(loss(0.0), [x])
    slope = (loss(1e-4) - loss(-1e-4)) / 2e-4  # the exact grid is a staircase with steps of 2e-12
    error = float(((grad * direction).sum() / slope - 1).abs())
    return "yes" if error < 1e-6 else f"off by {error:.2g}"


def _dropped(branch: Branch, x: Tensor) -> Tensor:
    """A branch that notes nothing, which would break the graph."""
    return nn.functional.dropout(torch.tanh(branch.linear(x)), 0.3)


CHECKS: dict[str, Callable[[Contender], str]] = {
    "plain gradients": by_gradients(network, once),
    "dropout": by_gradients(lambda: network(dropout=0.3), once),
    "dropout, two calls before one backward": by_gradients(lambda: network(dropout=0.3), twice),
    "batch norm updated once": statistics,
    "`torch.autograd.grad`": one_gradient,
    "double backward": by_gradients(network, penalty),
    f"float32 gradients at depth {DEEP} to the bit": same_bits,
    "`torch.compile`, one graph, dropout": compiled,
    "DDP, tied weights, unused parameters": in_ddp,
    "FSDP2 on branches": in_fsdp,
}


def seeded_revtorch(net: Network) -> Run:
    """RevTorch as its documentation has it for branches that draw."""
    from revtorch import ReversibleBlock, ReversibleSequence

    blocks = [ReversibleBlock(f, g, split_along_dim=net.dim, fix_random_seed=True) for f, g in net.pairs]
    stack = ReversibleSequence(nn.ModuleList(blocks))
    return lambda x: merge(stack(torch.cat([x, x], net.dim)), net.dim)


def budgeted(net: Network) -> Run:
    """Plain autograd compiled as one graph, of which torch saves nothing but inputs: see `cell`."""
    torch._dynamo.reset()
    return torch.compile(pair(net), fullgraph=True)


def cell(check: Callable[[Contender], str], contender: Contender) -> str:
    name = contender.name
    check = compiled if name == BUDGET and check is CHECKS["dropout"] else check  # its masks cannot be noted
    try:
        with warnings.catch_warnings(), functorch_config.patch(activation_memory_budget=0.0 if name == BUDGET else 1.0):
            warnings.simplefilter("ignore")
            return check(contender)
    except ModuleNotFoundError:
        return "not installed"
    except Exception as error:  # whatever a library raises is the answer
        return f"error: {type(error).__name__}"


def table(contenders: dict[str, Contender]) -> list[str]:
    """A row per library, shown as soon as it is known."""
    rows = []
    for name in NAMES:
        rows.append(f"| {name} | {' | '.join(cell(c, contenders[name]) for c in CHECKS.values())} |")
        print(rows[-1], file=sys.stderr)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).resolve().parent / "results")
    folder: Path = parser.parse_args().output
    seeded = Contender(SEEDED, "peer", seeded_revtorch, package="RevTorch")
    budget = Contender(BUDGET, "torch", budgeted)
    contenders = {c.name: c for c in (*OURS_AND_TORCH, *PEERS, seeded, budget)}
    with tempfile.NamedTemporaryFile() as store:
        torch.distributed.init_process_group("gloo", init_method=f"file://{store.name}", rank=0, world_size=1)
        rows = table(contenders)
        torch.distributed.destroy_process_group()
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

"""The published libraries, each with the same branches. Imported only when built: one may be missing or not run."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from .contenders import GAMMA, Contender, Run, merge
from .settings import Network


def published_module(package: str) -> ModuleType:
    """`reversible.py` of an installed package, without importing the package around it."""
    installed = importlib.util.find_spec(package)
    if installed is None or not installed.submodule_search_locations:
        raise ModuleNotFoundError(f"No module named {package!r}")
    path = Path(installed.submodule_search_locations[0]) / "reversible.py"
    spec = importlib.util.spec_from_file_location(f"published_{package}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class WithoutSignals(nn.Module):
    """A branch that ignores further arguments of its caller: keywords (`_reverse`), or a graph."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return self.branch(x)


class OnTuples(nn.Module):
    """A branch of lie-transformer-pytorch: takes and returns (coordinates, values, mask, edges)."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.branch = branch

    def forward(self, state: Any) -> Any:
        coords, values, mask, edges = state
        return coords, self.branch(values), mask, edges


def only_sequences(network: Network) -> None:
    if network.x.dim() != 3:
        raise NotImplementedError(f"takes only (batch, length, width), not {tuple(network.x.shape)}")


def revtorch(network: Network) -> Run:
    from revtorch import ReversibleBlock, ReversibleSequence

    dim = network.dim
    stack = ReversibleSequence(nn.ModuleList([ReversibleBlock(f, g, split_along_dim=dim) for f, g in network.pairs]))
    return lambda x: merge(stack(torch.cat([x, x], dim)), dim)


def memcnn(network: Network) -> Run:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.cuda.amp was renamed
        from memcnn import AdditiveCoupling, InvertibleModuleWrapper

    dim = network.dim
    blocks = [InvertibleModuleWrapper(AdditiveCoupling(f, g, split_dim=dim)) for f, g in network.pairs]
    stack = nn.Sequential(*blocks)

    def run(x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # so was the storage class that it resizes
            return merge(stack(torch.cat([x, x], dim)), dim)

    return run


def revlib(network: Network) -> Run:
    from revlib import ReversibleSequential

    dim = network.dim
    stack = ReversibleSequential(*network.branches, split_dim=dim)
    return lambda x: merge(stack(torch.cat([x, x], dim)), dim)


def group_add_rev(network: Network) -> Run:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it uses torch.jit.script, which is deprecated
        from torch_geometric.nn.models.rev_gnn import GroupAddRev

    dim = network.dim
    blocks = [
        GroupAddRev(nn.ModuleList([WithoutSignals(f), WithoutSignals(g)]), split_dim=dim) for f, g in network.pairs
    ]

    def run(x: Tensor) -> Tensor:
        both = torch.cat([x, x], dim)
        for block in blocks:
            both = block(both, None)  # no edges
        return merge(both, dim)

    return run


def momentumnet(network: Network) -> Run:
    from momentumnet import MomentumNet

    return MomentumNet(network.branches, gamma=GAMMA, use_backprop=False)


def reformer(network: Network) -> Run:
    stack = published_module("reformer_pytorch").ReversibleSequence(nn.ModuleList(map(nn.ModuleList, network.pairs)))
    return lambda x: merge(stack(torch.cat([x, x], 2)), 2)


def routing(network: Network) -> Run:
    only_sequences(network)
    pairs = [(WithoutSignals(f), WithoutSignals(g)) for f, g in network.pairs]
    stack = published_module("routing_transformer").ReversibleSequence(pairs)
    return lambda x: stack(x)[0]


def axial(network: Network) -> Run:
    return published_module("axial_attention").ReversibleSequence(network.pairs)


def lie(network: Network) -> Run:
    only_sequences(network)
    stack = published_module("lie_transformer_pytorch").ReversibleSequence(
        [(OnTuples(f), OnTuples(g)) for f, g in network.pairs]
    )
    return lambda x: stack((None, x, None, None))[1]


def nuwa(network: Network) -> Run:
    only_sequences(network)
    stack = published_module("nuwa_pytorch").ReversibleSequence(network.pairs)
    return lambda x: stack(x) / 2  # it sums the streams


PEERS = (
    Contender("RevTorch", "peer", revtorch, package="RevTorch"),
    Contender("MemCNN", "peer", memcnn, package="memcnn"),
    Contender("RevLib", "peer", revlib, package="revlib", note="its default mode"),
    Contender("PyG GroupAddRev", "peer", group_add_rev, package="torch_geometric", note="two groups"),
    Contender("reformer-pytorch", "peer", reformer, package="reformer-pytorch"),
    Contender("routing-transformer", "peer", routing, package="routing-transformer"),
    Contender("axial-attention", "peer", axial, package="axial-attention"),
    Contender("lie-transformer-pytorch", "peer", lie, package="lie-transformer-pytorch"),
    Contender("nuwa-pytorch", "peer", nuwa, package="nuwa-pytorch"),
    Contender(
        "momentumnet", "peer", momentumnet, package="momentumnet", arithmetic="momentum", note="against plain momentum"
    ),
)

"""Seeds of random numbers: drawn outside of regions, so that a region can be called twice with the same numbers.

NOTE [Seeds of a region]
 Inductor draws random numbers from seeds, which it draws from torch's generator when a graph runs. In a region, the
 seeds would be drawn inside, and a second call of the region in the backward pass would draw others. So
 the seeds are lifted out: drawn once in the graph around it, all together, and given to each call as an input.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import fx

from .compiler_internals import SEEDS, all_called_regions, is_backward, region_name

SLICE: Any = torch.ops.aten.slice.Tensor
SEED_VALUE = "retrograde_seeds"


class _Seeds(NamedTuple):
    """Seeds that a region takes: how many, on which device, and the tensor of them as it was traced."""

    number: int
    device: torch.device
    value: torch.Tensor


def lift_seeds(module: fx.GraphModule) -> None:
    """Draw the seeds of all regions in the graph around them. See NOTE [Seeds of a region]."""
    counts: dict[str, list[_Seeds]] = {}
    wanted: dict[torch.device, list[tuple[fx.Node, int]]] = {}
    for node, region in all_called_regions(module):
        if is_backward(node):
            continue
        name = region_name(node)
        if name not in counts:
            counts[name] = _take_seeds(region)
        for count, device, value in counts[name]:
            node.meta[SEED_VALUE] = value
            wanted.setdefault(device, []).append((node, count))
    for device, each in wanted.items():
        _draw_seeds(module, device, each)


def _take_seeds(region: fx.GraphModule) -> list[_Seeds]:
    """Make inputs of the seeds that a region draws; how many, on which devices."""
    taken: list[_Seeds] = []
    for node in [node for node in region.graph.nodes if node.target is SEEDS]:
        inputs = [each for each in region.graph.nodes if each.op == "placeholder"]
        with region.graph.inserting_after(inputs[-1]):
            seeds = region.graph.placeholder(f"seeds_{len(taken)}")
        seeds.meta = dict(node.meta)
        node.replace_all_uses_with(seeds)
        region.graph.erase_node(node)
        taken.append(_Seeds(node.args[0], node.args[1], node.meta["val"]))
    if taken:
        region.recompile()
    return taken


def _draw_seeds(module: fx.GraphModule, device: torch.device, wanted: list[tuple[fx.Node, int]]) -> None:
    """Draw the seeds of all calls at once, with those that the graph draws for itself, and hand them out."""
    graph, total = module.graph, sum(count for _, count in wanted)
    own = [node for node in graph.nodes if node.target is SEEDS and node.args[1] == device]
    first = sum(node.args[0] for node in own[:1])
    value = wanted[0][0].meta[SEED_VALUE].new_empty(first + total)
    with graph.inserting_after(graph.find_nodes(op="placeholder")[-1]):
        seeds = _forward(graph.call_function(SEEDS, (first + total, device)), value)
    if own:
        with graph.inserting_after(seeds):
            rest = _forward(graph.call_function(SLICE, (seeds, 0, 0, first)), value[:first])
        own[0].replace_all_uses_with(rest)
        graph.erase_node(own[0])
    for node, count in wanted:
        with graph.inserting_before(node):
            part = _forward(graph.call_function(SLICE, (seeds, 0, first, first + count)), value[first : first + count])
        node.args = (*node.args, part)
        node.meta.pop("eager_input_vals", None)
        first += count
    module.recompile()


def _forward(node: fx.Node, value: torch.Tensor) -> fx.Node:
    node.meta = {"val": value, "partitioner_tag": "is_forward"}
    return node

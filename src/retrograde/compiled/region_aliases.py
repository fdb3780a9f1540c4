"""Regions return fresh tensors: what would be one of their inputs, or a view of it, is taken from outside of them.

NOTE [Aliases of a region]
 Cut in two halves, a region saves some of its inputs for its backward half by returning them. Inductor takes what
 a region returns for new memory, and may overwrite the input once nothing seems to need it: gradients were wrong in
 torch 2.13. So the graph around a region reads such outputs from where they came: the input itself, the same view of
 it, or an earlier output that is the same tensor. Two views of one tensor inside of a region are made two tensors.
 And a region returns None in the place of such outputs: Inductor uses the memory of what nobody reads for something
 else at once.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from .compiler_internals import FIRST_OPERAND, all_called_regions, sort_nodes, views_first_input


def undo_aliases(module: fx.GraphModule) -> None:
    """Let the graph around regions read no output that shares memory. See NOTE [Aliases of a region]."""
    calls = all_called_regions(module)
    regions = list(dict.fromkeys(region for _, region in calls))
    for region in regions:
        _separate_outputs(region)
    for call, region in calls:
        _reroute(module.graph, call, region)
    for region in regions:
        _drop_aliases(region)
    if regions:
        sort_nodes(module.graph)  # the tensor of which a view is made may be read from a call after the view is
        module.recompile()


def _outputs(region: fx.GraphModule) -> list[Any]:
    (output,) = region.graph.find_nodes(op="output")
    values: Any = output.args[0]
    return list(values)


def _views(node: fx.Node) -> list[fx.Node]:
    """The views of views that a node is, the last one first."""
    views = []
    while node.op == "call_function" and views_first_input(node):
        views.append(node)
        node = node.args[0]  # type: ignore[assignment]
    return views


def _base(node: fx.Node) -> fx.Node:
    """The tensor of which a node is a view; the node itself if it is none."""
    views = _views(node)
    return views[-1].args[0] if views else node  # type: ignore[return-value]


def _is_part(node: fx.Node) -> bool:
    """Whether a node is one of several views that an operator makes of a tensor (split, unbind)."""
    whole = node.args[0] if node.target is operator.getitem else None
    return isinstance(whole, fx.Node) and views_first_input(whole)


def _starts_inside(node: fx.Node) -> bool:
    """Whether a tensor begins in the middle of its memory."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.storage_offset() != 0


def _can_be_made_outside(view: fx.Node) -> bool:
    """Whether the sizes of a view are numbers, or inputs of the region."""
    return all(node.op == "placeholder" for node in view.all_input_nodes if node is not view.args[0])


def _separate_outputs(region: fx.GraphModule) -> None:
    """Copy outputs that are views of the same tensor as an earlier one, and not of an input or of an output itself.

    And those that begin in the middle of their memory: Inductor adds their offset a second time where they are read.
    """
    (output,) = region.graph.find_nodes(op="output")
    values = _outputs(region)
    bases: set[fx.Node] = set()
    for i, value in enumerate(values):
        if not isinstance(value, fx.Node):
            continue
        base = _base(value)
        is_known_outside = base.op == "placeholder" or base in values[:i]
        is_shared = base in bases or _is_part(base) or _starts_inside(value)
        if not all(map(_can_be_made_outside, _views(value))) or (is_shared and not is_known_outside):
            with region.graph.inserting_before(output):
                values[i] = region.graph.call_function(torch.ops.aten.clone.default, (value,))
            values[i].meta = dict(value.meta)
        bases.add(base)
    output.args = (tuple(values),)
    region.recompile()


def _is_alias(values: list[Any], i: int) -> bool:
    """Whether an output is an input, an output before it, or a view of one of them."""
    base = _base(values[i])
    return base.op == "placeholder" or base in values[:i]


def _reroute(graph: fx.Graph, call: fx.Node, region: fx.GraphModule) -> None:
    """Read what a call returns of its inputs, or twice, from where it came."""
    values = _outputs(region)
    inputs = region.graph.find_nodes(op="placeholder")
    sources: dict[fx.Node, Any] = dict(zip(inputs, call.args[FIRST_OPERAND:], strict=True))
    items: dict[Any, fx.Node] = {user.args[1]: user for user in call.users if user.target is operator.getitem}
    for i, item in sorted(items.items()):
        if not isinstance(values[i], fx.Node) or not _is_alias(values, i):
            continue
        base = _base(values[i])
        if base not in sources:
            sources[base] = items.get(values.index(base)) or _item(graph, call, values.index(base), base)
        item.replace_all_uses_with(_same_view(graph, item, values[i], sources))
        graph.erase_node(item)


def _item(graph: fx.Graph, call: fx.Node, i: int, value: fx.Node) -> fx.Node:
    """An output of a call that nothing has read yet."""
    with graph.inserting_after(call):
        item = graph.call_function(operator.getitem, (call, i))
    item.meta = {**value.meta, "partitioner_tag": call.meta.get("partitioner_tag")}
    return item


def _drop_aliases(region: fx.GraphModule) -> None:
    """Return None for outputs that are read from elsewhere."""
    values = _outputs(region)
    (output,) = region.graph.find_nodes(op="output")
    output.args = (tuple(None if isinstance(v, fx.Node) and _is_alias(values, i) else v for i, v in enumerate(values)),)
    region.graph.eliminate_dead_code()
    region.recompile()


def _same_view(graph: fx.Graph, item: fx.Node, value: fx.Node, sources: dict[fx.Node, Any]) -> fx.Node:
    """The view that a region makes, made outside of it."""
    made: fx.Node = sources[_base(value)]
    for view in reversed(_views(value)):
        rest = fx.map_arg(view.args[1:], sources.__getitem__)
        with graph.inserting_before(item):
            made = graph.call_function(view.target, (made, *rest), view.kwargs)  # type: ignore[arg-type]
        made.meta = {**view.meta, "partitioner_tag": item.meta.get("partitioner_tag")}
    return made

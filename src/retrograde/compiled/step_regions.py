"""One region per step: the calls of a branch, and what the graph around them does with the results.

NOTE [Steps as regions]
 A region is compiled once, but what stands between its calls is compiled as often as it stands there: the coupling,
 its inverse, the sum of two gradients. And each call returns what its backward half might read, read or not. So when a
 graph has been cut, each of its halves is rewritten: a call and what follows from it until the next one become one
 region, which returns what is read of it; in the backward half, the second run of a branch and the backward pass of
 that branch are one region together. Equal ones are the same region, found by comparing them as text.

 Nothing is computed another time or not at all. A region that stands for several nodes is only made where an order of
 all nodes remains. Exact stacks are left alone, in every memory mode: the second run of a branch has to give the
 bits of the first, and does so because both are the same compiled code.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from graphlib import CycleError, TopologicalSorter
from typing import Any, NamedTuple

import torch
from torch import fx

from retrograde.engine.graph_marks import END

from .compiler_internals import (
    BACKWARD,
    FIRST_OPERAND,
    all_called_regions,
    call_subgraph,
    called_region,
    cannot_repeat,
    is_operator,
    sort_nodes,
    views_first_input,
)
from .region_aliases import undo_aliases
from .seeds import SLICE


def can_merge_steps(graph: fx.Graph) -> bool:
    """Whether no stack of a joint graph is exact."""
    return not any(node.target is END and node.args[1] for node in graph.nodes)


def merge_steps(module: fx.GraphModule, half: str) -> None:
    """Make one region of each step in a half of a graph. See NOTE [Steps as regions]."""
    try:
        groups = _Groups(module).find()
    except CycleError:
        return  # a graph of another kind: it is compiled as it is
    regions: dict[str, str] = {}
    for members in groups:
        form = _Form.of(module, members)
        if form is None:
            continue
        if form.text not in regions:
            regions[form.text] = f"{half}_step_{len(regions)}"
            module.add_submodule(regions[form.text], _region(module, members, form))
        _call(module.graph, regions[form.text], members, form)
    if regions:
        sort_nodes(module.graph)
        module.graph.eliminate_dead_code()
        module.delete_all_unused_submodules()
        undo_aliases(module)
        module.graph.lint()
        module.recompile()


class _Groups:
    """Which nodes of a graph belong together: each group has one call, or a second run and its backward pass."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._nodes = list(module.graph.nodes)
        self._position = {node: i for i, node in enumerate(self._nodes)}
        self._calls = [call for call, _ in all_called_regions(module)]
        self._group = {call: i for i, call in enumerate(self._calls)}

    def find(self) -> list[list[fx.Node]]:
        """The members of each group, in the order of the graph; an error if no order of the groups remains."""
        for call in self._calls:
            self._join_second_run(call)
        self._add_followers(self._ranks())
        self._add_views_of_inputs()
        vertices: dict[Any, set[Any]] = {}
        for node in self._nodes:
            own = self._group.get(node, node)
            others = {self._group.get(each, each) for each in node.all_input_nodes}
            vertices.setdefault(own, set()).update(others - {own})
        TopologicalSorter(vertices).prepare()
        members: dict[int, list[fx.Node]] = {}
        for node in self._nodes:
            if node in self._group:
                members.setdefault(self._group[node], []).append(node)
        return list(members.values())

    def _join_second_run(self, call: fx.Node) -> None:
        """Put the backward pass of a branch with the second run whose results it reads."""
        if _is_copy(call):
            return
        for item in call.all_input_nodes:
            run = item.args[0] if item.target is operator.getitem else None
            if isinstance(run, fx.Node) and run in self._group and _is_copy(run) and self._can_join(run, call):
                self._group[run] = self._group[call]

    def _can_join(self, run: fx.Node, call: fx.Node) -> bool:
        """Whether nothing between a second run and a backward pass has to stay outside."""
        between = self._nodes[self._position[run] + 1 : self._position[call]]
        after = {run}
        for node in between:
            if any(each in after for each in node.all_input_nodes):
                after.add(node)
        before = {call}
        for node in reversed(between):
            if node in after and any(user in before for user in node.users):
                before.add(node)
        return all(self._follows(node) for node in before if node is not call)

    def _follows(self, node: fx.Node) -> bool:
        """Whether a node can be part of a region that calls another one."""
        if node.op != "call_function" or node in self._group:
            return False
        return node.target is operator.getitem or (is_operator(node) and not cannot_repeat(node, self._module))

    def _ranks(self) -> dict[int, int]:
        """The groups in an order in which each comes after those that it depends on."""
        depends: dict[fx.Node, int] = {}  # the groups, as bits
        before: dict[int, int] = dict.fromkeys(self._group.values(), 0)
        for node in self._nodes:
            bits = 0
            for each in node.all_input_nodes:
                bits |= 1 << self._group[each] if each in self._group else depends[each]
            depends[node] = bits
            if node in self._group:
                before[self._group[node]] |= bits & ~(1 << self._group[node])
        self._is_dependent = {node for node, bits in depends.items() if bits}
        order = TopologicalSorter({g: [each for each in before if bits >> each & 1] for g, bits in before.items()})
        return {group: i for i, group in enumerate(order.static_order())}

    def _add_followers(self, ranks: dict[int, int]) -> None:
        """Put with a call what follows from it, if a later call depends on that."""
        needed = set(self._calls)
        for node in reversed(self._nodes):
            if any(user in needed for user in node.users):
                needed.add(node)
        for node in self._nodes:
            inputs = node.all_input_nodes
            if not self._follows(node) or not (node in needed or node.target is operator.getitem):
                continue
            if all(each in self._group or each not in self._is_dependent for each in inputs):
                owners = [self._group[each] for each in inputs if each in self._group]
                if owners:
                    self._group[node] = max(owners, key=ranks.__getitem__)

    def _add_views_of_inputs(self) -> None:
        for node in reversed(self._nodes):
            is_view = views_first_input(node) and node.target is not SLICE and node not in self._is_dependent
            owners = {self._group.get(user) for user in node.users}
            if is_view and len(owners) == 1 and (owner := owners.pop()) is not None:
                self._group[node] = owner


class _Form(NamedTuple):
    """What a group computes, as text; what it takes, and what is read of it."""

    text: str
    inputs: list[fx.Node]
    outputs: list[fx.Node]

    @classmethod
    def of(cls, module: fx.GraphModule, members: list[fx.Node]) -> _Form | None:
        """None for a group that stays as it is: sizes that change, or constants inside of its regions."""
        names: dict[fx.Node, str] = {}
        inputs: list[fx.Node] = []
        lines: list[str] = []

        def name(node: fx.Node) -> str:
            if node not in names:
                if _subgraph(module, node) is not None:
                    names[node] = f"region {node.target}"
                else:
                    inputs.append(node)
                    names[node] = f"input {len(inputs)}"
            return names[node]

        for node in members:
            lines.append(f"{node.target} {fx.map_arg((node.args, node.kwargs), name)}")
            names[node] = f"value {len(lines)}"
            region = called_region(module, node)
            if region is not None and region.graph.find_nodes(op="get_attr"):
                return None
        inside = set(members)
        outputs = [node for node in members if any(user not in inside for user in node.users)]
        layouts = [_layout(node) for node in (*inputs, *outputs)]
        if None in layouts or not inputs:
            return None
        text = "\n".join([*lines, *map(str, layouts), *(names[node] for node in outputs)])
        return cls(text, inputs, outputs)


def _subgraph(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    value = getattr(module, str(node.target), None) if node.op == "get_attr" else None
    return value if isinstance(value, fx.GraphModule) else None


def _layout(node: fx.Node) -> Any:
    """Size and layout of a tensor; None for everything else, and for sizes that change."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or any(not isinstance(n, int) for n in (*value.shape, *value.stride())):
        return None
    return (tuple(value.shape), value.stride(), value.dtype, value.device)


def _is_copy(node: fx.Node) -> bool:
    """Whether a call is the second run of a branch."""
    return node.meta.get("partitioner_tag") == BACKWARD


def _region(module: fx.GraphModule, members: list[fx.Node], form: _Form) -> fx.GraphModule:
    """A region that computes what the members do, with the regions that they call written out."""
    graph = fx.Graph()
    values: dict[fx.Node, Any] = {}
    for i, node in enumerate(form.inputs):
        values[node] = graph.placeholder(f"input_{i}")
        values[node].meta = {"val": node.meta["val"]}
    for node in members:
        region = called_region(module, node)
        if region is not None:
            inputs = region.graph.find_nodes(op="placeholder")
            given = [values[each] for each in node.args[FIRST_OPERAND:]]  # type: ignore[index]
            values[node] = graph.graph_copy(region.graph, dict(zip(inputs, given, strict=True)))
        elif node.target is operator.getitem and not isinstance(values[node.args[0]], fx.Node):  # type: ignore[index]
            values[node] = values[node.args[0]][node.args[1]]  # type: ignore[index]
        else:
            copy_of: Callable[[fx.Node], Any] = values.__getitem__
            values[node] = graph.node_copy(node, copy_of)
    graph.output(tuple(values[node] for node in form.outputs)).meta = {}
    graph.eliminate_dead_code()
    return fx.GraphModule(torch.nn.Module(), graph)


def _call(graph: fx.Graph, name: str, members: list[fx.Node], form: _Form) -> None:
    """Call a region in the place of the members of a group."""
    with graph.inserting_before(members[-1]):
        call = call_subgraph(graph, name, form.inputs)
        call.meta["val"] = tuple(node.meta["val"] for node in form.outputs)
        inside = set(members)
        for i, node in enumerate(form.outputs):
            item = graph.call_function(operator.getitem, (call, i))
            item.meta = dict(node.meta)
            node.replace_all_uses_with(item, delete_user_cb=lambda user: user not in inside)
    for node in reversed(members):
        graph.erase_node(node)

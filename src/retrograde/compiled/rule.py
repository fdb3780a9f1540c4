"""Reversing as a rule for cutting a graph: what the backward half reads of a stack is recomputed in it.

NOTE [The rule]
 AOTAutograd traces the forward and the backward pass into one functional graph, and a partitioner cuts it in two.
 Before that, this file changes which values the backward half reads. A stack was traced as ordinary code with marks
 in it (`engine/graph_marks.py`): START where a segment of blocks begins, STEP after each step that is to be inverted,
 with the inverse written beside it, SAVED on what is saved, END on the streams after the stack.

 1. A stream that a later STEP updates is not saved. The steps are walked from last to first: the inverse that
    stands beside a STEP is copied into the backward half, applied to the stream after the step, which is known by then.
 2. A stream that no later STEP updates is saved: the last ones of a segment. So is all that is behind SAVED or END.
 3. A stream behind START of the kind "checkpoint" is saved, and counts as another value in the backward half.
 4. Every value that depends on a stream which is not saved is copied into the backward half when it is read there.
    What does not depend on one is none of our business: it is saved or recomputed as torch decides. So the step that
    reads only last streams keeps its graph, and context is never recomputed.
 5. Values that cannot be computed twice are saved: random numbers of a generator, collectives, mutations. Numbers that
    follow from a seed (Inductor's) are drawn again from the same seed, of which the few bytes are saved.
 6. An input that is edited (a buffer) is copied first, and the copy is read: the backward half sees the old values.
 7. Stacks inside of branches are marked with a depth. The outer ones come first; what they copy has marks again.

 The graph is functional, so that buffers, autocast, and masks need no rule. A value is replaced only by the same
 function of values that replace its inputs; what is not understood stays saved, which costs memory and is right.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from retrograde.engine.graph_marks import SAVED, SOURCE, START, STEP, is_mark, strip_marks

from .compiler_internals import (
    BACKWARD,
    all_called_regions,
    cannot_repeat,
    draws_from_seed,
    edited_inputs,
    edits,
    is_backward,
    is_random,
    keep_asserts_forward,
    sort_nodes,
)

SAVE = "retrograde_saves"
REBUILT = "retrograde_rebuilt"


class RuleError(RuntimeError):
    """A stack in a compiled graph cannot be reversed; the message names the block and the branch."""


def apply_rule(module: fx.GraphModule) -> bool:
    """Make the backward half of a joint graph recompute what it reads of stacks; False if there are none."""
    graph = module.graph
    marks = [node for node in graph.nodes if is_mark(node)]
    if marks:
        _read_before_edits(graph)
    backward = _backward_half(graph)
    copied: set[fx.Node] = set()
    for depth in sorted({node.args[-1] for node in marks}):
        copied |= _Rewrite(module, backward - copied, depth).run()
    _save_draws(module)
    if marks:
        _never_rerun(module)
    keep_asserts_forward(graph)
    strip_marks(graph)
    sort_nodes(graph)
    graph.eliminate_dead_code()
    graph.lint()
    module.recompile()
    return bool(marks)


def hoist_rebuilt(module: fx.GraphModule) -> None:
    """Rebuild a stream as soon as it can be: what it is rebuilt from is not needed any more."""
    order = {node: i for i, node in enumerate(module.graph.nodes)}
    for node in list(module.graph.nodes):
        if node.meta.get(REBUILT) and node.all_input_nodes:
            last = max(node.all_input_nodes, key=order.__getitem__)
            if last.op != "placeholder":  # otherwise it can wait until it is read
                last.append(node)
                order[node] = order[last]  # a tie; nodes are visited in order, so that later ones come after it
    sort_nodes(module.graph)
    module.recompile()


def must_save(node: fx.Node) -> bool:
    """Whether a forward node is to be saved if the backward half reads it, whatever the partitioner thinks."""
    return bool(node.meta.get(SAVE))


def _save_draws(module: fx.GraphModule) -> None:
    """Note on the nodes that draw random numbers that they are saved, inside of stacks and outside."""
    for node in module.graph.nodes:
        if node.op == "call_function" and is_random(node, module):
            for each in [node, *(user for user in node.users if user.target is operator.getitem)]:
                each.meta[SAVE] = isinstance(each.meta.get("val"), torch.Tensor)


def _never_rerun(module: fx.GraphModule) -> None:
    """Keep torch's activation budget from running regions a second time: it is applied inside of them instead."""
    for call, _ in all_called_regions(module):
        if not is_backward(call):
            call.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _read_before_edits(graph: fx.Graph) -> None:
    """Read inputs that are edited from copies, which are saved (rule 6)."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    for value in edited_inputs(graph):
        with graph.inserting_after(inputs[-1]):
            copy = graph.call_function(torch.ops.aten.clone.default, (value,))
        copy.meta = {"val": value.meta["val"], "partitioner_tag": "is_forward", SAVE: True}
        for user in [user for user in value.users if user is not copy and not edits(user)]:
            user.replace_input_with(value, copy)


def _backward_half(graph: fx.Graph) -> set[fx.Node]:
    """The nodes that depend on a gradient, or were traced for the backward pass."""
    half: set[fx.Node] = set()
    for node in graph.nodes:
        if is_backward(node) or any(each in half for each in node.all_input_nodes):
            half.add(node)
    return half


class _Rewrite:
    """The rule for the stacks of one depth."""

    def __init__(self, module: fx.GraphModule, backward: set[fx.Node], depth: int) -> None:
        self._module = module
        self._graph = module.graph
        self._backward = {node for node in backward if node.op != "output"}
        self._order = {node: i for i, node in enumerate(self._graph.nodes)}
        self._forward = [node for node in self._graph.nodes if node not in backward and node.op != "output"]
        marks = [node for node in self._forward if is_mark(node) and node.args[-1] == depth]
        self._marks = set(marks)
        self._steps = [node for node in marks if node.target is STEP]
        self._copies: dict[fx.Node, fx.Node] = {}
        self._save_ops: dict[fx.Node, frozenset[str]] = {}
        self._inverses = self._find_inverses()
        self._changed = self._find_changed() | self._inverses
        self._add_draws()
        readers = [node for node in self._graph.nodes if node in self._backward and node.op != "placeholder"]
        self._first = readers[0] if readers else None

    def run(self) -> set[fx.Node]:
        """Change the graph; the nodes that were copied."""
        if self._first is None:
            return set()
        before = set(self._graph.nodes)
        for node in self._marks - self._changed:
            if node.target is not SOURCE:
                _marked_value(node).meta[SAVE] = True
        for node in self._marks:
            if node.target is START and node.args[1] == "checkpoint":
                self._copies[node] = self._reread(node)
        for step in reversed(self._steps):
            self._rebuild(step)
        for node in [node for node in self._graph.nodes if node in self._backward]:
            for value in node.all_input_nodes:
                if value in self._changed:
                    node.replace_input_with(value, self._copy(value))
        return set(self._graph.nodes) - before

    def _find_inverses(self) -> set[fx.Node]:
        """The nodes that belong to the inverses beside the steps, and to nothing else."""
        inverses = {rebuilt for step in self._steps if set((rebuilt := _node(step.args[2])).users) == {step}}
        for node in reversed(self._forward):
            is_marked = node.op != "call_function" or node in self._marks or not node.users
            if not is_marked and all(user in inverses for user in node.users):
                inverses.add(node)
        return inverses

    def _find_changed(self) -> set[fx.Node]:
        """The values that the backward half recomputes if it reads them (rules 1 to 5)."""
        updated = {step.args[1] for step in self._steps if self._gives_target(step)}
        same_as = {step.args[0]: step for step in self._steps}  # before its mark, the stream after a step
        changed: set[fx.Node] = set()
        for node in self._forward:
            mark = same_as.get(node, node)
            if mark in self._marks and mark.target is not SOURCE:
                is_changed = mark in updated or (mark.target is START and mark.args[1] == "checkpoint")
            else:
                is_changed = not self._stays(node) and any(each in changed for each in node.all_input_nodes)
            if is_changed:
                changed.add(node)
        return changed

    def _gives_target(self, step: fx.Node) -> bool:
        """Whether the inverse of a step can be computed without the stream that it gives.

        It cannot where a stack begins with one tensor as two streams and the step that updates the second is not there:
        the outer stack has copied of it what is read in the backward half, and no more.
        """
        combined, target, rebuilt = map(_node, step.args[:3])
        if target.target is not START:
            return True
        seen, todo = {combined}, [rebuilt]
        while todo:
            node = todo.pop()
            if node is target:
                return False
            if node not in seen and node not in self._marks:
                todo.extend(node.all_input_nodes)
            seen.add(node)
        return True

    def _stays(self, node: fx.Node) -> bool:
        """Whether a value is saved though it depends on streams that are not (rule 5, and selective memory)."""
        operators = self._operators_saved_at(node)
        if operators and str(node.target) in operators:
            return True
        return node.op == "call_function" and (cannot_repeat(node, self._module) or not _is_tensor_valued(node))

    def _operators_saved_at(self, node: fx.Node) -> frozenset[str]:
        """Which operators are saved in the branch that a node belongs to, by the SOURCE marks that it depends on."""
        if node in self._marks:
            saved = frozenset(node.args[1]) if node.target is SOURCE else frozenset()  # type: ignore[arg-type]
        else:
            saved = frozenset[str]().union(*(self._save_ops.get(each, frozenset()) for each in node.all_input_nodes))
        if saved:
            self._save_ops[node] = saved
        return saved

    def _add_draws(self) -> None:
        """Numbers drawn from a seed are drawn again, with what is made of them, where they meet values that change."""
        meets: set[fx.Node] = set()
        for node in reversed(self._forward):
            if node in self._changed or any(user in meets for user in node.users):
                meets.add(node)
        drawn: set[fx.Node] = set()
        streams = {node for node in self._marks if node.target is not SOURCE}  # saved or rebuilt, and not drawn again
        streams |= {_node(step.args[0]) for step in self._steps}
        for node in self._forward:
            if node in streams:
                continue
            follows = draws_from_seed(node) or any(each in drawn for each in node.all_input_nodes)
            if follows and node in meets and node not in self._changed and not self._stays(node):
                drawn.add(node)
        self._changed |= drawn

    def _reread(self, start: fx.Node) -> fx.Node:
        """A saved stream, as another value of the backward half."""
        with self._graph.inserting_before(self._first):
            _marked_value(start).meta[SAVE] = True
            return _tagged(self._graph.call_function(SAVED, (start.args[0], start.args[-1])), start)

    def _rebuild(self, step: fx.Node) -> None:
        """The stream before a step, from the stream after it."""
        combined, target, rebuilt = map(_node, step.args[:3])
        after = self._copies[step] if step in self._changed else step
        self._copies[combined] = after
        if target not in self._changed or target not in self._marks:
            return  # a stream that something else has changed since the step before: it is saved
        if target not in self._copies:
            self._copies[target] = self._copy(rebuilt, inverse_of=step)

    def _copy(self, value: fx.Node, inverse_of: fx.Node | None = None) -> fx.Node:
        """A value as the backward half computes it."""
        needed: set[fx.Node] = set()
        todo = [value]
        while todo:
            node = todo.pop()
            if node in self._copies or node in needed:
                continue
            is_subgraph = node.op == "get_attr"
            if not is_subgraph and node not in self._changed:
                continue
            if node in self._marks and node.target is not SOURCE:
                raise _unknown_stream(node, inverse_of)
            needed.add(node)
            todo.extend(node.all_input_nodes)
        with self._graph.inserting_before(self._first):
            for node in sorted(needed, key=self._order.__getitem__):
                self._copies[node] = _tagged(
                    self._graph.node_copy(node, lambda each: self._copies.get(each, each)), node
                )
                self._copies[node].meta[REBUILT] = node in self._inverses
        return self._copies.get(value, value)


def _node(value: Any) -> fx.Node:
    assert isinstance(value, fx.Node)
    return value


def _marked_value(mark: fx.Node) -> fx.Node:
    """What a mark, and marks on it, are put on."""
    while is_mark(mark):
        mark = mark.args[0]  # type: ignore[assignment]
    return mark


def _tagged(copy: fx.Node, original: fx.Node) -> fx.Node:
    """A node of the backward half, with what is known of the original."""
    forgotten = ("recompute", "eager_input_vals", SAVE)
    copy.meta = {key: value for key, value in original.meta.items() if key not in forgotten}
    copy.meta["partitioner_tag"] = BACKWARD
    return copy


def _is_tensor_valued(node: fx.Node) -> bool:
    value = node.meta.get("val")
    values: Any = value if isinstance(value, (tuple, list)) else (value,)
    return any(isinstance(each, torch.Tensor) for each in values)


def _unknown_stream(mark: fx.Node, step: fx.Node | None) -> RuleError:
    where = f"{step.args[3]}: its inverse reads" if step is not None else "The backward pass reads"
    return RuleError(
        f"{where} a stream that only the inverse would give ({mark.name}). A coupling's `separate` takes the combined "
        "stream and the update; a branch that reads its own target has no inverse: give the block "
        "memory='checkpoint'."
    )

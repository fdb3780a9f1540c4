"""Operators that mark a stack inside a graph which `torch.compile(model, backend="retrograde")` compiles.

Each returns its first argument unchanged, and is taken out again before the graph is compiled. They are read by
`compiled/rule.py`; see NOTE [The rule] there. `depth` counts the stacks around a mark: 0, or more inside a branch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .torch_internals import constant_when_traced, is_exporting, tracing_backend

_LIBRARY = torch.library.Library("retrograde", "DEF")
_LIBRARY.define("start(Tensor stream, str kind, int depth) -> Tensor")
_LIBRARY.define("step(Tensor combined, Tensor target, Tensor rebuilt, str name, int depth) -> Tensor")
_LIBRARY.define("saved(Tensor value, int depth) -> Tensor")
_LIBRARY.define("end(Tensor stream, bool exact, int depth) -> Tensor")
_LIBRARY.define("source(Tensor stream, str[] save_ops, int depth) -> Tensor")


def _same(value: Tensor, *others: Any) -> Tensor:
    return value.clone()


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.others = len(inputs) - 1


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return (grad, *([None] * ctx.others))


for _name in ("start", "step", "saved", "end", "source"):
    _LIBRARY.impl(_name, _same, "CompositeExplicitAutograd")
    torch.library.register_autograd(f"retrograde::{_name}", _backward, setup_context=_setup, lib=_LIBRARY)

START: Any = torch.ops.retrograde.start.default
"""A stream as a segment of blocks begins with it; of the kind "reverse" or "checkpoint"."""

STEP: Any = torch.ops.retrograde.step.default
"""A stream after a step: with the stream before it, and that stream as the inverse gives it."""

SAVED: Any = torch.ops.retrograde.saved.default
"""A value that is saved for the backward pass: hidden states, side bits, decisions."""

END: Any = torch.ops.retrograde.end.default
"""A stream after a stack, saved too; "exact" if a step of the stack works on a grid."""

SOURCE: Any = torch.ops.retrograde.source.default
"""A stream as a branch reads it of which the results of some operators are saved."""

MARKS = (START, STEP, SAVED, END, SOURCE)

_ENTERED: list[None] = []


def enter_stack() -> int:
    """How many stacks are around the one that is traced now; `leave_stack` follows."""
    _ENTERED.append(None)
    return len(_ENTERED) - 1


def leave_stack() -> None:
    _ENTERED.pop()


def depth_here() -> int:
    """The depth of a mark inside a branch: that of the innermost stack around it."""
    return max(len(_ENTERED) - 1, 0)


def is_traced() -> bool:
    """Whether a call that trains is being traced for a backend that reads marks."""
    if not torch.compiler.is_compiling() or is_exporting() or not torch.is_grad_enabled():
        return False
    return marks_are_read()


@constant_when_traced
def marks_are_read() -> bool:
    """Whether the code is traced for a backend that reads marks: "retrograde"."""
    return bool(getattr(tracing_backend(), "reads_marks", False))


def saved_in_graph(value: Tensor) -> Tensor:
    """The value, marked as one that is saved for the backward pass."""
    saved: Tensor = SAVED(value, depth_here())
    return saved


def is_mark(node: torch.fx.Node) -> bool:
    return node.op == "call_function" and node.target in MARKS


def strip_marks(graph: torch.fx.Graph) -> None:
    """Take the marks out of a graph."""
    for node in list(graph.nodes):
        if is_mark(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)

"""The backend of `torch.compile(model, backend="retrograde")`: Inductor, with graphs cut by the rule of `rule.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import fx

from retrograde.engine.graph_marks import is_mark, strip_marks
from retrograde.engine.torch_internals import VERSION

if VERSION < (2, 13):
    raise ImportError(
        f'torch.compile(backend="retrograde") needs torch 2.13 or later, and this is {torch.__version__}. Compile the '
        "branches one by one, which works with every version, or update torch."
    )

from .compiler_internals import (  # names that older versions do not have
    DECIDES,
    PartitionerBase,
    compile_with_inductor,
    cut,
    hash_of_files,
    merge_equal_nodes,
    without_donated_buffers,
)
from .region_aliases import undo_aliases
from .rule import apply_rule, hoist_rebuilt, must_save


def partition(module: fx.GraphModule, inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut a joint graph into its forward and its backward half."""
    undo_aliases(module)
    merge_equal_nodes(module)
    has_marks = apply_rule(module)
    forward, backward = cut(module, inputs, must_save, **options)
    if has_marks:
        forward.meta[DECIDES] = True  # for a region: other marks than decisions are never inside of one
        hoist_rebuilt(backward)
    return forward, backward


class Partitioner(PartitionerBase):
    """`partition`, as Inductor takes it; known to its caches by what our files say."""

    def __call__(self, gm: fx.GraphModule, joint_inputs: Any, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        return partition(gm, joint_inputs, **options)

    def uuid(self) -> Any:
        return hash_of_files([str(path) for path in sorted(Path(__file__).parent.glob("*.py"))])


class Backend:
    """What compiles the graphs of a model that has stacks in it. A derived class may take another compiler."""

    reads_marks = True

    def __call__(self, module: fx.GraphModule, inputs: Any, **options: Any) -> Any:
        has_marks = any(is_mark(node) for node in module.graph.nodes)
        if has_marks and not any(isinstance(each, torch.Tensor) and each.requires_grad for each in inputs):
            strip_marks(module.graph)
            module.recompile()
        with without_donated_buffers():
            return self.compile(module, inputs, **options)

    def compile(
        self, module: fx.GraphModule, inputs: Any, *, mode: str | None = None, options: dict[str, Any] | None = None
    ) -> Any:
        return compile_with_inductor(module, inputs, mode, options or {}, Partitioner())


backend = Backend()
"""What the name "retrograde" stands for in `torch.compile`."""

"""Branches as regions that are compiled once, however often they are called."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from retrograde.engine.torch_internals import (
    constant_when_traced,
    is_compiled,
    splits_graphs_for_ddp,
    tracing_options,
)
from retrograde.network.block import Block
from retrograde.network.step import Step

_REGION: list[Any] = []


def call_region(branch: Any, inputs: list[Any], kwargs: dict[str, Any]) -> Any:
    """Run a branch as a region: equal ones are traced and compiled once. `fits_region` is asked before."""
    return _REGION[0](branch, ",".join(kwargs), *inputs, *kwargs.values())


def _call_branch(branch: Any, names: str, *values: Any) -> Any:
    """Call a branch. The names of the last values are one string: the tracer is slow with anything nested."""
    by_name = names.split(",") if names else []
    inputs = values[: len(values) - len(by_name)]
    return branch(*inputs, **dict(zip(by_name, values[len(inputs) :], strict=True)))


@constant_when_traced
def fits_region(step: Step) -> bool:
    """Whether the branch of a step can be a region: a module whose run leaves no trace, without a stack inside.

    Regions may not edit buffers, nor return what they are given. A decision has to be seen by the rule. What is no
    region is compiled as part of the graph around it.
    """
    if not _REGION:  # not before the compiler is loaded
        _REGION.append(torch.compiler.nested_compile_region(_call_branch, max_reuse_entries=1_000_000))
    branch = step.branch
    if not isinstance(branch, nn.Module) or next(branch.parameters(), None) is None or is_compiled(branch):
        return False
    if not tracing_options().get("regions", True) or splits_graphs_for_ddp():
        return False
    return not any(
        isinstance(module, Block) or _edits_buffers(module) or _decides(module) for module in branch.modules()
    )


def _edits_buffers(module: nn.Module) -> bool:
    """Whether a module may edit its buffers: in training, those that are part of its state."""
    own = {name for name, _ in module.named_buffers(recurse=False)}
    return module.training and any(name in own for name in module.state_dict())


def _decides(module: nn.Module) -> bool:
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and "decide" in code.co_names

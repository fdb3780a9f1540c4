"""A layer of the recipe "unchanged", which runs when the model calls it, under a tape of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from retrograde.compiled.traced_run import run_recomputed
from retrograde.engine.run import Segment, run_blocks
from retrograde.memory import SELECTIVE_CHECKPOINT

from ._caches import with_own_caches
from ._recipes import waiting_for_output

if TYPE_CHECKING:
    from ._stack import ConvertedStack


def run_layer(stack: ConvertedStack, index: int, hidden: Tensor, arguments: dict[str, Any]) -> Any:
    """Run a layer and return what it returns: all its items, with their graph.

    The last layer does not keep its graph as the last step of other stacks does: what follows may have a peak of its
    own (logits of a large vocabulary). A plan can store it.
    """
    mode, original = stack.memory.modes[index], stack.originals[index]
    if not torch.is_grad_enabled() or not isinstance(hidden, Tensor):
        return original(hidden, arguments)
    arguments = stack.training_arguments(arguments)
    if all(mode.make_tape is None for mode in stack.memory.modes):
        return original(hidden, arguments)
    check_not_partitioned(stack, original.layer)
    if mode.make_tape is None:
        return original(hidden, with_own_caches(arguments))
    if stack.is_traced:
        (step,) = stack[index].each_step()
        return run_recomputed(
            hidden, lambda x: original(x, with_own_caches(arguments)), step if mode is SELECTIVE_CHECKPOINT else None
        )
    context = {"calls": (arguments,), "which": (0,) * len(stack), "dtype": hidden.dtype}
    segments, outputs = [Segment(mode.make_tape, (index,))], waiting_for_output()
    run_blocks(list(stack), stack.names, segments, (hidden,), context, keep_last_graph=False, placements={})
    return outputs[0]


def check_not_partitioned(stack: ConvertedStack, layer: nn.Module) -> None:
    """Raise for parameters that DeepSpeed ZeRO-3 partitions: after a forward pass they are empty, also in a replay."""
    if not torch.is_grad_enabled() or all(mode.make_tape is None for mode in stack.memory.modes):
        return
    if hasattr(next(layer.parameters(), None), "ds_id"):
        raise RuntimeError(
            f"The parameters of {type(layer).__name__} are partitioned by DeepSpeed ZeRO-3, which empties them after "
            f"the forward pass and knows nothing of the recomputation in the backward pass. Use stage 0, 1 or 2, "
            "FSDP2 (fully_shard), or memory='store'."
        )

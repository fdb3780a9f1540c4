"""The private parts of torch's compiler that the backend touches, all of them, as read in torch 2.13.

Nothing else in this room names an underscore of torch. `tests/compiled/test_compiler_internals.py` tells early when a
new torch changes one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import torch
import torch._functorch.config as functorch_config
from torch import fx
from torch._functorch import partitioners
from torch._functorch._aot_autograd import graph_compile
from torch._functorch._aot_autograd.descriptors import InputMutationAOTOutput
from torch._functorch.compile_utils import fx_graph_cse
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch._inductor.pattern_matcher import stable_topological_sort

BACKWARD = "must_be_in_backward"
"""The tag of nodes that the partitioner may put into the backward half alone."""

DECIDES = "retrograde_decides"
"""What is noted of a region in which values are saved, so that it cannot be called twice."""

FIRST_OPERAND = 2
"""The position of what a region is given among the arguments of a call: it comes after the region and its name."""

SEEDS: Any = torch.ops.prims.inductor_seeds.default
LOOKUP: Any = torch.ops.prims.inductor_lookup_seed.default
_FROM_SEED = (
    LOOKUP,
    torch.ops.prims.inductor_random.default,
    torch.ops.prims.inductor_randint.default,
)

sort_nodes: Callable[[fx.Graph], None] = stable_topological_sort


def is_backward(node: fx.Node) -> bool:
    """Whether a node was traced for the backward pass, or is a gradient that it is given."""
    if node.op == "placeholder":
        return "tangents" in str(node.target)
    return node.meta.get("partitioner_tag") in ("is_backward", BACKWARD)


def draws_from_seed(node: fx.Node) -> bool:
    """Whether a node gives the same random numbers whenever it is given the same seed."""
    return node.target in _FROM_SEED


def is_operator(node: fx.Node) -> bool:
    """Whether a node calls an operator of torch, or of a library: not Python, and no region."""
    return isinstance(node.target, torch._ops.OpOverload)


def cannot_repeat(node: fx.Node, module: fx.GraphModule) -> bool:
    """Whether a node cannot be computed twice with the same result: it draws, communicates or changes something."""
    target: Any = node.target
    if isinstance(target, torch._ops.OpOverload) and (
        target.namespace.startswith("_c10d") or target._schema.is_mutable
    ):
        return True
    return is_random(node, module)


def is_random(node: fx.Node, module: fx.GraphModule) -> bool:
    """Whether a node draws random numbers anew: from a generator, or in a region that it calls."""
    target: Any = node.target
    if target in _FROM_SEED or target is SEEDS:
        return bool(target is SEEDS)
    if isinstance(target, torch._ops.OpOverload):
        return _draws(node)
    called = [getattr(module, str(each.target), None) for each in node.all_input_nodes if each.op == "get_attr"]
    return any(_cannot_repeat_inside(each) for each in called if isinstance(each, fx.GraphModule))


def _draws(node: fx.Node) -> bool:
    """Whether an operator draws; attention does if its dropout, its one number by position, is not 0."""
    target: Any = node.target
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    given = (*node.args, node.kwargs.get("dropout_p", 0.0))
    return "attention" not in str(target) or any(isinstance(value, float) and value > 0 for value in given)


def _cannot_repeat_inside(region: fx.GraphModule) -> bool:
    nodes = [node for node in region.graph.nodes if node.op == "call_function"]
    return bool(region.meta.get(DECIDES)) or any(cannot_repeat(node, region) for node in nodes)


def all_called_regions(module: fx.GraphModule) -> list[tuple[fx.Node, fx.GraphModule]]:
    """The calls of regions in a graph, in order."""
    calls = [(node, called_region(module, node)) for node in module.graph.nodes]
    return [(node, region) for node, region in calls if region is not None]


def views_first_input(node: fx.Node) -> bool:
    """Whether what a node returns shares memory with its first argument."""
    target: Any = node.target
    if not isinstance(target, torch._ops.OpOverload) or not node.args:
        return False
    returns = target._schema.returns
    return target is torch.ops.aten._unsafe_view.default or (len(returns) == 1 and returns[0].alias_info is not None)


def called_region(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """The region that a node calls, if it calls one."""
    if node.op != "call_function" or node.target is not invoke_subgraph:
        return None
    region: fx.GraphModule = getattr(module, node.args[0].target)  # type: ignore[union-attr, arg-type]
    return region


def keep_asserts_forward(graph: fx.Graph) -> None:
    """Have assertions of the forward pass checked there alone; what they check is not to be saved for them."""
    for node in graph.nodes:
        if node.op == "call_function" and "_assert_" in str(node.target) and not is_backward(node):
            node.meta["partitioner_tag"] = "must_be_in_forward"


def edits(node: fx.Node) -> bool:
    """Whether a node edits an input, or returns it."""
    return node.target is torch.ops.aten.copy_.default or node.op == "output"


def edited_inputs(graph: fx.Graph) -> list[fx.Node]:
    """The inputs that the graph, or what runs after it, edits in place."""
    edited = {node.args[0] for node in graph.nodes if node.target is torch.ops.aten.copy_.default}
    (output,) = graph.find_nodes(op="output")
    returned = [each for each in output.meta.get("desc", ()) if isinstance(each, InputMutationAOTOutput)]
    edits_of = {each.mutated_input for each in returned}  # what runs after the graph copies these into its inputs
    inputs = graph.find_nodes(op="placeholder")
    return [node for node in inputs if node in edited or node.meta.get("desc") in edits_of]


def merge_equal_nodes(module: fx.GraphModule) -> None:
    """What the partitioner does first; done before the rule, whose copies are not to be merged with their originals."""
    module.graph.eliminate_dead_code()
    if functorch_config.cse:
        module.graph = fx_graph_cse(module.graph)


def cut(
    module: fx.GraphModule, inputs: Any, must_save: Callable[[fx.Node], bool], **options: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut the graph as torch does (its min-cut, its activation budget), but save some values in any case."""
    choose = partitioners.choose_saved_values_set

    def choose_with_ours(graph: fx.Graph, info: Any, memory_budget: float = 1) -> list[fx.Node]:
        chosen = list(choose(graph, info, memory_budget=memory_budget))
        ours = [node for node in graph.nodes if must_save(node) and node not in info.required_bw_nodes]
        return list(dict.fromkeys([*chosen, *ours]))

    with (
        mock.patch.object(partitioners, "choose_saved_values_set", choose_with_ours),
        functorch_config.patch(cse=False),
    ):
        return partitioners.min_cut_rematerialization_partition(module, inputs, **options)


class PartitionerBase(CustomPartitionerFn):
    """What Inductor takes as `custom_partitioner_fn`."""


def hash_of_files(paths: Sequence[str]) -> bytes:
    return get_hash_for_files(tuple(paths))


def without_donated_buffers() -> Any:
    """A context in which graphs are compiled that overwrite nothing they were given: a retained graph is walked twice.

    And Inductor takes the numbers of the saved tensors that a backward pass may overwrite for those of a region's
    inputs. The setting of torch's would not do: it is read again at run time, where it refuses what was not counted.
    """
    return mock.patch.object(graph_compile, "collect_bw_donated_buffer_idxs", return_value=[])


def compile_with_inductor(
    module: fx.GraphModule, inputs: Any, mode: str | None, options: dict[str, Any], partitioner: PartitionerBase
) -> Any:
    """Compile as `torch.compile` does by default, with its mode and options, and with another partitioner."""
    from torch._inductor.compile_fx import compile_fx  # slow, and torch warns as it is imported

    patches = torch._TorchCompileInductorWrapper(mode, options, None).config
    return compile_fx(module, inputs, config_patches={**patches, "custom_partitioner_fn": partitioner})

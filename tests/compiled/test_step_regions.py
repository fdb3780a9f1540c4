"""In a graph that the rule has cut, each step is one region, and equal steps are the same one."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
from torch import fx

import retrograde as rg
from compiling import QUIET, WIDTH, Attention, ByRule, Mlp, Model

pytestmark = QUIET


class Halves(ByRule):
    """Keeps the halves of the graph around the regions."""

    def cut(self, module: Any, inputs: Any, **options: Any) -> Any:
        self.halves = super().cut(module, inputs, **options)
        return self.halves


def halves(depth: int, branch: type[Any] = Mlp, **options: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    torch.compiler.reset()
    backend, model = Halves(), Model([rg.two_stream(branch(), Mlp()) for _ in range(depth)], **options)
    run = torch.compile(model, backend=backend, fullgraph=True)
    run(torch.randn(*([6] if branch is Mlp else [2, 6]), WIDTH, requires_grad=True)).sum().backward()
    forward, backward = backend.halves
    return forward, backward


def calls(half: fx.GraphModule) -> list[fx.Node]:
    return half.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph)


def other_nodes(half: fx.GraphModule) -> int:
    """How many nodes compute something outside of regions."""
    known = (operator.getitem, torch.ops.higher_order.invoke_subgraph)
    return sum(node.op == "call_function" and node.target not in known for node in half.graph.nodes)


def test_a_step_is_one_call_in_each_half_and_deeper_stacks_have_no_more_regions() -> None:
    shallow, deep = halves(3), halves(5)
    for one, other in zip(shallow, deep, strict=True):
        assert len(calls(one)) == 2 * 3
        assert len(calls(other)) == 2 * 5
        assert len(list(one.children())) == len(list(other.children())) < 2 * 3
        assert other_nodes(one) == other_nodes(other)  # what comes before and after the stack


def test_steps_on_a_grid_run_the_same_code_twice() -> None:
    """The second run of a branch is the region that ran first, so that it gives the same bits."""
    forward, backward = halves(3, exact=True)
    first, second = ({str(call.args[1]) for call in calls(half)} for half in (forward, backward))
    assert first <= second


@pytest.mark.parametrize("budget", [1.0, 0.5])
@pytest.mark.parametrize("options", [{"memory": "store"}, {"memory": "store", "exact": True}, {}], ids=str)
def test_regions_return_whole_tensors_of_their_own(options: dict[str, Any], budget: float) -> None:
    """Inductor takes what a region returns for new memory that begins where it says (NOTE [Aliases of a region])."""
    with functorch_config.patch(activation_memory_budget=budget):
        regions = [region for half in halves(3, Attention, **options) for region in half.children()]
    assert regions
    for region in regions:
        values = [node.meta["val"] for node in region.graph.find_nodes(op="placeholder")]
        given = [torch.zeros(tuple(value.shape), dtype=value.dtype) for value in values]
        outputs = [each for each in region(*given) if isinstance(each, torch.Tensor)]
        memory = [each.untyped_storage().data_ptr() for each in (*given, *outputs)]
        assert len(set(memory[len(given) :]) - set(memory[: len(given)])) == len(outputs)
        assert all(each.storage_offset() == 0 for each in outputs)


def test_torchs_budget_is_applied_inside_of_regions_and_runs_none_again() -> None:
    """Outside of a region it could only run the branch a second time, as a whole."""
    saved = []
    for budget in (1.0, 0.5):
        with functorch_config.patch(activation_memory_budget=budget):
            forward, backward = halves(4, Attention, memory="store")
        assert len(calls(backward)) <= 2 * 4
        (output,) = forward.graph.find_nodes(op="output")
        saved.append(sum(n.meta["val"].numel() for n in output.args[0] if n.op != "placeholder"))
    assert saved[1] < saved[0]

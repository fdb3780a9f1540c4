"""Plans for a machine that is not here, of factories and models as users write them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.planning import fit, plan
from retrograde.planning.on_paper import Device, Job, JobPlan
from retrograde.planning.on_paper.devices import device_named
from retrograde.planning.on_paper.planner import opened
from retrograde.planning.on_paper.rank import StepCost

CPU = Device("cpu", 2**40, 1e10, {"float32": 1e11}, is_cpu=True)
H100 = device_named("h100-80gb")
WIDTH = 16


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def stack_of(depth: int = 3) -> rg.ReversibleSequence:
    return rg.ReversibleSequence([rg.two_stream(mlp(), mlp()) for _ in range(depth)])


def make(batch: int = 8, depth: int = 3) -> tuple[nn.Module, Tensor]:
    return stack_of(depth), torch.randn(batch, 64, WIDTH)


def simulated(source: Any, job: Job, memory: Any = "reverse") -> StepCost:
    with opened(source, job) as subject:
        rank = subject.rank()
        return rank.step([memory] * len(rank.stacks))


# What factories do


@pytest.fixture
def default_device() -> Iterator[None]:
    yield
    torch.set_default_device(None)


def on_the_default_device() -> tuple[nn.Module, Tensor]:
    torch.set_default_device("cuda")
    return make()


def under_a_device() -> tuple[nn.Module, Tensor]:
    with torch.device("cuda"):
        return make()


def on_meta() -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        return make()


def with_calls_of_cuda() -> tuple[nn.Module, Tensor]:
    torch.cuda.set_device(0)
    torch.cuda.synchronize()
    model, batch = make()
    return model.cuda(), batch.pin_memory().to("cuda", non_blocking=True)


@pytest.mark.parametrize("source", [on_the_default_device, under_a_device, on_meta, with_calls_of_cuda])
@pytest.mark.usefixtures("default_device")
def test_a_factory_for_another_device_costs_what_it_costs_here(source: Callable[..., Any]) -> None:
    assert simulated(source, Job(H100)).memory == simulated(make, Job(H100)).memory


class Projected(nn.Module):
    """A branch with a buffer and no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def test_a_branch_with_buffers_is_planned_and_its_buffers_count() -> None:
    def source() -> tuple[nn.Module, Tensor]:
        blocks = [rg.two_stream(Projected(), nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(3)]
        return rg.ReversibleSequence(blocks), make()[1]

    planned = plan(source, on=H100)
    assert planned["reverse"].cost.memory.parameters == 3 * 2 * WIDTH * WIDTH * 4
    assert planned["reverse"].cost.memory.optimizer == pytest.approx(3 * 2 * WIDTH * WIDTH * 4, rel=0.01)


def test_tied_and_frozen_parameters_are_counted_once_and_without_state() -> None:
    def tied() -> tuple[nn.Module, Tensor]:
        branch = mlp()
        return rg.ReversibleSequence([rg.two_stream(branch, branch) for _ in range(3)]), make()[1]

    def frozen() -> tuple[nn.Module, Tensor]:
        model, batch = make()
        model.blocks[:2].requires_grad_(False)  # type: ignore[index, union-attr, operator]
        return model, batch

    alone = simulated(make, Job(CPU)).memory
    assert simulated(tied, Job(CPU)).memory.parameters * 6 == alone.parameters
    assert simulated(tied, Job(CPU)).memory.optimizer * 6 == alone.optimizer
    assert simulated(frozen, Job(CPU)).memory.parameters == alone.parameters
    assert simulated(frozen, Job(CPU)).memory.optimizer * 3 == alone.optimizer


# The factory's optimiser


def trained_by(make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]) -> Callable[[], Any]:
    def source() -> Any:
        model, batch = make()
        return model, batch, None, make_optimizer(model)

    return source


ADAMW = trained_by(lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3))
FUSED = trained_by(lambda model: rg.FusedOptimizer(torch.optim.AdamW, model.parameters(), lr=1e-3))


@pytest.mark.parametrize("job", [Job(CPU), Job(H100), Job(H100, 2, "fsdp2")])
def test_the_factory_s_own_adamw_costs_what_a_named_one_does(job: Job) -> None:
    named = Job(job.device, job.ranks, job.shard, optimizer="adamw")
    assert simulated(ADAMW, job) == simulated(make, named)


def test_the_factory_s_own_fused_optimiser_costs_what_fused_does() -> None:
    assert simulated(FUSED, Job(CPU)) == simulated(make, Job(CPU, fused=True))


def test_a_named_optimiser_replaces_a_fused_one_of_the_factory() -> None:
    assert simulated(FUSED, Job(CPU, optimizer="sgd")) == simulated(make, Job(CPU, optimizer="sgd"))


@pytest.mark.parametrize("job", [Job(CPU), Job(H100, 2, "fsdp2")])
def test_an_optimiser_has_state_for_its_own_parameters_and_by_the_options_of_their_groups(job: Job) -> None:
    def groups(model: nn.Module) -> torch.optim.Optimizer:
        first, second, _ = model.blocks  # type: ignore[misc]
        momentum = [{"params": list(first.parameters()), "momentum": 0.9}, {"params": list(second.parameters())}]
        return torch.optim.SGD(momentum, lr=0.1)

    memory = simulated(trained_by(groups), job).memory
    assert memory.optimizer * 3 == pytest.approx(memory.parameters, rel=0.01)  # one number for those of one block


def test_an_optimiser_that_cannot_be_made_again_is_refused_by_its_name() -> None:
    class Strange(torch.optim.SGD):
        def __init__(self, params: Any, rank_of_state: int) -> None:
            super().__init__(params, lr=0.1)

    with pytest.raises(ValueError, match="The factory's optimiser, Strange, cannot be made a second time"):
        plan(trained_by(lambda model: Strange(model.parameters(), 4)), on=H100)


# Pipelines


def stage(stage: int, stages: int) -> tuple[nn.Module, Tensor]:
    return make(depth=6 // stages)


def test_a_stage_holds_the_gradients_of_earlier_micro_batches() -> None:
    cost = simulated(stage, Job(CPU, 3, "pipeline"), "store")
    assert cost.memory.gradients == cost.memory.parameters
    one = simulated(stage, Job(CPU, 3, "pipeline", micro_batches=1), "store")
    assert one.memory.gradients < one.memory.parameters  # the first backward pass begins without any


@pytest.mark.parametrize("memory", ["store", "reverse"])
def test_the_time_of_a_pipeline_is_that_of_its_micro_batches_one_by_one(memory: str) -> None:
    def seconds(ranks_before_last: int) -> float:
        job = Job(H100, 3, "pipeline", micro_batches=9, stage=2 - ranks_before_last)
        return simulated(stage, job, memory).operators.likely

    assert seconds(2) == pytest.approx(seconds(0))  # however many micro-batches wait
    one = simulated(stage, Job(H100, 3, "pipeline", micro_batches=9, stage=2), memory)
    assert one.flops == 9 * simulated(lambda: make(depth=2), Job(H100), memory).flops


# What is printed


def test_a_budget_above_a_device_s_memory_is_refused() -> None:
    with pytest.raises(ValueError, match=r"A budget of 100 GiB is more than h100-80gb has: 74\.5 GiB"):
        plan(make, None, "100GiB", on=H100)
    with pytest.raises(ValueError, match=r"A budget of 100 GiB is more than h100-80gb has: 74\.5 GiB"):
        fit(make, memory_limit="100GiB", on=H100)


def test_labels_are_no_tokens() -> None:
    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack, self.head = stack_of(), nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            return {"loss": nn.functional.cross_entropy(self.head(self.stack(x).mean(1)), labels)}

    planned = plan(lambda: (Classifier(), (make(8)[1], torch.randint(3, (8,)))), on=H100, ranks=2, shard="ddp")
    assert (planned.unit.name, planned.unit.count) == ("samples", 16)


def test_a_dtype_that_a_device_does_not_list_is_named() -> None:
    def double() -> tuple[nn.Module, Tensor]:
        model, batch = make()
        return model.double(), batch.double()

    planned = plan(double, on="rtx-4090-24gb")
    assert planned.unlisted == planned.to_dict()["unlisted"] == ["float64"]
    assert "rtx-4090-24gb lists no FLOP/s for float64" in str(planned)
    assert plan(double, on=H100).unlisted == []
    assert plan(make, on="rtx-4090-24gb").unlisted == []


def two_stacks() -> tuple[nn.Module, Tensor]:
    first, second = stack_of(3), stack_of(2)
    second.memory = "store"
    return nn.Sequential(first, second), make()[1]


def test_a_plan_of_one_stack_leaves_the_memory_of_others_as_it_is() -> None:
    planned = plan(two_stacks, on=CPU, stack="0")
    with opened(two_stacks, Job(CPU)) as subject:
        rank = subject.rank()
        for mode in ("store", "checkpoint", "reverse"):
            assert planned[mode].cost == rank.step([mode, "store"])
    assert planned.plan is not None
    assert len(planned.plan.memory) == 3


def test_without_a_choice_of_stacks_there_is_no_plan_and_the_reason_is_printed() -> None:
    planned = plan(two_stacks, on=CPU)
    assert isinstance(planned, JobPlan)
    assert planned.plan is None
    assert planned.unplanned == ("0", "1")
    assert "The model has 2 stacks ('0', '1')" in str(planned)


# Bad input


@pytest.mark.parametrize(
    ("source", "options", "sentence"),
    [
        (stage, {"ranks": 2, "shard": "pipeline", "micro_batches": 0}, "micro_batches=0 with shard='pipeline'"),
        (make, {"micro_batches": 4}, "micro_batches=4 with shard='none': give 1 or more, for shard='pipeline'"),
        (
            stage,
            {"ranks": 2, "shard": "pipeline", "fused": True},
            "fused=True with shard='pipeline': a fused optimiser",
        ),
        (FUSED, {"ranks": 2, "shard": "ddp"}, "The factory's FusedOptimizer with shard='ddp'"),
        (make, {"ranks": 3, "shard": "hsdp"}, "Give an even number up to 8, or a multiple of 8"),
        (make, {"ranks": 20, "shard": "hsdp"}, "shard='hsdp' with ranks=20: a node has 8 devices"),
    ],
)
def test_a_job_that_cannot_be_is_refused(source: Any, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        plan(source, on=H100, **options)


@pytest.mark.parametrize(
    ("figures", "sentence"),
    [
        ({"flops": [1e13]}, r"has flops=\[1"),
        ({"flops": {"float32": "fast"}}, "give a number above 0 for each dtype"),
        ({"overhead": -1.0}, "has overhead=-1.0"),
        ({"attained": {"flops": [0.4, 0.6]}}, r"has attained\['flops'\]=\[0.4, 0.6\]; give three numbers"),
        ({"attained": {"flops": [0.8, 0.6, 0.4]}}, "worst, likely, best, in this order"),
        ({"attained": {"speed": [0.4, 0.6, 0.8]}}, "'flops', 'bandwidth', 'link', 'overhead'"),
    ],
)
def test_a_device_with_a_wrong_figure_is_refused_with_the_figure(figures: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        Device.from_dict("mine", {"memory": "8GB", "bandwidth": 1e11, "flops": {"float32": 1e13}, **figures})

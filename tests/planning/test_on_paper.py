"""Plans for a machine that is not here: nothing is allocated, and predicted bytes are those of real steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from retrograde.measure import MemoryTracker
from retrograde.measure.stacks import the_stack
from retrograde.measure.training_step import loss_of
from retrograde.models import DeepGraphNetwork, ReversibleLM
from retrograde.planning import fit, plan
from retrograde.planning.on_paper import Device, Job, JobPlan, known_devices
from retrograde.planning.on_paper.devices import device_named
from retrograde.planning.on_paper.planner import opened
from retrograde.planning.on_paper.rank import StepCost

CPU = Device("cpu", 2**40, 1e10, {"float32": 1e11}, is_cpu=True)
H100 = device_named("h100-80gb")
WIDTH = 16


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def make(batch: int = 8, depth: int = 3) -> tuple[nn.Module, Tensor]:
    return rg.ReversibleSequence([rg.two_stream(mlp(), mlp()) for _ in range(depth)]), torch.randn(batch, 64, WIDTH)


def language_model() -> tuple[nn.Module, Tensor]:
    return ReversibleLM(64, width=32, depth=3, heads=4, kv_heads=2), torch.randint(64, (4, 32))


def simulated(source: Any, job: Job, memory: Any = "reverse") -> StepCost:
    with opened(source, job) as subject:
        return subject.rank().step([memory])


def allocated(model: nn.Module, batch: Tensor, memory: str) -> int:
    """The peak of a real, later step: parameters, batch and AdamW's state, and what the tracker sees of it."""
    model.get_submodule("stack" if hasattr(model, "stack") else "").memory = memory  # type: ignore[assignment]
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        optimizer.step()
    optimizer.zero_grad()
    state = [t for values in optimizer.state.values() for t in values.values()]
    static = sum(t.untyped_storage().nbytes() for t in [*model.parameters(), batch, *state])
    with MemoryTracker(ignore=[model, batch, *state]) as memory_of:
        loss_of(model, batch).backward()
        optimizer.step()
    return static + memory_of.peak


@pytest.mark.parametrize("memory", ["store", "checkpoint", "reverse"])
@pytest.mark.parametrize("source", [make, language_model])
def test_a_predicted_peak_is_that_of_a_real_step(source: Any, memory: str) -> None:
    assert simulated(source, Job(CPU), memory).memory.peak == pytest.approx(allocated(*source(), memory), rel=0.02)


def test_a_converted_model_is_split_without_values_as_with_them() -> None:
    """The check whether its parts make up a layer compares values, of which there are none."""
    transformers = pytest.importorskip("transformers")

    def make_vit() -> tuple[nn.Module, dict[str, Tensor]]:
        config = transformers.ViTConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4
        )
        model = transformers.ViTForImageClassification(config)
        rg.convert(model, "two_stream", exact=False)
        return model, {"pixel_values": torch.randn(2, 3, 8, 8), "labels": torch.randint(2, (2,))}

    with opened(make_vit, Job(CPU)) as subject:
        rank = subject.rank()
        steps = [len(list(block.each_step())) for block in rank.stacks[0].blocks]
    model, batch = make_vit()
    loss_of(model, batch).backward()
    assert steps == [len(list(block.each_step())) for block in the_stack(model).blocks] == [2, 2]


def test_a_graph_network_is_planned_without_values() -> None:
    def graph() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
        return DeepGraphNetwork(4, 2, width=16, depth=3), (torch.randn(10, 4), torch.randint(10, (2, 30)))

    assert simulated(graph, Job(CPU)).memory.peak < simulated(graph, Job(CPU), "store").memory.peak


def test_what_a_rank_holds_adds_up_and_reversing_does_not_grow_with_depth() -> None:
    by_depth = {depth: simulated(lambda depth=depth: make(depth=depth), Job(CPU)) for depth in (3, 9)}
    for depth, cost in by_depth.items():
        parameters = sum(p.numel() * 4 for p in make(depth=depth)[0].parameters())
        assert cost.memory.parameters == parameters
        assert cost.memory.optimizer == pytest.approx(2 * parameters, rel=0.01)
    assert by_depth[3].memory.activations == by_depth[9].memory.activations
    stored = [simulated(lambda depth=depth: make(depth=depth), Job(CPU), "store") for depth in (3, 9)]
    assert stored[1].memory.activations > 2 * stored[0].memory.activations


@pytest.fixture
def nothing_allocated() -> Iterator[None]:
    before = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    with before as profile:
        yield
    events = profile.profiler.kineto_results.events()
    assert max((e.nbytes() for e in events if e.name() == "[memory]"), default=0) < 2**20


def test_a_factory_allocates_nothing_whatever_device_it_asks_for(nothing_allocated: None) -> None:
    def elsewhere() -> tuple[nn.Module, Tensor]:
        with torch.device("cuda"):
            blocks = [rg.two_stream(nn.Linear(8192, 8192), nn.Linear(8192, 8192)) for _ in range(4)]
        stack = rg.ReversibleSequence(blocks).to("xpu").cuda().to(torch.bfloat16)
        return stack, torch.randn(64, 8192, device="cuda:1", dtype=torch.bfloat16)

    memory = simulated(elsewhere, Job(H100)).memory
    assert memory.parameters == 8 * (8192 * 8192 + 8192) * 2


def test_autocast_to_a_device_that_is_not_here_halves_what_is_stored() -> None:
    class Cast(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind = kind
            self.stack = make()[0]

        def forward(self, x: Tensor) -> Any:
            with torch.autocast(self.kind, torch.bfloat16):
                return self.stack(x)

    stored = {
        kind: simulated(lambda kind=kind: (Cast(kind), make()[1]), Job(H100), "store") for kind in ("cuda", "cpu")
    }
    assert stored["cuda"].memory == stored["cpu"].memory
    assert stored["cuda"].memory.activations < simulated(make, Job(H100), "store").memory.activations


def test_a_model_that_is_here_is_planned_by_a_copy_without_values() -> None:
    model, batch = make()
    weight = next(model.parameters())
    planned = plan(model, batch, "1GiB", on=CPU)
    assert planned["store"].cost.memory == simulated(make, Job(CPU), "store").memory
    assert next(model.parameters()) is weight
    assert weight.grad is None
    assert float(weight.detach().abs().sum()) > 0


def test_a_plan_between_reverse_and_store_fits_its_budget_and_is_faster_than_reversing() -> None:
    free = plan(lambda: make(64, 6), on="rtx-4090-24gb")
    assert free.best is not None
    assert free.best.name == "store"
    low, high = (free[mode].cost.memory.peak for mode in ("reverse", "store"))
    planned = plan(lambda: make(64, 6), None, (low + high) // 2, on="rtx-4090-24gb")
    chosen = planned["this budget's plan"]
    assert chosen.cost.memory.peak <= (low + high) // 2
    assert planned.plan is not None
    assert len(set(planned.plan.memory)) > 1
    assert free["store"].cost.seconds.likely < chosen.cost.seconds.likely < free["reverse"].cost.seconds.likely


def test_nothing_fits_a_budget_below_the_least() -> None:
    planned = plan(make, None, 1000, on=CPU)
    assert planned.best is None
    assert planned.plan is None
    assert "Nothing fits 1000 B" in str(planned)


def test_a_fused_optimiser_has_no_gradients_at_its_peak() -> None:
    assert simulated(make, Job(CPU, fused=True)).memory.gradients == 0
    assert simulated(make, Job(CPU)).memory.gradients > 0


def test_a_named_optimiser_has_its_own_state() -> None:
    sgd, adam = (simulated(make, Job(CPU, optimizer=name)).memory for name in ("sgd", "Adam"))
    assert sgd.optimizer == 0
    assert adam.optimizer >= 2 * adam.parameters


# Several ranks


def test_reversing_adds_no_all_gather_to_checkpointing_and_shards_divide_by_the_ranks() -> None:
    costs = {memory: simulated(make, Job(H100, 4, "fsdp2"), memory) for memory in ("store", "checkpoint", "reverse")}
    assert {cost.traffic.all_gathers for cost in costs.values()} == {2 * 3}  # forward and backward, for each block
    whole = simulated(make, Job(H100)).memory
    assert costs["reverse"].memory.parameters == pytest.approx(whole.parameters / 4, rel=0.05)
    assert costs["reverse"].memory.optimizer == pytest.approx(whole.optimizer / 4, rel=0.05)
    assert costs["reverse"].memory.activations == whole.activations


def test_ddp_adds_a_copy_of_all_gradients_and_hsdp_shards_within_replicas() -> None:
    ddp, alone = simulated(make, Job(H100, 4, "ddp")), simulated(make, Job(H100))
    assert ddp.memory.peak - alone.memory.peak == alone.memory.parameters
    assert ddp.traffic.all_reduces == 1
    hsdp, fsdp = simulated(make, Job(H100, 8, "hsdp")), simulated(make, Job(H100, 4, "fsdp2"))
    assert hsdp.memory.parameters == fsdp.memory.parameters
    assert (hsdp.traffic.all_reduces, fsdp.traffic.all_reduces) == (3, 0)  # one per block, between the replicas


def test_a_factory_splits_branches_over_the_mesh_of_tensor_parallel_ranks() -> None:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def split(mesh: Any) -> tuple[nn.Module, Tensor]:
        stack, batch = make()
        for block in stack.blocks:
            for step in block.each_step():
                parallelize_module(step.branch, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
        return stack, batch

    cost, alone = simulated(split, Job(H100, 2, "tensor"), "store"), simulated(make, Job(H100), "store")
    assert cost.memory.parameters < 0.6 * alone.memory.parameters
    assert cost.memory.activations < alone.memory.activations
    assert cost.traffic.all_reduces > 0


def test_an_earlier_stage_of_a_pipeline_holds_more_micro_batches() -> None:
    def stage(stage: int, stages: int) -> tuple[nn.Module, Tensor]:
        return make(depth=6 // stages)

    first, last = (simulated(stage, Job(H100, 3, "pipeline", stage=i), "store").memory.activations for i in (0, 2))
    assert 2.5 < first / last < 3.5


# Devices


def test_every_known_device_has_sources_and_can_be_planned_for() -> None:
    for device in known_devices().values():
        assert device.sources
        assert device.memory == int(device.name.rpartition("-")[2].removesuffix("gb")) * 10**9
        assert device.rate("bfloat16") >= device.rate("float32")


def test_a_device_of_ones_own_is_a_json_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"memory": "8GB", "bandwidth": 1e11, "flops": {"float32": 1e13}}))
    device = device_named(str(path))
    assert (device.name, device.memory) == ("mine", 8 * 10**9)
    path.write_text(json.dumps({"memory": "8GB", "speed": 1}))
    with pytest.raises(ValueError, match=r"'speed'\] are not known and \['bandwidth', 'flops'\] are missing"):
        device_named(str(path))


def test_this_machine_is_measured() -> None:
    this = device_named("this")
    assert this.memory > 2**20
    assert this.bandwidth > 1e8
    assert this.rate("float32") > 1e8
    assert 1e-8 < this.overhead < 1e-2


def test_a_faster_device_takes_less_time_and_a_range_surrounds_every_time() -> None:
    slow, fast = (simulated(lambda: make(4096), Job(device_named(name))).seconds for name in ("l4-24gb", "h100-80gb"))
    assert fast.likely < slow.likely
    assert slow.best < slow.likely < slow.worst


# fit


def test_fit_on_paper_finds_the_largest_batch_that_fits() -> None:
    sizes = fit(make, on=CPU, memory_limit="2MB", modes=("store", "reverse"), low=4, high=32)
    for memory in ("store", "reverse"):
        size = sizes[memory].size
        assert size is not None
        assert simulated(lambda size=size: make(size), Job(CPU), memory).memory.peak <= 2_000_000
        assert simulated(lambda size=size: make(size + 1), Job(CPU), memory).memory.peak > 2_000_000
    assert sizes["reverse"].size > sizes["store"].size


# Bad input


def test_an_unknown_device_shard_or_optimiser_lists_those_that_are_known() -> None:
    with pytest.raises(ValueError, match=r"on='h1' is not known; choose one of .*h100-80gb.*'this'"):
        plan(make, on="h1")
    with pytest.raises(ValueError, match=r"shard='zero' is not known; choose one of .*'fsdp2'"):
        plan(make, on=H100, ranks=2, shard="zero")
    with pytest.raises(ValueError, match=r"optimizer='adamx' is not known; choose one of .*'adamw'"):
        plan(make, on=H100, optimizer="adamx")
    with pytest.raises(ValueError, match="ranks=2 need to know what they share"):
        plan(make, on=H100, ranks=2)
    with pytest.raises(ValueError, match="fused=True with shard='ddp'"):
        plan(make, on=H100, ranks=2, shard="ddp", fused=True)


def test_a_model_that_needs_values_is_refused_with_the_line_that_does() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stack = make()[0]

        def forward(self, x: Tensor) -> Any:
            kept = x[x[:, 0, 0] > 0]  # the rows that are kept
            return self.stack(kept)

    with pytest.raises(ValueError, match=r"test_on_paper\.py, line \d+: `kept = x\[x\[:, 0, 0\] > 0\]"):
        plan(lambda: (Asks(), make()[1]), on=H100)
    with pytest.raises(ValueError, match=r"Making the model needs .*test_on_paper\.py, line \d+: `.*\.item\(\)"):
        plan(lambda: make(int(torch.ones(()).add(1).item())), on=H100)


def test_an_operator_that_fails_without_values_is_named_with_its_line() -> None:
    def wrong() -> tuple[nn.Module, Tensor]:
        return rg.ReversibleSequence([rg.two_stream(nn.Linear(WIDTH, WIDTH), lambda x: x @ x)]), make()[1]

    with pytest.raises(ValueError, match=r"failed on tensors without values: test_on_paper\.py, line \d+: `.*x @ x"):
        plan(wrong, on=H100)


@pytest.mark.parametrize("way", ["in place", "wrapped"])
def test_a_compiled_model_is_planned_uncompiled_and_the_plan_says_so(way: str) -> None:
    def compiled() -> tuple[Any, Tensor]:
        model, batch = make()
        if way == "wrapped":
            return torch.compile(model, backend="retrograde"), batch
        model.compile(backend="retrograde")
        return model, batch

    planned, plain = plan(compiled, on=H100), plan(make, on=H100)
    assert [way.cost for way in planned.ways] == [way.cost for way in plain.ways]
    assert planned.compiled
    assert "The model is compiled, and these figures are those of the same model uncompiled" in str(planned)
    assert not plain.compiled
    assert "is compiled" not in str(plain)


# A large model


@pytest.mark.slow
def test_a_model_of_billions_of_parameters_is_planned_in_seconds_and_little_memory() -> None:
    def large() -> tuple[nn.Module, Tensor]:
        return ReversibleLM(32000, 4096, 12, 32, 8, hidden=16384), torch.randint(100, (1, 4096))

    planned = plan(large, None, "40GiB", on="h100-80gb", ranks=8, shard="fsdp2", precision="bf16")
    assert isinstance(planned, JobPlan)
    assert planned["store"].cost.memory.parameters * 8 > 4 * 2e9
    assert planned.best is not None
    data = json.loads(json.dumps(planned.to_dict()))
    assert data["predicted"] is True
    assert {way["name"] for way in data["ways"]} >= {"store", "checkpoint", "reverse"}

"""The doctor: what it measures is right, what it suggests was measured, and what it cannot examine it says."""

from __future__ import annotations

import gc
import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from examined import WIDTH, Around, batch, mlp, stack_of
from measured import live_tapes
from retrograde.diagnose import Diagnosis, StackReport, StepReport, examine
from retrograde.engine.torch_internals import TELLS_RESULTS
from retrograde.measure import MemoryTracker, default_loss
from retrograde.network.block import invert_step, run_step


def only_stack(diagnosis: Diagnosis) -> StackReport:
    (stack,) = diagnosis.stacks
    return stack


def first_branch(diagnosis: Diagnosis) -> StepReport:
    return only_stack(diagnosis).blocks[0].steps[0]


@cache
def healthy() -> Diagnosis:
    return examine(stack_of(6), batch())


@cache
def drifting() -> Diagnosis:
    """Dividing by 0.1 magnifies rounding a hundredfold per block."""
    return examine(stack_of(8, keep=0.1), batch())


@cache
def coarse() -> Diagnosis:
    return examine(stack_of(48).bfloat16(), batch(dtype=torch.bfloat16))


def gradient_errors(stack: Any, x: Tensor, memory: Any, loss: Callable[[Tensor], Tensor]) -> list[float]:
    """The relative gradient error of each block, and of the input, under a plan; without any help of the doctor's."""
    groups = [*(list(block.parameters()) for block in stack.blocks), [x]]

    def gradients(plan: Any) -> list[Tensor]:
        each = iter(torch.autograd.grad(loss(stack(x, memory=plan)), [p for group in groups for p in group]))
        return [torch.cat([next(each).double().flatten() for _ in group]) for group in groups]

    return [float((a - b).norm() / b.norm()) for a, b in zip(gradients(memory), gradients("store"), strict=True)]


def square(output: Tensor) -> Tensor:
    return output.float().square().mean()


def test_a_healthy_model_is_reported_healthy_at_the_floor_of_its_dtype() -> None:
    stack = only_stack(healthy())
    assert healthy().healthy
    assert not healthy().suggestions
    assert healthy().verdict.startswith("Healthy: all 6 blocks")
    for block in stack.blocks:
        assert block.drift is not None
        assert 0 < block.drift < 4 * stack.floor
        assert block.gradient_cosine == pytest.approx(1)
    assert all(b.amplification is not None and 0.5 < b.amplification < 2 for b in stack.blocks)


def test_drift_is_the_distance_between_the_recomputed_and_the_true_streams() -> None:
    stack, x = stack_of(5, keep=0.5), batch()
    steps = [bound for block in stack for bound in block.bound_steps(stack.names)]
    states = [(x, x)]
    for bound in steps[:-1]:  # the last step keeps its graph, and recomputing starts before it
        states.append(tuple(s.detach() for s in run_step(bound, states[-1], {})[0]))
    recomputed = states[-1]
    blocks = only_stack(examine(stack, x)).blocks
    for i in reversed(range(len(steps) - 1)):
        recomputed = tuple(s.detach() for s in invert_step(steps[i], recomputed, {}))
        if i % 2 == 0:
            wanted = (
                torch.cat(recomputed).double().sub(torch.cat(states[i])).norm() / torch.cat(states[i]).double().norm()
            )
            assert blocks[i // 2].drift == pytest.approx(float(wanted), rel=1e-6)
            assert blocks[i // 2].magnitude == pytest.approx(float(torch.cat(states[i]).square().mean().sqrt()))


def test_gradient_errors_are_those_of_the_engine_against_stored_activations() -> None:
    stack, x = stack_of(8, keep=0.1), batch().requires_grad_()
    report = only_stack(examine(stack, x, loss=square))
    *blocks, entering = gradient_errors(stack, x, "reverse", square)
    assert max(blocks) > 0.1, "this stack must drift, or the test sees nothing"
    assert [b.gradient_error for b in report.blocks] == pytest.approx(blocks, rel=1e-6)
    assert report.input_gradient_error == pytest.approx(entering, rel=1e-6)


def test_the_amplification_of_a_linear_inverse_is_what_its_algebra_says() -> None:
    """A branch that returns zero leaves `keep x`: the inverse multiplies an error and the streams alike by 1 / keep."""
    coupling = rg.couplings.Scaled(keep=0.25)
    zeros = [rg.two_stream(lambda x: 0 * x.tanh(), lambda x: 0 * x.tanh(), coupling=coupling) for _ in range(3)]
    flat = only_stack(examine(rg.ReversibleSequence(zeros), batch().requires_grad_()))
    assert [b.amplification for b in flat.blocks] == pytest.approx([1.0] * 3, rel=1e-3)
    steep = only_stack(drifting())
    assert all(b.amplification is not None and b.amplification > 30 for b in steep.blocks[1:])


def test_the_first_block_past_tolerance_is_the_first_that_the_backward_pass_meets() -> None:
    stack = only_stack(drifting())
    assert stack.first_bad is not None
    assert stack.blocks[stack.first_bad].error > stack.tolerance
    assert all(b.error <= stack.tolerance for b in stack.blocks[stack.first_bad + 1 :])
    assert not drifting().healthy
    assert f"block {stack.first_bad} of" in drifting().verdict
    assert "magnifies errors" in drifting().verdict


def test_bfloat16_streams_at_depth_48_are_past_tolerance_and_wider_streams_are_the_remedy() -> None:
    stack = only_stack(coarse())
    assert stack.dtype == "bfloat16"
    assert stack.tolerance == stack.floor == 2**-7
    assert stack.first_bad is not None
    assert 20 < stack.first_bad < 44
    (wider,) = [s for s in coarse().suggestions if s.remedy == "Streams in float32"]
    assert wider.enough
    assert wider.after.drift < wider.before.drift / 10


@pytest.mark.parametrize("diagnosis", [drifting, coarse], ids=["divides", "bfloat16"])
def test_an_exact_coupling_is_tried_and_leaves_no_error(diagnosis: Callable[[], Diagnosis]) -> None:
    (exact,) = [s for s in diagnosis().suggestions if s.remedy == "Exact coupling"]
    assert exact.enough
    assert exact.after.drift == exact.after.gradient_error == 0
    assert exact.before.drift > 0
    assert exact.after.peak_bytes > exact.before.peak_bytes


def test_a_grid_too_coarse_for_the_streams_is_not_suggested() -> None:
    """Streams that grow a thousandfold need a grid that would round away what they started with."""
    stack = rg.ReversibleSequence([rg.two_stream(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(10)])
    with torch.no_grad():
        for parameter in stack.parameters():
            parameter.mul_(3)
    diagnosis = examine(stack, batch())
    assert not diagnosis.healthy
    assert "the streams grow" in diagnosis.verdict
    assert not [s for s in diagnosis.suggestions if s.remedy.startswith("Exact")]


def test_suggested_anchors_have_the_measured_effect_when_a_user_sets_them() -> None:
    stack, x = stack_of(8, keep=0.1), batch().requires_grad_()
    (anchors,) = [s for s in examine(stack, x, loss=square).suggestions if s.remedy.startswith("Anchors")]
    code = anchors.how.removeprefix("Set stack.memory = ").removesuffix(".")
    plan = eval(code, {"Plan": rg.Plan, "stack": stack, "range": range})
    assert anchors.enough
    assert anchors.before.gradient_error == pytest.approx(max(gradient_errors(stack, x, "reverse", square)), rel=1e-6)
    assert anchors.after.gradient_error == pytest.approx(max(gradient_errors(stack, x, plan, square)), rel=1e-6)
    assert anchors.after.peak_bytes > anchors.before.peak_bytes


def test_suggestions_that_are_enough_come_first_and_the_cheapest_of_them_leads() -> None:
    suggestions = drifting().suggestions
    assert [s.enough for s in suggestions] == sorted((s.enough for s in suggestions), reverse=True)
    enough = [s.after.peak_bytes for s in suggestions if s.enough]
    assert enough == sorted(enough)
    (checkpoint,) = [s for s in suggestions if s.remedy == "Checkpointing"]
    assert checkpoint.after.drift == checkpoint.after.gradient_error == 0


def tracked_peak(stack: Any, x: Tensor, memory: str) -> int:
    """The peak of a training step besides parameters and their gradients, without any help of the doctor's."""
    parameters = list(stack.parameters())
    tracker = MemoryTracker([stack, x])
    handles = [p.register_hook(tracker.ignore) for p in parameters]
    with tracker:
        torch.autograd.grad(square(stack(x, memory=memory)), parameters)
    for handle in handles:
        handle.remove()
    return tracker.peak


def test_peaks_are_those_of_the_memory_tracker() -> None:
    stack, x = stack_of(6), batch()
    diagnosis = examine(stack, x, loss=square)
    peaks = {peak.memory: peak for peak in diagnosis.peaks}
    for memory in ("store", "checkpoint", "reverse"):
        assert peaks[memory].bytes == tracked_peak(stack, x, memory)
    assert peaks["reverse"].bytes < peaks["checkpoint"].bytes < peaks["store"].bytes
    assert peaks["store"].where in ("backward, block 5", "forward, block 5", "backward, after the stack")
    stored = [b.peak_bytes["store"] for b in only_stack(diagnosis).blocks]
    reversed_ = [b.peak_bytes["reverse"] for b in only_stack(diagnosis).blocks]
    assert stored[-1] > 4 * stored[0], "storing grows with depth, and the figures must show it"
    assert max(reversed_) <= 1.2 * min(reversed_)


class Routed(nn.Module):
    """Each row goes to one of four linear maps."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.layer_norm(x, (WIDTH,))
        weight, chosen = self.gate(x).softmax(-1).topk(1)
        every = torch.stack([expert(x) for expert in self.experts], -2)
        return weight * every.gather(-2, chosen[..., None].expand(-1, -1, WIDTH)).squeeze(-2)


@cache
def routed() -> Diagnosis:
    return examine(stack_of(8, Routed, keep=0.3), batch(256))


def test_decisions_that_a_replay_takes_differently_are_counted() -> None:
    blocks = only_stack(routed()).blocks
    assert all(block.decisions == 256 for block in blocks)
    assert blocks[-1].flips == 0
    assert blocks[0].flips > 0
    assert "decisions flip" in routed().verdict


def test_replaying_decisions_is_tried_where_decisions_flip_and_there_alone() -> None:
    (replayed,) = [s for s in routed().suggestions if s.remedy == "Decision replay"]
    assert replayed.before.flips > 0
    assert replayed.after.flips == 0
    assert replayed.after.gradient_error < replayed.before.gradient_error
    assert not [s for s in drifting().suggestions if s.remedy == "Decision replay"]


class Decided(Routed):
    """Its replays reuse the choices of its first run."""

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.layer_norm(x, (WIDTH,))
        weights = self.gate(x).softmax(-1)
        chosen = rg.decide(weights.topk(1).indices)
        every = torch.stack([expert(x) for expert in self.experts], -2)
        return weights.gather(-1, chosen) * every.gather(-2, chosen[..., None].expand(-1, -1, WIDTH)).squeeze(-2)


def test_flips_that_decide_prevents_do_not_count_as_flips() -> None:
    blocks = only_stack(examine(stack_of(8, Decided, keep=0.3), batch(256))).blocks
    assert sum(step.prevented_flips for block in blocks for step in block.steps) > 0
    assert all(block.flips == 0 for block in blocks)


class Busy(nn.Module):
    """Draws from every generator, changes buffers and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.own = torch.Generator().manual_seed(3)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.drop = nn.Dropout(0.1)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.drop(self.norm(x)) + 0.1 * random.random() + torch.rand(WIDTH, generator=self.own)


def test_what_a_branch_does_that_a_replay_must_handle_is_named() -> None:
    diagnosis = examine(stack_of(2, Busy), batch())
    does = first_branch(diagnosis).behaviour
    assert set(does.draws) == {"its own torch Generator", "torch's generator (cpu)", "Python's random"}
    assert does.generators == ("its own torch Generator",)
    assert does.buffers == ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked")
    assert does.attributes == ("count",)
    assert does.repeat_error == 0
    assert diagnosis.healthy, "the engine handles all of it"
    assert not only_stack(diagnosis).blocks[0].steps[1].behaviour.sentences(), "a plain branch does nothing of the kind"


def test_an_examination_leaves_no_trace() -> None:
    model = stack_of(3, Busy, keep=0.05)
    own = model.blocks[0].steps[0].branch
    before = {name: value.clone() for name, value in model.state_dict().items()}
    states = (torch.get_rng_state(), random.getstate(), own.own.get_state())
    assert not examine(model, batch()).healthy
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert torch.equal(own.own.get_state(), states[2])
    assert own.count == 0
    assert all(p.grad is None for p in model.parameters())
    assert not any(step.exact for block in model for step in block.each_step())


def test_every_stack_of_a_model_is_examined_under_its_name() -> None:
    diagnosis = examine(Around(stack_of(2), stack_of(12, keep=0.1)), {"x": batch(), "scale": 0.5})
    assert [stack.name for stack in diagnosis.stacks] == ["first", "second"]
    assert [stack.calls for stack in diagnosis.stacks] == [2, 1]
    assert diagnosis.stacks[0].drift < 1e-6
    assert diagnosis.stacks[0].first_bad is not None, "the gradients that it is handed are wrong"
    assert diagnosis.stacks[1].drift > 1
    assert "of second" in diagnosis.verdict
    assert any(peak.where.startswith(("backward, second", "forward, second")) for peak in diagnosis.peaks)


def test_a_plan_of_the_users_is_examined_unchanged() -> None:
    plan = rg.Plan(("reverse",) * 8, anchors=frozenset(range(1, 8)))
    assert examine(stack_of(8, keep=0.1, memory=plan), batch()).healthy
    mixed = only_stack(examine(stack_of(4, memory=["reverse", "reverse", "checkpoint", "store"]), batch()))
    assert [b.memory for b in mixed.blocks] == ["reverse", "reverse", "checkpoint", "store"]
    assert [b.drift is None for b in mixed.blocks] == [False, False, True, True]


def selective_stack(keep: float, *, transition: bool) -> rg.ReversibleSequence:
    torch.manual_seed(0)
    coupling = rg.couplings.Scaled(keep=keep)
    blocks = [rg.two_stream(mlp(), mlp(), coupling=coupling, save_ops="products") for _ in range(8)]
    if transition:
        blocks.insert(1, rg.transition(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)))
    return rg.ReversibleSequence(blocks, memory="selective")


@pytest.mark.skipif(not TELLS_RESULTS, reason='with this torch, "selective" saves nothing')
@pytest.mark.parametrize("transition", [False, True], ids=["all invertible", "with a stage transition"])
def test_a_selective_stack_is_examined_in_that_mode(transition: bool) -> None:
    stack, x = selective_stack(0.1, transition=transition), batch()
    diagnosis = examine(stack, x, loss=square)
    report, peaks = only_stack(diagnosis), {peak.memory: peak.bytes for peak in diagnosis.peaks}
    assert [b.memory for b in report.blocks] == [
        "selective checkpoint" if i == 1 and transition else "selective" for i in range(len(stack))
    ]
    assert list(peaks) == ["store", "checkpoint", "selective"]
    for _ in range(2):  # the engine learns in the first call what is worth saving
        selective = tracked_peak(stack, x, "selective")
    assert peaks["selective"] == selective > tracked_peak(stack, x, "reverse")
    assert diagnosis.verdict.startswith("Fault: on the way back")
    assert 'memory="selective" peaks at' in diagnosis.verdict
    assert report.drift > 0.01, "this stack must drift, or the test sees nothing"
    *blocks, _ = gradient_errors(stack, x.requires_grad_(), "selective", square)
    assert [b.gradient_error for b in report.blocks] == pytest.approx(blocks, rel=1e-6)
    assert 'memory="selective"' in diagnosis.table()


def test_the_default_loss_has_a_gradient_behind_a_normalisation() -> None:
    """A mean of squares is a constant there: its gradient is rounding, which does not compare."""

    def gradient(loss: Callable[[Any], Tensor]) -> float:
        x = batch().requires_grad_()
        (of_x,) = torch.autograd.grad(loss(nn.functional.layer_norm(x, (WIDTH,))), x)
        return float(of_x.norm())

    assert gradient(default_loss) > 1e-2
    assert gradient(square) < 1e-5


def test_a_diagnosis_survives_json() -> None:
    for diagnosis in (healthy(), drifting(), routed()):
        text = diagnosis.to_json()
        assert Diagnosis.from_json(text) == diagnosis
        assert json.loads(text, parse_constant=pytest.fail)["healthy"] is diagnosis.healthy


def test_the_table_has_a_row_per_block_and_says_where_the_fault_is() -> None:
    text = drifting().table()
    first = only_stack(drifting()).first_bad
    (marked,) = [line for line in text.splitlines() if line.endswith("first past tolerance")]
    assert marked.split()[0] == str(first)
    assert text.count("past tolerance\n") == len(only_stack(drifting()).past)
    assert "What to change, as measured:" in text
    assert text.endswith(drifting().verdict)
    busy = examine(stack_of(3, Busy), batch()).table()
    assert "blocks 0-2, Busy: draws from" in busy


def test_the_picture_shows_something(tmp_path: Path) -> None:
    import matplotlib.image

    path = drifting().plot(tmp_path / "drift.png")
    image = matplotlib.image.imread(path)
    assert image.shape[0] > 500
    assert image.shape[1] > 800
    colours = {tuple(pixel) for pixel in (image[::2, ::2, :3].reshape(-1, 3) * 255).astype(int).tolist()}
    assert {(43, 108, 176), (181, 48, 90), (176, 176, 176)} <= colours, "drift, gradient error and stored memory"


def test_an_examination_leaves_no_tape_behind() -> None:
    """Nor do forward runs alone, as when a remedy is tried, of a model that calls a stack on its own output."""
    gc.collect()
    before = live_tapes()
    assert not examine(Around(stack_of(2), stack_of(12, keep=0.1)), batch()).healthy
    gc.collect()
    assert live_tapes() <= before, "those that other tests of this process hold are not ours"

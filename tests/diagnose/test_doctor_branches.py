"""The doctor and what it cannot simply run: branches that edit their source, blocks at an end, remedies that fail."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from examined import WIDTH, batch, mlp, stack_of
from retrograde.diagnose import Diagnosis, StackReport, examine


def only_stack(diagnosis: Diagnosis) -> StackReport:
    (stack,) = diagnosis.stacks
    return stack


class InPlace(nn.Module):
    """Edits its source, by a view if asked to."""

    def __init__(self, *, by_view: bool = False) -> None:
        super().__init__()
        self.by_view = by_view

    def forward(self, x: Tensor) -> Tensor:
        return (x.view(-1) if self.by_view else x).mul_(0.5).view_as(x)


@pytest.mark.parametrize("by_view", [False, True])
def test_a_branch_that_edits_its_source_has_a_row_that_names_it_and_says_what_to_do(by_view: bool) -> None:
    stack = stack_of(3)
    stack.blocks[1] = rg.two_stream(InPlace(by_view=by_view), mlp())
    diagnosis = examine(stack, batch())
    assert [step.behaviour.edits_source for block in only_stack(diagnosis).blocks for step in block.steps] == [
        False, False, True, False, False, False,
    ]  # fmt: skip
    assert not diagnosis.healthy
    assert diagnosis.verdict.startswith("Fault: a branch edits its source in place, which a stack refuses: block 1 of")
    lines = diagnosis.table().splitlines()
    (row,) = [line for line in lines if line.split()[:2] == ["1", "InPlace"]]
    assert row.endswith("edits its source")
    (advice,) = [line for line in lines if line.startswith("  block 1, InPlace:")]
    assert "use an out-of-place operation (relu(x) for relu_(x)), or let the branch clone its source" in advice


def test_with_a_branch_that_edits_its_source_the_rest_is_examined_as_if_it_had_a_copy() -> None:
    def figures(first: Any) -> Any:
        stack = stack_of(4, keep=0.1)
        stack.blocks[1] = rg.two_stream(first, mlp(), coupling=rg.couplings.Scaled(keep=0.1))
        torch.manual_seed(3)
        stack.blocks[1].steps[1].branch.load_state_dict(mlp().state_dict())
        report = only_stack(examine(stack, batch()))
        assert report.first_bad is not None, "this stack must drift, or the test sees nothing"
        return [(b.drift, b.gradient_error, b.amplification) for b in report.blocks]

    class Copying(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.clone().mul_(0.5)

    assert figures(InPlace()) == figures(Copying())


def test_a_branch_that_edits_a_cast_of_its_source_edits_nothing() -> None:
    block = rg.Block(rg.Step(InPlace(), 0, 1, compute=torch.bfloat16), rg.Step(mlp(), 1, 0))
    stack = rg.ReversibleSequence([block])
    stack(batch()).sum().backward()
    assert not only_stack(examine(stack, batch())).edits


def test_an_examination_of_a_branch_that_edits_leaves_no_trace() -> None:
    stack, x = stack_of(2, InPlace), batch()
    before = x.clone()
    examine(stack, x)
    assert torch.equal(x, before)
    with pytest.raises(ValueError, match="edited one of its sources in place"):
        stack(x)


def test_the_last_block_and_one_before_an_anchor_have_an_amplification_of_their_own() -> None:
    plan = rg.Plan(("reverse",) * 6, anchors={3})
    stack, x = stack_of(6, keep=0.1, memory=plan), batch()
    blocks = only_stack(examine(stack, x)).blocks
    assert all(b.amplification is not None and b.amplification > 2 for b in blocks)
    streams = (x, x)
    with torch.no_grad():
        for block in stack.blocks[:-1]:
            streams, _ = block(streams, {}, names=stack.names)
        after, _ = stack.blocks[-1](streams, {}, names=stack.names)
        noise = [torch.randn(s.shape, generator=torch.Generator().manual_seed(5)) for s in after]
        size = 1e-3 * torch.cat(after).norm() / torch.cat(noise).norm()
        back = stack.blocks[-1].inverse(tuple(s + size * n for s, n in zip(after, noise, strict=True)), {}, stack.names)
    gain = (torch.cat(back) - torch.cat(streams)).norm() / torch.cat(streams).norm() / 1e-3
    assert blocks[-1].amplification == pytest.approx(float(gain), rel=0.3)  # another direction of the error


def test_a_last_block_that_draws_has_no_amplification() -> None:
    """Its inverse by itself would draw in another order."""
    blocks = only_stack(examine(stack_of(3, lambda: nn.Sequential(mlp(), nn.Dropout(0.1)), keep=0.5), batch())).blocks
    assert [b.amplification is None for b in blocks] == [False, False, True]


def with_an_affine_step() -> rg.ReversibleSequence:
    torch.manual_seed(0)
    affine = rg.Block(
        rg.Step(nn.Linear(WIDTH, 2 * WIDTH), 0, 1, coupling=rg.couplings.Affine(limit=0.1)), rg.Step(mlp(), 1, 0)
    )
    return rg.ReversibleSequence([*stack_of(6, keep=0.1).blocks, affine])  # type: ignore[arg-type]


def test_a_remedy_that_the_model_does_not_run_with_is_named_with_the_reason() -> None:
    diagnosis = examine(with_an_affine_step(), batch())
    assert not diagnosis.healthy
    assert not [s for s in diagnosis.suggestions if s.remedy.startswith("Exact")]
    (exact,) = diagnosis.untried
    assert exact.remedy == "Exact coupling"
    assert "Block 6: Linear is coupled by Affine, which has no exact form here" in exact.reason
    assert f"  - {exact.sentence()}" in diagnosis.table().splitlines()
    assert exact.sentence().startswith("Exact coupling: could not be tried: ValueError: Block 6")
    assert "\n" not in exact.sentence()


def test_what_could_not_be_tried_survives_json_and_older_json_is_read() -> None:
    diagnosis = examine(with_an_affine_step(), batch())
    assert diagnosis.untried
    assert Diagnosis.from_json(diagnosis.to_json()) == diagnosis
    older = {name: value for name, value in json.loads(diagnosis.to_json()).items() if name != "untried"}
    assert Diagnosis.from_json(json.dumps(older)).untried == ()


def test_a_model_that_every_remedy_runs_with_has_none_untried() -> None:
    assert examine(stack_of(8, keep=0.1), batch()).untried == ()

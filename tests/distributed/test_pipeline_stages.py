"""A stack split over the stages of a pipeline, two processes: equal to one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, schedules

import retrograde as rg
from joined import batch, mean_loss
from stacks import MEMORIES, assert_close, memory_of, twins
from team import in_processes

DEPTH = 8
ONE_STAGE_EACH = ("ScheduleGPipe", "Schedule1F1B")
TWO_STAGES_EACH = ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble")


class Stage(nn.Module):
    """Some of the blocks. The first stage gets the input, the last returns the output; streams go between stages."""

    def __init__(self, blocks: list[rg.Block], memory: str, *, last: bool) -> None:
        super().__init__()
        self.stack = rg.ReversibleSequence(
            blocks, merge="mean" if last else None, memory=memory_of(memory, len(blocks))
        )

    def forward(self, *streams: Tensor) -> Any:
        return self.stack(streams if len(streams) > 1 else streams[0])


def stages_of(stack: rg.ReversibleSequence, count: int, memory: str) -> list[Stage]:
    size = len(stack.blocks) // count
    parts = [list(stack.blocks[i * size : (i + 1) * size]) for i in range(count)]
    return [Stage(part, memory, last=part is parts[-1]) for part in parts]


@pytest.mark.parametrize("memory", MEMORIES)
@pytest.mark.parametrize("schedule", ONE_STAGE_EACH + TWO_STAGES_EACH)
@in_processes(2)
def test_a_pipeline_gives_the_output_and_gradients_of_one_process(rank: int, schedule: str, memory: str) -> None:
    stack, reference = twins(depth=DEPTH)
    count = 2 if schedule in ONE_STAGE_EACH else 4
    modules = stages_of(stack, count, memory)
    mine = [0, 3] if "ZBV" in schedule else list(range(count))[rank::2]
    if "ZBV" in schedule and rank:
        mine = [1, 2]
    built = [PipelineStage(modules[i], i, count, torch.device("cpu")) for i in mine]
    kind = getattr(schedules, schedule)
    runner = kind(built[0] if count == 2 else built, n_microbatches=4, loss_fn=lambda y, target: mean_loss(y - target))
    for step in range(2):
        x, target = batch(step), batch(step + 10)
        stack.zero_grad()
        reference.zero_grad()
        losses: list[Tensor] = []
        holds_last = count - 1 in mine
        y = runner.step(*([x] if 0 in mine else []), **({"target": target, "losses": losses} if holds_last else {}))
        expected = reference(x)
        mean_loss(expected - target).backward()
        if holds_last:
            assert_close(y.detach(), expected.detach())
        theirs = dict(zip(stack.parameters(), reference.parameters(), strict=True))
        for i in mine:
            for parameter in modules[i].parameters():
                assert_close(parameter.grad, theirs[parameter].grad)

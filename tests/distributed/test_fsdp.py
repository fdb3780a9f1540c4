"""FSDP2 (`fully_shard`), two processes: gradients are those of one process on the joined batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import register_fsdp_forward_method
from torch.distributed.tensor import DTensor

import retrograde as rg
from joined import WIDTH, batch, follow, gradients_agree, mean_loss, once, part
from shards import SHARDED, shard
from stacks import MEMORIES, Mlp, agree, twins, twins_of
from team import in_processes
from test_ddp import Judged, Statistics, WithEncoder, dropping_twins, judged_loss

each_way = pytest.mark.parametrize("way", SHARDED)


@pytest.mark.parametrize("memory", MEMORIES)
@each_way
@in_processes(2)
def test_fsdp_gives_the_gradients_of_one_process_on_the_joined_batch(way: str, memory: str) -> None:
    stack, reference = twins(memory=memory, depth=5 if memory == "mixed" else 3)
    follow(shard(stack, way), reference)


@pytest.mark.parametrize("reshard", [False, True, 1])
@each_way
@in_processes(2)
def test_fsdp_may_reshard_after_forward_or_not(way: str, reshard: bool | int) -> None:
    stack, reference = twins()
    follow(shard(stack, way, reshard_after_forward=reshard), reference)


class Twofold(nn.Sequential):
    """A branch for an affine coupling: a scale and a shift."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 2 * WIDTH))
        self.double()


@each_way
@in_processes(2)
def test_fsdp_works_with_a_coupling_that_saves_tensors_itself(way: str) -> None:
    """The coupling reads its tensors before autograd, and FSDP's hooks, reach the branch."""
    coupling = rg.couplings.Affine(limit=1.0)
    blocks = [rg.two_stream(Twofold(), Twofold(), coupling=coupling) for _ in range(3)]
    reference = rg.ReversibleSequence(copy.deepcopy(blocks), memory="store")
    follow(shard(rg.ReversibleSequence(blocks), way), reference)


@each_way
@in_processes(2)
def test_fsdp_trains_an_encoder_inside_that_feeds_context(way: str) -> None:
    encoder = Mlp()
    stack, reference = twins()
    follow(shard(WithEncoder(copy.deepcopy(encoder), stack), way), WithEncoder(encoder, reference))


@each_way
@in_processes(2)
def test_fsdp_counts_auxiliary_losses(way: str) -> None:
    stack, reference = twins_of([(Judged(), Judged()) for _ in range(3)], aux=("f", "g"))
    follow(shard(stack, way), reference, judged_loss)


@each_way
@in_processes(2)
def test_fsdp_with_layer_drop_and_one_seed_drops_the_same_blocks_everywhere(way: str) -> None:
    stack, reference = dropping_twins()
    for step in range(6):
        for model, x in ((stack, part(batch(step))), (reference, batch(step))):
            model.zero_grad()
            torch.manual_seed(step)
            if model is stack and not step:
                shard(stack, way)
            once(model, x).backward()
        for ours, theirs in zip(stack.parameters(), reference.parameters(), strict=True):
            ours.grad = None if theirs.grad is None else ours.grad  # FSDP gives zeros within a group that was used
        gradients_agree(stack, reference)


@in_processes(2)
def test_fsdp_sums_the_gradients_of_weights_shared_within_the_root() -> None:
    shared, others = Mlp(), [Mlp() for _ in range(3)]
    stack, reference = twins_of([(shared, other) for other in others])
    follow(shard(stack, "the root"), reference)


@each_way
@in_processes(2)
def test_fsdp_leaves_frozen_branches_without_a_gradient(way: str) -> None:
    stack, reference = twins()
    for model in (stack, reference):
        for parameter in list(model.parameters())[4:12]:  # the second branch and the third
            parameter.requires_grad_(False)
    follow(shard(stack, way), reference)


@each_way
@in_processes(2)
def test_fsdp_accumulates_without_reducing_and_reduces_once(way: str) -> None:
    stack, reference = twins()
    shard(stack, way)
    for step in range(2):
        first, second = batch(2 * step), batch(2 * step + 1)
        stack.zero_grad()
        reference.zero_grad()
        stack.set_requires_gradient_sync(False)
        once(stack, part(first)).backward()
        stack.set_requires_gradient_sync(True)
        once(stack, part(second)).backward()
        (once(reference, first) + once(reference, second)).backward()
        gradients_agree(stack, reference)


@each_way
@in_processes(2)
def test_fsdp_treats_buffers_and_dropout_as_a_stored_stack_does(rank: int, way: str) -> None:
    def scenario(model: Any) -> list[Tensor]:
        torch.manual_seed(7 + rank)
        losses = [once(model, part(batch(step))) for step in range(2)]
        sum(losses).backward()  # type: ignore[union-attr]
        return [loss.detach() for loss in losses]

    stacks = [twins(Statistics, memory=memory)[0] for memory in ("reverse", "store")]
    agree(*(shard(stack, way) for stack in stacks), scenario)
    for buffer, start in zip(stacks[0].buffers(), Statistics().buffers(), strict=False):
        assert not torch.equal(buffer, start), "no statistics were updated"


@each_way
@in_processes(2)
def test_fsdp_allows_several_calls_before_one_backward(way: str) -> None:
    def scenario(model: Any, x: Tensor) -> Tensor:
        return once(model, model(x)) + once(model, x)

    stack, reference = twins()
    follow(shard(stack, way), reference, scenario)


@pytest.mark.parametrize("memory", ["checkpoint", "reverse"])
@each_way
@in_processes(2)
def test_fsdp_takes_losses_on_hidden_states_of_a_registered_run(way: str, memory: str) -> None:
    def scenario(model: Any, x: Tensor) -> Tensor:
        outputs = model.run(x, hidden=[1])
        return mean_loss(outputs[0] + 2 * outputs[1]) + mean_loss(outputs.hidden[1][0])

    stack, reference = twins(memory=memory)
    shard(stack, way)
    register_fsdp_forward_method(stack, "run")
    follow(stack, reference, scenario)


@each_way
@in_processes(2)
def test_fsdp_works_with_blocks_of_a_single_branch(way: str) -> None:
    blocks = [rg.momentum(Mlp(), gamma=0.5), rg.midpoint(Mlp()), rg.momentum(Mlp(), gamma=0.5)]
    options: dict[str, Any] = {"split": "first", "merge": "first"}
    reference = rg.ReversibleSequence(copy.deepcopy(blocks), memory="store", **options)
    follow(shard(rg.ReversibleSequence(blocks, **options), way), reference)


class Watched(Mlp):
    """A branch that records, whenever it runs and whenever it gets a gradient, which branches are unsharded."""

    def __init__(self, crew: list[Watched], recorded: list[tuple[bool, bool, int]]) -> None:
        super().__init__()
        self.crew, self.recorded = crew, recorded
        self.whole: list[Tensor] = []  # FSDP frees their memory and allocates it again, but the tensors stay the same
        crew.append(self)

    def bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.whole)

    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        self.whole = [p for p in self.parameters() if not isinstance(p, DTensor)]
        self.record()
        y = super().forward(x)
        y.register_hook(lambda grad: self.record())
        return y

    def record(self) -> None:
        self.recorded.append((rg.is_replaying(), self.bytes() > 0, sum(branch.bytes() for branch in self.crew)))


def watched(depth: int, way: str, memory: str, **options: Any) -> tuple[list[Watched], list[tuple[bool, bool, int]]]:
    """Train one step, and return the branches and what they recorded."""
    crew: list[Watched] = []
    recorded: list[tuple[bool, bool, int]] = []
    blocks = [rg.two_stream(Watched(crew, recorded), Watched(crew, recorded)) for _ in range(depth)]
    stack = rg.ReversibleSequence(blocks, memory=memory)  # type: ignore[arg-type]
    once(shard(stack, way, **options), part(batch())).backward()
    return crew, recorded


@pytest.mark.parametrize("memory", ["checkpoint", "reverse"])
@each_way
@in_processes(2)
def test_fsdp_unshards_a_branch_for_its_replay_and_reshards_it_after(way: str, memory: str) -> None:
    crew, recorded = watched(3, way, memory)
    replays = [whole for replaying, whole, _ in recorded if replaying]
    assert replays == [True] * 5, "every step but the last is replayed, with unsharded parameters"
    assert not any(branch.bytes() for branch in crew), "something stayed unsharded after the backward pass"


@pytest.mark.parametrize("memory", ["checkpoint", "reverse"])
@pytest.mark.parametrize("way", ["each branch", "each block"])
@in_processes(2)
def test_fsdp_peak_parameter_memory_of_a_process_does_not_grow_with_depth(way: str, memory: str) -> None:
    def peak(depth: int, **options: Any) -> int:
        return max(bytes for _, _, bytes in watched(depth, way, memory, **options)[1])

    block = peak(1, reshard_after_forward=False)
    assert peak(3) == peak(12) <= block
    assert peak(12, reshard_after_forward=False) == 12 * block, "the test would see growth"

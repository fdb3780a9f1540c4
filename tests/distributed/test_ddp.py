"""DistributedDataParallel, two processes: gradients are those of one process on the joined batch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import retrograde as rg
from joined import WIDTH, batch, follow, gradients_agree, mean_loss, once, part
from stacks import MEMORIES, Mlp, Pair, Plain, agree, assert_close, twins, twins_of
from team import in_processes

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "find_unused_parameters": {"find_unused_parameters": True},
    "static_graph": {"static_graph": True},
    "gradient_as_bucket_view": {"gradient_as_bucket_view": True},
    "static views": {"static_graph": True, "gradient_as_bucket_view": True},
    "a bucket for each parameter": {"bucket_cap_mb": 1e-6},
}
each_option = pytest.mark.parametrize("option", OPTIONS)


@pytest.mark.parametrize("memory", MEMORIES)
@in_processes(2)
def test_ddp_gives_the_gradients_of_one_process_on_the_joined_batch(memory: str) -> None:
    stack, reference = twins(memory=memory)
    follow(DistributedDataParallel(stack), reference)


@each_option
@in_processes(2)
def test_ddp_options_change_no_gradient(option: str) -> None:
    stack, reference = twins(memory="mixed", depth=5)
    follow(DistributedDataParallel(stack, **OPTIONS[option]), reference)


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph"])
@in_processes(2)
def test_ddp_finds_the_parameters_that_a_call_does_not_use(option: str) -> None:
    stack, reference = twins()
    for model in (stack, reference):
        model.register_parameter("unused", nn.Parameter(torch.zeros(3, dtype=torch.float64)))
    follow(DistributedDataParallel(stack, **OPTIONS[option]), reference)


@each_option
@in_processes(2)
def test_ddp_accumulates_under_no_sync_and_reduces_once(option: str) -> None:
    stack, reference = twins()
    parallel = DistributedDataParallel(stack, **OPTIONS[option])
    once(parallel, part(batch())).backward()  # buckets are recomputed, and a static graph is learned, in the first pass
    for step in range(2):
        first, second = batch(2 * step), batch(2 * step + 1)
        parallel.zero_grad()
        reference.zero_grad()
        with parallel.no_sync():
            once(parallel, part(first)).backward()
        once(parallel, part(second)).backward()
        (once(reference, first) + once(reference, second)).backward()
        gradients_agree(parallel, reference)


@in_processes(2)
def test_ddp_cannot_learn_a_static_graph_under_no_sync_and_neither_with_a_plain_model() -> None:
    for model in twins():
        parallel = DistributedDataParallel(model, static_graph=True)
        with parallel.no_sync(), pytest.raises(RuntimeError, match="expect_autograd_hooks_"):
            once(parallel, part(batch())).backward()


@each_option
@in_processes(2)
def test_ddp_sums_the_gradients_of_shared_weights(option: str) -> None:
    torch.manual_seed(0)
    shared, others = Mlp(), [Mlp() for _ in range(3)]
    stack, reference = twins_of([(shared, other) for other in others])
    follow(DistributedDataParallel(stack, **OPTIONS[option]), reference)


class WithEncoder(nn.Module):
    """An encoder whose output every branch takes as context."""

    def __init__(self, encoder: nn.Module, stack: nn.Module) -> None:
        super().__init__()
        self.encoder, self.stack = encoder, stack

    def forward(self, x: Tensor) -> Any:
        return self.stack(x, shift=self.encoder(x))


@each_option
@in_processes(2)
def test_ddp_trains_an_encoder_inside_that_feeds_context(option: str) -> None:
    encoder = Mlp()
    stack, reference = twins()
    parallel = DistributedDataParallel(WithEncoder(copy.deepcopy(encoder), stack), **OPTIONS[option])
    follow(parallel, WithEncoder(encoder, reference))


class Judged(Mlp):
    """A branch with an auxiliary loss that is a mean over the batch."""

    def forward(self, x: Tensor) -> Any:
        update = super().forward(x)
        return update, update.square().mean()


def judged_loss(model: Any, x: Tensor) -> Tensor:
    y, aux = model(x)
    return mean_loss(y) + 0.1 * aux


@each_option
@in_processes(2)
def test_ddp_counts_auxiliary_losses(option: str) -> None:
    stack, reference = twins_of([(Judged(), Judged()) for _ in range(3)], aux=("f", "g"))
    follow(DistributedDataParallel(stack, **OPTIONS[option]), reference, judged_loss)


class Supervised(nn.Module):
    """A model that returns the streams as `run` does, with hidden states on them."""

    def __init__(self, stack: Any) -> None:
        super().__init__()
        self.stack = stack

    def forward(self, x: Tensor) -> Any:
        return self.stack.run(x, hidden=[1])


def deep_loss(model: Any, x: Tensor) -> Tensor:
    outputs = model(x)
    return mean_loss(outputs[0] + 2 * outputs[1]) + mean_loss(outputs.hidden[1][0])


@pytest.mark.parametrize("option", OPTIONS)
@in_processes(2)
def test_ddp_takes_losses_on_hidden_states_of_a_model_that_returns_outputs(option: str) -> None:
    stack, reference = twins()
    follow(DistributedDataParallel(Supervised(stack), **OPTIONS[option]), Supervised(reference), deep_loss)


class Dropping(Plain):
    """The plain loop with layer drop, drawn as a stack draws it."""

    def forward(self, x: Tensor) -> Any:
        dropped = torch.empty(len(self.pairs)).uniform_(0, 1) < 0.5
        running = [pair for pair, drop in zip(self.pairs, dropped, strict=True) if not drop] or self.pairs[:1]
        return Plain(running)(x)


def dropping_twins() -> tuple[rg.ReversibleSequence, Dropping]:
    torch.manual_seed(0)
    pairs: list[Pair] = [(Mlp(), Mlp()) for _ in range(4)]
    reference = Dropping(copy.deepcopy(pairs))
    return rg.ReversibleSequence([rg.two_stream(f, g) for f, g in pairs], layer_drop=0.5), reference


@in_processes(2)
def test_ddp_with_layer_drop_and_one_seed_drops_the_same_blocks_everywhere() -> None:
    stack, reference = dropping_twins()
    follow(DistributedDataParallel(stack, find_unused_parameters=True), reference, steps=6)


@in_processes(2)
def test_ddp_with_layer_drop_and_a_seed_per_process_averages_the_gradients_of_each(rank: int) -> None:
    stack, reference = dropping_twins()
    parallel = DistributedDataParallel(stack, find_unused_parameters=True)
    for step in range(6):
        for model in (parallel, reference):
            model.zero_grad()
            torch.manual_seed(10 * step + rank)
            once(model, part(batch(step))).backward()
        for ours, theirs in zip(stack.parameters(), reference.parameters(), strict=True):
            own = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
            ran = torch.tensor(theirs.grad is not None).long()
            dist.all_reduce(own)
            dist.all_reduce(ran)
            assert_close(ours.grad, own / 2 if ran else None)


class Statistics(nn.Sequential):
    """A branch with buffers that every run updates, and with dropout."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(3), nn.Tanh(), nn.Dropout(0.3))
        self.double()


@pytest.mark.parametrize("memory", MEMORIES)
@in_processes(2)
def test_ddp_treats_buffers_and_dropout_as_it_does_in_a_plain_model(rank: int, memory: str) -> None:
    """Two calls before one backward, while DDP itself writes the first process's buffers into the others."""

    def scenario(parallel: Any) -> list[Tensor]:
        torch.manual_seed(7 + rank)
        losses = [once(parallel, part(batch(step))) for step in range(2)]
        sum(losses).backward()  # type: ignore[union-attr]
        return [loss.detach() for loss in losses]

    stack, reference = twins(Statistics, memory=memory)
    try:
        scenario(DistributedDataParallel(copy.deepcopy(reference)))
    except RuntimeError:  # an older DDP refuses it for plain models too
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            scenario(DistributedDataParallel(stack))
        return
    for _ in range(2):
        agree(DistributedDataParallel(stack), DistributedDataParallel(reference), scenario)


class Recorded(Mlp):
    """Records its replays."""

    def __init__(self, events: list[Any]) -> None:
        super().__init__()
        self.events = events

    def forward(self, x: Tensor) -> Any:
        if rg.is_replaying():
            self.events.append(self)
        return super().forward(x)


@pytest.mark.parametrize("memory", ["checkpoint", "reverse"])
@in_processes(2)
def test_ddp_reduces_buckets_while_the_backward_pass_is_still_running(memory: str) -> None:
    events = reduction_order(memory, bucket_cap_mb=1e-6)
    blocks = [event for kind, event in events if kind == "replay"]
    assert blocks == [5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0]  # the last step of all keeps its graph
    for block in range(2, 6):
        reduced = max(i for i, event in enumerate(events) if event == ("reduce", block))
        assert reduced < events.index(("replay", block - 2)), f"block {block} waited: {events}"
    in_one_bucket = [kind for kind, _ in reduction_order(memory, bucket_cap_mb=25)]
    assert in_one_bucket[:12] == ["replay"] * 11 + ["reduce"], "the test would not see a wrong order"


def reduction_order(memory: str, **options: Any) -> list[tuple[str, int]]:
    """The events of one backward pass in order: blocks that are replayed, and blocks whose gradients are reduced."""
    recorded: list[Any] = []
    pairs = [(Recorded(recorded), Recorded(recorded)) for _ in range(6)]
    stack = rg.ReversibleSequence([rg.two_stream(f, g) for f, g in pairs], memory=memory)  # type: ignore[arg-type]
    parallel = DistributedDataParallel(stack, **options)
    parallel.register_comm_hook(recorded, record_and_reduce)
    once(parallel, part(batch())).backward()
    recorded.clear()
    once(parallel, part(batch())).backward()
    number = {branch: i for i, pair in enumerate(pairs) for branch in pair}
    number |= {p: number[branch] for branch in list(number) for p in branch.parameters()}  # type: ignore[misc]
    return [("reduce" if isinstance(event, Tensor) else "replay", number[event]) for event in recorded]


def record_and_reduce(recorded, bucket):  # type: ignore[no-untyped-def]  # DDP does not read annotations that are strings
    recorded.extend(bucket.parameters())
    work = dist.all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0] / 2)

"""What a call holds on to, and for how long; copies of a stack; and that nothing is recorded without grad mode."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import subprocess
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import retrograde as rg
from retrograde.engine import call as calls
from retrograde.engine import step_record
from retrograde.engine import tape as _tape
from stacks import MEMORIES, RECOMPUTING, Mlp, Noisy, agree, all_close, loss_of, sample, seed_all, twins

every_memory = pytest.mark.parametrize("memory", MEMORIES)
recomputing = pytest.mark.parametrize("memory", RECOMPUTING)


SEEN: list[StorageWeakRef] = []


class Traced(Noisy):
    """Leaves weak references to the storages of all that it sees and makes, in both runs, and changes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()).double())
        self.fails: list[bool] = []

    def forward(self, x: Tensor, shift: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        self.count += 1
        if self.fails:
            raise ValueError("on purpose")
        h = torch.tanh(self.inner(x))
        u = super().forward(h @ self.inner.weight, shift, mask)
        SEEN.extend(StorageWeakRef(t.untyped_storage()) for t in (x, h, u))
        return u


@pytest.fixture(autouse=True)
def tapes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Weak references to every tape, without the garbage collector to clear cycles away."""
    found: list[Any] = []
    init = _tape.Tape.__init__

    def noted(self: _tape.Tape, *args: Any, **kwargs: Any) -> None:
        found.append(weakref.ref(self))
        init(self, *args, **kwargs)

    monkeypatch.setattr(_tape.Tape, "__init__", noted)
    SEEN.clear()
    gc.disable()
    yield found
    gc.enable()
    SEEN.clear()


def alive(references: list[Any]) -> list[Any]:
    return [r() for r in references if r() is not None]


def storages(*besides: Tensor) -> int:
    """How many of the storages that branches saw are still there, besides those of some tensors."""
    known = {StorageWeakRef(t.untyped_storage()).cdata for t in besides}
    return len({s.cdata for s in SEEN if not s.expired()} - known)


def use_and_drop(stack: Any, use: str) -> None:
    """Calls whose graph is gone at the end, walked in part or not at all."""
    x, shift = sample(4, 6), sample(6, seed=2)
    parameters = list(stack.parameters())
    if use == "not at all":
        stack(x, shift=shift)
    elif use == "a hidden state":
        hidden = stack.run(x, hidden=[0], shift=shift).hidden[0]
        loss_of(hidden[0] + hidden[1]).backward()
    elif use == "in part":
        torch.autograd.grad(loss_of(stack(x, shift=shift)), parameters[-3:])
    elif use == "with a graph of its own":
        y = stack(x, shift=shift)
        slopes = torch.autograd.grad(loss_of(y), [x, *parameters], create_graph=True)
        torch.autograd.grad(sum(s.pow(2).sum() for s in slopes), parameters)
    elif use == "retained":
        y = stack(x, shift=shift)
        loss_of(y).backward(retain_graph=True)
    elif use == "on itself":
        loss_of(stack(stack(x, shift=shift))).backward()
    elif use == "an error in the forward":
        branches(stack)[3].fails.append(True)
        with pytest.raises(ValueError, match="on purpose"):
            stack(x, shift=shift)
    elif use == "an error in the replay":
        y = loss_of(stack(x, shift=shift))
        branches(stack)[1].fails.append(True)
        with pytest.raises(ValueError, match="on purpose"):
            y.backward()


USES = (
    "not at all",
    "a hidden state",
    "in part",
    "with a graph of its own",
    "retained",
    "on itself",
    "an error in the forward",
    "an error in the replay",
)


def branches(stack: Any) -> list[Traced]:
    return [m for m in stack.modules() if isinstance(m, Traced)]


@recomputing
@pytest.mark.parametrize("use", USES)
def test_a_graph_that_is_dropped_frees_everything_without_the_garbage_collector(
    memory: str, use: str, tapes: list[Any]
) -> None:
    stack, _ = twins(Traced, memory=memory)
    use_and_drop(stack, use)
    assert tapes
    assert SEEN
    assert not alive(tapes)
    assert not storages()


@recomputing
def test_a_call_that_retained_a_step_frees_it_too(memory: str, tapes: list[Any]) -> None:
    """A buffer that changes for the first time makes its step keep its tensors."""
    stack, _ = twins(Traced, memory=memory)
    for call in range(3):
        for m in branches(stack):
            m.register_buffer("count", torch.zeros(()).double() if call < 2 else m.count)
        use_and_drop(stack, "not at all")
    assert not alive(tapes)
    assert not storages()


@recomputing
def test_after_a_backward_nothing_is_left_but_the_output(memory: str, tapes: list[Any]) -> None:
    stack, _ = twins(Traced, memory=memory)
    x, shift = sample(4, 6), sample(6, seed=2)
    y = stack(x, shift=shift)
    loss = loss_of(y)
    assert alive(tapes)
    loss.backward()
    assert not alive(tapes)
    assert not storages(x)
    assert y.grad_fn is not None


def kept_after_forward(memory: str, depth: int) -> int:
    """How many storages that branches saw outlive the forward."""
    stack, _ = twins(Traced, memory=memory, depth=depth)
    SEEN.clear()
    y = stack(sample(4, 6))
    assert y.requires_grad
    return storages()


def test_reverse_keeps_no_more_activations_in_a_deep_stack_than_in_a_shallow_one_and_store_does() -> None:
    assert kept_after_forward("reverse", 8) == kept_after_forward("reverse", 2)
    for memory in ("checkpoint", "store"):
        assert kept_after_forward(memory, 8) >= kept_after_forward(memory, 2) + 6 * 2
    assert kept_after_forward("checkpoint", 8) < kept_after_forward("store", 8)


@every_memory
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_recorded_without_grad_mode(memory: str, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> None:
        raise AssertionError("recorded without grad mode")

    for kind in (_tape.Tape, calls.Call, step_record.StepRecord):
        monkeypatch.setattr(kind, "__init__", forbidden)

    def scenario(model: Any) -> Any:
        with mode():
            y = model(sample(4, 6), shift=sample(6, seed=2))
        assert not y.requires_grad
        return y.clone()

    stack, reference = twins(Traced, memory=memory)
    agree(stack, reference, scenario)
    assert not storages()


@every_memory
def test_nothing_stays_if_nothing_requires_grad(memory: str, tapes: list[Any]) -> None:
    stack, _ = twins(Traced, memory=memory)
    stack.requires_grad_(False)
    y = stack(sample(4, 6, grad=False))
    assert not y.requires_grad
    assert not alive(tapes)
    assert not storages()


@every_memory
def test_a_stack_itself_is_freed_without_the_garbage_collector(memory: str) -> None:
    stack, _ = twins(Traced, memory=memory)
    loss_of(stack(sample(4, 6))).backward()
    references = [weakref.ref(m) for m in stack.modules()]
    del stack
    assert not alive(references)


def step(model: Any) -> Any:
    x = sample(4, 6)
    y = model(x)
    loss_of(y).backward()
    return y, x.grad


def copied(stack: rg.ReversibleSequence, how: str) -> rg.ReversibleSequence:
    if how == "deepcopy":
        return copy.deepcopy(stack)
    if how == "pickle":
        return pickle.loads(pickle.dumps(stack))
    if how == "torch.save":
        file = io.BytesIO()
        torch.save(stack, file)
        file.seek(0)
        return torch.load(file, weights_only=False)
    fresh, _ = twins(Noisy)
    fresh.memory = stack.memory
    for p in fresh.parameters():
        p.data.zero_()
    assert not fresh.load_state_dict(stack.state_dict()).missing_keys
    return fresh


@every_memory
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save", "state_dict"])
@pytest.mark.parametrize("when", ["before a call", "after a backward", "between forward and backward"])
def test_a_copy_gives_the_same_gradients_and_is_independent(memory: str, how: str, when: str) -> None:
    stack, reference = twins(Noisy, memory=memory)
    x = sample(4, 6)
    seed_all()
    if when == "after a backward":
        step(stack)
        stack.zero_grad()
    loss = loss_of(stack(x)) if when == "between forward and backward" else None
    twin = copied(stack, how)
    assert twin.memory == stack.memory
    agree(twin, reference, step)
    assert all(p.grad is None for p in stack.parameters())
    if loss is not None:
        reference.zero_grad()
        loss.backward()
        seed_all()
        step(reference)
        all_close([p.grad for p in stack.parameters()], [p.grad for p in reference.parameters()])


def test_the_state_dict_holds_what_the_branches_hold_and_nothing_else() -> None:
    stack, reference = twins(Traced, depth=2)
    step(stack)
    names = {name.split(".branch.")[1] for name in stack.state_dict()}
    assert names == set(branches(stack)[0].state_dict())
    assert len(stack.state_dict()) == len(list(reference.branches.state_dict()))


def test_outputs_survive_pickling_with_their_names() -> None:
    block = rg.Block(rg.Step(Mlp(), "a", ["b"]), rg.Step(Mlp(), "b", ["a"]))
    with torch.no_grad():
        outputs = rg.ReversibleSequence([block], merge=None).run(sample(4, 6))
    back = pickle.loads(pickle.dumps(outputs))
    assert isinstance(back, rg.Outputs)
    assert back.names == ("a", "b")
    all_close(list(back.named().values()), list(outputs.named().values()))


@pytest.mark.parametrize("memory", ["checkpoint", "reverse"])
def test_a_stack_that_was_trained_is_freed_without_the_garbage_collector(memory: str) -> None:
    """What is learned of a step is kept with it, and keeps no reference back to it."""
    stack = rg.ReversibleSequence([rg.two_stream(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(3)], memory=memory)
    for _ in range(3):
        stack(torch.randn(2, 4, requires_grad=True)).sum().backward()
    alive = [weakref.ref(module) for module in stack.modules()]
    gc.collect()
    gc.disable()
    try:
        del stack
        assert not [ref() for ref in alive if ref() is not None]
    finally:
        gc.enable()


FIRST_CALL = """
import gc, sys, torch, retrograde as rg
from torch import nn
gc.collect()
gc.disable()
layers = [nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1)) for _ in range(8)]
blocks = [rg.two_stream(f, g) for f, g in zip(layers[::2], layers[1::2])]
y = rg.ReversibleSequence(blocks, memory=sys.argv[1])(torch.randn(32, 64))
del y
gc.set_debug(gc.DEBUG_SAVEALL)
gc.collect()
print(sum(o.untyped_storage().nbytes() for o in gc.garbage if isinstance(o, torch.Tensor)))
"""


@pytest.mark.parametrize("memory", ["reverse", "selective", "checkpoint"])
def test_the_first_call_of_a_process_leaves_nothing_to_the_garbage_collector(memory: str) -> None:
    """What is imported on the way must not hold the frames of the call: torch's compiler would."""
    run = subprocess.run([sys.executable, "-c", FIRST_CALL, memory], capture_output=True, text=True, check=True)
    assert int(run.stdout) == 0

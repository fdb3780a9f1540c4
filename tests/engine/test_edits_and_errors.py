"""Edits between forward and backward are detected or do no harm, and an error says which branch it is about."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from stacks import MEMORIES, RECOMPUTING, Mlp, Noisy, agree, all_close, loss_of, memory_of, sample, twins, twins_of

every_memory = pytest.mark.parametrize("memory", MEMORIES)
recomputing = pytest.mark.parametrize("memory", RECOMPUTING)
EDITED = "modified by an inplace operation"


def edit(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1)


def detected(backward: Callable[[], Any], words: str) -> RuntimeError | None:
    """The error of a backward, which must have these words, or None."""
    try:
        backward()
    except RuntimeError as error:
        if words not in str(error):
            raise
        return error
    return None


def branches(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, Mlp)]


@every_memory
def test_an_edit_of_the_output_that_the_backward_needs_is_detected(memory: str) -> None:
    stack, _ = twins(memory=memory, merge=None)
    a, b = stack(sample(4, 6))
    loss = loss_of(a + b)
    edit(a)
    with pytest.raises(RuntimeError, match=EDITED):
        loss.backward()


@every_memory
def test_an_edit_of_the_output_that_autograd_does_not_need_does_no_harm(memory: str) -> None:
    def scenario(model: Any) -> Any:
        x = sample(4, 6)
        a, b = model(x)
        total = (a + 2 * b).sum()
        edit(b)
        total.backward()
        return x.grad

    agree(*twins(memory=memory, merge=None), scenario)


@every_memory
@pytest.mark.parametrize("stream", [0, 1])
def test_an_edit_of_an_output_that_only_recomputing_needs_is_detected_or_does_no_harm(memory: str, stream: int) -> None:
    """The last step saves nothing, so that autograd itself would not notice."""

    class Doubled(Mlp):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return x * 2

    torch.manual_seed(0)
    stack, reference = twins_of([(Mlp(), Mlp()), (Mlp(), Mlp()), (Mlp(), Doubled())], memory, merge=None)
    found = []
    for model in (stack, reference):
        x = sample(4, 6)
        streams = model(x)
        total = (streams[0] + 2 * streams[1]).sum()
        edit(streams[stream])
        grads: list[Tensor] = []
        if detected(lambda: grads.append(torch.autograd.grad(total, x)[0]), EDITED) is None:  # noqa: B023
            found.append(grads)
    assert found
    all_close(found[0], found[-1])


@every_memory
@pytest.mark.parametrize("what", ["input", "hidden 0", "hidden 1"])
def test_an_edit_of_the_input_or_of_a_hidden_state_is_detected_or_does_no_harm(memory: str, what: str) -> None:
    stack, reference = twins(memory=memory)
    x, z = sample(4, 6), sample(4, 6)
    result = stack.run(x, hidden=[1])
    loss = loss_of(result[0] + result[1])
    edit({"input": x, "hidden 0": result.hidden[1][0], "hidden 1": result.hidden[1][1]}[what])
    streams = reference.run(z)
    loss_of(streams[0] + streams[1]).backward()
    if detected(loss.backward, EDITED) is None:
        all_close([x.grad, *(p.grad for p in stack.parameters())], [z.grad, *(p.grad for p in reference.parameters())])


@recomputing
@pytest.mark.parametrize("what", ["shift", "mask"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_an_edit_of_the_context_is_detected(memory: str, what: str, requires_grad: bool) -> None:
    stack, _ = twins(memory=memory)
    context = {"shift": sample(6, seed=2, grad=requires_grad), "mask": sample(4, 6, seed=3, grad=False)}
    loss = loss_of(stack(sample(4, 6), **context))
    edit(context[what])
    with pytest.raises(RuntimeError, match=EDITED):
        loss.backward()


class Held(Mlp):
    """Adds tensors that it holds in different ways; autograd saves none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("buffer", torch.ones(6).double())
        self.attribute = torch.ones(6).double()
        self.listed = [torch.ones(6).double()]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.buffer + self.attribute + self.listed[0])


PARTS: dict[str, Callable[[Any], Tensor]] = {
    "a weight": lambda branch: branch.inner.weight,
    "a bias": lambda branch: branch.inner.bias,
    "the last bias": lambda branch: branch.outer.bias,
    "a buffer": lambda branch: branch.buffer,
    "a tensor in an attribute": lambda branch: branch.attribute,
    "a tensor in a list": lambda branch: branch.listed[0],
}


@recomputing
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("index", [0, 3, 4])
def test_an_edit_of_what_a_branch_holds_is_detected(memory: str, part: str, index: int) -> None:
    stack, _ = twins(Held, memory=memory)
    loss = loss_of(stack(sample(4, 6)))
    edit(PARTS[part](branches(stack)[index]))
    with pytest.raises(RuntimeError, match=EDITED):
        loss.backward()


SCALE = torch.full((6,), 0.5).double()


@every_memory
def test_an_edit_of_a_global_tensor_that_a_branch_multiplies_by_is_detected(memory: str) -> None:
    """Nobody but autograd knows of it."""

    class Global(Mlp):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x * SCALE)

    stack, _ = twins_of([(Mlp(), Global()), (Global(), Mlp()), (Mlp(), Mlp())], memory)
    loss = loss_of(stack(sample(4, 6)))
    edit(SCALE)
    SCALE.data.sub_(1)
    with pytest.raises(RuntimeError, match=EDITED):
        loss.backward()


@every_memory
def test_an_edit_by_a_hook_in_the_middle_of_the_backward_is_detected(memory: str) -> None:
    stack, _ = twins(memory=memory)
    branch = branches(stack)[2]
    branch.outer.weight.register_hook(lambda _: edit(branch.inner.weight))
    with pytest.raises(RuntimeError, match=EDITED):
        loss_of(stack(sample(4, 6))).backward()


@every_memory
def test_an_edit_of_the_last_bias_of_the_last_branch_does_no_harm(memory: str) -> None:
    """Autograd does not save it, and the last step is not replayed."""

    def scenario(model: Any) -> Any:
        x = sample(4, 6)
        y = model(x)
        loss = loss_of(y)
        edit(branches(model)[-1].outer.bias)
        loss.backward()
        return x.grad

    agree(*twins(memory=memory), scenario)


@every_memory
@pytest.mark.parametrize("how", ["optimizer", "load_state_dict"])
def test_a_change_of_the_weights_before_the_backward_is_detected(memory: str, how: str) -> None:
    stack, _ = twins(memory=memory)
    loss_of(stack(sample(4, 6))).backward()
    loss = loss_of(stack(sample(4, 6)))
    if how == "optimizer":
        torch.optim.SGD(stack.parameters(), lr=0.1).step()
    else:
        stack.load_state_dict(stack.state_dict())
    with pytest.raises(RuntimeError, match=EDITED):
        loss.backward()


@recomputing
@pytest.mark.parametrize("held", ["closure", "default", "list", "dictionary"])
def test_an_edit_of_a_tensor_that_a_function_closes_over_is_detected(memory: str, held: str) -> None:
    w = sample(6, seed=2, grad=False)
    listed, named = [w], {"w": w}
    branch: Any = {
        "closure": lambda s: (s + w).sin(),
        "default": lambda s, *, w=w: (s + w).sin(),
        "list": lambda s: (s + listed[0]).sin(),
        "dictionary": lambda s: (s + named["w"]).sin(),
    }[held]
    takes: Any = ()
    block = rg.two_stream(branch, branch, takes=takes)
    loss = loss_of(rg.ReversibleSequence([block] * 3, memory=memory_of(memory, 3))(sample(4, 6)))
    edit(w)
    with pytest.raises(RuntimeError, match=EDITED):
        loss.backward()


class Offset(rg.couplings.Coupling, nn.Module):
    """A coupling with a parameter that autograd does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(6).double())

    def combine(self, target: Tensor, update: Tensor) -> Tensor:
        return target + update + self.offset

    def separate(self, combined: Tensor, update: Tensor) -> Tensor:
        return combined - update - self.offset


@recomputing
def test_an_edit_of_a_parameter_of_a_coupling_is_detected(memory: str) -> None:
    coupling = Offset()
    stack = rg.ReversibleSequence(
        [rg.two_stream(Mlp(), Mlp(), coupling=coupling) for _ in range(3)], memory=memory_of(memory, 3)
    )
    loss = loss_of(stack(sample(4, 6)))
    edit(coupling.offset)
    with pytest.raises(RuntimeError, match=EDITED):
        loss.backward()


@every_memory
@pytest.mark.parametrize("change", ["parameter", "freeze", "unfreeze"])
def test_what_is_exchanged_after_the_forward_does_not_reach_its_backward(memory: str, change: str) -> None:
    def scenario(model: Any) -> Any:
        model.requires_grad_(change != "unfreeze")
        x = sample(4, 6)
        before = list(model.parameters())
        loss = loss_of(model(x))
        if change == "parameter":
            for branch in branches(model):
                branch.inner.weight = nn.Parameter(torch.ones(7, 6).double())
        else:
            model.requires_grad_(change == "unfreeze")
        loss.backward()
        return x.grad, [p.grad for p in before]

    agree(*twins(Noisy, memory=memory), scenario)


@every_memory
def test_a_module_exchanged_inside_a_branch_after_the_forward_is_detected_or_does_no_harm(memory: str) -> None:
    stack, reference = twins(memory=memory)
    old = list(stack.parameters())
    loss = loss_of(stack(sample(4, 6)))
    for branch in branches(stack):
        branch.inner = nn.Linear(6, 7).double()
    expected = torch.autograd.grad(loss_of(reference(sample(4, 6))), list(reference.parameters()))
    found: list[Tensor] = []
    if detected(lambda: found.extend(torch.autograd.grad(loss, old)), "Mlp") is None:
        all_close(found, expected)


class InPlace(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(2))


class InPlaceOnView(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        x[:, 0] = 0
        return super().forward(x)


@every_memory
@pytest.mark.parametrize("kind", [InPlace, InPlaceOnView])
@pytest.mark.parametrize("grad_mode", [True, False])
def test_a_branch_that_edits_its_input_is_named_with_its_block(memory: str, kind: Any, grad_mode: bool) -> None:
    stack, _ = twins_of([(Mlp(), Mlp()), (Mlp(), kind()), (Mlp(), Mlp())], memory)
    with torch.set_grad_enabled(grad_mode), pytest.raises(ValueError, match=f"Block 1: {kind.__name__} edited"):
        stack(sample(4, 6, grad=False))


@recomputing
def test_a_branch_that_edits_its_context_is_detected(memory: str) -> None:
    class EditsContext(Mlp):
        def forward(self, x: Tensor, shift: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x, shift.mul_(0.5))

    stack, _ = twins(EditsContext, memory=memory)
    with pytest.raises(RuntimeError, match=EDITED):
        loss_of(stack(sample(4, 6), shift=sample(6, seed=2, grad=False))).backward()

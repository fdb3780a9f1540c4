"""Context goes to branches by name, and its tensors are true inputs: of any nesting, with gradients of their own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from stacks import MEMORIES, Mlp, Noisy, agree, all_close, loss_of, memory_of, sample, twins, twins_of

every_memory = pytest.mark.parametrize("memory", MEMORIES)


@every_memory
def test_the_graph_that_made_the_context_is_walked_once(memory: str) -> None:
    def scenario(model: Any) -> Any:
        walks: list[Tensor] = []
        x, source = sample(4, 6), sample(6, seed=2)
        encoded = source.sin() * 2
        encoded.register_hook(walks.append)
        y = model(x, shift=encoded, mask=encoded.cos())
        loss_of(y).backward()
        assert len(walks) == 1
        return y, x.grad, source.grad, walks[0]

    agree(*twins(Noisy, memory=memory), scenario)


@every_memory
def test_tensors_nested_in_the_context_get_their_gradients(memory: str) -> None:
    class Nested(Mlp):
        def forward(self, x: Tensor, parts: dict[str, Any]) -> Tensor:  # type: ignore[override]
            return super().forward(x, parts["pair"][0], parts["pair"][1]["mask"]) * parts["factor"]

    def scenario(model: Any) -> Any:
        x, shift, mask = sample(4, 6), sample(6, seed=2), sample(4, 6, seed=3)
        parts = {"pair": [shift, {"mask": mask}], "factor": 0.5, "nothing": None}
        loss = loss_of(model(x, parts=parts))
        parts["pair"], parts["factor"] = [mask, {"mask": shift}], 7.0  # containers are the caller's to change
        loss.backward()
        return loss, x.grad, shift.grad, mask.grad

    agree(*twins(Nested, memory=memory), scenario)


@every_memory
def test_context_that_is_the_input_itself_or_given_twice_adds_its_gradients(memory: str) -> None:
    def scenario(model: Any) -> Any:
        x = sample(4, 6)
        y = model(x, shift=x, mask=x)
        loss_of(y).backward()
        return y, x.grad

    agree(*twins(Noisy, memory=memory), scenario)


@every_memory
def test_branches_take_the_context_that_their_signatures_name_or_that_they_are_told(memory: str) -> None:
    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Mlp()

        def forward(self, x: Tensor, *, gate: Tensor) -> Tensor:
            return self.inner(x) * gate

    fs, gs = [Mlp() for _ in range(3)], [Other() for _ in range(3)]
    takes: Any = {"f": ["mask"], "g": {"gate": "shift"}}
    stack = rg.ReversibleSequence(
        [rg.two_stream(f, g, takes=takes) for f, g in zip(fs, gs, strict=True)], memory=memory_of(memory, 3)
    )
    found = []
    for build in ("retrograde", "plain"):
        x, shift, mask = sample(4, 6), sample(6, seed=2), sample(4, 6, seed=3)
        if build == "retrograde":
            y = stack(x, shift=shift, mask=mask)
        else:
            a = b = x
            for f, g in zip(fs, gs, strict=True):
                a = a + f(b, mask=mask)
                b = b + g(a, gate=shift)
            y = (a + b) / 2
        found.append((y, *torch.autograd.grad(loss_of(y), [x, shift, mask, *stack.parameters()])))
    all_close(*found)


@every_memory
def test_context_that_is_left_out_takes_its_default(memory: str) -> None:
    def scenario(model: Any) -> Any:
        found = []
        for names in ((), ("shift",), ("mask",), ("shift", "mask")):
            given = {"shift": sample(6, seed=2), "mask": sample(4, 6, seed=3)}
            x = sample(4, 6)
            y = model(x, **{name: given[name] for name in names})
            found += [y, *torch.autograd.grad(loss_of(y), [x, *(given[name] for name in names)])]
        return found

    agree(*twins(memory=memory), scenario)


class Constant(Mlp):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return torch.ones_like(x)


class Detached(Mlp):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x.detach())


class Identity(Mlp):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return x


class EditsItsOwn(Mlp):
    """Edits in place what it made itself, which is its own business."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        h = self.inner(x).relu_()
        u = self.outer(h * 0.7).sigmoid_() * 2
        u[:, 0] = 0
        return u.add_(x)


@every_memory
@pytest.mark.parametrize("kind", [Constant, Detached, Identity, EditsItsOwn])
def test_branches_that_save_nothing_or_edit_their_own_tensors_get_their_gradients(memory: str, kind: Any) -> None:
    def scenario(model: Any) -> Any:
        x = sample(4, 6)
        y = model(x)
        loss_of(y).backward()
        return y, x.grad

    torch.manual_seed(0)
    agree(*twins_of([(Mlp(), kind()), (kind(), Mlp()), (kind(), kind()), (Mlp(), kind())], memory), scenario)


@every_memory
def test_complex_streams_get_their_gradients(memory: str) -> None:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6, dtype=torch.complex128)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(x) * 0.3)

    found = []
    for model in twins(Complex, memory=memory):
        x = torch.complex(sample(4, 6).detach(), sample(4, 6, seed=2).detach()).requires_grad_()
        y = model(x)
        grads = torch.autograd.grad(y.abs().pow(2).sum(), [x, *model.parameters()])
        found.append([torch.view_as_real(t) for t in (y, *grads)])
    all_close(*found)


@every_memory
def test_an_empty_container_in_the_context_is_there_in_the_replay(memory: str) -> None:
    class Optioned(nn.Linear):
        def forward(self, x: Tensor, *, options: dict[str, Any]) -> Tensor:
            return super().forward(x) * (1 + len(options))

    torch.manual_seed(0)
    blocks = [rg.two_stream(Optioned(4, 4), Optioned(4, 4)) for _ in range(3)]
    stack = rg.ReversibleSequence(blocks, memory=memory_of(memory, 3))
    stack(torch.randn(2, 4), options={}).sum().backward()
    assert all(p.grad is not None for p in stack.parameters())


class TakesMemory(nn.Module):
    """Cross-attention names its parameter as nn.TransformerDecoder does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()

    def forward(self, x: Tensor, memory: Tensor, hidden: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) + memory * hidden)


def _takes_memory() -> rg.ReversibleSequence:
    torch.manual_seed(0)
    return rg.ReversibleSequence([rg.two_stream(TakesMemory(), TakesMemory()) for _ in range(3)])


def test_context_may_have_the_names_of_options_in_a_dictionary() -> None:
    stack = _takes_memory()
    x, memory, hidden = (torch.randn(4, 6, dtype=torch.float64, requires_grad=True) for _ in range(3))

    def gradients(mode: str) -> tuple[Tensor, ...]:
        output = stack(x, memory=mode, context={"memory": memory, "hidden": hidden})
        return torch.autograd.grad(output.pow(2).sum(), (x, memory, hidden))

    for ours, theirs in zip(gradients("reverse"), gradients("store"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    outputs = stack.run(x, hidden=[0], context={"memory": memory, "hidden": hidden})
    assert list(outputs.hidden) == [0]
    before = stack.inverse(outputs, context={"memory": memory, "hidden": hidden})
    torch.testing.assert_close(before[0], x, rtol=1e-10, atol=1e-10)


def test_context_whose_name_is_an_option_of_the_call_is_refused_with_the_remedy() -> None:
    stack, x = _takes_memory(), torch.randn(4, 6, dtype=torch.float64)
    with pytest.raises(TypeError, match=r"memory=Tensor is no memory mode.*context=\{\"memory\": \.\.\.\}"):
        stack(x, memory=x)
    with pytest.raises(TypeError, match=r"hidden= is an option of run.*context=\{\"hidden\": \.\.\.\}"):
        stack(x, hidden=[0])
    with pytest.raises(TypeError, match=r"No branch takes the context \['context'\]"):
        stack(x, context=x)
    with pytest.raises(TypeError, match=r"\['mask'\] is given in context=\{\.\.\.\} and as a keyword"):
        stack(x, context={"mask": x}, mask=x)


def test_streams_that_were_chunks_are_concatenated_unless_told_otherwise() -> None:
    blocks = [rg.two_stream(nn.Linear(3, 3), nn.Linear(3, 3))]
    stack, x = rg.ReversibleSequence(blocks, split="chunk"), torch.randn(4, 6)
    assert torch.equal(stack(x), torch.cat(tuple(stack.run(x)), -1))
    halved = rg.ReversibleSequence(blocks, split="chunk", merge="mean")
    assert halved(x).shape == (4, 3)

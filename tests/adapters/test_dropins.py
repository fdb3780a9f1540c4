"""All six drop-ins, on small branches, against the published arithmetic in plain autograd."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import retrograde as rg
from published import TIGHT
from systems import SYSTEMS, System

DEPTH = 4

systems = pytest.mark.parametrize("name", SYSTEMS)


def make(name: str, depth: int = DEPTH, dtype: torch.dtype = torch.float64) -> System:
    torch.manual_seed(0)
    system = SYSTEMS[name](depth)
    system.module.to(dtype)
    system.inputs = {key: value.to(dtype) for key, value in system.inputs.items()}
    return system


def loss_of(outputs: list[Tensor]) -> Tensor:
    return sum((o.double().square().mean() for o in outputs), torch.zeros((), dtype=torch.float64))


Run = Callable[..., list[Tensor]]


def differentiate(system: System, run: Run, *, seed: int = 1) -> dict[str, Tensor]:
    """The gradients of every input and parameter."""
    inputs = {key: value.clone().requires_grad_() for key, value in system.inputs.items()}
    system.branches.zero_grad()
    torch.manual_seed(seed)
    loss_of(run(**inputs)).backward()
    grads = {key: value.grad for key, value in inputs.items()}
    grads |= {key: p.grad for key, p in system.branches.named_parameters()}
    return {key: grad.clone() for key, grad in grads.items() if grad is not None}


def assert_close(grads: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(grads) == set(expected)
    for key, wanted in expected.items():
        error = (grads[key] - wanted).norm() / wanted.norm()
        assert error <= TIGHT, f"{key}: {error:.3g}"


@systems
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_forward_results_have_the_published_bits(name: str, dtype: torch.dtype) -> None:
    system = make(name, dtype=dtype)
    for training in (True, False):
        system.module.train(training)
        torch.manual_seed(3)
        expected = system.plain(**system.inputs)
        torch.manual_seed(3)
        outputs = system.run(**system.inputs)
        assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
        with torch.no_grad():
            torch.manual_seed(3)
            without_grad = system.run(**system.inputs)
        assert all(torch.equal(a, b) for a, b in zip(without_grad, expected, strict=True))


@systems
def test_gradients_of_weights_inputs_and_context_are_those_of_plain_autograd(name: str) -> None:
    system = make(name)
    expected = differentiate(system, system.plain)
    assert_close(differentiate(system, system.run), expected)


@systems
def test_the_keys_are_the_published_ones_and_the_modules_are_those_given(name: str) -> None:
    system = make(name)
    letters = "fgjk"[: len(system.branches[0])]
    expected = [
        f"blocks.{i}.{letter}.net.{key}"
        for i, nets in enumerate(system.branches)
        for letter, net in zip(letters, nets, strict=True)
        for key in net.state_dict()
    ]
    keys = list(system.module.state_dict())
    assert keys[: len(expected)] == expected
    assert all(key.startswith("irrev_blocks.") for key in keys[len(expected) :])
    for block, nets in zip(system.module.blocks, system.branches, strict=True):
        assert all(getattr(block, letter).net is net for letter, net in zip(letters, nets, strict=True))
    assert set(system.module.parameters()) == set(system.branches.parameters())
    assert not list(system.module.buffers())


@systems
def test_two_calls_before_one_backward_with_dropout_give_the_gradients(name: str) -> None:
    system = make(name)

    def twice(run: Run) -> Run:
        return lambda **inputs: [a + 2 * b for a, b in zip(run(**inputs), run(**inputs), strict=True)]

    expected = differentiate(system, twice(system.plain))
    assert_close(differentiate(system, twice(system.run)), expected)


@systems
def test_a_call_without_grad_before_the_backward_changes_nothing(name: str) -> None:
    system = make(name)

    def interrupted(**inputs: Tensor) -> list[Tensor]:
        outputs = system.run(**inputs)
        with torch.no_grad():
            system.run(**system.inputs)
        return outputs

    expected = differentiate(system, system.plain)
    assert_close(differentiate(system, interrupted), expected)


@systems
def test_eval_mode_between_forward_and_backward_changes_nothing(name: str) -> None:
    system = make(name)

    def then_eval(**inputs: Tensor) -> list[Tensor]:
        outputs = system.run(**inputs)
        system.module.eval()
        return outputs

    expected = differentiate(system, system.plain)
    grads = differentiate(system, then_eval)
    assert not any(m.training for m in system.module.modules()), "the replay does not change the mode"
    assert_close(grads, expected)


@systems
def test_forward_and_backward_in_eval_mode_give_the_gradients(name: str) -> None:
    system = make(name)
    system.module.eval()
    expected = differentiate(system, system.plain)
    assert_close(differentiate(system, system.run), expected)


@systems
def test_an_input_without_a_gradient_leaves_those_of_the_parameters_right(name: str) -> None:
    system = make(name)
    for run in (system.plain, system.run):
        system.branches.zero_grad()
        torch.manual_seed(1)
        loss_of(run(**system.inputs)).backward()
        grads = {key: p.grad.clone() for key, p in system.branches.named_parameters() if p.grad is not None}
        if run is system.plain:
            expected = grads
    assert len(expected) == len(list(system.branches.parameters()))
    assert_close(grads, expected)


@systems
def test_autograd_grad_gives_gradients_and_writes_none(name: str) -> None:
    system = make(name)
    inputs = {key: value.clone().requires_grad_() for key, value in system.inputs.items()}
    wanted = [*inputs.values(), *system.branches.parameters()]
    torch.manual_seed(1)
    expected = torch.autograd.grad(loss_of(system.plain(**inputs)), wanted)
    torch.manual_seed(1)
    grads = torch.autograd.grad(loss_of(system.run(**inputs)), wanted)
    assert all(t.grad is None for t in wanted)
    assert_close(dict(enumerate(grads)), dict(enumerate(expected)))  # type: ignore[arg-type]


@systems
def test_the_backward_pass_of_the_encoder_of_the_context_runs_once(name: str) -> None:
    system = make(name)
    context = next(key for key in system.inputs if key in ("context", "edges"))
    walks = []
    inputs = dict(system.inputs)
    weight = torch.ones((), dtype=torch.float64, requires_grad=True)
    inputs[context] = torch.tanh(inputs[context] * weight)
    inputs[context].grad_fn.register_hook(lambda *_: walks.append(1))  # type: ignore[union-attr]
    loss_of(system.run(**inputs)).backward()
    assert len(walks) == 1
    assert weight.grad is not None


@systems
def test_gradient_penalties_differentiate_twice(name: str) -> None:
    system = make(name, depth=3)
    inputs = {key: value.clone().requires_grad_() for key, value in system.inputs.items()}
    first = next(iter(inputs.values()))
    results = []
    for run in (system.plain, system.run):
        torch.manual_seed(1)
        (grad,) = torch.autograd.grad(loss_of(run(**inputs)), first, create_graph=True)
        results.append(torch.autograd.grad(grad.square().sum(), list(system.branches.parameters())))
    assert_close(dict(enumerate(results[1])), dict(enumerate(results[0])))  # type: ignore[arg-type]


@systems
def test_functional_call_differentiates_the_parameters_it_was_given(name: str) -> None:
    system = make(name)
    parameters = {k: p.detach().clone().requires_grad_() for k, p in system.module.named_parameters()}
    results = []
    for memory in ("store", "reverse"):
        system.module.memory = memory
        torch.manual_seed(1)
        wrapper = Calls(system)
        named = {f"module.{k}": p for k, p in parameters.items()}
        outputs = torch.func.functional_call(wrapper, named, (), system.inputs)
        results.append(torch.autograd.grad(loss_of(outputs), list(parameters.values())))
    assert all(p.grad is None for p in system.module.parameters())
    assert_close(dict(enumerate(results[1])), dict(enumerate(results[0])))  # type: ignore[arg-type]


class Calls(torch.nn.Module):
    """A system as a module."""

    def __init__(self, system: System) -> None:
        super().__init__()
        self.module = system.module
        self.system = (system,)

    def forward(self, **inputs: Tensor) -> list[Tensor]:
        return self.system[0].run(**inputs)


def outputs_of(module: torch.nn.Module, system: System) -> list[Tensor]:
    """Another module run as the system's own, by the latter's forward."""
    original = system.module.forward
    system.module.forward = module.forward  # type: ignore[method-assign]
    try:
        torch.manual_seed(5)
        return system.run(**system.inputs)
    finally:
        system.module.forward = original  # type: ignore[method-assign]


@systems
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo reads it
def test_a_compiled_model_gives_the_gradients_that_it_gave_before(name: str) -> None:
    system = make(name)
    expected = differentiate(system, system.plain)
    system.module.forward = torch.compile(system.module.forward, backend="aot_eager")
    assert_close(differentiate(system, system.run), expected)
    torch.compiler.reset()


@systems
def test_a_model_in_eval_mode_can_be_exported(name: str) -> None:
    system = make(name)
    calls = Calls(system).eval()
    expected = calls(**system.inputs)
    with torch.no_grad():
        program = torch.export.export(calls, (), kwargs=system.inputs)
    exported = program.module()(**system.inputs)
    for a, b in zip(exported, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


@systems
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save"])
def test_copies_are_independent_and_equal(name: str, way: str) -> None:
    system = make(name)
    expected = outputs_of(system.module, system)
    if way == "deepcopy":
        copied = copy.deepcopy(system.module)
    elif way == "pickle":
        copied = pickle.loads(pickle.dumps(system.module))
    else:
        file = io.BytesIO()
        torch.save(system.module, file)
        file.seek(0)
        copied = torch.load(file, weights_only=False)
    outputs = outputs_of(copied, system)
    assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))
    loss_of(outputs).backward()
    assert all(p.grad is not None for p in copied.parameters())
    assert all(p.grad is None for p in system.module.parameters())
    with torch.no_grad():
        for p in copied.parameters():
            p.zero_()
    assert all(torch.equal(a, b) for a, b in zip(outputs_of(system.module, system), expected, strict=True))


@systems
def test_a_replaced_branch_runs(name: str) -> None:
    system = make(name)
    before = system.run(**system.inputs)[0]
    system.module.blocks[0].f = copy.deepcopy(system.module.blocks[0].f)
    with torch.no_grad():
        system.module.blocks[0].f.net.linear.weight.fill_(0.5)
    assert not torch.equal(system.run(**system.inputs)[0], before)
    seen: list[int] = []
    system.module.blocks[0].f.register_forward_hook(lambda *_: seen.append(rg.is_replaying()))
    loss_of(system.run(**system.inputs)).backward()
    assert seen == [False, True]


@systems
def test_a_branch_of_another_shape_is_an_error_that_names_block_and_branch(name: str) -> None:
    system = make(name)
    net = system.branches[1][1]
    net.forward = lambda *a, **k: torch.ones(1, dtype=torch.float64) if name[0] != "l" else (0, torch.ones(1), 0, 0)
    with pytest.raises(ValueError, match=r"Block 1: [gk] \((Mix|Spatial)\) returned a tensor of shape \(1,\)"):
        system.run(**system.inputs)


@systems
def test_too_few_branches_are_an_error_that_names_the_block(name: str) -> None:
    branches = make(name).branches
    branches[2] = torch.nn.ModuleList(list(branches[2])[:1])
    module = type(make(name).module)
    extra = [["intra_modality_self_attn"] * DEPTH] if name == "nuwa_pytorch_video_audio" else []
    with pytest.raises(ValueError, match=r"Block 2 has 1 branches"):
        module(branches, *extra)


@systems
def test_vmap_runs_a_drop_in_on_each_entry(name: str) -> None:
    system = make(name)
    system.module.eval()
    keys = [key for key, value in system.inputs.items() if value.is_floating_point()]
    batches = [torch.stack([system.inputs[key], system.inputs[key] * 0.5]) for key in keys]

    def run(*values: Tensor) -> list[Tensor]:
        return system.run(**{**system.inputs, **dict(zip(keys, values, strict=True))})

    mapped = torch.vmap(lambda *values: tuple(run(*values)))(*batches)
    gradients = torch.vmap(torch.func.grad(lambda *values: loss_of(run(*values))))(*batches)
    for i in range(2):
        each = [batch[i].clone().requires_grad_() for batch in batches]
        expected = run(*each)
        for one, other in zip(mapped, expected, strict=True):
            torch.testing.assert_close(one[i], other, rtol=1e-10, atol=1e-12)
        (gradient,) = torch.autograd.grad(loss_of(expected), each[:1])
        torch.testing.assert_close(gradients[i], gradient, rtol=1e-10, atol=1e-12)

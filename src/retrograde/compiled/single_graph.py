"""The whole stack in one compiled graph: the reversible backward pass written out, for a compiler to fuse.

A tape cannot be traced: it works when autograd asks. Where every branch is a function of its inputs and parameters
alone, the backward pass is known in advance, and this file writes it down as one Function that inverts step by
step. `why_not_in_graph` and `why_not_these_inputs` say where that does not hold; the stack then runs outside of the
graph, as it always can.

NOTE [What one graph cannot replay]
 A graph cannot set a generator or a buffer back. Modules that are known to draw, and branches with buffers, are
 refused. A branch may draw in a way that cannot be seen from outside (`F.dropout` with a number); it would be rebuilt
 wrongly. So the streams that the backward pass ends with are compared with a sample of those that the forward pass
 began with, and a difference that is not rounding is an error.

NOTE [Why rebuilding waits for gradients]
 What is rebuilt follows from the last streams alone. A compiler that sees forward and backward pass as one
 may therefore rebuild in the forward pass and keep the results: all activations, and nothing saved. So a stream
 is rebuilt from one that a gradient was mixed into, in a way that leaves its values as they are.
"""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from retrograde.couplings import Additive, Affine, Scaled
from retrograde.engine.torch_internals import assert_in_graph, has_hooks, saved_tensor_hooks_active
from retrograde.network.block import Block, BoundStep
from retrograde.network.step import Step, StreamName
from retrograde.network.streams import Streams, replaced

SAMPLED = 1024
"""How many entries of each stream are compared at the end of the backward pass."""

TOLERANCES = {torch.float32: 1e-3, torch.float64: 1e-6}

Slots = tuple[tuple[str, int], ...]
"""Names that a branch knows tensors by, and their places among the tensors that the Function is given."""


class Layout(NamedTuple):
    """What the Function is told beside tensors. Its tensors are the streams, then parameters and context."""

    blocks: tuple[Block, ...]
    names: tuple[StreamName, ...]
    parameters: tuple[Slots, ...]
    """For each step, its branch's parameters."""
    context: tuple[Slots, ...]
    """For each step, the context tensors it takes."""
    constants: Mapping[str, Any]
    """The context that is no tensor."""
    wanted: tuple[bool, ...]
    """Which of the parameters and the context want gradients."""


def why_not_in_graph(blocks: Sequence[Block]) -> str | None:
    """Why these blocks, as they are now, cannot go through one graph; None if they can."""
    if saved_tensor_hooks_active():
        return "there are saved-tensor hooks around it (a checkpoint, or another stack)"
    for i, block in enumerate(blocks):
        if has_hooks(block):
            return f"block {i} has hooks, which a backward pass in one graph would not run"
        for step in block.each_step():
            if reason := _why_not_step(step):
                return f"block {i}, {step.name}: {reason}"
    return None


def _why_not_step(step: Step) -> str | None:
    if type(step.coupling) not in (Additive, Affine, Scaled):
        return f"couplings in one graph are Additive, Scaled and Affine, not {type(step.coupling).__name__}"
    if step.aux != "none":
        return "it returns an auxiliary loss"
    if not isinstance(step.branch, nn.Module):
        if _is_plain(step.branch):
            return None
        return "it is a function, whose tensors would get no gradients; make it a module"
    for name, _ in step.branch.named_buffers():
        return f"it has the buffer {name}, which a replay could not set back; pass a constant table as context"
    for module in step.branch.modules():
        if has_hooks(module):
            return f"its {type(module).__name__} has hooks, which would run once more in the backward pass"
        if attribute := _unregistered(module):
            return f"its {type(module).__name__} holds {attribute}, which is not registered and gets no gradients"
        if module.training and (draws := _draws(module)):
            return f"its {type(module).__name__} draws random numbers in training ({draws})"
    return None


def _is_plain(branch: Any) -> bool:
    """Whether a function is torch's or our own: one that reads nothing but its arguments."""
    return isinstance(branch, types.BuiltinFunctionType) or (
        isinstance(branch, types.FunctionType)
        and branch.__closure__ is None
        and branch.__module__.split(".")[0] in ("torch", "retrograde")
    )


def _unregistered(module: nn.Module) -> str | None:
    """The attribute in which a module holds a tensor or a module that it does not count among its own."""
    for name, value in vars(module).items():
        several = value if isinstance(value, (list, tuple)) else (value,)
        if any(isinstance(v, (Tensor, nn.Module)) for v in several):
            return name
    return None


def _draws(module: nn.Module) -> str | None:
    """The attribute by which a module is seen to draw, if it is."""
    if isinstance(module, nn.RReLU):
        return "lower, upper"
    for name, value in vars(module).items():
        if (name == "p" or "drop" in name.lower()) and isinstance(value, float) and value > 0:
            return f"{name}={value}"
    return None


def why_not_these_inputs(streams: Streams, context: Mapping[str, Any]) -> str | None:
    """Why one graph cannot take these inputs; None if it can. Traced with the model, so it reads no values."""
    for stream in streams:
        if stream.dtype not in TOLERANCES:
            return f"streams of {stream.dtype} drift too far to be told from wrong ones; use stream_dtype=torch.float32"
        if torch.is_autocast_enabled(stream.device.type):
            return "autocast is on, but would not be in the backward pass; use compute=torch.bfloat16"
    for name, value in context.items():
        if not (value is None or isinstance(value, (Tensor, bool, int, float, str))):
            return f"the context {name} is a {type(value).__name__}; give tensors and plain values"
    return None


def run_in_graph(
    blocks: Sequence[Block], names: tuple[StreamName, ...], streams: Streams, context: Mapping[str, Any]
) -> Streams:
    """The streams after the blocks, with a backward pass that rebuilds each step's input. To be traced."""
    steps = [bound.step for block in blocks for bound in block.bound_steps(names)]
    tensors = [value for value in context.values() if isinstance(value, Tensor)]
    by_name = {name: len(names) + i for i, name in enumerate(n for n, v in context.items() if isinstance(v, Tensor))}
    by_id: dict[int, int] = {}  # of parameters: the compiler guards an id, and a context tensor is another each call
    owned = []
    for step in steps:
        slots = []
        for name, parameter in _parameters(step):
            if id(parameter) not in by_id:
                by_id[id(parameter)] = len(names) + len(tensors)
                tensors.append(parameter)
            slots.append((name, by_id[id(parameter)]))
        owned.append(tuple(slots))
    layout = Layout(
        tuple(blocks),
        names,
        tuple(owned),
        tuple(tuple(step.takes.select(by_name).items()) for step in steps),
        {name: value for name, value in context.items() if not isinstance(value, Tensor)},
        tuple(tensor.requires_grad for tensor in tensors),
    )
    apart = [stream.clone() for stream in streams]  # the same tensor may be two streams, but not two inputs
    after: Streams = _Reversed.apply(layout, *apart, *tensors)  # type: ignore[no-untyped-call]
    return tuple(after)


def _parameters(step: Step) -> list[tuple[str, Tensor]]:
    return list(step.branch.named_parameters(remove_duplicate=False)) if isinstance(step.branch, nn.Module) else []


class _Reversed(torch.autograd.Function):
    """Blocks in a row. Keeps the streams after the last one, and inverts from there."""

    @staticmethod
    def forward(ctx: Any, layout: Layout, *tensors: Tensor) -> Streams:
        count = len(layout.names)
        streams: Streams = tensors[:count]
        samples = [_sample(stream) for stream in streams]
        position = 0
        for block in layout.blocks:
            for bound in block.bound_steps(layout.names):
                step, sources = bound.step, [streams[i] for i in bound.sources]
                kwargs = {**_constants(step, layout), **{n: tensors[i] for n, i in layout.context[position]}}
                update = _update(step, step.branch, sources, kwargs)
                streams = replaced(streams, bound.target, step.combine(streams[bound.target], update))
                position += 1
            streams = block.reorder(streams)
        ctx.layout = layout
        ctx.save_for_backward(*streams, *tensors[count:], *samples)
        return streams

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        layout: Layout = ctx.layout
        count = len(layout.names)
        saved = ctx.saved_tensors
        streams: Streams = saved[:count]
        totals: list[Tensor | None] = [None] * (len(saved) - count)
        position = len(layout.parameters)
        streams = tuple(_once_known(grad, stream) for grad, stream in zip(grads, streams, strict=True))
        for block in reversed(layout.blocks):
            streams, grads = block.restore_order(streams), block.restore_order(grads)
            for bound in reversed(block.bound_steps(layout.names)):
                position -= 1
                streams, grads = _retreat(bound, streams, grads, _Inputs(layout, position, saved, totals))
        for stream, sample in zip(streams, saved[-count:], strict=True):
            _check(stream, sample)
        return (None, *grads, *totals[count:])


class _Inputs(NamedTuple):
    """What a step of the backward pass reads beside the streams, and where it adds its gradients."""

    layout: Layout
    position: int
    tensors: Streams
    totals: list[Tensor | None]

    def tensors_in(self, slots: Slots, *, wanted: bool) -> dict[str, Tensor]:
        """Tensors by name: those that want gradients, or the others."""
        first = len(self.layout.names)
        return {name: self.tensors[i] for name, i in slots if self.layout.wanted[i - first] == wanted}

    def add(self, slots: Slots, grads: Mapping[str, Tensor]) -> None:
        for name, i in slots:
            if name in grads:
                total = self.totals[i]
                self.totals[i] = grads[name] if total is None else total + grads[name]


def _retreat(bound: BoundStep, streams: Streams, grads: Streams, inputs: _Inputs) -> tuple[Streams, Streams]:
    """Undo one step: the streams before it and their gradients."""
    step, target = bound.step, bound.target
    parameters, context = inputs.layout.parameters[inputs.position], inputs.layout.context[inputs.position]
    frozen = inputs.tensors_in(parameters, wanted=False)
    fixed = {**_constants(step, inputs.layout), **inputs.tensors_in(context, wanted=False)}

    def run(sources: Streams, weights: dict[str, Tensor], given: dict[str, Tensor]) -> Any:
        branch = _with(step.branch, {**frozen, **weights})
        return _update(step, branch, list(sources), {**fixed, **given})

    vjp: Any = torch.func.vjp
    update, pull = vjp(
        run,
        tuple(streams[i] for i in bound.sources),
        inputs.tensors_in(parameters, wanted=True),
        inputs.tensors_in(context, wanted=True),
    )
    before = step.coupling.separate(streams[target], update)
    _, pull_apart = vjp(step.coupling.combine, before, update)
    to_target, to_update = pull_apart(grads[target])
    to_sources, to_parameters, to_context = pull(to_update)
    grads = replaced(grads, target, to_target)
    for i, grad in zip(bound.sources, to_sources, strict=True):
        grads = replaced(grads, i, grads[i] + grad)
    inputs.add(parameters, to_parameters)
    inputs.add(context, to_context)
    return replaced(streams, target, _once_known(grads[bound.sources[0]], before)), grads


def _once_known(grad: Tensor, stream: Tensor) -> Tensor:
    """The stream, made to depend on a gradient. See NOTE [Why rebuilding waits for gradients]."""
    return torch.where(grad.detach().flatten()[:1].sum().isnan(), stream, stream)


def _with(branch: Any, parameters: dict[str, Tensor]) -> Any:
    """The branch with these tensors in the place of its parameters."""
    if not isinstance(branch, nn.Module):
        return branch

    def call(*args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(branch, parameters, args, kwargs, tie_weights=False)

    return call


def _update(step: Step, branch: Any, sources: list[Tensor], kwargs: Mapping[str, Any]) -> Any:
    return step.split_aux(branch(*step.branch_inputs(sources), **kwargs))[0]


def _constants(step: Step, layout: Layout) -> dict[str, Any]:
    return step.takes.select(layout.constants)


def _sample(stream: Tensor) -> Tensor:
    return stream.detach().flatten()[:SAMPLED].clone()


def _check(stream: Tensor, sample: Tensor) -> None:
    """Raise, when the graph runs, if a rebuilt stream is not what the forward pass began with."""
    error, size = (stream.flatten()[:SAMPLED] - sample).abs().sum(), sample.abs().sum()
    assert_in_graph(
        error <= TOLERANCES[stream.dtype] * (size + 1e-6),
        "A backward pass in one graph (compiled='single graph') ended with other streams than its forward pass "
        "began with. Perhaps a branch draws random numbers (F.dropout?) or changes something between its two runs: "
        "use compiled='branches' for this stack. Or the couplings magnify rounding: place anchors.",
    )

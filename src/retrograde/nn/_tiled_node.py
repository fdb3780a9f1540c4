"""One autograd node that runs a module in tiles, saves its input and the weights, and runs each tile again backward.

NOTE [One node for all tiles]
 1. The node is ordinary to autograd: its inputs are the input and every parameter of the module, so gradients of
    weights go back through autograd, once per call, and hooks, DDP and FSDP2 see what they would see untiled.
 2. What the first run saw, the second run sees: RNG states if it drew, autocast, training flags, its weights.
 3. Per-tile gradients of weights are summed in float32 where the weights have lower precision.
 4. A backward pass that is differentiated itself runs the tiles in ordinary autograd, with the memory of all of them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from retrograde.engine import rng
from retrograde.engine.replaying import replaying
from retrograde.engine.torch_internals import has_tensor_hooks, parameter_slots

_SWAPS = threading.RLock()  # held while a module has weights put in for one run


@dataclass
class TiledRun:
    """One call of a module in tiles of `size` entries of `dim`, and what its second run needs of the first."""

    run: Callable[[Tensor], Tensor]
    owner: nn.Module
    size: int
    dim: int
    names: list[str] = field(default_factory=list)
    drawn: list[tuple[Any, Any]] = field(default_factory=list)  # generators with their states before the first run
    autocast: list[tuple[str, bool, torch.dtype]] = field(default_factory=list)
    training: list[bool] = field(default_factory=list)

    def first(self, x: Tensor) -> Tensor:
        """The output of all tiles, without a graph."""
        kinds = dict.fromkeys((x.device.type, "cpu"))
        self.autocast = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
        self.training = [module.training for module in self.owner.modules()]
        generators = [*rng.torch_generators([x.device]), *rng.global_generators(), *_own_generators(self.owner)]
        before = [(generator, rng.read(generator)) for generator in generators]
        buffers = _buffers(self.owner)
        with self._autocast():
            output = joined((self.run(tile) for tile in x.split(self.size, self.dim)), x, self.dim)
        if _buffers(self.owner) != buffers:
            raise RuntimeError(
                f"{type(self.owner).__name__} changed a buffer while it ran in tiles ({_changed(self.owner)} has such "
                "buffers): it would be updated once per tile, and once more in the backward pass. Put it into eval "
                "mode, replace the layer (LayerNorm for BatchNorm), or leave this module untiled."
            )
        if any(rng.read(generator) != state for generator, state in before):
            self.drawn = before
        return output

    @contextmanager
    def second(self) -> Iterator[None]:
        """A context like that of the first run; generators and flags are left as they were before."""
        modules = list(self.owner.modules())
        flags = [module.training for module in modules]
        now = [(generator, rng.read(generator)) for generator, _ in self.drawn]
        try:
            for generator, state in self.drawn:
                rng.write(generator, state)
            if flags != self.training:
                _set_training(modules, self.training)
            with replaying(), self._autocast():
                yield
        finally:
            for generator, state in now:
                rng.write(generator, state)
            if flags != self.training:
                _set_training(modules, flags)

    @contextmanager
    def weights(self, given: Sequence[Tensor], *, connected: bool) -> Iterator[list[Tensor]]:
        """The weights of one run, put into the module where they are not its own.

        They are its own leaves if nothing else is needed: a hook on a parameter is for its gradient, not for each
        tile's, and the module may have other weights by now (`torch.func.functional_call`).
        """
        present = dict(self.owner.named_parameters())
        own = [present.get(name) for name in self.names]
        if not connected and all(_is_same(a, b) for a, b in zip(own, given, strict=True)):
            yield [weight for weight in own if weight is not None]
            return
        used = [_start(w, w.requires_grad, connected=connected) for w in given]
        with _SWAPS, _put_in(self.owner, dict(zip(self.names, used, strict=True))):
            yield used

    @contextmanager
    def _autocast(self) -> Iterator[None]:
        # Without autocast's cache: the casts of a run without a graph would be taken for those of a later one with it.
        with ExitStack() as stack:
            for kind, enabled, dtype in self.autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
            yield


class TiledNode(torch.autograd.Function):
    """See NOTE [One node for all tiles]."""

    @staticmethod
    def forward(ctx: Any, call: TiledRun, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(x, *weights)
        return call.first(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        call: TiledRun = ctx.call
        x, *weights = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        differentiate = _all_at_once if torch.is_grad_enabled() else _tile_by_tile
        with call.second():
            return None, *differentiate(call, x, weights, grads[0], wanted)


def _tile_by_tile(
    call: TiledRun, x: Tensor, weights: Sequence[Tensor], grad: Tensor, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """The gradients to the input and the weights; the graph of one tile is alive at a time."""
    needed = [i for i, wants in enumerate(wanted[1:]) if wants]
    sums: list[Tensor | None] = [None] * len(weights)

    def gradients_of_tiles() -> Iterator[Tensor]:
        with call.weights(weights, connected=False) as used:
            for tile, slope in zip(x.split(call.size, call.dim), grad.split(call.size, call.dim), strict=True):
                start = tile.detach().requires_grad_(wanted[0])
                with torch.enable_grad():
                    output = call.run(start)
                targets = ([start] if wanted[0] else []) + [used[i] for i in needed]
                slopes = list(_gradients(output, targets, slope))
                del output  # before the next tile allocates its own
                to_tile = slopes.pop(0) if wanted[0] else None
                for i, part in zip(needed, slopes, strict=True):
                    sums[i] = _added(sums[i], part)
                yield torch.zeros_like(start) if to_tile is None else to_tile

    if wanted[0]:
        to_x: Tensor | None = joined(gradients_of_tiles(), x, call.dim)
    else:
        to_x = None
        for _ in gradients_of_tiles():
            pass
    to_weights = [None if s is None else s.to(w.dtype) for s, w in zip(sums, weights, strict=True)]
    return [to_x, *to_weights]


def _all_at_once(
    call: TiledRun, x: Tensor, weights: Sequence[Tensor], grad: Tensor, wanted: Sequence[bool]
) -> list[Tensor | None]:
    """The same in ordinary autograd, for a backward pass that is differentiated itself."""
    start = _start(x, wanted[0], connected=True)
    with call.weights(weights, connected=True) as used:
        output = torch.cat([call.run(tile) for tile in start.split(call.size, call.dim)], call.dim)
        targets = [t for t, wants in zip([start, *used], wanted, strict=True) if wants]
        slopes = iter(_gradients(output, targets, grad, create_graph=True))
    return [next(slopes) if wants else None for wants in wanted]


def _gradients(
    output: Tensor, targets: Sequence[Tensor], grad: Tensor, *, create_graph: bool = False
) -> Sequence[Tensor | None]:
    if not output.requires_grad or not targets:
        return [None] * len(targets)
    return torch.autograd.grad(output, targets, grad, allow_unused=True, create_graph=create_graph)


def joined(parts: Iterator[Tensor], like: Tensor, dim: int) -> Tensor:
    """The parts in a row along `dim`, written into one tensor as they come, so that they are not held twice."""
    whole: Tensor | None = None
    position = 0
    for part in parts:
        if whole is None:
            if part.shape[dim] == like.shape[dim]:
                return part
            shape = list(part.shape)
            shape[dim] = like.shape[dim]
            whole = part.new_empty(shape)
        whole.narrow(dim, position, part.shape[dim]).copy_(part)
        position += part.shape[dim]
    assert whole is not None  # split gives one part at least
    return whole


def _added(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    if part is None:
        return total
    if total is None:
        return part.to(torch.promote_types(part.dtype, torch.float32)) if part.is_floating_point() else part
    return total.add_(part)


def _start(tensor: Tensor, requires_grad: bool, *, connected: bool) -> Tensor:
    """Where a run's graph starts: at the tensor through a view without its hooks, or at a leaf of its own."""
    return tensor.view_as(tensor) if connected else tensor.detach().requires_grad_(requires_grad)


def _is_same(own: Tensor | None, given: Tensor) -> bool:
    if own is None or has_tensor_hooks(own) or own.requires_grad != given.requires_grad or not own.is_leaf:
        return False
    return own is given or (own.data_ptr() == given.data_ptr() and own.shape == given.shape)


@contextmanager
def _put_in(owner: nn.Module, weights: dict[str, Tensor]) -> Iterator[None]:
    """A context in which the module has these tensors as its parameters, under every name that they have."""
    tensors = {id(p): weights[name] for name, p in owner.named_parameters()}
    places = [(slots, name, p) for slots in map(parameter_slots, owner.modules()) for name, p in slots.items()]
    try:
        for slots, name, parameter in places:
            slots[name] = parameter if parameter is None else tensors[id(parameter)]
        yield
    finally:
        for slots, name, parameter in places:
            slots[name] = parameter


def _own_generators(owner: nn.Module) -> list[Any]:
    return rng.generators_in(value for module in owner.modules() for value in vars(module).values())


def _buffers(owner: nn.Module) -> list[tuple[int, int]]:
    return [(id(b), 0 if b.is_inference() else b._version) for b in owner.buffers()]


def _changed(owner: nn.Module) -> str:
    kinds = dict.fromkeys(type(m).__name__ for m in owner.modules() if any(True for _ in m.buffers(recurse=False)))
    return ", ".join(kinds)


def _set_training(modules: Sequence[nn.Module], flags: Sequence[bool]) -> None:
    for module, flag in zip(modules, flags, strict=True):
        module.training = flag


def check_not_sharded_inside(owner: nn.Module) -> None:
    """Raise for a module that FSDP2 gathers when it is called: the node would have been given the shards."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(part, fsdp.FSDPModule) for part in owner.modules()):
        raise RuntimeError(
            f"{type(owner).__name__} runs in tiles, and fully_shard was given it or a part of it, so its parameters "
            "would be gathered inside the tiles, where their gradients are lost. Call fully_shard on a module around "
            "the Tiled one, such as the layer."
        )

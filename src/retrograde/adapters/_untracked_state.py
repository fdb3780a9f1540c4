"""State of published modules that neither autograd nor the engine tracks: plain attributes, and `buffer.data`.

NOTE [State outside of parameters and buffers]
 The engine restores buffers that a branch changed, and notices the change by autograd's version
 counters. Some published modules keep state elsewhere: routing's k-means counts in plain attributes
 and writes its means through `.data`, which raises no version, and a hook of its model does so in
 the middle of a backward pass; reformer's attention keeps its buckets in an attribute; lie's
 attention a running average. An `UntrackedState` records that state around the first run of each
 branch of one call. The replay sees what was recorded, and what the replay changes is undone.

 Modules of torch itself are skipped: they have no such state, and FSDP's must not be touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from retrograde.engine.replaying import is_replaying

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class UntrackedState:
    """The untracked state of the branches of one call. It is passed on in the call's context.

    Args:
        moment: which state a replay sees, that before or that after the first run.
        buffers: whether buffers are copied too, for modules that write them through `.data`.
        silent: attributes that are None in a replay: callbacks, which have seen the first run.
    """

    def __init__(
        self,
        moment: Literal["before", "after"] = "before",
        *,
        buffers: bool = False,
        silent: frozenset[str] = frozenset(),
    ) -> None:
        self._moment = moment
        self._buffers = buffers
        self._silent = silent
        self._recorded: dict[object, list[_ModuleState]] = {}

    def replays(self, branch: object) -> bool:
        """Whether this run of a branch repeats one of the same call."""
        return is_replaying() and branch in self._recorded

    @contextmanager
    def around(self, branch: object, module: nn.Module) -> Iterator[None]:
        """The context in which a branch runs, each time."""
        if self.replays(branch):
            with ExitStack() as stack:
                for state in self._recorded[branch]:
                    stack.enter_context(state.shown())
                yield
        elif not torch.is_grad_enabled():
            yield
        else:
            if self._moment == "before":
                self._recorded[branch] = self._record(module)
            yield
            if self._moment == "after":
                self._recorded[branch] = self._record(module)

    def _record(self, module: nn.Module) -> list[_ModuleState]:
        inner = [m for m in module.modules() if not type(m).__module__.startswith("torch.")]
        states = [_ModuleState(m, buffers=self._buffers) for m in inner]
        for state in states:
            state.attributes.update(dict.fromkeys(self._silent & state.attributes.keys()))
        return states


class _ModuleState:
    """The plain attributes of a module, and copies of its buffers."""

    __slots__ = ("attributes", "buffers", "module")

    def __init__(self, module: nn.Module, *, buffers: bool) -> None:
        self.module = module
        self.attributes = {name: _without_graph(value) for name, value in _plain_attributes(module).items()}
        named = module.named_buffers(recurse=False, remove_duplicate=False) if buffers else ()
        self.buffers = [(name, tensor, tensor.clone()) for name, tensor in named]

    @contextmanager
    def shown(self) -> Iterator[None]:
        """The module as recorded: its attributes, and its buffers where their values were changed unnoticed.

        Afterwards it has the same attributes and buffers as before. Not `engine.preserve`, which would also undo what
        a replay appends to a list: logs of a module may count replays.
        """
        attributes = _plain_attributes(self.module)
        buffers = [(name, getattr(self.module, name)) for name, _, _ in self.buffers]
        _set_plain_attributes(self.module, self.attributes)
        for name, tensor, copy in self.buffers:
            if getattr(self.module, name) is tensor and not torch.equal(tensor, copy):
                setattr(self.module, name, copy.clone())
        try:
            yield
        finally:
            for name, tensor in buffers:
                setattr(self.module, name, tensor)
            _set_plain_attributes(self.module, attributes)


def _plain_attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}


def _set_plain_attributes(module: nn.Module, plain: dict[str, Any]) -> None:
    attributes = vars(module)
    for name in attributes.keys() - plain.keys() - _OF_EVERY_MODULE:
        del attributes[name]
    attributes.update(plain)


def _without_graph(value: Any) -> Any:
    """A tensor without its graph, which would keep every earlier call alive."""
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()
    return value

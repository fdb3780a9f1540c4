"""What published modules keep where neither autograd nor the engine looks: plain attributes, and `buffer.data`.

NOTE [State outside of parameters and buffers]
 The engine restores buffers that a branch changed, and notices by autograd's version counters that
 it did. Some published modules keep state elsewhere: routing's k-means counts in plain attributes
 and writes its means through `.data`, which raises no version, and a hook of its model does so in
 the middle of a backward pass; reformer's attention keeps its buckets in an attribute; lie's
 attention a running average. A call's notes hold that state as it was around the first run of
 each branch. The replay sees it so, and what the replay changes is forgotten.

 Modules of torch itself are left out: they keep no such state, and FSDP's must not be touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from retrograde._replay import is_replaying

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class Notes:
    """The hidden state of one call's branches. It travels with the call's context.

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
        self._states: dict[object, list[State]] = {}

    def replays(self, branch: object) -> bool:
        """Whether this run of a branch repeats one of the same call."""
        return is_replaying() and branch in self._states

    @contextmanager
    def around(self, branch: object, module: nn.Module) -> Iterator[None]:
        """Run a branch inside of this, each time it runs."""
        if self.replays(branch):
            with _forgotten(self._states[branch]):
                yield
        elif not torch.is_grad_enabled():
            yield
        else:
            if self._moment == "before":
                self._states[branch] = self._look(module)
            yield
            if self._moment == "after":
                self._states[branch] = self._look(module)

    def _look(self, module: nn.Module) -> list[State]:
        inner = [m for m in module.modules() if not type(m).__module__.startswith("torch.")]
        states = [State(m, buffers=self._buffers) for m in inner]
        for state in states:
            state.attributes.update(dict.fromkeys(self._silent & state.attributes.keys()))
        return states


class State:
    """The plain attributes of a module, and copies of its buffers."""

    __slots__ = ("attributes", "buffers", "module")

    def __init__(self, module: nn.Module, *, buffers: bool) -> None:
        self.module = module
        self.attributes = {name: _cut(value) for name, value in _plain(module).items()}
        held = module.named_buffers(recurse=False, remove_duplicate=False) if buffers else ()
        self.buffers = [(name, tensor, tensor.clone()) for name, tensor in held]

    def put_back(self) -> None:
        """Make the module's attributes those of this state, and its buffers where they were changed unseen."""
        _restore(vars(self.module), self.attributes)
        for name, tensor, copy in self.buffers:
            if getattr(self.module, name) is tensor and not torch.equal(tensor, copy):
                setattr(self.module, name, copy.clone())


@contextmanager
def _forgotten(states: list[State]) -> Iterator[None]:
    """Modules as they were noted; afterwards they are as they were found."""
    found = [(vars(state.module), _plain(state.module)) for state in states]
    buffers = [(s.module, name, getattr(s.module, name)) for s in states for name, _, _ in s.buffers]
    for state in states:
        state.put_back()
    try:
        yield
    finally:
        for module, name, tensor in buffers:
            setattr(module, name, tensor)
        for attributes, plain in found:
            _restore(attributes, plain)


def _restore(attributes: dict[str, Any], plain: dict[str, Any]) -> None:
    for name in attributes.keys() - plain.keys() - _OF_EVERY_MODULE:
        del attributes[name]
    attributes.update(plain)


def _cut(value: Any) -> Any:
    """A tensor without its graph: notes that held one would keep every call alive that came before."""
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()
    return value


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}

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
    """

    def __init__(self, moment: Literal["before", "after"] = "before", *, buffers: bool = False) -> None:
        self._moment = moment
        self._buffers = buffers
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
        return [State(m, buffers=self._buffers) for m in inner]


class State:
    """The plain attributes of a module, and copies of its buffers."""

    __slots__ = ("attributes", "buffers", "module")

    def __init__(self, module: nn.Module, *, buffers: bool) -> None:
        self.module = module
        self.attributes = _plain(module)
        held = module._buffers.items() if buffers else ()
        self.buffers = [(name, tensor, tensor.clone()) for name, tensor in held if tensor is not None]

    def put_back(self) -> None:
        """Make the module's attributes those of this state, and its buffers where they were changed unseen."""
        self.restore_attributes()
        for name, tensor, copy in self.buffers:
            if self.module._buffers.get(name) is tensor and not torch.equal(tensor, copy):
                self.module._buffers[name] = copy.clone()

    def restore_attributes(self) -> None:
        slots = vars(self.module)
        for name in _plain(self.module).keys() - self.attributes.keys():
            del slots[name]
        slots.update(self.attributes)


@contextmanager
def _forgotten(states: list[State]) -> Iterator[None]:
    """Modules as they were noted; afterwards they are as they were found."""
    found = [State(state.module, buffers=False) for state in states]
    buffers: list[tuple[dict[str, Tensor | None], str, Tensor | None]] = [
        (s.module._buffers, name, s.module._buffers[name]) for s in states for name, _, _ in s.buffers
    ]
    for state in states:
        state.put_back()
    try:
        yield
    finally:
        for slots, name, tensor in buffers:
            slots[name] = tensor
        for state in found:
            state.restore_attributes()


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}

"""The reversible stacks in a model."""

from __future__ import annotations

from torch import nn

from retrograde.sequence import ReversibleSequence


def stacks_in(model: nn.Module) -> dict[str, ReversibleSequence]:
    """All stacks of a model, by their names in it; "" is the model itself."""
    return {name: module for name, module in model.named_modules() if isinstance(module, ReversibleSequence)}


def stacks_of(model: nn.Module) -> dict[str, ReversibleSequence]:
    """All stacks of a model; raises if it has none."""
    stacks = stacks_in(model)
    if not stacks:
        raise ValueError(
            f"{type(model).__name__} contains no retrograde.ReversibleSequence. Build it with one, convert it with "
            "retrograde.convert(model), or, if it comes from a published package, call "
            "retrograde.adapters.install(name) before that is imported."
        )
    return stacks


def the_stack(model: nn.Module, name: str | ReversibleSequence | None = None) -> ReversibleSequence:
    """The stack of a name, or the only one; a stack that is given itself is returned."""
    if isinstance(name, ReversibleSequence):
        return name
    stacks = stacks_of(model)
    names = ", ".join(repr(n) if n else "'' (the model itself)" for n in stacks)
    if name is not None:
        if name not in stacks:
            raise ValueError(f"The model has no ReversibleSequence {name!r}; it has {names}.")
        return stacks[name]
    if len(stacks) > 1:
        raise ValueError(
            f"The model has {len(stacks)} ReversibleSequences, where one is meant: {names}. Choose it with stack=name; "
            "on the command line, with --stack name."
        )
    return next(iter(stacks.values()))

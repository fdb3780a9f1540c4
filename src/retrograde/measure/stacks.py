"""The reversible stacks in a model, and all parameters that it trains."""

from __future__ import annotations

from torch import Tensor, nn

from retrograde.network.reachable import leaves_reached
from retrograde.network.step import Step
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


def parameters_of(part: nn.Module) -> list[Tensor]:
    """What gets a gradient in a model, a block or a step: its own parameters, and those that its branches reach.

    A branch may be a function of layers that belong to another module, as those of a converted model are.
    """
    own = (p for p in part.parameters() if p.requires_grad)
    reached = (leaf for m in part.modules() if isinstance(m, Step) for leaf in leaves_reached(m.branch))
    return list(dict.fromkeys([*own, *reached]))


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

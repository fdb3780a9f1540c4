"""A user's module or function inside a step: the context it takes, and what it can reach."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

TakesArgument = Literal["all"] | Sequence[str] | Mapping[str, str] | None


@dataclass(frozen=True)
class Takes:
    """Which context a branch receives.

    `pairs` maps the branch's own parameter names to names of the context, `required` are the
    context names it cannot run without, and `everything` hands over the whole context.
    `undecided` marks a branch whose `**kwargs` leave open what it takes.
    """

    pairs: tuple[tuple[str, str], ...] = ()
    required: frozenset[str] = frozenset()
    everything: bool = False
    undecided: bool = False

    def select(self, context: Mapping[str, Any]) -> dict[str, Any]:
        if self.everything:
            return dict(context)
        return {parameter: context[name] for parameter, name in self.pairs if name in context}

    def names(self) -> frozenset[str]:
        return frozenset(name for _, name in self.pairs)

    def __str__(self) -> str:
        if self.everything:
            return "all context"
        if self.undecided:
            return "nothing, as its **kwargs leave that open (say takes=...)"
        return ", ".join(sorted(self.names())) or "nothing"


def find_takes(branch: Callable[..., Any], given: TakesArgument, positional: int) -> Takes:
    """What a branch takes: as the user said, or by its signature past its `positional` sources."""
    if isinstance(given, str):
        if given != "all":
            raise ValueError(
                f"takes={given!r}: give a sequence of names, a mapping, or 'all'. One name is [{given!r}]."
            )
        return Takes(everything=True)
    parameters = _parameters(branch)
    optional = {p.name for p in parameters if p.default is not p.empty or p.kind is p.VAR_KEYWORD}
    if given is not None:
        pairs = tuple(given.items()) if isinstance(given, Mapping) else tuple((name, name) for name in given)
        _check_accepted(branch, parameters, pairs)
        return Takes(pairs, frozenset(name for parameter, name in pairs if parameter not in optional))
    free = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)][positional:]
    named = [p for p in free if p.kind is p.POSITIONAL_OR_KEYWORD] + [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        named = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    return Takes(
        pairs=tuple((p.name, p.name) for p in named),
        required=frozenset(p.name for p in named if p.name not in optional),
        undecided=not named and any(p.kind is p.VAR_KEYWORD for p in parameters),
    )


def accepted(branch: Callable[..., Any], names: Mapping[str, str]) -> dict[str, str]:
    """Of a mapping from parameters to context names, the part that a branch's signature accepts."""
    parameters = _parameters(branch)
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(names)
    accepted_names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {parameter: name for parameter, name in names.items() if parameter in accepted_names}


def name_of(branch: Callable[..., Any]) -> str:
    """What to call a branch in a message."""
    if isinstance(branch, nn.Module):
        return type(branch).__name__
    if isinstance(branch, functools.partial):
        return f"partial({name_of(branch.func)})"
    return getattr(branch, "__qualname__", type(branch).__name__)


def reachable(branch: Callable[..., Any]) -> Iterable[Any]:
    """A branch and what it closes over: a function's cells and defaults, a method's owner, a partial's arguments."""
    if isinstance(branch, nn.Module):
        return (branch,)
    todo: list[Any] = [branch]
    reached: list[Any] = []
    while todo:
        value = todo.pop()
        if any(value is seen for seen in reached):
            continue
        reached.append(value)
        todo.extend(_held_by(value))
    return reached


def leaves_reached(branch: Callable[..., Any]) -> list[Tensor]:
    """The tensors that get a gradient in a branch: its modules' parameters, and those that it closes over."""
    leaves: dict[Tensor, None] = {}
    for value in reachable(branch):
        tensors = value.parameters() if isinstance(value, nn.Module) else [value] if isinstance(value, Tensor) else ()
        leaves |= dict.fromkeys(t for t in tensors if t.requires_grad and t.is_leaf)
    return list(leaves)


def _held_by(value: Any) -> list[Any]:
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.FunctionType):
        cells = [c.cell_contents for c in value.__closure__ or () if _is_filled(c)]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    if callable(value) and not isinstance(value, (nn.Module, type)):
        return list(getattr(value, "__dict__", {}).values())
    return []


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _parameters(branch: Callable[..., Any]) -> list[inspect.Parameter]:
    inner = getattr(branch, "_orig_mod", branch)  # torch.compile hides the signature of the module it wraps
    call = inner.forward if isinstance(inner, nn.Module) else inner
    try:
        return list(inspect.signature(call).parameters.values())
    except (TypeError, ValueError):  # builtins without a signature
        return []


def _check_accepted(
    branch: Callable[..., Any], parameters: list[inspect.Parameter], pairs: tuple[tuple[str, str], ...]
) -> None:
    if not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    accepted = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for parameter, _ in pairs:
        if parameter not in accepted:
            raise ValueError(
                f"takes names {parameter!r}, which {name_of(branch)} does not accept; it accepts {', '.join(accepted)}."
            )

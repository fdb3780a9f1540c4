"""What a branch can reach besides its arguments: what it closes over, and the globals that its code names."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

Place = tuple[Any, Any, Any]
"""A dictionary or list, a key in it, and what is there; the first two are None for what a function closes over."""

_FOREIGN = frozenset({"torch", "numpy", "retrograde", *sys.stdlib_module_names})  # whose code is not looked into
_LARGEST_CONTAINER = 1000


def reachable(branch: Callable[..., Any]) -> Iterable[Any]:
    """A branch and what it closes over: a function's cells and defaults, a method's owner, a partial's arguments."""
    if isinstance(branch, nn.Module):
        return (branch,)
    todo: list[Any] = [branch]
    reached: dict[int, Any] = {}
    while todo:
        value = todo.pop()
        if id(value) not in reached:
            reached[id(value)] = value
            todo.extend(_held_by(value))
    return reached.values()


def leaves_reached(branch: Callable[..., Any]) -> list[Tensor]:
    """The tensors that get a gradient in a branch: its modules' parameters, and those that it closes over."""
    leaves: dict[Tensor, None] = {}
    for value in reachable(branch):
        tensors = value.parameters() if isinstance(value, nn.Module) else [value] if isinstance(value, Tensor) else ()
        leaves |= dict.fromkeys(t for t in tensors if t.requires_grad and t.is_leaf)
    return list(leaves)


def read_by_functions(functions: Iterable[Any]) -> Iterator[Place]:
    """Globals that functions name, what they close over, and the same of the functions among these.

    Code of torch, NumPy and the standard library is not looked into. Containers are given, not what is in them.
    """
    for _, places in _walked(functions):
        yield from (place for place in places if not isinstance(place[2], types.FunctionType))


def functions_reached(roots: Iterable[Any]) -> list[types.FunctionType]:
    """Functions, those that they name or close over, and the same of the forward of modules and what it calls.

    The forward of torch's own modules is not looked into.
    """
    functions: list[Any] = []
    for root in roots:
        if not isinstance(root, nn.Module):
            functions.append(root)
        elif not type(root).__module__.startswith("torch."):
            functions += _methods_run_by(root)
    return [function for function, _ in _walked(functions)]


def _walked(functions: Iterable[Any]) -> Iterator[tuple[types.FunctionType, list[Place]]]:
    """Functions and those that they reach, each with what its code reads."""
    todo, seen = [f for f in functions if isinstance(f, types.FunctionType)], set()
    while todo:
        function = todo.pop()
        if id(function) in seen:
            continue
        seen.add(id(function))
        places: list[Place] = []
        if not is_foreign(function.__module__):
            slots = function.__globals__
            places = [(slots, name, slots[name]) for name in names_in(function.__code__)[0] if name in slots]
            places += [(None, None, value) for value in _closed_over(function)]
            todo += [value for _, _, value in places if isinstance(value, types.FunctionType)]
        yield function, places


def read_by_module(module: nn.Module) -> Iterator[Place]:
    """The same for the forward of a module, and for the methods that it calls."""
    return read_by_functions(_methods_run_by(module))


def _methods_run_by(module: nn.Module) -> list[types.FunctionType]:
    """The forward of a module, and the methods that it calls."""
    names, functions, todo = {"forward"}, [], ["forward"]
    if isinstance(own := vars(module).get("forward"), types.FunctionType):
        functions.append(own)
    while todo:
        name = todo.pop()
        for cls in type(module).__mro__:
            method = vars(cls).get(name)
            if isinstance(method, types.FunctionType) and not is_foreign(cls.__module__):
                functions.append(method)
                todo.extend(set(names_in(method.__code__)[1]) - names)
                names.update(names_in(method.__code__)[1])
    return functions


def items_of(container: Any) -> list[Place]:
    """What is in a list, a tuple or a dictionary that is not too large to be looked through."""
    if type(container) in (list, tuple) and len(container) <= _LARGEST_CONTAINER:
        return [(container, i, value) for i, value in enumerate(container)]
    if isinstance(container, dict) and len(container) <= _LARGEST_CONTAINER:
        return [(container, key, value) for key, value in container.items()]
    return []


def is_foreign(module_name: str | None) -> bool:
    """Whether code of this module is none of the user's."""
    return (module_name or "").partition(".")[0] in _FOREIGN


@functools.lru_cache(maxsize=4096)
def names_in(code: types.CodeType) -> tuple[Sequence[str], Sequence[str]]:
    """The names of globals that code reads, and of the attributes."""
    read, attributes = [], []
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            read.append(instruction.argval)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            attributes.append(instruction.argval)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = names_in(constant)
            read.extend(inner[0])
            attributes.extend(inner[1])
    return tuple(dict.fromkeys(read)), tuple(dict.fromkeys(attributes))


def _held_by(value: Any) -> list[Any]:
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, types.FunctionType):
        return _closed_over(value)
    if isinstance(value, (list, tuple)):
        return list(value)
    if isinstance(value, dict):
        return list(value.values())
    if callable(value) and not isinstance(value, (nn.Module, type)):
        return list(getattr(value, "__dict__", {}).values())
    return []


def _closed_over(function: types.FunctionType) -> list[Any]:
    cells = [c.cell_contents for c in function.__closure__ or () if _is_filled(c)]
    return [*cells, *(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True

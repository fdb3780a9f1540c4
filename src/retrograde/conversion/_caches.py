"""Key-value caches and recurrent states among the arguments of layers, to which a layer writes."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from torch import Tensor


def without_cache(call: Mapping[str, Any], first: int, *, filled: Literal["keep", "drop", "refuse"]) -> dict[str, Any]:
    """The arguments without an empty key-value cache, to which a branch that runs twice would write twice.

    In all memory modes alike: keys that pass through a cache have another memory layout, and give other bits. Layers
    before the `first` may have written to it.
    """
    caches = {name: value for name, value in call.items() if _is_cache(value)}
    if filled == "refuse":
        refuse_filled_caches(call, first)
    dropped = [name for name, cache in caches.items() if filled != "keep" or not _cache_content(cache, first)]
    without = {**call, **dict.fromkeys(dropped)}
    return {**without, "use_cache": False} if dropped and "use_cache" in call else without


def refuse_filled_caches(call: Mapping[str, Any], first: int) -> None:
    """Raise for a key-value cache with content, to which a layer that runs twice would write twice."""
    for name, value in call.items():
        if _is_cache(value) and (content := _cache_content(value, first)):
            raise ValueError(
                f"{name} holds {content}, and gradients are enabled. The backward pass runs each layer "
                "again, which would write to the cache twice: use torch.no_grad(), or memory='store'."
            )


def with_own_caches(call: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, with twins of empty caches for one run of a layer: what it writes is gone after that.

    Its keys pass through a cache as in the original model, so that their memory layout is the same, and so the bits.
    """
    return {name: _twin(value) if _is_cache(value) else value for name, value in call.items()}


def _twin(cache: Any) -> Any:
    """A cache that shares the tensors of another one, but not the lists, dictionaries and layers that hold them."""
    twin = copy.copy(cache)
    for name, value in vars(cache).items():
        vars(twin)[name] = _twin_of_part(value)
    return twin


def _twin_of_part(value: Any) -> Any:
    if type(value) is list:
        return [_twin(v) if hasattr(v, "__dict__") and not isinstance(v, Tensor) else _twin_of_part(v) for v in value]
    if type(value) is dict:
        return {key: _twin_of_part(v) for key, v in value.items()}
    return _twin(value) if _is_cache(value) else value


def _is_cache(value: Any) -> bool:
    return hasattr(value, "get_seq_length")


def _cache_content(cache: Any, first: int) -> str:
    """What a cache contains for the first layer, in words; "" if it is empty."""
    try:
        positions = int(cache.get_seq_length(first) if first else cache.get_seq_length())
    except ValueError:  # a cache of recurrent states, which have no positions
        return "earlier states" if cache.has_previous_state() else ""
    return f"{positions} positions" if positions else ""


def with_copied_caches(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments, with copies of those that layers write to: key-value caches, lists and dictionaries of states."""
    return {name: _copied(value) for name, value in arguments.items()}


def _copied(value: Any) -> Any:
    if type(value) is list:
        return [_copied_tensor(v) for v in value]
    if type(value) is dict:
        return {k: _copied_tensor(v) for k, v in value.items()}
    if hasattr(value, "get_seq_length"):  # its keys may have a graph (prefix tuning), which deepcopy rejects
        return copy.deepcopy(value, {id(t): _copied_tensor(t) for t in _tensors_in(value, set())})
    return value


def _tensors_in(value: Any, seen: set[int]) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif id(value) not in seen:
        seen.add(id(value))
        parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else None
        for part in vars(value).values() if parts is None and hasattr(value, "__dict__") else parts or ():
            yield from _tensors_in(part, seen)


def _copied_tensor(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value

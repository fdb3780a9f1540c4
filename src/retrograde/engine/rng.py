"""Generators of random numbers, of every kind, behind two functions: read the RNG state, set the RNG state."""

from __future__ import annotations

import ctypes
import random
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class DeviceGenerator:
    """The default generator of an accelerator, whatever its type."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = torch.get_device_module(device)

    def get_state(self) -> Tensor:
        state: Tensor = self._module.get_rng_state(self.device)
        return state

    def set_state(self, state: Tensor) -> None:
        self._module.set_rng_state(state, self.device)


def read(generator: Any) -> Any:
    """A generator's state, as a value that compares with `==`."""
    if hasattr(generator, "get_state"):
        state = generator.get_state()
        if isinstance(state, Tensor):  # a torch.Generator, or an accelerator's
            return ctypes.string_at(state.data_ptr(), state.numel())
        return _frozen(state)  # the module `numpy.random`, or a RandomState
    if hasattr(generator, "getstate"):  # Python's: the module `random`, or a `random.Random`
        return generator.getstate()
    return _frozen(generator.bit_generator.state)  # a numpy.random.Generator


def write(generator: Any, state: Any) -> None:
    """Set a generator to a state that `read` returned."""
    if hasattr(generator, "set_state"):
        is_bytes = isinstance(state, bytes)
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8) if is_bytes else _thawed(state))
    elif hasattr(generator, "setstate"):
        generator.setstate(state)
    else:
        generator.bit_generator.state = _thawed(state)


def torch_generators(devices: Iterable[torch.device]) -> list[Any]:
    """The generators that any branch may draw from: torch's, on the CPU, on these devices and on every accelerator.

    A branch may draw on a device that no stream is on, as models do whose layers are spread over devices.
    """
    used = dict.fromkeys((*devices, *_initialised_devices()))
    generators: list[Any] = [torch.default_generator]
    generators.extend(DeviceGenerator(d) for d in used if d.type not in ("cpu", "meta"))
    return generators


def _initialised_devices() -> list[torch.device]:
    """The accelerators of this process, if it has used one."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return []
    module = torch.get_device_module(accelerator)
    if not getattr(module, "is_initialized", lambda: True)():
        return []
    return [torch.device(accelerator.type, i) for i in range(torch.accelerator.device_count())]


def global_generators() -> list[Any]:
    """The global generators of Python and NumPy: slow to read, and seldom used by a branch."""
    numpy = sys.modules.get("numpy")
    return [random] if numpy is None else [random, numpy.random]


def fingerprint(generator: Any) -> Any:
    """A value that changes when a global generator is drawn from; faster than its state where it can be.

    NumPy's state takes 35 µs to read, its bytes under 1 µs. (A normal number that NumPy drew
    earlier and kept is the one draw that leaves the bytes unchanged.)
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and generator is numpy.random and hasattr(numpy.random, "get_bit_generator"):
        bits = numpy.random.get_bit_generator()
        if type(bits) is numpy.random.MT19937:
            return ctypes.string_at(bits.ctypes.state_address, 625 * 4)
    return read(generator)


def generators_in(values: Iterable[Any]) -> list[Any]:
    """The generator objects among some values."""
    return [v for v in values if is_generator(v)]


def is_generator(value: Any) -> bool:
    """Whether a value is a generator object of torch, Python or NumPy."""
    if isinstance(value, (torch.Generator, random.Random)):
        return True
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.random.Generator, numpy.random.RandomState))


def _frozen(state: Any) -> Any:
    """A NumPy state (dictionaries, tuples and arrays) as tuples and bytes, which compare plainly."""
    if isinstance(state, dict):
        return ("dict", tuple((k, _frozen(v)) for k, v in state.items()))
    if isinstance(state, tuple):
        return ("tuple", tuple(_frozen(v) for v in state))
    if hasattr(state, "tobytes") and state.ndim:
        return ("array", str(state.dtype), state.tobytes())
    return ("value", state)


def _thawed(frozen: Any) -> Any:
    kind, *rest = frozen
    if kind == "dict":
        return {k: _thawed(v) for k, v in rest[0]}
    if kind == "tuple":
        return tuple(_thawed(v) for v in rest[0])
    if kind == "array":
        return sys.modules["numpy"].frombuffer(rest[1], dtype=rest[0]).copy()
    return rest[0]

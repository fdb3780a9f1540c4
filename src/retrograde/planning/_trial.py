"""One training run of one size in a process of its own, started by `fit`."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from retrograde._plan import Memory
from retrograde._sequence import ReversibleSequence

from ._batches import call, tensors_in

STEPS = 2
"""The optimiser makes its state in the first step, so only the second has everything alive at its peak."""

_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc")


def main(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Train for `STEPS` steps and tell the peak, or what went wrong."""
    try:
        _limit_accelerator(arguments["memory_limit"])
        made = _load(arguments["target"])(**{arguments["vary"]: arguments["size"]})
        model, batch, loss, optimizer = unpacked(made)
        set_memory(model, arguments["memory"])
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss(call(model, batch)).backward()
            optimizer.step()
        device = next(model.parameters()).device
        return {"outcome": "done", "peak": _peak(device), "device": str(device.type)}
    except Exception as error:
        if is_out_of_memory(error):
            return {"outcome": "out of memory"}
        return {"outcome": "failed", "error": f"{type(error).__name__}: {error}"}


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def unpacked(made: Any) -> tuple[nn.Module, Any, Callable[[Any], Tensor], torch.optim.Optimizer]:
    """What the factory returned, with a loss and an optimiser where it gave none."""
    parts = (*made, None, None)[:4] if isinstance(made, (tuple, list)) and 2 <= len(made) <= 4 else ()
    if not parts or not isinstance(parts[0], nn.Module):
        kinds = [type(part).__name__ for part in made] if isinstance(made, (tuple, list)) else type(made).__name__
        raise TypeError(
            f"The factory returned {kinds}. It must return (model, batch), (model, batch, loss) or "
            "(model, batch, loss, optimizer), where loss takes what the model returns."
        )
    model, batch, loss, optimizer = parts
    return model, batch, loss or mean_of_outputs, optimizer or torch.optim.AdamW(model.parameters())


def set_memory(model: nn.Module, memory: Memory) -> None:
    """Give every reversible sequence in the model this memory mode; what cannot be inverted is checkpointed."""
    sequences = [module for module in model.modules() if isinstance(module, ReversibleSequence)]
    if not sequences:
        raise TypeError(
            f"The model, a {type(model).__name__}, has no ReversibleSequence in it, so that memory={memory!r} would "
            "change nothing. Build it with one, or fit a model that has."
        )
    for sequence in sequences:
        modes: list[Memory] = [
            "checkpoint" if memory == "reverse" and not block.invertible else memory for block in sequence.blocks
        ]
        sequence.memory = modes


def mean_of_outputs(output: Any) -> Tensor:
    """The loss of a factory that gives none: the sum of the means of what the model returns."""
    means = [tensor.float().mean() for tensor in tensors_in(output) if tensor.requires_grad]
    if not means:
        raise TypeError(
            f"The model returned {type(output).__name__}, in which no tensor was found that requires grad. Where one "
            "is, let the factory return a loss too: (model, batch, loss). Where none is, nothing is trained: unfreeze "
            "some parameters."
        )
    return torch.stack(means).sum()


def _load(target: str) -> Callable[..., Any]:
    place, _, name = target.rpartition(":")
    module = module_of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    factory: Callable[..., Any] = getattr(module, name)
    return factory


def module_of_file(path: Path) -> ModuleType:
    """Run a file whatever its name, which may be one that no import statement could write."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.resolve().parent))  # its neighbours can be imported, as when it is run
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _limit_accelerator(memory_limit: int) -> None:
    """Let the allocator refuse what is beyond the limit, where there is an accelerator whose allocator can."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return
    module = torch.get_device_module(device)
    if hasattr(module, "set_per_process_memory_fraction") and hasattr(module, "mem_get_info"):
        total = module.mem_get_info()[1]
        module.set_per_process_memory_fraction(min(1.0, memory_limit / total))


def _peak(device: torch.device) -> int:
    """The most bytes that the allocator had of an accelerator, or that the whole process had of the machine."""
    if device.type != "cpu":
        return int(torch.accelerator.max_memory_reserved(device))
    return peak_resident(Path("/proc/self/status"))


def peak_resident(status: Path) -> int:
    """The peak of the resident memory of a process, of which Linux tells in this file."""
    for line in status.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    return 0  # the process is ending, and has no memory any more


def run() -> None:
    """What the process does: its argument says what to try, and where to tell of it."""
    given = json.loads(sys.argv[1])
    Path(given["report"]).write_text(json.dumps(main(given)), encoding="utf-8")

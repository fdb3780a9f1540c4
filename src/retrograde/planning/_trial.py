"""One training run of one size, in the process that `fit` started for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from retrograde.measure import device_memory
from retrograde.measure.stacks import stacks_of
from retrograde.measure.targets import TargetError, load
from retrograde.measure.training_step import loss_of

STEPS = 2
"""The optimiser makes its state in the first step, so only the second has everything alive at its peak."""

_OUT_OF_MEMORY = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc")


def main(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Train for `STEPS` steps and return the peak, or what went wrong."""
    try:
        _limit_accelerator(arguments["memory_limit"])
        target = load(arguments["target"], **{arguments["vary"]: arguments["size"]})
        model, optimizer = target.model, target.optimizer or torch.optim.AdamW(target.model.parameters())
        for stack in stacks_of(model).values():
            stack.memory = arguments["memory"]
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss_of(model, target.batch, target.loss).backward()
            optimizer.step()
        device = next(model.parameters()).device
        return {"outcome": "done", "peak": _peak(device), "device": str(device.type)}
    except TargetError as error:
        return _failed(error.__cause__, str(error))
    except BaseException as error:  # whatever a user's code raises
        return _failed(error, f"{type(error).__name__}: {error}")


def _failed(error: BaseException | None, message: str) -> dict[str, Any]:
    return {"outcome": "out of memory"} if is_out_of_memory(error) else {"outcome": "failed", "error": message}


def is_out_of_memory(error: BaseException | None) -> bool:
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def _limit_accelerator(memory_limit: int) -> None:
    """Let the allocator refuse what is beyond the limit, if there is an accelerator whose allocator can."""
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is None:
        return
    module = torch.get_device_module(device)
    if hasattr(module, "set_per_process_memory_fraction") and hasattr(module, "mem_get_info"):
        total = module.mem_get_info()[1]
        module.set_per_process_memory_fraction(min(1.0, memory_limit / total))


def _peak(device: torch.device) -> int:
    """The most bytes that the accelerator's allocator reserved, or that were resident in the whole process."""
    if device.type != "cpu":
        return device_memory.peak_reserved(device)
    return peak_resident(Path("/proc/self/status"))


def peak_resident(status: Path) -> int:
    """The peak of a process's resident memory, which Linux reports in this file."""
    for line in status.read_text().splitlines():
        if line.startswith("VmHWM:"):
            return 1024 * int(line.split()[1])
    return 0  # the process is ending, and has no memory any more


def run() -> None:
    """The process: its argument says what to try, and where to write the report."""
    arguments = json.loads(sys.argv[1])
    Path(arguments["report"]).write_text(json.dumps(main(arguments)), encoding="utf-8")

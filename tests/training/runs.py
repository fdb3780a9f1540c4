"""Small training runs, in this process and in children that may be killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from retrograde.training import Config, Options, Result, config_of, train

TEXT = "\n".join(f"{i} green bottles, hanging on the wall; {i * i} of them {'fall' * (i % 3)}." for i in range(300))
START = 60.0  # seconds that a child may take until something happens


def tables(folder: Path, **changes: Any) -> dict[str, dict[str, Any]]:
    """A configuration that trains in seconds. Changes are given as `table_key=value`."""
    text = folder / "text.txt"
    if not text.exists():
        text.write_text(TEXT)
    settings: dict[str, dict[str, Any]] = {
        "data": {"path": str(text), "length": 16, "validation": 0.1},
        "model": {"width": 16, "depth": 2, "heads": 2, "dropout": 0.1},
        "training": {"steps": 12, "batch": 4, "warmup": 2, "threads": 1, "device": "cpu"},
        "evaluation": {"every": 6, "batches": 2},
        "output": {"folder": str(folder / "run"), "save_every": 4, "keep": 2, "log_every": 1},
    }
    for name, value in changes.items():
        table, _, key = name.partition("_")
        settings[table][key] = value
    return settings


def config(folder: Path, **changes: Any) -> Config:
    return config_of(tables(folder, **changes))


def trained(folder: Path, options: Options | None = None, **changes: Any) -> Result:
    folder.mkdir(exist_ok=True)
    return train(config(folder, **changes), options)


def losses(folder: Path) -> list[tuple[str, int, float]]:
    """The losses in the log, without what depends on the clock."""
    events = [json.loads(line) for line in (folder / "run" / "log.jsonl").read_text().splitlines()]
    return [(e["event"], e["step"], e["loss"]) for e in events if "loss" in e]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its name."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def tensors(checkpoint: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(checkpoint).items() if name.endswith(".safetensors")}


def start(folder: Path, *, largest_file: int | None = None, **changes: Any) -> BaseProcess:
    """A child that trains. It is forked from a process that has imported everything and run nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["retrograde.training._loop", "torch.distributed.checkpoint.state_dict", "runs"])
    folder.mkdir(exist_ok=True)
    child = context.Process(target=_child, args=(tables(folder, **changes), str(folder), largest_file))
    child.start()
    return child


def _child(values: dict[str, Any], folder: str, largest_file: int | None) -> None:
    torch.set_num_threads(1)
    if largest_file is not None:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        train(config_of(values))
    except Exception as error:  # to be read by the test
        Path(folder, "error.txt").write_text(f"{type(error).__name__}: {error}")
        os._exit(1)


def finished(child: BaseProcess) -> int | None:
    child.join(START)
    assert not child.is_alive(), "the child takes too long"
    return child.exitcode


def kill(child: BaseProcess) -> bool:
    """As `kill -9` does. False if the child had finished before the signal came."""
    child.kill()
    child.join(START)
    assert child.exitcode in (0, -signal.SIGKILL)
    return child.exitcode != 0


def wait_for(what: Callable[[], Any], child: BaseProcess) -> Any:
    """Ask repeatedly until the answer is not empty or the child has ended. The last answer."""
    until = time.monotonic() + START
    while not (answer := what()) and child.is_alive():
        assert time.monotonic() < until, "nothing happened in time"
        time.sleep(0.0005)
    return answer

"""Ctrl-C while a command is still being imported."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("typer", reason="the command line needs the extra 'cli'")

import retrograde as rg

# What pip writes for an entry point of pyproject.toml.
SCRIPT = "import sys\nfrom retrograde.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"


def interrupted(command: list[str], module: str) -> tuple[int, list[str]]:
    """The status and the last lines of a command that gets SIGINT as soon as Python reports this import."""
    process = subprocess.Popen(
        [sys.executable, "-X", "importtime", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # not ignored, as in `command &`
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.rpartition("|")[2].strip() == module:
            process.send_signal(signal.SIGINT)
            break
    said = process.stderr.read().splitlines()  # not by communicate(), which passes over what the loop has buffered
    output, _ = process.communicate(timeout=120)
    assert not output
    return process.returncode, [line for line in said if not line.startswith("import time:")]


# Among the first of torch, deep inside of it, at its end, and among the imports of commands.
@pytest.mark.parametrize("module", ["torch._utils", "torch.autograd", "torch", "typer"])
@pytest.mark.parametrize("command", ["script", "module"])
def test_an_interrupt_during_the_imports_is_told_in_one_line(tmp_path: Path, command: str, module: str) -> None:
    script = tmp_path / "retrograde"
    script.write_text(SCRIPT)
    start = [str(script)] if command == "script" else ["-m", "retrograde"]
    assert interrupted([*start, "train", "--example"], module) == (130, ["Stopped."])


@pytest.mark.parametrize("start", [["retrograde-runs/train.py"], ["-m", "mine"], ["-c", "import mine"]])
def test_other_programs_keep_their_own_handler_of_interrupts(tmp_path: Path, start: list[str]) -> None:
    check = "import retrograde, signal\nassert signal.getsignal(signal.SIGINT) is signal.default_int_handler\n"
    for name in ("mine/__init__.py", "mine/__main__.py", "retrograde-runs/train.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(check)
    done = subprocess.run(
        [sys.executable, *start],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(rg.__file__).parents[1])},
        capture_output=True,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert done.returncode == 0, done.stderr

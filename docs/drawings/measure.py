"""The measured pictures of the documents, drawn by the command line: python docs/drawings/measure.py"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import retrograde as rg

FILE = Path(__file__).resolve()

COMMANDS = {
    "doctor.png": ("doctor", f"{FILE}:drifting"),
    "plan.png": ("plan", f"{FILE}:deep", "--budget", "24MiB"),
}


def mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


def drifting() -> tuple[nn.Module, Tensor]:
    """A stack whose inverse divides by 0.3 at each step."""
    torch.manual_seed(0)
    coupling = rg.couplings.Scaled(keep=0.3)
    blocks = [rg.two_stream(mlp(64), mlp(64), coupling=coupling) for _ in range(8)]
    return rg.ReversibleSequence(blocks), torch.randn(16, 64)


def deep() -> tuple[nn.Module, Tensor]:
    """A stack that is worth a plan: 16 blocks on 2,048 positions."""
    torch.manual_seed(0)
    return rg.ReversibleSequence([rg.two_stream(mlp(64), mlp(64)) for _ in range(16)]), torch.randn(2, 1024, 64)


def main() -> None:
    for name, command in COMMANDS.items():
        picture = FILE.parent / name
        before = picture.stat().st_mtime_ns if picture.exists() else 0
        subprocess.run([sys.executable, "-m", "retrograde.cli", *command, "--plot", str(picture)], check=False)
        if not picture.exists() or picture.stat().st_mtime_ns == before:
            raise RuntimeError(f"retrograde {command[0]} drew no {name}.")  # its status is 1 for a model with a fault


if __name__ == "__main__":
    main()

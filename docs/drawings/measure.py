"""The measured pictures of the documents, drawn by the command line: python docs/drawings/measure.py [plan.png]"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import retrograde as rg
from retrograde.models import ReversibleLM

FILE = Path(__file__).resolve()

# By picture, the command that draws it into a folder of its own, and the name it has there.
COMMANDS = {
    "doctor.png": (
        ("doctor", f"{FILE}:drifting", "--plot", "doctor.png"),
        "doctor.png",
    ),
    "plan.png": (
        (
            "plan",
            f"{FILE}:deep",
            "--budget",
            "24MiB",
            "--threads",
            "1",
            "--plot",
            "plan.png",
        ),
        "plan.png",
    ),
    "profile.png": (
        (
            "profile",
            f"{FILE}:language_model",
            "--mode",
            "store",
            "--mode",
            "reverse",
            "--output",
            ".",
        ),
        "memory.png",
    ),
}


def mlp(width: int) -> nn.Module:
    return nn.Sequential(
        nn.LayerNorm(width),
        nn.Linear(width, 4 * width),
        nn.GELU(),
        nn.Linear(4 * width, width),
    )


def drifting() -> tuple[nn.Module, Tensor]:
    """A stack whose inverse divides by 0.3 at each step."""
    torch.manual_seed(0)
    coupling = rg.couplings.Scaled(keep=0.3)
    blocks = [
        rg.two_stream(mlp(64), mlp(64), coupling=coupling) for _ in range(8)
    ]
    return rg.ReversibleSequence(blocks), torch.randn(16, 64)


def deep() -> tuple[nn.Module, Tensor]:
    """A stack that is worth a plan: 16 blocks on 2,048 positions."""
    torch.manual_seed(0)
    return rg.ReversibleSequence(
        [rg.two_stream(mlp(64), mlp(64)) for _ in range(16)]
    ), torch.randn(2, 1024, 64)


def language_model() -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
    """A model whose peak is its logits, once it is reversed: that of docs/profile.md."""
    torch.manual_seed(0)
    tokens = torch.randint(3000, (2, 33))
    model = ReversibleLM(vocabulary=3000, width=32, depth=8, heads=4)
    return (
        model,
        tokens[:, :-1],
        lambda logits: F.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten()
        ),
    )


def main(names: Sequence[str]) -> None:
    for name in names or COMMANDS:
        command, drawn = COMMANDS[name]
        with tempfile.TemporaryDirectory() as folder:
            # The status is 1 for a model with a fault, which the doctor's is.
            subprocess.run(
                [sys.executable, "-m", "retrograde", *command],
                check=False,
                cwd=folder,
            )
            if not (Path(folder) / drawn).exists():
                raise RuntimeError(f"retrograde {command[0]} drew no {name}.")
            shutil.copyfile(Path(folder) / drawn, FILE.parent / name)


if __name__ == "__main__":
    main(sys.argv[1:])

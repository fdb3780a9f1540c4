"""What nobody would type, and somebody does: odd values, commands, configurations and checkpoints, drawn by a seed."""

from __future__ import annotations

import dataclasses
import json
import os
import random
from typing import Any

from retrograde.training import Config

COUNT = int(os.environ.get("RETROGRADE_FUZZ", "1"))
"""How many times as much as in an ordinary test run."""

NUMBERS = ["0", "1", "2", "-1", "-0", "3.5", "1e400", "-inf", "nan", "9" * 400, "9" * 5000, str(2**63 - 1), str(2**64)]
TEXTS = [
    "", " ", "a lot", "8GiB", "64kB", "1e3", "store", "reverse", "Reverse", "checkpoint√", "../..", ".", "/", "\0",
    "/dev/null", "/dev/zero", "no/such/place", "model.py", "model.py:make", "model.py:", ":make", "--", "-h", "-",
    "%s%s%n", "[" * 3000, "{}", "\ud7ff", "é" * 50, "'; rm", "true", "NULL",
]  # fmt: skip
TARGETS = [
    "model.py:make", "model.py:plain", "model.py:nan", "model.py:meta", "model.py:half", "model.py:exits",
    "model.py:raises", "model.py:nothing", "model.py:number", "model.py:wrong_shape", "model:make", "none.py:make",
    "broken.py:make", *TEXTS,
]  # fmt: skip
MODEL = """
import sys, torch, retrograde as rg
from torch import nn
def stack(): return rg.ReversibleSequence([rg.two_stream(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)])
def make(batch=2, length=2, depth=2): return stack(), torch.randn(min(batch, 64), 4)
def plain(**sizes): return nn.Linear(4, 4), torch.randn(2, 4)
def nan(**sizes): return stack(), torch.full((2, 4), float("nan"))
def meta(**sizes): return stack().to("meta"), torch.randn(2, 4, device="meta")
def half(**sizes): return stack().half(), torch.randn(2, 4).half()
def exits(**sizes): sys.exit(3)
class Odd(BaseException): pass
def raises(**sizes): raise Odd("odd")
def nothing(**sizes): return None
def wrong_shape(**sizes): return stack(), torch.randn(2, 5)
number = 3
"""

OPTIONS: dict[str, list[str]] = {
    "doctor": ["--tolerance", "--plot", "--json"],
    "profile": ["--mode", "--output", "--json"],
    "plan": ["--budget", "--stack", "--threads", "--save", "--plot", "--json"],
    "bench": ["--rounds", "--threads", "--plan", "--plot", "--json"],
    "fit": ["--memory", "--vary", "--mode", "--low", "--high", "--multiple-of", "--timeout", "--json"],
    "train": ["--example", "--check", "--set", "--from", "--accept-changes", "--json"],
}
FLAGS = {"--json", "--example", "--check", "--accept-changes"}
NEEDED = {"plan": ["--budget", "1GiB"], "bench": ["--rounds", "2"], "fit": ["--memory", "2MB", "--high", "1"]}
ENDLESS = {"--rounds"}  # a large number is what it says: rounds that are shown one by one


def command(draw: random.Random) -> list[str]:
    """A command with options that may be missing, repeated or misspelt, and odd values."""
    name = draw.choice(list(OPTIONS))
    words = [name, draw.choice(TARGETS)] if draw.random() < 0.95 else [name]
    if name == "train":
        words = [name, draw.choice(["config.toml", *TEXTS]), "--check"]
    words += NEEDED.get(name, [])
    if name == "profile":
        words += ["--output", "out"]
    for _ in range(draw.choice([0, 1, 1, 2, 3])):
        option = draw.choice([*OPTIONS[name], *OPTIONS[name], "--" + draw.choice("abc") * 3])
        words.append(option)
        if option not in FLAGS:
            value = draw.choice([*NUMBERS[: 6 if option in ENDLESS else None], *TEXTS])
            words.append(f"{_key(draw)}={value}" if option == "--set" and draw.random() < 0.8 else value)
    return words


def _key(draw: random.Random) -> str:
    table = draw.choice(dataclasses.fields(Config))
    kind: Any = table.default_factory
    return f"{table.name}.{draw.choice(dataclasses.fields(kind)).name}"


def configuration(draw: random.Random, base: str) -> str:
    """A configuration with odd values in it, or with damage to its text."""
    lines = base.splitlines()
    for _ in range(draw.choice([1, 1, 2, 4])):
        table, _, key = _key(draw).partition(".")
        lines = [line for line in lines if not line.startswith(f"{table}.{key} ")]
        lines.append(f"{table}.{key} = {_value(draw)}")
    text = "\n".join(lines)
    while draw.random() < 0.3:
        at = draw.randrange(len(text))
        text = text[:at] + draw.choice(["", "[", "]", '"', "\0", "\n", "=", "é", "#", "[" * 3000]) + text[at + 1 :]
    return text


def _value(draw: random.Random) -> str:
    kinds = [draw.choice(NUMBERS), json.dumps(draw.choice(TEXTS)), "true", "[]", "[1, 2]", "1979-05-27", "{a = 1}"]
    return draw.choice([*kinds, "[" * 50 + "]" * 50, str(draw.randrange(100)), str(draw.random())])


def forged(draw: random.Random, state: Any) -> Any:
    """A checkpoint's state in which something is another value."""
    keys = list(state) if isinstance(state, dict) else list(range(len(state))) if isinstance(state, list) else []
    if not keys or draw.random() < 0.1:
        odd = [None, -1, 0, 10**400, 2**63, float("nan"), 1e308, "", "x", "../x", "/dev/zero", [], {}, [[]], True]
        return draw.choice(odd)
    key = draw.choice(keys)
    if draw.random() < 0.1:
        del state[key]
    else:
        state[key] = forged(draw, state[key])
    return state

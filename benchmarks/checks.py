"""What each check of the hot path costs: memory="reverse" with one of them taken out, beside RevTorch.

    python benchmarks/checks.py

A replay is only right if modules, generators, parameters and saved tensors are those of the first run, and every step
looks whether they are. For this measurement alone, lines are taken out of `engine/step_run.py` and the rest is compiled
anew. Contenders run interleaved in one process, each once per round in shuffled order. What counts is processor time of
forward and backward; ratios are computed per round. Writes `results/<date>-checks.md`.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import gc
import inspect
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from types import CodeType

import torch

from harness import machine
from harness.contenders import EXACT, OURS_AND_TORCH, REVERSE, Run
from harness.peers import PEERS
from harness.settings import SETTINGS, Network, Setting
from retrograde.engine import step_run

PEER = "RevTorch"
STORE = "retrograde store"
OTHERS = ("plain", PEER, STORE, EXACT)
WARM_UP = 3
FUNCTIONS = ("first_run", "replay", "replay_branch")  # that have the checks
Edit = tuple[str, str]

MODULES: list[Edit] = [
    ("        or not cached.state.snapshot.is_current()\n", ""),
    ("        and state.snapshot.is_current()\n", ""),
]
DRAWS: list[Edit] = [
    ("string_at((now := _read_rng()).data_ptr(), now.numel()) != around.states[0]  # as `rng.read` does", "False"),
    ("            or (len(around.states) > 1 and around.drew())\n", ""),
]
VERSIONS: list[Edit] = [
    ("weights = list(map(_version, tracked := state.snapshot.tracked))", "weights = []"),
    ("list(map(_version, tracked)) != weights", "False"),
    ("        and list(map(_version, state.snapshot.tracked)) == record.weights\n", ""),
    ("versions = list(map(_version, sources))", "versions = []"),
    ("if list(map(_version, sources)) != versions:", "if False:"),
]
SAVED: list[Edit] = [
    ("record.saved = list(map(signature, saved))", "record.saved = None"),
    ("is_same and list(map(signature, capture.tensors)) == record.saved", "is_same"),
]
CHECKS: dict[str, list[Edit]] = {
    "modules, parameters and flags in their places": MODULES,
    "no random numbers drawn": DRAWS,
    "no parameter and no source edited in place": VERSIONS,
    "shapes and dtypes of saved tensors": SAVED,
    "all four": MODULES + DRAWS + VERSIONS + SAVED,
}


def without(edits: Sequence[Edit]) -> dict[str, CodeType]:
    """The functions of the hot path, compiled without some lines."""
    source = inspect.getsource(step_run)
    for old, new in edits:
        if source.count(old) != 1:
            raise SystemExit(f"The hot path has changed: {old.strip()!r} is there {source.count(old)} times.")
        source = source.replace(old, new)
    module = compile(source, step_run.__file__, "exec", dont_inherit=True)
    functions = [constant for constant in module.co_consts if isinstance(constant, CodeType)]
    return {code.co_name: code for code in functions if code.co_name in FUNCTIONS}


def put_in(codes: dict[str, CodeType]) -> None:
    for name, code in codes.items():
        getattr(step_run, name).__code__ = code


def one_step(run: Run, network: Network) -> float:
    """The processor seconds of one forward and backward pass."""
    for leaf in network.leaves:
        leaf.grad = None
    gc.collect()
    start = time.process_time()
    run(network.x).sum().backward()
    return time.process_time() - start


def seconds(setting: Setting) -> dict[str, list[float]]:
    """For each contender the seconds of each round; the first rounds are left out."""
    network = setting.build()
    builds = {contender.name: contender.build for contender in (*OURS_AND_TORCH, *PEERS)}
    runs = {name: builds[name](network) for name in (*OTHERS, REVERSE)} | {
        name: builds[REVERSE](network) for name in CHECKS
    }
    codes = {name: without(CHECKS.get(name, [])) for name in runs}
    times: dict[str, list[float]] = {name: [] for name in runs}
    order, shuffle = list(runs), random.Random(0).shuffle
    gc.collect()
    gc.freeze()
    gc.disable()
    for round_ in range(-WARM_UP, setting.rounds):
        shuffle(order)
        for name in order:
            put_in(
                codes[name if round_ >= 0 else REVERSE]
            )  # what a step learns of its branch, it learns with all checks
            times[name].append(one_step(runs[name], network))
    gc.enable()
    gc.unfreeze()
    put_in(codes[REVERSE])
    return {name: each[WARM_UP + 1 :] for name, each in times.items()}


def ratio(times: dict[str, list[float]], name: str, to: str) -> str:
    """The median of the ratio of each round, and its quartiles."""
    ratios = [mine / other for mine, other in zip(times[name], times[to], strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def table(setting: Setting) -> list[str]:
    times = seconds(setting)
    lines = [
        f"## {setting.describe()}",
        "",
        f"| | ratio to {PEER} | ratio to reverse | ratio to plain |",
        "|---|---|---|---|",
    ]
    for name in times:
        label = f"reverse without: {name}" if name in CHECKS else name
        lines.append(f"| {label} | {' | '.join(ratio(times, name, to) for to in (PEER, REVERSE, 'plain'))} |")
    return [*lines, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path(__file__).resolve().parent / "results")
    parser.add_argument("--rounds", type=int, default=300)
    options = parser.parse_args()
    torch.set_num_threads(1)
    load = machine.load()
    settings = [dataclasses.replace(SETTINGS[name], rounds=options.rounds) for name in ("tiny", "multiply")]
    lines = [line for setting in settings for line in table(setting)]
    today = datetime.date.today().isoformat()
    text = "\n".join(
        [
            f"# What the checks of the hot path cost, {today}",
            "",
            "`python benchmarks/checks.py`: processor time of forward and backward, contenders interleaved in one "
            "process; medians and quartiles of the ratio per round.",
            "",
            *machine.describe(load, ["RevTorch"]),
            "",
            *lines,
        ]
    )
    (options.output / f"{today}-checks.md").write_text(text, encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()

"""The benchmark harness works at toy size, and its contenders compute the same: otherwise times mean nothing."""

from __future__ import annotations

import gc
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.flop_counter import FlopCounterMode

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

from harness import report, resident
from harness.contenders import BASELINES, OURS_AND_TORCH, PAIR, REVERSE, Contender
from harness.field import assemble
from harness.flops import FlopCounter, flops
from harness.memory import peak, profiled_peak
from harness.peers import PEERS
from harness.results import Comparison, GradientErrors, Growth, Results
from harness.settings import SETTINGS, Network, Setting
from harness.verdict import findings

ROOT = Path(__file__).resolve().parents[2]
EVERYONE = {contender.name: contender for contender in (*OURS_AND_TORCH, *PEERS)}
TOY = {name: replace(SETTINGS[name].quick(), width=8, length=4) for name in ("tiny", "multiply", "convolutions")}
# It saves its velocity as integers and reads them as float32, whatever the precision of the network.
TOLERANCE = {"momentumnet": 1e-4}
SEQUENCES_ONLY = {"routing-transformer", "lie-transformer-pytorch", "nuwa-pytorch"}


@pytest.fixture(autouse=True)
def _nothing_stays_frozen() -> Iterator[None]:
    yield
    gc.unfreeze()


def installed(contender: Contender) -> Contender:
    try:
        if contender.package:
            importlib.metadata.version(contender.package)
    except importlib.metadata.PackageNotFoundError:
        pytest.skip(f"{contender.package} is not installed")
    return contender


def field_of(name: str, setting: Setting) -> tuple[Callable[[Tensor], Tensor], Network]:
    field = assemble(setting, [EVERYONE[name]])
    return field.runs[name], field.network


# torch has renamed the storages that MemCNN resizes, and PyG looks for compilers when it is imported
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated", "ignore:.*deprecated:DeprecationWarning")
@pytest.mark.parametrize("size", TOY)
@pytest.mark.parametrize("name", [name for name in EVERYONE if name not in BASELINES.values()])
def test_every_contender_computes_the_outputs_and_gradients_of_its_baseline(name: str, size: str) -> None:
    contender = installed(EVERYONE[name])
    baseline = EVERYONE[BASELINES[contender.arithmetic]]
    field = assemble(TOY[size], [baseline, contender], dtype=torch.float64)
    if size == "convolutions" and name in SEQUENCES_ONLY:
        assert "takes only (batch, length, width)" in field.absent[name]
        return
    assert not field.absent
    assert field.distances[name] <= TOLERANCE.get(name, 1e-12)


def test_a_contender_with_wrong_gradients_is_noticed() -> None:
    def halved(network: Network) -> Callable[[Tensor], Tensor]:
        run = EVERYONE["plain"].build(network)
        return lambda x: run(x.detach() / 2 + x / 2)  # the same output, half the input's gradient

    field = assemble(TOY["tiny"], [EVERYONE["plain"], Contender("halved", "peer", halved)])
    assert field.distances["halved"] > 1e-2


def test_a_contender_that_cannot_run_is_absent_with_its_reason() -> None:
    def missing(network: Network) -> Callable[[Tensor], Tensor]:
        raise ModuleNotFoundError("No module named 'somewhere'\nmore lines")

    field = assemble(TOY["tiny"], [EVERYONE["plain"], Contender("missing", "peer", missing)])
    assert list(field.runs) == ["plain"]
    assert field.absent == {"missing": "ModuleNotFoundError: No module named 'somewhere'"}


@pytest.mark.parametrize("size", ["tiny", "convolutions"])
def test_flops_are_those_that_torch_counts_where_it_can(size: str) -> None:
    """torch cannot count attention that is fused on a CPU."""
    run, network = field_of(PAIR, TOY[size])
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as counter:
            run(network.x).sum().backward()
        assert flops(run, network) == counter.get_total_flops() > 0


def test_flops_of_fused_attention_are_those_of_its_products() -> None:
    """Two products forward, five backward: the scores are recomputed."""
    query, key, value = (torch.randn(2, 3, 5, 4, requires_grad=True) for _ in range(3))
    counts = []
    for backend in (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend), FlopCounter() as counter:
            scaled_dot_product_attention(query, key, value)
            counts.append(counter.total)
    assert counts == [2 * 2 * (2 * 3 * 5 * 5 * 4)] * 2
    with FlopCounter() as counter:
        scaled_dot_product_attention(query, key, value).sum().backward()
    assert counter.total == (2 + 5) / 2 * counts[0]


def test_reversing_takes_at_most_a_third_more_operations() -> None:
    setting = SETTINGS["tiny"].quick()
    stored, reverse = (flops(*field_of(name, setting)) for name in (PAIR, REVERSE))
    assert 1.2 * stored < reverse <= 4 / 3 * stored


def test_the_measured_peak_grows_with_depth_when_storing_and_not_when_reversing() -> None:
    peaks = {
        (name, depth): peak(*field_of(name, replace(TOY["tiny"], depth=depth)))
        for name in ("plain", REVERSE)
        for depth in (4, 16)
    }
    assert peaks["plain", 16] > 3 * peaks["plain", 4]
    assert peaks[REVERSE, 16] == peaks[REVERSE, 4]


def test_the_profiler_and_the_tracker_see_the_same_peak() -> None:
    run, network = field_of("plain", SETTINGS["tiny"].quick())
    gradients = sum(leaf.nbytes for leaf in network.leaves)
    assert peak(run, network) <= profiled_peak(run, network) <= 1.02 * peak(run, network) + gradients


@pytest.mark.skipif(not resident.STATUS.exists(), reason="the system does not report a process's peak")
def test_resident_memory_is_measured_in_a_process_of_its_own_and_errors_are_reported() -> None:
    setting = replace(TOY["tiny"], batch=64, length=64, width=16)
    stored = resident.in_fresh_process("plain", setting)
    assert isinstance(stored, int)
    assert stored > 4 * setting.build().pair_bytes
    assert "ValueError" in str(resident.in_fresh_process("nobody", setting))


def comparison(**ratios: float) -> Comparison:
    """Three rounds, one of them on a slowed machine; peaks of 10 S, and 20 S for the baselines."""
    names = {"reverse": REVERSE, "peer": "RevTorch"}
    times = {"plain": 1.0, PAIR: 1.0, **{names[key]: ratio for key, ratio in ratios.items()}}
    seconds = {name: [time, 5 * time, time] for name, time in times.items()}
    peaks = {name: 2000 if name.startswith("plain") else 1000 for name in times}
    return Comparison(SETTINGS["large"], 100, seconds, peaks, {}, dict.fromkeys(times, 0.0), {})


def test_ratios_are_computed_per_round() -> None:
    assert comparison(reverse=1.25).ratio(REVERSE, "plain") == (1.25, 1.25, 1.25)


def test_the_report_says_where_retrograde_is_not_first() -> None:
    behind = Results([], comparisons={"large": comparison(reverse=1.5, peer=1.4)})
    texts = [finding.text for finding in findings(behind)]
    assert any(text.startswith("RevTorch takes 1.40 of plain at 10.0 S") for text in texts)
    assert any("above the limit" in text for text in texts)
    assert all(text in report.render(behind, {}) for text in texts)
    ahead = Results([], comparisons={"large": comparison(reverse=1.3, peer=1.4)})
    assert not findings(ahead)
    assert "It is first in all measurements of this report." in report.render(ahead, {})


def test_a_peer_with_a_smaller_peak_slope_or_error_is_reported() -> None:
    smaller = comparison(reverse=1.3, peer=1.4)
    smaller.peaks["RevTorch"] = 900
    assert any("smaller peak" in finding.text for finding in findings(Results([], comparisons={"large": smaller})))
    growth = Growth(SETTINGS["tiny"], 100, {REVERSE: {4: 100, 8: 500}, "RevTorch": {4: 100, 8: 100}}, {})
    assert any("grows by 0.000 S" in finding.text for finding in findings(Results([], live=growth)))
    errors = GradientErrors({"float32": {12: {REVERSE: 2e-6, "RevTorch": 1e-6}}}, {}, {12: "width 8"})
    assert any("that of RevTorch is 1e-06" in finding.text for finding in findings(Results([], gradients=errors)))


@pytest.mark.slow
def test_a_quick_run_writes_a_report_with_everything_in_it(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks" / "run.py"), "multiply", "depth", "gradients", "--quick"]
    path = os.pathsep.join(filter(None, [str(ROOT / "src"), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    command += ["--output", str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    [target] = tmp_path.glob("*.md")
    text = target.read_text(encoding="utf-8")
    for part in ("commit:", "hardware:", "not first", "## multiply", "µs per block", "S per block", "autocast, 4"):
        assert part in text
    assert not [name for name in EVERYONE if name not in text], "those that did not run are named too"
    raw = json.loads(target.with_suffix(".json").read_text(encoding="utf-8"))
    assert len(raw["comparisons"]["multiply"]["seconds"][REVERSE]) == 3
    assert all(picture.stat().st_size > 1000 for picture in tmp_path.glob("*.png"))

"""The largest size that fits: found by training in new processes, and only a lack of memory counts as too large."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import retrograde as rg
from retrograde.measure import TargetError, default_loss, training_step
from retrograde.planning import _trial
from retrograde.planning._fit import Trial, TrialError, fit, largest

MIB = 2**20
needs_peak = pytest.mark.skipif(
    not Path("/proc/self/status").exists() or torch.accelerator.is_available(),
    reason="measures the resident memory of processes, as Linux reports it, on a machine without an accelerator",
)

FACTORIES = """
import os, signal, time
import torch
from torch import nn
import retrograde as rg

torch.set_num_threads(1)


def blocks(depth):
    return [rg.two_stream(nn.Sequential(nn.Linear(64, 64), nn.Tanh()), nn.Linear(64, 64)) for _ in range(depth)]


def deep(depth):
    return rg.ReversibleSequence(blocks(depth)), torch.randn(8, 1024, 64)


def sized(batch=1, length=1):
    return rg.ReversibleSequence(blocks(4)), torch.randn(32 * batch, 1024 * length, 64)


def killed(batch):
    os.kill(os.getpid(), signal.SIGKILL)


def crashed(batch):
    os.kill(os.getpid(), signal.SIGSEGV)


def left(batch):
    print("to be ignored")
    raise SystemExit("I give up.")


def greedy(batch):
    return [torch.ones(16 * 2**20 // 4) for _ in range(1000)]


def slow(batch):
    time.sleep(60)


def huge(batch):
    torch.empty(2**60, dtype=torch.int8)


def odd(length):
    if length % 2:
        raise ValueError("length must be even.")
    return rg.ReversibleSequence(blocks(1)), torch.randn(length, 64)


def plain(batch):
    return nn.Linear(2, 2), torch.randn(batch, 2)


def named(batch):
    return rg.ReversibleSequence(blocks(2)), {"x": torch.randn(batch, 64)}


def alone(batch):
    return rg.ReversibleSequence(blocks(2))


def constant(batch):
    return rg.ReversibleSequence(blocks(2)), torch.randn(batch, 64), None


def complete(batch):
    parts = [*blocks(1), rg.transition(nn.Linear(64, 64), nn.Linear(64, 64)), *blocks(1)]
    stack = rg.ReversibleSequence(parts, memory=["reverse", "store", "store"])
    built.append(stack)
    optimizer = torch.optim.SGD(stack.parameters(), lr=0.1)
    return stack, [torch.randn(batch, 64)], lambda y: y.square().sum(), optimizer


def frozen(batch):
    return rg.ReversibleSequence(blocks(1)).requires_grad_(False), torch.randn(batch, 64)


def nested(batch):
    inner = rg.ReversibleSequence(blocks(1))
    built.append(nn.Sequential(rg.ReversibleSequence([rg.two_stream(inner, nn.Linear(64, 64))]), nn.Linear(64, 64)))
    return built[0], torch.randn(batch, 64)


built = []
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of factories that this process and those it starts can import."""
    path = tmp_path / "factories_to_fit.py"
    path.write_text(FACTORIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, path.stem, raising=False)
    return path


# The search


@given(st.data())
def test_the_search_finds_the_largest_that_fits(data: st.DataObject) -> None:
    low = data.draw(st.integers(1, 50))
    high = data.draw(st.integers(low, 2000))
    start = data.draw(st.integers(low, high))
    threshold = data.draw(st.integers(low - 1, high + 10))
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= threshold

    assert largest(fits, low, high, start) == (min(threshold, high) if threshold >= low else None)
    assert len(set(tried)) == len(tried) <= 2 * math.log2(high + 1) + 3
    assert all(low <= size <= high for size in tried)


@needs_peak
@pytest.mark.slow
def test_fit_finds_more_depth_for_checkpoint_and_most_for_reverse_and_measures_what_it_says(factories: Path) -> None:
    options: dict[str, Any] = {"vary": "depth", "multiple_of": 8}
    shallow = fit("factories_to_fit:deep", memory_limit="2GiB", modes=["reverse"], low=3, high=8, **options)["reverse"]
    assert (shallow.size, shallow.is_bound, len(shallow.trials)) == (8, True, 1)
    assert shallow.peak is not None
    assert 100 * MIB < shallow.peak < 2**30

    seen: list[Trial] = []
    limit = shallow.peak + 80 * MIB  # a stored block is 6 MiB, a checkpointed one 4
    result = fit(
        "factories_to_fit:deep",
        memory_limit=limit,
        low=8,
        high=24,
        progress=seen.append,
        **options,
    )
    store, checkpoint, reverse = result["store"], result["checkpoint"], result["reverse"]
    assert (store.size, store.is_bound) == (8, False)
    assert (checkpoint.size, checkpoint.is_bound) == (16, False)
    assert (reverse.size, reverse.is_bound) == (24, True)
    assert reverse.peak is not None
    assert reverse.peak < shallow.peak + 20 * MIB
    for each in result.largest:
        assert all((t.outcome == "fits") == (t.size <= each.size) for t in each.trials)
        assert all(t.outcome == "too large" or t.peak <= limit for t in each.trials)
    assert [t.size for t in store.trials] == [8, 16]
    assert [t.outcome == "running" for t in seen] == [True, False] * (len(seen) // 2)
    assert [t for t in seen if t.outcome != "running"] == [*store.trials, *checkpoint.trials, *reverse.trials]
    assert [t.size for t in checkpoint.trials] == [8, 16, 24]
    assert "24 or more" in str(result)
    assert str(result).splitlines()[1].split() == ["memory", "largest", "depth", "peak", "trials", "seconds"]


@needs_peak
@pytest.mark.slow
def test_fit_finds_the_largest_batch_and_the_largest_length(factories: Path) -> None:
    """A unit of either is 192 MiB of stored activations."""
    one = fit("factories_to_fit:sized", memory_limit="4GiB", modes=["store"], high=1)["store"]
    assert one.peak is not None
    for vary in ("batch", "length"):
        limit = one.peak + 100 * MIB
        store = fit("factories_to_fit:sized", memory_limit=limit, vary=vary, modes=["store"], high=2)["store"]  # type: ignore[arg-type]
        assert [(t.size, t.outcome) for t in store.trials] == [(1, "fits"), (2, "too large")]
        assert (store.size, store.is_bound) == (1, False)


# What counts as too large, and what as an error


def one(target: str, **options: Any) -> Trial:
    """One trial."""
    result = fit(
        f"factories_to_fit:{target}", **{"memory_limit": "600MiB", "modes": ["store"], "low": 3, "high": 3, **options}
    )
    assert result["store"].size is None
    assert "none" in str(result)
    return result["store"].trials[0]


@needs_peak
@pytest.mark.parametrize("target", ["killed", "huge"])
def test_a_process_that_is_killed_or_gets_no_memory_does_not_fit(factories: Path, target: str) -> None:
    trial = one(target)
    assert (trial.outcome, trial.peak) == ("too large", None)


@needs_peak
def test_a_process_is_ended_as_soon_as_it_passes_the_limit(factories: Path) -> None:
    trial = one("greedy")  # which would take 16 GB
    assert trial.outcome == "too large"
    assert trial.peak is not None
    assert 600 * MIB < trial.peak < 3000 * MIB


ENDS = {
    "crashed": r"The trial of batch=3 with memory='store' failed: its process ended with SIGSEGV",
    "left": r"The trial of batch=3 with memory='store' failed: factories_to_fit:left raised SystemExit: I give up\.",
    "slow": r"it took longer than 4 s\. Give it more time",
}


@needs_peak
@pytest.mark.parametrize("target", ENDS)
def test_a_process_that_ends_for_another_reason_stops_the_search(factories: Path, target: str) -> None:
    with pytest.raises(TrialError, match=ENDS[target]):
        one(target, timeout=4 if target == "slow" else 100)


@needs_peak
def test_an_error_of_the_factory_stops_the_search_with_its_words(factories: Path) -> None:
    """And the factory may be in a file that only its path leads to."""
    path = factories.rename(factories.parent.parent / "elsewhere.py")
    with pytest.raises(TrialError, match=r"length=3 with memory='store' failed: .*odd raised ValueError: length must"):
        fit(f"{path}:odd", memory_limit="600MiB", modes=["store"], low=3, vary="length")


def run_here(target: str, memory: str = "reverse", **more: Any) -> dict[str, Any]:
    """A trial in this process."""
    arguments = {"target": target, "vary": "batch", "size": 3, "memory": memory, "memory_limit": 2**33, **more}
    report = _trial.main(json.loads(json.dumps(arguments)))
    assert json.loads(json.dumps(report)) == report
    return report


FAILURES = {
    "factories_to_fit:plain": "ValueError: Linear contains no retrograde.ReversibleSequence",
    "factories_to_fit:alone": "factories_to_fit:alone returned ReversibleSequence. It must return (model, batch)",
    "factories_to_fit:deep": "factories_to_fit:deep raised TypeError: deep() got an unexpected keyword argument",
    "factories_to_fit:missing": "factories_to_fit has no 'missing'. It defines blocks, deep",
    "no_such_module:make": "There is no module 'no_such_module'",
    "factories_to_fit:named": "TypeError: ReversibleSequence.forward() missing 1 required positional argument: 'x'",
    "factories_to_fit:frozen": "ValueError: The loss does not require grad",
}


@pytest.mark.parametrize("target", FAILURES)
def test_the_error_says_what_the_factory_must_return(factories: Path, target: str) -> None:
    report = run_here(target)
    assert report["outcome"] == "failed"
    assert report["error"].startswith(FAILURES[target])


@needs_peak
@pytest.mark.parametrize("memory", ["store", "checkpoint", "reverse", "selective", "offload"])
def test_the_mode_is_set_on_every_block_and_stage_transitions_fall_back(factories: Path, memory: str) -> None:
    """And two steps of training are made with the factory's own loss and optimiser."""
    import factories_to_fit  # type: ignore[import-not-found]

    factories_to_fit.built.clear()
    report = run_here("factories_to_fit:complete", memory)
    assert report["outcome"] == "done", report
    (stack,) = factories_to_fit.built
    middle = {"reverse": "checkpoint", "selective": "selective checkpoint"}.get(memory, memory)
    assert stack.memory.memory == (memory, middle, memory)
    assert run_here("factories_to_fit:constant")["outcome"] == "done"


@needs_peak
def test_the_mode_reaches_stacks_inside_other_modules(factories: Path) -> None:
    import factories_to_fit  # type: ignore[import-not-found]

    factories_to_fit.built.clear()
    assert run_here("factories_to_fit:nested", "checkpoint")["outcome"] == "done"
    (model,) = factories_to_fit.built
    assert [m.memory.memory for m in model.modules() if isinstance(m, rg.ReversibleSequence)] == [("checkpoint",)] * 2


@needs_peak
def test_a_factory_without_a_loss_is_trained_with_the_default_loss_of_all_tools(
    factories: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outputs: list[Any] = []
    monkeypatch.setattr(training_step, "default_loss", lambda output: [outputs.append(output), default_loss(output)][1])
    assert run_here("factories_to_fit:constant")["outcome"] == "done"
    assert len(outputs) == _trial.STEPS


@needs_peak
def test_a_lack_of_memory_in_the_factory_is_recognised(factories: Path) -> None:
    assert run_here("factories_to_fit:huge") == {"outcome": "out of memory"}


@pytest.mark.parametrize(
    ("error", "is_memory"),
    [
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes."), True),
        (RuntimeError("The size of tensor a must match the size of tensor b"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_only_memory_errors_count_as_such(error: Exception, is_memory: bool) -> None:
    assert _trial.is_out_of_memory(error) is is_memory


@pytest.mark.gpu
def test_an_accelerator_is_measured_by_its_allocator(factories: Path) -> None:
    factories.write_text(
        FACTORIES
        + "\ndef on_device(batch):\n    model, x = deep(4)\n    device = torch.accelerator.current_accelerator()"
        "\n    return model.to(device), x.repeat(batch, 1, 1).to(device)\n"
    )
    result = fit("factories_to_fit:on_device", memory_limit="256MiB", modes=["store", "reverse"], high=64)
    assert result["store"].size < result["reverse"].size
    assert result["store"].peak <= 256 * MIB


# What is refused before anything runs

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "target": ({"target": "models"}, "'models' does not name a factory. Write module:factory"),
    "no name": ({"target": "models:"}, "'models:' does not name a factory"),
    "no file": ({"target": "no/such/file.py:make"}, "There is no file no/such/file.py"),
    "vary": ({"vary": "width"}, "vary='width' is not known; choose one of 'batch', 'length', 'depth'"),
    "mode": ({"modes": ["keep"]}, "memory='keep' is not known"),
    "no mode": ({"modes": []}, "leaves nothing to try"),
    "limit": ({"memory_limit": 0}, "A size must be above 0 bytes, not 0"),
    "text": ({"memory_limit": "8 apples"}, "'8 apples' is not a size; write 8GiB"),
    "range": ({"low": 5, "high": 4}, "low=5, high=4, multiple_of=1: there is no size"),
    "multiple": ({"low": 9, "high": 15, "multiple_of": 8}, "no size from 1 to try"),
    "multiple of nothing": ({"multiple_of": 0}, "no size from 1 to try"),
    "no time": ({"timeout": float("nan")}, "timeout=nan: give the seconds"),
    "zero": ({"low": 0}, "no size from 1 to try"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_searched_is_refused(case: str) -> None:
    options, words = REFUSED[case]
    with pytest.raises((TargetError, ValueError), match=words.replace("(", r"\(")):
        fit(**{"target": "module:factory", "memory_limit": "1GiB", **options})


@needs_peak
def test_a_limit_above_the_machines_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="The limit is 1000 TiB, but this machine has"):
        fit("module:factory", memory_limit="1000TiB")


# The command


def command(*arguments: str) -> Any:
    typer = pytest.importorskip("typer", reason="the command line needs the extra `cli`")
    testing = pytest.importorskip("typer.testing")
    from retrograde.cli.fit import fit as fit_command

    app = typer.Typer()
    app.command()(fit_command)
    return testing.CliRunner().invoke(app, list(arguments))


@needs_peak
def test_the_command_prints_a_table_and_reports_each_trial_on_the_error_stream(factories: Path) -> None:
    run = command("factories_to_fit:killed", "--memory", "600MiB", "--mode", "reverse", "--high", "4")
    assert run.exit_code == 1  # nothing fits
    assert run.stdout.splitlines()[0] == "factories_to_fit:killed under 600 MiB"
    assert run.stdout.splitlines()[2].split()[:2] == ["reverse", "none"]
    assert run.stderr.startswith("reverse, batch 1: too large (")


@needs_peak
def test_the_command_prints_json(factories: Path) -> None:
    bounds = ("--low", "2", "--high", "2", "--mode", "checkpoint")
    run = command("factories_to_fit:odd", "--memory", "1GiB", "--vary", "length", *bounds, "--json")
    assert run.exit_code == 0
    (each,) = json.loads(run.stdout)["largest"]
    assert (each["memory"], each["size"], each["is_bound"]) == ("checkpoint", 2, True)


@needs_peak
def test_the_command_tries_selective_on_a_model_with_a_stage_transition(factories: Path) -> None:
    bounds = ("--low", "2", "--high", "2", "--mode", "selective")
    run = command("factories_to_fit:complete", "--memory", "1GiB", *bounds)
    assert run.exit_code == 0, run.output
    assert run.stdout.splitlines()[2].split()[:4] == ["selective", "2", "or", "more"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["module:factory", "--memory", "much"], "not a size"),
        (["module", "--memory", "1GiB"], "does not name a factory"),
    ],
)
def test_the_command_refuses_wrong_usage_in_a_sentence(arguments: list[str], words: str) -> None:
    run = command(*arguments)
    assert run.exit_code == 2
    assert words in run.stderr
    assert "Traceback" not in run.output

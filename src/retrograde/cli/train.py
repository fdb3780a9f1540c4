"""`retrograde train`: train a language model configured by a TOML file."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer

from ._ending import FAULT, INTERRUPTED, WRONG_USAGE, fail


def train(
    config: Annotated[Path | None, typer.Argument(help="The TOML file.", show_default=False)] = None,
    example: Annotated[bool, typer.Option("--example", help="Print a configuration with all keys and exit.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Check configuration and data and exit.")] = False,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="table.key=value", help="Override a value of the file.")
    ] = None,
    start: Annotated[
        Path | None, typer.Option("--from", help="Resume from this checkpoint, not the last.", show_default=False)
    ] = None,
    accept_changes: Annotated[
        bool, typer.Option("--accept-changes", help="Resume even though the configuration changed.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print each event as a line of JSON, without a progress bar.")
    ] = False,
) -> None:
    """Train a reversible language model on a text, a folder of texts, or a file of tokens.

    Only the path of the text is required; `--example` prints all settings.

        # config.toml
        [data]
        path = "shakespeare.txt"

        retrograde train --example > config.toml    # then set data.path in it
        retrograde train config.toml
        retrograde train config.toml --set training.steps=200
        torchrun --nproc-per-node 2 -m retrograde train config.toml

    The output folder gets log.jsonl and checkpoints (safetensors and JSON: nothing in them is run as code).
    The same command resumes from the last checkpoint after an interrupt, a crash or a kill; on a CPU the result is
    bit-identical to that of an uninterrupted run.

    Exit status: 0 trained, or already finished; 1 the run failed (finished checkpoints are unchanged);
    2 wrong usage or configuration; 130 interrupted, after a checkpoint.
    """
    from retrograde.training import CheckpointError, ConfigError, TrainingError

    if example:
        print(resources.files("retrograde.training").joinpath("example.toml").read_text(encoding="utf-8"), end="")
        return
    if config is None:
        fail("Name a configuration: retrograde train config.toml. --example prints one.", WRONG_USAGE)
    try:
        stopped = _run(config, _overrides(set_ or []), check, start, accept_changes, as_json)
    except ConfigError as error:
        _fail(str(error), WRONG_USAGE)
    except (CheckpointError, TrainingError) as error:
        _fail(str(error), FAULT)
    except KeyboardInterrupt:
        _fail("Stopped at once; the same command resumes from the last checkpoint.", INTERRUPTED)
    raise typer.Exit(INTERRUPTED if stopped else 0)


def _is_main_process() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _fail(message: str, status: int) -> Any:
    """Like `fail`, but only the main process of those that torchrun started prints the message."""
    if not _is_main_process():
        raise typer.Exit(status)
    fail(message, status)


def _overrides(texts: list[str]) -> dict[str, Any]:
    from retrograde.training._config import ConfigError, parse_value

    overrides = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not separator or "." not in name:
            raise ConfigError(f"--set {text}: write table.key=value, as in --set training.steps=200.")
        overrides[name.strip()] = parse_value(value.strip())
    return overrides


def _run(
    path: Path, overrides: dict[str, Any], check: bool, start: Path | None, accept_changes: bool, as_json: bool
) -> bool:
    """Run the command; returns whether it was interrupted."""
    from retrograde.training import Options, read_config
    from retrograde.training import train as run

    config = read_config(path, overrides)
    if check:
        _summary(config, as_json)
        return False
    with _interrupts() as interrupted, _shown(config, as_json) as tell:
        result = run(config, Options(tell=tell, start=start, accept_changes=accept_changes, stop=interrupted))
    if _is_main_process() and not as_json:
        _print_result(result, config, "command without --from" if start else "command")
    return result.step < config.training.steps


def _summary(config: Any, as_json: bool) -> None:
    from retrograde.training._data import read_corpus
    from retrograde.training._size import check_size, count_weights

    corpus = read_corpus(config.data)
    check_size(config, corpus.vocabulary.size)
    weights = count_weights(config, corpus.vocabulary.size)
    seen, unseen, size = len(corpus.seen), len(corpus.unseen), corpus.vocabulary.size
    if as_json:
        figures = {"training_tokens": seen, "evaluation_tokens": unseen, "vocabulary": size, "weights": weights}
        print(json.dumps({"event": "check", "valid": True, **figures, "config": config.to_dict()}))
        return
    print(
        f"The configuration is valid: {seen:,} tokens to train on, {unseen:,} to evaluate on, {size:,} different ones; "
        f"{config.model.depth} blocks, {weights:,} weights."
    )


def _print_result(result: Any, config: Any, command: str) -> None:
    if result.step == result.began:
        print(f"Already finished: {result.checkpoint} is at step {result.step} of {config.training.steps}.")
    elif result.step < config.training.steps:
        print(f"Interrupted at step {result.step}: {result.checkpoint}. The same {command} resumes from there.")
    else:
        print(f"Finished at step {result.step}: {result.checkpoint}")


@contextmanager
def _interrupts() -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C (or SIGTERM) ends the run after its step, with a checkpoint; the second at once."""
    caught: list[int] = []

    def note(number: int, frame: Any) -> None:
        if caught or "RANK" in os.environ:  # several processes would stop at different steps, and deadlock
            raise KeyboardInterrupt
        caught.append(number)

    before = [(number, signal.signal(number, note)) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        yield lambda: bool(caught)
    finally:
        for number, handler in before:
            signal.signal(number, handler)


@contextmanager
def _shown(config: Any, as_json: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Show events as JSON lines, or as a progress bar with lines above it."""
    if as_json or not _is_main_process():
        yield lambda event: print(json.dumps(event), flush=True)
        return
    from ._bar import Bar

    bars: list[Bar] = []

    def tell(event: dict[str, Any]) -> None:
        if event["event"] == "start":
            bars.append(Bar("training", config.training.steps, start=event["step"]))
            bars[0].__enter__()
        elif event["event"] == "step":
            rate, peak = event["tokens_per_second"], event["peak_memory"]
            bars[0].show(event["step"], event["loss"], rate, peak)
        elif event["event"] == "evaluation":
            bars[0].say(f"  step {event['step']}: loss on unseen text {event['loss']:.4f}")

    try:
        yield tell
    finally:
        for bar in bars:
            bar.__exit__(*sys.exc_info())

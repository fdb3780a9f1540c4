"""`retrograde convert`: what making a model reversible does to it, by each recipe."""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ._checkpoint import load_checkpoint
from ._convert_table import advice, table
from ._ending import FAULT, WRONG_USAGE, fail, telling
from ._target import Target, TargetError, load


def convert(
    target: Annotated[
        str,
        typer.Argument(
            help="module:factory, or path/to/file.py:factory. **It is run as Python.** Or a folder with a checkpoint "
            "of transformers in safetensors, from which nothing is run.",
            show_default=False,
        ),
    ],
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            help="bdia (the default), two_stream, momentum, scaled or annealed; may be given again.", show_default=False
        ),
    ] = None,
    layers: Annotated[
        str | None, typer.Option(help="The list of layers, where there are several: transformer.h", show_default=False)
    ] = None,
    bits: Annotated[
        int | None, typer.Option(help="The grid's bits, if the usual ones are too many.", show_default=False)
    ] = None,
    tolerance: Annotated[float, typer.Option(help="The relative error of gradients that passes.")] = 1e-3,
    as_json: Annotated[bool, typer.Option("--json", help="Print the reports as JSON, and nothing else.")] = False,
) -> None:
    """Make the layers of a model reversible, and report what that does to it.

    The model is one with residual layers in an `nn.ModuleList`: most models of transformers,
    `nn.TransformerEncoder`, or your own. Name a function that returns it with a batch:

        # my_model.py
        def make():
            model = Net()
            tokens = torch.randint(1000, (8, 128))
            return model, tokens                   # or model, batch, loss; a dict is passed by name

        retrograde convert my_model.py:make
        retrograde convert my_model.py:make --recipe bdia --recipe momentum:beta=0.25
        retrograde convert path/to/checkpoint --recipe two_stream --json > report.json

    The report has the difference of the outputs in eval, the loss before and after, the gradients held against
    those of stored activations, the drift of rebuilt streams, the side bits, and the peak of memory before and
    after. A checkpoint is run on random tokens or pixels.

    Nothing is written: a conversion changes what the layers compute, not the weights or their names, so that your
    checkpoints stay as they are. In the training script: `rg.convert(model, "bdia")`.

    Exit status: 0 converted, with the gradients it should have; 1 the gradients are off, or the model cannot be
    converted; 2 wrong usage, or a target that cannot be loaded.
    """
    if not tolerance >= 0:
        fail(f"--tolerance {tolerance:g}: give a relative error, 0 or greater, as in --tolerance 1e-3.", WRONG_USAGE)
    try:
        recipes = {text: _parsed(text) for text in recipe or ["bdia"]}
        with contextlib.redirect_stdout(sys.stderr):  # what a user's code prints is not part of the report
            found = load_checkpoint(Path(target)) if Path(target).is_dir() else load(target)
    except (TargetError, ValueError) as error:
        fail(str(error), WRONG_USAGE)
    with contextlib.redirect_stdout(sys.stderr), _warnings_noted() as notes:
        place, reports = _reports(found, recipes, layers, True if bits is None else bits)
    if as_json:
        print(json.dumps({"layers": place, "reports": {n: asdict(r) for n, r in reports.items()}, "notes": notes}))
    else:
        _show(reports, place, layers)
    for note in notes:
        print(f"Note: {note}", file=sys.stderr)
    raise typer.Exit(0 if all(r.gradient_error <= tolerance for r in reports.values()) else FAULT)


def _show(reports: dict[str, Any], place: str, layers: str | None) -> None:
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = 34 + 28 * len(reports)  # a file has no edge at which columns would be cut
    console.print(table(reports, place))
    for line in advice(reports, layers):
        console.print(line, markup=False)


def _parsed(text: str) -> Any:
    """A recipe as people write it: its name, and its values if they are others than usual, as in scaled:keep=0.25."""
    from retrograde.conversion._recipes import recipe_named

    name, _, values = text.partition(":")
    recipe: Any = recipe_named(name)
    known = [field.name for field in fields(recipe)]
    for part in filter(None, values.split(",")):
        key, _, value = part.partition("=")
        if key not in known:
            has = f"It has {', '.join(known)}." if known else "It has no values."
            raise ValueError(f"--recipe {text}: {name} has no value {key!r}. {has}")
        try:
            recipe = replace(recipe, **{key: float(value)})
        except ValueError as error:
            raise ValueError(f"--recipe {text}: {error}") from None
    return recipe


def _reports(
    found: Target, recipes: dict[str, Any], layers: str | None, exact: bool | int
) -> tuple[str, dict[str, Any]]:
    """The name of the list that was converted, and a report for each recipe; the model is as it was in between."""
    import retrograde as rg
    from retrograde.conversion._find import find_layers
    from retrograde.conversion._measure import default_loss

    with telling(f"Cannot convert: a training step of {found.name} as it is raised"):
        (found.loss or default_loss)(found.model(*found.args, **found.kwargs)).backward()
        found.model.zero_grad()
    try:
        place, _ = find_layers(found.model, layers)
    except ValueError as error:
        fail(f"Cannot convert: {error}", FAULT if layers is None else WRONG_USAGE)
    reports = {}
    for name, recipe in recipes.items():
        try:
            conversion = rg.convert(found.model, recipe, layers=layers, exact=exact)
            reports[name] = conversion.measure(*found.args, loss=found.loss, **found.kwargs)
            conversion.undo()
        except (ValueError, TypeError, RuntimeError) as error:
            fail(f"Cannot convert by {name}: {error}", FAULT)
    return place, reports


@contextlib.contextmanager
def _warnings_noted() -> Iterator[list[str]]:
    """Warnings as sentences, to be shown after the report."""
    notes: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield notes
    notes += dict.fromkeys(str(warning.message) for warning in caught if warning.category is not DeprecationWarning)

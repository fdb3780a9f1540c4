"""`retrograde convert`: what each recipe does to a model that is made reversible."""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from retrograde.measure.targets import Target, TargetError, load
from retrograde.measure.training_step import step_seconds

from ._checkpoint import load_checkpoint
from ._convert_table import advice, table
from ._ending import FAULT, WRONG_USAGE, ending_on, fail, show, telling


def convert(
    target: Annotated[
        str,
        typer.Argument(
            help="module:factory, or path/to/file.py:factory. **It is run as Python.** Or a folder with a Hugging Face "
            "Transformers checkpoint in safetensors, from which no code is run.",
            show_default=False,
        ),
    ],
    recipe: Annotated[
        list[str] | None,
        typer.Option(
            help="unchanged (the default), bdia, two_stream, momentum, scaled or annealed; give the option several "
            "times for several.",
            show_default=False,
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(help="The list of layers if there are several, such as transformer.h.", show_default=False),
    ] = None,
    grid_bits: Annotated[
        int | None, typer.Option(help="The grid's spacing is 2^-bits.", show_default="16 for float32")
    ] = None,
    tolerance: Annotated[float, typer.Option(help="The relative error of gradients that is accepted.")] = 1e-3,
    as_json: Annotated[bool, typer.Option("--json", help="Print the reports as JSON, and nothing else.")] = False,
) -> None:
    """Make a model train in less memory, unchanged or reversibly, and report what that does to it.

    The model has residual layers in an `nn.ModuleList` or `nn.Sequential`: most Hugging Face Transformers models,
    `nn.TransformerEncoder`, or your own. Name a function that returns it with a batch:

        # my_model.py
        def make():
            model = Net()
            tokens = torch.randint(1000, (8, 128))
            return model, tokens                   # or model, batch, loss

        retrograde convert my_model.py:make
        retrograde convert my_model.py:make --recipe bdia --recipe momentum
        retrograde convert path/to/checkpoint --recipe momentum:beta=0.25

    The report says for each recipe what training and eval compute, and compares with the original model (outputs,
    loss, gradients in training) and with stored activations (gradients, recomputed streams); then the extra bits that
    are saved, and the peak memory before and after. A checkpoint is run on random tokens or pixels.

    Nothing is written: a conversion changes what the layers compute, not the weights or their names, so your
    checkpoints stay valid. In the training script: `rg.convert(model, "unchanged")`.

    Exit status: 0 converted, with gradients within the tolerance; 1 the gradients are past it, or the model cannot be
    converted; 2 wrong usage, or a target that cannot be loaded.
    """
    if not tolerance >= 0:
        fail(f"--tolerance {tolerance:g}: give a relative error, 0 or greater, as in --tolerance 1e-3.", WRONG_USAGE)
    with ending_on(TargetError, ValueError):
        recipes = {text: _parse_recipe(text) for text in recipe or ["unchanged"]}
        loaded = load_checkpoint(Path(target)) if Path(target).is_dir() else load(target)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        place, reports = _reports(loaded, recipes, layers, grid_bits)
    notes = list(dict.fromkeys(str(w.message) for w in caught if w.category is not DeprecationWarning))
    if as_json:
        print(json.dumps({"layers": place, "reports": {n: asdict(r) for n, r in reports.items()}, "notes": notes}))
    else:
        show(table(reports, place), advice(reports, layers))
    for note in notes:
        print(f"Note: {note}", file=sys.stderr)
    raise typer.Exit(0 if all(r.gradient_error <= tolerance for r in reports.values()) else FAULT)


def _parse_recipe(text: str) -> Any:
    """A recipe from its name, and other values than the default ones if there are any, as in scaled:keep=0.25."""
    from retrograde.conversion._recipes import recipe_named

    name, _, values = text.partition(":")
    recipe: Any = recipe_named(name)
    options = [field.name for field in fields(recipe) if isinstance(field.default, float)]
    for part in filter(None, values.split(",")):
        key, _, value = part.partition("=")
        if key not in options:
            has = f"It has {', '.join(options)}." if options else "It has no values."
            raise ValueError(f"--recipe {text}: {name} has no value {key!r}. {has}")
        try:
            recipe = replace(recipe, **{key: float(value)})
        except ValueError as error:
            raise ValueError(f"--recipe {text}: {error}") from None
    return recipe


def _reports(
    target: Target, recipes: dict[str, Any], layers: str | None, grid_bits: int | None
) -> tuple[str, dict[str, Any]]:
    """The name of the list that was converted, and a report for each recipe."""
    import retrograde as rg
    from retrograde.conversion._find import find_layers

    with telling(f"Cannot convert: a training step of the original {target.name} raised"):
        step_seconds(target.model, target.batch, target.loss)
    with ending_on(ValueError, status=FAULT if layers is None else WRONG_USAGE, prefix="Cannot convert: "):
        places = ", ".join(place.path for place in find_layers(target.model, layers))
    reports = {}
    for name, recipe in recipes.items():
        with (
            telling(f"Cannot convert with {name}: the converted {target.name} raised"),
            ending_on(ValueError, TypeError, RuntimeError, status=FAULT, prefix=f"Cannot convert with {name}: "),
        ):
            bits = grid_bits if recipe.has_inverse else None
            conversion = rg.convert(target.model, recipe, layers=layers, grid_bits=bits)
            reports[name] = conversion.measure(target.batch, loss=target.loss)
            conversion.undo()
    return places, reports

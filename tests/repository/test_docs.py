"""The documents: the site builds, the notebook runs, migrated code agrees with the original, figures have a report."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import pkgutil
import re
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
BLOCK = re.compile(r'^```python( title="before")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def load(path: Path) -> ModuleType:
    """A script of docs/, which is no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# The site


@pytest.mark.slow
def test_the_site_builds_strictly_with_every_page(site: Path) -> None:
    pages = {path.stem for path in [*DOCS.glob("*.md"), *DOCS.glob("*.ipynb")]}
    assert pages | {"architecture", "contributing"} <= {path.stem for path in site.glob("*.html")}


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site: Path) -> None:
    loads = re.compile(
        r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?(?:https?:)?//|<link\b[^>]*href=\"?(?:https?:)?//"
    )
    assert loads.search('<script src="https://a.example/b.js">')
    assert not [path.name for path in site.rglob("*.html") if loads.search(path.read_text(encoding="utf-8"))]
    styles = [path.read_text(encoding="utf-8") for path in site.rglob("*.css")]
    assert styles
    assert not any(re.search(r"@import|url\(\s*[\"']?(?:https?:)?//", style) for style in styles)


PACKAGES_OF_THE_REFERENCE = (
    "couplings",
    "measure",
    "planning",
    "diagnose",
    "conversion",
    "conversion.recipes",
    "training",
    "models",
    "nn",
    "adapters",
)


# The commands have a table; the others are not public but for what extensions need.
PACKAGES_ELSEWHERE = {"cli", "compiled", "engine", "fused_optimizer", "network"}


def public_names() -> set[str]:
    """What the package and its packages export: `from ._x import X as X`, but for modules."""
    public = set()
    for name in ("retrograde", *(f"retrograde.{package}" for package in PACKAGES_OF_THE_REFERENCE)):
        module = importlib.import_module(name)
        lines = ast.walk(ast.parse(inspect.getsource(module)))
        names = [alias.asname for line in lines if isinstance(line, ast.ImportFrom) for alias in line.names]
        public |= {f"{name}.{n}" for n in names if n and not inspect.ismodule(getattr(module, n))}
    return public


def test_the_reference_has_every_public_name() -> None:
    shown = set(re.findall(r"^::: (\S+)", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE))
    public = public_names()
    assert {"retrograde.Step", "retrograde.planning.plan", "retrograde.conversion.recipes.BDIA"} <= public
    assert public - shown == {"retrograde.conversion.convert"}  # which is shown as retrograde.convert
    folders = {path.parent.name for path in (ROOT / "src" / "retrograde").glob("*/__init__.py")}
    assert folders - set(PACKAGES_OF_THE_REFERENCE) == PACKAGES_ELSEWHERE


def test_the_reference_names_every_command() -> None:
    text = (DOCS / "api.md").read_text(encoding="utf-8")
    pytest.importorskip("typer")
    from retrograde.cli._app import COMMANDS

    assert not [command.__name__ for command in COMMANDS if f"`retrograde {command.__name__}" not in text]


@pytest.mark.slow
def test_the_site_shows_the_reference(site: Path) -> None:
    shown = (site / "api.html").read_text(encoding="utf-8")
    names = re.findall(r"^::: (\S+)", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert not {name for name in names if f'id="{name}"' not in shown}


@pytest.mark.slow
def test_a_picture_of_a_report_is_a_picture_in_the_site(site: Path) -> None:
    page = (site / "exactness.html").read_text(encoding="utf-8")
    picture = re.search(r'<img[^>]*src="(reports/[^"]*drift\.png)"', page)
    assert picture
    assert (site / picture[1]).is_file()


def test_every_link_out_of_the_documents_points_at_a_file() -> None:
    links = [
        (page.name, target)
        for page in DOCS.glob("*.md")
        for target in re.findall(r"\]\((\.\./[^)#\s]+)", page.read_text(encoding="utf-8"))
    ]
    assert links
    assert not [(page, target) for page, target in links if not (DOCS / target).exists()]


def test_the_gallery_has_every_example_and_a_picture_of_each_that_draws_one() -> None:
    gallery = (DOCS / "gallery.md").read_text(encoding="utf-8")
    programs = [path for path in (ROOT / "examples").glob("*.py") if "__main__" in path.read_text(encoding="utf-8")]
    assert len(programs) > 5
    assert not [path.name for path in programs if f"`examples/{path.name}`" not in gallery]
    drawn = [name for path in programs for name in re.findall(r"\w+\.png", path.read_text(encoding="utf-8"))]
    assert drawn
    assert not [name for name in drawn if f"](drawings/{name})" not in gallery]
    assert not [name for name in drawn if not (DOCS / "drawings" / name).exists()]


def test_the_drawings_are_those_that_their_script_draws() -> None:
    script = load(DOCS / "drawings" / "draw.py")
    assert {path.name for path in (DOCS / "drawings").glob("*.svg")} == set(script.DRAWINGS)
    for name, draw in script.DRAWINGS.items():
        assert (DOCS / "drawings" / name).read_text(encoding="utf-8") == draw().svg(), (
            f"python docs/drawings/draw.py: {name}"
        )


# The notebook


@pytest.mark.slow
def test_the_cells_of_the_notebook_run_and_print_what_it_shows() -> None:
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("matplotlib").use("agg")
    notebook = nbformat.read(DOCS / "first-ten-minutes.ipynb", as_version=4)
    nbformat.validate(notebook)
    shown = printed(notebook)
    assert len(shown) > 5
    load(DOCS / "run_notebook.py").run(notebook, "first-ten-minutes.ipynb")
    assert printed(notebook)[:-1] == shown[:-1]  # the last is a plan, which depends on the time that blocks take here


def printed(notebook: Any) -> list[str]:
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return [output.text for output in outputs if output.output_type == "stream"]


# Migration

PACKAGES = {
    "RevTorch": "revtorch",
    "MemCNN": "memcnn",
    "RevLib": "revlib",
    "Reformer-style modules": "reformer_pytorch",
}


def migration(section: str) -> tuple[str, list[str], str]:
    """What a section's before and after share (the page's first block with it), the code before, and the code after."""
    head, *sections = re.split(r"^## ", (DOCS / "migrate.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    (text,) = (s for s in sections if s.startswith(section))
    shared = [code for _, code in BLOCK.findall(head)]
    blocks = BLOCK.findall(text)
    (at,) = (i for i, (title, _) in enumerate(blocks) if title)
    shared += [code for _, code in blocks[:at]]
    (after,) = (code for _, code in blocks[at + 1 :])
    return "\n".join(shared), blocks[at][1], after


def trained(namespace: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """The output of `stack`, and the gradients of the input and of the branches' parameters."""
    torch.manual_seed(1)
    leaf = torch.randn(3, 5, 16, dtype=torch.float64, requires_grad=True)
    branches = torch.nn.ModuleList([branch for pair in namespace["pairs"] for branch in pair])
    branches.zero_grad()
    output = namespace["stack"](leaf * 1.0)  # MemCNN frees its input, and doubles the gradient of a leaf
    output.square().sum().backward()
    return output.detach(), [leaf.grad.clone(), *(p.grad.clone() for p in branches.parameters())]


def test_every_library_of_the_page_is_compared() -> None:
    text = (DOCS / "migrate.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == list(PACKAGES)
    assert text.count('```python title="before"') == len(PACKAGES)


@pytest.fixture
def forgotten() -> Iterator[None]:
    """Packages that a test imports are gone after it: adapters.install must come before them."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in PACKAGES.values():
            del sys.modules[name]


@pytest.mark.parametrize("section", PACKAGES)
@pytest.mark.usefixtures("forgotten")
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")  # theirs
def test_code_before_and_after_a_migration_agree_and_weights_move(section: str) -> None:
    pytest.importorskip(PACKAGES[section])
    shared, before, after = migration(section)
    namespace: dict[str, Any] = {"__name__": "migrate"}
    exec(shared, namespace)
    torch.nn.ModuleList([branch for pair in namespace["pairs"] for branch in pair]).double()
    exec(before, namespace)
    old = namespace.get("sequence", namespace["stack"])
    wanted, wanted_gradients = trained(namespace)
    exec(after, namespace)
    output, gradients = trained(namespace)
    torch.testing.assert_close(output, wanted, rtol=1e-12, atol=1e-12)
    for gradient, expected in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-9, atol=1e-11)
    new = namespace.get("sequence", namespace["stack"])
    state = namespace["renamed"](old.state_dict(), **namespace["weights"])
    values = {name: value.clone() for name, value in new.state_dict().items()}
    assert state.keys() == values.keys()
    assert all(torch.equal(state[name], values[name]) for name in values)
    new.load_state_dict(state)


# Figures and arguments


def figures_of_reports() -> set[str]:
    """Every number of the benchmark reports, to two digits after the point."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "benchmarks" / "results").glob("*.md")]
    assert texts
    return {f"{float(number):.2f}" for text in texts for number in re.findall(r"\d+\.\d{2,}", text)}


@pytest.mark.parametrize("name", ["README.md", "docs/benchmarks.md", "docs/faq.md"])
def test_figures_of_speed_stand_in_a_report(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    paragraphs = [
        p for p in text.split("\n\n") if "checkpoint" in p and re.search(r"\b\d\.\d\d\b", p) and "```" not in p
    ]
    assert paragraphs
    reported = figures_of_reports()
    for paragraph in paragraphs:
        assert set(re.findall(r"\b\d\.\d\d\b", paragraph)) <= reported


def test_no_figure_of_the_readme_and_of_the_benchmarks_page_differs_from_the_newest_reports() -> None:
    documents = load(ROOT / "benchmarks" / "documents.py")
    for path, rewrite in documents.DOCUMENTS.items():
        text = path.read_text(encoding="utf-8")
        assert rewrite(text) == text, f"{path.name}: run benchmarks/documents.py, and read what is around the figures"


def test_the_readme_table_has_the_figures_of_its_rows_and_columns() -> None:
    """By hand for one row, so that the script that writes the table is not its own judge."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    name = max((ROOT / "benchmarks" / "results").glob("*-bench.json"))
    report = json.loads(name.read_text(encoding="utf-8"))
    head, _, *lines = [re.split(r"\s*\|\s*", line)[1:-1] for line in re.findall(r"^\|.*\|$", text, re.MULTILINE)]
    (row,) = (dict(zip(head, line, strict=True)) for line in lines if line[0] == '**retrograde, `"reverse"`**')
    peaks, pair = report["live"]["peaks"]["retrograde reverse"], report["live"]["pair_bytes"]
    assert [row[d] for d in ("memory, depth 6", "48", "192")] == [f"{peaks[d] / pair:.1f}" for d in ("6", "48", "192")]
    seconds = report["comparisons"]["large"]["seconds"]
    ratios = [a / b for a, b in zip(seconds["retrograde reverse"], seconds["plain"], strict=True)]
    assert row["time, width 512"] == f"{statistics.median(ratios):.2f}"
    assert f"](benchmarks/results/{name.stem}.md)" in text


def documented() -> list[Any]:
    things = []
    for name in re.findall(r"^::: (\S+)", (DOCS / "api.md").read_text(encoding="utf-8"), re.MULTILINE):
        thing = pkgutil.resolve_name(name)
        members = [thing] if not inspect.ismodule(thing) else [v for n, v in vars(thing).items() if n[0] != "_"]
        for member in (m for m in members if not inspect.ismodule(m)):
            things.append(member)
            if inspect.isclass(member):
                things += [f for n, f in vars(member).items() if inspect.isfunction(f) and not n.startswith("_")]
    return things


def test_every_argument_that_a_docstring_names_exists() -> None:
    seen = 0
    for thing in documented():
        section = re.search(r"^Args:\n((?:[ ]+.*\n?|\n)*)", inspect.getdoc(thing) or "", re.MULTILINE)
        if section is None:
            continue
        named = [n for line in re.findall(r"^ {4}([\w, ]+):", section[1], re.MULTILINE) for n in line.split(", ")]
        unknown = set(named) - set(inspect.signature(thing).parameters)
        assert not unknown, f"{thing.__qualname__} documents {sorted(unknown)}"
        seen += len(named)
    assert seen > 50

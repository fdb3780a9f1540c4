"""What the public gets: a wheel and an sdist that install, one version, and a repository that is ready for others."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import Any

import pytest

import retrograde as rg
from retrograde.memory import MODES

ROOT = Path(__file__).resolve().parents[2]
SEMANTIC = re.compile(r"(0|[1-9]\d*)\.(0|[1-9]\d*)\.(0|[1-9]\d*)(-[0-9A-Za-z.-]+)?(\+[0-9A-Za-z.-]+)?")
EXTRAS = {"plot", "cli", "train", "hf", "examples", "docs", "dev"}
GITHUB = ROOT / ".github"
PLACEHOLDER = "https://example.org/retrograde"

skip_without_hatchling = pytest.mark.skipif(
    importlib.util.find_spec("hatchling") is None, reason="hatchling is missing"
)


def builds(test: Any) -> Any:
    """Mark a test that builds the package."""
    return pytest.mark.slow(skip_without_hatchling(test))


def run(*command: object, cwd: Path = ROOT) -> str:
    """Run a command without the paths that this process was started with, and return what it printed."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run([str(c) for c in command], cwd=cwd, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def project() -> dict[str, Any]:
    """The table `[project]` of pyproject.toml."""
    toml: Any = importlib.import_module("tomllib" if sys.version_info >= (3, 11) else "tomli")
    table: dict[str, Any] = toml.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return table


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "--directory", folder)
    return folder


def wheel_in(folder: Path) -> Path:
    (path,) = folder.glob("*.whl")
    return path


def metadata_of(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return Parser().parsestr(archive.read(name).decode())


@pytest.fixture(scope="module")
def fresh(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new environment into which the wheel was installed. Dependencies are those of this one; retrograde is not."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    packages = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip()
    (Path(packages) / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    install(python, wheel_in(built), "--no-deps", "--ignore-installed")
    return folder


def install(python: Path, *what: object) -> str:
    return run(sys.executable, "-m", "pip", "--python", python, "install", "--no-index", *what)


@builds
def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    with zipfile.ZipFile(wheel_in(built)) as archive:
        names = set(archive.namelist())
    package = {name for name in names if name.startswith("retrograde/")}
    sources = {p.relative_to(ROOT / "src") for p in (ROOT / "src" / "retrograde").rglob("*") if p.is_file()}
    assert package == {path.as_posix() for path in sources if "__pycache__" not in path.parts}
    assert "retrograde/py.typed" in package
    assert all(".dist-info/" in name for name in names - package)
    assert any(name.endswith("LICENSE") for name in names)


@builds
def test_the_wheel_needs_torch_alone_and_offers_the_extras(built: Path) -> None:
    metadata = metadata_of(wheel_in(built))
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert [re.match(r"[\w-]+", line)[0] for line in required] == ["torch"]  # type: ignore[index]
    assert set(metadata.get_all("Provides-Extra", [])) >= EXTRAS
    assert metadata["License-Expression"] == "MIT"
    assert len(metadata.get_all("Project-URL", [])) == len(project()["urls"])
    assert metadata["Description-Content-Type"] == "text/markdown"


@builds
def test_links_and_pictures_of_the_readme_work_on_the_package_index(built: Path) -> None:
    """There they have no files beside them: each leads to the repository, pictures to their bytes."""
    description = metadata_of(wheel_in(built)).get_payload()
    assert isinstance(description, str)
    targets = re.findall(r"\]\(([^)\s]+)\)", description)  # of links, pictures, and pictures that are links
    pictures = re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", description)
    repository = project()["urls"]["Repository"]
    assert pictures
    assert all(target.startswith(f"{repository}/raw/main/docs/") for target in pictures)
    assert len(targets) > len(pictures)
    assert all(target.startswith(("https://", "#")) for target in targets)
    assert f"{repository}/blob/main/docs/first-ten-minutes.ipynb" in targets


@builds
def test_the_sdist_holds_what_is_needed_to_test_and_to_build_the_documents(built: Path, tmp_path: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(tmp_path, filter="data")
    tests = {p.relative_to(ROOT).as_posix() for p in (ROOT / "tests").rglob("*.py")}
    pages = {p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").rglob("*.md")}
    others = "pyproject.toml constraints.txt Makefile mkdocs.yml LICENSE CITATION.cff .pre-commit-config.yaml"
    texts = {path.name for path in ROOT.glob("*.md")}
    workflows = {path.relative_to(ROOT).as_posix() for path in GITHUB.rglob("*.yml")}
    assert not (tests | pages | texts | workflows | set(others.split())) - names
    assert not [name for name in names if "__pycache__" in name or name.startswith(("site/", ".venv/", "dist/"))]
    (source,) = tmp_path.iterdir()
    recomputed = tmp_path / "recomputed"
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", recomputed, cwd=source)
    with zipfile.ZipFile(wheel_in(recomputed)) as second, zipfile.ZipFile(wheel_in(built)) as first:
        assert set(second.namelist()) == set(first.namelist())


@builds
def test_the_installed_wheel_trains_from_a_folder_of_its_own(fresh: Path, tmp_path: Path) -> None:
    code = (
        "import torch, retrograde as rg\n"
        "stack = rg.ReversibleSequence([rg.two_stream(torch.nn.Linear(4, 4), torch.nn.Tanh())])\n"
        "stack(torch.randn(2, 4)).sum().backward()\n"
        "assert all(p.grad is not None for p in stack.parameters())\n"
        "print(rg.__file__, rg.__version__)"
    )
    file, version = run(fresh / "bin" / "python", "-c", code, cwd=tmp_path).split()
    assert Path(file).is_relative_to(fresh)
    assert version == rg.__version__


@builds
def test_the_command_is_installed_and_helps(fresh: Path, tmp_path: Path) -> None:
    pytest.importorskip("typer")
    command = fresh / "bin" / "retrograde"
    said = run(command, "--help", cwd=tmp_path)
    commands = ("demo", "train", "profile", "doctor", "plan", "fit", "bench", "convert")
    assert all(name in said for name in commands)
    assert str(fresh) in command.read_text(encoding="utf-8").splitlines()[0]


@builds
def test_the_wheel_installs_with_its_extras(fresh: Path, built: Path) -> None:
    for module in ("typer", "rich", "matplotlib"):
        pytest.importorskip(module)
    said = install(fresh / "bin" / "python", "--dry-run", f"{wheel_in(built)}[cli,plot]")
    assert all(f"Requirement already satisfied: {name}" in said for name in ("torch", "typer", "rich", "matplotlib"))
    assert "does not provide the extra" not in said


@builds
def test_one_version_stands_everywhere(built: Path) -> None:
    version = rg.__version__
    assert SEMANTIC.fullmatch(version)
    assert metadata_of(wheel_in(built))["Version"] == version
    assert wheel_in(built).name == f"retrograde-{version}-py3-none-any.whl"
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.search(
        rf"^## \[{re.escape(version)}\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE
    )


def test_the_citation_has_what_its_format_needs() -> None:
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(citation)
    assert citation["license"] == "MIT"


# The repository


def read_yaml(path: Path) -> Any:
    return pytest.importorskip("yaml").safe_load(path.read_text(encoding="utf-8"))


def test_workflows_run_make_targets_that_exist_and_nothing_else() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    commands = [
        step["run"].strip()
        for path in GITHUB.glob("workflows/*.yml")
        for job in read_yaml(path)["jobs"].values()
        for step in job["steps"]
        if "run" in step
    ]
    assert {"make test", "make quick", "make docs"} <= set(commands)
    assert not [c for c in commands if not c.startswith("make ") or not set(c.split()[1:]) <= targets]


def test_the_quick_tests_exist_and_come_from_every_room() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    listed = re.search(r"^QUICK := ((?:.*\\\n)*.*)$", makefile, re.MULTILINE)
    assert listed
    paths = listed[1].replace("\\\n", " ").split()
    assert not [path for path in paths if not (ROOT / "tests" / path).exists()]
    rooms = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert {path.partition("/")[0] for path in paths} == rooms


def test_issue_forms_have_what_github_needs() -> None:
    forms = {path.stem: read_yaml(path) for path in GITHUB.glob("ISSUE_TEMPLATE/*.yml") if path.stem != "config"}
    assert set(forms) == {"bug", "question", "feature"}
    for name, form in forms.items():
        assert {"name", "description", "body"} <= set(form), name
        fields = [entry for entry in form["body"] if entry["type"] != "markdown"]
        assert all(entry["attributes"]["label"] for entry in fields), name
        assert len({entry["id"] for entry in fields}) == len(fields), name
    (modes,) = (entry for entry in forms["bug"]["body"] if entry["type"] == "dropdown")
    assert set(MODES) <= set(modes["attributes"]["options"])


def test_the_addresses_are_given_and_the_checklist_names_those_to_be_replaced() -> None:
    urls = project()["urls"]
    assert {"Homepage", "Documentation", "Repository", "Issues", "Changelog"} <= set(urls)
    if any(url.startswith(PLACEHOLDER) for url in urls.values()):
        assert PLACEHOLDER in (ROOT / "RELEASING.md").read_text(encoding="utf-8")

"""Every Python block of the documents runs, in order, in one namespace per document."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def python_blocks(text: str) -> list[str]:
    """The blocks, each after as many empty lines as the document has before it, so that tracebacks point into it."""
    return ["\n" * text.count("\n", 0, match.start(1)) + match[1] for match in BLOCK.finditer(text)]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_python_block_runs(document: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in python_blocks(document.read_text(encoding="utf-8")):
        exec(compile(block, str(document), "exec"), namespace)


def test_the_readme_has_examples_and_none_is_hidden_from_this_test() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(python_blocks(text)) == len(re.findall(r"^\s*(?:```|~~~)\s*py", text, re.MULTILINE)) > 0


def test_every_test_file_that_the_guarantees_name_exists() -> None:
    text = (ROOT / "docs" / "guarantees.md").read_text(encoding="utf-8")
    named = set(re.findall(r"[\w/]*test_\w+\.py", text))
    assert named
    files = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")}
    assert named <= files | {Path(file).name for file in files}


def heading_anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading.strip().lower())) for heading in headings}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "RELEASING.md", "SECURITY.md"])
def test_every_link_into_the_repository_leads_to_a_file_and_a_heading(name: str) -> None:
    links = re.findall(r"\]\(([^)#\s:]+)(?:#([^)\s]+))?\)", (ROOT / name).read_text(encoding="utf-8"))
    assert not [path for path, _ in links if not (ROOT / path).exists()]
    assert not [(path, anchor) for path, anchor in links if anchor and anchor not in heading_anchors(ROOT / path)]


def test_every_test_that_the_documents_name_exists() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    defined = set(re.findall(r"^def (test_\w+)", sources, re.MULTILINE))
    for document in DOCUMENTS:
        named = set(re.findall(r"`(test_\w+)`", document.read_text(encoding="utf-8")))
        assert named <= defined, f"{document.name} names {sorted(named - defined)}"

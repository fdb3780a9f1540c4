"""What mkdocs builds besides the pages: the notebook, the guides for contributors and the reports, as pages.

A page links a file of the repository as `../benchmarks/results/x.md` or `../ARCHITECTURE.md`, which works where the
files are read as they are. In the site these are pages too; other files of the repository are named without a link.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ("benchmarks/results", "reproductions/results")
GUIDES = {
    "ARCHITECTURE.md": "architecture.md",
    "CONTRIBUTING.md": "contributing.md",
}
_OUTWARD = re.compile(r"(!?)\[([^\]]*)\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")
_OPTION = re.compile(r"<code>(--[\w-]+)</code>")
_ROOTED = re.compile(r"\[([^\]]*)\]\(([\w/.-]+)(#[^)\s]*)?\)")


def on_files(files: Files, *, config: MkDocsConfig) -> Files:
    """Add a page for each notebook, guide and report, and the pictures of the reports."""
    for notebook in sorted((ROOT / "docs").glob("*.ipynb")):
        files.append(
            File.generated(
                config,
                f"{notebook.stem}.md",
                content=page_of(json.loads(notebook.read_text())),
            )
        )
    for name, uri in GUIDES.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(
            File.generated(config, uri, content=_ROOTED.sub(_into_docs, text))
        )
    for path in reports():
        uri = f"reports/{path.relative_to(ROOT).as_posix()}"
        files.append(File.generated(config, uri, content=path.read_bytes()))
    return files


def reports() -> list[Path]:
    return [
        path
        for folder in REPORTS
        for path in sorted((ROOT / folder).glob("*"))
        if path.is_file()
    ]


def on_page_markdown(
    markdown: str, *, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Turn links out of docs/ to the reports that are in the site; name what is not in it."""
    if page.file.src_uri.startswith("reports/"):
        return markdown
    return _OUTWARD.sub(_inward, markdown)


def on_page_content(
    html: str, *, page: Page, config: MkDocsConfig, files: Files
) -> str:
    """Mark names of options, which site.css keeps on one line: `--small` would be broken after its hyphens."""
    return _OPTION.sub(r'<code class="option">\1</code>', html)


def _into_docs(link: re.Match[str]) -> str:
    """A link of a file at the root, as a page of docs/ would write it."""
    text, target, anchor = link[1], link[2], link[3] or ""
    if target.startswith("docs/"):
        return f"[{text}]({target.removeprefix('docs/')}{anchor})"
    return f"[{text}](../{target}{anchor})"


def _inward(link: re.Match[str]) -> str:
    picture, text, target, anchor = link[1], link[2], link[3], link[4] or ""
    if target in GUIDES:
        return f"[{text}]({GUIDES[target]}{anchor})"
    if (
        any(target.startswith(f"{folder}/") for folder in REPORTS)
        and (ROOT / target).is_file()
    ):
        return f"{picture}[{text}](reports/{target}{anchor})"
    return (
        f"`{target}`"
        if text in (target, f"`{target}`")
        else f"{text} (`{target}`)"
    )


def page_of(notebook: dict[str, Any]) -> str:
    """A notebook as Markdown: its text, its code, and what the code printed and drew."""
    return (
        "\n\n".join(part for cell in notebook["cells"] for part in _parts(cell))
        + "\n"
    )


def _parts(cell: dict[str, Any]) -> list[str]:
    source = "".join(cell["source"])
    if cell["cell_type"] == "markdown":
        return [source]
    return [
        f"```python\n{source}\n```",
        *(_shown(output) for output in cell["outputs"]),
    ]


def _shown(output: dict[str, Any]) -> str:
    if output["output_type"] == "stream":
        return "```text\n" + "".join(output["text"]).rstrip("\n") + "\n```"
    return f"![](data:image/png;base64,{output['data']['image/png'].strip()})"

"""The command line: `retrograde <command>`, or `python -m retrograde <command>`. One file per command."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line. Typer and rich come with the extra `cli`."""
    try:
        from ._app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        print(f"The command line needs {error.name}: pip install 'retrograde[cli]'.", file=sys.stderr)
        raise SystemExit(2) from None
    app()

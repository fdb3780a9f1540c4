"""Plans for another machine need a newer torch than the rest."""

from __future__ import annotations

from retrograde.engine.torch_internals import VERSION

if VERSION < (2, 13):
    collect_ignore_glob = ["conftest.py", "test_on_paper*.py"]

"""Which tests need a newer torch than the oldest."""

from __future__ import annotations

from retrograde.engine.torch_internals import TELLS_RESULTS

if not TELLS_RESULTS:
    collect_ignore_glob = ["conftest.py", "test_selective*.py"]

"""Replace published modules by drop-ins, and undo it."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

SYSTEMS: dict[str, dict[str, str]] = {
    "routing_transformer": {"routing_transformer.reversible": "routing_transformer"},
    "lie_transformer_pytorch": {"lie_transformer_pytorch.reversible": "lie_transformer_pytorch"},
    "nuwa_pytorch": {
        "nuwa_pytorch.reversible": "nuwa_pytorch",
        "nuwa_pytorch.reversible_video_audio": "nuwa_pytorch_video_audio",
    },
    "axial_attention": {"axial_attention.reversible": "axial_attention"},
    "reformer_pytorch": {"reformer_pytorch.reversible": "reformer_pytorch"},
}
"""For each published package the modules that are replaced, and by which module of ours."""


class Installation:
    """An installed drop-in. `undo()`, or the end of a `with` block, removes it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def undo(self) -> None:
        uninstall(self.name)

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *error: object) -> None:
        self.undo()


def install(name: str) -> Installation:
    """Make a published package run on retrograde: call this before the package is imported.

        >>> import retrograde.adapters
        >>> handle = retrograde.adapters.install("nuwa_pytorch")
        >>> # from nuwa_pytorch import NUWA
        >>> handle.undo()

    Args:
        name: the package, as it is imported.
    """
    ours = _ours(name)
    if name in sys.modules and not _installed(name):
        raise RuntimeError(
            f"{name} is already imported, and its classes use its own reversible module. Call "
            f"retrograde.adapters.install({name!r}) before the first import of {name}, in a fresh process or kernel."
        )
    sys.modules.update(ours)
    return Installation(name)


def uninstall(name: str) -> None:
    """Remove a drop-in: the next import of the package loads the published code.

    Classes that were imported before that still run on retrograde.
    """
    _ours(name)
    if not _installed(name):
        raise RuntimeError(f"retrograde.adapters.install({name!r}) was not called, or was undone already.")
    for module in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
        del sys.modules[module]


def _ours(name: str) -> dict[str, ModuleType]:
    if name not in SYSTEMS:
        raise ValueError(f"There is no drop-in for {name!r}; there is one for each of {', '.join(SYSTEMS)}.")
    return {
        published: importlib.import_module(f"{__package__}.{replacement}")
        for published, replacement in SYSTEMS[name].items()
    }


def _installed(name: str) -> bool:
    return all(sys.modules.get(published) is module for published, module in _ours(name).items())

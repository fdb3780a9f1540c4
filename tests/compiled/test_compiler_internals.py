"""The private parts of torch's compiler that the backend needs: a new torch that changes one of them fails here."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import torch
from torch._functorch import partitioners

from retrograde.compiled import compiler_internals


def test_the_partitioner_asks_the_function_that_is_replaced_which_values_to_save() -> None:
    source = inspect.getsource(partitioners.min_cut_rematerialization_partition)
    assert "saved_values = choose_saved_values_set(" in source
    assert list(inspect.signature(partitioners.choose_saved_values_set).parameters) == [
        "joint_graph",
        "node_info",
        "memory_budget",
    ]


def test_nodes_with_our_tag_are_put_into_the_backward_half() -> None:
    assert f'== "{compiler_internals.BACKWARD}"' in inspect.getsource(partitioners)


def test_the_partitioner_recomputes_nothing_that_must_be_saved() -> None:
    source = inspect.getsource(partitioners.solve_min_cut)
    assert 'if node.meta.get("recompute", None) == CheckpointPolicy.MUST_SAVE:' in source


def test_what_torch_compile_wraps_around_a_backend_is_known() -> None:
    wrapper = torch._TorchCompileWrapper("retrograde", None, {"max_autotune": False}, None)
    assert wrapper.compiler_fn is compiler_internals_backend()
    assert wrapper.kwargs == {"options": {"max_autotune": False}}


def compiler_internals_backend() -> object:
    from retrograde.compiled.backend import backend

    return backend


def test_private_names_of_the_compiler_are_in_one_file() -> None:
    room = Path(compiler_internals.__file__).parent
    for path in sorted(room.glob("*.py")):
        names = {
            part
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, (ast.Import, ast.ImportFrom))
            for name in ([node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names])
            for part in name.split(".")
            if name.startswith("torch")
        }
        private = {name for name in names if name.startswith("_")}
        assert not private or path.name == "compiler_internals.py", f"{path.name} imports {private}"

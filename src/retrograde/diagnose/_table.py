"""A diagnosis as text: one table per stack, then what branches do, the peaks, what to change, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence

from retrograde.measure.formatting import align, format_bytes, format_error

from ._report import Behaviour, BlockReport, Diagnosis, StackReport, Suggestion, Untried

HEADER = ("block", "branches", "drift", "× floor", "inverse ×", "size", "gradient", "cosine", "flips", "peak", "")


def text_of(diagnosis: Diagnosis) -> str:
    parts = [f"Examination of {diagnosis.model}"]
    for stack in diagnosis.stacks:
        parts += ["", title(stack), *_indented(align([HEADER, *rows(stack)], left=(1, 10)))]
        parts += _indented(behaviours(stack))
    return "\n".join([*parts, "", *peaks(diagnosis), "", *advice(diagnosis), diagnosis.verdict])


def title(stack: StackReport) -> str:
    calls = "" if stack.calls == 1 else f", called {stack.calls} times"
    dtype = f"{stack.dtype} streams (floor {stack.floor:.1e})"
    blocks = f'{len(stack.blocks)} blocks, memory="{stack.memory}"'
    return f"{stack.name}: {blocks}, {dtype}, tolerance {stack.tolerance:.2g}{calls}"


def rows(stack: StackReport) -> list[tuple[str, ...]]:
    """One row per block, in the columns of HEADER."""
    return [_row(stack, block) for block in stack.blocks]


def _row(stack: StackReport, block: BlockReport) -> tuple[str, ...]:
    remark = "" if block.error <= stack.tolerance else "past tolerance"
    if block.index == stack.first_bad:
        remark = "first past tolerance"
    if any(step.behaviour.edits_source for step in block.steps):
        remark = f"edits its source {remark}".strip()
    if block.memory != stack.memory:
        remark = f"{block.memory} {remark}".strip()
    return (
        str(block.index),
        block.name if len(block.name) <= 40 else block.name[:39] + "…",
        _error(block.drift),
        _number(None if block.drift is None else block.drift / stack.floor, ".3g"),
        _number(block.amplification, ".3g"),
        _number(block.magnitude, ".2g"),
        _error(block.gradient_error),
        _number(block.gradient_cosine, ".6f"),
        f"{block.flips}/{block.decisions}" if block.decisions else "-",
        format_bytes(block.peak_bytes.get(stack.memory, 0)),
        remark,
    )


def behaviours(stack: StackReport) -> list[str]:
    """What branches do that a replay must handle; blocks that do the same share a line."""
    groups: dict[tuple[str, Behaviour], list[int]] = {}
    for block in stack.blocks:
        for step in block.steps:
            if step.behaviour.sentences():
                groups.setdefault((step.name, step.behaviour), []).append(block.index)
    return [
        f"{_blocks(numbers)}, {name}: {'; '.join(behaviour.sentences())}"
        for (name, behaviour), numbers in groups.items()
    ]


def peaks(diagnosis: Diagnosis) -> list[str]:
    """The peak of each memory mode, and where it is."""
    rows = [(f"{p.memory}:", format_bytes(p.bytes), p.where) for p in diagnosis.peaks]
    return ["Peak memory besides parameters, their gradients and the batch:", *_indented(align(rows, left=(0, 2)))]


def advice(diagnosis: Diagnosis) -> list[str]:
    """The remedies that were tried, and those that could not be; nothing if there are none."""
    remedies: tuple[Suggestion | Untried, ...] = (*diagnosis.suggestions, *diagnosis.untried)
    lines = [f"  - {remedy.sentence()}" for remedy in remedies]
    return ["What to change, as measured:", *lines, ""] if lines else []


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"  {line}" for line in lines]


def _blocks(numbers: Sequence[int]) -> str:
    """Block numbers with runs put together: "blocks 0-3, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        elif not runs or number != runs[-1][-1]:
            runs.append([number])
    words = ", ".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)
    return f"block{'s' if len(numbers) > 1 else ''} {words}"


def _error(value: float | None) -> str:
    return "-" if value is None else format_error(value)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)

"""How commands end."""

from __future__ import annotations

import pytest

pytest.importorskip("typer", reason="the command line needs the extra 'cli'")

import torch
import typer

import retrograde as rg
from retrograde.cli._ending import telling


def test_the_sentence_about_an_error_inside_a_branch_names_the_branch_and_its_block(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(x: object) -> object:
        raise KeyError("colour")

    stack = rg.ReversibleSequence([rg.two_stream(fails, fails)])
    with pytest.raises(typer.Exit) as ended, telling("Cannot measure: a training step raised"):
        stack(torch.randn(2, 4))
    assert ended.value.exit_code == 1
    said = capsys.readouterr().err
    assert said.startswith("Cannot measure: a training step raised KeyError: 'colour' (test_ending.py, line ")
    assert ") (raised by the branch " in said
    assert "in block 0 of a ReversibleSequence" in said
    assert said.count("\n") == 1

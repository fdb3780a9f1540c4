"""Models are saved to a folder, as huggingface_hub lays it out, and loaded from it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from problems import PROBLEMS, Problem


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
def test_a_model_that_was_saved_to_a_folder_loads_with_its_arguments_and_weights(
    problem: Problem, tmp_path: Path
) -> None:
    pytest.importorskip("huggingface_hub")
    model: Any = problem.build("checkpoint").eval()
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["memory"] == "checkpoint"
    loaded = type(model).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(problem.loss(loaded), problem.loss(model))
    assert type(model).from_pretrained(tmp_path, memory="reverse").state_dict().keys() == model.state_dict().keys()


def test_without_huggingface_hub_the_models_work_and_say_what_is_missing() -> None:
    code = (
        "import sys; sys.modules['huggingface_hub'] = None\n"
        "from retrograde import models\n"
        "model = models.RevNet(2, (4,), (1,))\n"
        "try: model.save_pretrained('x')\n"
        "except ImportError as error: print(error)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'retrograde[hf]'" in run.stdout

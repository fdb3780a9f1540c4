"""What tools leave of a model's state: everything as it was, or untouched."""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

import retrograde as rg
from retrograde.diagnose import examine, profile
from retrograde.engine.preserve import StateSnapshot, preserve
from retrograde.planning import plan


class Frozen(OrderedDict[str, int]):
    """A dictionary that refuses to be changed, as the configuration of a diffusers model does."""

    def update(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError("this dictionary is frozen")


class Log(list[int]):
    """A list of somebody else's class."""


KNOWN = [
    ([1], lambda x: x.append(2)),
    ({"a": 1}, lambda x: x.pop("a")),
    ({1}, lambda x: x.add(2)),
    (OrderedDict(a=1), lambda x: x.update(b=2)),
    (defaultdict(int, a=1), lambda x: x["b"]),
    (Counter("aab"), lambda x: x.update("a")),
    (deque([1, 2], maxlen=2), lambda x: x.append(3)),
]


@pytest.mark.parametrize(("value", "change"), KNOWN, ids=lambda value: type(value).__name__)
def test_containers_of_the_standard_library_are_restored(value: Any, change: Any) -> None:
    module: Any = nn.Linear(2, 2)
    module.notes = value
    before = type(value)(value) if not isinstance(value, defaultdict) else value.copy()
    snapshot = StateSnapshot.of([module])
    assert snapshot.changed_attributes() == []
    with preserve(module):
        change(module.notes)
        assert value != before
        assert snapshot.changed_attributes() == ["notes"]
    assert module.notes is value
    assert value == before


@pytest.mark.parametrize("value", [Frozen(a=1, b=2), Log([1, 2])], ids=lambda value: type(value).__name__)
def test_containers_of_unknown_classes_are_left_alone(value: Any) -> None:
    module: Any = nn.Linear(2, 2)
    module.notes = value
    with preserve(module):
        value.__setitem__(next(iter(value)) if isinstance(value, dict) else 0, 7)
    assert module.notes is value
    assert next(iter(value.values())) == 7 if isinstance(value, dict) else value[0] == 7
    assert len(value) == 2


def dit() -> tuple[Any, dict[str, Any]]:
    diffusers = pytest.importorskip("diffusers")
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=10,
        norm_num_groups=4,
    )
    batch = {
        "hidden_states": torch.randn(1, 4, 8, 8),
        "timestep": torch.tensor([3]),
        "class_labels": torch.tensor([1]),
        "return_dict": False,
    }
    return model, batch


TOOLS: dict[str, Callable[[Any, Any], Any]] = {
    "convert": lambda model, batch: rg.convert(model, batch=batch),
    "plan": lambda model, batch: (rg.convert(model, "bdia"), plan(model, batch, "1GiB")),
    "profile": lambda model, batch: (rg.convert(model, "bdia"), profile(model, batch)),
    "doctor": lambda model, batch: (rg.convert(model, "bdia"), examine(model, batch)),
}


@pytest.mark.parametrize("tool", TOOLS)
def test_tools_leave_the_configuration_of_a_diffusers_model(tool: str) -> None:
    model, batch = dit()
    before = dict(model.config)
    TOOLS[tool](model, batch)
    assert len(before) > 10
    assert dict(model.config) == before

"""What the first run of a branch saw, its replay sees; and afterwards nothing shows that there was one."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import retrograde as rg
from stacks import (
    MEMORIES,
    RECOMPUTING,
    Mlp,
    Noisy,
    agree,
    all_close,
    loss_of,
    memory_of,
    sample,
    seed_all,
    train,
    twins,
    twins_of,
)

every_memory = pytest.mark.parametrize("memory", MEMORIES)


class Drawing(Mlp):
    """Multiplies by noise from a source that can be chosen."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.own = torch.Generator().manual_seed(3)
        self.own_numpy = numpy.random.default_rng(3)
        self.own_python = random.Random(3)

    def draw(self, x: Tensor) -> Any:
        return {
            "python": lambda: random.random(),
            "numpy": lambda: numpy.random.rand(),
            "numpy normal": lambda: numpy.random.randn(),
            "a torch.Generator of the branch": lambda: torch.rand(x.shape, generator=self.own, dtype=x.dtype),
            "a numpy Generator of the branch": lambda: self.own_numpy.random(),
            "a random.Random of the branch": lambda: self.own_python.random(),
            "all at once": lambda: random.random() + numpy.random.rand() + torch.rand_like(x),
        }[self.source]()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.draw(x)) * self.draw(x)


SOURCES = (
    "python",
    "numpy",
    "numpy normal",
    "a torch.Generator of the branch",
    "a numpy Generator of the branch",
    "a random.Random of the branch",
    "all at once",
)


@every_memory
@pytest.mark.parametrize("source", SOURCES)
def test_random_numbers_of_every_source_are_replayed(memory: str, source: str) -> None:
    agree(*twins(lambda: Drawing(source), memory=memory), train)


@every_memory
@pytest.mark.parametrize("wrapped", ["closure", "selective", "method", "list"])
def test_a_generator_that_a_branch_reaches_is_replayed(memory: str, wrapped: str) -> None:
    def noisy(x: Tensor, generator: torch.Generator) -> Tensor:
        return (x * torch.rand(x.shape, generator=generator, dtype=x.dtype)).sin()

    class Holder:
        def __init__(self, generator: torch.Generator) -> None:
            self.generator = generator

        def __call__(self, x: Tensor) -> Tensor:
            return noisy(x, self.generator)

        def method(self, x: Tensor) -> Tensor:
            return noisy(x, self.generator)

    class Held(nn.Module):
        def __init__(self, generator: torch.Generator) -> None:
            super().__init__()
            self.generators = [generator]

        def forward(self, x: Tensor) -> Tensor:
            return noisy(x, self.generators[0])

    found = []
    for build in ("retrograde", "plain"):
        generator = torch.Generator().manual_seed(7)
        branch: Any = {
            "closure": lambda x, generator=generator: noisy(x, generator),
            "selective": functools.partial(noisy, generator=generator),
            "method": Holder(generator).method,
            "list": Held(generator),
        }[wrapped]
        x = sample(4, 6)
        a = b = x
        if build == "retrograde":
            takes: Any = ()
            block = rg.two_stream(branch, branch, takes=takes)
            a, b = rg.ReversibleSequence([block] * 3, merge=None, memory=memory_of(memory, 3))(x)
        else:
            for _ in range(3):
                a = a + branch(b)
                b = b + branch(a)
        loss_of(a - b).backward()
        found.append((a, b, x.grad, generator.get_state()))
    all_close(*found)


@every_memory
def test_a_generator_in_the_context_is_replayed(memory: str) -> None:
    class Given(Mlp):
        def forward(self, x: Tensor, generator: torch.Generator) -> Tensor:
            return super().forward(x) * torch.rand(x.shape, generator=generator, dtype=x.dtype)

    def scenario(model: Any) -> Any:
        x, generator = sample(4, 6), torch.Generator().manual_seed(9)
        y = model(x, generator=generator)
        loss_of(y).backward()
        return y, x.grad, generator.get_state()

    agree(*twins(Given, memory=memory), scenario)


@every_memory
def test_random_numbers_go_on_after_a_backward_as_if_there_had_been_no_replay(memory: str) -> None:
    def scenario(model: Any) -> Any:
        drawn = []
        for step in range(3):
            loss_of(model(sample(4, 6, seed=step))).backward()
            drawn += [torch.rand(3), random.random(), float(numpy.random.rand())]
        return drawn

    agree(*twins(lambda: Drawing("all at once"), memory=memory), scenario)


class Late(Mlp):
    """Draws from Python's generator, but not in its first run."""

    first = True

    def forward(self, x: Tensor) -> Tensor:
        if rg.is_replaying() or not self.first:
            return super().forward(x) * random.random()
        self.first = False
        return super().forward(x)


@pytest.mark.parametrize("memory", RECOMPUTING)
def test_a_branch_that_takes_to_random_later_warns_once_and_is_replayed_from_then_on(memory: str) -> None:
    stack, _ = twins(Late, memory=memory)
    for m in stack.modules():
        if isinstance(m, Late):
            m.first = True
    with torch.no_grad():
        stack(sample(4, 6))
    for m in stack.modules():
        if isinstance(m, Late):
            m.first = True
    stack(sample(4, 6))
    with pytest.warns(RuntimeWarning, match="random generator"):
        stack(sample(4, 6))

    _, reference = twins(Late, memory=memory)
    for m in reference.modules():
        if isinstance(m, Late):
            m.first = False
    agree(stack, reference, train)


@pytest.mark.parametrize("memory", RECOMPUTING)
def test_a_branch_that_takes_to_random_beside_one_that_always_did_warns(memory: str) -> None:
    stack, _ = twins_of([(Drawing("python"), Late()), (Mlp(), Mlp())], memory)
    stack(sample(4, 6))
    with pytest.warns(RuntimeWarning, match="random generator"):
        stack(sample(4, 6))


@every_memory
def test_dropout_that_is_switched_on_between_calls_is_replayed(memory: str) -> None:
    """The branch was seen to draw nothing before, in the same training mode."""

    def scenario(model: Any) -> Any:
        x = sample(4, 6)
        dropouts = [m for m in model.modules() if isinstance(m, nn.Dropout)]
        for p in (0.0, 0.5, 0.0, 0.5):
            for dropout in dropouts:
                dropout.p = p
            y = model(x)
            loss_of(y).backward()
        return y, x.grad

    agree(*twins(Noisy, memory=memory), scenario)


@every_memory
def test_is_replaying_is_true_in_replays_alone(memory: str) -> None:
    runs: list[bool] = []

    class Telling(Mlp):
        def forward(self, x: Tensor) -> Tensor:
            runs.append(rg.is_replaying())
            return super().forward(x)

    stack, _ = twins(Telling, memory=memory)
    y = stack(sample(4, 6))
    assert not any(runs)
    assert not rg.is_replaying()
    first = len(runs)
    y.register_hook(lambda _: runs.append(rg.is_replaying()))
    loss_of(y).backward()
    assert not runs[first]
    assert all(runs[first + 1 :])
    assert len(runs) - first - 1 == {"store": 0, "checkpoint": 5, "reverse": 5, "mixed": 5, "anchored": 5}[memory]
    assert not rg.is_replaying()


class Counting(nn.Module):
    """Does something else each time it runs, with its runs in a list, of which no replay knows."""

    def __init__(self, does: str) -> None:
        super().__init__()
        self.linear, self.does, self.log = nn.Linear(6, 6).double(), does, []

    def forward(self, x: Tensor) -> Tensor:
        self.log.append(1)
        runs, h = len(self.log), self.linear(x)
        if self.does == "more":
            for _ in range(runs):
                h = h.sin()
            h = (2 * h).cos()
        elif self.does == "fewer":
            for _ in range(3 - runs):
                h = h.sin()
            h = h.cos()
        elif self.does == "another shape":
            h = torch.cat([h] * runs).exp()[: len(x)]
        else:
            h = (h.float() if runs > 1 else h).exp().double()
        return h


@pytest.mark.parametrize("memory", ["checkpoint", "reverse", "anchored"])
@pytest.mark.parametrize("does", ["more", "fewer", "another shape", "another dtype"])
def test_a_replay_that_saves_other_tensors_is_an_error_that_names_the_branch_each_time(memory: str, does: str) -> None:
    torch.manual_seed(0)
    stack, _ = twins_of([(Mlp(), Mlp()), (Mlp(), Counting(does)), (Mlp(), Mlp())], memory)
    loss = loss_of(stack(sample(4, 6)))
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"replay of Counting in block 1 saved"):
            loss.backward(retain_graph=True)


def test_a_call_of_plain_torch_after_a_seed_is_what_it_was() -> None:
    """Guards `agree`: its comparison of generators sees a single draw."""
    seed_all()
    before = torch.get_rng_state()
    torch.rand(1)
    assert not torch.equal(before, torch.get_rng_state())


class Fickle(nn.Module):
    """Does something else in replays, once it is told to."""

    fickle = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.inner(x))
        if self.fickle and rg.is_replaying():
            h = torch.cat([h, h]).sin()[: len(x)]
        return (h * h).sin()


@pytest.mark.parametrize("memory", ["checkpoint", "reverse"])
def test_a_replay_that_changes_after_some_calls_is_an_error_though_it_may_stop_early(memory: str) -> None:
    stack = rg.ReversibleSequence([rg.two_stream(Fickle(), Fickle()) for _ in range(3)], memory=memory)
    for _ in range(3):
        stack(sample(4, 6)).sum().backward()
    for block in stack:
        block.steps[1].branch.fickle = True
    with pytest.raises(RuntimeError, match=r"replay of Fickle in block \d saved"):
        stack(sample(4, 6)).sum().backward()

"""State that a branch has besides parameters and buffers: what its replay sees as the first run saw it, and what not.

`docs/what-can-go-wrong.md` lists both. The reference is plain autograd, with the state counted once per step.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import retrograde as rg
from stacks import MEMORIES, Mlp, Plain, agree, all_close, loss_of, memory_of, sample, train, twins, twins_of

every_memory = pytest.mark.parametrize("memory", [*MEMORIES, "selective"])

NOISE = torch.Generator()
NORM = nn.BatchNorm1d(6).double()
TABLE = torch.ones(6).double()
LAYERS: list[nn.Module] = []


def noise_like(x: Tensor) -> Tensor:
    return torch.rand(x.shape, generator=NOISE, dtype=x.dtype)


class GlobalGenerator(Mlp):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * torch.rand(x.shape, generator=NOISE, dtype=x.dtype)


class GeneratorInHelper(Mlp):
    """Its forward calls a method, which calls a function, which names the generator."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.disturbed(super().forward(x))

    def disturbed(self, u: Tensor) -> Tensor:
        return u * noise_like(u)


def closing_over_a_generator() -> nn.Module:
    generator = NOISE

    class Closing(Mlp):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) + torch.rand(x.shape, generator=generator, dtype=x.dtype) * x

    return Closing()


class GeneratorInDictionary(Mlp):
    def __init__(self) -> None:
        super().__init__()
        self.generators = {"noise": NOISE}

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * torch.rand(x.shape, generator=self.generators["noise"], dtype=x.dtype)

    def __deepcopy__(self, memo: Any) -> GeneratorInDictionary:
        twin = GeneratorInDictionary()  # generators cannot be copied
        twin.load_state_dict(self.state_dict())
        return twin


GENERATORS = (GlobalGenerator, GeneratorInHelper, closing_over_a_generator, GeneratorInDictionary)


@every_memory
@pytest.mark.parametrize("branch", GENERATORS)
def test_a_generator_that_a_forward_reaches_by_its_code_is_replayed(memory: str, branch: Any) -> None:
    def scenario(model: Any) -> Any:
        NOISE.manual_seed(3)
        return train(model), NOISE.get_state()

    agree(*twins(branch, memory=memory), scenario)


@every_memory
def test_a_function_that_names_a_generator_and_modules_is_replayed(memory: str) -> None:
    """As in a notebook, where layers are globals and branches are small functions."""
    torch.manual_seed(0)
    LAYERS[:] = [nn.Sequential(nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh()).double() for _ in range(6)]
    first, seen = copy.deepcopy(LAYERS), []
    for mode in (memory, "store"):
        LAYERS[:] = copy.deepcopy(first)
        NOISE.manual_seed(3)
        pairs = [tuple(lambda x, i=i: LAYERS[i](x) * noise_like(x) for i in (2 * n, 2 * n + 1)) for n in range(3)]
        stack = rg.ReversibleSequence([rg.two_stream(f, g) for f, g in pairs], memory=memory_of(mode, 3))
        grads = [p.grad for layer in LAYERS for p in layer.parameters()]
        buffers = [b for layer in LAYERS for b in layer.buffers()]
        seen.append([*train(stack), *grads, *buffers, NOISE.get_state()])
    all_close(*seen)


class ListedNorm(nn.Module):
    """Batch normalisation in a plain list, where torch does not find it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norms = nn.Linear(6, 6, bias=False).double(), [nn.BatchNorm1d(6).double()]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norms[0](self.linear(x)))


class GlobalNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(NORM(self.linear(x)))


@every_memory
@pytest.mark.parametrize("branch", [ListedNorm, GlobalNorm])
def test_batch_norm_that_is_not_registered_is_updated_once_per_step(memory: str, branch: Any) -> None:
    def scenario(model: Any) -> Any:
        NORM.reset_running_stats()
        NORM.train()
        seen = train(model, 2)
        NORM.eval()
        seen += train(model, 1)
        norms = [m.norms[0] for m in model.modules() if isinstance(m, ListedNorm)] or [NORM]
        return seen, [(n.running_mean.clone(), n.running_var.clone(), n.num_batches_tracked.clone()) for n in norms]

    agree(*twins(branch, memory=memory), scenario)


class Attributes(nn.Module):
    """Reads attributes, and changes some in each run."""

    factor = 1.0  # of the class, until the first run

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(6, 6).double(), how
        self.scale, self.runs, self.size, self.table = torch.ones(6).double(), 0, 0, None
        self.count = torch.zeros(()).double()
        self.register_buffer("rows", None)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "counts":
            self.runs += 1
            self.factor += 0.1
            return torch.tanh(self.linear(x)) * (self.runs + self.factor)
        if self.how == "counts in place":
            self.count += 1
            return torch.tanh(self.linear(x)) * self.count.clone()
        if self.how == "grows":
            if len(x) > self.size:
                self.size, self.rows = len(x), torch.arange(len(x)).double()[:, None].cos()
                self.table = self.rows.sin()
            return torch.tanh(self.linear(x) * self.rows[: len(x)] + self.table[: len(x)])
        if self.how == "remembers":
            u = torch.tanh(self.linear(x)) * self.scale
            self.scale = 0.5 * self.scale + u.detach().mean(0)
            return u
        return torch.tanh(self.linear(x) * self.scale)


@every_memory
@pytest.mark.parametrize("how", ["counts", "counts in place", "grows", "remembers"])
def test_attributes_that_a_branch_changes_are_changed_once_and_replayed(memory: str, how: str) -> None:
    def scenario(model: Any) -> Any:
        seen = []
        for length in (3, 5, 2, 5):
            x, z = sample(length, 6), sample(length, 6, seed=2)
            loss_of(model(x) * model(z)).backward()
            seen += [x.grad, z.grad]
        branches = [m for m in model.modules() if isinstance(m, Attributes)]
        return seen, [(b.runs, round(b.factor, 9), b.count, b.scale) for b in branches]

    agree(*twins(lambda: Attributes(how), memory=memory), scenario)


@every_memory
def test_an_attribute_that_is_set_for_each_call_is_that_of_its_call_in_the_replay(memory: str) -> None:
    def scenario(model: Any) -> Any:
        x, outputs = sample(4, 6), []
        for factor in (1.0, 3.0):
            for branch in model.modules():
                if isinstance(branch, Attributes):
                    branch.scale = torch.full((6,), factor).double()
            outputs.append(model(x))
        loss_of(outputs[0] * outputs[1]).backward()
        return x.grad

    agree(*twins(lambda: Attributes("reads"), memory=memory), scenario)


@every_memory
def test_a_global_tensor_that_is_exchanged_between_calls_is_that_of_its_call(memory: str) -> None:
    class Reading(Mlp):
        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x * TABLE)

    def scenario(model: Any) -> Any:
        global TABLE
        x, outputs = sample(4, 6), []
        for factor in (1.0, 3.0):
            TABLE = torch.full((6,), factor).double()
            outputs.append(model(x))
        loss_of(outputs[0] * outputs[1]).backward()
        return x.grad

    agree(*twins(Reading, memory=memory), scenario)


def test_a_tensor_in_an_attribute_that_is_edited_before_the_backward_is_an_error() -> None:
    for edited in ("scale", "TABLE"):

        class Reading(Mlp):
            def __init__(self) -> None:
                super().__init__()
                self.scale = torch.ones(6).double()

            def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
                return super().forward(x * TABLE * self.scale)

        stack, _ = twins(Reading)
        y = stack(sample(4, 6))
        (TABLE if edited == "TABLE" else stack[1].steps[0].branch.scale).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss_of(y).backward()


def test_layers_in_a_list_that_a_branch_only_has_are_not_its_own() -> None:
    """A branch may have all layers in a list, to reach one of them: others may be edited before it is replayed."""

    class Having(nn.Module):
        def __init__(self, layers: list[nn.Module], i: int) -> None:
            super().__init__()
            self.mine, self.layers = layers[i], layers

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.mine(x))

    layers: list[nn.Module] = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)).double() for _ in range(6)]
    pairs = [(Having(layers, i), Having(layers, i + 1)) for i in (0, 2, 4)]
    stack = rg.ReversibleSequence([rg.two_stream(f, g) for f, g in pairs])
    rg.FusedOptimizer(torch.optim.SGD, stack.parameters(), lr=0.1)
    for _ in range(3):
        loss_of(stack(sample(4, 6))).backward()


class Box:
    def __init__(self, value: Any) -> None:
        self.value = value


class ReadsContext(Mlp):
    """Reads a context that is no tensor, and may change it."""

    changes = False

    def forward(self, x: Tensor, box: Any) -> Tensor:  # type: ignore[override]
        held = vars(box) if isinstance(box, Box) else box
        key = 0 if isinstance(held, list) else "value"
        if self.changes:
            held[key] = held[key] + 1
        return super().forward(x * held[key])


class ChangesContext(ReadsContext):
    changes = True


BOXES = {
    "object": lambda value: Box(value),
    "dictionary": lambda value: {"value": value},
    "list": lambda value: [value],
}


def inside(box: Any) -> Any:
    return box.value if isinstance(box, Box) else box[0] if isinstance(box, list) else box["value"]


@every_memory
@pytest.mark.parametrize("kind", BOXES)
@pytest.mark.parametrize("value", [1.0, torch.ones(6).double()], ids=["number", "tensor"])
def test_context_that_blocks_change_is_replayed_as_each_block_got_it(memory: str, kind: str, value: Any) -> None:
    def scenario(model: Any) -> Any:
        x, box = sample(4, 6), BOXES[kind](value)
        y = model(x, box=box)
        loss_of(y).backward()
        return y, x.grad, inside(box)

    agree(*twins(ChangesContext, memory=memory), scenario)


@every_memory
@pytest.mark.parametrize("kind", BOXES)
def test_context_that_is_changed_before_the_backward_is_replayed_as_it_was(memory: str, kind: str) -> None:
    def scenario(model: Any) -> Any:
        x, box = sample(4, 6), BOXES[kind](torch.ones(6).double())
        y = model(x, box=box)
        if isinstance(box, Box):
            box.value = 5.0
        else:
            box[0 if isinstance(box, list) else "value"] = 5.0
        loss_of(y).backward()
        return y, x.grad, inside(box)

    agree(*twins(ReadsContext, memory=memory), scenario)


def test_outputs_that_are_collected_in_the_context_keep_no_memory() -> None:
    """A list that holds tensors with their graph must not become part of a cycle with it."""
    from torch.multiprocessing.reductions import StorageWeakRef

    class Collecting(Mlp):
        def forward(self, x: Tensor, outputs: list[Tensor]) -> Tensor:  # type: ignore[override]
            u = super().forward(x)
            outputs.append(u)
            return u

    for goes_backward in (True, False):
        stack, _ = twins(Collecting)
        outputs: list[Tensor] = []
        loss = loss_of(stack(sample(4, 6), outputs=outputs))
        if goes_backward:
            loss.backward()
        assert len(outputs) == 6, "replays have lists of their own"
        refs = [StorageWeakRef(u.untyped_storage()) for u in outputs]
        del outputs, loss
        assert all(ref.expired() for ref in refs)


def test_offsets_of_jagged_tensors_may_be_context() -> None:
    class Jagged(Mlp):
        def forward(self, x: Tensor, offsets: Tensor) -> Tensor:  # type: ignore[override]
            rows = torch.nested.nested_tensor_from_jagged(super().forward(x), offsets=offsets)
            return (torch.tanh(rows) * rows).values()

    for memory in ("checkpoint", "reverse", "selective"):
        seen = []
        for mode in (memory, "store"):
            stack, _ = twins(Jagged)
            x = sample(4, 6)
            loss_of(stack(x, offsets=torch.tensor([0, 1, 4]), memory=mode)).backward()
            seen.append(x.grad)
        all_close(seen[:1], seen[1:])


@every_memory
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("around", ["forward", "both", "backward"])
def test_cached_parametrizations_are_cached_in_replays_as_they_were(memory: str, ties: bool, around: str) -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = parametrizations.spectral_norm(nn.Linear(6, 6).double())

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(self.linear(torch.tanh(self.linear(x))))

    def scenario(model: Any) -> Any:
        seen = []
        for step in range(2):
            x = sample(4, 6, seed=step)
            with parametrize.cached() if around != "backward" else warnings.catch_warnings():
                loss = loss_of(model(x))
                if around == "both":
                    loss.backward()
            with parametrize.cached() if around == "backward" else warnings.catch_warnings():
                if around != "both":
                    loss.backward()
            seen += [x.grad, loss]
        return seen, [p.grad for p in model.parameters()], list(model.buffers())

    seen = []
    for mode in (memory, "plain"):  # built twice: torch's cache takes a copy of a module for the module
        torch.manual_seed(0)
        each = [Normed() for _ in range(6)]
        pairs: list[Any] = [(each[0], each[0])] * 3 if ties else [(each[i], each[i + 1]) for i in (0, 2, 4)]
        blocks = [rg.two_stream(f, g) for f, g in pairs]
        model = Plain(pairs) if mode == "plain" else rg.ReversibleSequence(blocks, memory=memory_of(memory, 3))
        flat, _ = torch.utils._pytree.tree_flatten(scenario(model))
        seen.append(flat)
    all_close(*seen)


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6).double(), nn.BatchNorm1d(6).double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(x)))


@pytest.mark.parametrize("where", ["branch", "inside", "function"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_torchscript_is_refused_in_a_sentence_but_where_activations_are_stored(where: str) -> None:
    def build() -> Any:
        if where == "function":
            return torch.jit.script(_squared)
        scripted = torch.jit.script(Scripted())
        return scripted if where == "branch" else nn.Sequential(scripted)

    torch.manual_seed(0)
    stack, _ = twins_of([(Mlp(), Mlp())] * 3)
    stack = rg.ReversibleSequence([rg.two_stream(build(), Mlp()), *stack], memory=["store", *["reverse"] * 3])
    loss_of(stack(sample(4, 6))).backward()
    for memory in ("reverse", "checkpoint"):
        with pytest.raises(ValueError, match=r"Block 0: .* of torch.jit, whose buffers a replay .*memory='store'"):
            stack(sample(4, 6), memory=memory)


def _squared(x: Tensor) -> Tensor:
    return (x * x).sin()


@pytest.mark.parametrize("memory", ["checkpoint", "reverse", "anchored", "selective"])
def test_a_hook_of_a_block_may_run_a_backward_pass(memory: str) -> None:
    """As feature losses do that are differentiated at once."""
    stack, reference = twins(memory=memory)
    x, seen = sample(4, 6), []

    def differentiate(block: Any, given: Any, returned: Any) -> None:
        if not rg.is_replaying():
            seen.append(torch.autograd.grad(loss_of(returned[0][0]), x, retain_graph=True)[0])

    for block in stack:
        block.register_forward_hook(differentiate)
    loss_of(stack(x)).backward()
    z = sample(4, 6)
    states = reference.run(z, hidden=[0, 1, 2]).hidden
    expected = [torch.autograd.grad(loss_of(states[i][0]), z, retain_graph=True)[0] for i in range(3)]
    all_close(seen, expected)
    loss_of(reference(z)).backward()
    all_close([x.grad], [z.grad])


def test_an_error_of_a_blocks_hook_in_a_replay_says_that_it_ran_in_a_replay() -> None:
    stack, _ = twins()
    stack[1].register_forward_hook(lambda block, given, returned: returned[0][0].sum().backward(retain_graph=True))
    with pytest.raises(RuntimeError, match="does not require grad") as raised:
        loss_of(stack(sample(4, 6))).backward()
    notes = "".join(getattr(raised.value, "__notes__", [])) or str(raised.value)
    assert "raised by a hook of block 1 when the block was replayed" in notes


@every_memory
@pytest.mark.parametrize("ends", ["in RReLU", "before it"])
def test_a_branch_with_rrelu_is_replayed_with_its_noise_in_every_call(memory: str, ends: str) -> None:
    """Its operator fills a tensor that autograd has saved already: a replay that stopped there would leave it empty."""

    def build() -> nn.Module:
        layers = [nn.Linear(6, 6), nn.RReLU(), *([] if ends == "in RReLU" else [nn.Linear(6, 6)])]
        return nn.Sequential(*layers).double()

    agree(*twins(build, memory=memory), lambda model: train(model, 4))


class ReusedNoise(nn.Module):
    """Ends in RReLU with its own seed, on memory in which an allocator may have left anything, or its last noise.

    The state of torch's generator is the same before and after it.
    """

    def __init__(self, left: Callable[[nn.Module], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()
        self.left = left

    def forward(self, x: Tensor) -> Tensor:
        h, noise = self.linear(x), self.left(self)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(3)
            update: Tensor = torch.ops.aten.rrelu_with_noise(h, noise, 0.1, 0.9, True)
        self.last = noise.numpy()
        return update


@pytest.mark.parametrize("memory", ["checkpoint", "selective"])
def test_a_replay_does_not_stop_before_a_tensor_is_filled_whatever_memory_held_before(memory: str) -> None:
    """Once, memory that happens to hold the right noise made an operator look as if it left what it saved alone."""
    has_last = [False]

    def left(branch: nn.Module) -> Tensor:
        return torch.from_numpy(branch.last.copy()) if has_last else torch.full((4, 6), 7.0).double()

    def scenario(model: nn.Module) -> list[Any]:
        seen = []
        for reused in (False, True, True, False, False):
            has_last[:] = [True] if reused else []
            x = sample(4, 6)
            loss_of(model(x)).backward()
            seen.append(x.grad)
        return seen

    agree(*twins(lambda: ReusedNoise(left), memory=memory), scenario)


STOPS = {
    "a product": lambda: [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)],
    "a product after dropout": lambda: [nn.Linear(6, 6), nn.Tanh(), nn.Dropout(), nn.Linear(6, 6)],
    "a product without bias": lambda: [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6, bias=False)],
    "a frozen product": lambda: [nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6).requires_grad_(False)],
    "a convolution": lambda: [nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 2, 1), nn.Flatten()],
    "a frozen convolution": lambda: [nn.Unflatten(1, (2, 3)), nn.Conv1d(2, 2, 1).requires_grad_(False), nn.Flatten()],
}


@pytest.mark.parametrize("last", STOPS)
def test_a_replay_from_the_second_call_on_skips_the_last_product_of_a_block(last: str) -> None:
    stack, plain = twins(lambda: nn.Sequential(*STOPS[last]()).double(), depth=2, memory="checkpoint")
    runs: list[bool] = []
    layers = [m for m in stack[0].steps[1].branch if isinstance(m, nn.Linear | nn.Conv1d)]
    layers[-1].register_forward_hook(lambda *_: runs.append(rg.is_replaying()))
    agree(stack, plain, lambda model: train(model, 3))
    assert runs == [False, True, False, False]  # only the first replay runs to its end


class Counting(nn.Module):
    """Adds a buffer that it counts up once `is_counting` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(1, dtype=torch.float64))
        self.is_counting, self.exchanges = False, False

    def forward(self, x: Tensor) -> Tensor:
        if self.is_counting and self.exchanges:
            self.count = self.count + 1
        elif self.is_counting:
            self.count += 1
        return x + self.count


class HoldsInAList(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.linear, self.drop, self.parts = nn.Linear(6, 6).double(), nn.Dropout(0.0), [part]

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.parts[0](self.drop(self.linear(x))))


def _counted(memory: str, *, exchanges: bool) -> tuple[list[Any], list[float]]:
    torch.manual_seed(0)
    parts = [Counting() for _ in range(6)]
    blocks = [rg.two_stream(*map(HoldsInAList, parts[i : i + 2])) for i in (0, 2, 4)]
    stack, x = rg.ReversibleSequence(blocks, memory=memory), torch.linspace(-1, 1, 24).double().view(4, 6)
    for call in range(6):
        for part in parts:
            part.is_counting, part.exchanges = call >= 3, exchanges
        stack.zero_grad()
        stack(x).pow(2).sum().backward()
    return [p.grad for p in stack.parameters()], [part.count.item() for part in parts]


@pytest.mark.parametrize("exchanges", [False, True])
@pytest.mark.parametrize("memory", ["checkpoint", "reverse"])
def test_a_buffer_of_an_unregistered_module_may_begin_to_change_after_some_calls(memory: str, exchanges: bool) -> None:
    gradients, counts = _counted(memory, exchanges=exchanges)
    expected, expected_counts = _counted("store", exchanges=exchanges)
    assert counts == expected_counts == [4.0] * 6
    for ours, theirs in zip(gradients, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("memory", ["checkpoint", "reverse"])
def test_dropout_may_be_turned_on_beside_an_unregistered_module_with_buffers(memory: str) -> None:
    def trained(memory: str) -> list[Any]:
        torch.manual_seed(0)
        shared = Counting()
        blocks = [rg.two_stream(HoldsInAList(shared), HoldsInAList(shared)) for _ in range(3)]
        stack, x = rg.ReversibleSequence(blocks, memory=memory), torch.linspace(-1, 1, 24).double().view(4, 6)
        for call in range(6):
            for part in stack.modules():
                if isinstance(part, nn.Dropout):
                    part.p = 0.5 if call >= 3 else 0.0
            stack.zero_grad()
            torch.manual_seed(call)
            stack(x).pow(2).sum().backward()
        return [p.grad for p in stack.parameters()]

    for ours, theirs in zip(trained(memory), trained("store"), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)

"""A branch may change its buffers: each is updated once a step, and the replay sees what the first run saw."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import retrograde as rg
from retrograde.engine.preserve import preserve
from stacks import (
    MEMORIES,
    Means,
    Plain,
    agree,
    all_close,
    loss_of,
    memory_of,
    sample,
    train,
    twins,
)

every_memory = pytest.mark.parametrize("memory", MEMORIES)


class Normed(nn.Module):
    """Batch normalisation inside a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6, bias=False).double(), nn.BatchNorm1d(6).double()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.norm(self.linear(x)))


@every_memory
def test_batch_norm_counts_each_step_once_and_keeps_plain_statistics(memory: str) -> None:
    stack, reference = twins(Normed, memory=memory)
    agree(stack, reference, train)
    assert {int(m.num_batches_tracked) for m in stack.modules() if isinstance(m, nn.BatchNorm1d)} == {3}


@every_memory
def test_batch_norm_in_eval_mode_and_back_is_that_of_plain_autograd(memory: str) -> None:
    def scenario(model: Any) -> Any:
        seen = train(model, 1)
        seen += train(model.eval(), 2)
        return seen + train(model.train(), 2)

    agree(*twins(Normed, memory=memory), scenario)


@every_memory
def test_batch_norm_whose_momentum_is_raised_later_updates_once_a_step(memory: str) -> None:
    """At momentum 0 its statistics were seen to stay as they are, and torch does not count this edit as one."""

    def scenario(model: Any) -> Any:
        seen = []
        for momentum in (0.0, 0.0, 0.3, 0.3, None):
            for m in model.modules():
                if isinstance(m, nn.BatchNorm1d):
                    m.momentum = momentum
            seen += train(model, 1)
        return seen

    agree(*twins(Normed, memory=memory), scenario)


@every_memory
def test_two_calls_before_the_backward_update_batch_norm_twice(memory: str) -> None:
    def scenario(model: Any) -> Any:
        x, z = sample(4, 6), sample(4, 6, seed=2)
        y = model(x) * model(z)
        loss_of(y).backward()
        return y, x.grad, z.grad

    agree(*twins(Normed, memory=memory), scenario)


HOW = ("edit", "reassign", "edit through .data", "batch_norm")  # the last two raise no version counter


@every_memory
@pytest.mark.parametrize("how", HOW)
def test_a_buffer_changed_and_used_in_one_forward_is_replayed_from_its_old_value(memory: str, how: str) -> None:
    def build() -> Means:
        branch = Means()
        branch.how = how
        return branch

    agree(*twins(build, memory=memory), train)


@every_memory
@pytest.mark.parametrize("how", HOW)
def test_a_buffer_that_starts_to_change_at_the_third_call_is_replayed(memory: str, how: str) -> None:
    def scenario(model: Any) -> Any:
        branches = [m for m in model.modules() if isinstance(m, Means)]
        seen = []
        for step in range(5):
            for branch in branches:
                branch.how = how if step in (2, 4) else "leave"
            seen += train(model, 1)
        return seen

    agree(*twins(Means, memory=memory), scenario)


@every_memory
def test_a_buffer_that_starts_to_change_in_a_midpoint_block_is_replayed(memory: str) -> None:
    """The block reorders its streams, and the step cannot be run again: its tensors stay."""
    found = []
    for build in ("retrograde", "plain"):
        torch.manual_seed(0)
        branches = [Means() for _ in range(4)]
        stack = rg.ReversibleSequence([rg.midpoint(f) for f in branches], merge=None, memory=memory_of(memory, 4))
        seen = []
        for how in ("leave", "leave", "edit", "edit"):
            for branch in branches:
                branch.how = how
            x, z = sample(4, 6), sample(4, 6, seed=2)
            a, b = x, z
            if build == "retrograde":
                a, b = stack((x, z))
            else:
                for f in branches:
                    a, b = b, a + 2 * f(b)
            loss_of(a - 2 * b).backward()
            seen += [a, b, x.grad, z.grad]
        found.append(seen + [p.grad for f in branches for p in f.parameters()] + [f.means for f in branches])
    all_close(*found)


@every_memory
def test_a_buffer_that_two_modules_of_a_branch_share_stays_shared_in_the_replay(memory: str) -> None:
    class Reader(nn.Module):
        def __init__(self, means: Tensor) -> None:
            super().__init__()
            self.register_buffer("means", means)

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.means).sin()

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.writer = Means()
            self.reader = Reader(self.writer.means)

        def forward(self, x: Tensor) -> Tensor:
            return self.writer(x) + self.reader(x)

    agree(*twins(Shared, memory=memory), train)


@every_memory
def test_a_buffer_that_is_none_until_the_first_forward_is_replayed(memory: str) -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 6).double()
            self.register_buffer("centre", None)

        def forward(self, x: Tensor) -> Tensor:
            if self.centre is None:
                self.centre = x.detach().mean(0)
                return self.linear(x)
            return torch.tanh(self.linear(x - self.centre))

    agree(*twins(Lazy, memory=memory), train)


@every_memory
def test_a_parameter_that_the_first_forward_initialises_from_its_data_trains(memory: str) -> None:
    """As the activation normalisation of flows does."""

    class Initialised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(6).double())
            self.register_buffer("ready", torch.tensor(False))

        def forward(self, x: Tensor) -> Tensor:
            if not self.ready:
                with torch.no_grad():
                    self.scale.copy_(1 / (x.std(0) + 0.1))
                    self.ready.fill_(True)
            return (x * self.scale).sin()

    agree(*twins(Initialised, memory=memory), train)


@every_memory
@pytest.mark.parametrize("norm", ["spectral_norm", "weight_norm", "orthogonal"])
def test_parametrizations_are_those_of_plain_autograd(memory: str, norm: str) -> None:
    def build() -> nn.Module:
        return nn.Sequential(getattr(parametrizations, norm)(nn.Linear(6, 6).double()), nn.Tanh())

    def scenario(model: Any) -> Any:
        return train(model) + train(model.eval(), 1) + train(model.train(), 1)

    agree(*twins(build, memory=memory), scenario)


class Drop(nn.Module):
    """A parametrization that draws: weight drop."""

    def forward(self, weight: Tensor) -> Tensor:
        return nn.functional.dropout(weight, 0.5, self.training)


class Recurrent(nn.Module):
    """A recurrent layer whose weight is parametrized: it is computed anew whenever the layer's attribute is read."""

    def __init__(self, how: str, kind: type[nn.RNNBase] = nn.GRU) -> None:
        super().__init__()
        self.over = kind(6, 6, batch_first=True).double()
        if how == "spectral norm":
            parametrizations.spectral_norm(self.over, "weight_hh_l0")
        else:
            parametrize.register_parametrization(self.over, "weight_hh_l0", Drop())

    def forward(self, x: Tensor) -> Tensor:
        return self.over(x[None])[0][0]


@every_memory
@pytest.mark.parametrize("how", ["spectral norm", "weight drop"])
def test_a_recurrent_layer_with_a_parametrized_weight_computes_it_as_often_as_in_plain_autograd(
    memory: str, how: str
) -> None:
    def scenario(model: Any) -> Any:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        seen = []
        for _ in range(4):
            seen += train(model, 1)
            optimizer.step()
        return seen, list(model.parameters())

    models = []
    for mode in (memory, "plain"):  # built twice: such a layer cannot be copied
        torch.manual_seed(0)
        pairs = [(Recurrent(how), Recurrent(how)) for _ in range(3)]
        blocks = [rg.two_stream(f, g) for f, g in pairs]
        models.append(Plain(pairs) if mode == "plain" else rg.ReversibleSequence(blocks, memory=memory_of(memory, 3)))
    agree(*models, scenario)


class Viewed(nn.Module):
    """Edits a buffer that is a view of another, or the other way round, and uses the one that it did not edit."""

    def __init__(self, edits: str) -> None:
        super().__init__()
        self.linear, self.edits = nn.Linear(6, 6).double(), edits
        self.register_buffer("whole", torch.ones(2, 6).double())
        self.register_buffer("row", self.whole[1])
        self.register_buffer("flat", self.whole.data.view(12))  # shares no version counter

    def __deepcopy__(self, memo: Any) -> Viewed:
        twin = Viewed(self.edits)  # copied by itself, a view would become a tensor of its own
        twin.load_state_dict(self.state_dict())
        return twin

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            edited = getattr(self, self.edits)
            edited.mul_(0.5).add_(x.mean())
        return torch.tanh(self.linear(x) * self.whole[1] + self.row + self.flat[:6])


@every_memory
@pytest.mark.parametrize("edits", ["whole", "row", "flat"])
def test_buffers_that_are_views_of_each_other_stay_so_in_the_replay(memory: str, edits: str) -> None:
    agree(*twins(lambda: Viewed(edits), memory=memory), train)


class SparseMixer(nn.Module):
    """Multiplies by a sparse buffer, which it edits in training."""

    def __init__(self, layout: str) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6).double()
        matrix = torch.eye(5).double() + torch.diag(torch.ones(4), 1).double()
        self.register_buffer("matrix", getattr(matrix, f"to_sparse_{layout}")())

    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.matrix.layout == torch.sparse_coo:
            self.matrix.mul_(0.9)
        matrix = self.matrix.to_sparse_csr() if self.matrix.layout == torch.sparse_csc else self.matrix
        return torch.tanh(matrix @ self.linear(x))


@every_memory
@pytest.mark.parametrize("layout", ["coo", "csr", "csc"])
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning")
def test_sparse_buffers_are_those_of_plain_autograd(memory: str, layout: str) -> None:
    torch.manual_seed(0)
    branches = [SparseMixer(layout) for _ in range(6)]
    stack = rg.ReversibleSequence([rg.two_stream(*branches[i : i + 2]) for i in (0, 2, 4)], memory=memory_of(memory, 3))
    others = [SparseMixer(layout) for _ in range(6)]
    for other, branch in zip(others, branches, strict=True):
        other.linear.load_state_dict(branch.linear.state_dict())
    reference = Plain([(others[i], others[i + 1]) for i in (0, 2, 4)])
    all_close(train(stack), train(reference))
    pairs = list(zip(stack.buffers(), reference.buffers(), strict=True))
    all_close([ours.to_dense() for ours, _ in pairs], [theirs.to_dense() for _, theirs in pairs])
    with preserve(stack):  # as the doctor does
        train(stack, 1)
    all_close([ours.to_dense() for ours, _ in pairs], [theirs.to_dense() for _, theirs in pairs])


@every_memory
def test_lazy_modules_are_initialised_by_their_first_run_and_train(memory: str) -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.LazyLinear(6, bias=False, dtype=torch.float64), nn.LazyBatchNorm1d()

        def forward(self, x: Tensor) -> Tensor:
            self.norm.double()
            return torch.tanh(self.norm(self.linear(x)))

    seen = []
    for mode in (memory, "store"):
        torch.manual_seed(0)
        stack = rg.ReversibleSequence([rg.two_stream(Lazy(), Lazy()) for _ in range(3)], memory=memory_of(mode, 3))
        seen.append([*train(stack), *(p.grad for p in stack.parameters()), *stack.buffers()])
    all_close(*seen)

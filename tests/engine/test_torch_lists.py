"""Every differentiable operator and every module of torch's own lists is, as a branch, what it is in plain autograd.

`make test` draws some by a seed; `make test-torch-lists` runs all of them, and checks the table below.
"""

from __future__ import annotations

import os
import random

import pytest

import torch_lists

pytest.importorskip("expecttest", reason="torch's lists need it")

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own samples

RUNS_ALL = os.environ.get("TORCH_LISTS") == "all"
SAMPLES = int(os.environ.get("TORCH_LISTS_SAMPLES", "2"))  # of each operator or module
SEED = int(os.environ.get("TORCH_LISTS_SEED", "16"))

# What is left out, and why. Operators that are not differentiable in float64 on the CPU are in no list here: there is
# nothing to replay. The others are left out because plain autograd itself gives no gradient to compare with.
LEFT_OUT = {
    "__rpow__": "not finite",  # 0 to a power that requires a gradient
    "acosh": "the derivative for 'inplace version of acosh' is not implemented",
    "as_strided.partial_views": "out of bounds for storage",  # it reads its input's storage
    "asinh": "the derivative for 'inplace version of asinh' is not implemented",
    "atanh": "the derivative for 'inplace version of atanh' is not implemented",
    "linalg.eig": "specified up to multiplication by",  # its eigenvectors are not unique, and torch refuses
    "masked.amax": "not finite",  # rows that are masked as a whole
    "masked.amin": "not finite",
    "masked.log_softmax": "not finite",
    "masked.logaddexp": "not finite",
    "masked.logsumexp": "not finite",
    "masked.mean": "not finite",
    "masked.median": "not finite",
    "masked.softmax": "not finite",
    "masked.softmin": "not finite",
    "nn.KLDivLoss": "not finite",  # the logarithm of a target that is 0
    "nn.LPPool1d": "not finite",  # the root of 0
    "nn.LPPool2d": "not finite",
    "nn.LPPool3d": "not finite",
    "sgn": "ZeroTensors are immutable",  # of an operator that torch has no gradient for but 0
    "torch.ops.aten._safe_softmax.default": "not finite",
}


def wrong_in(name: str, cases: list[torch_lists.Case]) -> tuple[list[str], bool]:
    """What is wrong with an operator or module; and whether its line in the table was needed."""
    wrong, was_needed = [], False
    for case, make in cases:
        what = torch_lists.check(make)
        if what is not None and what.startswith("plain autograd") and LEFT_OUT.get(name, "\0") in what:
            was_needed = True
        elif what is not None:
            wrong.append(f"{case}: {what}")
    return wrong, was_needed


@pytest.mark.skipif(RUNS_ALL, reason="all of them are run")
@pytest.mark.parametrize("kind", ["operators", "modules"])
def test_operators_and_modules_drawn_by_a_seed_are_those_of_plain_autograd(kind: str) -> None:
    groups = list(getattr(torch_lists, kind)(limit=1))
    drawn = random.Random(SEED).sample(groups, {"operators": 30, "modules": 12}[kind])
    always = [group for group in groups if group[0] in ("nn.functional.rrelu", "nn.RReLU")]  # once silently wrong
    wrong = [line for name, cases in [*drawn, *always] for line in wrong_in(name, list(cases))[0]]
    assert not wrong, "\n".join(wrong)


@pytest.mark.skipif(not RUNS_ALL, reason="a quarter of an hour: make test-torch-lists")
@pytest.mark.timeout(0)
def test_all_operators_and_modules_are_those_of_plain_autograd_but_for_the_table() -> None:
    wrong, needed, count = [], set(), 0
    for name, cases in [*torch_lists.operators(SAMPLES), *torch_lists.modules(SAMPLES)]:
        each = list(cases)
        count += len(each)
        lines, was_needed = wrong_in(name, each)
        wrong += lines
        needed |= {name} if was_needed else set()
    assert not wrong, f"{len(wrong)} of {count} cases:\n" + "\n".join(wrong)
    assert needed == set(LEFT_OUT), f"lines of the table that are not needed: {sorted(set(LEFT_OUT) - needed)}"

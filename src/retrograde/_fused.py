"""The fused optimiser: each parameter is stepped as soon as its gradient is complete, and the gradient is freed.

NOTE [When a parameter is stepped]
 1. Autograd adds up what a parameter gets from all its uses in one backward pass, tied weights and context included,
    and then runs the parameter's hooks, once. The step is taken there. Every node that has a gradient for
    the parameter has run by then, so that no replay of a tape needs its old value any more.
 2. The exception is a use without a gradient (`weight.detach()`, a shared module that a branch holds and does not
    use) in an earlier block. The tape, and autograd where it saved the value, raise there: the weight was edited.
 3. From the first step of a backward pass to the call of `step()` is one round. A parameter is stepped once a round,
    and what would need the gradients of a round together, or twice, is refused.
 4. What stays in `parameter.grad` is a `SpentGradient`, which has no values: whoever reads it, or adds to it, gets an
    error that says why, where None would be skipped in silence. `step()` takes it away.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_

from ._torch_private import keeps_graph, version


class SpentGradient(Tensor):
    """What a fused optimiser leaves in the place of a gradient that it has used. It has a shape and no values."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise RuntimeError(
            f"{func} needs a gradient that is gone: a FusedOptimizer stepped the parameter as soon as its gradient was "
            "complete, and freed it. Call optimizer.step() after every backward pass; several of them cannot be added "
            "up. Clip with the optimiser's clip_value or clip_norm, not after the backward pass. To look at gradients, "
            "use parameter.register_hook. DistributedDataParallel and GradScaler need all gradients at once: with them "
            "use an ordinary optimiser."
        )

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SpentGradient(shape={tuple(self.shape)})"


class FusedOptimizer(torch.optim.Optimizer):
    """An optimiser that steps each parameter during the backward pass, so that no two gradients need be alive.

    The arithmetic, the state and its `state_dict` are those of the optimiser it is made of, to the bit. The training
    loop stays as it is: `zero_grad()`, `backward()`, `step()`, where `step()` ends the round. Learning rates and other
    options are read during the backward pass, so set them before it; a scheduler stepped after `step()` does.

    Args:
        kind: the optimiser's class, such as `torch.optim.AdamW`. Its step of one parameter must not depend on others.
        params: parameters, named parameters or parameter groups, as for any optimiser.
        clip_value: clip each gradient's entries to this, as `torch.nn.utils.clip_grad_value_` does.
        clip_norm: clip the norm of all gradients to this, as `torch.nn.utils.clip_grad_norm_` does. It is known
            only after a backward pass, so each step needs one more, in `norm_pass()`.
        options: what `kind` takes.

    Examples:
        >>> import torch, retrograde as rg
        >>> from retrograde._fused import FusedOptimizer
        >>> stack = rg.ReversibleSequence([rg.two_stream(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))])
        >>> optimizer = FusedOptimizer(torch.optim.AdamW, stack.parameters(), lr=1e-3, clip_value=1.0)
        >>> stack(torch.randn(2, 8)).square().mean().backward()
        >>> next(stack.parameters()).grad
        SpentGradient(shape=(8, 8))
        >>> optimizer.step()
    """

    norm: Tensor | None = None
    """The norm of all gradients that the last `norm_pass()` found, before clipping."""

    def __init__(
        self,
        kind: type[torch.optim.Optimizer],
        params: Iterable[Any],
        *,
        clip_value: float | None = None,
        clip_norm: float | None = None,
        **options: Any,
    ) -> None:
        _check_kind(kind, options)
        _check_clipping(clip_value, clip_norm)
        self._inner = kind(params, **options)
        self._handles: dict[Tensor, Any] = {}
        self._group_of: dict[Tensor, int] = {}
        self._stepped: set[Tensor] = set()
        self._seen: list[dict[str, Any]] = []
        self._norms: dict[Tensor, Tensor] | None = None
        self._scale_known = False
        self._detached = False
        self._is_made = False
        self._lock = threading.RLock()
        self.clip_value = clip_value
        self.clip_norm = clip_norm
        super().__init__(self._inner.param_groups, self._inner.defaults)
        self.state, self._is_made = self._inner.state, True
        weakref.finalize(self, _remove, self._handles).atexit = False
        self._attach()

    # What an ordinary training loop calls

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """End the round: step the parameters whose gradient came in another way than by `backward`, if any."""
        if closure is not None:
            raise ValueError(
                "A FusedOptimizer takes no closure: its parameters are stepped during the backward pass that the "
                "closure would run. Call the closure's code, then step()."
            )
        self._check_options_unchanged()
        left = [p for p in self._parameters() if p.grad is not None and not isinstance(p.grad, SpentGradient)]
        for p in left:
            if p in self._stepped:
                raise _twice(self._name(p))
        if left and self.clip_norm is not None and not self._scale_known:
            self.norm, self._scale_known = _norm([_norm_of(p) for p in left]), True
        for p in left:
            self._step_one(p)
        self._end_round()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients; there are none, unless they came in another way than by `backward`."""
        if self._stepped:
            raise RuntimeError(
                f"zero_grad() would discard gradients that are used up: {len(self._stepped)} parameters were stepped "
                "since step() was last called. Call step() after each backward pass; if a loss is not meant to train "
                "these parameters, let requires_grad be False for them meanwhile; if the pass failed half-way, load a "
                "state_dict, or call step() to go on from here."
            )
        for p in self._parameters():
            p.grad = None
        self._end_round()

    def state_dict(self) -> dict[str, Any]:
        """The state of the ordinary optimiser, which can load it, and the other way round."""
        return self._lend(self.param_groups).state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the state of this or of an ordinary optimiser, and begin a new round."""
        self._lend(self.param_groups).load_state_dict(state_dict)
        self.state, self.param_groups = self._inner.state, self._inner.param_groups
        self._end_round()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, which are fused too."""
        if self._is_made:
            self._lend(self.param_groups).add_param_group(param_group)
            self._attach()
        else:  # the ordinary optimiser has made the group
            self.param_groups.append(param_group)

    # What is new

    @contextmanager
    def norm_pass(self) -> Iterator[None]:
        """Measure the norm of all gradients in a first backward pass, which steps nothing; then clip in the second.

        Examples:
            with optimizer.norm_pass():
                loss.backward(retain_graph=True)
            loss.backward()
            optimizer.step()
        """
        if self.clip_norm is None:
            raise ValueError("norm_pass() is for a FusedOptimizer with clip_norm, and this one has none.")
        if self._stepped:
            raise _twice(f"{len(self._stepped)} of them")
        self._attach()
        self._norms = {}
        try:
            yield
            self.norm = _norm([self._norms[p] for p in self._parameters() if p in self._norms])
            self._scale_known = True
        finally:
            self._norms = None

    def detach(self) -> None:
        """Take the hooks off. From then on gradients stay, and `step()` steps all parameters and frees them."""
        self._end_round()
        self._detached = True
        _remove(self._handles)

    # How it works

    def _attach(self) -> None:
        """Hook the parameters that require grad and have no hook yet: new ones, and ones that were frozen before."""
        self._group_of = {p: i for i, group in enumerate(self.param_groups) for p in group["params"]}
        itself = weakref.ref(self)  # a parameter must not hold the optimiser, which holds the parameter

        def arrived(p: Tensor) -> None:
            if (optimizer := itself()) is not None:
                optimizer._arrived(p)

        for p in () if self._detached else self._group_of:
            if p.requires_grad and p not in self._handles:
                self._handles[p] = p.register_post_accumulate_grad_hook(arrived)

    def _arrived(self, p: Tensor) -> None:
        """The gradient of a parameter is complete."""
        with self._lock:
            if self._norms is not None:
                if p in self._norms:
                    raise _twice(self._name(p))
                self._norms[p] = _norm_of(p)
                p.grad = None
                return
            self._check_can_step(p)
            if not self._stepped:
                self._seen = _options(self.param_groups)
            self._stepped.add(p)
            self._step_one(p)
            if type(p.data) is Tensor:
                p.grad = p.detach().as_subclass(SpentGradient)  # of the weight's storage: no bytes of its own

    def _check_can_step(self, p: Tensor) -> None:
        if p in self._stepped:
            p.grad = None
            raise _twice(self._name(p))
        if keeps_graph():
            raise RuntimeError(
                "A FusedOptimizer cannot step parameters in a backward pass with retain_graph=True or "
                "create_graph=True: the graph is kept for another pass, which would find them changed. Add the losses "
                "up and call backward once, or use an ordinary optimiser."
            )
        if self.clip_norm is not None and not self._scale_known:
            raise RuntimeError(
                f"clip_norm={self.clip_norm} needs the norm of all gradients before the first parameter is stepped, "
                "and a FusedOptimizer frees each as soon as it is there. Measure it in a pass of its own: `with "
                "optimizer.norm_pass(): loss.backward(retain_graph=True)`, then `loss.backward()`. That costs one more "
                "backward pass; clip_value costs nothing."
            )

    def _step_one(self, p: Tensor) -> None:
        """Step one parameter with the ordinary optimiser, and free its gradient."""
        if self.clip_value is not None:
            clip_grad_value_([p], self.clip_value)
        if self.clip_norm is not None:
            assert self.norm is not None
            clip_grads_with_norm_([p], self.clip_norm, self.norm)
        group = self.param_groups[self._group_of[p]]
        alone = {**group, "params": [p]}
        self._lend([alone]).step()
        p.grad = None
        written = sorted(key for key in alone if key != "params" and alone[key] is not group.get(key))
        if written:
            raise TypeError(
                f"{type(self._inner).__name__} cannot be fused: its step writes {written} into the parameter group, "
                "where a step of one parameter would count for all. Use it as an ordinary optimiser."
            )

    def _lend(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The ordinary optimiser, with our state and these groups."""
        self._inner.state, self._inner.param_groups = self.state, groups
        return self._inner

    def _check_options_unchanged(self) -> None:
        if not self._stepped:
            return
        for i, (now, then) in enumerate(zip(_options(self.param_groups), self._seen, strict=False)):
            changed = sorted(key for key in now if now[key] != then.get(key))
            if changed:
                raise RuntimeError(
                    f"{changed} of parameter group {i} changed between the backward pass and step(). The parameters "
                    "were stepped during the backward pass, with the old values. Change them before backward, or after "
                    "step(), as schedulers do."
                )

    def _end_round(self) -> None:
        for p in self._parameters():
            if isinstance(p.grad, SpentGradient):
                p.grad = None
        self._stepped.clear()
        self._scale_known = False
        self._attach()

    def _parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _name(self, p: Tensor) -> str:
        group = self.param_groups[self._group_of[p]]
        if "param_names" in group:
            position = next(i for i, other in enumerate(group["params"]) if other is p)
            return f"{group['param_names'][position]!r}"
        return f"one of shape {tuple(p.shape)}"

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """What GradScaler asks first. By then the scaled gradients have been used, so the answer is an error."""
        raise RuntimeError(
            "A FusedOptimizer does not work with GradScaler, which skips the whole step if any gradient overflowed: "
            "here parameters are stepped, with scaled gradients, before that is known. Use bfloat16 autocast, which "
            "needs no scaling, or an ordinary optimiser."
        )

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "A FusedOptimizer cannot be copied or pickled: it is hooked to its parameters. Save its state_dict() and "
            "load it into a new one."
        )

    def __repr__(self) -> str:
        return f"FusedOptimizer of {super().__repr__().replace(type(self).__name__, type(self._inner).__name__, 1)}"


def _check_kind(kind: Any, options: dict[str, Any]) -> None:
    if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        raise TypeError(f"FusedOptimizer takes an optimiser's class first, such as torch.optim.AdamW, not {kind!r}.")
    if issubclass(kind, (torch.optim.LBFGS, FusedOptimizer)):
        raise TypeError(
            f"{kind.__name__} cannot be fused: it must see all gradients at once. Use one that steps each parameter by "
            "its own gradient, such as SGD, Adam or AdamW."
        )
    if options.get("differentiable"):
        raise ValueError("differentiable=True cannot be fused: the gradients of a differentiable step must stay.")


def _check_clipping(clip_value: float | None, clip_norm: float | None) -> None:
    if clip_value is not None and clip_norm is not None:
        raise ValueError(f"clip_value={clip_value} and clip_norm={clip_norm}: choose one way to clip.")
    for name, value in (("clip_value", clip_value), ("clip_norm", clip_norm)):
        if value is not None and not value > 0:
            raise ValueError(f"{name}={value}: give a number above 0, or None not to clip.")


def _twice(which: str) -> RuntimeError:
    return RuntimeError(
        f"A FusedOptimizer got a second gradient for a parameter, {which}, before step() was called, and has stepped "
        "it with the first. Call step() after every backward pass. Gradients of several passes cannot be added up: use "
        "one pass over a larger batch, or an ordinary optimiser. (A weight that two reentrant checkpoints share gets "
        "two gradients in one pass; use_reentrant=False gives it one.)"
    )


def _options(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the groups say besides their parameters, in a form that can be compared later."""
    return [
        {k: (id(v), version(v)) if isinstance(v, Tensor) else v for k, v in group.items() if k != "params"}
        for group in groups
    ]


def _norm_of(p: Tensor) -> Tensor:
    assert p.grad is not None
    norm: Tensor = torch.linalg.vector_norm(p.grad.detach(), 2.0)
    return norm


def _norm(norms: list[Tensor]) -> Tensor:
    """In the order of `clip_grad_norm_`, so that its bits come out."""
    if not norms:
        return torch.zeros(())
    total: Tensor = torch.linalg.vector_norm(torch.stack([norm.to(norms[0].device) for norm in norms]), 2.0)
    return total


def _remove(handles: dict[Tensor, Any]) -> None:
    for handle in handles.values():
        handle.remove()
    handles.clear()

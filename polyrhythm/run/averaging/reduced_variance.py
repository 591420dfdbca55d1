"""AdamW for workers that average weights: its second moment is that of the average of n gradients.

A worker that updates its own weights before they are averaged with those of others sees the noise
of its own gradient g only. Adam divides by the root of the mean of g^2 = mean^2 + variance, though
of the average of n such gradients it would be mean^2 + variance / n: where noise dominates, steps
are up to sqrt(n) times smaller than those of Adam on averaged gradients. Here a second mean of g,
with the second moment's decay b2, separates mean and variance. With m2 and v the running means of
g and g^2 after t steps, both from zero, and m the usual first moment:

    mh = m2 / (1 - b2^t)      vh = v / (1 - b2^t)      v_s = mh^2 + max(vh - mh^2, 0) / n
    step = lr * m / (1 - b1^t) / (sqrt(v_s) + eps)     after weight decay

`num_averaged` is n, the effective number of workers: 1 / sum of w^2 for an average with weights w.
The moments do not depend on it, so it may change. An open GroupSync sets it to the number of
replicas if models are averaged at each step: a group is smaller, but what moves the mean of all
models is the mean of all updates. With 1 this is AdamW, as it must be where the gradients
themselves have been averaged before the step. It is a fact of the sync mode, so it ends with the
GroupSync, and a checkpoint has the value without it.

Accuracy: mh^2 contains some of the noise too, so the expectation of v_s is mean^2 + variance / n
+ S * variance * (1 - 1/n), where S = (1 - b2) (1 + b2^t) / ((1 + b2) (1 - b2^t)) is the sum of the
squared weights in mh. S falls about as 1/t, from 1 (one gradient shows no variance: any n gives the
step of AdamW) to 0.0005 for b2 = 0.999, so early steps err towards AdamW's smaller ones. vh < mh^2
happens by rounding only.

Source: Miao et al., "SDPipe: A Semi-Decentralized Framework for Heterogeneity-aware
Pipeline-parallel Training", PVLDB 16(9), 2023, section 4, "Optimizer Variance Reduction".
Departures: the published code has v_s = (m2^2 + (v - m2^2) / N) / (1 - b2^t), which divides m2^2
once instead of twice: early on the mean is all but lost and steps are up to sqrt(N) times too
large. m2 is at least float32: in bfloat16 it stops far short of a constant gradient. The other
moments have the dtype of their parameter, as in AdamW.
"""

import math
from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from polyrhythm.errors import UserError


class ReducedVarianceAdamW(Optimizer):
    """`torch.optim.AdamW` with the gradient noise of an average over `num_averaged` workers."""

    _num_synced: float | None = None  # of an open GroupSync; not in state_dict

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        num_averaged: float = 1.0,
    ) -> None:
        # In param_groups, which state_dict and pickle keep.
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, options | {"num_averaged": num_averaged})

    @property
    def num_averaged(self) -> float:
        """Effective number of workers in the average of weights after the next step."""
        return self._number_for(self.param_groups[0])

    @num_averaged.setter
    def num_averaged(self, number: float) -> None:
        _check_num_averaged(number)
        self._num_synced = None
        for group in self.param_groups:
            group["num_averaged"] = number

    def set_synced(self, number: float | None) -> None:
        """Use `number` in the place of the groups' `num_averaged`, until it is None again."""
        self._num_synced = number

    def _number_for(self, group: dict[str, Any]) -> float:
        return float(group["num_averaged"] if self._num_synced is None else self._num_synced)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        _check_options(self.defaults | param_group)
        super().add_param_group(param_group)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not all("num_averaged" in group for group in state_dict["param_groups"]):
            raise UserError(
                "the state of an optimizer without num_averaged",
                expected="the state_dict() of a ReducedVarianceAdamW",
                fix="start with fresh moments, or continue with the optimizer that saved them",
            )
        super().load_state_dict(state_dict)
        # It has cast every moment to the dtype of its parameter, which is too coarse for m2.
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        loaded = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, p in zip(saved, loaded, strict=True):
            if moments := state_dict["state"].get(key):
                self.state[p]["slow_avg"] = moments["slow_avg"].to(p.device, _wide(p))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; return the result of `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        trained = [[p for p in g["params"] if p.grad is not None] for g in self.param_groups]
        for p in chain.from_iterable(trained):  # check all before changing any
            _check_gradient(p)
        for group, params in zip(self.param_groups, trained, strict=True):
            if params:
                self._update(params, group)
        return loss

    def _update(self, params: list[Tensor], group: dict[str, Any]) -> None:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        states = [self._moments(p) for p in params]
        gradients = [p.grad for p in params if p.grad is not None]
        averages = [state["exp_avg"] for state in states]
        slow_averages = [state["slow_avg"] for state in states]
        squares = [state["exp_avg_sq"] for state in states]
        for state in states:
            state["step"] += 1
        steps = [state["step"].item() for state in states]

        _scale(params, 1 - lr * group["weight_decay"])
        torch._foreach_lerp_(averages, gradients, 1 - beta1)
        wide_gradients = [g.to(s.dtype) for g, s in zip(gradients, slow_averages, strict=True)]
        torch._foreach_lerp_(slow_averages, wide_gradients, 1 - beta2)
        _scale(squares, beta2)
        torch._foreach_addcmul_(squares, gradients, gradients, 1 - beta2)

        corrections, number = [1 - beta2**t for t in steps], self._number_for(group)
        if number == 1:  # in the order of AdamW, for bit-identical results
            roots = list(torch._foreach_sqrt(squares))
            torch._foreach_div_(roots, [c**0.5 for c in corrections])
        else:
            roots = _second_moments(slow_averages, squares, corrections, number)
            torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_addcdiv_(params, averages, roots, [-lr / (1 - beta1**t) for t in steps])

    def _moments(self, p: Tensor) -> dict[str, Tensor]:
        state = self.state[p]
        if not state:  # named as in AdamW, which can load them
            state["step"] = torch.tensor(0.0, dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, memory_format=torch.preserve_format)
            state["slow_avg"] = torch.zeros_like(state["exp_avg"], dtype=_wide(p))
        return state


def _second_moments(
    slow_averages: list[Tensor], squares: list[Tensor], corrections: list[float], number: float
) -> list[Tensor]:
    """Return the second moments of the average of `number` independent gradients."""
    means = torch._foreach_div(slow_averages, corrections)
    wide_squares = [v.to(mean.dtype) for v, mean in zip(squares, means, strict=True)]
    variances = torch._foreach_div(wide_squares, corrections)
    torch._foreach_mul_(means, means)
    torch._foreach_sub_(variances, means)
    torch._foreach_clamp_min_(variances, 0.0)
    torch._foreach_add_(means, variances, alpha=1 / number)
    return list(means)


def _scale(tensors: list[Tensor], factor: float) -> None:
    if tensors[0].is_cpu:  # _foreach_mul_ on CPU rounds the factor to half precision first
        for tensor in tensors:
            tensor.mul_(factor)
    else:
        torch._foreach_mul_(tensors, factor)


def _wide(p: Tensor) -> torch.dtype:
    return torch.promote_types(p.dtype, torch.float32)


def _check_options(options: dict[str, Any]) -> None:
    for name in ("lr", "eps", "weight_decay"):
        if not (value := options[name]) >= 0:
            raise UserError(f"{name}={value}", expected=">= 0", fix=f"choose another {name}")
    if not all(0 <= beta < 1 for beta in options["betas"]):
        raise UserError(
            f"betas={options['betas']}",
            expected="two decays in [0, 1)",
            fix="use (0.9, 0.999), or values closer to 0 for a shorter memory",
        )
    _check_num_averaged(options["num_averaged"])


def _check_num_averaged(number: float) -> None:
    if not 1 <= number < math.inf:
        raise UserError(
            f"num_averaged={number}",
            expected="a finite number >= 1",
            fix="use 1 / sum of squared weights that sum to 1; use 1 for no averaging",
        )


def _check_gradient(p: Tensor) -> None:
    assert p.grad is not None, "step() passes only parameters with a gradient"
    if p.grad.layout != torch.strided or p.grad.is_complex():
        kind = "complex" if p.grad.is_complex() else f"sparse ({p.grad.layout})"
        raise UserError(
            f"the gradient of a parameter of shape {tuple(p.shape)} is {kind}",
            expected="dense real gradients: every element's moments change at every step",
            fix="use nn.Embedding(..., sparse=False), torch.view_as_real or another optimizer",
        )

"""An average of optimizer state that is applied later leaves no negative or infinite number."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

from polyrhythm.errors import PolicyError
from polyrhythm.run.averaging.buffers import GradientBuckets, ReplicaState, merge_state
from polyrhythm.run.averaging.reduced_variance import ReducedVarianceAdamW
from tests.grids import num_examples

LR, ROWS = 0.01, 6


def adam(kind: Any, **more: Any) -> Callable[[Any, float], Optimizer]:
    return lambda params, beta: kind(params, lr=LR, betas=(min(0.9, beta), beta), **more)


OPTIMIZERS: dict[str, Callable[[Any, float], Optimizer]] = {
    "AdamW": adam(torch.optim.AdamW),
    "AMSGrad": adam(torch.optim.Adam, amsgrad=True),
    "Adamax": adam(torch.optim.Adamax),
    "NAdam": adam(torch.optim.NAdam),
    "RAdam": adam(torch.optim.RAdam),
    "ReducedVarianceAdamW": adam(ReducedVarianceAdamW, num_averaged=3.0),
    "RMSprop": lambda params, beta: torch.optim.RMSprop(
        params, lr=LR, alpha=beta, momentum=0.9, centered=False
    ),
    "centered RMSprop": lambda params, beta: torch.optim.RMSprop(
        params, lr=LR, alpha=beta, momentum=0.9, centered=True
    ),
    "Adagrad": lambda params, beta: torch.optim.Adagrad(params, lr=LR),
    "Adadelta": lambda params, beta: torch.optim.Adadelta(params, lr=1.0, rho=beta),
    "Rprop": lambda params, beta: torch.optim.Rprop(params, lr=LR),
    "SGD": lambda params, beta: torch.optim.SGD(params, lr=LR, momentum=0.9),
}
NON_NEGATIVE = (
    "exp_avg_sq",
    "max_exp_avg_sq",
    "exp_inf",
    "square_avg",
    "acc_delta",
    "sum",
    "step_size",
)


class Replica:
    """A model with rows that only some steps use, and a normalisation layer."""

    def __init__(self, make: Callable[[Any, float], Optimizer], beta: float, seed: int) -> None:
        self.draw = torch.Generator().manual_seed(seed)
        self.model = nn.ModuleList([nn.Embedding(ROWS, 2), nn.BatchNorm1d(3, momentum=1 - beta)])
        self.optimizer = make(self.model.parameters(), beta)
        self.state = ReplicaState(self.model, self.optimizer, "average")

    def step(self, density: float, scale: float) -> None:
        for p in self.model.parameters():
            used = torch.rand(len(p), generator=self.draw) < density
            size = scale ** torch.rand((), generator=self.draw)
            p.grad = torch.randn(p.shape, generator=self.draw) * size
            p.grad[~used] = 0.0
        self.optimizer.step()
        self.model[1](size * torch.randn(4, 3, generator=self.draw))

    def errors(self) -> list[str]:
        found = [] if all_finite(self.model.state_dict()) else ["weights"]
        for state in self.optimizer.state.values():
            found += [] if all_finite(state) else ["state"]
            found += [key for key in NON_NEGATIVE if key in state and (state[key] < 0).any()]
        return found + (["running_var"] if (self.model[1].running_var < 0).any() else [])


def all_finite(tensors: dict[str, Any]) -> bool:
    return all(bool(t.isfinite().all()) for t in tensors.values() if isinstance(t, Tensor))


@pytest.mark.long
@given(
    kind=st.sampled_from(sorted(OPTIMIZERS)),
    beta=st.sampled_from([0.5, 0.9, 0.95, 0.99, 0.999]),
    every=st.integers(1, 12),
    size=st.integers(1, 4),
    overlap=st.booleans(),
    density=st.sampled_from([0.05, 0.3, 1.0]),
    scale=st.sampled_from([1.0, 1e-12, 1e9]),
    seed=st.integers(0, 99),
)
@settings(max_examples=num_examples(40), deadline=None)
def test_averaged_state_is_never_negative_or_infinite(
    kind: str,
    beta: float,
    every: int,
    size: int,
    overlap: bool,
    density: float,
    scale: float,
    seed: int,
) -> None:
    replicas = [Replica(OPTIMIZERS[kind], beta, size * seed + n) for n in range(size)]
    pending: list[Tensor] | None = None
    for step in range(1, 6 * every + 1):
        for replica in replicas:
            replica.step(density, scale)
        if step % every == 0:
            flats = [replica.state.flat() for replica in replicas]
            if pending is not None:
                mean = torch.stack(pending).mean(0)
                for flat, published in zip(flats, pending, strict=True):
                    # As where another average began before this one ended.
                    merged = flat.merge(flat.read(), published, mean)
                    flat.apply(published, mean)
                    torch.testing.assert_close(flat.read(), merged)
            published = [flat.read() for flat in flats]
            if overlap:
                pending = published
            else:
                for flat in flats:
                    flat.write(torch.stack(published).mean(0))
        assert not [error for replica in replicas for error in replica.errors()], step


def test_state_that_only_decays_equals_an_average_before_the_decay() -> None:
    """Rows of an embedding without a gradient: Adam's step stays as long as without overlap."""
    published = torch.tensor([1.0, 4.0, 0.0]), torch.tensor([0.01, 0.16, 0.0])
    mean = torch.tensor([0.5, 1.0, 2.0]), torch.tensor([0.004, 0.05, 0.04])
    decays = 0.35, 0.6
    state = [(p * decay, p, m) for p, m, decay in zip(published, mean, decays, strict=True)]
    first, second = merge_state([(-c, -p, -m) for c, p, m in state[:1]] + state[1:])
    torch.testing.assert_close(second, (mean[1] * torch.tensor([0.6, 0.6, 1.0])))
    # The published first moment is known to be in the current one with 0.35, not with 0.6.
    torch.testing.assert_close(first, -mean[0] * 0.35)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("divisor", [1.0, 3.0, 1000.0, 65535.0, 131072.0])
def test_gradients_are_divided_by_large_counts_of_labels(
    dtype: torch.dtype, divisor: float
) -> None:
    model = nn.Linear(2, 1, dtype=dtype)
    for p in model.parameters():
        p.grad = torch.full_like(p, 3.0)
    gradients = GradientBuckets(model)
    gradients.prepare()
    memory = gradients.begin().memory
    gradients.fill_rest()
    gradients.fill_numbers(divisor)
    memory.mean.copy_(memory.flat)
    gradients.write(gradients.mean_numbers(), divides=True)
    for p in model.parameters():
        torch.testing.assert_close(p.grad, torch.full_like(p, 3.0 / divisor), rtol=0, atol=0)


def test_state_of_integers_is_refused() -> None:
    """As of an 8-bit optimizer: a mean of codes means nothing."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    optimizer.state[model.weight]["codes"] = torch.zeros(2, 2, dtype=torch.uint8)
    ReplicaState(model, optimizer, "local").flat()
    with pytest.raises(PolicyError, match="'codes' of SGD holds"):
        ReplicaState(model, optimizer, "average").flat()


def test_forgotten_momentum_does_not_add_up_over_averages() -> None:
    draw, states = torch.Generator().manual_seed(0), [torch.zeros(64) for _ in range(3)]
    for _ in range(200):
        mean = torch.stack(states).mean(0)
        fresh = [torch.randn(64, generator=draw) for _ in states]  # nothing is left of before
        merged = [merge_state([(c, p, mean)])[0] for c, p in zip(fresh, states, strict=True)]
        states = [state.float() for state in merged]
    assert max(state.abs().max().item() for state in states) < 6

"""ReducedVarianceAdamW: AdamW for one worker; for more, the second moment of their average."""

import copy
import io
import math
from collections.abc import Callable, Iterable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.parameter import Parameter
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR

from polyrhythm.errors import UserError
from polyrhythm.run.averaging.reduced_variance import ReducedVarianceAdamW
from tests.grids import num_examples

# All tests set gradients directly: backward() would start threads, which do not survive a fork.
SHAPES = ((3, 4), (5,), (), (2, 2, 2))


def parameters(dtype: torch.dtype = torch.float32, *, seed: int = 1) -> list[Parameter]:
    draw = torch.Generator().manual_seed(seed)
    return [Parameter(torch.randn(shape, generator=draw).to(dtype)) for shape in SHAPES]


def set_gradients(params: list[Parameter], step: int, *, missing: float = 0.0) -> None:
    """Set gradients that depend on `step` only; each is None with probability `missing`."""
    draw = torch.Generator().manual_seed(1000 + step)
    for p in params:
        gradient = torch.randn(p.shape, generator=draw) * 10 ** float(step % 5 - 3)
        skipped = torch.rand((), generator=draw) < missing
        p.grad = None if skipped else gradient.to(p.dtype)


def assert_same(actual: list[Parameter], expected: list[Parameter]) -> None:
    for p, q in zip(actual, expected, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=0)


Schedule = Callable[[Optimizer], LRScheduler]
SCHEDULES: dict[str, Schedule] = {
    "constant": lambda optimizer: CosineAnnealingLR(optimizer, T_max=10**9),
    "cosine": lambda optimizer: CosineAnnealingLR(optimizer, T_max=20),
    "one cycle, of beta1 as well": lambda o: OneCycleLR(o, max_lr=[0.1, 0.03], total_steps=40),
}


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_worker_is_bitwise_equal_to_adamw(schedule: Schedule, dtype: torch.dtype) -> None:
    ours, reference = parameters(dtype), parameters(dtype)
    half = dtype in (torch.float16, torch.bfloat16)

    def with_groups(kind: type[Optimizer], p: list[Parameter]) -> Optimizer:
        groups = [{"params": p[:2]}, {"params": p[2:], "lr": 0.05, "weight_decay": 0.0}]
        # 1e-8 is 0 in float16, where AdamW divides zero by zero once a square underflows.
        return kind(groups, lr=0.02, betas=(0.8, 0.99), eps=1e-3 if half else 1e-8)  # type: ignore[arg-type, call-arg]

    optimizers = with_groups(ReducedVarianceAdamW, ours), with_groups(AdamW, reference)
    schedulers = [schedule(optimizer) for optimizer in optimizers]
    for step in range(30):
        for params in (ours, reference):
            set_gradients(params, step, missing=0.3)
        for optimizer, scheduler in zip(optimizers, schedulers, strict=True):
            optimizer.step()
            scheduler.step()
        assert_same(ours, reference)
    assert all(p.isfinite().all() for p in ours)


def test_defaults_are_those_of_adamw() -> None:
    ours, reference = ReducedVarianceAdamW(parameters()).defaults, AdamW(parameters()).defaults
    assert ours.pop("num_averaged") == 1
    assert ours == {name: reference[name] for name in ours}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_averaged", [1.0, 3.5])
@pytest.mark.parametrize("through", ["state_dict", "deepcopy"])
def test_saved_state_resumes_bitwise(dtype: torch.dtype, num_averaged: float, through: str) -> None:
    params = parameters(dtype)
    optimizer = ReducedVarianceAdamW(params, lr=0.05, num_averaged=num_averaged)
    for step in range(7):
        set_gradients(params, step, missing=0.3)
        optimizer.step()
    if through == "deepcopy":
        other, others = copy.deepcopy((optimizer, params))
    else:
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        others = [Parameter(p.detach().clone()) for p in params]
        other = ReducedVarianceAdamW(others, lr=0.7)
        other.load_state_dict(torch.load(file))
    assert other.num_averaged == num_averaged
    for step in range(7, 14):
        for each, its_params in ((optimizer, params), (other, others)):
            set_gradients(its_params, step)
            each.step()
        assert_same(params, others)


def test_adamw_state_is_refused() -> None:
    optimizer = ReducedVarianceAdamW(parameters(), num_averaged=2)
    with pytest.raises(UserError, match="without num_averaged"):
        optimizer.load_state_dict(AdamW(parameters()).state_dict())
    assert optimizer.num_averaged == 2


# With beta1 = eps = weight_decay = 0 a step is lr * g / sqrt(v_s), which yields the estimate v_s.


def estimates(
    gradients: Iterable[Tensor], *, beta2: float, num_averaged: float
) -> Iterator[Tensor]:
    """Yield the second moment by which each step is divided."""
    p: Parameter | None = None
    for gradient in gradients:
        if p is None:
            p = Parameter(torch.zeros_like(gradient))
            optimizer = ReducedVarianceAdamW(
                [p],
                lr=1.0,
                betas=(0.0, beta2),
                eps=0.0,
                weight_decay=0.0,
                num_averaged=num_averaged,
            )
        p.data.zero_()
        p.grad = gradient
        optimizer.step()
        yield (gradient / p.detach()).square()


def noisy(
    means: Tensor, *, noise: float, num_streams: int, num_steps: int, seed: int
) -> Iterator[Tensor]:
    """Yield gradients of independent streams, one per row, around each of the means."""
    draw = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        yield means + noise * torch.randn(num_streams, len(means), generator=draw).double()


@pytest.mark.parametrize(
    "weights",
    [pytest.param(weights, marks=pytest.mark.long) for weights in ((0.5, 0.5), (0.125,) * 8)]
    + [(0.6, 0.3, 0.1)],
    ids=str,
)
def test_second_moment_estimates_that_of_the_average(weights: tuple[float, ...]) -> None:
    means = torch.tensor([0.0, 0.3, 2.0], dtype=torch.float64)
    number = 1 / sum(w * w for w in weights)

    def stream(seed: int) -> Iterator[Tensor]:
        return noisy(means, noise=1.0, num_streams=500, num_steps=1000, seed=seed)

    averaged = [
        torch.tensordot(torch.tensor(weights).double(), torch.stack(gradients), dims=1)
        for gradients in zip(*map(stream, range(len(weights))), strict=True)
    ]
    alone = list(stream(99))

    def last(gradients: list[Tensor], num_averaged: float) -> Tensor:
        *_, end = estimates(gradients, beta2=0.999, num_averaged=num_averaged)
        return end.mean(dim=0)

    wanted = last(averaged, 1.0)
    torch.testing.assert_close(wanted, means**2 + 1 / number, rtol=0.01, atol=0.0)
    torch.testing.assert_close(last(alone, number), wanted, rtol=0.02, atol=0.0)
    assert (last(alone, 1.0) > 1.05 * wanted).all()  # AdamW uses the noise of a single worker


@pytest.mark.parametrize("num_averaged", [2.0, 4.0, 16.0])
def test_early_estimates_have_documented_expectation(
    num_averaged: float,
) -> None:
    """The published formula, v_s = (m2^2 + (v - m2^2) / N) / (1 - b2^t), loses the mean here."""
    means, noise, beta2 = torch.tensor([0.0, 1.0], dtype=torch.float64), 0.5, 0.999
    gradients = noisy(means, noise=noise, num_streams=40_000, num_steps=20, seed=5)
    for t, found in enumerate(estimates(gradients, beta2=beta2, num_averaged=num_averaged), 1):
        ages = beta2 ** torch.arange(t, dtype=torch.float64)
        squared_weights = (ages / ages.sum()).square().sum()  # S: 1 at first, then about 1 / t
        kept = 1 / num_averaged + squared_weights * (1 - 1 / num_averaged)
        error = (found.mean(dim=0) - (means**2 + noise**2 * kept)).abs()
        assert (error < 5 * found.std(dim=0) / math.sqrt(len(found))).all(), f"t={t}: {error}"


@given(
    gradient=st.floats(1e-3, 1e3),
    negative=st.booleans(),
    num_averaged=st.floats(1, 64),
    num_steps=st.integers(1, 30),
)
@settings(max_examples=num_examples(60), deadline=None)
def test_constant_gradients_give_same_step_for_any_num_averaged(
    gradient: float, negative: bool, num_averaged: float, num_steps: int
) -> None:
    numbers = (1.0, num_averaged)
    params = [Parameter(torch.ones(2, dtype=torch.float64)) for _ in numbers]
    optimizers = [
        ReducedVarianceAdamW([p], lr=0.1, num_averaged=n)
        for p, n in zip(params, numbers, strict=True)
    ]
    for _ in range(num_steps):
        for p, optimizer in zip(params, optimizers, strict=True):
            p.grad = torch.full_like(p, -gradient if negative else gradient)
            optimizer.step()
        torch.testing.assert_close(params[0], params[1], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_averaged", [1.5, 8.0])
def test_half_precision_separates_mean_from_noise(dtype: torch.dtype, num_averaged: float) -> None:
    """In bfloat16 the mean would stop at a fifth of this gradient.

    AdamW's second moment does stop at a third of its square: no variance may be negative.
    """
    p = Parameter(torch.zeros(4, dtype=dtype))
    optimizer = ReducedVarianceAdamW([p], lr=0.5, weight_decay=0.0, num_averaged=num_averaged)
    for _ in range(1000):
        p.data.zero_()
        p.grad = torch.full_like(p, 0.3)
        optimizer.step()
    torch.testing.assert_close(p.detach().float(), torch.full((4,), -0.5), rtol=0.03, atol=0.0)


@given(numbers=st.lists(st.sampled_from([1.0, 1.5, 2.0, 7.0]), min_size=2, max_size=12))
@settings(max_examples=num_examples(30), deadline=None)
def test_num_averaged_may_change_at_every_step(numbers: list[float]) -> None:
    """A step depends on its own `num_averaged` only: the moments are independent of it."""
    changing, fixed = parameters(torch.float64), parameters(torch.float64)
    optimizer = ReducedVarianceAdamW([{"params": [p]} for p in changing], lr=0.1)
    reference = ReducedVarianceAdamW(fixed, lr=0.1, num_averaged=numbers[-1])
    for step, number in enumerate(numbers):
        optimizer.num_averaged = number
        for p, q in zip(changing, fixed, strict=True):
            p.data.copy_(q)
        set_gradients(changing, step)
        set_gradients(fixed, step)
        optimizer.step()
        reference.step()
    assert_same(changing, fixed)


def test_noisy_steps_grow_with_num_averaged_below_sqrt_n() -> None:
    lengths, mean = {}, torch.tensor([0.1], dtype=torch.float64)
    for number in (1.0, 2.0, 8.0):
        p = Parameter(torch.zeros(500, dtype=torch.float64))
        optimizer = ReducedVarianceAdamW([p], lr=1.0, weight_decay=0.0, num_averaged=number)
        for gradient in noisy(mean, noise=1.0, num_streams=500, num_steps=200, seed=3):
            p.data.zero_()
            p.grad = gradient.flatten()
            optimizer.step()
        lengths[number] = p.detach().abs()
    for number in (2.0, 8.0):
        ratio = lengths[number] / lengths[1.0]
        assert ratio.min() > 1
        assert ratio.max() <= math.sqrt(number) * (1 + 1e-9)
        assert ratio.mean() > 0.8 * math.sqrt(number)


def test_closure_sets_gradients_and_returns_loss() -> None:
    params = parameters()

    def closure() -> float:
        assert torch.is_grad_enabled()
        set_gradients(params, 0)
        return 1.5

    before = [p.detach().clone() for p in params]
    assert ReducedVarianceAdamW(params).step(closure) == 1.5
    assert all(not torch.equal(p, old) for p, old in zip(params, before, strict=True))


def test_sparse_gradient_is_refused_before_any_update() -> None:
    params = parameters()
    set_gradients(params, 0)
    params[1].grad = torch.ones(5).to_sparse()
    before = [p.detach().clone() for p in params]
    optimizer = ReducedVarianceAdamW([{"params": [p]} for p in params])
    with pytest.raises(UserError, match=r"shape \(5,\) is sparse"):
        optimizer.step()
    assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))
    assert not optimizer.state


def test_a_complex_gradient_is_refused() -> None:
    p = Parameter(torch.ones(2, dtype=torch.complex64))
    p.grad = torch.ones_like(p)
    with pytest.raises(UserError, match="is complex"):
        ReducedVarianceAdamW([p]).step()


@pytest.mark.parametrize("number", [0.0, 0.99, -2.0, math.inf, math.nan])
def test_invalid_num_averaged_is_refused(number: float) -> None:
    with pytest.raises(UserError, match="num_averaged="):
        ReducedVarianceAdamW(parameters(), num_averaged=number)
    optimizer = ReducedVarianceAdamW(parameters(), num_averaged=3)
    with pytest.raises(UserError, match="num_averaged="):
        optimizer.num_averaged = number
    with pytest.raises(UserError, match="num_averaged="):
        optimizer.add_param_group({"params": parameters(), "num_averaged": number})
    assert optimizer.num_averaged == 3
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    "wrong",
    [
        *({"lr": -1.0}, {"lr": math.nan}, {"eps": -1e-9}, {"weight_decay": -0.1}),
        *({"betas": (1.0, 0.9)}, {"betas": (0.9, 1.0)}, {"betas": (-0.1, 0.9)}),
    ],
    ids=str,
)
def test_wrong_options_are_refused_by_name(wrong: dict[str, object]) -> None:
    (name,) = wrong
    with pytest.raises(UserError, match=f"^{name}="):
        ReducedVarianceAdamW(parameters(), **wrong)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=f"^{name}="):
        ReducedVarianceAdamW([{"params": parameters(), **wrong}])

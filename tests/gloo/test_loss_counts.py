"""Losses are weighted by their labels: any split gives the result of one process."""

import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import cross_entropy, mse_loss, nll_loss

from polyrhythm.errors import ScheduleError
from polyrhythm.run.pipeline.batch import mean_loss
from polyrhythm.run.pipeline.loss import (
    LossFunction,
    MicrobatchLoss,
    NonFiniteWarnings,
    divide_by,
)
from tests.gloo.pipelines import run_single_process

NUM_CLASSES, LENGTH = 5, 4
WEIGHTS = torch.tensor([0.2, 1.0, 3.0, 0.5, 2.0], dtype=torch.float64)


def flat_cross_entropy(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), **options)


def causal(logits: Tensor, labels: Tensor) -> Tensor:
    return flat_cross_entropy(logits[:, :-1], labels[:, 1:])


def weighted(logits: Tensor, labels: Tensor) -> Tensor:
    return flat_cross_entropy(logits, labels, weight=WEIGHTS, label_smoothing=0.1)


def other_ignored(logits: Tensor, labels: Tensor) -> Tensor:
    labels = torch.where(labels == -100, 3, labels)
    return flat_cross_entropy(logits, labels, ignore_index=3)


def negative_likelihood(logits: Tensor, labels: Tensor) -> Tensor:
    return nll_loss(logits.log_softmax(-1).transpose(1, 2), labels)


def by_hand(logits: Tensor, labels: Tensor) -> Tensor:
    """Return a masked mean without torch's cross-entropy: nan without a label, as its gradient."""
    kept = labels != -100
    chosen = logits.log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
    return -(chosen * kept).sum() / kept.sum()


def sum_and_count(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return flat_cross_entropy(logits, labels, reduction="sum"), (labels != -100).sum()


def other_ignored_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of two parts over the number of labels."""
    labels = torch.where(labels == -100, 3, labels)
    parts = zip(logits.split(2, dim=1), labels.split(2, dim=1), strict=True)
    options: dict[str, Any] = {"ignore_index": 3, "reduction": "sum"}
    return (
        torch.stack([flat_cross_entropy(*part, **options) for part in parts]).sum()
        / (labels != 3).sum()
    )


LOSSES = [
    other_ignored_sum,
    flat_cross_entropy,
    causal,
    weighted,
    other_ignored,
    negative_likelihood,
    by_hand,
    sum_and_count,
]


def batch(seed: int, kept: list[int]) -> tuple[Tensor, Tensor]:
    """Return logits and labels of samples, whose first `kept` labels are not padding."""
    generator = torch.Generator().manual_seed(seed)
    shape = len(kept), LENGTH
    logits = torch.randn(*shape, NUM_CLASSES, generator=generator, dtype=torch.float64)
    labels = torch.randint(NUM_CLASSES, shape, generator=generator)
    for row, number in zip(labels, kept, strict=True):
        row[number:] = -100
    return logits, labels


def split(values: Tensor, sizes: list[int]) -> list[Tensor]:
    return list(torch.split(values, sizes))


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(LOSSES),
    st.lists(st.lists(st.integers(0, LENGTH), min_size=1, max_size=3), min_size=1, max_size=4),
    st.integers(0, 999),
)
def check_weighted_means(loss: Callable[..., Any], kept: list[list[int]], seed: int) -> None:
    logits, labels = batch(seed, [number for part in kept for number in part])
    sizes = [len(part) for part in kept]
    leaf = logits.clone().requires_grad_()
    parts = list(zip(split(leaf, sizes), split(labels, sizes), sizes, strict=True))
    function = LossFunction(loss, counts_labels=True)
    with warnings.catch_warnings():
        if loss is by_hand:
            warnings.simplefilter("ignore")  # its count is a guess
        found = [function(output, target, num_samples=size) for output, target, size in parts]
    counts = [float(each.count) for each in found if each.count is not None]
    for each, (output, _, _), count in zip(found, parts, counts, strict=True):
        each.objective(count / 2.0, 2.0, output).backward()  # 2.0: any unit
    total = sum(counts)
    mean = mean_loss([*(each.mean().item() for each in found), *counts])
    assert leaf.grad is not None
    if not total:
        assert mean is None
        assert not leaf.grad.any()
        return
    whole = logits.clone().requires_grad_()
    expected = loss(whole, labels)
    if isinstance(expected, tuple):
        expected = expected[0] / expected[1]
    expected.backward()
    assert mean == pytest.approx(expected.item(), rel=1e-12)
    torch.testing.assert_close(leaf.grad * 2.0 / total, whole.grad)


def test_weighted_means_of_any_split_are_the_mean_of_the_whole(tmp_path: Path) -> None:
    run_single_process(check_weighted_means, tmp_path)


def count_of(loss: Callable[..., Any], output: Any, target: Any) -> Any:
    return LossFunction(loss, counts_labels=True)(output, target, num_samples=3).count


def test_a_loss_without_labels_counts_samples_and_a_bare_mean_nothing() -> None:
    values = torch.randn(3, 4)
    assert count_of(mse_loss, values, values) == 3
    assert LossFunction(mse_loss)(values, values, num_samples=3).count is None
    soft = torch.full((3, NUM_CLASSES), 1 / NUM_CLASSES)
    assert count_of(cross_entropy, torch.randn(3, NUM_CLASSES), soft) == 3


def test_labels_are_the_only_integers_of_a_target_or_those_named_so() -> None:
    labels = torch.tensor([[1, -100], [2, 2], [-100, -100]])

    def constant(output: Tensor, target: Any) -> Tensor:
        return output.mean()

    output = torch.randn(3, 2)
    assert count_of(constant, output, labels) == 3
    assert count_of(constant, output, (output, labels)) == 3
    assert count_of(constant, output, {"labels": labels, "ids": labels}) == 3
    assert count_of(constant, output, (labels, labels + 1)) == 3  # samples
    assert count_of(constant, output, labels != -100) == 3  # a mask holds no labels


def test_several_cross_entropies_of_unequal_labels_are_weighted_by_samples_with_one_warning() -> (
    None
):
    def two(logits: Tensor, labels: Tensor) -> Tensor:
        return flat_cross_entropy(logits, labels) + causal(logits, labels)

    function = LossFunction(two, counts_labels=True)
    for_equal = batch(0, [4, 4, 4])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert function(*for_equal, num_samples=3).count == 3
        assert function(*for_equal, num_samples=3).count == 3
    with pytest.warns(UserWarning, match=r"weighted by samples; return \(sum, count\)"):
        assert function(*batch(0, [4, 1, 2]), num_samples=3).count == 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function(*batch(0, [1, 1, 2]), num_samples=3)


def own_mask(logits: Tensor, labels: Tensor) -> Tensor:
    losses, kept = flat_cross_entropy(logits, labels, reduction="none"), labels.flatten() != 0
    return (losses * kept).sum() / kept.sum()


def per_sequence(logits: Tensor, labels: Tensor) -> Tensor:
    losses = cross_entropy(logits.transpose(1, 2), labels, reduction="none")
    return (losses.sum(1) / (labels != -100).sum(1)).mean()


@pytest.mark.parametrize("loss", [own_mask, per_sequence, by_hand])
def test_a_count_that_is_a_guess_is_warned_of_once(loss: Callable[..., Any]) -> None:
    function = LossFunction(loss, counts_labels=True)
    logits, labels = batch(0, [4, 4, 4])
    labels.clamp_(min=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert function(logits, labels, num_samples=3).count == 12  # any of them is right here
    labels[1, 1:] = 0 if loss is own_mask else -100
    with pytest.warns(UserWarning, match=r"mean over .*; return \(sum, count\)"):
        function(logits, labels, num_samples=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        function(logits[:1], labels[:1], num_samples=1)


@pytest.mark.parametrize("ignored", [-100, 0])
def test_a_loss_may_return_early_without_a_label(ignored: int) -> None:
    def guarded(logits: Tensor, labels: Tensor) -> Tensor:
        if (labels == ignored).all():
            return logits.sum() * 0
        return cross_entropy(logits, labels, ignore_index=ignored)

    function, logits = LossFunction(guarded, counts_labels=True), torch.randn(3, NUM_CLASSES)
    targets = [1, 2, 3], [ignored] * 3, [ignored, 2, 3]
    found = [function(logits, torch.tensor(labels), num_samples=3).count for labels in targets]
    assert found == [3, 0, 2]


@pytest.mark.parametrize(
    ("options", "is_counting"),  # with label smoothing, only the calls show that it is a mean
    [({}, False), ({}, True), ({"label_smoothing": 0.1}, True), (None, False), (None, True)],
)
def test_a_pair_of_a_mean_and_a_metric_is_refused(options: Any, is_counting: bool) -> None:
    def with_accuracy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        accuracy = (logits.argmax(-1) == labels).float().mean()
        loss = logits.square().mean() if options is None else None
        return cross_entropy(logits, labels, **options) if loss is None else loss, accuracy

    logits = torch.randn(3, NUM_CLASSES, requires_grad=True)
    function = LossFunction(with_accuracy, counts_labels=is_counting)
    with pytest.raises(ScheduleError, match="the first value is a mean"):
        function(logits, torch.tensor([1, 2, 3]), num_samples=3)


def check_no_nan() -> None:
    value = torch.ones(3, requires_grad=True)
    none = torch.tensor(0.0, dtype=torch.float64)  # on a GPU it would not be read
    loss = MicrobatchLoss((value * 0).sum(), none, is_sum=True)
    own = loss.over_own_count()
    assert own.count is not None
    own.objective(own.count, 1.0, value).backward()
    assert value.grad is not None
    assert not value.grad.any()
    assert loss.mean() == 0


def test_a_count_of_zero_that_is_not_read_gives_no_nan(tmp_path: Path) -> None:
    run_single_process(check_no_nan, tmp_path)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_gradients_are_rounded_once(dtype: torch.dtype) -> None:
    gradient = torch.full((4,), 3.0, dtype=dtype)
    divide_by(1000.0, [gradient])
    assert torch.equal(gradient, torch.full((4,), 3 / 1000, dtype=dtype))


def test_gradients_of_several_types_are_divided_by_a_tensor() -> None:
    gradients = [torch.ones(3, dtype=x) for x in (torch.float32, torch.bfloat16) * 2]
    divide_by(torch.tensor(4.0, dtype=torch.float64), gradients)
    divide_by(torch.tensor(0.0, dtype=torch.float64), gradients)
    divide_by(2.0, gradients)
    assert all((gradient == 0.125).all() for gradient in gradients)


def test_two_calls_on_the_same_labels_count_them_once() -> None:
    def two(logits: Tensor, labels: Tensor) -> Tensor:
        return flat_cross_entropy(logits, labels) + flat_cross_entropy(-logits, labels)

    assert count_of(two, *batch(0, [4, 1, 0])) == 5


def test_a_compiled_loss_is_counted_as_well() -> None:
    compiled = torch.compile(causal, backend="eager")
    function = LossFunction(compiled, counts_labels=True)
    assert [function(*batch(0, kept), num_samples=3).count for kept in ([4, 2, 1], [1, 0, 3])] == [
        4,
        2,
    ]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.zeros(3), r"returned \(3,\)"),
        (0.5, "returned float"),
        ((torch.zeros(3), 3), r"returned \(a tensor of shape \(3,\), int\)"),
        ((torch.zeros(()), torch.zeros(3)), r"shape \(\), a tensor of shape \(3,\)"),
        ((torch.zeros(()), 1, 2), r"shape \(\), int, int"),
        ((torch.zeros(()), -1), "a count of -1"),
        ((torch.zeros(()), math.nan), "a count of nan"),
    ],
)
def test_other_results_of_a_loss_function_are_refused(returned: Any, message: str) -> None:
    with pytest.raises(ScheduleError, match=message) as raised:
        LossFunction(lambda output, target: returned)(None, None, num_samples=3)
    assert "(sum, count)" in str(raised.value)


def test_a_loss_that_changes_what_it_counts_is_refused() -> None:
    answers = iter([torch.zeros(()), (torch.zeros(()), 3)])
    function = LossFunction(lambda output, target: next(answers))
    function(None, None, num_samples=3)
    with pytest.raises(ScheduleError, match="returned a sum and a count, and earlier a mean"):
        function(None, None, num_samples=3)


def test_labels_of_inference_tensors_are_counted() -> None:
    """Under `torch.inference_mode` nobody knows whether a copy of the labels was changed."""
    labels = torch.tensor([0, -100, 1, 2])
    with torch.inference_mode():
        found = LossFunction(cross_entropy, counts_labels=True)(
            torch.randn(4, NUM_CLASSES), labels.clone(), num_samples=4, host_target=labels
        )
    assert found.count == 3


def test_a_batch_that_is_not_split_is_a_mean_over_its_own_labels() -> None:
    value = torch.tensor(6.0, requires_grad=True)
    loss = MicrobatchLoss(value, 3.0, is_sum=True).over_own_count()
    assert (loss.value.item(), loss.count) == (2.0, 1.0)
    assert MicrobatchLoss(value, 0.0, is_sum=True).over_own_count().count == 0.0


def test_gradients_that_stay_non_finite_are_warned_of_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = NonFiniteWarnings()
    for step in range(120):
        found.after(is_finite=step == 110, step=step, worker="s0p1")
    assert [record.args for record in caplog.records] == [
        (0, "s0p1"),
        (9, "s0p1", 10),
        (99, "s0p1", 100),
        (111, "s0p1"),
    ]

"""Local steps: the outer step is Nesterov momentum, and is out of place."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.errors import PolicyError
from polyrhythm.sync.policies.local import OuterNesterov, pseudo_gradient

fractions = st.fractions(-5, 5, max_denominator=50)


@given(fractions, st.lists(fractions, min_size=1, max_size=10), st.fractions(0, Fraction(19, 20)))
def test_outer_step_equals_nesterov_momentum(
    start: Fraction, gradients: list[Fraction], momentum: Fraction
) -> None:
    lr = Fraction(7, 10)
    outer = OuterNesterov(lr=lr, momentum=momentum)  # type: ignore[arg-type]
    anchor, velocity = start, Fraction(0)
    point, speed = start, Fraction(0)  # the classical form: gradients are taken ahead of `point`
    for gradient in gradients:
        anchor, velocity = outer.step(anchor, gradient, velocity)
        speed = momentum * speed - lr * gradient
        point = point + speed
        assert anchor == point + momentum * speed


@given(st.lists(fractions, min_size=1, max_size=6), fractions)
def test_outer_step_with_lr_1_and_no_momentum_is_the_plain_average(
    weights: list[Fraction], anchor: Fraction
) -> None:
    mean = sum(weights, Fraction(0)) / len(weights)
    outer = OuterNesterov(lr=1, momentum=0)
    moved, _ = outer.step(anchor, pseudo_gradient(anchor, mean), Fraction(0))
    assert moved == mean


def test_outer_step_on_arrays_equals_scalars_and_is_out_of_place() -> None:
    anchor, mean = np.array([1.0, -2.0]), np.array([[0.5, 3.0], [4.0, 4.0]])
    gradient = pseudo_gradient(anchor, mean)
    velocity = np.full((2, 2), 0.25)
    moved, faster = OuterNesterov().step(anchor + np.zeros((2, 2)), gradient, velocity)
    for i, j in np.ndindex(2, 2):
        one = OuterNesterov().step(float(anchor[j]), float(gradient[i, j]), 0.25)
        assert (moved[i, j], faster[i, j]) == one
    assert velocity.tolist() == [[0.25, 0.25], [0.25, 0.25]]


def test_the_defaults_are_those_of_the_paper_and_find_the_common_optimum() -> None:
    assert OuterNesterov() == OuterNesterov(lr=0.7, momentum=0.9)
    optima, anchor, velocity = np.array([1.0, 2.0, 6.0]), 10.0, 0.0
    for _ in range(200):
        workers = np.full(3, anchor)
        for _ in range(5):
            workers -= 0.1 * (workers - optima)
        gradient = pseudo_gradient(anchor, float(workers.mean()))
        anchor, velocity = OuterNesterov().step(anchor, gradient, velocity)
    assert anchor == pytest.approx(3.0)


@pytest.mark.parametrize(("lr", "momentum"), [(0.0, 0.9), (0.7, 1.0), (0.7, -0.1)])
def test_an_outer_optimizer_that_cannot_converge_is_refused(lr: float, momentum: float) -> None:
    with pytest.raises(PolicyError, match="outer lr="):
        OuterNesterov(lr=lr, momentum=momentum)

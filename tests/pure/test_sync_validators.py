"""Validators agree with brute force, and averages preserve the mean and contract differences."""

import random
from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from polyrhythm.errors import PolicyError
from polyrhythm.sync.policies.adaptive import UnionConnectivity
from polyrhythm.sync.policies.age import CausalAge
from polyrhythm.types import Group, Worker
from tests.grids import num_examples
from tests.pure.policy_driver import connected

MOST = 5  # workers of a small stage


def mixing_matrix(members: Sequence[int], num_workers: int) -> np.ndarray:
    """W of one group (SDPipe, equation 2): members average, the others keep their values."""
    mixing = np.eye(num_workers)
    mixing[np.ix_(members, members)] = 1 / len(members)
    return mixing


def contraction(groups: Iterable[Sequence[int]], num_workers: int) -> float:
    """Largest fraction of a disagreement that is left after the groups: ||product of W - J||_2."""
    product = np.eye(num_workers)
    for members in groups:
        product = mixing_matrix(members, num_workers) @ product
    return float(np.linalg.norm(product - 1 / num_workers, ord=2))


def group_of(*pipelines: int) -> Group:
    return Group(tuple(Worker(0, pipeline) for pipeline in sorted(pipelines)), why="")


groups_of_small_stage = st.lists(
    st.sets(st.integers(0, MOST - 1), min_size=1).map(sorted), min_size=1, max_size=12
)


@given(groups_of_small_stage, st.integers(1, 4))
def test_union_is_valid_exactly_when_the_last_p_groups_connect_all(
    groups: list[list[int]], last_groups: int
) -> None:
    union = UnionConnectivity(last_groups)
    for pipeline in range(MOST):
        union.join(Worker(0, pipeline))
    for number, members in enumerate(groups):
        for pipeline in members:
            union.offer(Worker(0, pipeline))
        window = [set(group) for group in groups[: number + 1][-last_groups:]]
        is_complete = len(window) == last_groups
        assert union.is_valid() == (not is_complete or connected(window, set(range(MOST))))
        assert (union.missing_workers() == ()) == union.is_valid()
        # Missing workers are not in the candidate.
        assert not {worker.pipeline for worker in union.missing_workers()} & set(members)
        union.form(group_of(*members))


class ChurningUnion(RuleBasedStateMachine):
    """With churn, a window requires the workers that were present throughout it."""

    def __init__(self) -> None:
        super().__init__()
        self.union = UnionConnectivity(3)
        self.joined: dict[int, int] = {}  # pipeline -> number of groups before it joined
        self.history: list[set[int]] = []
        self.candidate: set[int] = set()

    @rule(pipeline=st.integers(0, MOST - 1))
    def join_or_leave(self, pipeline: int) -> None:
        worker = Worker(0, pipeline)
        if pipeline in self.joined:
            self.union.leave(worker)
            del self.joined[pipeline]
            self.candidate.discard(pipeline)
            self.history = [group - {pipeline} for group in self.history]
        else:
            self.union.join(worker)
            self.joined[pipeline] = len(self.history)

    @precondition(lambda self: set(self.joined) - self.candidate)
    @rule(data=st.data())
    def offer(self, data: st.DataObject) -> None:
        pipeline = data.draw(st.sampled_from(sorted(set(self.joined) - self.candidate)))
        self.union.offer(Worker(0, pipeline))
        self.candidate.add(pipeline)

    @precondition(lambda self: self.candidate)
    @rule(ok=st.booleans())
    def form(self, ok: bool) -> None:
        group = group_of(*self.candidate)
        self.union.form(group)
        self.union.done(group, ok)
        self.history.append(set(self.candidate) if ok else set())
        self.candidate = set()

    @invariant()
    def agrees_with_a_count_by_hand(self) -> None:
        if len(self.history) < 2 or not self.candidate:
            return
        first = len(self.history) - 2
        nodes = {pipeline for pipeline, since in self.joined.items() if since <= first}
        window = [*self.history[-2:], self.candidate]
        reached = set(self.candidate)
        for _ in window:
            for clique in window:
                if clique & reached:
                    reached |= clique
        assert self.union.is_valid() == (nodes <= reached)
        assert {worker.pipeline for worker in self.union.missing_workers()} == nodes - reached


TestChurningUnion = ChurningUnion.TestCase


def test_a_worker_that_has_left_connects_no_others() -> None:
    union = UnionConnectivity(3)
    for pipeline in range(3):
        union.join(Worker(0, pipeline))
    for members in [(0, 1), (1, 2)]:
        for pipeline in members:
            union.offer(Worker(0, pipeline))
        union.form(group_of(*members))
    union.offer(Worker(0, 0))
    assert union.is_valid()  # 0 - 1 - 2
    union.leave(Worker(0, 1))
    assert union.missing_workers() == (Worker(0, 2),)


class BruteForceAge(RuleBasedStateMachine):
    """A model is a set of updates (worker, number); averaging is the union of sets."""

    MAX_AGE = 2

    def __init__(self) -> None:
        super().__init__()
        self.age = CausalAge(self.MAX_AGE)
        self.models: dict[int, set[tuple[int, int]]] = {}
        self.clocks: dict[int, int] = {}
        self.left: dict[int, set[tuple[int, int]]] = {}
        self.candidate: dict[int, None] = {}
        self.open: dict[int, Group] = {}  # by first member
        for pipeline in range(3):
            self.join(pipeline)

    def busy(self) -> set[int]:
        grouped = {worker.pipeline for group in self.open.values() for worker in group.members}
        return grouped | set(self.candidate)

    def join(self, pipeline: int) -> None:
        self.age.join(Worker(0, pipeline))
        # Of its model, only its own updates that were averaged before it left are known.
        self.models[pipeline] = self.left.pop(pipeline, {(pipeline, 0)})
        self.clocks[pipeline] = max(number for _, number in self.models[pipeline])

    @precondition(lambda self: set(range(MOST)) - set(self.models))
    @rule(data=st.data())
    def join_late(self, data: st.DataObject) -> None:
        self.join(data.draw(st.sampled_from(sorted(set(range(MOST)) - set(self.models)))))

    @precondition(lambda self: set(self.models) - self.busy())
    @rule(data=st.data())
    def offer(self, data: st.DataObject) -> None:
        pipeline = data.draw(st.sampled_from(sorted(set(self.models) - self.busy())))
        self.clocks[pipeline] += 1
        self.age.offer(Worker(0, pipeline))
        self.candidate[pipeline] = None

    @precondition(lambda self: self.candidate)
    @rule()
    def form(self) -> None:
        group = group_of(*self.candidate)
        self.age.form(group)
        self.open[group.members[0].pipeline] = group
        self.candidate.clear()

    @precondition(lambda self: self.open)
    @rule(data=st.data(), ok=st.booleans())
    def done(self, data: st.DataObject, ok: bool) -> None:
        group = self.open.pop(data.draw(st.sampled_from(sorted(self.open))))
        self.age.done(group, ok)
        members = [worker.pipeline for worker in group.members]
        if ok:
            average = self.averaged(members)
            for pipeline in members:
                self.models[pipeline] = average
        else:
            for pipeline in members:
                self.clocks[pipeline] -= 1

    @precondition(lambda self: self.models)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        grouped = {worker.pipeline for group in self.open.values() for worker in group.members}
        free = sorted(set(self.models) - grouped)
        if not free:
            return
        pipeline = data.draw(st.sampled_from(free))
        self.age.leave(Worker(0, pipeline))
        self.candidate.pop(pipeline, None)
        own = {(author, n) for author, n in self.models.pop(pipeline) if author == pipeline}
        self.left[pipeline] = own
        del self.clocks[pipeline]
        if not self.models:
            self.left.clear()  # the next worker starts from scratch

    def averaged(self, members: list[int]) -> set[tuple[int, int]]:
        union = set().union(*(self.models[pipeline] for pipeline in members))
        return union | {(pipeline, self.clocks[pipeline]) for pipeline in members}

    @invariant()
    def ages_are_those_of_the_models(self) -> None:
        if not self.candidate:
            return
        average = self.averaged(list(self.candidate))
        ages = {
            pipeline: clock - max((n for author, n in average if author == pipeline), default=0)
            for pipeline, clock in self.clocks.items()
        }
        for bound in (0, 1, 3, 5, self.MAX_AGE):
            self.age.max_age = bound
            old = [pipeline for pipeline, age in sorted(ages.items()) if age > bound]
            assert [worker.pipeline for worker in self.age.missing_workers()] == old
            assert self.age.is_valid() == (not old)


TestBruteForceAge = BruteForceAge.TestCase
TestBruteForceAge.settings = settings(max_examples=num_examples(150), stateful_step_count=40)


def age_of(age: CausalAge, pipeline: int) -> int:
    """The smallest `max_age` for which the candidate does not lack that worker."""
    for bound in range(100):
        age.max_age = bound
        if Worker(0, pipeline) not in age.missing_workers():
            return bound
    raise AssertionError("an age of 100 or more")


def test_connected_union_can_hide_old_updates_that_age_detects() -> None:
    """Groups {3,4}, {2,3}, {1,2} repeated: connected, yet an update of 1 reaches 4 in the 7th."""
    union, age = UnionConnectivity(3), CausalAge(10)
    for pipeline in range(4):
        union.join(Worker(0, pipeline))
        age.join(Worker(0, pipeline))
    num_updates, known_to_the_last = 0, []
    for number in range(10):
        group = group_of(*[(2, 3), (1, 2), (0, 1)][number % 3])
        for worker in group.members:
            union.offer(worker)
            age.offer(worker)
            num_updates += worker.pipeline == 0
        assert union.is_valid()
        if Worker(0, 3) in group.members:
            known_to_the_last.append((number + 1, num_updates - age_of(age, 0), num_updates))
        union.form(group)
        age.form(group)
        age.done(group, True)
    assert known_to_the_last == [(1, 0, 0), (4, 0, 1), (7, 1, 2), (10, 2, 3)]


@given(groups_of_small_stage, st.integers(0, 10**6))
def test_averaging_keeps_the_mean_and_never_spreads_the_models(
    groups: list[list[int]], seed: int
) -> None:
    models = np.random.default_rng(seed).normal(size=(MOST, 3))
    mean = models.mean(axis=0)
    left = 1.0
    for number, members in enumerate(groups):
        mixing = mixing_matrix(members, MOST)
        assert np.array_equal(mixing, mixing.T)
        assert np.allclose(mixing.sum(axis=0), 1)
        assert np.allclose(mixing @ mixing, mixing)
        spread = np.linalg.norm(models - mean)
        models = mixing @ models
        assert np.allclose(models.mean(axis=0), mean)
        assert np.linalg.norm(models - mean) <= spread + 1e-9
        now = contraction(groups[: number + 1], MOST)
        assert now <= left + 1e-9
        left = now


def test_contraction_of_known_groups() -> None:
    assert contraction([range(6)], 6) == pytest.approx(0, abs=1e-12)
    assert contraction([[0, 1], [2, 3]], 4) == pytest.approx(1)  # two halves never meet
    butterfly = [[0, 1], [2, 3], [0, 2], [1, 3]]
    assert contraction(butterfly, 4) == pytest.approx(0, abs=1e-12)


@given(st.integers(0, 10**6))
def test_connected_windows_contract_and_unconnected_ones_do_not(seed: int) -> None:
    rng = random.Random(seed)
    groups = [rng.sample(range(MOST), rng.randint(1, 3)) for _ in range(4)]
    joined = connected([set(group) for group in groups], set(range(MOST)))
    assert (contraction(groups * 2 * MOST, MOST) < 1 - 1e-6) == joined


@pytest.mark.parametrize("make", [lambda: UnionConnectivity(0), lambda: CausalAge(-1)])
def test_invalid_bounds_are_refused(make: object) -> None:
    with pytest.raises(PolicyError, match="expected:"):
        make()  # type: ignore[operator]

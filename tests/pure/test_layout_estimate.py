"""Estimates of a layout and its annealing, compared with plain Python and with a simulation."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.cost.sync import GROUP_SIZE, Links, Sync
from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.jit import seed as seed_compiled
from polyrhythm.plan.construction import nearest
from polyrhythm.plan.draft import (
    PlanDraft,
    PlanShape,
    assign_microbatches,
    draft_to_plan,
    draft_with_devices,
    make_draft,
)
from polyrhythm.plan.layout import (
    anneal_layout,
    distances,
    evaluate_layout,
    initial_layouts,
    prices_of,
)
from polyrhythm.plan.layout_anneal import (
    _reverse_rows,
    _swap,
    _swap_suffix,
    anneal_step,
    order_rows,
)
from polyrhythm.plan.layout_kernel import LayoutPrices, LayoutState, make_state, values
from polyrhythm.plan.options import TrainingJob
from polyrhythm.plan.predict import predict
from polyrhythm.plan.problem import Problem
from tests.grids import num_examples
from tests.pure.plan_examples import profile
from tests.pure.step_cases import random_problem, seeds

SYNCS = ("all_reduce", "decoupled", "groups", "ring", "sequential")
SHAPES = ((1, 1), (1, 4), (2, 2), (3, 2), (2, 3), (4, 1), (2, 5))
LAYERS = {1: (7,), 2: (3, 4), 3: (2, 4, 1), 4: (2, 2, 2, 1)}


class Case:
    """A random problem with a random layout; up to 3 devices are idle."""

    def __init__(self, seed: int, *, memory: int | None = None) -> None:
        self.rng = np.random.default_rng(seed)
        self.shape = SHAPES[self.rng.integers(len(SHAPES))]
        num_places = self.shape[0] * self.shape[1]
        job = TrainingJob(
            batch_size=int(self.rng.integers(self.shape[1], 30)),
            sync=SYNCS[self.rng.integers(len(SYNCS))],
            objective=["time", "cost"][self.rng.integers(2)],
            unequal=bool(self.rng.integers(2)),
        )
        num_devices = num_places + int(self.rng.integers(4))
        self.problem = random_problem(self.rng, num_devices, 7, job)
        if memory is not None:
            devices = tuple(replace(d, memory=memory) for d in self.problem.cluster.devices)
            where = replace(self.problem.cluster, devices=devices)
            self.problem = replace(self.problem, cluster=where)
        if self.rng.integers(2):
            self._measure_nccl()
        order = self.rng.permutation(num_devices)
        self.devices = order[:num_places].reshape(self.shape).copy()
        self.idle = order[num_places:].copy()
        self.layers = LAYERS[self.shape[0]]

    def _measure_nccl(self) -> None:
        """Put the devices on two hosts, with links over NCCL inside these."""
        cluster = self.problem.cluster
        num_regions = len(cluster.regions)
        devices = tuple(replace(d, host=f"host {i % 2}") for i, d in enumerate(cluster.devices))
        latency, bandwidth = (
            tuple(map(tuple, self.rng.uniform(low, high, (num_regions, num_regions)).tolist()))
            for low, high in ((1e-6, 1e-4), (1e9, 1e11))
        )
        where = replace(cluster, devices=devices, nccl_latency=latency, nccl_bandwidth=bandwidth)
        self.problem = replace(self.problem, cluster=where)

    @property
    def prices(self) -> LayoutPrices:
        return prices_of(self.problem, self.layers, 1, self.shape[1])

    def state(self) -> LayoutState:
        return make_state(self.devices, self.idle, self.prices)


def plain_value(case: Case) -> float:
    """Return the time or price of the layout from the descriptions, term by term."""
    problem, grid = case.problem, case.devices.tolist()
    links, job = problem.links, problem.job
    averages = links.of_averages(Sync(job.sync))
    stages = problem.stages(case.layers, 1)
    num_stages, num_pipelines = case.shape
    price = dict(zip(problem.cluster.regions, problem.cluster.egress_price_per_gb, strict=True))
    regions = [device.region for device in problem.cluster.devices]

    def lat(a: int, b: int, links: Links = links) -> float:
        return float(links.latency[a, b] + links.latency[b, a])

    def slower(a: int, b: int) -> float:
        return float(min(averages.bandwidth[a, b], averages.bandwidth[b, a]))

    def egress(a: int, b: int) -> float:
        return 0.0 if regions[a] == regions[b] else (price[regions[a]] + price[regions[b]]) / 1e9

    first, period, sent = [], [], 0.0
    for p in range(num_pipelines):
        works = [
            (stages[s].forward + stages[s].backward) / problem.speeds[grid[s][p]]
            for s in range(num_stages)
        ]
        busy, in_transit = [0.0], 0.0
        for s in range(num_stages - 1):
            a, b, size = grid[s][p], grid[s + 1][p], stages[s].activation_bytes
            each = size / links.bandwidth[a, b], size / links.bandwidth[b, a]
            busy.append(max(each))
            in_transit += lat(a, b) + sum(each)
            sent += size * egress(a, b) * job.batch_size / num_pipelines
        first.append(sum(works) + in_transit)
        period.append(max(*works, *busy))
    syncs = []
    group = min(num_pipelines, GROUP_SIZE) if job.sync == "groups" else num_pipelines
    for s in range(num_stages):
        share = stages[s].gradient_bytes / group
        for a in grid[s]:
            others = [b for b in grid[s] if b != a]
            is_sequential = job.sync in ("ring", "sequential")
            trips = 1 if is_sequential else 2
            pairs = [trips * lat(a, b, averages) + 2 * share / slower(a, b) for b in others]
            over_gloo = [b for b in others if averages.uses_uplink[a, b]]
            num_peers = (group - 1) * len(over_gloo) / max(len(others), 1)
            all_sent = 2 * share * num_peers / links.uplinks[a]
            syncs.append(sum(pairs) if is_sequential else max([all_sent, *pairs]))
            some = (group - 1) / max(len(others), 1)  # of them, in groups
            sent += some * share * sum(egress(a, b) for b in others)
    if job.unequal:
        rest = (job.batch_size - num_pipelines) / sum(1 / each for each in period)
        takes = max(first) + rest + max(syncs)
    else:
        each = job.batch_size / num_pipelines - 1
        columns = [f + each * p for f, p in zip(first, period, strict=True)]
        takes = max(columns) + max(syncs)
    if job.objective != "cost":
        return takes
    used = [problem.cluster.devices[d].price_per_hour or 0.0 for d in case.devices.ravel()]
    return takes * sum(used) / 3600 + sent


@given(seeds)
def test_estimate_equals_plain_computation(seed: int) -> None:
    case = Case(seed)
    assert values(case.state(), case.prices)[0] == pytest.approx(plain_value(case))


def check_state(state: LayoutState, prices: LayoutPrices, num_devices: int) -> None:
    """Check that every device has one position, and that the sums of columns and rows are right."""
    assert sorted([*state.layout.ravel(), *state.idle]) == list(range(num_devices))
    anew = make_state(state.layout, state.idle, prices)
    for kept, made in zip(state, anew, strict=True):
        assert np.allclose(kept, made, rtol=1e-12, atol=0)  # a row is summed in another order


@given(seeds, st.integers(1, 20))
def test_moves_keep_state_consistent(seed: int, num_moves: int) -> None:
    case = Case(seed)
    state, prices, rng = case.state(), case.prices, case.rng
    num_stages, num_columns = case.shape
    num_devices = case.problem.num_devices
    for _ in range(num_moves):
        kind = rng.integers(3)
        if kind == 0:
            _swap(state, prices, rng.integers(num_devices), rng.integers(num_devices))
        elif kind == 1:
            p, q = rng.integers(num_columns, size=2)
            _swap_suffix(state, prices, rng.integers(num_stages), p, q)
        else:
            s, t = np.sort(rng.integers(num_stages, size=2))
            _reverse_rows(state, prices, s, t)
        check_state(state, prices, num_devices)


@settings(max_examples=num_examples(60))
@given(seeds)
def test_annealed_layout_is_no_worse_and_has_the_reported_value(seed: int) -> None:
    case = Case(seed)
    if case.problem.num_devices == 1:
        return
    before = values(case.state(), case.prices)[0]
    near = nearest(distances(case.problem), 8)
    seed_compiled(seed)
    found = anneal_step(
        case.devices, case.idle, case.prices, near, 500, 0.05 * before, 0.001 * before
    )
    everyone = sorted([*case.devices.ravel(), *case.idle])
    assert everyone == list(range(case.problem.num_devices))
    assert found == values(case.state(), case.prices)[0]
    assert found <= before


@settings(max_examples=num_examples(60))
@given(seeds)
def test_reordering_stages_keeps_the_stages(seed: int) -> None:
    case = Case(seed)
    before, rows = values(case.state(), case.prices)[0], sorted(map(list, case.devices))
    idle = case.idle.copy()
    found = order_rows(case.devices, case.idle, case.prices)
    assert sorted(map(list, case.devices)) == rows
    assert np.array_equal(case.idle, idle)
    assert found == values(case.state(), case.prices)[0] <= before


@pytest.mark.parametrize("seed", range(3))
def test_annealing_gives_the_same_layout_for_the_same_seed(seed: int) -> None:
    case = Case(seed + 20)
    start = evaluate_layout(case.prices, case.devices, case.idle)
    first, again = (
        anneal_layout(case.problem, case.prices, start, num_moves=2000, seed=seed) for _ in range(2)
    )
    assert np.array_equal(first.devices, again.devices)
    assert first.value == again.value <= start.value


def two_regions(parameter_bytes: int, activation_bytes: int) -> Problem:
    """Return 4 equal devices in each of two regions, shuffled; 10 ms and 10 MB/s between them."""
    shuffled = np.random.default_rng(1).permutation(8)
    layers = tuple(
        replace(layer, parameter_bytes=parameter_bytes, activation_bytes=activation_bytes)
        for layer in profile().layers
    )
    return Problem(
        cluster=Cluster(
            name="two regions",
            devices=tuple(Device(name=f"d{i}", region="ab"[i % 2]) for i in shuffled),
            regions=("a", "b"),
            latency=((0.0001, 0.01), (0.01, 0.0001)),
            bandwidth=((1e9, 1e7), (1e7, 1e9)),
        ),
        profile=replace(profile(), layers=layers),
        job=TrainingJob(batch_size=64),
    )


def regions_of(draft: PlanDraft, problem: Problem) -> np.ndarray:
    return np.array([device.region for device in problem.cluster.devices])[draft.layout.devices]


def test_pipelines_stay_in_a_region_if_activations_dominate() -> None:
    of = two_regions(parameter_bytes=1000, activation_bytes=10**6)
    found = regions_of(make_draft(of, PlanShape(4, 2, 2), num_moves=3000, seed=0), of)
    assert (found == found[:1]).all()


def test_replicas_stay_in_a_region_if_gradients_dominate() -> None:
    of = two_regions(parameter_bytes=10**8, activation_bytes=1000)
    found = regions_of(make_draft(of, PlanShape(4, 2, 2), num_moves=3000, seed=0), of)
    assert (found == found[:, :1]).all()
    assert (found[1:, 0] != found[:-1, 0]).sum() == 1, "regions are left once"


@settings(max_examples=num_examples(40))
@given(seeds)
def test_starts_have_every_device_once(seed: int) -> None:
    case = Case(seed)
    found = list(initial_layouts(case.problem, *case.shape))
    assert found
    for devices, idle in found:
        assert devices.shape == case.shape
        assert devices.flags.c_contiguous
        everyone = sorted([*devices.ravel(), *idle])
        assert everyone == list(range(case.problem.num_devices))


def test_device_without_memory_for_its_stage_costs_more_than_any_other_layout() -> None:
    case = Case(3, memory=10**9)
    roomy = values(case.state(), case.prices)[0]
    least = case.problem.least_memory(1)
    tight = int(least[0, case.layers[0]]) // 2
    devices = list(case.problem.cluster.devices)
    at = int(case.devices[0, 0])
    devices[at] = replace(devices[at], memory=tight)
    case.problem = replace(
        case.problem, cluster=replace(case.problem.cluster, devices=tuple(devices))
    )
    assert values(case.state(), case.prices)[0] > 100 * roomy


@given(
    st.lists(st.tuples(st.floats(0.1, 5), st.floats(0.1, 2)), min_size=1, max_size=3),
    st.integers(0, 6),
)
def test_microbatches_are_assigned_so_that_the_slowest_pipeline_is_fastest(
    pipelines: list[tuple[float, float]], more: int
) -> None:
    first, period = zip(*pipelines, strict=True)
    count = len(first) + more

    def takes(numbers: tuple[int, ...]) -> float:
        return max(f + (n - 1) * p for f, p, n in zip(first, period, numbers, strict=True))

    every = product(range(1, count + 1), repeat=len(first))
    best = min(takes(numbers) for numbers in every if sum(numbers) == count)
    counts = assign_microbatches(count, first, period, even=False)
    assert sum(counts) == count
    assert min(counts) >= 1
    assert best <= takes(counts) * (1 + 1e-9)
    assert takes(counts) <= best * 1.0101
    even = assign_microbatches(count, first, period, even=True)
    assert sum(even) == count
    assert max(even) - min(even) <= 1


@given(
    st.lists(st.tuples(st.floats(0.1, 50), st.floats(0.1, 2)), min_size=1, max_size=6),
    st.integers(0, 2000),
)
def test_many_microbatches_are_assigned_as_well_as_few(
    pipelines: list[tuple[float, float]], more: int
) -> None:
    """The optimum is the least time by which the pipelines finish all micro-batches."""
    first, period = zip(*pipelines, strict=True)
    count = len(first) + more

    def done_by(time: float) -> int:
        return sum(1 + max(0, int((time - f) / p)) for f, p in pipelines)

    low, high = max(first), max(first) + count * max(period)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if done_by(middle) >= count else (middle, high)
    counts = assign_microbatches(count, first, period, even=False)
    assert sum(counts) == count
    assert min(counts) >= 1
    takes = max(f + (n - 1) * p for f, p, n in zip(first, period, counts, strict=True))
    assert takes <= high * 1.0101


def simulated(case: Case) -> tuple[float, float]:
    """Return the estimate and the simulation of a layout with layers assigned to it."""
    shape = PlanShape(*case.shape, 1)
    draft = draft_with_devices(case.problem, shape, case.devices.tolist())
    return draft.value, predict(draft_to_plan(draft, case.problem), case.problem).time.total


def test_estimates_are_near_the_simulation() -> None:
    """Estimates are high if averaging overlaps the drain, and low if the coordinator is far."""
    shares = []
    for seed in range(150):
        case = Case(seed)
        job = replace(case.problem.job, sync="all_reduce", objective="time")
        case.problem = replace(case.problem, job=job)
        estimate, step = simulated(case)
        shares.append(estimate / step)
    assert min(shares) > 0.7
    assert max(shares) < 1.5
    assert 0.95 < np.median(shares) < 1.08


@settings(max_examples=num_examples(30))
@given(seeds)
def test_draft_becomes_a_plan_with_all_microbatches_and_devices(seed: int) -> None:
    case = Case(seed)
    draft = draft_with_devices(case.problem, PlanShape(*case.shape, 1), case.devices.tolist())
    plan = draft_to_plan(draft, case.problem)
    names = [device.name for device in case.problem.cluster.devices]
    used = [device for pipeline in plan.pipelines for device in pipeline.devices]
    assert sorted([*used, *plan.left_out]) == sorted(names)
    assert plan.batch == case.problem.job.batch_size
    numbers = [pipeline.num_microbatches or 0 for pipeline in plan.pipelines]
    assert case.problem.job.unequal or max(numbers) - min(numbers) <= 1
    column = [names[device] for device in draft.layout.devices[:, 0]]
    assert list(plan.pipelines[0].devices) == column
    assert plan.layers_per_stage == draft.layers_per_stage


@pytest.mark.parametrize("seed", range(6))
def test_layers_go_where_memory_allows(seed: int) -> None:
    """All devices but one have memory for half of the layers; that one must not exceed its own."""
    case = Case(seed)
    case.shape, case.devices = (3, 1), np.array([[0], [1], [2]])
    case.problem = random_problem(case.rng, 3, 7, TrainingJob(batch_size=8, memory_reserve=0.0))
    least = case.problem.least_memory(1)
    sizes = (int(least[0, 5]), int(max(least[i, i + 1] for i in range(7))), int(least[2, 7]))
    devices = tuple(
        replace(device, memory=size)
        for device, size in zip(case.problem.cluster.devices, sizes, strict=True)
    )
    case.problem = replace(case.problem, cluster=replace(case.problem.cluster, devices=devices))
    draft = make_draft(case.problem, PlanShape(3, 1, 1), num_moves=500, seed=seed)
    uses = predict(draft_to_plan(draft, case.problem), case.problem).uses
    assert all(use.limit is not None and use.memory <= use.limit for use in uses)

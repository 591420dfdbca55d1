"""Flows share connections fairly, within every capacity, and without losing bytes."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrhythm.cost.sync import SMALL
from polyrhythm.describe.scenario import LinkChange
from polyrhythm.simulate.engine.engine import Engine
from polyrhythm.simulate.epochs import NOTICE, RECONNECT
from polyrhythm.simulate.job import SimulatedJob
from polyrhythm.simulate.network import SimulatedNetwork
from polyrhythm.simulate.simulator import simulate
from tests.grids import num_examples
from tests.pure.simulate_cases import equal_job, kills_and_joins, linked, lost, region_per_device

Shares = Callable[[Sequence["Flow"]], list[float]]


@dataclass(frozen=True)
class Flow:
    start: float
    source: int
    target: int
    size: float


@dataclass(frozen=True)
class Hosts:
    """Uplinks and downlinks of hosts, and the links between them."""

    up: list[float]
    down: list[float]
    links: list[list[float]]

    def engine(self) -> Engine:
        job = equal_job(num_pipelines=len(self.up), forward=1.0, backward=1.0)
        cluster = region_per_device(len(self.up), bandwidth=self.links)
        devices = tuple(
            replace(device, uplink=up) for device, up in zip(cluster.devices, self.up, strict=True)
        )
        engine = Engine(replace(job, cluster=replace(cluster, devices=devices)))
        engine.state.hosts["down"][:-1] = self.down
        return engine

    def level(self, wanted: Sequence[float], capacity: float) -> float:
        """The equal share of all flows that want more than it, by trying all counts of them."""
        for count in range(len(wanted) + 1):
            low, high = sorted(wanted)[:count], sorted(wanted)[count:]
            level = (capacity - sum(low)) / len(high) if high else math.inf
            if all(want <= level for want in low) and all(want > level for want in high):
                return level
        raise AssertionError("no level fits")

    def rates(self, flows: Sequence[Flow]) -> list[float]:
        """The rate of each flow: the minimum of its link and its shares at both ends."""
        max_rates = [self.links[flow.source][flow.target] for flow in flows]

        def share(flow: Flow, end: str, capacities: list[float]) -> float:
            host = getattr(flow, end)
            wanted = [m for m, f in zip(max_rates, flows, strict=True) if getattr(f, end) == host]
            return self.level(wanted, capacities[host])

        return [
            min(m, share(flow, "source", self.up), share(flow, "target", self.down))
            for m, flow in zip(max_rates, flows, strict=True)
        ]


def fluid(flows: Sequence[Flow], rates: Shares) -> list[float]:
    """End of each flow in a fluid model: constant rates between two changes."""
    left, ends = [flow.size for flow in flows], [math.inf] * len(flows)
    now = 0.0
    while math.inf in ends:
        active = [i for i, f in enumerate(flows) if f.start <= now and ends[i] == math.inf]
        speeds = dict(zip(active, rates([flows[i] for i in active]), strict=True))
        due = {i: now + left[i] / speeds[i] for i in active}
        start = min((f.start for f in flows if f.start > now), default=math.inf)
        following = min([start, *due.values()])
        for i in active:
            left[i] = max(0.0, left[i] - speeds[i] * (following - now))
            if due[i] <= following * (1 + 1e-13):
                ends[i] = following
        now = following
    return ends


def run_flows(
    hosts: Hosts, flows: Sequence[Flow], check_rates: Callable[[Engine], None] | None = None
):
    """Return when each flow ends; call `check_rates` whenever rates have changed."""
    engine = hosts.engine()
    ends, owner_of = [math.inf] * len(flows), {}
    waiting = sorted(range(len(flows)), key=lambda i: flows[i].start)
    while math.inf in ends:
        until = flows[waiting[0]].start if waiting else math.inf
        event = engine.advance(until)
        if event is None:
            number = waiting.pop(0)
            owner = engine.new_owner()
            owner_of[owner] = number
            flow = flows[number]
            engine.flow_to_one(flow.start, flow.source, flow.target, flow.size, owner)
        else:
            ends[owner_of.pop(event.entity)] = event.time
            engine.free_owner(event.entity)
        if check_rates is not None:
            check_rates(engine)
    assert engine.advance(math.inf) is None
    return ends


@st.composite
def hosts_and_flows(draw: st.DrawFn, *, sources_only: bool = False) -> tuple[Hosts, list[Flow]]:
    num_hosts = draw(st.integers(2, 5))
    rng = random.Random(draw(st.integers(0, 2**32)))
    capacities = [1.0, 2.0, 5.0]
    hosts = Hosts(
        up=[rng.choice([*capacities, rng.uniform(0.5, 5)]) for _ in range(num_hosts)],
        down=[1e18 if sources_only else rng.choice(capacities) for _ in range(num_hosts)],
        links=[[rng.choice([0.3, 1.0, 10.0]) for _ in range(num_hosts)] for _ in range(num_hosts)],
    )
    flows = []
    for _ in range(draw(st.integers(1, 10))):
        source, target = rng.sample(range(num_hosts), 2)
        start = rng.choice([0.0, 0.0, 1.0, rng.uniform(0, 5)])
        flows.append(Flow(start, source, target, rng.choice([1.0, 2.0, rng.uniform(0.1, 4)])))
    return hosts, flows


@settings(max_examples=num_examples(50))
@given(hosts_and_flows(sources_only=True))
def test_shares_are_max_min_fair_if_only_uplinks_are_shared(case: tuple) -> None:
    """Progressive filling: no flow could have more without taking from one that has no more."""
    hosts, flows = case

    def filled(active: Sequence[Flow]) -> list[float]:
        max_rates = [hosts.links[flow.source][flow.target] for flow in active]
        rates, open_ = [0.0] * len(active), set(range(len(active)))
        while open_:
            steps = [max_rates[i] - rates[i] for i in open_]
            for source in {active[i].source for i in open_}:
                sent = [i for i in range(len(active)) if active[i].source == source]
                rising = [i for i in sent if i in open_]
                steps.append((hosts.up[source] - sum(rates[i] for i in sent)) / len(rising))
            step = max(0.0, min(steps))
            for i in open_:
                rates[i] += step
            full = {
                source
                for source in {flow.source for flow in active}
                if sum(r for r, f in zip(rates, active, strict=True) if f.source == source)
                >= hosts.up[source] * (1 - 1e-12)
            }
            open_ = {
                i
                for i in open_
                if active[i].source not in full and rates[i] < max_rates[i] * (1 - 1e-12)
            }
        return rates

    assert run_flows(hosts, flows) == pytest.approx(fluid(flows, filled), rel=1e-8)


@settings(max_examples=num_examples(50))
@given(hosts_and_flows())
def test_a_flow_is_as_fast_as_its_link_and_its_shares_at_both_ends(case: tuple) -> None:
    hosts, flows = case
    assert run_flows(hosts, flows) == pytest.approx(fluid(flows, hosts.rates), rel=1e-8)


@settings(max_examples=num_examples(40))
@given(hosts_and_flows())
def test_no_capacity_is_ever_exceeded_and_no_byte_lost(case: tuple) -> None:
    hosts, flows = case

    def check_rates(engine: Engine) -> None:
        state = engine.state
        sent, received = np.zeros(len(hosts.up)), np.zeros(len(hosts.up))
        for host in range(len(hosts.up)):
            index = state.hosts[host]["first_up"]
            while index >= 0:
                flow = state.flows[index]
                assert flow["source"] == host
                assert 0 < flow["rate"] <= hosts.links[host][flow["target"]]
                sent[host] += flow["rate"]
                received[flow["target"]] += flow["rate"]
                index = flow["next_up"]
        assert (sent <= np.array(hosts.up) * (1 + 1e-12)).all()
        assert (received <= np.array(hosts.down) * (1 + 1e-12)).all()

    ends = run_flows(hosts, flows, check_rates)
    for flow, end in zip(flows, ends, strict=True):
        fastest = min(
            hosts.links[flow.source][flow.target], hosts.up[flow.source], hosts.down[flow.target]
        )
        assert end >= flow.start + flow.size / fastest * (1 - 1e-12)
    for host, up in enumerate(hosts.up):
        sent = [(flow, end) for flow, end in zip(flows, ends, strict=True) if flow.source == host]
        if sent:  # the total fits into the time
            span = max(end for _, end in sent) - min(flow.start for flow, _ in sent)
            assert sum(flow.size for flow, _ in sent) <= up * span * (1 + 1e-9)


@settings(max_examples=num_examples(30))
@given(hosts_and_flows(), st.randoms(use_true_random=False))
def test_order_of_simultaneous_flows_does_not_matter(case: tuple, rng: random.Random) -> None:
    hosts, flows = case
    order = list(range(len(flows)))
    rng.shuffle(order)
    shuffled = run_flows(hosts, [flows[i] for i in order])
    assert shuffled == pytest.approx([run_flows(hosts, flows)[i] for i in order], rel=1e-9)


def test_single_flow_gets_the_uplink_and_equal_flows_equal_shares() -> None:
    hosts = Hosts(up=[4.0, 1e9, 1e9, 1e9], down=[1e9] * 4, links=[[100.0] * 4] * 4)
    alone = [Flow(0.0, 0, 1, 8.0)]
    assert run_flows(hosts, alone) == [2.0]
    assert run_flows(hosts, [Flow(0.0, 0, t, 8.0) for t in (1, 2, 3)]) == pytest.approx([6.0] * 3)


def test_bandwidth_left_by_a_slow_link_is_used_by_others() -> None:
    links = [[100.0] * 4 for _ in range(4)]
    links[0][1] = 1.0
    hosts = Hosts(up=[5.0, 1e9, 1e9, 1e9], down=[1e9] * 4, links=links)
    ends = run_flows(hosts, [Flow(0.0, 0, 1, 4.0), Flow(0.0, 0, 2, 4.0), Flow(0.0, 0, 3, 4.0)])
    assert ends == pytest.approx([4.0, 2.0, 2.0])


def test_receivers_share_their_connection() -> None:
    hosts = Hosts(up=[100.0] * 4, down=[3.0, 100.0, 100.0, 100.0], links=[[100.0] * 4] * 4)
    ends = run_flows(hosts, [Flow(0.0, source, 0, 3.0) for source in (1, 2, 3)])
    assert ends == pytest.approx([3.0] * 3)


def test_a_flow_that_ends_leaves_its_share_to_the_others() -> None:
    hosts = Hosts(up=[2.0, 1e9, 1e9], down=[1e9] * 3, links=[[100.0] * 3] * 3)
    ends = run_flows(hosts, [Flow(0.0, 0, 1, 1.0), Flow(0.0, 0, 2, 3.0), Flow(2.0, 0, 1, 2.0)])
    # Both at 1 until t=1; then 2 left at 2 until t=2; then the last alone.
    assert ends == pytest.approx([1.0, 2.0, 3.0])


def test_flow_to_many_counts_as_its_weight() -> None:
    """A flow to three receivers and one to a fourth: a quarter of the uplink per receiver."""
    hosts = Hosts(up=[8.0, 1e9, 1e9, 1e9, 1e9], down=[1e9] * 5, links=[[100.0] * 5] * 5)
    engine = hosts.engine()
    many, one = engine.new_owner(), engine.new_owner()
    engine.flows_to_many(0.0, [0], 12.0, [300.0], 3, many)
    engine.flow_to_one(0.0, 0, 4, 4.0, one)
    ended = [engine.advance(math.inf), engine.advance(math.inf)]
    assert sorted((h.entity, h.time) for h in ended if h) == [
        (owner, pytest.approx(2.0)) for owner in sorted((many, one))
    ]


def test_two_stages_of_one_device_share_its_uplink() -> None:
    """The averages of both stages are sent at half the rate."""
    hosts = Hosts(up=[4.0, 4.0], down=[4.0, 4.0], links=[[100.0] * 2] * 2)
    engine = hosts.engine()
    first, second = engine.new_owner(), engine.new_owner()
    engine.flows_to_many(0.0, [0, 1], 4.0, [4.0, 4.0], 1, first)
    engine.flows_to_many(0.0, [0, 1], 4.0, [4.0, 4.0], 1, second)
    times = [event.time for _ in range(2) if (event := engine.advance(math.inf))]
    assert times == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize("size", [0.0, 1000.0, float(SMALL), SMALL + 1.0, 1e7])
@pytest.mark.parametrize("num_members", [2, 3, 5])
def test_unshared_exchange_takes_two_phases(size: float, num_members: int) -> None:
    """The shortcut for an unshared network gives the same times as flows."""
    ends = {}
    for uplink in (None, 9e16):
        job = equal_job(
            num_pipelines=num_members,
            forward=0.1,
            backward=0.2,
            gradient_bytes=size,
            latency=0.01,
            bandwidth=1e6,
            uplink=uplink,
        )
        ends[uplink] = simulate(job, num_steps=2).ends[0]
    assert ends[None] == pytest.approx(ends[9e16], rel=1e-9)
    phase = SimulatedNetwork(job.cluster).phase_time(range(num_members), size)
    # Each worker but the first has two round trips to the coordinator.
    assert ends[None][0] == pytest.approx(0.3 + 4 * 0.01 + 2 * (phase + 2 * 0.01), abs=0.011)


def many_workers(num_members: int = 200, **more: object) -> SimulatedJob:
    """A job of workers that exchange a small buffer over slow connections."""
    return equal_job(
        num_pipelines=num_members,
        forward=0.1,
        backward=0.2,
        gradient_bytes=1e4,
        bandwidth=1e8,
        uplink=1e6,
        **more,  # type: ignore[arg-type]
    )


def test_many_workers_share_one_connection() -> None:
    """All send to the owner of a small buffer at once, and it to all: many shares change."""
    for num_members in (3, 200):
        job = many_workers(num_members)
        phase = (num_members - 1) * 1e4 / 1e6
        expected = [0.3 + 2 * phase, 2 * (0.3 + 2 * phase)]
        assert simulate(job, num_steps=2).ends == (pytest.approx(expected),) * num_members


def test_many_workers_share_a_parameter_server() -> None:
    """The server is on the device of the first worker, which sends nothing to itself."""
    ends = simulate(many_workers(policy="ssp", options={"staleness": 0}), num_steps=3).ends
    # The second step: compute, then all others push, then all pull.
    assert ends[1][1] - ends[1][0] == pytest.approx(0.3 + 2 * 199 * 1e4 / 1e6)


def test_many_workers_repeat_a_step_without_a_lost_one() -> None:
    """One dies while all send to the owner of a small buffer; one takes over its micro-batch."""
    ends = simulate(many_workers(scenario=kills_and_joins(kill=[("d5", 0.35)])), num_steps=1).ends
    assert ends[199] == ()
    expected = 0.35 + NOTICE + RECONNECT + 2 * 0.3 + 2 * 198 * 1e4 / 1e6
    assert ends[4][0] == pytest.approx(expected)


def test_a_link_that_is_lost_for_good_ends_a_simulation() -> None:
    scenario = linked(lost(3.0))
    for policy in ("all_reduce", "adaptive", "pairwise", "ssp", "local"):
        job = equal_job(
            num_stages=2,
            num_pipelines=3,
            forward=0.1,
            backward=0.2,
            activation_bytes=1e5,
            gradient_bytes=1e6,
            latency=0.001,
            bandwidth=1e8,
            num_microbatches=4,
            policy=policy,
            scenario=scenario,
        )
        assert "no pipeline could continue" in simulate(job, num_steps=20).stop_reason


def test_links_inside_a_region_may_be_changed_by_its_name_or_by_devices() -> None:
    """Changing a region's links equals changing all links between its devices."""
    base = equal_job(
        num_stages=2,
        num_pipelines=2,
        forward=0.1,
        backward=0.2,
        activation_bytes=1e6,
        gradient_bytes=1e6,
        bandwidth=1e7,
        num_microbatches=3,
    )
    names = [device.name for device in base.cluster.devices]
    slower = {"at": 1.0, "bandwidth": 1e6, "latency": 0.02}
    region = linked(_changed("here", "here", slower))
    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
    devices = linked(*(_changed(a, b, slower) for a, b in pairs))
    by_region, by_devices = (
        simulate(replace(base, scenario=scenario), num_steps=6) for scenario in (region, devices)
    )
    assert by_devices.ends == by_region.ends
    assert by_devices.bytes_sent.tolist() == by_region.bytes_sent.tolist()
    assert by_region.duration > simulate(base, num_steps=6).duration


def _changed(a: str, b: str, how: dict[str, float]) -> LinkChange:
    return LinkChange(source=a, target=b, **how)

"""Flows: the rates of transfers that share a host's connection.

The rate of a flow is the minimum of its link's bandwidth, its share of its source's uplink, and its
share of its target's downlink. A host divides its connection by weights; what a flow cannot use
because its link is slower goes to the others. (What it cannot use because of its other end does
not: shares of one host would depend on those of all.) Shares change when a flow starts or ends.
"""

from polyrhythm.jit import compiled, inlined
from polyrhythm.simulate.engine.state import (
    ARRIVED,
    FREE_FLOW,
    NO_LIMIT,
    NONE,
    NUM_FLOWS,
    EngineState,
    push,
)


@inlined
def begin_flow(
    state: EngineState,
    now: float,
    source: int,
    target: int,
    size: float,
    max_rate: float,
    weight: float,
    channel: int,
    microbatch: int,
    owner: int,
) -> None:
    """Start a flow; `max_rate` is its link's bandwidth; a flow to many receivers has no target."""
    counts, hosts = state.counts, state.hosts
    index = counts[FREE_FLOW]
    flow = state.flows[index]
    counts[FREE_FLOW] = flow.next_up
    counts[NUM_FLOWS] += 1
    flow.channel, flow.microbatch, flow.owner = channel, microbatch, owner
    flow.source, flow.target = source, target
    flow.left, flow.max_rate, flow.weight = size, max_rate, weight
    flow.up_share = flow.down_share = NO_LIMIT
    is_message = channel != NONE
    flow.up_alone = 1 if is_message and not hosts[source].is_known else 0
    flow.down_alone = 1 if is_message and not hosts[target].is_known else 0
    flow.rate, flow.since = 0.0, now
    flow.version += 1
    flow.next_up, hosts[source].first_up = hosts[source].first_up, index
    flow.next_down = NONE
    if target != NONE:
        flow.next_down, hosts[target].first_down = hosts[target].first_down, index
    if not flow.up_alone:
        _share(state, now, source, True)
    if target != NONE and not flow.down_alone:
        _share(state, now, target, False)
    if flow.rate == 0.0:  # nothing is shared
        _set_rate(state, index, now)


@inlined
def end_flow(state: EngineState, index: int, now: float) -> None:
    flow = state.flows[index]
    source, target = flow.source, flow.target
    _remove_flow(state, index)
    if not flow.up_alone:
        _share(state, now, source, True)
    if target != NONE and not flow.down_alone:
        _share(state, now, target, False)


@compiled
def drop_flows(state: EngineState, now: float, owner: int) -> None:
    """Drop all flows of one owner, then divide the connections once."""
    for index in range(len(state.flows)):
        flow = state.flows[index]
        if flow.source != NONE and flow.channel == NONE and flow.owner == owner:
            _remove_flow(state, index)
    state.owners[owner] = 0
    _share_all(state, now)


@compiled
def change_rates(state: EngineState, now: float) -> None:
    """Update the rates of all flows after a change of links."""
    for host in range(len(state.hosts)):
        index = state.hosts[host].first_up
        while index != NONE:
            flow = state.flows[index]
            if flow.target != NONE:
                source, target = state.hosts[flow.source].region, state.hosts[flow.target].region
                flow.max_rate = state.links[1, source, target]
            index = flow.next_up
    _share_all(state, now)


@inlined
def _share_all(state: EngineState, now: float) -> None:
    for host in range(len(state.hosts)):
        _share(state, now, host, True)
        _share(state, now, host, False)
        index = state.hosts[host].first_up
        while index != NONE:
            _set_rate(state, index, now)
            index = state.flows[index].next_up


@inlined
def _remove_flow(state: EngineState, index: int) -> None:
    flow = state.flows[index]
    _unlink(state, index, flow.source, flow.target)
    flow.version += 1
    flow.source = NONE
    flow.next_up = state.counts[FREE_FLOW]
    state.counts[FREE_FLOW] = index
    state.counts[NUM_FLOWS] -= 1


@inlined
def _share(state: EngineState, now: float, host: int, is_up: bool) -> None:
    """Divide a host's uplink (`is_up`) or downlink among its flows."""
    flows = state.flows
    first = state.hosts[host].first_up if is_up else state.hosts[host].first_down
    capacity = state.hosts[host].up if is_up else state.hosts[host].down
    # A flow whose link is slower than the level uses its link, which raises the level for others.
    level, before = 0.0, -1.0
    while level != before:
        before = level
        left, weights = capacity, 0.0
        index = first
        while index != NONE:
            flow = flows[index]
            if not (flow.up_alone if is_up else flow.down_alone):
                if flow.max_rate <= before * flow.weight:
                    left -= flow.max_rate
                else:
                    weights += flow.weight
            index = flow.next_up if is_up else flow.next_down
        if weights > 0.0:
            level = max(before, left / weights)
    index = first
    while index != NONE:
        flow = flows[index]
        if is_up and not flow.up_alone:
            flow.up_share = level * flow.weight if capacity < NO_LIMIT else NO_LIMIT
        elif not is_up and not flow.down_alone:
            flow.down_share = level * flow.weight if capacity < NO_LIMIT else NO_LIMIT
        _set_rate(state, index, now)
        index = flow.next_up if is_up else flow.next_down


@inlined
def _set_rate(state: EngineState, index: int, now: float) -> None:
    flow = state.flows[index]
    rate = min(flow.max_rate, flow.up_share, flow.down_share)
    if rate == flow.rate:
        return
    flow.left = max(0.0, flow.left - flow.rate * (now - flow.since))
    flow.rate, flow.since = rate, now
    flow.version += 1
    if rate > 0.0:  # else its link is lost until the next change
        push(state, now + flow.left / rate, ARRIVED, index, flow.version)


@inlined
def _unlink(state: EngineState, index: int, source: int, target: int) -> None:
    flows, hosts = state.flows, state.hosts
    previous = hosts[source].first_up
    if previous == index:
        hosts[source].first_up = flows[index].next_up
    else:
        while flows[previous].next_up != index:
            previous = flows[previous].next_up
        flows[previous].next_up = flows[index].next_up
    if target == NONE:
        return
    previous = hosts[target].first_down
    if previous == index:
        hosts[target].first_down = flows[index].next_down
    else:
        while flows[previous].next_down != index:
            previous = flows[previous].next_down
        flows[previous].next_down = flows[index].next_down

"""Flows: how fast bytes travel where several use one host's connection.

A flow is as fast as its link, as its share of what its source can send, and as its share of what
its target can receive. A host deals its connection by weights; what a flow cannot use because its
link is slower goes to the others. (What it cannot use because of its other end does not: shares of
one host would depend on those of all.) Shares change when a flow begins or ends.
"""

from polyrhythm.compiled import compiled, inlined
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
    """`max_rate` is the speed of its link; a flow to many has no target."""
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
    """All of one owner; what they leave is dealt once, for all of them."""
    for index in range(len(state.flows)):
        flow = state.flows[index]
        if flow.source != NONE and flow.channel == NONE and flow.owner == owner:
            _remove_flow(state, index)
    state.owners[owner] = 0
    _share_all(state, now)


@compiled
def change_rates(state: EngineState, now: float) -> None:
    """Links have changed: all messages go on at the speed that theirs have now."""
    for host in range(len(state.hosts)):
        index = state.hosts[host].first_up
        while index != NONE:
            flow = state.flows[index]
            if flow.target != NONE:
                here, there = state.hosts[flow.source].region, state.hosts[flow.target].region
                flow.max_rate = state.links[1, here, there]
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
    """Deal what a host can send (`is_up`) or receive anew among its flows."""
    flows = state.flows
    first = state.hosts[host].first_up if is_up else state.hosts[host].first_down
    capacity = state.hosts[host].up if is_up else state.hosts[host].down
    # A flow that needs less than the level keeps to its link, which raises the level for others.
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
    if rate > 0.0:  # else its link is lost, until it changes
        push(state, now + flow.left / rate, ARRIVED, index, flow.version)


@inlined
def _unlink(state: EngineState, index: int, source: int, target: int) -> None:
    flows, hosts = state.flows, state.hosts
    at = hosts[source].first_up
    if at == index:
        hosts[source].first_up = flows[index].next_up
    else:
        while flows[at].next_up != index:
            at = flows[at].next_up
        flows[at].next_up = flows[index].next_up
    if target == NONE:
        return
    at = hosts[target].first_down
    if at == index:
        hosts[target].first_down = flows[index].next_down
    else:
        while flows[at].next_down != index:
            at = flows[at].next_down
        flows[at].next_down = flows[index].next_down

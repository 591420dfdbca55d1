"""Execution: runs compute their actions in order, each when its message has arrived.

`advance` continues until an event that the simulator handles: a run has ended its step, or the
flows of an average have ended. A run starts its next step when it is released.
"""

import numpy as np

from polyrhythm.jit import Floats, Ints, compiled, inlined
from polyrhythm.simulate.engine.actions import (
    compute,
    count_action,
    count_step,
    deliver,
    has_draws,
    message_time,
    next_action,
    num_actions,
    send_alone,
    was_awaited,
)
from polyrhythm.simulate.engine.flows import begin_flow, end_flow
from polyrhythm.simulate.engine.state import (
    ARRIVED,
    AWAKE,
    COMPUTED,
    ENDED,
    FLOWS_ENDED,
    HEAP_FULL,
    HEAP_SIZE,
    NEEDS_DRAWS,
    NONE,
    NOTHING,
    NUM_EVENTS,
    NUM_FLOWS,
    NUM_RECORDS,
    RECORDS_FULL,
    SPARE,
    STARVED,
    STEP_ENDED,
    STOPPED,
    SYNCING,
    WAKING,
    EngineState,
    pop,
    push,
)


@compiled
def advance(
    state: EngineState, until: float, shares: bool, use_fast_path: bool
) -> tuple[int, int, float]:
    """Advance; return the kind of event, its run, owner or host, and its time.

    NOTHING if no event is due by `until`, with the time of the next one. `shares`: messages are
    flows, since hosts share their connections or links change. `use_fast_path`: runs do not affect
    each other except by messages.
    """
    counts, times = state.counts, state.times
    while counts[HEAP_SIZE] > 0 and times[0] <= until:
        if counts[HEAP_SIZE] + 4 * counts[NUM_FLOWS] + len(state.runs) + SPARE > len(times):
            return HEAP_FULL, 0, times[0]
        if len(state.records) > 0 and counts[NUM_RECORDS] == len(state.records):
            return RECORDS_FULL, 0, times[0]
        now = times[0]
        code = pop(state)
        counts[NUM_EVENTS] += 1
        kind, index, stamp = code & 3, (code >> 2) & 0x3FFFFFFF, code >> 32
        if kind == ARRIVED:
            flow = state.flows[index]
            if flow.version != stamp:
                continue
            channel, microbatch, owner = flow.channel, flow.microbatch, flow.owner
            end_flow(state, index, now)
            if channel != NONE:
                _message_left(state, channel, microbatch, owner, now)
            else:
                state.owners[owner] -= 1
                if state.owners[owner] == 0:
                    return FLOWS_ENDED, owner, now
            continue
        run = state.runs[index]
        if run.incarnation != stamp:
            continue
        if kind == ENDED or (kind == COMPUTED and _end_action(state, index, now, shares)):
            run.status, run.since = SYNCING, now
            count_step(state, index)
            return STEP_ENDED, index, now
        if not has_draws(state, run.device):
            run.status = WAKING
            push(state, now, AWAKE, index, run.incarnation)
            return NEEDS_DRAWS, run.device, now
        if use_fast_path:
            run_fast_path(state, index)
        else:
            _begin_action(state, index, now)
    return NOTHING, 0, times[0] if counts[HEAP_SIZE] > 0 else np.inf


@compiled
def release(
    state: EngineState,
    index: int,
    time: float,
    first_arrival: float,
    last_arrival: float,
    last_fraction: float,
) -> None:
    """Start the next step of a run at `time`; its first forward may wait for buckets (see RUN)."""
    run = state.runs[index]
    run.place, run.step = 0, run.step + 1
    run.status, run.first_arrival, run.last_arrival = WAKING, first_arrival, last_arrival
    run.last_fraction = last_fraction
    run.since = time
    push(state, time, AWAKE, index, run.incarnation)


@compiled
def stop(state: EngineState, index: int) -> None:
    """Stop a lost run and discard its events and messages."""
    run = state.runs[index]
    run.incarnation += 1
    run.status = STOPPED
    for direction in range(2):
        state.channels[2 * index + direction].num_waiting = 0
        for i in range(state.inbox.shape[2]):
            state.inbox[direction, index, i] = np.inf


@compiled
def flows_to_many(
    state: EngineState,
    now: float,
    sources: Ints,
    size: float,
    max_rate: Floats,
    weight: float,
    owner: int,
) -> None:
    """Start a flow of `size` bytes from each source; it counts as `weight` connections."""
    state.owners[owner] += len(sources)
    for i in range(len(sources)):
        begin_flow(state, now, sources[i], NONE, size, max_rate[i], weight, NONE, 0, owner)


@compiled
def flow_to_one(
    state: EngineState, now: float, source: int, target: int, size: float, owner: int
) -> None:
    state.owners[owner] += 1
    hosts = state.hosts
    max_rate = state.links[1, hosts[source].region, hosts[target].region]
    begin_flow(state, now, source, target, size, max_rate, 1.0, NONE, 0, owner)


@inlined
def run_fast_path(state: EngineState, first: int) -> None:
    """Execute an undisturbed pipeline with one event per step.

    Start from a run that was released, or that had run out of random draws. If hosts share no
    connection, links do not change and no device is lost, an action starts when the previous one
    has ended and its message has arrived. So a released run executes all actions that it has
    messages for, then its neighbours those that became possible, and so on; only the ends of steps,
    which the simulator handles, are put on the heap.
    """
    stack, runs = state.stack, state.runs
    stack[0] = first
    size = 1
    while size > 0:
        size -= 1
        index = stack[size]
        run = runs[index]
        while True:
            if run.place == num_actions(state, index):
                run.status = WAKING
                push(state, run.since, ENDED, index, run.incarnation)
                break
            arrival = message_time(state, index)
            if arrival == float("inf"):
                run.status = STARVED
                break
            start = max(run.since, arrival)
            if not has_draws(state, run.device) or _is_full(state):
                run.status = WAKING
                push(state, start, AWAKE, index, run.incarnation)
                break
            end = compute(state, index, start)
            number = count_action(state, index, end)
            if number != NONE:
                microbatch = next_action(state, index) >> 1
                deliver(state, number, microbatch, send_alone(state, number, end))
                if was_awaited(state, number, microbatch):
                    stack[size] = state.channels[number].target
                    size += 1
            run.place += 1
            run.since = end


@inlined
def _is_full(state: EngineState) -> bool:
    return bool(0 < len(state.records) == state.counts[NUM_RECORDS])


@inlined
def _begin_action(state: EngineState, index: int, now: float) -> None:
    """Start the next action of a run, or wait for its message."""
    run = state.runs[index]
    arrival = message_time(state, index)
    if arrival <= now:
        end = compute(state, index, now)
        push(state, end, COMPUTED, index, run.incarnation)
    elif arrival < np.inf:
        run.status = WAKING
        push(state, arrival, AWAKE, index, run.incarnation)
    else:
        run.status = STARVED


@inlined
def _end_action(state: EngineState, index: int, now: float, shares: bool) -> bool:
    """Send the result to the next or previous run; return whether the step has ended."""
    run = state.runs[index]
    number = count_action(state, index, now)
    if number != NONE:
        microbatch, channel = next_action(state, index) >> 1, state.channels[number]
        if not shares:
            _deliver(state, number, microbatch, send_alone(state, number, now))
        elif channel.is_busy:
            size = state.queues.shape[1]
            state.queues[number, (channel.head + channel.num_waiting) % size] = microbatch
            channel.num_waiting += 1
        else:
            _begin_message(state, number, microbatch, now)
    run.place += 1
    run.since = now
    return bool(run.place == num_actions(state, index))


@inlined
def _begin_message(state: EngineState, number: int, microbatch: int, now: float) -> None:
    channel = state.channels[number]
    channel.is_busy = 1
    source, target = state.runs[channel.source].device, state.runs[channel.target].device
    max_rate = state.links[1, state.hosts[source].region, state.hosts[target].region]
    incarnation = state.runs[channel.source].incarnation
    begin_flow(
        state, now, source, target, channel.size, max_rate, 1.0, number, microbatch, incarnation
    )


@inlined
def _message_left(
    state: EngineState, number: int, microbatch: int, incarnation: int, now: float
) -> None:
    channel = state.channels[number]
    channel.is_busy = 0
    if state.runs[channel.source].incarnation == incarnation:
        _deliver(state, number, microbatch, now)
    if channel.num_waiting > 0:
        following = state.queues[number, channel.head]
        channel.head = (channel.head + 1) % state.queues.shape[1]
        channel.num_waiting -= 1
        _begin_message(state, number, following, now)


@inlined
def _deliver(state: EngineState, number: int, microbatch: int, left: float) -> None:
    arrival = deliver(state, number, microbatch, left)
    if was_awaited(state, number, microbatch):
        target = state.channels[number].target
        push(state, arrival, AWAKE, target, state.runs[target].incarnation)

"""Execute: runs compute their actions in order, each when what it needs is there.

`advance` goes on until something happens that others decide about: a run has ended its step, or
the flows of an average have arrived. A run then begins its next step when it is released.
"""

import numpy as np

from polyrhythm.compiled import Floats, Ints, compiled, inlined
from polyrhythm.simulate.engine.sharing import begin_flow, end_flow
from polyrhythm.simulate.engine.state import (
    ARRIVED,
    AWAKE,
    COMPUTED,
    COMPUTES,
    FLOWS_ENDED,
    GONE,
    HEAP_FULL,
    HEAP_SIZE,
    MEETS,
    NEEDS_LUCK,
    NONE,
    NOTHING,
    NUM_ACTIONS,
    NUM_EVENTS,
    NUM_FLOWS,
    NUM_RECORDS,
    RECORDS_FULL,
    SPARE,
    STARVES,
    STEP_ENDED,
    WAKES,
    State,
    pop,
    push,
)


@compiled
def advance(state: State, until: float, shares: bool) -> tuple[int, int, float]:
    """Why it returns, of which run, owner or host, and when.

    NOTHING if nothing is due by then, with the time of what comes next.

    `shares`: messages are flows, since hosts share their connections or links change.
    """
    counts, times = state.counts, state.times
    while counts[HEAP_SIZE] > 0 and times[0] <= until:
        if counts[HEAP_SIZE] + 4 * counts[NUM_FLOWS] + SPARE > len(times):
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
        if run.life != stamp:
            continue
        if kind == COMPUTED:
            _send_result(state, index, now, shares)
            run.place += 1
            if run.place == _num_actions(state, index):
                run.at, run.since = MEETS, now
                return STEP_ENDED, index, now
        if not _begin_action(state, index, now):
            push(state, now, AWAKE, index, run.life)
            run.at = WAKES
            return NEEDS_LUCK, run.device, now
    return NOTHING, 0, times[0] if counts[HEAP_SIZE] > 0 else np.inf


@compiled
def release(state: State, index: int, time: float, gate: float) -> None:
    """A run begins its next step at `time`; its first forward does not end before `gate`."""
    run = state.runs[index]
    run.place, run.step = 0, run.step + 1
    run.at, run.gate, run.began = WAKES, gate, time
    run.since = time
    push(state, time, AWAKE, index, run.life)


@compiled
def stop(state: State, index: int) -> None:
    """A run is gone: nothing of it happens any more."""
    run = state.runs[index]
    run.life += 1
    run.at = GONE
    for direction in range(2):
        state.channels[2 * index + direction].num_waiting = 0
        for place in range(state.inbox.shape[2]):
            state.inbox[direction, index, place] = np.inf


@compiled
def flows_to_many(
    state: State, now: float, sources: Ints, size: float, most: Floats, weight: float, owner: int
) -> None:
    """One from each source, of so many bytes; it stands for `weight` connections."""
    state.owners[owner] += len(sources)
    for place in range(len(sources)):
        rate = most[place]
        begin_flow(state, now, sources[place], NONE, size, rate, weight, NONE, 0, owner)


@compiled
def flow_to_one(
    state: State, now: float, source: int, target: int, size: float, owner: int
) -> None:
    state.owners[owner] += 1
    hosts = state.hosts
    most = state.links[1, hosts[source].region, hosts[target].region]
    begin_flow(state, now, source, target, size, most, 1.0, NONE, 0, owner)


@inlined
def _num_actions(state: State, index: int) -> int:
    run = state.runs[index]
    if run.in_flight == 0:
        return int(run.num_actions)
    return 2 if run.step >= run.in_flight - 1 else 1


@inlined
def _action(state: State, index: int) -> int:
    """Its code; one that is never flushed runs the next forward and the oldest backward."""
    run = state.runs[index]
    if run.in_flight == 0:
        return int(state.actions[run.list + run.place])
    if run.place == 0:
        return int(2 * run.step)
    return int(2 * (run.step - run.in_flight + 1) + 1)


@inlined
def _begin_action(state: State, index: int, now: float) -> bool:
    """Or wait for its message; False if draws are lacking."""
    run = state.runs[index]
    if run.at == COMPUTES:
        run.since = now  # it has ended the last one just now
    code = _action(state, index)
    direction = code & 1
    place = (code >> 1) % state.inbox.shape[2]
    peer = run.after if direction else run.before
    if peer != NONE:
        there = state.inbox[direction, index, place]
        if there > now:
            run.at = STARVES
            if there < np.inf:
                run.at = WAKES
                push(state, there, AWAKE, index, run.life)
            return True
    if not _has_luck(state, run.device):
        return False
    if peer != NONE:
        state.inbox[direction, index, place] = np.inf
    run.waited = now - run.since
    run.starved += run.waited
    work = run.backward if direction else run.forward
    takes = work + _delay(state, run.device, now, work, run.forward + run.backward)
    end = _paused(state, run.device, now, takes)
    if run.place == 0 and run.gate > end:
        end = run.gate
    run.busy += takes
    run.at, run.since, run.last_began = COMPUTES, now, now
    push(state, end, COMPUTED, index, run.life)
    return True


@inlined
def _send_result(state: State, index: int, now: float, shares: bool) -> None:
    """An action has ended: its result goes to the next run, or back to the one before."""
    run, counts = state.runs[index], state.counts
    counts[NUM_ACTIONS] += 1
    code = _action(state, index)
    if len(state.records) > 0:
        record = state.records[counts[NUM_RECORDS]]
        counts[NUM_RECORDS] += 1
        record.run, record.code, record.step = index, code, run.first + run.step
        record.start, record.end, record.waited = run.since, now, run.waited
    direction = code & 1
    if (run.before if direction else run.after) == NONE:
        return
    number, microbatch = 2 * index + direction, code >> 1
    channel = state.channels[number]
    here, there = state.hosts[run.device], state.hosts[state.runs[channel.target].device]
    state.sent[here.region, there.region] += channel.size
    if shares:
        if channel.is_busy:
            places = state.queues.shape[1]
            state.queues[number, (channel.head + channel.num_waiting) % places] = microbatch
            channel.num_waiting += 1
        else:
            _begin_message(state, number, microbatch, now)
        return
    channel.free = max(channel.free, now) + channel.size / state.links[1, here.region, there.region]
    _deliver(state, number, microbatch, channel.free)


@inlined
def _begin_message(state: State, number: int, microbatch: int, now: float) -> None:
    channel = state.channels[number]
    channel.is_busy = 1
    source, target = state.runs[channel.source].device, state.runs[channel.target].device
    most = state.links[1, state.hosts[source].region, state.hosts[target].region]
    life = state.runs[channel.source].life
    begin_flow(state, now, source, target, channel.size, most, 1.0, number, microbatch, life)


@inlined
def _message_left(state: State, number: int, microbatch: int, life: int, now: float) -> None:
    channel = state.channels[number]
    channel.is_busy = 0
    if state.runs[channel.source].life == life:
        _deliver(state, number, microbatch, now)
    if channel.num_waiting > 0:
        following = state.queues[number, channel.head]
        channel.head = (channel.head + 1) % state.queues.shape[1]
        channel.num_waiting -= 1
        _begin_message(state, number, following, now)


@inlined
def _deliver(state: State, number: int, microbatch: int, left: float) -> None:
    """Its last byte leaves at `left`, and is there a latency later."""
    channel = state.channels[number]
    target = state.runs[channel.target]
    here = state.hosts[state.runs[channel.source].device].region
    there = left + state.links[0, here, state.hosts[target.device].region]
    direction = number & 1  # activations go down, gradients up
    state.inbox[direction, channel.target, microbatch % state.inbox.shape[2]] = there
    if target.at == STARVES and _action(state, channel.target) == 2 * microbatch + direction:
        target.at = WAKES
        push(state, there, AWAKE, channel.target, target.life)


@inlined
def _has_luck(state: State, device: int) -> bool:
    for entry in range(state.hosts[device].slow, state.hosts[device + 1].slow):
        if state.slow[entry].used == state.luck.shape[1]:
            return False
    return True


@inlined
def _delay(state: State, device: int, now: float, work: float, both: float) -> float:
    """As `describe.slowness.Slowness.delay`, with the same draws."""
    total = 0.0
    for entry in range(state.hosts[device].slow, state.hosts[device + 1].slow):
        slow = state.slow[entry]
        luck = state.luck[entry, slow.used]
        slow.used += 1
        if not slow.start <= now < slow.until:
            continue
        if slow.bins != NONE:
            part = (now - slow.start) / slow.duration
            if part >= 1.0:
                slow.has_ended = 1
            place = min(int(min(part, 1.0) * slow.num_bins), slow.num_bins - 1)
            lowest, highest = state.bins[slow.bins + place, 0], state.bins[slow.bins + place, 1]
            total += (1 / (lowest + luck * (highest - lowest)) - 1) * work
        elif slow.factor == slow.factor:
            total += (slow.factor - 1) * work
        elif luck < slow.probability:
            total += slow.sleep_factor * both
    return total


@inlined
def _paused(state: State, device: int, now: float, takes: float) -> float:
    """When work that begins now is done, if the device stands still now and then."""
    for place in range(state.hosts[device].pauses, state.hosts[device + 1].pauses):
        start, until = state.pauses[place, 0], state.pauses[place, 1]
        if until <= now:
            continue
        if start >= now + takes:
            break
        takes -= max(0.0, start - now)
        now = until
    return now + takes

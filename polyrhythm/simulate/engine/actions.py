"""One action of a run: what it needs, what it takes, what is known once it is done."""

import numpy as np

from polyrhythm.compiled import inlined
from polyrhythm.simulate.engine.state import (
    COMPUTING,
    NONE,
    NUM_ACTIONS,
    NUM_RECORDS,
    STARVED,
    WAKING,
    EngineState,
)


@inlined
def num_actions(state: EngineState, index: int) -> int:
    run = state.runs[index]
    if run.in_flight == 0:
        return int(run.num_actions)
    return 2 if run.step >= run.in_flight - 1 else 1


@inlined
def next_action(state: EngineState, index: int) -> int:
    """Its code; one that is never flushed runs the next forward and the oldest backward."""
    run = state.runs[index]
    if run.in_flight == 0:
        return int(state.actions[run.list + run.place])
    if run.place == 0:
        return int(2 * run.step)
    return int(2 * (run.step - run.in_flight + 1) + 1)


@inlined
def message_time(state: EngineState, index: int) -> float:
    """When what the next action needs is there; inf if nobody knows yet."""
    run = state.runs[index]
    code = next_action(state, index)
    direction = code & 1
    if (run.after if direction else run.before) == NONE:
        return float(-np.inf)
    return float(state.inbox[direction, index, (code >> 1) % state.inbox.shape[2]])


@inlined
def compute(state: EngineState, index: int, now: float) -> float:
    """Begin the next action; when it ends."""
    run = state.runs[index]
    code = next_action(state, index)
    direction = code & 1
    if (run.after if direction else run.before) != NONE:
        state.inbox[direction, index, (code >> 1) % state.inbox.shape[2]] = np.inf
    run.waited = now - run.since
    run.starved += run.waited
    work = run.backward if direction else run.forward
    takes = work + _delay(state, run.device, now, work, run.forward + run.backward)
    run.busy += takes
    run.status = COMPUTING
    end = _paused(state, run.device, now, takes)
    if run.place == 0 and run.last_arrival > now:  # it waits for buckets, one after the other
        begin = max(now, run.first_arrival)
        end = _paused(state, run.device, begin, takes)
        end = max(end, run.last_arrival + run.last_fraction * takes)
        held = max(0.0, end - takes - now)
        run.held += held
        run.waited += held
        now += held
    run.since = run.last_began = now
    return float(end)


@inlined
def count_action(state: EngineState, index: int, now: float) -> int:
    """It has ended; the number of the channel that its result goes to, or NONE."""
    run, counts = state.runs[index], state.counts
    code = next_action(state, index)
    if len(state.records) > 0:
        record = state.records[counts[NUM_RECORDS]]
        counts[NUM_RECORDS] += 1
        record.run, record.code, record.step = index, code, run.first + run.step
        record.start, record.end, record.waited = run.last_began, now, run.waited
    direction = code & 1
    if (run.before if direction else run.after) == NONE:
        return NONE
    return int(2 * index + direction)


@inlined
def count_step(state: EngineState, index: int) -> None:
    """It has ended: what it took and sent counts, and not before, however far it ran ahead."""
    run = state.runs[index]
    num_done = num_actions(state, index)
    run.busy_before, run.starved_before = run.busy, run.starved
    run.held_before = run.held
    state.counts[NUM_ACTIONS] += num_done
    for direction in range(2):
        if (run.before if direction else run.after) == NONE:
            continue
        channel = state.channels[2 * index + direction]
        # Half of them each way; while a pipeline that is never flushed fills up, forwards alone.
        number = num_done // 2 if direction else num_done - num_done // 2
        here, there = state.hosts[run.device], state.hosts[state.runs[channel.target].device]
        state.sent[here.region, there.region] += number * channel.size


@inlined
def send_alone(state: EngineState, number: int, now: float) -> float:
    """A message after the one before it, at the speed of the link; when its last byte leaves."""
    channel = state.channels[number]
    source, target = state.runs[channel.source].device, state.runs[channel.target].device
    bandwidth = state.links[1, state.hosts[source].region, state.hosts[target].region]
    channel.free = max(channel.free, now) + channel.size / bandwidth
    return float(channel.free)


@inlined
def deliver(state: EngineState, number: int, microbatch: int, left: float) -> float:
    """A message whose last byte leaves at `left` is there a latency later; when."""
    channel = state.channels[number]
    target = state.runs[channel.target]
    here = state.hosts[state.runs[channel.source].device].region
    there = left + state.links[0, here, state.hosts[target.device].region]
    # Activations go down, gradients up.
    state.inbox[number & 1, channel.target, microbatch % state.inbox.shape[2]] = there
    return float(there)


@inlined
def was_awaited(state: EngineState, number: int, microbatch: int) -> bool:
    """Whether its target did nothing but wait for this message; it does no more."""
    target = state.channels[number].target
    run = state.runs[target]
    if run.status == STARVED and next_action(state, target) == 2 * microbatch + (number & 1):
        run.status = WAKING
        return True
    return False


@inlined
def has_draws(state: EngineState, device: int) -> bool:
    for entry in range(state.hosts[device].slow, state.hosts[device + 1].slow):
        if state.slow[entry].used == state.draws.shape[1]:
            return False
    return True


@inlined
def _delay(state: EngineState, device: int, now: float, work: float, both: float) -> float:
    """As `describe.slowness.Slowness.delay`, with the same draws."""
    total = 0.0
    for entry in range(state.hosts[device].slow, state.hosts[device + 1].slow):
        slow = state.slow[entry]
        draw = state.draws[entry, slow.used]
        slow.used += 1
        if not slow.start <= now < slow.until:
            continue
        if slow.bins != NONE:
            part = (now - slow.start) / slow.duration
            if part >= 1.0:
                slow.has_ended = 1
            place = min(int(min(part, 1.0) * slow.num_bins), slow.num_bins - 1)
            lowest, highest = state.bins[slow.bins + place, 0], state.bins[slow.bins + place, 1]
            total += (1 / (lowest + draw * (highest - lowest)) - 1) * work
        elif slow.factor == slow.factor:
            total += (slow.factor - 1) * work
        elif draw < slow.probability:
            total += slow.sleep_factor * both
    return total


@inlined
def _paused(state: EngineState, device: int, now: float, takes: float) -> float:
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

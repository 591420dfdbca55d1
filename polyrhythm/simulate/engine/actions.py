"""One action of a run: its message, its duration, and the message that it sends."""

import numpy as np

from polyrhythm.jit import inlined
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
    """Code of a run's next action; without flush: the next forward, then the oldest backward."""
    run = state.runs[index]
    if run.in_flight == 0:
        return int(state.actions[run.list + run.place])
    if run.place == 0:
        return int(2 * run.step)
    return int(2 * (run.step - run.in_flight + 1) + 1)


@inlined
def message_time(state: EngineState, index: int) -> float:
    """Arrival of the message that the next action needs; inf if not known yet."""
    run = state.runs[index]
    code = next_action(state, index)
    direction = code & 1
    if (run.after if direction else run.before) == NONE:
        return float(-np.inf)
    return float(state.inbox[direction, index, (code >> 1) % state.inbox.shape[2]])


@inlined
def compute(state: EngineState, index: int, now: float) -> float:
    """Start the next action; return its end."""
    run = state.runs[index]
    code = next_action(state, index)
    direction = code & 1
    if (run.after if direction else run.before) != NONE:
        state.inbox[direction, index, (code >> 1) % state.inbox.shape[2]] = np.inf
    run.waited = now - run.since
    run.starved += run.waited
    work = run.backward if direction else run.forward
    duration = work + _delay(state, run.device, now, work, run.forward + run.backward)
    run.busy += duration
    run.status = COMPUTING
    end = _paused(state, run.device, now, duration)
    if run.place == 0 and run.last_arrival > now:  # it waits for buckets, one after another
        start = max(now, run.first_arrival)
        end = _paused(state, run.device, start, duration)
        end = max(end, run.last_arrival + run.last_fraction * duration)
        held = max(0.0, end - duration - now)
        run.held += held
        run.waited += held
        now += held
    run.since = run.last_start = now
    return float(end)


@inlined
def count_action(state: EngineState, index: int, now: float) -> int:
    """Record the end of an action; return the channel of its result, or NONE."""
    run, counts = state.runs[index], state.counts
    code = next_action(state, index)
    if len(state.records) > 0:
        record = state.records[counts[NUM_RECORDS]]
        counts[NUM_RECORDS] += 1
        record.run, record.code, record.step = index, code, run.first + run.step
        record.start, record.end, record.waited = run.last_start, now, run.waited
    direction = code & 1
    if (run.before if direction else run.after) == NONE:
        return NONE
    return int(2 * index + direction)


@inlined
def count_step(state: EngineState, index: int) -> None:
    """Count times and bytes of a step at its end: the fast path may have run far ahead."""
    run = state.runs[index]
    num_done = num_actions(state, index)
    run.busy_before, run.starved_before = run.busy, run.starved
    run.held_before = run.held
    state.counts[NUM_ACTIONS] += num_done
    for direction in range(2):
        if (run.before if direction else run.after) == NONE:
            continue
        channel = state.channels[2 * index + direction]
        # Half of them in each direction; while a pipeline without flush fills, forwards only.
        number = num_done // 2 if direction else num_done - num_done // 2
        source, target = state.hosts[run.device], state.hosts[state.runs[channel.target].device]
        state.sent[source.region, target.region] += number * channel.size


@inlined
def send_alone(state: EngineState, number: int, now: float) -> float:
    """Send a message after the previous one, at link speed; return when its last byte leaves."""
    channel = state.channels[number]
    source, target = state.runs[channel.source].device, state.runs[channel.target].device
    bandwidth = state.links[1, state.hosts[source].region, state.hosts[target].region]
    channel.free = max(channel.free, now) + channel.size / bandwidth
    return float(channel.free)


@inlined
def deliver(state: EngineState, number: int, microbatch: int, left: float) -> float:
    """Deliver a message whose last byte leaves at `left`; return its arrival, a latency later."""
    channel = state.channels[number]
    target = state.runs[channel.target]
    region = state.hosts[state.runs[channel.source].device].region
    arrival = left + state.links[0, region, state.hosts[target.device].region]
    # Activations are direction 0, gradients 1.
    state.inbox[number & 1, channel.target, microbatch % state.inbox.shape[2]] = arrival
    return float(arrival)


@inlined
def was_awaited(state: EngineState, number: int, microbatch: int) -> bool:
    """Whether the target was starved for this message; if so, mark it as WAKING."""
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
    """Extra time, as `describe.slowness.Slowness.delay` with the same draws."""
    total = 0.0
    for entry in range(state.hosts[device].slow, state.hosts[device + 1].slow):
        slow = state.slow[entry]
        draw = state.draws[entry, slow.used]
        slow.used += 1
        if not slow.start <= now < slow.until:
            continue
        if slow.bins != NONE:
            fraction = (now - slow.start) / slow.duration
            if fraction >= 1.0:
                slow.has_ended = 1
            i = min(int(min(fraction, 1.0) * slow.num_bins), slow.num_bins - 1)
            lowest, highest = state.bins[slow.bins + i, 0], state.bins[slow.bins + i, 1]
            total += (1 / (lowest + draw * (highest - lowest)) - 1) * work
        elif slow.factor == slow.factor:
            total += (slow.factor - 1) * work
        elif draw < slow.probability:
            total += slow.sleep_factor * both
    return total


@inlined
def _paused(state: EngineState, device: int, now: float, duration: float) -> float:
    """End of work that starts now, with the pauses of the device."""
    for i in range(state.hosts[device].pauses, state.hosts[device + 1].pauses):
        start, until = state.pauses[i, 0], state.pauses[i, 1]
        if until <= now:
            continue
        if start >= now + duration:
            break
        duration -= max(0.0, start - now)
        now = until
    return now + duration

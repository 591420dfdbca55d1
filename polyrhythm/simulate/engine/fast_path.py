"""The fast path: executes an undisturbed pipeline with one event per step.

If hosts share no connection, links do not change and no device is lost, an action starts when the
previous one has ended and its message has arrived. So a released run executes all actions that it
has messages for, then its neighbours those that became possible, and so on; only the ends of steps,
which the simulator handles, are put on the heap.
"""

from polyrhythm.compiled import inlined
from polyrhythm.simulate.engine.actions import (
    compute,
    count_action,
    deliver,
    has_draws,
    message_time,
    next_action,
    num_actions,
    send_alone,
    was_awaited,
)
from polyrhythm.simulate.engine.state import (
    AWAKE,
    ENDED,
    NONE,
    NUM_RECORDS,
    STARVED,
    WAKING,
    EngineState,
    push,
)


@inlined
def run_fast_path(state: EngineState, first: int) -> None:
    """Execute from a run that was released, or that had run out of random draws."""
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

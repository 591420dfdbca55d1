"""Run ahead: a pipeline whose runs nothing can disturb is executed without a single event.

Where hosts share no connection, links do not change and nobody is lost, an action begins when the
one before it has ended and its message is there. So a run that is released does all that it has
messages for, then its neighbours what they have got by that, and so on; only the ends of steps,
which others decide about, are put on the heap.
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
    """From a run that has been released, or that had no draws left."""
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
            there = message_time(state, index)
            if there == float("inf"):
                run.status = STARVED
                break
            start = max(run.since, there)
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

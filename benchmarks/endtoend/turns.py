"""Jobs that take turns on the same machines: a few steps each, so that both meet the same times."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

from benchmarks.endtoend.crew import Crew, Heard
from benchmarks.endtoend.side import Ended
from polyrhythm.types import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRow:
    """One turn of one side."""

    part: str  # of the benchmark
    side: str
    turn: int
    step: Seconds  # on average, without the first of the turn


def take_turns(
    part: str,
    crews: Mapping[str, Crew],
    *,
    num_turns: int,
    num_steps: int,  # of a turn
    patience: Seconds,
    say: Callable[[str], None],
    after_turn: Callable[[], None] = lambda: None,
) -> list[TurnRow]:
    """All turns of all crews, whose jobs have that many steps."""
    rows = []
    for turn in range(num_turns):
        for side, crew in crews.items():
            if turn == 0:
                crew.begin()
            else:
                crew.go_on()
            heard = crew.follow(patience)
            step = step_of_turn(heard, turn, num_steps)
            rows.append(TurnRow(part=part, side=side, turn=turn, step=step))
            say(f"{part}: {side}, {step:.3f} s a step")
            after_turn()
    for crew in crews.values():
        crew.go_on()
        crew.follow(patience)
    return rows


def step_of_turn(heard: Heard, turn: int, num_steps: int) -> Seconds:
    """A turn's first step is not counted: before it, what goes on in the background had time."""
    first, last = turn * num_steps, (turn + 1) * num_steps - 1
    return (_over(heard.steps, last) - _over(heard.steps, first)) / (num_steps - 1)


def ratio(rows: list[TurnRow], side: str, other: str) -> float:
    """How many times longer a step of `side` takes than one of `other`: the median over turns.

    The first turn does not count, in which both make connections and find their ways.
    """
    steps = {(row.side, row.turn): row.step for row in rows}
    last = max(row.turn for row in rows)
    turns = range(min(1, last), last + 1)
    return median(steps[side, turn] / steps[other, turn] for turn in turns)


def _over(ends: list[Ended], step: int) -> Seconds:
    """When a step was over on all pipelines."""
    return max(end.moment for end in ends if end.step == step)

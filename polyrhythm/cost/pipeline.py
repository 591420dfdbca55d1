"""How long a pipeline takes to run lists of actions, from measured times.

The model: a stage runs its list one action after another. A forward needs the activations of the
stage before, a backward the gradients of the stage after. A message is sent as soon as it is there
and never holds up its sender. Each direction of a link carries one message at a time, in the order
sent, and receives are posted ahead. No event queue is needed: every time is the maximum of times
known before, so the stages may be taken in any order, each run until it has to wait.

Transfer times may be recorded ones, replayed in order, because bursts matter and a mean hides them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from statistics import fmean
from typing import NamedTuple

from polyrhythm.describe.units import check_amount
from polyrhythm.errors import DescriptionError, ScheduleError
from polyrhythm.types import Action, Op, Seconds

_Arrivals = list[Seconds | None]  # index = micro-batch; None until it is known


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """One direction of one link.

    Message i, that of micro-batch i, occupies it for `busy[i % len(busy)]`, after the messages sent
    before it, and arrives `latency` after that.
    """

    busy: tuple[Seconds, ...]
    latency: Seconds = 0.0

    def __post_init__(self) -> None:
        if not self.busy:
            raise DescriptionError(
                "a link without times", expected="at least one", fix="measure one message"
            )
        for sample in self.busy:
            check_amount("busy", sample, Seconds)
        check_amount("latency", self.latency, Seconds)

    @property
    def transfer(self) -> Seconds:
        """From sent to arrived on an idle link, on average."""
        return fmean(self.busy) + self.latency


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimes:
    """What was measured with micro-batches of one size."""

    forward: tuple[Seconds, ...]  # per stage
    backward: tuple[Seconds, ...]
    activations: tuple[LinkTimes, ...]  # per link, from stage s to s+1
    gradients: tuple[LinkTimes, ...]  # from stage s+1 to s

    def __post_init__(self) -> None:
        num_stages = len(self.forward)
        found = [len(times) for times in (self.backward, self.activations, self.gradients)]
        if not num_stages or found != [num_stages, num_stages - 1, num_stages - 1]:
            raise DescriptionError(
                f"times of {num_stages} forwards, {found[0]} backwards, "
                f"{found[1]} and {found[2]} links",
                expected="one of each per stage, and one link fewer each way",
                fix="give the times of all stages, first to last",
            )
        for name in ("forward", "backward"):
            for time in getattr(self, name):
                check_amount(name, time, Seconds)

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    @property
    def period(self) -> Seconds:
        """Forward and backward of the slowest stage: no schedule does a micro-batch in less."""
        return max(f + b for f, b in zip(self.forward, self.backward, strict=True))

    @property
    def first(self) -> Seconds:
        """From the first stage to the last and back, of one micro-batch alone."""
        links = self.activations + self.gradients
        return sum(self.forward) + sum(self.backward) + sum(link.transfer for link in links)

    @property
    def pace(self) -> Seconds:
        """Of the slowest stage or link: no schedule does a micro-batch in less, on average."""
        links = self.activations + self.gradients
        return max([self.period, *(fmean(link.busy) for link in links)])

    @property
    def transfers(self) -> tuple[Seconds, ...]:
        """Per link, the mean of both directions."""
        links = zip(self.activations, self.gradients, strict=True)
        return tuple((there.transfer + back.transfer) / 2 for there, back in links)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """When everything happens; `starts[stage][i]` belongs to the i-th action of that stage."""

    starts: tuple[tuple[Seconds, ...], ...]
    ends: tuple[tuple[Seconds, ...], ...]
    length: Seconds
    idle: tuple[Seconds, ...]  # per stage, out of `length`


def simulate(
    schedule: Sequence[Sequence[Action]],
    times: PipelineTimes,
    *,
    first_message: int = 0,
    ready: Sequence[Seconds] | None = None,
) -> Timeline:
    """Execute the lists; `first_message` says where in the recorded transfers the step begins.

    `ready` is when each stage may begin, 0 without it. Raises ScheduleError if the stages end up
    waiting for each other.
    """
    starts = _execute(schedule, times, first_message, ready)
    ends, works = [], []
    for stage, actions in enumerate(schedule):
        takes = {Op.F: times.forward[stage], Op.B: times.backward[stage]}
        ends.append(tuple(s + takes[op] for s, (op, _) in zip(starts[stage], actions, strict=True)))
        works.append(sum(takes[op] for op, _ in actions))
    end = _end(schedule, times, starts)
    return Timeline(
        starts=tuple(map(tuple, starts)),
        ends=tuple(ends),
        length=end,
        idle=tuple(end - work for work in works),
    )


def length(
    schedule: Sequence[Sequence[Action]], times: PipelineTimes, *, num_replays: int = 4
) -> Seconds:
    """How long one step takes, the mean over `num_replays` places to begin in recorded transfers.

    With constant transfers one run tells all. Raises ScheduleError like `simulate`.
    """
    num_samples = max((len(link.busy) for link in times.activations + times.gradients), default=1)
    num_replays = min(num_replays, num_samples)
    first_messages = [num_samples * replay // num_replays for replay in range(num_replays)]
    return fmean(
        _end(schedule, times, _execute(schedule, times, first)) for first in first_messages
    )


_NOTHING = LinkTimes(busy=(0.0,))


class _Work(NamedTuple):
    """One direction through one stage: what it takes, waits for and sends."""

    takes: Seconds
    arrivals: _Arrivals
    sends_to: _Arrivals
    busy: list[Seconds]
    latency: Seconds


def _execute(
    schedule: Sequence[Sequence[Action]],
    times: PipelineTimes,
    first_message: int,
    ready: Sequence[Seconds] | None = None,
) -> list[list[Seconds]]:
    """When each action starts."""
    if len(schedule) != times.num_stages:
        raise ScheduleError(
            f"a schedule of {len(schedule)} stages with times of {times.num_stages}",
            expected="as many of one as of the other",
            fix="build the schedule for the stages that were measured",
        )
    size = 1 + max(map(itemgetter(1), chain.from_iterable(schedule)), default=-1)
    starts: list[list[Seconds]] = [[] for _ in schedule]
    waiting = [
        _run(actions, forward, backward, starts[stage], 0.0 if ready is None else ready[stage])
        for stage, (actions, forward, backward) in enumerate(
            zip(schedule, *_works(times, size, first_message), strict=True)
        )
    ]
    num_actions = sum(map(len, schedule))
    done, before = 0, -1
    while done < num_actions:
        if done == before:
            raise _deadlock(schedule, starts)
        for stage_run in waiting:
            next(stage_run, None)
        waiting.reverse()  # activations travel down, gradients up: fewer rounds either way
        done, before = sum(map(len, starts)), done
    return starts


def _run(
    actions: Sequence[Action],
    forward: _Work,
    backward: _Work,
    starts: list[Seconds],
    now: Seconds,
) -> Iterator[None]:
    """Run one stage, yielding when it has to wait; `starts` grows. The hot path: plain names."""
    forward_takes, activations, sent_down, busy_down, latency_down = forward
    backward_takes, gradients, sent_up, busy_up, latency_up = backward
    free_down = free_up = 0.0
    is_forward = Op.F
    for op, m in actions:
        if op is is_forward:
            while (arrival := activations[m]) is None:
                yield
            if arrival > now:
                now = arrival
            starts.append(now)
            now += forward_takes
            if now > free_down:
                free_down = now
            free_down += busy_down[m]
            sent_down[m] = free_down + latency_down
        else:
            while (arrival := gradients[m]) is None:
                yield
            if arrival > now:
                now = arrival
            starts.append(now)
            now += backward_takes
            if now > free_up:
                free_up = now
            free_up += busy_up[m]
            sent_up[m] = free_up + latency_up


def _works(times: PipelineTimes, size: int, first_message: int) -> tuple[list[_Work], list[_Work]]:
    """The forward and the backward of every stage, joined by what they send to each other."""
    last = times.num_stages - 1
    activations: list[_Arrivals] = [[None] * size for _ in range(last + 1)]
    gradients: list[_Arrivals] = [[None] * size for _ in range(last + 1)]
    activations[0] = [0.0] * size
    # At both ends nothing travels. The last stage turns round: its own forward is what its
    # backward waits for; the gradients of the first go nowhere.
    downs = [*activations[1:], gradients[last]]
    ups: list[_Arrivals] = [[None] * size, *gradients[:-1]]
    forwards = [
        _Work(times.forward[s], activations[s], downs[s], *_messages(link, size, first_message))
        for s, link in enumerate((*times.activations, _NOTHING))
    ]
    backwards = [
        _Work(times.backward[s], gradients[s], ups[s], *_messages(link, size, first_message))
        for s, link in enumerate((_NOTHING, *times.gradients))
    ]
    return forwards, backwards


def _messages(link: LinkTimes, size: int, first_message: int) -> tuple[list[Seconds], Seconds]:
    num_samples = len(link.busy)
    if num_samples == 1:
        return list(link.busy) * size, link.latency
    return [link.busy[(first_message + m) % num_samples] for m in range(size)], link.latency


def _end(
    schedule: Sequence[Sequence[Action]], times: PipelineTimes, starts: list[list[Seconds]]
) -> Seconds:
    end = 0.0
    for stage, actions in enumerate(schedule):
        if actions:
            last = times.forward if actions[-1].op is Op.F else times.backward
            end = max(end, starts[stage][-1] + last[stage])
    return end


def _deadlock(schedule: Sequence[Sequence[Action]], starts: list[list[Seconds]]) -> ScheduleError:
    stuck = [
        f"stage {stage} before {actions[len(done)]}"
        for stage, (actions, done) in enumerate(zip(schedule, starts, strict=True))
        if len(done) < len(actions)
    ]
    return ScheduleError(
        f"deadlock: {', '.join(stuck)} wait for what nobody will send",
        expected="stages that can all finish their lists",
        fix="check the schedule with schedule.check, which names the defect",
    )

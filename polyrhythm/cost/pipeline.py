"""Compute how long a pipeline takes to run lists of actions, from measured times.

The model: a stage runs its list one action after another. A forward needs the activations of the
previous stage, a backward the gradients of the next stage. A message is sent as soon as it is
computed and never blocks its sender. Each direction of a link carries one message at a time, in the
order sent, and receives are posted ahead. No event queue is needed: every time is the maximum of
earlier times, so the stages may be processed in any order, each until it has to wait.

Transfer times may be recorded ones, replayed in order, because bursts matter and a mean hides them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from statistics import fmean
from typing import NamedTuple

from polyrhythm.describe.units import check_amount
from polyrhythm.errors import DescriptionError, ScheduleError
from polyrhythm.types import Action, Op, Seconds

_Arrivals = list[Seconds | None]  # index = micro-batch; None until known


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkTimes:
    """One direction of one link.

    The message of micro-batch i occupies the link for `busy[i % len(busy)]` after earlier messages,
    and arrives `latency` later.
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
        """The mean time from send to arrival on an idle link."""
        return fmean(self.busy) + self.latency


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineTimes:
    """Times measured with one micro-batch size."""

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
                fix="pass the times of all stages, first to last",
            )
        for name in ("forward", "backward"):
            for time in getattr(self, name):
                check_amount(name, time, Seconds)

    @property
    def num_stages(self) -> int:
        return len(self.forward)

    @property
    def period(self) -> Seconds:
        """Forward plus backward of the slowest stage: no schedule runs a micro-batch in less."""
        return max(f + b for f, b in zip(self.forward, self.backward, strict=True))

    @property
    def first(self) -> Seconds:
        """The time of a single micro-batch from the first stage to the last and back."""
        links = self.activations + self.gradients
        return sum(self.forward) + sum(self.backward) + sum(link.transfer for link in links)

    @property
    def pace(self) -> Seconds:
        """The period of the slowest stage or link: a lower bound per micro-batch, on average."""
        links = self.activations + self.gradients
        return max([self.period, *(fmean(link.busy) for link in links)])

    @property
    def transfers(self) -> tuple[Seconds, ...]:
        """The mean transfer time of both directions per link."""
        links = zip(self.activations, self.gradients, strict=True)
        return tuple((there.transfer + back.transfer) / 2 for there, back in links)


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """The times of a step; `starts[stage][i]` is the start of that stage's i-th action."""

    starts: tuple[tuple[Seconds, ...], ...]
    ends: tuple[tuple[Seconds, ...], ...]
    length: Seconds


def simulate(
    schedule: Sequence[Sequence[Action]],
    times: PipelineTimes,
    *,
    first_message: int = 0,
    ready: Sequence[Seconds] | None = None,
) -> Timeline:
    """Execute the lists; `first_message` is the index in the recorded transfers to start with.

    `ready` is the time at which each stage may start, by default 0. Raises ScheduleError for a
    deadlock.
    """
    starts = _execute(schedule, times, first_message, ready)
    ends = []
    for stage, actions in enumerate(schedule):
        takes = {Op.F: times.forward[stage], Op.B: times.backward[stage]}
        ends.append(tuple(s + takes[op] for s, (op, _) in zip(starts[stage], actions, strict=True)))
    return Timeline(
        starts=tuple(map(tuple, starts)), ends=tuple(ends), length=_end(schedule, times, starts)
    )


def length(
    schedule: Sequence[Sequence[Action]], times: PipelineTimes, *, num_replays: int = 4
) -> Seconds:
    """Return the length of a step: the mean over `num_replays` starts in the recorded transfers.

    With constant transfers one run is enough. Raises ScheduleError like `simulate`.
    """
    num_samples = max((len(link.busy) for link in times.activations + times.gradients), default=1)
    num_replays = min(num_replays, num_samples)
    first_messages = [num_samples * replay // num_replays for replay in range(num_replays)]
    return fmean(
        _end(schedule, times, _execute(schedule, times, first)) for first in first_messages
    )


_NOTHING = LinkTimes(busy=(0.0,))


class _Work(NamedTuple):
    """The forwards or backwards of one stage: durations, inputs and outputs."""

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
    """Return the start time of each action."""
    if len(schedule) != times.num_stages:
        raise ScheduleError(
            f"a schedule of {len(schedule)} stages with times of {times.num_stages}",
            expected="equal numbers of stages",
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
        waiting.reverse()  # activations go down, gradients up: alternate to need fewer rounds
        done, before = sum(map(len, starts)), done
    return starts


def _run(
    actions: Sequence[Action], forward: _Work, backward: _Work, starts: list[Seconds], now: Seconds
) -> Iterator[None]:
    """Run one stage, appending to `starts`; yield when it has to wait. The hot path."""
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
    """Return the forward and backward of every stage, connected by their messages."""
    last = times.num_stages - 1
    activations: list[_Arrivals] = [[None] * size for _ in range(last + 1)]
    gradients: list[_Arrivals] = [[None] * size for _ in range(last + 1)]
    activations[0] = [0.0] * size
    # No messages at both ends: the last stage's backward waits for its own forward, and the
    # first stage sends no gradients.
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
        f"deadlock: {', '.join(stuck)} wait for messages that are never sent",
        expected="stages that can all finish their lists",
        fix="check the schedule with schedule.check, which names the defect",
    )


class MessageTiming(NamedTuple):
    """One message; all three times on the receiver's clock."""

    sent: Seconds
    posted: Seconds
    arrived: Seconds


def busy_times(messages: Iterable[MessageTiming], *, latency: Seconds) -> list[Seconds]:
    """Return how long each message, in order of arrival, occupied the link.

    A message starts to leave when it is sent, when the sender learns that its receive is posted,
    and when the previous message has left, whichever is last; it arrives one latency later.
    """
    durations = []
    previous = float("-inf")
    for sent, posted, arrived in messages:
        start = max(sent + latency, posted + 2 * latency, previous)
        durations.append(max(0.0, arrived - start))
        previous = arrived
    return durations

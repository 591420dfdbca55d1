"""The log of a simulated run: the same records as those of a real one, with times from 0.

`polyrhythm report` reads both. Equal simulations write equal bytes. Each epoch of a run with losses
has a scheduler and so decisions of its own, as each sync mode of a real run has; events are common
to all, of the steps that count.
"""

from collections.abc import Sequence
from pathlib import Path

from polyrhythm.errors import EventError
from polyrhythm.events import Event, Value, merged_log
from polyrhythm.simulate.engine.engine import ActionRecord
from polyrhythm.simulate.job import SimulatedJob
from polyrhythm.sinks.jsonl import write_events
from polyrhythm.sync.decision_log import DecisionLog, decision_log_path
from polyrhythm.sync.protocol import Assign
from polyrhythm.types import Seconds, Worker


class RunLog:
    def __init__(
        self,
        folder: Path,
        job: SimulatedJob,
        *,
        number: int = 1,
        first_step: int = 0,
    ) -> None:
        """`number` is that of the epoch."""
        if merged_log(folder).exists():
            raise EventError(
                f"{folder} already has the log of a run",
                expected="a new folder for each run",
                fix="use another folder, or remove it",
            )
        self._folder, self._job = folder, job
        path, scheduler = decision_log_path(folder, number), job.setup.scheduler()
        self.decisions = DecisionLog(path, job.setup, scheduler)
        self._first_step = first_step
        self.averages: list[tuple[Assign, Seconds, Seconds]] = []
        # Run, number, start, end of its last action, and end of its sync.
        self.steps: list[tuple[int, int, Seconds, Seconds, Seconds]] = []
        self._workers = [
            Worker(run.first, number)
            for number, pipeline in enumerate(job.pipelines)
            for run in pipeline.runs
        ]

    def events(
        self, actions: Sequence[ActionRecord], num_steps: float = float("inf")
    ) -> list[Event]:
        """Return the events of the first `num_steps` steps, and close the log of decisions."""
        self.decisions.close()
        if num_steps < float("inf"):
            self.steps = [step for step in self.steps if step[1] < num_steps]
            actions = [record for record in actions if record.step < num_steps]
            last = max((end for *_, end in self.steps), default=0.0)
            self.averages = [average for average in self.averages if average[2] <= last]
        events = [self._action(record) for record in self._finished(actions)]
        events += self._step_events()
        events += [event for average in self.averages for event in self._average_events(*average)]
        return events

    def write(self, events: Sequence[Event], num_steps: int) -> None:
        """Write events of all epochs; this log is that of the first one."""
        job = self._job
        values: dict[str, Value] = {
            "stages": len(job.stages),
            "pipelines": len(job.pipelines),
            "steps": num_steps,
            "device": "simulated",
        }
        begin = Event(kind="run", time=0.0, values=values)
        write_events(merged_log(self._folder), [begin, *events])

    def _finished(self, actions: Sequence[ActionRecord]) -> list[ActionRecord]:
        """Drop actions of an interrupted step that was repeated later."""
        starts = {(run, number): start for run, number, start, _, _ in self.steps}
        return [r for r in actions if r.start >= starts.get((r.run, r.step), 0.0)]

    def _action(self, record: ActionRecord) -> Event:
        """Create the event as a worker does: it starts with the wait."""
        return Event(
            kind="action",
            time=record.start - record.waited,
            worker=self._workers[record.run],
            step=self._first_step + record.step,
            name=str(record.action),
            duration=record.end - record.start + record.waited,
            values={"wait": record.waited} if record.waited else {},
        )

    def _step_events(self) -> list[Event]:
        events = []
        for run, own_number, start, end, sync_end in self.steps:
            worker, policy = self._workers[run], self._job.sync.policy
            number = self._first_step + own_number
            sync = Event(
                kind="sync",
                time=end,
                worker=worker,
                step=number,
                name=policy,
                duration=sync_end - end,
            )
            step = Event(
                kind="step", time=start, worker=worker, step=number, duration=sync_end - start
            )
            events += [sync, step]
        return events

    def _average_events(self, assign: Assign, start: Seconds, sync_end: Seconds) -> list[Event]:
        members = " ".join(map(str, assign.members))
        size = self._job.stages[assign.members[0].stage].gradient_bytes
        return [
            Event(
                kind="average",
                time=start,
                worker=member,
                name=str(assign.gid),
                duration=sync_end - start,
                why=assign.why,
                values={"members": members, "bytes": round(size)},
            )
            for member in assign.members
        ]

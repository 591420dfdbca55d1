"""Counts finished steps: of each run, of each pipeline, and in total."""

from itertools import pairwise

from polyrhythm.types import Seconds


class StepCounter:
    def __init__(self, first_run: list[int]) -> None:
        """`first_run` holds the first run of each pipeline, and the number of all runs."""
        num_runs = first_run[-1]
        self.total = 0  # steps of pipelines
        self.ends: list[list[Seconds]] = [[] for _ in first_run[:-1]]  # [pipeline][step]
        self.waited: list[Seconds] = [0.0] * num_runs  # from the last action to the next step
        self.longest: Seconds = 0.0
        self.number = [0] * num_runs  # current step of each run
        self._first_run, self._num_runs = first_run, [b - a for a, b in pairwise(first_run)]
        self._step_start: list[Seconds] = [0.0] * num_runs
        self._compute_end: list[Seconds] = [0.0] * num_runs
        self._active_since: list[Seconds | None] = [None] * len(self.ends)
        self._active_time: list[Seconds] = [0.0] * len(self.ends)
        self._counts: list[dict[int, int]] = [{} for _ in self.ends]  # runs that finished a step

    def begin(self, run: int, now: Seconds) -> None:
        self._step_start[run] = now

    def end_compute(self, run: int, now: Seconds) -> Seconds:
        """Record that all actions of a step are done; return their duration."""
        self._compute_end[run] = now
        return now - self._step_start[run]

    def finish_step(self, run: int, pipeline: int, now: Seconds) -> tuple[Seconds, Seconds]:
        """Record the end of a step; return its start, and the end of its actions."""
        self.waited[run] += now - self._compute_end[run]
        if now - self._step_start[run] > self.longest:
            self.longest = now - self._step_start[run]
        counts, step = self._counts[pipeline], self.number[run]
        number = counts[step] = counts.get(step, 0) + 1
        if number == self._num_runs[pipeline]:
            del counts[step]
            self.ends[pipeline].append(now)
            self.total += 1
        self.number[run] += 1
        return self._step_start[run], self._compute_end[run]

    def active_time(self, now: Seconds) -> list[Seconds]:
        """Time for which each pipeline was active until now."""
        return [
            before + (0.0 if since is None else now - since)
            for before, since in zip(self._active_time, self._active_since, strict=True)
        ]

    def stop_pipeline(self, pipeline: int, now: Seconds) -> None:
        """Stop a pipeline that has lost a device."""
        since = self._active_since[pipeline]
        self._active_time[pipeline] += 0.0 if since is None else now - since
        self._active_since[pipeline] = None

    def restart_pipeline(self, pipeline: int, now: Seconds) -> None:
        """Restart a pipeline with the step after the last one that ended on all its stages."""
        self._active_since[pipeline] = now
        self._counts[pipeline].clear()
        first, end = self._first_run[pipeline : pipeline + 2]
        self.number[first:end] = [len(self.ends[pipeline])] * (end - first)

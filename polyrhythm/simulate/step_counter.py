"""Steps that were made: of each run, of each pipeline as a whole, and of all together."""

from itertools import pairwise

from polyrhythm.types import Seconds


class StepCounter:
    def __init__(self, first_run: list[int]) -> None:
        """`first_run` of each pipeline, and the number of all."""
        num_runs = first_run[-1]
        self.total = 0  # of pipelines
        self.ends: list[list[Seconds]] = [[] for _ in first_run[:-1]]  # [pipeline][step]
        self.waited: list[Seconds] = [0.0] * num_runs  # from the last action to the next step
        self.longest: Seconds = 0.0
        self.number = [0] * num_runs  # of the step that each run is at
        self._first_run, self._num_runs = first_run, [b - a for a, b in pairwise(first_run)]
        self._began: list[Seconds] = [0.0] * num_runs
        self._computed: list[Seconds] = [0.0] * num_runs
        self._active_since: list[Seconds | None] = [None] * len(self.ends)
        self._active_time: list[Seconds] = [0.0] * len(self.ends)
        self._counts: list[dict[int, int]] = [{} for _ in self.ends]  # runs that made a step

    def begin(self, run: int, now: Seconds) -> None:
        self._began[run] = now

    def end_compute(self, run: int, now: Seconds) -> Seconds:
        """All actions are done; what they took."""
        self._computed[run] = now
        return now - self._began[run]

    def finish_step(self, run: int, pipeline: int, now: Seconds) -> tuple[Seconds, Seconds]:
        """And all that follows; when it began, and when the actions were done."""
        self.waited[run] += now - self._computed[run]
        if now - self._began[run] > self.longest:
            self.longest = now - self._began[run]
        counts, step = self._counts[pipeline], self.number[run]
        number = counts[step] = counts.get(step, 0) + 1
        if number == self._num_runs[pipeline]:
            del counts[step]
            self.ends[pipeline].append(now)
            self.total += 1
        self.number[run] += 1
        return self._began[run], self._computed[run]

    def active_time(self, now: Seconds) -> list[Seconds]:
        """For how long each pipeline was at work until now."""
        return [
            before + (0.0 if since is None else now - since)
            for before, since in zip(self._active_time, self._active_since, strict=True)
        ]

    def stop_pipeline(self, pipeline: int, now: Seconds) -> None:
        """It has lost a device."""
        since = self._active_since[pipeline]
        self._active_time[pipeline] += 0.0 if since is None else now - since
        self._active_since[pipeline] = None

    def restart_pipeline(self, pipeline: int, now: Seconds) -> None:
        """With the step after the last that was over on all its stages."""
        self._active_since[pipeline] = now
        self._counts[pipeline].clear()
        first, end = self._first_run[pipeline : pipeline + 2]
        self.number[first:end] = [len(self.ends[pipeline])] * (end - first)

"""Predict, then measure: every alternative on every network, and how far the two are apart.

A network is probed before anything else runs on it; from then on predictions are certain, and runs
in the lab only confirm or refute them. A run during which the emulated network was late is repeated
while there is time.
"""

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

from benchmarks.predict.inputs import probed, profiled
from benchmarks.predict.runs import Ends, parts, step_time
from benchmarks.predict.setting import Alternative, Size
from benchmarks.predict.simulated import simulated_ends
from benchmarks.predict.spare import Spare
from benchmarks.sleeping.job import carry_out
from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.model import ModelProfile
from polyrhythm.lab.lab import Lab
from polyrhythm.run.probe.effort import ProbeEffort
from polyrhythm.types import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One alternative on one network; times are of a step of all pipelines."""

    network: str
    alternative: str
    predicted: Seconds
    measured: Seconds
    again: Seconds | None  # measured once more, where it was
    disturbed: bool

    @property
    def error(self) -> float:
        return abs(self.predicted - self.measured) / self.measured

    @property
    def spread(self) -> float | None:
        """Of two measurements of the same."""
        return None if self.again is None else abs(self.again - self.measured) / self.measured


def predicted_and_measured(
    size: Size, on_progress: Callable[[str], None] = lambda _: None
) -> list[Row]:
    runs, rows = _Runs(size, on_progress), list[Row]()
    profile: ModelProfile | None = None
    for network in size.networks:
        with tempfile.TemporaryDirectory() as name, Lab(network) as lab:
            folder = Path(name)
            if profile is None:
                on_progress("profiling the model")
                profile = profiled(lab, size.profile_repeat, folder)
            on_progress(f"probing {network.name}")
            effort = ProbeEffort(seconds=size.probe_seconds, repeat=size.probe_repeat)
            rows += runs.rows(lab, folder, probed(lab, effort, folder), profile)
    return rows


class _Runs:
    """On one network after the other."""

    def __init__(self, size: Size, on_progress: Callable[[str], None]) -> None:
        self._size, self._say = size, on_progress
        self._numbers, self._spare = count(), Spare(size.spare)

    def rows(
        self, lab: Lab, folder: Path, cluster: Cluster, profile: ModelProfile
    ) -> Iterator[Row]:
        """All predictions are made before the first run."""
        size = self._size
        predictions = [
            self._step_time(simulated_ends(each, cluster, profile, size.num_steps))
            for each in size.alternatives
        ]
        measured = [self._measured(lab, folder, each) for each in size.alternatives]
        # At the end, so that whatever changes in the meantime is in their difference.
        first = len(size.alternatives) - size.num_repeated
        again = [self._measured(lab, folder, each) for each in size.alternatives[first:]]
        for place, alternative in enumerate(size.alternatives):
            found, is_disturbed = measured[place]
            yield Row(
                network=lab.cluster.name,
                alternative=alternative.name,
                predicted=predictions[place],
                measured=found,
                again=again[place - first][0] if place >= first else None,
                disturbed=is_disturbed,
            )

    def _measured(self, lab: Lab, folder: Path, alternative: Alternative) -> tuple[Seconds, bool]:
        """And whether the network was late, each time that it was tried."""
        self._say(f"{lab.cluster.name}: {alternative.name}")
        measured = self._spare.least_late(
            lambda: carry_out(
                lab,
                parts(alternative, self._size.num_pipelines),
                num_steps=self._size.num_steps,
                folder=folder,
                number=next(self._numbers),
            )
        )
        return self._step_time(measured.ends), measured.trouble is not None

    def _step_time(self, ends: Ends) -> Seconds:
        size = self._size
        return step_time(ends, num_steps=size.num_steps, num_left_out=size.num_left_out)

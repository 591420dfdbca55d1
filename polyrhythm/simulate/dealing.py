"""Micro-batches dealt by speed while a simulation runs: `balanced`, with the runtime's dealer."""

from polyrhythm.cost.step import Schedule
from polyrhythm.errors import PolicyError
from polyrhythm.schedule.builders import build
from polyrhythm.simulate.job import SimulatedJob
from polyrhythm.sync.balanced import Dealer
from polyrhythm.types import Seconds, Worker


class Dealing:
    """Everybody's time is known to all when gradients are averaged; then all deal alike."""

    def __init__(self, job: SimulatedJob) -> None:
        if any(len(pipeline.runs) > 1 for pipeline in job.pipelines):
            raise PolicyError(
                "balanced in a job with pipelines",
                expected="replicas of the whole model, each on one device",
                fix="use adaptive or age, or one stage",
            )
        self._counts = [len(pipeline.schedule[0]) // 2 for pipeline in job.pipelines]
        self._dealer = Dealer(sum(self._counts))
        self._took: dict[int, Seconds] = {}
        self._here: set[int] = set()
        self._dealt = list(self._counts)
        self._built: dict[int, Schedule] = {}

    def welcome(self, pipeline: int) -> None:
        self._here.add(pipeline)

    def forget(self, pipeline: int) -> None:
        self._here.discard(pipeline)
        self._took.pop(pipeline, None)
        self._deal_if_all_ended()

    def step_ended(self, pipeline: int, took: Seconds) -> None:
        self._took[pipeline] = took
        self._deal_if_all_ended()

    def schedule(self, pipeline: int) -> Schedule:
        """Of its next step."""
        count = self._dealt[pipeline]
        if count not in self._built:
            self._built[count] = build("1f1b", num_stages=1, num_microbatches=count)
        return self._built[count]

    def _deal_if_all_ended(self) -> None:
        """One who is near may be at its next step before one who is far hears of this one's end."""
        if not self._took or set(self._took) != self._here:
            return
        for place, took in sorted(self._took.items()):
            self._dealer.measured(Worker(0, place), self._dealt[place], took)
        dealt = self._dealer.deal(Worker(0, place) for place in sorted(self._took))
        for worker, count in dealt.items():
            self._dealt[worker.pipeline] = count
        self._took = {}

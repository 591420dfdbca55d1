"""Policy `balanced` in the simulator: micro-batches by speed, with the runtime's balancer."""

from polyrhythm.cost.step import Schedule
from polyrhythm.errors import PolicyError
from polyrhythm.schedule.builders import build
from polyrhythm.simulate.job import SimulatedJob
from polyrhythm.sync.policies.balanced import MicrobatchBalancer
from polyrhythm.types import Seconds, Worker


class SimulatedBalancer:
    """Rebalances when the step times of all pipelines are known, as the runtime does."""

    def __init__(self, job: SimulatedJob) -> None:
        if any(len(pipeline.runs) > 1 for pipeline in job.pipelines):
            raise PolicyError(
                "balanced in a job with pipelines",
                expected="replicas of the whole model, each on one device",
                fix="use adaptive or age, or one stage",
            )
        self._counts = [len(pipeline.schedule[0]) // 2 for pipeline in job.pipelines]
        self._balancer = MicrobatchBalancer(sum(self._counts))
        self._step_times: dict[int, Seconds] = {}
        self._present: set[int] = set()
        self._num_microbatches = list(self._counts)
        self._built: dict[int, Schedule] = {}

    def add(self, pipeline: int) -> None:
        self._present.add(pipeline)

    def remove(self, pipeline: int) -> None:
        self._present.discard(pipeline)
        self._step_times.pop(pipeline, None)
        self._rebalance_if_all_ended()

    def step_ended(self, pipeline: int, duration: Seconds) -> None:
        self._step_times[pipeline] = duration
        self._rebalance_if_all_ended()

    def schedule(self, pipeline: int) -> Schedule:
        """The schedule of the pipeline's next step."""
        count = self._num_microbatches[pipeline]
        if count not in self._built:
            self._built[count] = build("1f1b", num_stages=1, num_microbatches=count)
        return self._built[count]

    def _rebalance_if_all_ended(self) -> None:
        """Rebalance once all step times are known; latencies may let some start before that."""
        if not self._step_times or set(self._step_times) != self._present:
            return
        for pipeline, duration in sorted(self._step_times.items()):
            self._balancer.record(Worker(0, pipeline), self._num_microbatches[pipeline], duration)
        shares = self._balancer.assign(Worker(0, p) for p in sorted(self._step_times))
        for worker, count in shares.items():
            self._num_microbatches[worker.pipeline] = count
        self._step_times = {}

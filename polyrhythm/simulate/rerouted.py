"""An epoch of a simulated job in which micro-batches are rerouted around lost workers.

It has the interface of a `Simulation`, but no events: a step is a replay of the lists that the
decision has made (`plan/rerouted_order.py`), and its averages take the times of `cost/sync.py`. So
slowness, pauses and changes of links in the scenario have no effect in it, and it logs no actions.
"""

from collections import Counter
from collections.abc import Mapping
from itertools import permutations

import numpy as np

from polyrhythm.cost.step import Replica, StageWork, StepSpec, pipeline_times
from polyrhythm.cost.sync import Links, ReplicaGroup, Sync, reduce_scatter_times
from polyrhythm.describe.cluster import Cluster
from polyrhythm.plan.rerouted_order import Rerouting, replay
from polyrhythm.plan.routes import GridTimes
from polyrhythm.simulate.job import SimulatedJob
from polyrhythm.simulate.result import SimulationResult
from polyrhythm.types import Op, Seconds, Worker


def grid_times(
    cluster: Cluster, stages: tuple[StageWork, ...], replicas: tuple[Replica, ...]
) -> GridTimes:
    """Return the times of the stages on the devices of `replicas`, with all links between them."""
    step = StepSpec(
        replicas=replicas,
        stages=stages,
        speeds=tuple(device.speed for device in cluster.devices),
        links=Links.of(cluster),
        sync=Sync.ALL_REDUCE,
    )
    crossings = {}
    has_one_each = all(len(replica.runs) == len(stages) for replica in replicas)
    are_unequal = has_one_each and len(cluster.regions) > 1
    for p, q in permutations(range(len(replicas)), 2) if are_unequal else ():
        for stage in range(len(stages) - 1):
            runs = replicas[p].runs[stage], replicas[q].runs[stage + 1]
            times, a, b = pipeline_times(runs, step), Worker(stage, p), Worker(stage + 1, q)
            crossings[a, b], crossings[b, a] = times.activations[0], times.gradients[0]
    each = tuple(pipeline_times(replica.runs, step) for replica in replicas)
    return GridTimes(pipelines=each, crossings=crossings)


class ReroutedSimulation:
    """Steps of the workers that are left; see the methods of `Simulation`."""

    def __init__(
        self,
        job: SimulatedJob,
        rerouting: Rerouting,
        times: GridTimes,
        num_steps: int,
        *,
        start: Seconds,
    ) -> None:
        """`job` is that of all workers, whose devices are those of its pipelines."""
        self._job, self._rerouting, self._times = job, rerouting, times
        self._num_steps, self._start, self.now = num_steps, start, start
        self._ends: list[Seconds] = []
        self._summed: list[Seconds] | None = None  # when reduce-scatters of the last step were done
        stages = range(len(job.stages))
        devices = [[run.device for run in pipeline.runs] for pipeline in job.pipelines]
        groups = [
            ReplicaGroup(
                members=tuple(
                    devices[worker.pipeline][stage]
                    for worker in rerouting.routes.workers
                    if worker.stage == stage
                ),
                size=job.stages[stage].gradient_bytes,
            )
            for stage in stages
        ]
        self._scatter_times = reduce_scatter_times(
            groups,
            Links.of(job.cluster),
            Sync.DECOUPLED if job.decoupled else Sync.ALL_REDUCE,
            coordinator=groups[0].members[0] if job.coordinator is None else job.coordinator,
        )
        self._next_end, self._next_summed = self._step()

    @property
    def is_done(self) -> bool:
        return self.num_done >= self._num_steps

    @property
    def num_done(self) -> int:
        return len(self._ends)

    def start(self) -> None:
        """Nothing starts before `run`."""

    def run_step(self, until: Seconds) -> str:
        return self.run(min(until, self._next_end))

    def run(self, until: Seconds = float("inf")) -> str:
        while not self.is_done and self._next_end <= until:
            self.now = self._next_end
            self._ends.append(self.now)
            self._summed = self._next_summed
            self._next_end, self._next_summed = self._step()
        if not self.is_done:
            self.now = until
        return ""

    def collect(self, stop_reason: str) -> SimulationResult:
        job, routes, count = self._job, self._rerouting.routes, self.num_done
        busy = {
            worker: count * routes.loads[worker] * self._times.per_microbatch(worker)
            for worker in routes.workers
        }
        spent = (self._ends[-1] - self._start) if self._ends else 0.0
        group_sizes = Counter[int]()
        for size in Counter(worker.stage for worker in routes.workers).values():
            group_sizes[size] += count
        num_regions = len(job.cluster.regions)
        num_actions = sum(map(len, self._rerouting.actions.values()))
        return SimulationResult(
            ends=(tuple(self._ends),) * routes.num_pipelines,
            samples=job.samples or routes.num_microbatches,
            duration=self.now,
            active_time=(self.now - self._start,) * routes.num_pipelines,
            present=(),
            busy=busy,
            starved={worker: spent - seconds for worker, seconds in busy.items()},
            waited={},
            group_sizes=group_sizes,
            spread=0.0,
            bytes_sent=np.zeros((num_regions, num_regions)),
            num_events=count,
            num_actions=count * num_actions,
            stop_reason=stop_reason,
        )

    def _step(self) -> tuple[Seconds, list[Seconds]]:
        """Return the end of the next step, and when each stage's reduce-scatter is done.

        As in `cost/step.py`: decoupled, half of the average overlaps with the last backward, and
        half with the first forward of the next step.
        """
        times, hides = self._times, 1.0 if self._job.decoupled else 0.0
        ends = self._ends_of_workers(hides)
        summed = []
        for stage, takes in enumerate(self._scatter_times):
            last = max((end, w) for w, end in ends.items() if w.stage == stage)
            hidden = hides * times.duration(last[1], Op.B)
            summed.append(max(last[0], last[0] - hidden + takes))
        gathered = [at + (1 - hides) * t for at, t in zip(summed, self._scatter_times, strict=True)]
        return max(gathered), summed

    def _ends_of_workers(self, hides: float) -> Mapping[Worker, Seconds]:
        ready = dict.fromkeys(self._rerouting.routes.workers, self._start)
        if self._summed is not None:
            for worker in ready:
                hidden = hides * self._times.duration(worker, Op.F)
                takes = self._scatter_times[worker.stage]
                ready[worker] = self._summed[worker.stage] + max(0.0, takes - hidden)
        ends = replay(self._rerouting, self._times, ready)
        return {w: of_worker[-1] for w, of_worker in ends.items() if of_worker}

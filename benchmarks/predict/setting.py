"""What is predicted and measured: schedules and sync modes, on three networks.

Everything is scaled so that 12 workers share two cores: emulated compute takes tens of
milliseconds, and a link holds less than TCP sends before the first acknowledgement.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from benchmarks.harness.compute import EmulatedCompute, EmulatedLayer
from benchmarks.harness.pipeline_job import ENVELOPE, EmulatedWorker, ReplicaSync
from polyrhythm.cost.step import StageWork
from polyrhythm.cost.sync import BUCKET
from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.model import ModelProfile
from polyrhythm.describe.scenario import EVERY_DEVICE, Scenario, Slow
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.simulate.job import SimulatedJob, replicas
from polyrhythm.sync.setup import Setup
from polyrhythm.types import BytesPerSecond, Seconds, Worker

NUM_STAGES, NUM_MICROBATCHES = 3, 5
FORWARDS: tuple[Seconds, ...] = (0.016, 0.020, 0.016)  # of a micro-batch, by stage
BACKWARD = 2  # times a forward
NUM_ACTIVATIONS, NUM_WEIGHTS = 2048, 16384  # floats of a micro-batch, and of a stage
FACTORY = f"{__name__}:emulated_model"
_KILOBYTE: BytesPerSecond = 1e3
_NO_LIMIT: BytesPerSecond = 1e18


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A configuration that a user could choose."""

    schedule: str
    sync: ReplicaSync

    @property
    def name(self) -> str:
        extras = [extra for extra in ("overlap", "decoupled") if getattr(self.sync, extra)]
        return f"{self.schedule}, {' '.join([self.sync.policy, *extras])}"

    def emulated_workers(self, num_pipelines: int) -> list[EmulatedWorker]:
        """Return what each worker computes and sends, in rank order."""
        return [
            EmulatedWorker(
                worker=worker,
                device=device_name(worker),
                num_stages=NUM_STAGES,
                num_pipelines=num_pipelines,
                num_microbatches=NUM_MICROBATCHES,
                schedule=self.schedule,
                forward=FORWARDS[worker.stage],
                backward=BACKWARD * FORWARDS[worker.stage],
                num_activations=NUM_ACTIVATIONS,
                num_weights=NUM_WEIGHTS,
                sync=self.sync,
                scenario=scenario(num_pipelines),
            )
            for worker in workers(num_pipelines)
        ]

    def simulated_job(self, cluster: Cluster, profile: ModelProfile) -> SimulatedJob:
        """Return one stage per layer, on the devices of the cluster in rank order."""
        schedule = ScheduleSpec.parse(self.schedule).build(
            num_stages=NUM_STAGES, num_microbatches=NUM_MICROBATCHES
        )
        num_pipelines = len(cluster.devices) // NUM_STAGES
        # Compute is a sleep, equally long on every host; and a host sends to all others at once.
        devices = tuple(replace(one, speed=1.0, uplink=_NO_LIMIT) for one in cluster.devices)
        return SimulatedJob(
            cluster=replace(cluster, devices=devices),
            stages=tuple(
                StageWork(
                    forward=layer.forward,
                    backward=layer.backward,
                    activation_bytes=layer.activation_bytes + ENVELOPE,
                    gradient_bytes=layer.parameter_bytes,
                )
                for layer in profile.layers
            ),
            pipelines=replicas(schedule, num_pipelines),
            sync=Setup(
                policy=self.sync.policy,
                num_stages=NUM_STAGES,
                num_pipelines=num_pipelines,
                options=self.sync.options,
            ),
            overlap=self.sync.overlap,
            decoupled=self.sync.decoupled,
            num_buckets=max(-(-layer.parameter_bytes // BUCKET) for layer in profile.layers),
            scenario=scenario(num_pipelines),
            nodes=tuple(device.name for device in cluster.devices),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictSetting:
    num_pipelines: int
    networks: tuple[Cluster, ...]
    alternatives: tuple[Alternative, ...]
    num_steps: int  # of one run
    num_warmup: int  # the first of them, which find the pipelines empty
    num_repeated: int  # alternatives, the last ones, measured once more on each network
    profile_repeat: int
    probe_seconds: Seconds  # of a transfer, which gives a bandwidth
    probe_repeat: int
    repeat_budget: Seconds  # for runs that are repeated, since the emulated network was late


def emulated_model() -> tuple[nn.Sequential, Tensor]:
    """Return the model that `polyrhythm profile` measures, a layer per stage, and a micro-batch."""
    layers = [
        EmulatedLayer(
            torch.zeros(NUM_WEIGHTS),
            EmulatedCompute(forward=forward, backward=BACKWARD * forward, start=0.0),
        )
        for forward in FORWARDS
    ]
    return nn.Sequential(*layers), torch.ones(1, NUM_ACTIVATIONS)


def device_name(worker: Worker) -> str:
    return f"d{worker.pipeline * NUM_STAGES + worker.stage}"


def workers(num_pipelines: int) -> tuple[Worker, ...]:
    """Return all workers in rank order."""
    return tuple(Worker(s, p) for p in range(num_pipelines) for s in range(NUM_STAGES))


# Two devices are always slow, and all of them now and then, as in SDPipe's experiments.
_SLOW = {Worker(1, 1): 2.5, Worker(0, 2): 1.3}
_SLEEPS = Slow(device=EVERY_DEVICE, probability=0.02, sleep_factor=1.0)


def scenario(num_pipelines: int) -> Scenario:
    slow = [
        Slow(device=device_name(worker), factor=factor)
        for worker, factor in _SLOW.items()
        if worker.pipeline < num_pipelines
    ]
    return Scenario(name="slow workers", slow=(*slow, _SLEEPS))


def _cluster(
    name: str,
    regions: dict[Worker, str],
    latency: tuple[tuple[Seconds, ...], ...],
    kilobytes: Sequence[Sequence[float]],  # per second
) -> Cluster:
    return Cluster(
        name=name,
        devices=tuple(Device(name=device_name(w), region=region) for w, region in regions.items()),
        regions=tuple(dict.fromkeys(regions.values())),
        latency=latency,
        bandwidth=tuple(tuple(rate * _KILOBYTE for rate in row) for row in kilobytes),
    )


def networks(num_pipelines: int) -> tuple[Cluster, ...]:
    """Return one region; two sites with half of the pipelines each; and unequal links.

    Between the two sites, only averages are sent. The unequal links are faster in one direction
    than in the other, and each pipeline uses all of them.
    """
    everyone = workers(num_pipelines)
    return (
        _cluster("office", dict.fromkeys(everyone, "here"), ((0.001,),), [[2000]]),
        _cluster(
            "two sites",
            {worker: ("west", "east")[2 * worker.pipeline // num_pipelines] for worker in everyone},
            ((0.002, 0.02), (0.02, 0.002)),
            ((1000, 300), (300, 1000)),
        ),
        _cluster(
            "world",
            {worker: "abcd"[sum(worker) % 4] for worker in everyone},
            (
                (0.001, 0.008, 0.018, 0.012),
                (0.008, 0.002, 0.010, 0.015),
                (0.018, 0.010, 0.001, 0.006),
                (0.012, 0.015, 0.006, 0.002),
            ),
            (
                (900, 450, 300, 360),
                (330, 750, 450, 270),
                (390, 300, 1200, 450),
                (270, 390, 330, 1000),
            ),
        ),
    )


# By default, windows follow the rate at which workers arrive: then a millisecond may decide who is
# in a group, and that decides how long the next window is. Two runs of the same were 8 % apart. So
# where workers wait for windows, these are fixed, and so long that few arrive close to their ends.
_WINDOW = {"window": 0.2}
_ALTERNATIVES = (
    *(
        Alternative(schedule=schedule, sync=sync)
        for schedule in ("1f1b", "gpipe", "bounded:5,3,1")
        for sync in (
            ReplicaSync(policy="all_reduce"),
            ReplicaSync(policy="partial_reduce", options={"group_size": 2}),
            ReplicaSync(policy="adaptive", overlap=True),
        )
    ),
    *(
        Alternative(schedule="1f1b", sync=sync)
        for sync in (
            ReplicaSync(policy="static"),
            ReplicaSync(policy="age", options=_WINDOW, decoupled=True),
            ReplicaSync(policy="adaptive", options=_WINDOW),
        )
    ),
)

FULL = PredictSetting(
    num_pipelines=4,
    networks=networks(4),
    alternatives=_ALTERNATIVES,
    num_steps=7,
    num_warmup=1,
    num_repeated=1,
    profile_repeat=15,
    probe_seconds=0.1,
    probe_repeat=2,
    repeat_budget=180.0,
)
QUICK = PredictSetting(
    num_pipelines=2,
    networks=networks(2)[:1],
    alternatives=_ALTERNATIVES[:2],
    num_steps=2,
    num_warmup=1,
    num_repeated=0,
    profile_repeat=3,
    probe_seconds=0.02,
    probe_repeat=1,
    repeat_budget=0.0,
)

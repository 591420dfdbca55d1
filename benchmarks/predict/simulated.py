"""One alternative in virtual time: from what `probe` and `profile` found, and nothing else."""

from dataclasses import replace

from benchmarks.predict.runs import Ends
from benchmarks.predict.setting import (
    NUM_MICROBATCHES,
    NUM_STAGES,
    Alternative,
    scenario,
)
from benchmarks.sleeping.job import ENVELOPE
from polyrhythm.cost.step import StageWork
from polyrhythm.cost.sync import BUCKET
from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.model import ModelProfile
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.simulate.job import SimulatedJob, replicas
from polyrhythm.simulate.simulator import simulate
from polyrhythm.sync.setup import Setup
from polyrhythm.types import BytesPerSecond

_NO_LIMIT: BytesPerSecond = 1e18


def simulated_ends(
    alternative: Alternative, cluster: Cluster, profile: ModelProfile, num_steps: int
) -> Ends:
    """When each step of each pipeline is over."""
    return simulate(simulated_job(alternative, cluster, profile), num_steps=num_steps).ends


def simulated_job(
    alternative: Alternative, cluster: Cluster, profile: ModelProfile
) -> SimulatedJob:
    """A stage for each layer, and the devices of the cluster in the order of ranks."""
    schedule = ScheduleSpec.parse(alternative.schedule).build(
        num_stages=NUM_STAGES, num_microbatches=NUM_MICROBATCHES
    )
    averaging, num_pipelines = alternative.averaging, len(cluster.devices) // NUM_STAGES
    return SimulatedJob(
        cluster=_as_in_the_lab(cluster),
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
            policy=averaging.policy,
            num_stages=NUM_STAGES,
            num_pipelines=num_pipelines,
            options=averaging.options,
        ),
        overlap=averaging.overlap,
        decoupled=averaging.decoupled,
        num_buckets=max(-(-layer.parameter_bytes // BUCKET) for layer in profile.layers),
        scenario=scenario(num_pipelines),
        nodes=tuple(device.name for device in cluster.devices),
    )


def _as_in_the_lab(cluster: Cluster) -> Cluster:
    """Compute is a sleep, as long on every host; and a host sends to all others at once."""
    devices = tuple(replace(one, speed=1.0, uplink=_NO_LIMIT) for one in cluster.devices)
    return replace(cluster, devices=devices)

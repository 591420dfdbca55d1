"""The networks of the pipeline benchmark: the time of a transfer, in forwards of a stage."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

from polyrhythm.cost.pipeline import LinkTimes, PipelineTimes, length
from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.scenario import LinkChange
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.types import Bytes, BytesPerSecond, Seconds

HOSTS = ("a", "b", "c", "d")
LATENCY: Seconds = 0.0002
# A full TCP segment takes 1,500 bytes on the wire and carries 1,448.
_OVERHEAD = 1500 / 1448

FREE_LINK, PREEMPTED_LINK = 0.2, 1.5  # bursty: transfers in forwards
PREEMPTED_SHARE = 0.4  # of draws
MEAN_DWELL = 6.7  # forwards until the next draw


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineNetwork:
    """`transfers[link]`: time in forwards, in both directions; a bursty network redraws it."""

    name: str
    transfers: tuple[float, ...]
    bursty: bool = False

    def times(self, forward: Seconds) -> PipelineTimes:
        """Return what an ideal machine would measure."""
        links = tuple(
            LinkTimes(busy=(c * forward - LATENCY,), latency=LATENCY) for c in self.transfers
        )
        num_stages = len(links) + 1
        return PipelineTimes(
            forward=(forward,) * num_stages,
            backward=(2 * forward,) * num_stages,
            activations=links,
            gradients=links,
        )

    def changes(self, forward: Seconds, message: Bytes) -> list[LinkChange]:
        """Return the changes that turn any network into the start of this one."""
        return [
            LinkChange(
                at=0.0,
                source=HOSTS[link],
                target=HOSTS[link + 1],
                bandwidth=bandwidth(transfer, forward, message),
                latency=LATENCY,
            )
            for link, transfer in enumerate(self.transfers)
        ]


def bandwidth(transfer: float, forward: Seconds, message: Bytes) -> BytesPerSecond:
    """Return the bandwidth at which a message arrives after `transfer` forwards."""
    return message * _OVERHEAD / (transfer * forward - LATENCY)


def bursts(forward: Seconds, message: Bytes, *, until: Seconds, seed: int) -> Iterator[LinkChange]:
    """Redraw each direction of each link, preempted or not, after random dwell times."""
    draw = random.Random(seed)
    for source, target in pairwise(HOSTS):
        for one, other in ((source, target), (target, source)):
            at = 0.0
            while at < until:
                preempted = draw.random() < PREEMPTED_SHARE
                transfer = PREEMPTED_LINK if preempted else FREE_LINK
                yield LinkChange(
                    at=at,
                    source=one,
                    target=other,
                    bandwidth=bandwidth(transfer, forward, message),
                    one_way=True,
                )
                at += draw.expovariate(1 / (MEAN_DWELL * forward))


def ideal(network: PipelineNetwork, forward: Seconds, num_microbatches: int) -> Seconds:
    """Return the shortest simulated length of kFkB and of generous in-flight limits."""
    specs = [ScheduleSpec("kfkb", k=k) for k in range(1, num_microbatches + 1)]
    size = len(HOSTS)
    specs += [
        ScheduleSpec("bounded", limits=tuple(1 + slack * (size - 1 - s) for s in range(size)))
        for slack in range(1, 5)
    ]
    shape = {"num_stages": size, "num_microbatches": num_microbatches}
    times = network.times(forward)
    return min(length(spec.build(**shape), times) for spec in specs)


def cluster() -> Cluster:
    """Return hosts in a row; a network sets the bandwidth of their links."""
    size = len(HOSTS)
    return Cluster(
        name="pipeline",
        devices=tuple(Device(name=host, region=host) for host in HOSTS),
        regions=HOSTS,
        latency=tuple((LATENCY,) * size for _ in HOSTS),
        bandwidth=tuple((12.5e6,) * size for _ in HOSTS),
    )


def uniform(name: str, transfer: float) -> PipelineNetwork:
    return PipelineNetwork(name=name, transfers=(transfer,) * (len(HOSTS) - 1))


HALF, FULL, FAST = uniform("half", 0.5), uniform("full", 1.0), uniform("fast", 0.02)
BURSTY = PipelineNetwork(name="bursty", transfers=(0.72,) * 3, bursty=True)
SLOW_LINK = PipelineNetwork(name="slowlink", transfers=(0.05, 1.0, 0.05))

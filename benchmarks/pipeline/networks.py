"""The networks of the pipeline benchmark: how long a transfer takes, in forwards of a stage."""

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

QUICK_LINK, PREEMPTED_LINK = 0.2, 1.5  # bursty: transfers in forwards
PREEMPTED_SHARE = 0.4  # of draws
MEAN_DWELL = 6.7  # forwards until the next draw


@dataclass(frozen=True, slots=True, kw_only=True)
class Network:
    """`transfers[link]` in forwards, both directions alike; a bursty one draws them again."""

    name: str
    transfers: tuple[float, ...]
    bursty: bool = False

    def times(self, forward: Seconds) -> PipelineTimes:
        """What an ideal machine would measure."""
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
        """That make any network this one, at its start."""
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
    """At which a message takes `transfer` forwards from sent to arrived."""
    return message * _OVERHEAD / (transfer * forward - LATENCY)


def bursts(forward: Seconds, message: Bytes, *, until: Seconds, seed: int) -> Iterator[LinkChange]:
    """Every direction of every link, preempted or not, drawn again after a random dwell."""
    draw = random.Random(seed)
    for source, target in pairwise(HOSTS):
        for one, other in ((source, target), (target, source)):
            at = 0.0
            while at < until:
                preempted = draw.random() < PREEMPTED_SHARE
                transfer = PREEMPTED_LINK if preempted else QUICK_LINK
                yield LinkChange(
                    at=at,
                    source=one,
                    target=other,
                    bandwidth=bandwidth(transfer, forward, message),
                    one_way=True,
                )
                at += draw.expovariate(1 / (MEAN_DWELL * forward))


def ideal(network: Network, forward: Seconds, num_microbatches: int) -> Seconds:
    """The shortest simulated length, of kFkB and of generous limits."""
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
    """Hosts in a row; links get their rate from a network."""
    size = len(HOSTS)
    return Cluster(
        name="pipeline",
        devices=tuple(Device(name=host, region=host) for host in HOSTS),
        regions=HOSTS,
        latency=tuple((LATENCY,) * size for _ in HOSTS),
        bandwidth=tuple((12.5e6,) * size for _ in HOSTS),
    )


def uniform(name: str, transfer: float) -> Network:
    return Network(name=name, transfers=(transfer,) * (len(HOSTS) - 1))


HALF, FULL, FAST = uniform("half", 0.5), uniform("full", 1.0), uniform("fast", 0.02)
BURSTY = Network(name="bursty", transfers=(0.72,) * 3, bursty=True)
SLOW_LINK = Network(name="slowlink", transfers=(0.05, 1.0, 0.05))

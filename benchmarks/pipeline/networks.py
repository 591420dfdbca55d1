"""The networks of the pipeline benchmark: the time of a transfer, in forwards of a stage."""

from dataclasses import dataclass
from itertools import pairwise

from benchmarks.harness.network import WIRE_OVERHEAD, preemptions, uniform_cluster
from polyrhythm.cost.pipeline import LinkTimes, PipelineTimes, length
from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.scenario import LinkChange
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.types import Bytes, BytesPerSecond, Seconds

HOSTS = ("a", "b", "c", "d")
LATENCY: Seconds = 0.0002

FREE_LINK, PREEMPTED_LINK = 0.2, 1.5  # bursty: transfers in forwards
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


def bandwidth(transfer: float, forward: Seconds, message: Bytes) -> BytesPerSecond:
    """Return the bandwidth at which a message arrives after `transfer` forwards."""
    return message * WIRE_OVERHEAD / (transfer * forward - LATENCY)


def bursts(forward: Seconds, message: Bytes, *, until: Seconds, seed: int) -> list[LinkChange]:
    """Redraw each direction of each link, preempted or not, after random dwell times."""
    free, preempted = (bandwidth(each, forward, message) for each in (FREE_LINK, PREEMPTED_LINK))
    directions = [link for a, b in pairwise(HOSTS) for link in ((a, b), (b, a))]
    links = dict.fromkeys(directions, (free, preempted))
    return preemptions(links, dwell=MEAN_DWELL * forward, until=until, seed=seed)


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
    return uniform_cluster(HOSTS, LATENCY, 12.5e6)


def uniform(name: str, transfer: float) -> PipelineNetwork:
    return PipelineNetwork(name=name, transfers=(transfer,) * (len(HOSTS) - 1))


HALF, FULL, FAST = uniform("half", 0.5), uniform("full", 1.0), uniform("fast", 0.02)
BURSTY = PipelineNetwork(name="bursty", transfers=(0.72,) * 3, bursty=True)
SLOW_LINK = PipelineNetwork(name="slowlink", transfers=(0.05, 1.0, 0.05))

"""The price of a step: devices by the hour, and egress from regions by the gigabyte."""

from itertools import pairwise, permutations

from polyrhythm.cost.step import StepSpec, groups_of
from polyrhythm.cost.sync import GROUP_SIZE, Sync
from polyrhythm.describe.cluster import Cluster
from polyrhythm.types import Seconds

_HOUR: Seconds = 3600.0
_GIGABYTE = 1e9


def price_of(step: StepSpec, takes: Seconds, cluster: Cluster) -> float | None:
    """Return the price of a step; None if one of its devices has no price."""
    used = {run.device for replica in step.replicas for run in replica.runs}
    prices = [cluster.devices[device].price_per_hour for device in sorted(used)]
    if any(price is None for price in prices):
        return None
    by_the_hour = sum(price for price in prices if price is not None)
    return by_the_hour * takes / _HOUR + egress_price(step, cluster)


def egress_price(step: StepSpec, cluster: Cluster) -> float:
    """Return the price of all bytes that a step sends between regions."""
    if not cluster.egress_price_per_gb:
        return 0.0
    price = dict(zip(cluster.regions, cluster.egress_price_per_gb, strict=True))
    regions = [device.region for device in cluster.devices]

    def sent(a: int, b: int, size: float) -> float:
        return 0.0 if regions[a] == regions[b] else price[regions[a]] * size / _GIGABYTE

    total = 0.0
    for replica in step.replicas:
        num_microbatches = len(replica.schedule[0]) // 2
        for here, after in pairwise(replica.runs):
            size = step.stages[here.end - 1].activation_bytes * num_microbatches
            total += sent(here.device, after.device, size) + sent(after.device, here.device, size)
    for group in groups_of(step):
        members, share = group.members, 2 * group.size / len(group.members)
        if step.sync is Sync.GROUPS and len(members) > GROUP_SIZE:
            # In groups a member sends to few others, but a larger shard to each.
            share *= (GROUP_SIZE - 1) / (len(members) - 1) * len(members) / GROUP_SIZE
        total += sum(sent(a, b, share) for a, b in permutations(members, 2))
    return total

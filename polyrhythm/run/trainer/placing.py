"""Which process is which worker of a plan.

Ranks are what a launcher gave, and a plan may name devices. Where both are known, each process is
the worker whose device it runs on; a device with several stages has as many processes. Otherwise
workers are dealt by rank. Processes then take the ranks that a plan deals: pipeline by pipeline,
stages in order.
"""

import os
import socket
from collections import Counter, defaultdict
from collections.abc import Sequence

from torch.distributed.distributed_c10d import Store

from polyrhythm.errors import PlanError
from polyrhythm.plan.plan import Plan
from polyrhythm.run.launch import Place

DEVICE = "POLYRHYTHM_DEVICE"  # which device a process runs on; the lab tells its hosts


def own_device(place: Place) -> str:
    """As `polyrhythm probe` names it."""
    return os.environ.get(DEVICE, f"{socket.gethostname()}/{place.local_rank}")


def told_names(store: Store, place: Place, own: str) -> list[str]:
    """The device of every process, by the rank that its launcher gave it."""
    store.set(f"device of {place.rank}", own)
    return [store.get(f"device of {rank}").decode() for rank in range(place.world_size)]


def seats(plan: Plan, names: Sequence[str]) -> list[int]:
    """The rank in the plan of each process, in the order of the ranks that they were given."""
    if len(names) != plan.num_workers:
        raise PlanError(
            f"{len(names)} processes for {plan.num_stages} stages x {plan.num_pipelines} pipelines",
            expected=f"{plan.num_workers} processes, one for each stage of each pipeline",
            fix=f"start {plan.num_workers} processes, or use another plan",
        )
    wanted = [device for pipeline in plan.pipelines for device in pipeline.devices]
    if len(wanted) < plan.num_workers or not set(wanted) & set(names):
        return list(range(len(names)))  # any device will do, or these have other names
    missing = Counter(wanted) - Counter(names)
    if missing:
        device, number = next(iter(missing.items()))
        raise PlanError(
            f"the plan has {Counter(wanted)[device]} stages on {device!r}, and "
            f"{Counter(names)[device]} processes run there",
            expected="as many processes on each device as the plan has stages there",
            fix=f"start {number} more on {device!r}, or plan for the devices that there are: "
            f"{', '.join(sorted(set(names)))}",
        )
    free = defaultdict(list)
    for rank, device in enumerate(wanted):
        free[device].append(rank)
    return [free[name].pop(0) for name in names]

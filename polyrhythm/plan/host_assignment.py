"""Assign the processes of a plan to the hosts of a rehearsed cluster. No torch."""

from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.read import unknown
from polyrhythm.errors import PlanError
from polyrhythm.plan.plan import Plan


def assign_hosts(plan: Plan | None, cluster: Cluster) -> tuple[str, ...]:
    """Return the device of each process by rank; without a plan, one process per device.

    A device has as many processes as stages, and none if the plan leaves it out. A plan without
    device names uses all devices in order. Raises PlanError if the plan does not fit.
    """
    names = tuple(device.name for device in cluster.devices)
    if plan is None:
        return names
    wanted = tuple(device for pipeline in plan.pipelines for device in pipeline.devices)
    if len(wanted) == plan.num_workers:
        for rank, device in enumerate(wanted):
            if device not in names:
                error = unknown("device", device, names)
                made_for = f"; this plan was made for {plan.cluster!r}" if plan.cluster else ""
                raise PlanError(
                    f"the plan has {plan.worker(rank)} on {device!r}: no device of cluster "
                    f"{cluster.name!r}",
                    expected=error.expected,
                    fix=f"plan for this cluster: polyrhythm plan CLUSTER PROFILE{made_for}",
                )
        return wanted
    if plan.num_workers != len(names):
        raise PlanError(
            f"{len(names)} devices for {plan.num_stages} stages x {plan.num_pipelines} pipelines",
            expected=f"a cluster with {plan.num_workers} devices, one for each stage of each "
            "pipeline, or a plan that names its devices",
            fix=f"use another plan, or leave out all but {plan.num_workers} devices"
            if plan.num_workers < len(names)
            else "use a plan with fewer stages or pipelines, or a larger cluster",
        )
    return names

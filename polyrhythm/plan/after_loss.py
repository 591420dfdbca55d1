"""Decide after a loss whether to divide the layers anew over the devices that are left.

Without that, survivors keep their layers (`survivors.py`), and spares wait. A division with other
stages may use the spares, or go on where no whole pipeline is left, but layers and their state have
to move first. The decision compares the predicted times of the remaining steps, as `replan.py`
does for any change of the cluster.
"""

import contextlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from polyrhythm.errors import UserError
from polyrhythm.plan.all_devices import merge_layers
from polyrhythm.plan.plan import Plan
from polyrhythm.plan.predict import predict
from polyrhythm.plan.problem import Problem
from polyrhythm.plan.replan import replan
from polyrhythm.types import Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class AfterLoss:
    plan: Plan | None  # the new division; None to keep the layers
    why: str
    pause: Seconds = 0.0  # until all layers have moved


def decide_after_loss(
    running: Plan,
    devices: Collection[str],
    problem: Problem,
    *,
    steps: int,
    seed: int = 0,
    layer_blocks: tuple[int, ...] = (),
    one_stage_per_device: bool = False,
    min_left: Seconds = 0.0,
) -> AfterLoss:
    """Decide for the devices that are left, with `steps` remaining.

    `running` is the plan that goes on with the layers kept; if no pipeline is whole, the last one.
    `layer_blocks` are numbers of consecutive layers that no new stage may split;
    `one_stage_per_device` is as in `replan`. If the steps are predicted to take less than
    `min_left`, nothing is searched, which may take some seconds. The result depends only on the
    arguments.
    """
    left = tuple(device for device in problem.cluster.devices if device.name in devices)
    if steps < 1 or not left:
        what = "device" if steps else "step"
        return AfterLoss(plan=None, why=f"keep the layers: no {what} is left")
    job = replace(
        problem.job,
        batch_size=running.batch or problem.job.batch_size,
        sync=running.sync,
        num_stages=None,  # what the first plan had to keep to was chosen for more devices
        num_pipelines=None,
    )
    if min_left:
        with contextlib.suppress(UserError):  # it cannot go on: a search may find what can
            if (remaining := steps * predict(running, problem).time.total) < min_left:
                why = f"keep the layers: the steps that are left take about {remaining:.3g} s"
                return AfterLoss(plan=None, why=why)
    ends = _block_ends(running, layer_blocks or (1,) * problem.num_layers)
    sizes = tuple(b - a for a, b in pairwise((0, *ends)))
    rest = replace(
        problem,
        cluster=replace(problem.cluster, devices=left),
        profile=merge_layers(problem.profile, sizes),
        job=job,
    )
    in_blocks = tuple(
        sum(layers.start < end <= layers.stop for end in ends)
        for layers in map(running.layers, range(running.num_stages))
    )
    try:
        found = replan(
            replace(running, layers_per_stage=in_blocks),
            rest,
            steps=steps,
            seed=seed,
            one_stage_per_device=one_stage_per_device,
        )
    except UserError as error:
        return AfterLoss(plan=None, why=f"keep the layers: {error.wrong}")
    if found.from_checkpoint:
        lost = (range(ends[block] - sizes[block], ends[block]) for block in found.from_checkpoint)
        layers = ", ".join(str(layer) for block in lost for layer in block)
        return AfterLoss(plan=None, why=f"no device has the state of layers {layers}")
    if found.stays:
        return AfterLoss(plan=None, why=found.why)
    plan = found.planned.best.plan
    cuts = [(0, *ends)[end] for end in accumulate(plan.layers_per_stage, initial=0)]
    plan = replace(plan, layers_per_stage=tuple(b - a for a, b in pairwise(cuts)))
    return AfterLoss(plan=plan, why=found.why, pause=found.migration)


def _block_ends(running: Plan, blocks: tuple[int, ...]) -> tuple[int, ...]:
    """Return where blocks of layers end; a stage of the running plan may split one already."""
    return tuple(sorted({*accumulate(blocks), *accumulate(running.layers_per_stage)}))

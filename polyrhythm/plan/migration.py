"""Migrate from one plan to another: which devices receive which layers, and how long it takes.

A device keeps the layers that it has. It receives missing weights and optimizer state from the
device with the fastest transfer; layers that no device has come from a checkpoint, which is not
timed here. All devices receive concurrently, each its layers one after another.
"""

from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import linear_sum_assignment

from polyrhythm.describe.cluster import Device
from polyrhythm.plan.plan import Plan
from polyrhythm.plan.problem import Problem
from polyrhythm.types import Bytes, Seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Migration:
    takes: Seconds
    moved: tuple[str, ...]  # devices that receive layers
    size: Bytes  # of all transfers
    lost: tuple[int, ...]  # layers that no device has


def layers_by_device(plan: Plan) -> dict[str, frozenset[int]]:
    held: dict[str, set[int]] = {}
    for pipeline in plan.pipelines:
        for stage, device in enumerate(pipeline.devices):
            held.setdefault(device, set()).update(plan.layers(stage))
    return {device: frozenset(layers) for device, layers in held.items()}


def migration(before: Plan, after: Plan, problem: Problem) -> Migration:
    """Return the migration; `problem` has the present cluster: other devices are lost."""
    has = {
        device: layers
        for device, layers in layers_by_device(before).items()
        if device in problem.index
    }
    takes, moved, size = 0.0, [], 0
    lost: set[int] = set()
    for device, wanted in sorted(layers_by_device(after).items()):
        missing = wanted - has.get(device, frozenset())
        if not missing:
            continue
        moved.append(device)
        arrival = 0.0
        for layer in sorted(missing):
            sources = [other for other, layers in has.items() if layer in layers]
            if not sources:
                lost.add(layer)
                continue
            state = _state(layer, problem)
            here = problem.index[device]
            arrival += min(
                problem.links.transfer(problem.index[source], here, state) for source in sources
            )
            size += state
        takes = max(takes, arrival)
    return Migration(takes=takes, moved=tuple(moved), size=size, lost=tuple(sorted(lost)))


def minimize_moves(before: Plan, after: Plan, problem: Problem) -> Plan:
    """Return the plan with equal devices exchanged so that the fewest bytes move."""
    has, wants = layers_by_device(before), layers_by_device(after)
    states = np.array([_state(layer, problem) for layer in range(problem.num_layers)])
    alike: dict[tuple[object, ...], list[str]] = {}
    for device in problem.cluster.devices:
        alike.setdefault(_kind(device), []).append(device.name)
    renamed: dict[str, str] = {}
    for names in alike.values():
        roles = [wants.get(name, frozenset()) for name in names]
        fetched = np.array(
            [
                [
                    sum(states[layer] for layer in role - has.get(name, frozenset()))
                    for name in names
                ]
                for role in roles
            ]
        )
        for role, name in zip(*linear_sum_assignment(fetched), strict=True):
            renamed[names[role]] = names[name]
    return replace(
        after,
        pipelines=tuple(
            replace(pipeline, devices=tuple(renamed[device] for device in pipeline.devices))
            for pipeline in after.pipelines
        ),
        left_out=tuple(sorted(renamed[name] for name in after.left_out)),
    )


def _kind(device: Device) -> tuple[object, ...]:
    """Return a key of interchangeable devices: links depend only on the region."""
    return device.region, device.speed, device.memory, device.price_per_hour, device.uplink


def _state(layer: int, problem: Problem) -> Bytes:
    """Return the bytes of a layer's weights and optimizer state."""
    weights = problem.profile.layers[layer].parameter_bytes
    return int(weights * (1 + problem.job.optimizer_bytes))

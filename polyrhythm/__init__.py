"""Train one PyTorch model on machines that keep different time."""

__version__ = "0.1.0"  # above the imports: the event log, imported below, records it

from typing import TYPE_CHECKING

from polyrhythm.describe.cluster import Cluster, Device, Link
from polyrhythm.describe.model import Layer, ModelProfile
from polyrhythm.describe.scenario import Scenario
from polyrhythm.errors import PeerError, UserError
from polyrhythm.events import Event, read_run
from polyrhythm.plan.plan import Plan
from polyrhythm.run.compute import Compute
from polyrhythm.schedule.recipe import Recipe
from polyrhythm.types import Action, Op, Worker

if TYPE_CHECKING:
    from polyrhythm.run.pipeline import Pipeline

__all__ = [
    "Action",
    "Cluster",
    "Compute",
    "Device",
    "Event",
    "Layer",
    "Link",
    "ModelProfile",
    "Op",
    "PeerError",
    "Pipeline",
    "Plan",
    "Recipe",
    "Scenario",
    "UserError",
    "Worker",
    "read_run",
]


def __getattr__(name: str) -> object:
    """What needs torch is imported when it is first used."""
    if name == "Pipeline":
        from polyrhythm.run.pipeline import Pipeline

        return Pipeline
    raise AttributeError(f"module 'polyrhythm' has no attribute {name!r}")

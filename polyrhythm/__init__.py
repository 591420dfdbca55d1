"""Train one PyTorch model on machines that keep different time."""

__version__ = "0.1.0"  # above the imports: the event log, imported below, records it

from polyrhythm.describe.cluster import Cluster, Device, Link
from polyrhythm.describe.model import Layer, ModelProfile
from polyrhythm.describe.scenario import Scenario
from polyrhythm.errors import PeerError, UserError
from polyrhythm.events import Event, read_run
from polyrhythm.plan.plan import Plan
from polyrhythm.run.compute import Compute
from polyrhythm.types import Action, Op, Worker

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
    "Plan",
    "Scenario",
    "UserError",
    "Worker",
    "read_run",
]

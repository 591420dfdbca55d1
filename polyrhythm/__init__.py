"""Train one PyTorch model on machines of unequal and changing speed."""

__version__ = "0.1.0"  # above the imports: the event log, imported below, records it

import importlib
from typing import TYPE_CHECKING

from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.model import ModelProfile
from polyrhythm.describe.scenario import Scenario
from polyrhythm.errors import PeerError, UserError
from polyrhythm.events import read_run
from polyrhythm.plan.options import PlanOptions
from polyrhythm.plan.plan import Plan
from polyrhythm.run.emulated_compute import EmulatedCompute
from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.types import Op, Worker

if TYPE_CHECKING:
    from polyrhythm.plan.make_plan import make_plan
    from polyrhythm.run.averaging.group_sync import GroupSync
    from polyrhythm.run.averaging.parameter_server import ParameterServer
    from polyrhythm.run.decoupled.optimizer import DistributedOptimizer
    from polyrhythm.run.pipeline.pipeline import Pipeline
    from polyrhythm.run.trainer.trainer import Trainer
    from polyrhythm.simulate.predict import predict

__all__ = [
    "Cluster",
    "Device",
    "DistributedOptimizer",
    "EmulatedCompute",
    "GroupSync",
    "ModelProfile",
    "Op",
    "ParameterServer",
    "PeerError",
    "Pipeline",
    "Plan",
    "PlanOptions",
    "Scenario",
    "ScheduleSpec",
    "Trainer",
    "UserError",
    "Worker",
    "make_plan",
    "predict",
    "read_run",
]


_LAZY = {  # names that need torch, SciPy or Numba: imported at first use
    "DistributedOptimizer": "polyrhythm.run.decoupled.optimizer",
    "GroupSync": "polyrhythm.run.averaging.group_sync",
    "ParameterServer": "polyrhythm.run.averaging.parameter_server",
    "Pipeline": "polyrhythm.run.pipeline.pipeline",
    "Trainer": "polyrhythm.run.trainer.trainer",
    "make_plan": "polyrhythm.plan.make_plan",
    "predict": "polyrhythm.simulate.predict",
}


def __getattr__(name: str) -> object:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'polyrhythm' has no attribute {name!r}")

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
    from polyrhythm.describe.profiles import builtin_profile
    from polyrhythm.describe.scale import fewer_devices, scaled_cluster, scaled_scenario
    from polyrhythm.describe.slowness import Slowness, load_traces
    from polyrhythm.describe.speed import fit_speeds
    from polyrhythm.describe.spot import spot_scenario
    from polyrhythm.lab.lab import Lab
    from polyrhythm.plan.make_plan import make_plan
    from polyrhythm.run.averaging.group_sync import GroupSync
    from polyrhythm.run.averaging.parameter_server import ParameterServer
    from polyrhythm.run.averaging.reduced_variance import ReducedVarianceAdamW
    from polyrhythm.run.checkpoint.checkpointer import Checkpointer
    from polyrhythm.run.data.sample_dispatcher import SampleDispatcher
    from polyrhythm.run.decoupled.optimizer import DistributedOptimizer
    from polyrhythm.run.pipeline.loss import add_auxiliary_loss
    from polyrhythm.run.pipeline.partition import LayerSplit
    from polyrhythm.run.pipeline.pipeline import Pipeline
    from polyrhythm.run.random_streams import RandomStreams, seeded_draws
    from polyrhythm.run.trainer.config import CheckpointConfig, DataConfig, DeviceConfig
    from polyrhythm.run.trainer.metrics import STOP, Callback, EarlyStopping
    from polyrhythm.run.trainer.optimizers import adamw, constant, cosine, linear
    from polyrhythm.run.trainer.trainer import FitResult, Trainer
    from polyrhythm.simulate.simulate_plan import simulate_plan as simulate
    from polyrhythm.sinks.metrics import Logger, MLflow, StepInfo, TensorBoard, WandB
    from polyrhythm.sync.dispatch import SamplerState
    from polyrhythm.sync.modes import SyncConfig
    from polyrhythm.sync.policies.local import OuterNesterov

__all__ = [
    "STOP",
    "Callback",
    "CheckpointConfig",
    "Checkpointer",
    "Cluster",
    "DataConfig",
    "Device",
    "DeviceConfig",
    "DistributedOptimizer",
    "EarlyStopping",
    "EmulatedCompute",
    "FitResult",
    "GroupSync",
    "Lab",
    "LayerSplit",
    "Logger",
    "MLflow",
    "ModelProfile",
    "Op",
    "OuterNesterov",
    "ParameterServer",
    "PeerError",
    "Pipeline",
    "Plan",
    "PlanOptions",
    "RandomStreams",
    "ReducedVarianceAdamW",
    "SampleDispatcher",
    "SamplerState",
    "Scenario",
    "ScheduleSpec",
    "Slowness",
    "StepInfo",
    "SyncConfig",
    "TensorBoard",
    "Trainer",
    "UserError",
    "WandB",
    "Worker",
    "adamw",
    "add_auxiliary_loss",
    "builtin_profile",
    "constant",
    "cosine",
    "fewer_devices",
    "fit_speeds",
    "linear",
    "load_traces",
    "make_plan",
    "read_run",
    "scaled_cluster",
    "scaled_scenario",
    "seeded_draws",
    "simulate",
    "spot_scenario",
]


_LAZY = {  # modules that need torch, SciPy or Numba, or are rarely needed: imported at first use
    "describe.profiles": ("builtin_profile",),
    "describe.scale": ("fewer_devices", "scaled_cluster", "scaled_scenario"),
    "describe.slowness": ("Slowness", "load_traces"),
    "describe.speed": ("fit_speeds",),
    "describe.spot": ("spot_scenario",),
    "lab.lab": ("Lab",),
    "plan.make_plan": ("make_plan",),
    "run.averaging.group_sync": ("GroupSync",),
    "run.averaging.parameter_server": ("ParameterServer",),
    "run.averaging.reduced_variance": ("ReducedVarianceAdamW",),
    "run.checkpoint.checkpointer": ("Checkpointer",),
    "run.data.sample_dispatcher": ("SampleDispatcher",),
    "run.decoupled.optimizer": ("DistributedOptimizer",),
    "run.pipeline.loss": ("add_auxiliary_loss",),
    "run.pipeline.pipeline": ("Pipeline",),
    "run.random_streams": ("RandomStreams", "seeded_draws"),
    "run.trainer.config": ("CheckpointConfig", "DataConfig", "DeviceConfig"),
    "run.trainer.metrics": ("STOP", "Callback", "EarlyStopping"),
    "run.trainer.optimizers": ("adamw", "constant", "cosine", "linear"),
    "run.pipeline.partition": ("LayerSplit",),
    "run.trainer.trainer": ("FitResult", "Trainer"),
    "sinks.metrics": ("Logger", "MLflow", "StepInfo", "TensorBoard", "WandB"),
    "sync.modes": ("SyncConfig",),
    "sync.dispatch": ("SamplerState",),
    "sync.policies.local": ("OuterNesterov",),
}
_MODULES = {name: f"polyrhythm.{module}" for module, names in _LAZY.items() for name in names}
_RENAMED = {
    "predict": "simulate(plan, scenario, cluster=..., profile=...)",
    "Checkpoints": "Checkpointer",
    "Compute": "EmulatedCompute",
    "Recipe": "ScheduleSpec",
    "StepEnd": "StepInfo",
}


def __getattr__(name: str) -> object:
    if name == "simulate":  # a package that can be called
        return importlib.import_module("polyrhythm.simulate")
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    if name in _RENAMED:
        raise AttributeError(f"polyrhythm.{name} is now polyrhythm.{_RENAMED[name]}")
    raise AttributeError(f"module 'polyrhythm' has no attribute {name!r}")

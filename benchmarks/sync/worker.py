"""One process of the synchronisation benchmark, on a host of the lab, doing what it is told.

An order is heard in two words: what to prepare, and, once all are prepared, when to begin. The last
process is no worker; it is the parameter server where a side needs one.
"""

import gc
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch._dynamo  # before the fork: it takes a second
import torch.distributed as dist

from benchmarks.sync.settings import Setting, Side, device_name
from benchmarks.sync.stages import Stage, Staged, loss
from benchmarks.sync.training import Balanced, Plain, Training, Weights
from polyrhythm.describe.slowness import Slowness, load_traces
from polyrhythm.events import EventLog, worker_log
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.averaging.parameter_server import ParameterServer
from polyrhythm.run.pipeline.pipeline import Pipeline
from polyrhythm.types import Seconds, Worker

DEADLINE: Seconds = 60.0  # for any wait for another process
WORKERS_PER_NODE = 4  # as on Prague's cluster; the network is the same everywhere
_PORT = 29500


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    rank: int
    num_workers: int
    num_stages: int  # of a grid
    master: str
    folder: Path  # for the logs of each order

    @property
    def is_server(self) -> bool:
        return self.rank == self.num_workers


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Train under a side; the setting has the seed of the round."""

    number: int
    setting: Setting
    side: Side

    @property
    def name(self) -> str:
        return f"order {self.number}"


def work(place: Place, orders: Connection) -> None:
    """Serve orders until there are no more."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{place.master}:{_PORT}",
        rank=place.rank,
        world_size=place.num_workers + 1,
        timeout=timedelta(seconds=DEADLINE),
    )
    pipelines = [
        dist.new_group(list(range(first, first + place.num_stages)))
        for first in range(0, place.num_workers, place.num_stages)
    ]
    orders.send("here")
    training: Training | None = None
    while (order := orders.recv()) is not None:
        _release(training)
        training = None
        gc.collect()  # what goes round in circles, and keeps threads that look around now and then
        if place.is_server:
            _serve(order, orders)
            continue
        training = _prepared(order, place, pipelines[place.rank // place.num_stages])
        orders.send("ready")
        orders.send(training.run(orders.recv()))
    _release(training)
    dist.barrier()
    dist.destroy_process_group()


def _release(training: Training | None) -> None:
    if isinstance(training, Staged):
        training.release()


def _serve(order: Order, orders: Connection) -> None:
    """Be there before the workers look for their server, until the last of them has left."""
    setting, server = order.setting, None
    if order.side.policy == "ssp":
        server = ParameterServer(
            num_pipelines=setting.num_pipelines,
            num_stages=setting.num_stages,
            timeout=DEADLINE,
            name=order.name,
        )
    orders.send("ready")
    if server is not None:
        server.serve()
    orders.recv()
    orders.send([] if server is None else server.lost)


def _prepared(order: Order, place: Place, group: dist.ProcessGroup) -> Training:
    """Returns when all workers have joined; `group`: the stages of this worker's pipeline."""
    setting, side, rank = order.setting, order.side, place.rank
    worker = Worker(rank % setting.num_stages, rank // setting.num_stages)
    seed = 1000 * setting.scenario.seed + rank
    is_staged = setting.num_stages > 1
    model = Stage(setting, side, seed) if is_staged else Weights(setting.num_floats, seed)
    kind = Staged if is_staged else Balanced if side.policy == "balanced" else Plain
    traces = load_traces(setting.scenario)
    training: Training = kind(
        setting=setting,
        side=side,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=setting.learning_rate),
        slowness=Slowness.of(setting.scenario, device_name(rank), index=rank, traces=traces),
        log=EventLog(worker_log(place.folder / order.name, worker)),
    )
    trained: Weights | Pipeline = model
    if isinstance(training, Staged):
        trained = training.pipeline = Pipeline(
            model,
            loss_fn=loss,
            num_microbatches=side.num_microbatches,
            schedule=side.schedule,
            flush=side.flush,
            group=group,
            timeout=DEADLINE,
            pipeline=worker.pipeline,
        )
    if side.policy is not None:
        training.sync = GroupSync(
            trained,
            training.optimizer,
            side.policy,
            options=side.options,
            overlap=side.overlap,
            worker=None if is_staged else worker,
            num_pipelines=setting.num_pipelines,
            node=f"node{rank // WORKERS_PER_NODE}",
            seed=setting.scenario.seed,
            timeout=DEADLINE,
            log=training.log,
            name=order.name,
        )
        training.sync.average_all()  # makes all connections: a job is longer than a benchmark
    return training

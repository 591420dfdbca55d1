"""What a prediction is made from: `probe` and `profile`, run in the lab before anything else."""

import multiprocessing
import os
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from benchmarks.predict.model import FACTORY
from benchmarks.sleeping.worker import settle
from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.model import ModelProfile
from polyrhythm.errors import LabError
from polyrhythm.lab.lab import Lab
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.probe.effort import ProbeEffort
from polyrhythm.run.probe.probe import ProbeOptions, probe
from polyrhythm.run.profile.profile import measure_profile
from polyrhythm.types import Seconds

_PORT = 29400
_PATIENCE: Seconds = 120.0


def probed(lab: Lab, effort: ProbeEffort, folder: Path) -> Cluster:
    """The lab's hosts and links as they are measured from inside, by a process on each host."""
    # Hosts of a lab share no network card, so that pairs may be measured side by side.
    options = ProbeOptions(
        cluster_name=lab.cluster.name, measured_at="", all_at_once=True, effort=effort
    )
    tasks = [
        (host, _probe, (host, {"RANK": str(rank), "WORLD_SIZE": str(len(lab.hosts))}, options))
        for rank, host in enumerate(lab.hosts)
    ]
    found = _first_answer(lab, tasks, folder / "probe")
    assert isinstance(found, Cluster), "rank 0 gets it"
    return found


def profiled(lab: Lab, repeat: int, folder: Path) -> ModelProfile:
    """The model as it is measured on the first host, which nothing slows down."""
    found = _first_answer(lab, [(lab.hosts[0], _profile, (repeat,))], folder / "profile")
    assert isinstance(found, ModelProfile), "what was asked for"
    return found


def _probe(
    meeting_host: str,
    answer: Connection,
    name: str,
    environment: dict[str, str],  # as torchrun sets it
    options: ProbeOptions,
) -> None:
    settle()  # as the workers will
    os.environ.update(environment, MASTER_ADDR=meeting_host, MASTER_PORT=str(_PORT), LOCAL_RANK="0")
    ctx = DistContext.from_environment(os.environ)
    assert ctx is not None, "the variables are set"
    answer.send(probe(ctx, name, options))


def _profile(meeting_host: str, answer: Connection, repeat: int) -> None:
    settle()
    answer.send(measure_profile(FACTORY, sizes=(1,), repeat=repeat, device="cpu"))


def _first_answer(
    lab: Lab, tasks: Sequence[tuple[str, Callable[..., None], tuple[object, ...]]], folder: Path
) -> object:
    """What the first of these tasks, each on its host, answers once all are over."""
    folder.mkdir()
    children, pipes = [], []
    for host, task, args in tasks:
        ours, theirs = multiprocessing.Pipe()
        pipes.append(ours)
        first = lab.address(lab.hosts[0])
        output = folder / f"{host}.log"
        children.append(lab.spawn(host, task, first, theirs, *args, output=output))
        theirs.close()
    try:
        is_there = pipes[0].poll(_PATIENCE)
        found: object = pipes[0].recv() if is_there else None
    except EOFError:
        found = None
    if found is None or not lab.wait(children, timeout=_PATIENCE):
        reasons = [child.reason for child in children if child.status]
        raise LabError(
            f"{folder.name} inside the lab: {reasons[0] if reasons else 'no answer'}",
            expected="all processes to measure what they were asked to, and to end",
            fix="report it, with what it says",
        )
    for pipe in pipes:
        pipe.close()
    return found

"""Under torchrun, with an agent per machine, the others go on when an agent and its worker die."""

import os
import socket
import sys
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest
import torch
import torch.distributed.elastic.rendezvous.c10d_rendezvous_backend
import torch.distributed.run
from torch import Tensor

from polyrhythm.errors import LaunchError
from polyrhythm.processes import Child, end_all
from polyrhythm.run.coordinator.job_coordinator import start_detached
from polyrhythm.run.coordinator.keys import KeyPair, ServerKeys
from tests.gloo.trainer_jobs import fit
from tests.gloo.transport_peers import wait_until
from tests.grids import long_except

NUM_STEPS, NUM_AGENTS, FAULT_STEP, _TIMEOUT = 12, 4, 4, 90.0
FOLDER = "TEST_FOLDER"  # marks all processes of a job
FORKED = ["--run-path", "--start-method=fork"]  # agents fork their workers, else interpreters
SCRIPT = f"""
import os, signal, sys, torch
from tests.gloo.trainer_jobs import plan_of, trainer

torch.set_num_threads(1)
folder, rank = os.environ["{FOLDER}"], int(os.environ["RANK"])
victim, how, stages, pipelines, sync = sys.argv[1:]

def fault(info):
    if (rank, info.step) == (int(victim), {FAULT_STEP}):
        if how == "agent":
            os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGTERM if how == "leave" else signal.SIGKILL)

made = trainer(plan_of(int(stages), int(pipelines)), sync=sync)
fitted = made.fit(max_steps={NUM_STEPS}, callbacks=[fault], progress=False)
weights = {{name: value.clone() for name, value in made.model.state_dict().items()}}
made.close()
steps = [info.step for info in fitted.steps]
torch.save((steps, weights), f"{{folder}}/part{{rank}}.pt")
os.rename(f"{{folder}}/part{{rank}}.pt", f"{{folder}}/found{{rank}}.pt")
"""


def start_agent(folder: Path, node: int, port: int, backend: str, arguments: list[str]) -> Child:
    """Start torchrun's agent of a machine of its own, as far as torchrun knows."""
    options = ["--nnodes", str(NUM_AGENTS), "--nproc-per-node", "1", "--max-restarts", "0"]
    if backend == "static":
        options += ["--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port"]
        options += [str(port)]
    else:
        options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}"]
        options += ["--rdzv-id", "job", "--rdzv-conf", f"is_host={int(node == 0)}"]
        options += ["--local-addr", "127.0.0.1"]
    is_forked = arguments[: len(FORKED)] == FORKED

    def run() -> None:
        environment = {FOLDER: str(folder), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = str(Path(__file__).parents[2])
        os.environ.update(environment)
        if is_forked:
            torch.distributed.run.main([*options, *arguments])
        else:
            command = [sys.executable, "-m", "torch.distributed.run", *options, *arguments]
            os.execv(command[0], command)

    return Child(run, output=folder / f"agent{node}.log")


def processes_of(folder: Path) -> list[psutil.Process]:
    """Return all processes of a job that run, its coordinator among them."""
    found = []
    for process in psutil.process_iter():
        try:
            is_of_job = process.environ().get(FOLDER) == str(folder) and process.pid != os.getpid()
            if is_of_job and process.status() != "zombie":  # nobody may wait for orphans
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def output_of(folder: Path) -> str:
    return "\n".join(f"== {p.name}\n{p.read_text()}" for p in sorted(folder.glob("agent*.log")))


def train(
    folder: Path,
    how: str,
    victim: int,
    shape: tuple[int, int],
    sync: str,
    backend: str,
    options: list[str],
) -> dict[int, tuple[list[int], dict[str, Tensor]]]:
    """Run a job of four agents with a fault; return what the survivors have found, by rank.

    The agents of survivors wait for the lost one for five minutes, and are ended before.
    """
    script, port = folder / "script.py", free_port()
    script.write_text(SCRIPT)
    arguments = [*options, str(script), str(victim), how, *map(str, shape), sync]
    agents = [start_agent(folder, n, port, backend, arguments) for n in range(NUM_AGENTS)]
    lost_pipeline = {victim // shape[0] * shape[0] + stage for stage in range(shape[0])}
    survivors = [folder / f"found{rank}.pt" for rank in {*range(NUM_AGENTS)} - lost_pipeline]
    try:
        deadline = time.monotonic() + _TIMEOUT
        while not all(path.exists() for path in survivors):
            assert time.monotonic() < deadline, output_of(folder)
            time.sleep(0.1)
    finally:
        end_all(agents)
        left = processes_of(folder)
        for process in left if sys.exc_info()[0] else ():
            process.kill()
    wait_until(lambda: not processes_of(folder), f"they still run: {left}")
    return {int(path.stem[5:]): torch.load(path) for path in survivors}


def check(found: dict[int, tuple[list[int], dict[str, Tensor]]], folder: Path) -> None:
    """Check that the survivors made all steps, and have the weights of one process."""
    _, expected = fit(folder / "alone", 1, 1, steps=NUM_STEPS)
    weights = dict[str, Tensor]()
    for steps, state in found.values():
        assert steps == list(range(NUM_STEPS))
        for name, value in state.items():
            torch.testing.assert_close(value, weights.setdefault(name, value), rtol=0, atol=0)
    assert weights.keys() == expected.keys(), "some stage has no survivor"
    for name, value in expected.items():
        torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.timeout(150)
@pytest.mark.parametrize(
    ("how", "victim", "shape", "sync", "backend", "options"),
    long_except(
        [
            ("agent", 2, (1, 4), "all_reduce", "static", FORKED),
            ("agent", 2, (1, 4), "decoupled", "c10d", FORKED),
            ("agent", 0, (1, 4), "decoupled", "static", FORKED),
            ("agent", 3, (2, 2), "decoupled", "c10d", []),
            ("worker", 0, (2, 2), "balanced", "static", FORKED),
            ("leave", 0, (1, 4), "decoupled", "static", []),
        ],
        0,
    ),
)
def test_the_others_go_on_without_a_machine(
    tmp_path: Path,
    how: str,
    victim: int,
    shape: tuple[int, int],
    sync: str,
    backend: str,
    options: list[str],
) -> None:
    check(train(tmp_path, how, victim, shape, sync, backend, options), tmp_path)


def detached_keys() -> ServerKeys:
    return ServerKeys(KeyPair.new(), frozenset([KeyPair.new().public]))


@pytest.mark.long
@pytest.mark.timeout(60)
def test_a_coordinator_without_members_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    addresses = start_detached("127.0.0.1", detached_keys(), 2, absence_timeout=1.0)
    (started,) = processes_of(tmp_path)
    assert os.getsid(started.pid) == started.pid, "no signal to this session ends it"
    with socket.create_connection(addresses.store):
        pass
    wait_until(lambda: not processes_of(tmp_path), "it still runs")


@pytest.mark.timeout(60)
def test_a_coordinator_on_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"cannot be started on 192\.0\.2\.1"):
        start_detached("192.0.2.1", detached_keys(), 2)

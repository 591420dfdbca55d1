"""Processes without a LocalJob parent, as under torchrun, exit properly after a failure."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

# Two jobs of three ranks, forked so that torch is imported once: a fork exits like any process,
# with its interpreter. The first survivor that exits releases the other one of its job, so both
# survivors of a job must exit in the same way.
SCRIPT = """
import os, signal, sys, torch
from torch import nn
from polyrhythm import PeerError, Pipeline
import torch.distributed as dist

class Trap(nn.Module):
    num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        if dist.get_rank() == 0 and self.num_calls == 21:  # in the fourth step: the first ones may take long
            os.kill(os.getpid(), signal.SIGSTOP)
        return x

def train():
    pipeline = Pipeline(
        nn.Sequential(nn.Linear(8, 8), Trap()),
        loss_fn=nn.functional.mse_loss,
        n_microbatches=6,
        timeout=3,
    )
    batch = torch.ones(6, 8)
    while True:
        pipeline.step(*([batch] if pipeline.is_first else []), target=batch)

torch.set_num_threads(1)
workers = [(job, rank) for job in range(2) for rank in range(3)]
forks = {}
for job, rank in workers:
    forks[job, rank] = os.fork()
    if forks[job, rank] == 0:
        break
else:
    for job, rank in workers:
        if rank == 0:
            continue
        _, status = os.waitpid(forks[job, rank], 0)
        print(job, rank, os.waitstatus_to_exitcode(status))
    for job in range(2):
        os.kill(forks[job, 0], signal.SIGKILL)
        os.waitpid(forks[job, 0], 0)
    sys.exit()

os.dup2(os.open(f"{job}{rank}.txt", os.O_WRONLY | os.O_CREAT), 2)
os.environ.update(RANK=str(rank), MASTER_PORT=sys.argv[1 + job])
dist.init_process_group("gloo")
if job == 0:
    train()  # the error keeps the pipeline alive until the interpreter ends
try:
    train()
except PeerError as error:
    print("PeerError:", error, file=sys.stderr)
sys.exit(7)
"""
STATUSES = (1, 7)  # by job


@pytest.mark.long
@pytest.mark.timeout(90)
def test_survivors_of_stopped_peer_exit_with_peer_error(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in STATUSES]
    ports = [str(probe.getsockname()[1]) for probe in probes]
    for probe in probes:
        probe.close()
    environ = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
    with subprocess.Popen(
        [sys.executable, "train.py", *ports],
        cwd=tmp_path,
        env={**os.environ, **environ},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as jobs:
        try:
            printed, _ = jobs.communicate(timeout=60)
        finally:
            if jobs.returncode is None:
                os.killpg(jobs.pid, signal.SIGKILL)
    ended = {
        (int(job), int(rank)): int(status)
        for job, rank, status in map(str.split, printed.splitlines())
    }
    assert ended.keys() == {(job, rank) for job in range(2) for rank in (1, 2)}
    for (job, rank), status in ended.items():
        error = (tmp_path / f"{job}{rank}.txt").read_text()
        assert status == STATUSES[job], error  # an abort would give -6
        assert "PeerError: lost s" in error.splitlines()[-1]

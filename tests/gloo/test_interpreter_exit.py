"""Processes that are no children of ours, as under torchrun, end as they should after a failure."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys, torch
from torch import nn
from polyrhythm import PeerError, Pipeline
import torch.distributed as dist

class Trap(nn.Module):
    num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        if dist.get_rank() == 0 and self.num_calls == 9:
            os.kill(os.getpid(), signal.SIGSTOP)
        return x

def train():
    pipeline = Pipeline(
        nn.Sequential(nn.Linear(8, 8), Trap()),
        loss_fn=nn.functional.mse_loss,
        num_microbatches=6,
        deadline=3,
    )
    batch = torch.ones(6, 8)
    while True:
        pipeline.step(*([batch] if pipeline.is_first else []), target=batch)

torch.set_num_threads(1)
dist.init_process_group("gloo")
"""
ENDINGS = {
    1: "train()",  # the error keeps the pipeline alive until the interpreter ends
    7: """
try:
    train()
except PeerError as error:
    print("PeerError:", error, file=sys.stderr)
sys.exit(7)
""",
}


@pytest.mark.timeout(90)
@pytest.mark.parametrize("status", ENDINGS)
def test_survivors_of_a_silent_peer_end_with_their_error_and_do_not_abort(
    tmp_path: Path, status: int
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT + ENDINGS[status])
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    place = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "train.py")],
            env={**os.environ, **place, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        for process in processes[1:]:
            _, error = process.communicate(timeout=60)
            assert process.returncode == status, error  # an abort would give -6
            assert "PeerError: lost s" in error.splitlines()[-1]
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.communicate()

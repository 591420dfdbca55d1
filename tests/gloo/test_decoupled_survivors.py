"""After a loss, the other replicas average again with a new DistributedOptimizer."""

from functools import partial
from pathlib import Path

import torch

from tests.gloo.replicas import run_with_failures
from tests.gloo.survivors import KILLED, SURVIVORS, train_with_survivors


def test_survivors_of_a_killed_replica_average_again(tmp_path: Path) -> None:
    work = partial(train_with_survivors, device=torch.device("cpu"), site=None)
    found = run_with_failures(3, work, tmp_path, lost={KILLED})
    (errors, weights), (_, others) = (found[rank] for rank in SURVIVORS)
    assert len(errors) == 1
    assert f"lost rank {KILLED} during averaging" in errors[0]
    assert all(torch.equal(weights[name], others[name]) for name in weights)

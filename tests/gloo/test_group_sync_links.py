"""A link that never connects is named; groups send around it, and all go on with equal weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from polyrhythm.run.averaging import exchange
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.sync import members
from polyrhythm.types import Worker
from tests.gloo.replicas import run_replicas, train
from tests.grids import long_except

BROKEN = {Worker(0, 1), Worker(0, 2)}
CASES = [("all_reduce", {}), ("age", {}), ("age", {"decoupled": True}), ("local", {"every": 2})]


def break_link(worker: Worker) -> None:
    """Let the handshakes of two workers with each other wait until they time out."""
    if worker not in BROKEN:
        return
    (other,) = BROKEN - {worker}
    receive = exchange._Connecting._exchange

    def receive_without_other(connecting: Any, own: Any, what: object, deadline: float) -> Any:
        found = receive(connecting, own, what, deadline)
        is_address = what != exchange._SOCKETS
        return {p: each for p, each in found.items() if not (is_address and p.worker == other)}

    exchange._Connecting._exchange = receive_without_other


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("policy", "options"), long_except(CASES, 0), ids=str)
def test_workers_whose_link_is_broken_average_through_the_others(
    policy: str, options: dict[str, Any], tmp_path: Path
) -> None:
    def work(ctx: DistContext) -> tuple[list[float], bool]:
        exchange._HANDSHAKE_TIMEOUT = 1.0
        members.FIRST_APART = 1000.0
        break_link(Worker(0, ctx.rank))
        sync = train(ctx, 6, policy, log=tmp_path / "run", **options)
        sync.average_all()
        weights = sync._model.module.weight.detach().tolist()
        is_connected = any(
            {peer.worker, sync.worker} == BROKEN for peer in sync._rendezvous.connections._by_peer
        )
        sync.close()
        return weights, is_connected

    found = run_replicas(4, work, tmp_path)
    assert found == [(found[0][0], False)] * 4
    assert torch.tensor(found[0][0]).isfinite().all()
    log = (tmp_path / "run" / "scheduler.jsonl").read_text()
    assert "s0p1 lost s0p2" in log or "s0p2 lost s0p1" in log
    assert "link s0p1-s0p2 failed 1 time: no direct messages" in log

"""A script under torchrun on four hosts of the lab has the losses of one process."""

import sys
from pathlib import Path

import pytest
import torch.distributed.elastic.rendezvous.c10d_rendezvous_backend
import torch.distributed.run

from polyrhythm.lab.lab import Lab
from polyrhythm.plan.plan import PLAN_VARIABLE, PipelinePlan, Plan
from polyrhythm.processes import Child
from tests.lab.hosts import cluster
from tests.lab.training_script import NUM_STEPS, SCRIPT, losses

NUM_HOSTS = 4
FORKED = ["--run-path", "--start-method=fork"]  # torchrun's agents fork their workers


def torchrun(lab: Lab, host: str, arguments: list[str], output: Path) -> Child:
    """Fork torchrun's agent on a host; hosts have addresses, but no names."""
    endpoint, address = lab.address(lab.hosts[0]), lab.address(host)
    command = [
        f"--nnodes={NUM_HOSTS}",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}:29400",
        "--rdzv-id=job",
        f"--rdzv-conf=is_host={int(address == endpoint)}",
        f"--local-addr={address}",
        f"--log-dir={output.parent}",
        *arguments,
    ]
    return lab.spawn(host, torch.distributed.run.main, command, output=output)


def failure_text(children: list[Child]) -> str:
    return "\n".join(f"{c.reason}\n{c.output.read_text()}" for c in children if c.output)


@pytest.mark.long
@pytest.mark.timeout(110)
@pytest.mark.parametrize(
    ("num_stages", "options"),
    [
        (1, FORKED),
        (2, FORKED),
        (2, []),  # new interpreters, which each load torch
    ],
)
def test_torchrun_on_four_hosts_matches_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_stages: int, options: list[str]
) -> None:
    script, single, distributed = (tmp_path / name for name in ("script.py", "alone", "together"))
    script.write_text(SCRIPT)
    single.mkdir(exist_ok=True)  # an earlier attempt may have made it
    distributed.mkdir(exist_ok=True)
    with Lab(cluster(NUM_HOSTS, latency=0.005)) as lab:
        first = lab.run(
            lab.hosts[0], [sys.executable, str(script), str(single)], output=tmp_path / "alone.log"
        )
        assert first.wait(40) == 0, failure_text([first])
        if num_stages > 1:
            plan = Plan(layers_per_stage=(2, 4), pipelines=(PipelinePlan(schedule="1f1b"),) * 2)
            plan.save(tmp_path / "plan.json")
            monkeypatch.setenv(PLAN_VARIABLE, str(tmp_path / "plan.json"))
        arguments = [*options, str(script), str(distributed)]
        nodes = [torchrun(lab, h, arguments, tmp_path / f"{h}.log") for h in lab.hosts]
        assert lab.wait(nodes, timeout=80), failure_text(nodes)
        assert [node.status for node in nodes] == [0] * NUM_HOSTS, failure_text(nodes)
        senders = {pair.source for pair in lab.report().pairs if pair.wire_bytes}
    assert len(senders) == NUM_HOSTS
    assert len(list(distributed.iterdir())) == NUM_HOSTS, "one worker on each"
    assert len(losses(single)) == NUM_STEPS
    assert losses(distributed) == pytest.approx(losses(single), rel=1e-5)

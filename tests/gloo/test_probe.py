"""A probe as a user runs it, on loopback: it measures every pair once, one at a time."""

import math
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import pairwise, permutations
from pathlib import Path

import pytest
import torch

from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.profiles import builtin_profile
from polyrhythm.describe.sample import Sample
from polyrhythm.describe.write import write_cluster
from polyrhythm.plan.draft import regions_of
from polyrhythm.plan.make_plan import make_plan
from polyrhythm.plan.options import PlanOptions
from polyrhythm.processes import reserve_port
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.run.machine import usable_memory
from polyrhythm.run.probe import probe as probing
from polyrhythm.run.probe.link import PeerChannel, as_source, as_target
from polyrhythm.run.probe.probe import ProbeEffort, ProbeOptions, probe
from polyrhythm.run.trainer.rank_assignment import Gpu, choose_sites, describe_backends
from tests.gloo.commands import ForkedCommand, run_forked
from tests.grids import long_except

pytestmark = pytest.mark.timeout(100)

QUICK = ["--seconds", "0.01", "--repeat", "3"]
MEASURED_AT = "2026-05-12T14:30:00+00:00"
EFFORT = ProbeEffort(seconds=0.005, repeat=2, pair_timeout=1, timeout=3)


def check(cluster: Cluster, num_devices: int) -> None:
    """Check that the cluster is complete and every value plausible."""
    names = [device.name for device in cluster.devices]
    assert len(set(names)) == num_devices
    assert list(cluster.regions) == names
    for a, b in permutations(names, 2):
        link = cluster.link(a, b)
        assert 0 < link.latency < 10
        assert 0 < link.bandwidth < 1e12
    for matrix in (cluster.latency_spread, cluster.bandwidth_spread):
        assert [len(row) for row in matrix] == [num_devices] * num_devices
        assert all(math.isfinite(spread) and spread >= 0 for row in matrix for spread in row)
    assert cluster.devices[0].speed == 1
    for device in cluster.devices:
        assert device.flops is not None
        assert device.flops > 1e6
        assert device.speed == pytest.approx(
            device.flops / (cluster.devices[0].flops or 0), rel=0.01
        )
        assert device.memory is not None
        assert 2**20 < device.memory < 2**50


def test_probe_of_local_processes_writes_a_loadable_cluster(tmp_path: Path) -> None:
    done = run_forked("probe", "--local", "3", "-o", "here.toml", *QUICK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    cluster = Cluster.load(tmp_path / "here.toml")
    check(cluster, 3)
    assert sum(device.memory or 0 for device in cluster.devices) <= usable_memory()
    assert cluster.name == "here"
    assert cluster.flops_dtype == "float32"
    assert cluster.measured_at
    assert "3 processes on 1 machine" in cluster.source
    assert cluster.sites == (socket.gethostname(),) * 3
    assert "here: 3 devices, 3 regions" in done.stdout
    assert "bandwidth, Mbit/s" in done.stdout
    assert "spread of bandwidth, %" in done.stdout
    assert "NCCL" not in done.stdout
    assert f"measured at {cluster.measured_at}" in done.stdout
    assert done.stdout.endswith("written to here.toml\n")
    assert [path.name for path in tmp_path.iterdir()] == ["here.toml"]
    shown = run_forked("show", "cluster", "here.toml", cwd=tmp_path)
    assert shown.stdout in done.stdout


@pytest.mark.long
def test_probe_under_torchrun_prints_on_rank_0_only(tmp_path: Path) -> None:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    done = subprocess.run(
        [*torchrun, "-m", "polyrhythm", "probe", "--name", "two", *QUICK],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    cluster = Cluster.load(tmp_path / "cluster.toml")
    check(cluster, 2)
    assert cluster.name == "two"
    assert done.stdout.count("written to cluster.toml") == 1


def test_probe_of_one_process_has_no_links(tmp_path: Path) -> None:
    done = run_forked("probe", "--local", "1", *QUICK, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    check(Cluster.load(tmp_path / "cluster.toml"), 1)


def recording_probe(folder: Path, *, all_at_once: bool) -> Callable[[DistContext], None]:
    """Return a probe that records when it measures which pair."""

    def work(ctx: DistContext) -> None:
        def record(measure: Callable[..., object]) -> Callable[..., object]:
            def measured(channel: PeerChannel, other: int, effort: ProbeEffort) -> object:
                start = time.monotonic()
                found = measure(channel, other, effort)
                with (folder / f"{channel.rank}.txt").open("a") as file:
                    print(
                        min(channel.rank, other),
                        max(channel.rank, other),
                        start,
                        file=file,
                        end=" ",
                    )
                    print(time.monotonic(), int(measure is as_source), file=file)
                return found

            return measured

        probing.as_source, probing.as_target = record(as_source), record(as_target)  # type: ignore[assignment]
        options = ProbeOptions(
            cluster_name="test", measured_at=MEASURED_AT, effort=EFFORT, all_at_once=all_at_once
        )
        probe(ctx, f"d{ctx.rank}", options)

    return work


@pytest.mark.parametrize("all_at_once", long_except([False, True], 1))
def test_every_pair_is_measured_and_no_process_is_in_two_pairs_at_once(
    tmp_path: Path, all_at_once: bool
) -> None:
    work = recording_probe(tmp_path, all_at_once=all_at_once)
    with LocalJob(work, 4, output_folder=tmp_path / "out") as job:
        assert job.wait(80)
    pairs_of: dict[int, list[list[float]]] = {
        rank: [list(map(float, line.split())) for line in path.read_text().splitlines()]
        for rank, path in enumerate(tmp_path / f"{rank}.txt" for rank in range(4))
    }
    for rank, entries in pairs_of.items():
        assert len(entries) == 6, "three others, both directions"
        assert sum(entry[4] for entry in entries) == 3, "in half of them it is the source"
        for before, after in pairwise(entries):
            assert before[3] <= after[2], f"rank {rank} was in two pairs at once"
    all_pairs = sorted(
        (entry[2], entry[3], (entry[0], entry[1]))
        for entries in pairs_of.values()
        for entry in entries
    )
    overlaps = any(
        start < end and pair != other for (_, end, pair), (start, _, other) in pairwise(all_pairs)
    )
    assert overlaps == all_at_once, "pairs of one machine overlap only if allowed"


@pytest.mark.parametrize("num_processes", [1, 3])
def test_pairs_sharing_a_machine_run_in_separate_rounds_unless_all_at_once(
    num_processes: int,
) -> None:
    machines = [machine for machine in "abcd" for _ in range(num_processes)]
    separate, concurrent = (
        probing._rounds(machines, all_at_once=all_at_once) for all_at_once in (False, True)
    )
    all_pairs = sorted(permutations(range(len(machines)), 2))
    assert sorted(pair for pairs in separate for pair in pairs) == all_pairs
    assert sorted(pair for pairs in concurrent for pair in pairs) == all_pairs
    for pairs in separate:
        touched = [machine for a, b in pairs for machine in {machines[a], machines[b]}]
        assert len(touched) == len(set(touched))
    assert (len(separate) == len(concurrent)) == (num_processes == 1)


def test_shared_memory_is_divided_among_processes() -> None:
    flops = Sample(1.0, 0.0)
    members = [
        probing._ProcessInfo(
            name="",
            machine=owner[0],
            host=owner[0],
            text="",
            memory=memory,
            memory_of=owner,
            is_gpu="GPU" in owner,
            flops=flops,
        )
        for owner, memory in [("a", 90), ("a", 90), ("a GPU-1", 24), ("a GPU-1", 24), ("b", 50)]
    ]
    assert probing._memory_shares(members) == [45, 45, 12, 12, 50]


def test_gpus_of_one_machine_with_one_process_each_are_measured_over_nccl() -> None:
    owners = ["a GPU-1", "b GPU-3", "a GPU-2", "a", "a GPU-4", "a GPU-4", "b GPU-5"]
    members = [
        probing._ProcessInfo(
            name="",
            machine=owner[0],
            host=owner[0],
            text="",
            memory=1,
            memory_of=owner,
            is_gpu="GPU" in owner,
            flops=Sample(1.0, 0.0),
        )
        for owner in owners
    ]
    assert probing.nccl_pairs(members) == {frozenset({0, 2}), frozenset({1, 6})}


def process(host: str, number: int, machine: str) -> probing._ProcessInfo:
    return probing._ProcessInfo(
        name=f"{host}/{number}",
        machine=machine,
        host=host,
        text="",
        memory=10**9,
        memory_of=f"{machine} {number}",
        is_gpu=True,
        flops=Sample(1.0, 0.0),
    )


def probed(members: list[probing._ProcessInfo]) -> Cluster:
    ranks = range(len(members))
    figures = [
        probing._LinkSamples(*({b: Sample(1.0, 0.0) for b in ranks if b != a} for _ in range(4)))
        for a in ranks
    ]
    names = probing.distinct_names([member.name for member in members])
    options = probing.ProbeOptions(cluster_name="probed", measured_at="2026-01-01T00:00:00+00:00")
    return probing._cluster(names, members, figures, options)


def test_plan_of_a_probed_cluster_trains_over_nccl_inside_each_machine(tmp_path: Path) -> None:
    write_cluster(
        probed([process(host, gpu, machine=host) for host in "ab" for gpu in range(4)]),
        tmp_path / "cluster.toml",
    )
    cluster = Cluster.load(tmp_path / "cluster.toml")
    profile = builtin_profile("gpt-6x64x16", flops=1e12, microbatch_size=1)
    options = PlanOptions(num_stages=4, num_pipelines=2)
    plan = make_plan(cluster, profile, batch_size=8, options=options)
    workers = [plan.worker(rank) for rank in range(8)]
    devices = [plan.pipelines[worker.pipeline].devices[worker.stage] for worker in workers]
    gpus = [Gpu(device[0], device) for device in devices]
    sites = choose_sites("auto", gpus, [plan.region_of(worker) for worker in workers])
    assert sites == [device[0] for device in devices]
    of_workers = dict(zip(workers, sites, strict=True))
    assert describe_backends(of_workers, is_decoupled=True) == (
        "NCCL between stages in 4 of 6 places, gloo in the others, NCCL between replicas"
    )


def test_sites_of_a_probed_cluster() -> None:
    one = probed([process("a", gpu, machine="a") for gpu in range(2)])
    assert one.sites == ("a", "a")
    assert regions_of(one) == (), "all GPUs are one site"
    equal_names = probed([process("localhost", 0, machine=each) for each in ("x", "y")])
    assert equal_names.sites == ("localhost (rank 0)", "localhost (rank 1)")
    in_a_lab = probed([process(device, 0, machine="x") for device in ("n0", "n1")])
    assert in_a_lab.sites == ("n0", "n1"), "a device of the lab is a machine"


@pytest.mark.long
def test_nccl_figures_are_written_with_those_of_gloo(tmp_path: Path) -> None:
    """On a CPU: what is measured over NCCL is replaced by numbers."""

    def measured(channel: PeerChannel, source: int, target: int, *_: object) -> Sample | None:
        if {source, target} == {0, 2}:  # NCCL does not connect them
            return None
        return Sample(1e-5 if channel.rank == source else 2.5e9 * (1 + source), 0.0)

    def replace_nccl() -> None:
        every_two = {frozenset(pair) for pair in permutations(range(3), 2)}
        probing.nccl_pairs = lambda members: every_two
        probing.measure_nccl = measured

    done = run_forked(
        "probe", "--local", "3", "-o", "here.toml", *QUICK, cwd=tmp_path, before=replace_nccl
    )
    assert done.returncode == 0, done.stderr
    cluster = Cluster.load(tmp_path / "here.toml")
    check(cluster, 3)
    assert cluster.nccl_latency == ((0, 1e-5, 0), (1e-5, 0, 1e-5), (0, 1e-5, 0))
    assert cluster.nccl_bandwidth == ((0, 2.5e9, 0), (5e9, 0, 5e9), (0, 7.5e9, 0))
    assert "bandwidth over NCCL, Mbit/s" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no processes to measure with"),
        (["--local", "0"], "--local 0"),
        (["--local", "65"], "1 to 64"),
        (["--local", "2", "--seconds", "0"], "--seconds 0"),
        (["--local", "2", "--timeout", "nan"], "--timeout nan"),
        (["--local", "2", "--repeat", "0"], "--repeat 0"),
        (["--local", "2", "--timeout", "0.02", "--seconds", "0.05"], "fix: --timeout 0.2, or"),
        (["--local", "2", "-o", "cluster.yaml"], "ends in .toml"),
        (["--local", "2", "-o", "nowhere/cluster.toml"], "cannot be made in"),
    ],
)
def test_bad_input_is_rejected_before_any_process_starts(
    tmp_path: Path, arguments: list[str], message: str
) -> None:
    done = run_forked("probe", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert message in done.stderr
    assert "fix:" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_missing_gpu_is_rejected_before_any_process_starts(tmp_path: Path) -> None:
    done = run_forked("probe", "--local", "2", "--device", "cuda", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("error: --device cuda on a machine without a usable GPU")
    assert ".log" not in done.stderr


@pytest.mark.long
def test_only_rank_0_needs_the_output_folder(tmp_path: Path) -> None:
    """The output folder exists on the machine of rank 0 only."""
    folders = [tmp_path / "0", tmp_path / "1"]
    (folders[0] / "found").mkdir(parents=True)
    folders[1].mkdir()

    def command(rank: int, address: str, port: int) -> ForkedCommand:
        ctx = {"WORLD_SIZE": "2", "MASTER_ADDR": address, "MASTER_PORT": str(port)}
        env = {**ctx, "RANK": str(rank), "GLOO_SOCKET_IFNAME": "lo"}
        arguments = "probe", "-o", "found/cluster.toml", *QUICK
        return ForkedCommand(*arguments, cwd=folders[rank], env=env)

    # Forked by one thread: a fork inherits the locks that another thread holds.
    with (
        reserve_port() as reserved,
        command(0, *reserved.getsockname()) as first,
        command(1, *reserved.getsockname()) as second,
    ):
        statuses = [each.child.wait(90) for each in (first, second)]
        assert statuses == [0, 0], first.stderr + second.stderr
    assert (folders[0] / "found" / "cluster.toml").exists()


@pytest.mark.long  # a busy machine may exceed its timeout
def test_timeout_applies_to_one_echo_and_not_to_all_together(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> None:
        probing.device_flops = lambda *_, **__: Sample(1.0, 0.0)  # 1000 repetitions take a minute
        effort = ProbeEffort(seconds=0.001, repeat=1000, pair_timeout=2, timeout=0.3)
        probe(ctx, "d", ProbeOptions(cluster_name="test", measured_at=MEASURED_AT, effort=effort))

    with LocalJob(work, 2, output_folder=tmp_path) as job:
        assert job.wait(60)


def test_local_option_under_torchrun_is_rejected(tmp_path: Path) -> None:
    torchrun = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    done = run_forked("probe", "--local", "2", cwd=tmp_path, env=torchrun)
    assert done.returncode == 2
    assert "--local 2 in a process of torchrun's" in done.stderr

"""`polyrhythm train --lab`: the others go on when a host is lost, is cut off, stops or leaves."""

import re
import time
from pathlib import Path

import pytest
from pyroute2 import IPRoute

import polyrhythm.run.trainer.trainer  # noqa: F401  # loaded once, before the forks
from polyrhythm import worker_registry
from polyrhythm.cli import main
from polyrhythm.describe.scenario import Kill, Scenario
from polyrhythm.lab import attach
from polyrhythm.preemption_notice import NOTICE_VARIABLE
from polyrhythm.processes import Child
from polyrhythm.sync.log_reader import membership_changes
from tests.grids import long_except
from tests.lab.survivor_jobs import TIMEOUT, Job
from tests.metadata_service import Metadata, serve


@pytest.mark.timeout(100)
def test_a_host_that_is_cut_off_is_fenced_when_the_network_heals(tmp_path: Path) -> None:
    with Job(tmp_path, "decoupled", (1, 3)) as running:
        running.cut_off("b", up=False)
        running.go_on()
        running.wait_for_loss()
        running.cut_off("b", up=True)
        assert running.end() == 0, running.text
    running.check({0, 2})
    shown, log = ((tmp_path / name).read_text() for name in ("shown.txt", "logs/b.log"))
    assert re.search(r"FencedError: lost the job during training after .* no heartbeat for", log)
    assert re.search(r"b failed: lost the job during training .*: the others go on", shown)


@pytest.mark.long
@pytest.mark.timeout(100)
def test_a_host_that_was_stopped_is_fenced_when_it_continues(tmp_path: Path) -> None:
    with Job(tmp_path, "all_reduce", (2, 2)) as running:
        attach.pause(running.control, "d")
        running.go_on()
        running.wait_for_loss()
        attach.resume(running.control, "d")
        assert running.end() == 0, running.text
    running.check({0, 1})
    assert "FencedError: lost the job" in (tmp_path / "logs/d.log").read_text()


@pytest.mark.long
@pytest.mark.timeout(100)
@pytest.mark.parametrize("sync", ["all_reduce", "balanced"])
def test_all_pipelines_but_one_lose_power_at_once(tmp_path: Path, sync: str) -> None:
    with Job(tmp_path, sync, (2, 3)) as running:
        for host in "cdef":
            attach.kill(running.control, host)
        running.go_on()
        assert running.end() == 0, running.text
    running.check({0, 1})


@pytest.mark.long
@pytest.mark.timeout(120)
def test_a_scenario_may_kill_the_first_host(tmp_path: Path) -> None:
    """The coordinator is on another one; nobody reports the loss, as after a power cut."""
    scenario = Scenario(name="power cut", kill=(Kill(device="a", at=20.0),))
    with Job(tmp_path, "decoupled", (1, 3), scenario) as running:
        running.wait_for(lambda: "a was killed by the scenario" in running.text, "kill")
        running.go_on()
        assert running.end() == 0, running.text
    running.check({1, 2})
    changes = membership_changes(tmp_path / "logs/membership.jsonl")
    (lost,) = [change for name, change in changes if name == "Lost"]
    assert lost.member == 0
    assert "no heartbeat" in lost.why


@pytest.mark.timeout(100)
def test_a_host_with_a_notice_of_its_cloud_leaves(tmp_path: Path) -> None:
    def serve_notice(running: Job) -> None:
        attach.enter_host(running.control, "b")
        with IPRoute() as netlink:
            (loopback,) = netlink.link_lookup(ifname="lo")
            netlink.addr("add", index=loopback, address="169.254.169.254", prefixlen=32)
        metadata = Metadata("aws")
        metadata.is_preempted = True
        with serve(metadata, ("169.254.169.254", 80)):
            time.sleep(TIMEOUT)

    with Job(tmp_path, "decoupled", (1, 3), None, {NOTICE_VARIABLE: "aws"}) as running:
        server = Child(lambda: serve_notice(running))
        try:
            log = tmp_path / "logs/membership.jsonl"
            running.wait_for(lambda: '"Depart"' in log.read_text(), "notice")
            running.go_on()
            assert running.child.wait(TIMEOUT) == 0, running.text
        finally:
            server.end()
        assert running.end() == 0
    running.check({0, 2})
    assert "b has left: the others go on" in running.text


@pytest.mark.long
@pytest.mark.timeout(100)
def test_a_worker_of_a_host_leaves_by_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker_registry, "FOLDER", tmp_path / "workers")
    with Job(tmp_path, "decoupled", (1, 3)) as running:
        # It waits in a callback until the job goes on: leave it that long.
        leaving = Child(lambda: main(["leave", "--rank", "1"]), output=tmp_path / "leave.txt")
        running.wait_for(lambda: "asked" in (tmp_path / "leave.txt").read_text(), "leave")
        running.go_on()
        assert leaving.wait(TIMEOUT) == 0
        assert running.end() == 0, running.text
    running.check({0, 2})
    assert "b has left: the others go on" in running.text


@pytest.mark.timeout(100)
@pytest.mark.parametrize(
    ("sync", "shape", "link", "survivors"),
    long_except(
        [
            ("decoupled", (1, 4), "bc", {0, 1, 3}),
            ("decoupled", (2, 2), "bd", {0, 1}),
            ("static", (1, 4), "bc", {0, 1, 3}),
            ("all_reduce", (2, 2), "cd", {0, 1}),  # inside a pipeline: no other way
            ("all_reduce", (2, 2), "bd", {0, 1}),  # no third replica to go through
            ("balanced", (2, 2), "bd", {0, 1}),
            ("adaptive", (2, 2), "bd", {0, 1}),
            ("adaptive", (2, 2), "cd", {0, 1}),
        ],
        0,
    ),
)
def test_a_broken_link_costs_one_of_its_ends(
    tmp_path: Path, sync: str, shape: tuple[int, int], link: str, survivors: set[int]
) -> None:
    """The kernel knows long before the job's timeout that nothing is confirmed any more."""
    with Job(tmp_path, sync, shape) as running:
        attach.change_link(
            running.control, *link, latency=None, bandwidth=None, up=False, one_way=False
        )
        running.go_on()
        assert running.end() == 0, running.text
    assert "it has no connection with process" in running.text
    if sync in ("decoupled", "all_reduce", "balanced"):
        running.check(survivors)
    elif sync == "adaptive":
        running.check_groups(survivors)


@pytest.mark.timeout(100)
@pytest.mark.parametrize("sync", long_except(["all_reduce", "balanced", "age", "adaptive"], 0))
def test_averages_go_around_a_broken_link(tmp_path: Path, sync: str) -> None:
    with Job(tmp_path, sync, (1, 3)) as running:
        attach.change_link(
            running.control, *"bc", latency=None, bandwidth=None, up=False, one_way=False
        )
        running.go_on()
        assert running.end() == 0, running.text
    changes = membership_changes(tmp_path / "logs/membership.jsonl")
    assert "Lost" not in [name for name, _ in changes]
    if sync in ("all_reduce", "balanced"):
        running.check({0, 1, 2})
    else:
        running.check_groups({0, 1, 2})


@pytest.mark.long
@pytest.mark.timeout(400)
def test_links_that_nothing_can_go_around_cost_one_of_their_ends(tmp_path: Path) -> None:
    """No replica of the last stage reaches both others: the step fails after its timeout."""
    with Job(tmp_path, "all_reduce", (2, 3), timeout=300.0) as running:
        for link in ("bd", "df"):
            attach.change_link(
                running.control, *link, latency=None, bandwidth=None, up=False, one_way=False
            )
        running.go_on()
        assert running.end() == 0, running.text
    assert "it has no connection with process" in running.text
    running.check({0, 1, 4, 5})

"""`bench faults`: its figures follow from what processes have found; the quick one runs."""

import io
import json
import math
import signal
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from rich.console import Console

from benchmarks.decoupled.rounds import DecoupledRow, MeasuredSetting
from benchmarks.faults import baseline, bench, soak
from benchmarks.faults.bench import BARS, NUM_SOAK_FAULTS, _split, lost_time
from benchmarks.faults.buddies import doubts_of, settings
from benchmarks.faults.job import DeliveredFault, Fault, Outcome, Setting, used_ranges
from benchmarks.faults.links import BARS as LINK_BARS
from benchmarks.faults.links import troubles_of
from benchmarks.harness.report import names_of
from polyrhythm.cli import source_tree
from polyrhythm.lab.commands import PairCounters, SwitchReport, SwitchTiming
from polyrhythm.sync.dispatch import SamplerState
from polyrhythm.sync.modes import SYNC_MODES
from polyrhythm.types import AUTO
from tests.gloo.commands import run_forked

# Keys that need another environment, or rights that a machine may not give.
OPTIONAL = {"recover_vs_torchft", "buddy_cost_network", "buddy_cost"} | names_of(LINK_BARS)


def test_steps_are_divided_at_the_first_one_of_the_second_epoch() -> None:
    ends = {0: 0.0, 1: 1.0, 2: 2.0, 3: 3.0, 4: 7.0, 5: 9.0, 6: 11.0}
    events: list[dict[str, Any]] = [
        {"event": "Begin", "committed": None},
        {"event": "Begin", "committed": 3},
    ]
    outcome = outcome_of(ends={1: ends}, events=events)
    before, later = _split(outcome)
    assert (before, later) == ([1.0, 1.0], [2.0, 2.0])  # without the step that was cut


def test_a_leave_costs_what_its_steps_took_beyond_the_medians() -> None:
    """Steps of 3 s become steps of 4 s, as with 3 of 4 workers; the first of them took 3 s more."""
    durations = [3.0] * 30 + [7.0] + [4.0] * 29
    ends = dict(enumerate(accumulate(durations)))
    events: list[dict[str, Any]] = [
        {"event": "Begin", "committed": None},
        {"event": "Begin", "committed": 29},
    ]
    outcome = outcome_of(ends={0: ends}, events=events)
    for num_around in (8, 50):
        assert lost_time(outcome, num_around) == (pytest.approx(3.0), 3.0, 4.0)
    with pytest.raises(RuntimeError, match="no epoch 1 followed: 1 faults delivered, 1 ep"):
        lost_time(outcome_of(ends={0: ends}, events=events[:1]), 8)


def test_a_failed_measurement_fails_the_benchmark_and_keeps_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(found: Any) -> None:
        found.ratios["recover_s"] = 0.0
        raise RuntimeError("no epoch followed the fault: really\nand more")

    def succeed(found: Any) -> None:
        found.ratios["degraded"] = 0.75

    measures = ((fail, ("recover_s",)), (succeed, ("degraded",)))
    monkeypatch.setattr(bench, "_MEASURES", measures)
    console = Console(file=io.StringIO(), width=120)
    result = bench.run(quick=False, console=console)
    assert result.ratios == {"degraded": 0.75}
    assert result.failures == {"recover_s": "no epoch followed the fault: really"}
    assert "recover_s FAILED: no epoch" in console.file.getvalue()  # type: ignore[attr-defined]
    assert json.loads(result.line(quick=False, duration=1.0))["failures"].keys() == {"recover_s"}
    fake = SimpleNamespace(run=lambda *_, **__: result)
    monkeypatch.setattr(source_tree, "import_from_source_tree", lambda *_: fake)
    assert source_tree.Bench(name="faults").run(console) == 1
    fake.run = lambda *_, **__: replace(result, failures={})
    assert source_tree.Bench(name="faults").run(console) == 0


def test_each_key_is_measured_once() -> None:
    keys = [key for _, keys in bench._MEASURES for key in keys]
    assert sorted(keys) == sorted(names_of(BARS))


def test_copies_that_change_weights_are_doubted() -> None:
    setting, *_ = settings(quick=True)
    row = DecoupledRow(
        setting=setting.name,
        side="ours",
        kind="ours",
        round=0,
        seconds=1.0,
        wire_bytes=1.0,
        stolen=0.0,
        trouble="it was late",
    )
    found = MeasuredSetting(setting=setting, rows=(row,), goodput=1.0, state=1.0, difference=0.0)
    assert doubts_of(found) == ("it was late",)
    assert "differ by 0.5" in doubts_of(replace(found, difference=0.5))[1]
    assert "differ by nan" in doubts_of(replace(found, difference=math.nan))[1]


def test_a_blackholed_link_without_dropped_packets_is_named() -> None:
    timing = SwitchTiming(late_p50=0.0, late_p99=0.0, late_max=0.0, busy=0.1)
    counters = {"packets": 1, "wire_bytes": 1, "backlog": 0, "peak_backlog": 0}
    other = PairCounters(source=1, target=2, drops=7, **counters)
    report = SwitchReport(elapsed=1.0, strays=0, pairs=(other,), switch_timing=timing)
    (trouble,) = troubles_of("`age`", report, (5, 9))
    assert trouble == "`age`: the blackholed link has dropped no packet: nobody used it"
    assert troubles_of("`age`", report) == []
    cut = PairCounters(source=9, target=5, drops=1, **counters)
    used = msgspec.structs.replace(report, pairs=(other, cut))
    assert troubles_of("`age`", used, (5, 9)) == []
    late = msgspec.structs.replace(
        used, switch_timing=msgspec.structs.replace(timing, late_p99=0.1)
    )
    assert "ms late" in troubles_of("`age`", late, (5, 9))[0]


# --- the jobs with random faults -----------------------------------------------------------------

ALL_REDUCE = Setting(
    num_stages=1,
    num_pipelines=3,
    num_microbatches=4,
    forward=0.0,
    num_steps=3,
    sync="all_reduce",
)
ADAPTIVE = replace(ALL_REDUCE, sync="adaptive")


def outcome_of(**changes: Any) -> Outcome:
    """Return what two survivors have found after a job without trouble."""
    weights = {"weight": torch.ones(2)}
    found = Outcome(
        ends={rank: {0: 1.0, 1: 2.0, 2: 3.0} for rank in (0, 2)},
        delivered=[DeliveredFault(Fault(1, signal.SIGKILL, 0.5), 0.5)],
        used=dict.fromkeys((0, 2), ((0, 12),)),
        read=frozenset(range(13)),
        weights={0: weights, 2: {**weights}},
        events=[],
    )
    return replace(found, **changes)


def test_lost_samples_and_steps_are_found() -> None:
    assert soak.lost(outcome_of(), ALL_REDUCE) is None
    whole = ((0, 12),)
    others = {0: whole, 2: ((0, 5), (9, 16))}  # as many, but not the same
    for setting in (ALL_REDUCE, ADAPTIVE):
        assert "(9, 16)" in str(soak.lost(outcome_of(used=others), setting))
        assert "(0, 16)" in str(soak.lost(outcome_of(used={0: whole, 2: ((0, 16),)}), setting))
        unread = soak.lost(outcome_of(read=frozenset(range(1, 12))), setting)
        assert unread == "no process has read the samples [0], which count as used"
        assert soak.lost(outcome_of(ends={}, used={}), setting) is not None
    cut = outcome_of(ends={0: {0: 1.0, 2: 3.0}, 2: {2: 3.0}})
    assert soak.lost(cut, ALL_REDUCE) == "no survivor has made the steps [1]"
    assert soak.lost(cut, ADAPTIVE) is None  # a fast pipeline makes the steps of a slow one


def test_used_samples_are_those_before_the_next_one_without_returned_ones() -> None:
    state = SamplerState(next=12, pool=((9, 11),), outstanding=((0, 2), (4, 5)))
    assert used_ranges(state) == ((2, 4), (5, 9), (11, 12))
    assert used_ranges(SamplerState(next=12)) == ((0, 12),)
    assert used_ranges(SamplerState()) == ()


def test_unequal_and_missing_weights_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = {"weight": torch.ones(2)}
    monkeypatch.setattr(soak, "_alone", lambda *_: alone)
    nan = {"weight": torch.full((2,), torch.nan)}
    for setting in (ALL_REDUCE, ADAPTIVE):
        assert soak.divergence(outcome_of(), setting) is None
        unequal = {0: {"weight": torch.ones(2)}, 2: {"weight": torch.ones(2) + 1e-6}}
        assert "process 2" in str(soak.divergence(outcome_of(weights=unequal), setting))
        assert "process 0" in str(soak.divergence(outcome_of(weights={0: nan, 2: nan}), setting))
        assert soak.divergence(outcome_of(weights={0: {}}), setting) == "no survivor has weight"
    alone["weight"] = torch.zeros(2)
    assert "one process" in str(soak.divergence(outcome_of(), ALL_REDUCE))
    assert soak.divergence(outcome_of(), ADAPTIVE) is None  # models are averaged, not gradients


def test_faults_are_repeatable_and_leave_a_whole_pipeline() -> None:
    for number in range(100):
        setting, faults = soak.soak_job(number)
        assert soak.soak_job(number) == (setting, faults)
        hit = {fault.rank // setting.num_stages for fault in faults}
        assert 1 <= len(hit) < setting.num_pipelines
        stopped = [fault.rank for fault in faults if fault.what is signal.SIGSTOP]
        assert stopped == [fault.rank for fault in faults if fault.what is signal.SIGCONT]


def kinds_by_mode(num_faults: int) -> dict[str, Counter[signal.Signals]]:
    found, number = defaultdict[str, Counter[signal.Signals]](Counter), 0
    while sum(map(Counter.total, found.values())) < num_faults:
        setting, faults = soak.soak_job(number)
        found[setting.sync].update(f.what for f in faults if f.what is not signal.SIGCONT)
        number += 1
    return found


def test_each_sync_mode_gets_each_kind_of_fault() -> None:
    assert {*soak.MODES} == {AUTO, *SYNC_MODES} - {"ssp"}  # a Trainer has no parameter server
    few, many = kinds_by_mode(NUM_SOAK_FAULTS), kinds_by_mode(1200)
    for found in (few, many):
        assert found.keys() == {*soak.MODES}
        assert all(kinds[signal.SIGKILL] and kinds[signal.SIGTERM] for kinds in found.values())
    total = sum(few.values(), Counter[signal.Signals]())
    assert 3 <= total[signal.SIGSTOP] <= 9  # one in ten
    assert total[signal.SIGKILL] > total[signal.SIGTERM]
    total = sum(many.values(), Counter[signal.Signals]())
    assert total[signal.SIGSTOP] == pytest.approx(total.total() / 10, rel=0.1)


def test_a_replica_and_its_buddy_are_hit_apart_in_decoupled_only() -> None:
    close = Counter[str]()
    for number in range(600):
        setting, faults = soak.soak_job(number)
        hits = sorted((f for f in faults if f.what is not signal.SIGCONT), key=lambda f: f.after)
        for one, other in pairwise(hits):
            distance = (other.rank - one.rank) % setting.num_processes
            is_buddy = distance in (
                setting.num_stages,
                setting.num_processes - setting.num_stages,
            )
            if setting.sync not in (AUTO, "decoupled"):
                assert not other.after_recovery
                close[setting.sync] += 1
            elif is_buddy:
                assert other.after_recovery
            elif not other.after_recovery:
                close[setting.sync] += 1
    assert close.keys() == {*soak.MODES}  # two at once are tested in each mode


def test_delivered_faults_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault whose process has ended before is none."""
    one = outcome_of(used=dict.fromkeys((0, 2), ((0, 480),)), read=frozenset(range(480)))
    monkeypatch.setattr(soak, "run_job", lambda *_, **__: one)
    monkeypatch.setattr(soak, "divergence", lambda *_: None)
    found = soak.soak(5, lambda _: None)
    assert (found.num_jobs, found.num_faults) == (5, 5)


@pytest.mark.long
@pytest.mark.timeout(120)
def test_jobs_with_random_faults_end_well() -> None:
    found = soak.soak(2, lambda _: None)
    assert (found.hangs, found.lost, found.diverged) == ([], [], [])
    assert found.num_faults >= 2


# --- torchft -------------------------------------------------------------------------------------


def test_a_missing_baseline_has_a_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(baseline, "_ENVIRONMENT", tmp_path)
    monkeypatch.setattr(baseline.platform, "machine", lambda: "aarch64")
    assert "aarch64" in str(baseline.why_missing())
    monkeypatch.setattr(baseline.platform, "machine", lambda: "x86_64")
    assert "make baselines" in str(baseline.why_missing())
    (tmp_path / ".installed").touch()
    assert baseline.why_missing() is None


@pytest.mark.long
@pytest.mark.timeout(150)
@pytest.mark.skipif(baseline.why_missing() is not None, reason=str(baseline.why_missing()))
def test_torchft_goes_on_after_its_timeouts() -> None:
    timeouts = baseline.Timeouts("short", 1.0, 1.0)
    found = baseline.recovery(1, timeouts, num_replicas=3, forward=0.01, timeout=120.0)
    assert 0 < found < 30


@pytest.mark.long
@pytest.mark.timeout(180)
def test_the_quick_benchmark_ends_with_its_ratios(tmp_path: Path) -> None:
    done = run_forked("bench", "faults", "--quick", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    measured = found["ratios"].keys()
    assert names_of(BARS) - OPTIONAL <= measured <= names_of(BARS)
    for name in names_of(BARS) - measured:
        assert f"{name} is not measured" in done.stdout
    assert {found["ratios"][f"soak_{name}"] for name in ("lost", "hangs", "diverged")} == {0}


def test_a_number_of_faults_is_for_this_benchmark_only(tmp_path: Path) -> None:
    for name, number in (("sync", "5"), ("faults", "0")):
        done = run_forked("bench", name, "--soak", number, cwd=tmp_path)
        assert done.returncode != 0
        assert "no other benchmark has random faults" in done.stderr + done.stdout

"""Slowness: a seed delays the same actions in every process, and only in the entry's time."""

import os
import random
import subprocess
import sys
import warnings
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.scenario import Scenario, Slow, bundled_scenarios
from polyrhythm.describe.slowness import Slowness, load_traces
from polyrhythm.describe.trace import Trace
from polyrhythm.errors import DescriptionError

WORK, BOTH = 1.0, 3.0  # an action, and one forward plus one backward
STEPS = Trace(
    name="steps", duration=100.0, workers=(((0.5, 0.5), (0.25, 0.25)), ((0.2, 1.0),), ((1.0, 1.0),))
)
TRACES = {"steps": STEPS}


def slowness(*slow: Slow, device: str = "a", seed: int = 0, index: int | None = None) -> Slowness:
    scenario = Scenario(name="s", seed=seed, slow=slow)
    return Slowness.of(scenario, device, index=index, traces=TRACES)


def delays(slowness: Slowness, num_actions: int) -> list[float]:
    return [slowness.delay(float(i), WORK, BOTH) for i in range(num_actions)]


times = st.floats(0, 100)


@given(st.floats(1, 10), times, times, times, times)
def test_factor_delays_actions_only_in_its_window(factor, start, length, now, work):
    entry = Slow(device="a", factor=factor, start=start, until=start + length + 1)
    inside = start <= now < start + length + 1
    assert slowness(entry).delay(now, work, BOTH) == ((factor - 1) * work if inside else 0)


@pytest.mark.parametrize(("now", "delay"), [(4.9, 0), (5.0, 2), (6.9, 2), (7.0, 0)])
def test_entry_includes_its_start_and_excludes_its_end(now, delay):
    held = slowness(Slow(device="a", factor=3.0, start=5.0, until=7.0))
    assert held.delay(now, WORK, BOTH) == delay


def test_entry_without_an_end_never_ends():
    assert slowness(Slow(device="a", factor=3.0)).delay(1e9, WORK, BOTH) == 2


def test_other_devices_are_not_slowed():
    entry = Slow(device="a", factor=3.0)
    assert slowness(entry, device="b").delay(0.0, WORK, BOTH) == 0
    assert slowness(replace(entry, device="*"), device="b").delay(0.0, WORK, BOTH) == 2


slows = st.one_of(
    st.builds(Slow, device=st.just("a"), factor=st.floats(1, 5), start=st.floats(0, 10)),
    st.builds(
        Slow,
        device=st.just("*"),
        probability=st.floats(0, 1),
        sleep_factor=st.floats(0, 5),
        start=st.floats(0, 10),
    ),
    st.builds(Slow, device=st.just("a"), trace=st.just("steps"), trace_worker=st.integers(0, 2)),
)


@given(st.lists(slows, max_size=4), st.integers())
def test_delays_of_entries_that_overlap_add_up(entries, seed):
    together = delays(slowness(*entries, seed=seed), 20)
    quiet = Slow(
        device="a", factor=1.0
    )  # keeps the indices of the others, which determine their draws
    alone = [
        delays(slowness(*[e if i == j else quiet for j, e in enumerate(entries)], seed=seed), 20)
        for i in range(len(entries))
    ]
    assert together == pytest.approx(
        [sum(column) for column in zip(*alone, strict=True)] or [0] * 20
    )
    assert min(together) >= 0


def test_factors_add_their_excess():
    both = slowness(Slow(device="a", factor=2.0), Slow(device="*", factor=3.0))
    assert both.delay(0.0, WORK, BOTH) == 1 + 2


@given(st.floats(0, 1), st.floats(0, 5), st.integers())
def test_sleep_is_all_or_nothing(probability, sleep_factor, seed):
    entry = Slow(device="a", probability=probability, sleep_factor=sleep_factor)
    drawn = delays(slowness(entry, seed=seed), 50)
    assert set(drawn) <= {0.0, sleep_factor * BOTH}


@pytest.mark.parametrize(("probability", "delay"), [(0.0, 0.0), (1.0, 2 * BOTH)])
def test_probability_0_and_1_are_certain(probability, delay):
    entry = Slow(device="a", probability=probability, sleep_factor=2.0)
    assert delays(slowness(entry), 1000) == [delay] * 1000


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("name", "sleep_factor"), [("sdpipe_a", 1), ("sdpipe_b", 3)])
def test_sdpipe_settings_have_their_mean_delay(name, sleep_factor, seed):
    scenario = replace(Scenario.load(name), seed=seed)
    drawn = delays(Slowness.of(scenario, "Tokyo/0"), 20_000)
    assert sum(drawn) / 20_000 == pytest.approx(0.1 * sleep_factor * BOTH, rel=0.07)


def test_sdpipe_settings_are_bundled():
    assert bundled_scenarios() == ("sdpipe_a", "sdpipe_b")
    for name in bundled_scenarios():
        assert Scenario.load(name).name == name
        Scenario.load(name).check(Cluster.load("case5_worldwide"))


def test_draws_differ_by_device_by_entry_and_by_seed():
    entry = Slow(device="*", probability=0.5, sleep_factor=1.0)
    first = delays(slowness(entry), 64)
    assert first == delays(slowness(entry), 64)
    assert first != delays(slowness(entry, device="b"), 64)
    assert first != delays(slowness(entry, seed=1), 64)
    shifted = slowness(Slow(device="a", factor=1.0), entry)
    assert first != delays(shifted, 64)


def test_draws_are_independent_between_devices():
    """Two devices of probability 1/2 sleep at the same time in a quarter of all actions."""
    entry = Slow(device="*", probability=0.5, sleep_factor=1.0)
    a, b = (delays(slowness(entry, device=device), 10_000) for device in ("a/1", "a/2"))
    together = sum(x > 0 and y > 0 for x, y in zip(a, b, strict=True))
    assert together / 10_000 == pytest.approx(0.25, abs=0.02)


def test_draws_are_independent_of_the_start_time():
    entry = Slow(device="a", probability=0.5, sleep_factor=1.0)
    always = delays(slowness(entry), 64)
    late = delays(slowness(replace(entry, start=20.0)), 64)
    assert late == [0.0] * 20 + always[20:]


def test_draws_are_the_same_in_every_process():
    code = (
        "from polyrhythm.describe.scenario import Scenario\n"
        "from polyrhythm.describe.slowness import Slowness\n"
        "slow = Slowness.of(Scenario.load('sdpipe_b'), 'Tokyo/0')\n"
        "print([i for i in range(100) if slow.delay(0.0, 1.0, 1.0)])\n"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        ).stdout
        for hash_seed in ("1", "2")
    }
    chance = random.Random("0/0/Tokyo/0")
    assert seen == {f"{[i for i in range(100) if chance.random() < 0.1]}\n"}


def test_trace_is_played_from_the_start_of_its_entry():
    held = slowness(Slow(device="a", trace="steps", trace_worker=0, start=10.0))
    assert [held.delay(now, WORK, BOTH) for now in (9.0, 10.0, 59.0, 60.0, 109.0)] == [
        0,
        1,
        1,
        3,
        3,
    ]


def test_recording_is_scaled_to_the_trace_duration():
    held = slowness(Slow(device="a", trace="steps", trace_worker=0, trace_duration=8.0))
    assert [held.delay(now, WORK, BOTH) for now in (0.0, 3.9, 4.0, 7.9)] == [1, 1, 3, 3]


def test_speed_inside_a_bin_is_drawn_evenly_for_each_action():
    held = slowness(Slow(device="a", trace="steps", trace_worker=1))
    slowdowns = [1 + held.delay(0.0, WORK, BOTH) for _ in range(5000)]
    assert 1 <= min(slowdowns) < 1.05
    assert 4.8 < max(slowdowns) <= 5
    assert sum(1 / slowdown for slowdown in slowdowns) / 5000 == pytest.approx(0.6, rel=0.02)


@pytest.mark.parametrize(("index", "delay"), [(0, 1), (2, 0), (3, 1), (5, 0)])
def test_devices_repeat_the_workers_of_a_trace_round_robin(index, delay):
    held = slowness(Slow(device="*", trace="steps"), index=index)
    assert held.delay(0.0, WORK, BOTH) == delay


def test_ended_trace_stays_at_its_last_value_and_warns_once():
    held = slowness(Slow(device="a", trace="steps", trace_worker=0))
    with pytest.warns(UserWarning, match="trace 'steps' has ended after 100s: held") as caught:
        assert held.delay(100.0, WORK, BOTH) == 3
    assert [warning.filename for warning in caught] == [__file__]  # reported at the caller
    assert [held.delay(now, WORK, BOTH) for now in (101.0, 1e300)] == [3, 3]  # warnings are errors


def test_trace_that_is_cut_off_by_its_entry_does_not_warn():
    held = slowness(Slow(device="a", trace="steps", trace_worker=0, until=100.0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert held.delay(100.0, WORK, BOTH) == 0


@pytest.mark.parametrize(
    ("entry", "index", "wrong"),
    [
        ({"trace": "none"}, 0, "slow[1]: the trace 'none'"),
        ({"trace": "steps"}, None, "slow[1]: no worker of the trace 'steps' is chosen"),
        ({"trace": "steps", "trace_worker": 3}, 0, "slow[1]: trace_worker is 3"),
        ({"trace": "alibaba_job1"}, 0, "slow[1]: the length of the trace 'alibaba_job1'"),
    ],
)
def test_trace_that_cannot_be_played_is_refused_with_its_location(entry, index, wrong):
    scenario = Scenario(name="s", slow=(Slow(device="a", factor=2.0), Slow(device="a", **entry)))
    traces = {**TRACES, "alibaba_job1": Trace.load("alibaba_job1")}
    with pytest.raises(DescriptionError) as caught:
        Slowness.of(scenario, "a", index=index, traces=traces)
    assert caught.value.wrong.startswith(wrong)
    Slowness.of(scenario, "b")  # the entry is for another device


def test_scenario_traces_are_found_by_name_and_next_to_its_file(tmp_path, monkeypatch):
    (tmp_path / "mine.toml").write_text('name = "mine"\nduration_s = 9\nworkers = [[[0.5, 0.5]]]')
    (tmp_path / "s.toml").write_text(
        """
        name = "s"
        slow = [
          {device = "a", trace = "mine.toml"},
          {device = "*", trace = "sdpipe_16gpu", trace_duration_s = 60},
        ]
        """
    )
    monkeypatch.chdir(tmp_path)
    scenario = Scenario.load("s.toml")
    monkeypatch.chdir("/")
    traces = load_traces(scenario)
    assert {trace.name for trace in traces.values()} == {"mine", "sdpipe_16gpu"}
    held = Slowness.of(scenario, "a", index=16, traces=traces)
    # Worker 0 of SDPipe starts between 0.288 and 1 of its peak.
    assert 1 <= held.delay(0.0, WORK, BOTH) <= 1 + (1 / 0.288 - 1)

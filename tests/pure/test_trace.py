"""Traces: no worker exceeds full speed, and the bundled traces match their publications."""

import json
import math
import re
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.describe.trace import Trace, bundled_traces
from polyrhythm.errors import DescriptionError

MANUAL = (Path(__file__).parents[2] / "docs" / "describe.md").read_text(encoding="utf-8")
STEPS = Trace(name="steps", workers=(((0.5, 0.5), (0.1, 0.4)), ((1.0, 1.0),)))

speeds = st.tuples(st.floats(0.001, 1), st.floats(0.001, 1)).map(lambda pair: tuple(sorted(pair)))
traces = st.lists(st.lists(speeds, min_size=1, max_size=4), min_size=1, max_size=3).map(
    lambda workers: Trace(name="random", workers=tuple(map(tuple, workers)))
)


@given(traces, st.floats(0, 2), st.floats(0, 1), st.data())
def test_slowdown_is_at_least_one_and_falls_with_the_draw(trace, part, luck, data):
    worker = data.draw(st.integers(0, len(trace.workers) - 1))
    slowest, fastest = trace.slowdown(worker, part, 0), trace.slowdown(worker, part, 1)
    slowdown = trace.slowdown(worker, part, luck)
    assert slowdown >= 1
    assert 1 / slowdown == pytest.approx((1 - luck) / slowest + luck / fastest)


@pytest.mark.parametrize(
    ("part", "luck", "slowdown"),
    [
        (0.0, 0.3, 2),
        (0.49, 0.9, 2),
        (0.5, 0.0, 10),
        (0.99, 1.0, 2.5),
        (0.75, 0.5, 4),
        (1.0, 0.5, 4),
        (math.inf, 0.5, 4),
    ],
)
def test_bins_share_the_recording_and_the_last_one_stays(part, luck, slowdown):
    assert STEPS.slowdown(0, part, luck) == pytest.approx(slowdown)
    assert STEPS.slowdown(1, part, luck) == 1


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        ({"workers": ()}, "trace 'x' has no workers"),
        ({"workers": (((1.0, 1.0),), ())}, "trace 'x' has a worker without speeds"),
        ({"workers": (((1.0, 1.0), (0.0, 1.0)),)}, "workers[0][1]: speed from 0 to 1"),
        ({"workers": (((0.5, 1.5),),)}, "workers[0][0]: speed from 0.5 to 1.5"),
        ({"workers": (((0.9, 0.5),),)}, "workers[0][0]: speed from 0.9 to 0.5"),
        ({"workers": (((math.nan, 1.0),),)}, "workers[0][0]: speed from nan to 1"),
        ({"duration": 0.0}, "duration is 0s"),
    ],
)
def test_impossible_trace_is_refused(change, wrong):
    with pytest.raises(DescriptionError) as caught:
        Trace(**{"name": "x", "workers": (((1.0, 1.0),),), **change})
    assert caught.value.wrong == wrong


def test_trace_is_read_from_a_file_named_in_errors(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'name = "mine"\nduration = "2min"\nworkers = [[[0.5, 1]], [[1, 1], [0.2, 0.3]]]'
    )
    assert Trace.load(path) == Trace(
        name="mine", duration=120.0, workers=(((0.5, 1.0),), ((1.0, 1.0), (0.2, 0.3)))
    )
    path.write_text('name = "mine"\nworkers = [[[0.5, 1], [0.5]]]')
    with pytest.raises(DescriptionError, match=r"mine.toml: workers\[0\]\[1\]"):
        Trace.load(path)


def test_unknown_trace_is_refused_with_the_nearest_name():
    with pytest.raises(DescriptionError, match="unknown trace 'sdpipe_16gp'") as caught:
        Trace.load("sdpipe_16gp")
    assert caught.value.fix == "did you mean 'sdpipe_16gpu'?"


def test_path_is_never_a_bundled_name():
    for source in ("here/sdpipe_16gpu", Path("sdpipe_16gpu")):
        with pytest.raises(DescriptionError, match="sdpipe_16gpu: cannot read it"):
            Trace.load(source)


def test_example_of_the_manual_loads(tmp_path):
    [text] = re.findall(r"```json trace\n(.*?)```", MANUAL, re.DOTALL)
    (tmp_path / "trace.json").write_text(text)
    assert Trace.load(tmp_path / "trace.json").name == json.loads(text)["name"]


@pytest.mark.parametrize("name", bundled_traces())
def test_bundled_trace_names_itself_its_source_and_its_licence_there_and_in_the_manual(name):
    trace = Trace.load(name)
    assert trace.name == name
    [repository] = re.findall(r"github\.com/[\w/]+", trace.source)
    [row] = re.findall(rf"^\| `{name}` .*$", MANUAL, re.MULTILINE)
    assert repository in row
    assert trace.licence.split(",")[0].split(";")[0] in row


def mean_speed(trace: Trace, worker: int, bins: slice) -> float:
    return statistics.mean(lowest + highest for lowest, highest in trace.workers[worker][bins]) / 2


def test_sdpipe_trace_has_its_two_stragglers():
    trace = Trace.load("sdpipe_16gpu")
    assert len(trace.workers) == 16
    assert {len(bins) for bins in trace.workers} == {199, 200}
    assert trace.duration == pytest.approx(200 / 203 * 9 * 3600, rel=1e-3)
    whole = slice(None)
    by_speed = sorted(range(16), key=lambda worker: mean_speed(trace, worker, whole))
    assert by_speed[:2] == [0, 1]
    assert mean_speed(trace, 0, whole) < 0.4
    assert mean_speed(trace, 1, slice(0, 170)) == pytest.approx(0.45, abs=0.05)
    assert mean_speed(trace, 1, slice(-10, None)) > 0.75  # it recovers after 8 of 9 hours
    assert all(mean_speed(trace, worker, whole) > 0.85 for worker in range(10, 15))


def test_alibaba_trace_has_its_straggler_in_the_middle():
    trace = Trace.load("alibaba_job1")
    assert [len(bins) for bins in trace.workers] == [300] * 10
    assert trace.duration is None  # times are published normalised
    slowdowns = [[trace.slowdown(w, (i + 0.5) / 300, 0.0) for i in range(300)] for w in range(10)]
    assert min(map(min, slowdowns)) == 1  # the job's fastest mini-batch
    peak = max(map(max, slowdowns))
    assert peak == pytest.approx(1000 / 380, rel=2e-3)
    assert slowdowns[6].index(peak) == 186
    assert statistics.median(slowdowns[0]) == pytest.approx(476 / 380, rel=2e-3)
    assert statistics.median(slowdowns[9]) == pytest.approx(428 / 380, rel=2e-3)

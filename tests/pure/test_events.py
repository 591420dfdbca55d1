"""The event log: written events are read back in order, also while the log grows."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyrhythm.errors import EventError
from polyrhythm.events import SCHEMA, LogReader, merged_log, read_run, worker_log
from polyrhythm.sinks.jsonl import EventLog, merge
from polyrhythm.types import Worker

values_s = st.dictionaries(
    st.text(max_size=8),
    st.one_of(
        st.integers(-(2**53), 2**53),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=8),
    ),
    max_size=3,
)


@given(st.lists(st.tuples(st.text(max_size=8), st.text(max_size=20), values_s), max_size=5))
def test_written_events_are_read_back(
    tmp_path_factory: pytest.TempPathFactory, records: list[tuple[str, str, dict[str, float]]]
) -> None:
    path = tmp_path_factory.mktemp("log") / "a.jsonl"
    with EventLog(path, Worker(1, 2)) as log:
        for step, (kind, why, values) in enumerate(records):
            log.write(kind, step=step, why=why, values=values)
    read = list(LogReader(path).new())
    assert [(e.kind, e.why, e.values) for e in read] == records
    assert all(e.worker == Worker(1, 2) for e in read)
    assert [e.step for e in read] == list(range(len(records)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_or_inf_loss_stays_readable(tmp_path: Path, value: float) -> None:
    with EventLog(tmp_path / "a.jsonl") as log:
        log.write("step", values={"loss": value})
    (event,) = LogReader(tmp_path / "a.jsonl").new()
    assert repr(float(event.values["loss"])) == repr(value)


def test_a_span_starts_where_it_began_and_lasts_until_it_was_written(tmp_path: Path) -> None:
    with EventLog(tmp_path / "a.jsonl") as log:
        start = log.now()
        log.write("action", start=start, name="F3")
        after = log.now()
    (event,) = LogReader(tmp_path / "a.jsonl").new()
    assert event.time == start
    assert event.duration is not None
    assert 0 <= event.duration <= after - start


@given(st.floats(0, 1))
def test_a_log_cut_anywhere_keeps_every_whole_line(
    tmp_path_factory: pytest.TempPathFactory, share: float
) -> None:
    path = tmp_path_factory.mktemp("log") / "a.jsonl"
    with EventLog(path) as log:
        for step in range(4):
            log.write("step", step=step)
    whole = path.read_bytes()
    cut = round(share * len(whole))
    path.write_bytes(whole[:cut])
    lines = whole[:cut].count(b"\n")
    assert [e.step for e in LogReader(path).new()] == list(range(max(0, lines - 1)))


def test_a_reader_sees_new_events_while_the_log_grows(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with EventLog(path) as log:
        reader = LogReader(path)
        assert list(reader.new()) == []
        log.write("average", step=0)
        assert [e.step for e in reader.new()] == [0]
        with path.open("ab") as other:  # half a line is not an event yet
            other.write(b'{"kind":"step",')
            other.flush()
            assert list(reader.new()) == []
            other.write(b'"time":1.0,"step":1}\n')
        assert [e.step for e in reader.new()] == [1]


def test_events_of_each_step_are_written_soon_and_before_later_ones(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    reader, steps = LogReader(path), list[int | None]()
    with EventLog(path) as log:
        log.write("step", step=0)
        deadline = time.monotonic() + 30
        while not steps and time.monotonic() < deadline:  # nothing else is written
            time.sleep(0.01)
            steps += [e.step for e in reader.new()]
        log.write("step", step=1)
        log.write("average", step=2)
        steps += [e.step for e in reader.new()]
        assert steps == [0, 1, 2]
        log.write("step", step=3)
    assert [e.step for e in reader.new()] == [3]


def test_a_process_that_exits_without_closing_its_log_writes_all_events(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    code = f"""
from pathlib import Path
from polyrhythm.sinks.jsonl import EventLog
log = EventLog(Path({str(path)!r}))
log.write("step", step=7)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert [e.step for e in LogReader(path).new()] == [7]


def write_run(run: Path) -> None:
    """Write the logs of two workers whose events interleave; spans are logged when they end."""
    logs = [EventLog(worker_log(run, Worker(0, p)), Worker(0, p)) for p in range(2)]
    for step in range(5):
        starts = [log.now() for log in logs]
        for log, start in zip(logs, starts, strict=True):
            log.write("action", step=step, start=log.now())
            log.write("step", step=step, start=start)
    for log in logs:
        log.close()


def test_merging_keeps_every_event_in_order_of_time_and_leaves_one_file(tmp_path: Path) -> None:
    write_run(tmp_path)
    before = list(read_run(tmp_path))
    assert merge(tmp_path) == merged_log(tmp_path)
    after = list(read_run(tmp_path))
    assert after == before
    assert len(after) == 20
    assert [e.time for e in after] == sorted(e.time for e in after)
    assert list(tmp_path.iterdir()) == [merged_log(tmp_path)]


def test_repeated_or_interrupted_merge_loses_nothing(tmp_path: Path) -> None:
    write_run(tmp_path)
    rest = worker_log(tmp_path, Worker(0, 1))
    saved = rest.read_bytes()
    merge(tmp_path)
    merge(tmp_path)
    assert len(list(read_run(tmp_path))) == 20
    rest.parent.mkdir()
    rest.write_bytes(saved)  # as if the first merge had been interrupted before removing this log
    assert len(list(read_run(tmp_path))) == 20
    merge(tmp_path)
    assert len(list(read_run(tmp_path))) == 20
    assert list(tmp_path.iterdir()) == [merged_log(tmp_path)]


def test_the_workers_logs_stay_when_the_merged_one_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path)
    written = []

    def full(descriptor: int, line: bytes) -> int:
        written.append(line)
        if len(written) > 5:
            raise OSError(28, "No space left on device")
        return len(line)

    monkeypatch.setattr("os.write", full)
    with pytest.warns(UserWarning, match="ends here"):
        merge(tmp_path)
    monkeypatch.undo()
    assert len(list(read_run(tmp_path))) == 20


def test_a_run_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EventError, match="typo"):
        list(read_run(tmp_path / "typo"))


def test_a_run_whose_worker_died_in_the_middle_of_a_line_still_merges(tmp_path: Path) -> None:
    write_run(tmp_path)
    path = worker_log(tmp_path, Worker(0, 1))
    path.write_bytes(path.read_bytes()[:-5])
    merge(tmp_path)
    assert len(list(read_run(tmp_path))) == 19


def test_a_damaged_line_is_named_by_file_and_number(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with EventLog(path) as log:
        log.write("step")
    path.write_bytes(path.read_bytes() + b"nonsense\n")
    with pytest.raises(EventError, match=r"a\.jsonl:3"):
        list(LogReader(path).new())


@pytest.mark.parametrize("schema", [str(SCHEMA + 1), '"one"', "null"])
def test_a_log_of_another_schema_is_refused_with_the_version_that_wrote_it(
    tmp_path: Path, schema: str
) -> None:
    path = tmp_path / "a.jsonl"
    values = f'{{"schema":{schema},"polyrhythm":"9.9"}}'.replace('"schema":null,', "")
    path.write_text(f'{{"kind":"log","time":0,"values":{values}}}\n')
    with pytest.raises(EventError, match=r"polyrhythm 9\.9"):
        list(LogReader(path).new())


def test_a_log_of_schema_1_is_read_under_the_present_kinds(tmp_path: Path) -> None:
    path = tmp_path / "workers" / "s0p0.jsonl"
    path.parent.mkdir()
    lines = ['{"kind":"log","time":0,"values":{"schema":1,"polyrhythm":"0.1.0"}}']
    lines += [f'{{"kind":"{kind}","time":1,"name":"x"}}' for kind in ("way", "average_mended")]
    path.write_text("\n".join([*lines, ""]))
    kinds = [event.kind for event in LogReader(path).new()]
    assert kinds[-2:] == ["sync_mode", "average_repaired"]
    merge(tmp_path)
    assert [event.kind for event in read_run(tmp_path)][-2:] == kinds[-2:]
    assert f'"schema":{SCHEMA}' in (tmp_path / "events.jsonl").read_text()


def test_a_missing_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EventError, match="nowhere"):
        list(LogReader(tmp_path / "nowhere").new())


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_ends_the_log_with_one_warning_and_not_the_run(tmp_path: Path) -> None:
    path = tmp_path / "full.jsonl"
    path.symlink_to("/dev/full")
    with pytest.warns(UserWarning, match="ends here") as caught:
        log = EventLog(path)
        log.write("step")
        log.write("step")
    assert len(caught) == 1

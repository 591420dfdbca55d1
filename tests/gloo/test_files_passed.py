"""The instrument of `make structure`: files and unpickling are seen in threads and children."""

import io
import pickle
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from polyrhythm.errors import WorkerError
from polyrhythm.processes import Child
from polyrhythm.schedule.spec import ScheduleSpec

TOOLS = Path(__file__).parents[2] / "tools"


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    import files_passed

    return files_passed


@pytest.fixture
def recorder(tool: ModuleType, tmp_path: Path) -> Iterator[Any]:
    recorder = tool.Recorder(tmp_path)
    before = sys.getprofile()
    recorder.install()
    yield recorder
    sys.setprofile(before)
    threading.setprofile(None)


def parse() -> None:
    ScheduleSpec.parse("kfkb:2")


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(10)


def in_child(work: Callable[[], object]) -> None:
    assert Child(work).wait(20) == 0


@pytest.mark.parametrize("run", [lambda work: work(), in_thread, in_child])
def test_files_are_found_only_while_recording(
    tool: ModuleType, recorder: Any, run: Callable[[Callable[[], object]], None]
) -> None:
    run(parse)
    assert recorder.found() == []
    recorder.set(tool.FILES)
    run(parse)
    recorder.set(tool.OFF)
    assert "schedule/spec.py" in recorder.found()


def unpickle_plainly() -> None:
    pickle.loads(pickle.dumps({"a": 1}))


def unpickle_in_python() -> None:
    pickle._Unpickler(io.BytesIO(pickle.dumps([1]))).load()


def unpickle_by_torch() -> None:
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(2)}, buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=True)


def unpickle_code_by_torch() -> None:
    buffer = io.BytesIO()
    torch.save({"a": torch.ones(2)}, buffer)
    buffer.seek(0)
    torch.load(buffer, weights_only=False)


def unpickle_by_subclass() -> None:
    class Subclass(pickle.Unpickler):
        pass

    Subclass(io.BytesIO(pickle.dumps([1]))).load()


def unpickle_by_numpy() -> None:
    buffer = io.BytesIO()
    np.save(buffer, np.array([{}], dtype=object), allow_pickle=True)
    buffer.seek(0)
    np.load(buffer, allow_pickle=True)


@pytest.mark.parametrize(
    "work",
    [
        unpickle_plainly,
        unpickle_in_python,
        unpickle_by_torch,
        unpickle_code_by_torch,
        unpickle_by_subclass,
        unpickle_by_numpy,
    ],
)
@pytest.mark.parametrize("run", [lambda work: work(), in_child])
def test_every_kind_of_unpickling_is_found(
    tool: ModuleType,
    recorder: Any,
    work: Callable[[], object],
    run: Callable[[Callable[[], object]], None],
) -> None:
    recorder.set(tool.UNPICKLING)
    run(pickle_only)
    assert recorder.found() == []
    run(work)
    recorder.set(tool.OFF)
    assert recorder.found()


def pickle_only() -> None:
    pickle.dumps({"a": 1})


def test_new_recorder_reports_files_of_an_earlier_one(tool: ModuleType, tmp_path: Path) -> None:
    before, found = sys.getprofile(), []
    try:
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            recorder = tool.Recorder(tmp_path / name)
            recorder.install()
            recorder.set(tool.FILES)
            parse()
            recorder.set(tool.OFF)
            found.append("schedule/spec.py" in recorder.found())
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
    assert found == [True, True]


def test_reads_of_numbas_cache_are_counted_apart(tool: ModuleType, recorder: Any) -> None:
    from numba.core.serialize import _numba_unpickle

    recorder.set(tool.UNPICKLING)
    _numba_unpickle(0, pickle.dumps(1), b"a key of this test")
    unpickle_plainly()
    recorder.set(tool.OFF)
    by_numba = [call.startswith(tool.BY_NUMBA) for call in recorder.found()]
    assert sorted(by_numba) == [False, True]


@pytest.fixture
def small_average(tool: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool, "NUM_REPLICAS", 2)
    monkeypatch.setattr(tool, "MEASURED_STEP", 2)


@pytest.mark.usefixtures("small_average")
def test_average_is_measured(tool: ModuleType, recorder: Any, tmp_path: Path) -> None:
    ((_, _, _, _, files),) = tool.measure_average(recorder, tmp_path)
    assert {"run/averaging/rounds.py", "run/coordinator/server.py"} <= set(files)


@pytest.mark.usefixtures("small_average")
def test_window_without_a_commit_is_rejected(
    tool: ModuleType, recorder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool.GroupSync, "step", lambda self: None)
    with pytest.raises(WorkerError, match="no group average was committed"):
        tool.measure_average(recorder, tmp_path)


@pytest.mark.long
def test_unpickled_dataset_state_is_counted(
    tool: ModuleType, recorder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = tool.Stream.load_state_dict
    monkeypatch.setattr(
        tool.Stream, "load_state_dict", lambda *args: (unpickle_plainly(), load(*args))
    )
    monkeypatch.setattr(tool, "UNPICKLING_JOBS", (tool.train_on_stream,))
    (_, number, _, is_met, found), _ = tool.measure_unpickling(recorder, tmp_path)
    assert (number, is_met) == ("1", False)
    assert "unpickle_plainly" in found[0]


def test_unpickled_message_to_a_late_worker_is_counted(
    tool: ModuleType, recorder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_for = tool._wait_for

    def unpickle_copy_from(kind: type, commands: Any) -> Any:
        if kind is tool.CopyFrom:
            unpickle_plainly()
        return wait_for(kind, commands)

    monkeypatch.setattr(tool, "_wait_for", unpickle_copy_from)
    monkeypatch.setattr(tool, "UNPICKLING_JOBS", (tool.join_late,))
    (_, number, _, is_met, _), _ = tool.measure_unpickling(recorder, tmp_path)
    assert (number, is_met) == ("1", False)


def test_job_that_does_not_resume_is_rejected(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool.Stream, "load_state_dict", lambda self, state: None)
    with pytest.raises(WorkerError, match="job 2: has_restored=True, has_resumed=False"):
        tool.train_on_stream(tmp_path)

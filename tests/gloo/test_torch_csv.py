"""Torch's pipeline runtime loads our CSV files, and torch's own CSV files are read."""

import csv
from pathlib import Path

import pytest

from polyrhythm.schedule.spec import ScheduleSpec
from polyrhythm.schedule.torch_csv import from_csv, to_csv

schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
if not hasattr(schedules, "_PipelineScheduleRuntime"):
    pytest.skip("torch's runtime for schedule tables has moved", allow_module_level=True)


class Stage:
    """The attributes that the runtime reads of a stage before its first step."""

    def __init__(self, stage: int, num_stages: int) -> None:
        self.stage_index = self.group_rank = stage
        self.num_stages = self.group_size = num_stages
        self.is_first, self.is_last = stage == 0, stage == num_stages - 1
        self.has_backward = False
        self.submod = None
        self.stage_index_to_group_rank: dict[int, int] = {}


def runtime(num_stages: int, num_microbatches: int):
    return schedules._PipelineScheduleRuntime(
        [Stage(0, num_stages)], n_microbatches=num_microbatches
    )


def dry_run(pipeline) -> None:
    """Simulate the completed table with torch; raises if it deadlocks."""
    # The simulator does not support the table's entries for sharded parameters.
    table = {
        rank: [a for a in row if a.microbatch_index is not None]
        for rank, row in pipeline.pipeline_order_with_comms.items()
    }
    schedules._simulate_comms_compute(table, lambda stage: stage, len(table))


SHAPES = [(1, 3), (2, 2), (4, 12), (4, 7), (4, 2), (8, 16)]


def specs(num_stages: int) -> list[ScheduleSpec]:
    eager = tuple(2 * (num_stages - stage) - 1 for stage in range(num_stages))
    return [
        ScheduleSpec("1f1b"),
        ScheduleSpec("gpipe"),
        ScheduleSpec("kfkb", k=2),
        ScheduleSpec("kfkb", k=3),
        ScheduleSpec("bounded", limits=eager),
    ]


@pytest.mark.parametrize(("num_stages", "num_microbatches"), SHAPES)
def test_torch_runtime_round_trips_our_schedules(
    tmp_path: Path, num_stages: int, num_microbatches: int
) -> None:
    written, dumped = tmp_path / "written.csv", tmp_path / "dumped.csv"
    for spec in specs(num_stages):
        schedule = spec.build(num_stages=num_stages, num_microbatches=num_microbatches)
        written.write_text(to_csv(schedule))
        pipeline = runtime(num_stages, num_microbatches)
        pipeline._load_csv(str(written))
        for stage, actions in enumerate(schedule):
            assert list(map(str, pipeline.pipeline_order[stage])) == [
                f"{stage}{action}" for action in actions
            ]
        dry_run(pipeline)
        pipeline._dump_csv(str(dumped), format="compute_only")
        assert from_csv(dumped.read_text()) == schedule


def test_torch_runtime_refuses_deadlocking_schedule(tmp_path: Path) -> None:
    """Proves that the test above can fail."""
    bad = tmp_path / "bad.csv"
    bad.write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    with pytest.raises((AssertionError, ValueError)):
        pipeline = runtime(2, 2)
        pipeline._load_csv(str(bad))
        dry_run(pipeline)


def test_torch_1f1b_table_is_read() -> None:
    """The table has idle slots, as in torch's artifacts."""
    text = "0F0,0F1,,,0B0,,0B1\n,1F0,1B0,1F1,1B1,,\n"
    for row in text.splitlines():
        for cell in row.split(","):
            schedules._Action.from_str(cell)
    assert from_csv(text) == ScheduleSpec("1f1b").build(num_stages=2, num_microbatches=2)


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(1, 3), (2, 2), (4, 4), (4, 12)])
@pytest.mark.parametrize(
    ("name", "spec"), [("1F1B", "1f1b"), ("GPipe", "gpipe"), ("LoopedBFS", "gpipe")]
)
def test_torch_tables_are_read(
    tmp_path: Path, name: str, spec: str, num_stages: int, num_microbatches: int
) -> None:
    """Tables end with a reduction; torch counts the last stage's forwards of 1F1B from 1."""
    stage, path = Stage(0, num_stages), tmp_path / "table.csv"
    stages = [stage] if name == "LoopedBFS" else stage
    pipeline = getattr(schedules, f"Schedule{name}")(stages, n_microbatches=num_microbatches)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(pipeline.pipeline_order.values())
    expected = ScheduleSpec(spec).build(num_stages=num_stages, num_microbatches=num_microbatches)
    assert from_csv(path.read_text()) == expected


@pytest.mark.parametrize("layout", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("name", ["LoopedBFS", "Interleaved1F1B"])
def test_torch_tables_are_read_with_and_without_communication(
    tmp_path: Path, name: str, layout: str
) -> None:
    """With one stage per rank they are not interleaved."""
    path = tmp_path / "table.csv"
    pipeline = getattr(schedules, f"Schedule{name}")([Stage(0, 3)], n_microbatches=6)
    pipeline._dump_csv(str(path), format=layout)
    rows = [[str(a)[1:] for a in row if a] for row in pipeline.pipeline_order.values()]
    if name == "LoopedBFS":
        rows = [row[:6] + row[:5:-1] for row in rows]
    assert [list(map(str, row)) for row in from_csv(path.read_text())] == rows

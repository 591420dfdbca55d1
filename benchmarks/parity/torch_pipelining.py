"""PyTorch 2.13's own pipelining tests, written anew for `Pipeline`: which pass, which differ.

Each test of `torch_cases` follows one of torch's in meaning, in as many gloo processes as it needs.
Torch's schedule runs in the same processes: its outputs, losses and gradients are expected. A
difference without an error is silent: it counts twice, as a test that does not pass and as a silent
difference.

Not counted, since these tests are about several stages per rank, which `Pipeline` refuses:

| test | about |
|---|---|
| test_schedule_multiproc.py::ScheduleTest::test_grad_with_manual_interleaved | interleaved |
| ...::test_schedule_with_weight_update_mlp_e2e | interleaved zero-bubble with `dw_builder` |
| ...::test_v_shape_schedules | ZB-V, DualPipeV |
| ...::test_custom_function_callback | DualPipeV |
| ...::test_zero_bubble_with_model_kwargs | interleaved |
| ...::CustomSchedulesTest::test_non_symmetric_stage_ids | V shape and unbalanced |
| ...::CustomSchedulesTest::test_schedule_with_native_zero_bubble | two stages per rank |
| all tests with ScheduleInterleaved1F1B, ScheduleLoopedBFS, ScheduleInterleavedZeroBubble | |
"""

import json
import tempfile
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import torch.distributed as dist

from benchmarks.parity.facts import Fact
from benchmarks.parity.torch_cases import CASES, Case, Trial, traced_models
from polyrhythm.errors import WorkerError, peer_errors
from polyrhythm.run.comm.launch import DistContext, LocalJob
from polyrhythm.types import Seconds

QUICK = (
    "test_schedule_multiproc.py::CustomSchedulesTest::",
    "test_stage.py::StageTest::test_manual",
)
SILENT = "differs silently: "  # how the detail of such a fact begins
_TIMEOUT: Seconds = 30.0  # of any wait in a process
_JOB_TIMEOUT: Seconds = 150.0  # of all tests with the same number of processes


def measure(*, quick: bool) -> list[Fact]:
    """Run torch's tests, or two of them: 1.0 for each that passes, 0.0 with the reason if not."""
    return run_cases([case for case in CASES if not quick or case.name.startswith(QUICK)])


def run_cases(cases: Sequence[Case]) -> list[Fact]:
    """Run the cases in as few sets of processes as possible; return a fact for each, in order."""
    traced_models(cases)  # before the fork: tracing takes longer than a test
    facts: dict[str, Fact] = {}
    by_processes = sorted(cases, key=lambda case: case.num_processes)
    for num_processes, group in groupby(by_processes, key=lambda case: case.num_processes):
        pending = list(group)
        while pending:  # processes that fail end with their case: the next ones are new
            done = _run_job(num_processes, pending)
            facts |= {fact.case: fact for fact in done}
            pending = pending[len(done) :]
    return [facts[case.name] for case in cases]


def silent(facts: Sequence[Fact]) -> int:
    """Return the number of tests whose result differs from torch's without an error."""
    return sum(fact.detail.startswith(SILENT) for fact in facts)


def _run_job(num_processes: int, cases: Sequence[Case]) -> list[Fact]:
    """Run the cases up to the first that raises an error; return their facts."""
    with tempfile.TemporaryDirectory(prefix="polyrhythm-parity-") as name:
        folder = Path(name)

        def work(ctx: DistContext) -> None:
            with ctx.process_group(_TIMEOUT):
                for number, case in enumerate(cases):
                    trial = Trial(ctx.rank, num_processes, folder / f"files{number}")
                    case.run(trial)
                    path = folder / f"{number}.{ctx.rank}.json"
                    path.write_text(json.dumps(trial.differences))
                    with peer_errors("another process", case.name):  # its error is reported
                        dist.barrier()

        error = "no end in time"
        try:
            with LocalJob(work, num_processes, output_folder=folder / "output") as job:
                job.wait(_JOB_TIMEOUT)
        except WorkerError as failure:
            error = str(failure.reason)
        facts: list[Fact] = []
        for number, case in enumerate(cases):
            paths = [folder / f"{number}.{rank}.json" for rank in range(num_processes)]
            if not all(path.exists() for path in paths):
                return [*facts, Fact(case.name, 0.0, error)]
            found = [text for path in paths for text in json.loads(path.read_text())]
            facts.append(Fact(case.name, float(not found), SILENT + found[0] if found else ""))
        return facts

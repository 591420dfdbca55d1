"""Settings that hold for every test."""

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from hypothesis import settings
from xdist.scheduler import LoadScopeScheduling

from polyrhythm import worker_registry

# No time limit per example: a busy machine is no failure. pytest-timeout bounds the whole test.
# `make test` draws the same examples every time, so that it passes or fails for the change at hand;
# `make test-all` draws others, and more.
settings.register_profile(
    "repeatable", deadline=None, print_blob=True, derandomize=True, max_examples=20
)
settings.register_profile("thorough", deadline=None, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "repeatable"))

# A shell that starts pytest in the background ignores SIGINT, which is inherited: a test that sends
# SIGINT would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)

# For every connection to a c10d store, torch looks up the peer's name; a lost answer costs 5 s, and
# a second one a warning in the worker's output. Ask again after 1 s, and more often.
os.environ["RES_OPTIONS"] = "timeout:1 attempts:5"

# Orphans of a killed process become children of this one, so that the fixture below sees them.
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER


# Files whose tests share an import or a computation of seconds run in one process of `-n 4`.
SHARED_PROCESS = {
    "test_checkpoint_export.py": "transformers",
    "test_pipeline_models.py": "transformers",
    "test_profile_formulas.py": "transformers",
    "test_split_layers.py": "transformers",
    "test_trainer_models.py": "transformers",
    "test_profile_hugging_face.py": "transformers",
    "test_examples.py": "accelerate and Lightning Fabric",
    "test_migrate.py": "accelerate and Lightning Fabric",
    "test_trainer_own_loss.py": "transformers",
    "test_wrapped_optimizers.py": "accelerate and Lightning Fabric",
    "test_data_loader.py": "datasets",
    "test_data_streams.py": "datasets",
    "test_trainer_evals.py": "torchmetrics",
    "test_convergence.py": "compiled kernels of the simulator",
    "test_plan_kernels.py": "compiled kernels of the planner",
    "test_plan_placement.py": "compiled kernels of the planner",
    "test_reproduce_dear.py": "DeAR's page",
    "test_pipeline_gradients.py": "gradients of all cases",
    "test_train_lab.py": "losses of one process",
    "test_trainer_checkpoint_damage.py": "a stopped run",
}
LAB = Path(__file__).parent / "lab"  # where tests measure time


class SharedProcessScheduling(LoadScopeScheduling):
    """Distribute single tests, and the files of SHARED_PROCESS as a whole."""

    def _split_scope(self, nodeid: str) -> str:
        return SHARED_PROCESS.get(Path(nodeid.partition("::")[0]).name, nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> SharedProcessScheduling:
    return SharedProcessScheduling(config, log)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Spare the run of `alone` tests, all of which need the lab, the import of other tests."""
    is_elsewhere = collection_path.parent == LAB.parent and collection_path != LAB
    if is_elsewhere and config.args_source is pytest.Config.ArgsSource.TESTPATHS:
        return config.option.markexpr.startswith("alone") or None
    return None


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.get_closest_marker("alone") and LAB not in item.path.parents:
        raise pytest.UsageError(f"{item.nodeid} is marked alone: such tests belong in {LAB}")


@pytest.fixture(autouse=True, scope="session")
def worker_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Register the workers of tests elsewhere: jobs of this user may run at the same time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker_registry, "FOLDER", tmp_path_factory.mktemp("workers"))
        yield


NEEDS_PROCESSES = {
    *("gloo", "gpu", "lab", "browser"),
    *("test_processes.py", "test_run_concurrently.py", "test_bench_pool.py"),
}


@pytest.fixture(autouse=True)
def check_no_leaked_processes(request: pytest.FixtureRequest) -> Iterator[None]:
    """Kill the processes that a test has left behind, and fail the test."""
    if not NEEDS_PROCESSES & set(request.path.parts):
        yield
        return
    before = set(psutil.Process().children(recursive=True))
    yield
    left = [p for p in psutil.Process().children(recursive=True) if p not in before]
    left = [process for process in left if not _has_ended(process)]
    names = [_name(process) for process in left]
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(left, timeout=10)
    assert not names, f"left behind: {names}"


def _has_ended(process: psutil.Process) -> bool:
    """Reap an orphan that was killed a moment ago: this process has inherited it."""
    with contextlib.suppress(psutil.NoSuchProcess, ChildProcessError):
        for _ in range(20):
            if process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)
                return True
            time.sleep(0.01)
        return False
    return True


def _name(process: psutil.Process) -> str:
    try:
        return f"{process.pid}: {' '.join(process.cmdline())}"
    except psutil.Error:
        return str(process.pid)

"""The run folder: one job at a time locks it; logs of earlier jobs are kept.

Measurements and plan are cached in it, for the next start of the same job.
"""

import fcntl
import logging
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO

from polyrhythm.cost.sync import Sync
from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.model import ModelProfile
from polyrhythm.describe.write import write_cluster, write_model
from polyrhythm.errors import LaunchError, UserError
from polyrhythm.events import WORKERS
from polyrhythm.plan.options import Recompute
from polyrhythm.plan.plan import Plan
from polyrhythm.run.comm.store import JobStore, Members
from polyrhythm.sync.decision_log import decision_log_paths
from polyrhythm.sync.log_segments import LogFiles

CLUSTER, PROFILE, PLAN = "cluster.toml", "profile.json", "plan.json"
_LOCK = "lock"
_logger = logging.getLogger(__name__)


def lock_run_dir(run: Path, store: JobStore, members: Members) -> IO[str] | None:
    """Lock the folder on the leader until the returned file is closed; the others wait for it.

    Raises LaunchError in all workers if another job holds the lock, or if the folder cannot be
    written.
    """
    locks = []

    def lock() -> None:
        locked, problem = _lock(run)
        if locked is None:
            raise _lock_error(run, problem)
        locks.append(locked)

    store.run_on_leader("the lock of the run folder", lock, members)
    return locks[0] if locks else None


def take_over_lock(run: Path) -> IO[str] | None:
    """Lock the folder in place of a leader that is lost; None if that one still holds it."""
    lock = (run / _LOCK).open("a")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        _logger.warning("the run folder %s is locked by a process that was lost", run)
        return None
    return lock


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanKey:
    """What a cached plan must match to be used again."""

    devices: tuple[str, ...]
    model: str
    batch: int
    microbatch_size: int | None  # None matches any
    sync: str
    num_stages: int | None = None  # None matches any
    recompute: Recompute = "auto"
    buddy: bool = True  # in decoupled: whether devices have memory for copies of shards

    def is_matched_by(self, plan: Plan) -> bool:
        devices = [name for pipeline in plan.pipelines for name in pipeline.devices]
        recompute = (True,) * plan.num_stages if self.recompute == "always" else ()
        has_copies = plan.sources is None or plan.sources.buddy
        return (
            sorted(devices) == sorted(self.devices)
            and (plan.model, plan.batch, plan.sync) == (self.model, self.batch, self.sync)
            and self.microbatch_size in (None, plan.microbatch_size)
            and self.num_stages in (None, plan.num_stages)
            and (self.recompute == "auto" or plan.recompute == recompute)
            and (plan.sync != Sync.DECOUPLED or has_copies == self.buddy)
        )


def load_cached_plan(run: Path, key: PlanKey) -> Plan | None:
    """Return the cached plan if it matches the job."""
    path = run / PLAN
    if not path.exists():
        return None
    try:
        plan = Plan.load(path)
    except UserError as error:
        _logger.warning("the cached plan is not used: %s", error.wrong)
        return None
    return plan if key.is_matched_by(plan) else None


def save_plan(run: Path, cluster: Cluster, profile: ModelProfile, plan: Plan) -> None:
    """Save, or log why not: `lock_run_dir` raises if the folder is unusable."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        with (run / _LOCK).open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            write_cluster(cluster, run / CLUSTER)
            write_model(profile, run / PROFILE)
            plan.save(run / PLAN)
    except OSError as error:
        _logger.warning("the plan is not cached in %s: %s", run, error.strerror)


def _lock(run: Path) -> tuple[IO[str] | None, str]:
    """Return the lock file, or None and the reason."""
    try:
        run.mkdir(parents=True, exist_ok=True)
        lock = (run / _LOCK).open("w")
    except OSError as error:
        return None, str(error.strerror)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        return None, "another job is using it"
    logs = run / WORKERS
    if logs.exists():
        previous = next(p for i in count(1) if not (p := run / f"{WORKERS}.{i}").exists())
        logs.rename(previous)
        for log in decision_log_paths(run):
            for path in LogFiles.of(log):
                if path.exists():
                    path.rename(previous / path.name)
    return lock, ""


def _lock_error(run: Path, problem: str) -> LaunchError:
    return LaunchError(
        f"run folder {run}: {problem}",
        expected="a folder that can be written, and that no other job uses",
        fix="pass another run folder, end the other job, or close() the other Trainer",
    )

"""The plan cache: measurements and plan in the run folder, for the next start of the same job."""

import fcntl
import logging
from dataclasses import dataclass
from pathlib import Path

from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.model import ModelProfile
from polyrhythm.describe.write import write_cluster, write_model
from polyrhythm.errors import UserError
from polyrhythm.plan.plan import Plan

_logger = logging.getLogger(__name__)

CLUSTER, PROFILE, PLAN = "cluster.toml", "profile.json", "plan.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanKey:
    """What a cached plan must match to be used again."""

    devices: tuple[str, ...]
    model: str
    batch: int
    microbatch_size: int | None  # None matches any
    sync: str

    def is_matched_by(self, plan: Plan) -> bool:
        devices = [name for pipeline in plan.pipelines for name in pipeline.devices]
        return (
            sorted(devices) == sorted(self.devices)
            and (plan.model, plan.batch, plan.sync) == (self.model, self.batch, self.sync)
            and self.microbatch_size in (None, plan.microbatch_size)
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
        with (run / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            write_cluster(cluster, run / CLUSTER)
            write_model(profile, run / PROFILE)
            plan.save(run / PLAN)
    except OSError as error:
        _logger.warning("the plan is not cached in %s: %s", run, error.strerror)

"""Make a plan in one call from a script: `polyrhythm plan` without the command line."""

from dataclasses import fields
from pathlib import Path

from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.model import ModelProfile
from polyrhythm.plan.options import PlanOptions
from polyrhythm.plan.plan import Plan
from polyrhythm.plan.problem import Problem
from polyrhythm.plan.search import search_plan
from polyrhythm.renamed import renamed_arguments

_DEFAULTS = PlanOptions()
_NAMES = [each.name for each in fields(PlanOptions)]


@renamed_arguments(batch="batch_size=", **dict.fromkeys(_NAMES, "options=PlanOptions(...)"))
def make_plan(
    cluster: Cluster | str | Path,
    profile: ModelProfile | str | Path,
    *,
    batch_size: int,
    options: PlanOptions = _DEFAULTS,
    seed: int = 0,
) -> Plan:
    """Return the best plan found, its prediction in `predicted`; raises PlanError if none fits.

    `batch_size` is the number of samples per step over all pipelines. The same arguments give the
    same plan on every machine.
    """
    problem = Problem(
        cluster=cluster if isinstance(cluster, Cluster) else Cluster.load(cluster),
        profile=profile if isinstance(profile, ModelProfile) else ModelProfile.load(profile),
        job=options.job(batch_size),
    )
    return search_plan(problem, seed=seed).best.plan

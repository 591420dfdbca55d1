"""Make a plan in one call from a script: `polyrhythm plan` without the command line."""

from dataclasses import fields, replace
from pathlib import Path

from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.model import ModelProfile
from polyrhythm.plan.inputs import builtin_sizes, load_cluster, load_model, sources_of
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

    `cluster` and `profile` are descriptions, files, or names of bundled networks and built-in
    models. `batch_size` is the number of samples per step over all pipelines. The same arguments
    give the same plan on every machine.
    """
    job = options.job(batch_size)
    there = cluster if isinstance(cluster, Cluster) else load_cluster(cluster)
    model = (
        profile
        if isinstance(profile, ModelProfile)
        else load_model(profile, there, sizes=builtin_sizes(job))
    )
    plan = search_plan(Problem(cluster=there, profile=model, job=job), seed=seed).best.plan
    if isinstance(cluster, Cluster) or isinstance(profile, ModelProfile):
        return plan
    return replace(plan, sources=sources_of(cluster, profile, options))

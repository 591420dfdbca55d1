"""Load the cluster and the model of a plan, each from a file or by a built-in name."""

import os
from collections.abc import Sequence
from pathlib import Path

from polyrhythm.describe.bundled_files import is_name
from polyrhythm.describe.cluster import Cluster
from polyrhythm.describe.model import ModelProfile
from polyrhythm.describe.profiles import builtin_profile, layers_of
from polyrhythm.errors import DescriptionError, PlanError
from polyrhythm.plan.options import PlanOptions, TrainingJob
from polyrhythm.plan.plan import Plan, Sources
from polyrhythm.plan.problem import Problem

_LARGEST = 64  # samples in a micro-batch of a built-in model


def load_cluster(source: str | Path) -> Cluster:
    """Load a cluster; raise DescriptionError, which points out a model in its place."""
    try:
        return Cluster.load(source)
    except DescriptionError:
        if _is_model(source):
            raise _swapped(source, "a model", "a cluster") from None
        raise


def load_model(
    source: str | Path,
    cluster: Cluster,
    *,
    sizes: Sequence[int],
    flops: float | None = None,
    dtype: str | None = None,
) -> ModelProfile:
    """Load a model; raise DescriptionError, which points out a cluster in its place.

    A built-in model is computed for micro-batches of these sizes on a device with `flops`
    operations per second, by default those of the cluster's first device.
    """
    try:
        if isinstance(source, str) and is_name(source):
            flops = cluster.devices[0].flops if flops is None else flops
            return _counted(source, flops, dtype or cluster.flops_dtype or "float32", sizes)
        profile = ModelProfile.load(source)
    except DescriptionError:
        if _is_cluster(source):
            raise _swapped(source, "a cluster", "a model") from None
        raise
    if flops is not None or dtype is not None:
        raise DescriptionError(
            f"--flops or --dtype for {source}, which contains the times of its layers",
            expected="--flops and --dtype only with a built-in model",
            fix="omit them",
        )
    return profile


def builtin_sizes(job: TrainingJob) -> list[int]:
    """Return a built-in model's micro-batch sizes: the job's, or powers of 2 dividing its batch."""
    if job.microbatch_size is not None:
        return [job.microbatch_size]
    powers = (2**power for power in range(_LARGEST.bit_length()))
    return [size for size in powers if job.batch_size % size == 0]


def planned_inputs(
    plan: Plan,
    file: Path | None,
    *,
    cluster: Cluster | str | Path | None,
    profile: ModelProfile | str | Path | None,
    flops: float | None = None,
) -> tuple[Cluster, ModelProfile]:
    """Return what the plan is for, if not given: what it was made for, relative to its `file`."""
    sources = plan.sources or Sources(cluster="", profile="")
    if not isinstance(cluster, Cluster):
        cluster = load_cluster(cluster or _resolve("cluster", sources.cluster, file))
    if isinstance(profile, ModelProfile):
        return cluster, profile
    loaded = load_model(
        profile or _resolve("profile", sources.profile, file),
        cluster,
        flops=flops or (sources.flops if profile is None else None),
        dtype=sources.dtype if profile is None else None,
        sizes=[plan.microbatch_size or 1],
    )
    return cluster, loaded


def problem_of(
    plan: Plan, cluster: Cluster, profile: ModelProfile, *, gradient_bytes: float | None = None
) -> Problem:
    """The problem that the plan solves, with the plan's settings of gradients and memory."""
    sources = plan.sources or Sources(cluster="", profile="")
    job = TrainingJob(
        batch_size=plan.batch or 1,  # `predict` refuses a plan without a batch
        sync=plan.sync,
        gradient_bytes=sources.gradient_bytes if gradient_bytes is None else gradient_bytes,
        optimizer_bytes=sources.optimizer_bytes,
        memory_reserve=sources.memory_reserve,
        buddy=sources.buddy,
    )
    return Problem(cluster=cluster, profile=profile, job=job)


def sources_of(
    cluster: str | Path,
    profile: str | Path,
    options: PlanOptions,
    *,
    file: Path | None = None,
    flops: float | None = None,
    dtype: str | None = None,
) -> Sources:
    """Return the inputs of a plan, to be written in its `file`."""
    return Sources(
        cluster=_relative_to(file, cluster),
        profile=_relative_to(file, profile),
        flops=flops,
        dtype=dtype,
        gradient_bytes=options.gradient_bytes,
        optimizer_bytes=options.optimizer_bytes,
        memory_reserve=options.memory_reserve,
        buddy=options.buddy,
    )


def _relative_to(file: Path | None, source: str | Path) -> str:
    """Return a path relative to the folder of `file`; built-in names stay unchanged."""
    if is_name(source):
        return str(source)
    path = Path(source).absolute()
    return str(path) if file is None else os.path.relpath(path, file.absolute().parent)


def _resolve(kind: str, source: str, file: Path | None) -> str:
    """Resolve a path that is relative to the folder of `file`; the inverse of `_relative_to`."""
    plan = "the plan" if file is None else str(file)
    if not source:
        raise PlanError(
            f"{plan} does not name the {kind} that it was made for",
            expected=f"--{kind} or {kind}=, or a plan that `polyrhythm plan -o` wrote",
            fix=f"add --{kind} FILE, or pass {kind}=",
        )
    path = source if file is None or is_name(source) else str(file.parent / source)
    if not is_name(source) and not Path(path).exists():
        raise PlanError(
            f"{plan} was made from {source}, which is not there",
            expected=f"the {kind} that it was made for, relative to the plan's folder",
            fix=f"add --{kind} FILE, or put it back",
        )
    return path


def _counted(name: str, flops: float | None, dtype: str, sizes: Sequence[int]) -> ModelProfile:
    layers_of(name)  # refuses an unknown name first
    if flops is None:
        raise DescriptionError(
            f"{name} without the speed of the devices",
            expected="the operations per second of a device of speed 1, here or in the cluster",
            fix="add --flops 6e13, in Python builtin_profile(name, flops=6e13); "
            "`polyrhythm probe` measures it",
        )
    return builtin_profile(
        name, flops=flops, microbatch_size=sizes[0], other_sizes=sizes[1:], dtype=dtype
    )


def _is_model(source: str | Path) -> bool:
    try:
        return bool(layers_of(str(source)) if is_name(source) else ModelProfile.load(source))
    except DescriptionError:
        return False


def _is_cluster(source: str | Path) -> bool:
    try:
        return bool(Cluster.load(source))
    except DescriptionError:
        return False


def _swapped(source: str | Path, found: str, expected: str) -> DescriptionError:
    return DescriptionError(
        f"{source} describes {found}",
        expected=f"{expected} in its place",
        fix="pass the cluster first and the profile second: polyrhythm plan CLUSTER PROFILE",
    )

"""Load the cluster and the model of a plan, each from a file or by a built-in name."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from polyrhythm.errors import DescriptionError

if TYPE_CHECKING:
    from polyrhythm.describe.cluster import Cluster
    from polyrhythm.describe.model import ModelProfile


def load_cluster(source: str) -> "Cluster":
    """Load a cluster; raise DescriptionError, which points out a model in its place."""
    from polyrhythm.describe.cluster import Cluster

    try:
        return Cluster.load(source)
    except DescriptionError:
        if _is_model(source):
            raise _swapped(source, "a model", "a cluster") from None
        raise


def load_model(
    source: str, cluster: "Cluster", *, flops: float | None, dtype: str | None, sizes: Sequence[int]
) -> "ModelProfile":
    """Load a model; raise DescriptionError, which points out a cluster in its place.

    A built-in model is computed for micro-batches of these sizes on a device with `flops`
    operations per second, by default those of the cluster's first device.
    """
    from polyrhythm.describe.bundled_files import is_name
    from polyrhythm.describe.model import ModelProfile

    try:
        if not is_name(source):
            profile = ModelProfile.load(source)
        else:
            flops = cluster.devices[0].flops if flops is None else flops
            return _counted(source, flops, dtype or cluster.flops_dtype or "float32", sizes)
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


def relative_to(source: str, file: Path) -> str:
    """Return a path relative to the folder of `file`; built-in names stay unchanged."""
    from polyrhythm.describe.bundled_files import is_name

    return source if is_name(source) else os.path.relpath(source, file.absolute().parent)


def resolve_relative(source: str, file: Path) -> str:
    """Resolve a path that is relative to the folder of `file`; the inverse of `relative_to`."""
    from polyrhythm.describe.bundled_files import is_name

    return source if is_name(source) else str(file.parent / source)


def _counted(name: str, flops: float | None, dtype: str, sizes: Sequence[int]) -> "ModelProfile":
    from polyrhythm.describe.profiles import builtin_profile, layers_of

    layers_of(name)  # refuses an unknown name first
    if flops is None:
        raise DescriptionError(
            f"{name} without --flops",
            expected="the operations per second of a device of speed 1, here or in the cluster",
            fix="add --flops, such as --flops 6e13; `polyrhythm probe` measures it",
        )
    return builtin_profile(
        name, flops=flops, microbatch_size=sizes[0], other_sizes=sizes[1:], dtype=dtype
    )


def _is_model(source: str) -> bool:
    from polyrhythm.describe.bundled_files import is_name
    from polyrhythm.describe.model import ModelProfile
    from polyrhythm.describe.profiles import layers_of

    try:
        return bool(layers_of(source) if is_name(source) else ModelProfile.load(source))
    except DescriptionError:
        return False


def _is_cluster(source: str) -> bool:
    from polyrhythm.describe.cluster import Cluster

    try:
        return bool(Cluster.load(source))
    except DescriptionError:
        return False


def _swapped(source: str, found: str, expected: str) -> DescriptionError:
    return DescriptionError(
        f"{source} describes {found}",
        expected=f"{expected} in its place",
        fix="pass the cluster first and the profile second: polyrhythm plan CLUSTER PROFILE",
    )

"""What a plan is for: a cluster and a model, each by a file or by the name of what comes along."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from polyrhythm.errors import DescriptionError

if TYPE_CHECKING:
    from polyrhythm.describe.cluster import Cluster
    from polyrhythm.describe.model import ModelProfile


def load_cluster(source: str) -> "Cluster":
    """Raises DescriptionError, which says so if this is a model."""
    from polyrhythm.describe.cluster import Cluster

    try:
        return Cluster.load(source)
    except DescriptionError:
        if _is_model(source):
            raise _swapped(source, "a model", "a cluster") from None
        raise


def load_model(
    source: str,
    cluster: "Cluster",
    *,
    flops: float | None,
    dtype: str | None,
    sizes: Sequence[int],
) -> "ModelProfile":
    """Raises DescriptionError, which says so if this is a cluster.

    A model that comes along is counted, for micro-batches of these sizes, on a device that does
    `flops` operations per second; without them on the cluster's first device.
    """
    from polyrhythm.describe.bundled import is_name
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
            f"--flops or --dtype for {source}, which says what its layers take",
            expected="them with a model that comes along only",
            fix="leave them out",
        )
    return profile


def relative_to(source: str, file: Path) -> str:
    """A file as seen from the folder of another one; the name of what comes along as it is."""
    from polyrhythm.describe.bundled import is_name

    return source if is_name(source) else os.path.relpath(source, file.absolute().parent)


def resolve_relative(source: str, file: Path) -> str:
    """The same the other way round."""
    from polyrhythm.describe.bundled import is_name

    return source if is_name(source) else str(file.parent / source)


def _counted(name: str, flops: float | None, dtype: str, sizes: Sequence[int]) -> "ModelProfile":
    from polyrhythm.describe.profiles import builtin_profile, layers_of

    layers_of(name)  # refuses an unknown one first
    if flops is None:
        raise DescriptionError(
            f"{name} without --flops",
            expected="the operations per second of a device of speed 1, here or in the cluster",
            fix="add --flops 6e13 or whatever it does; `polyrhythm probe` measures it",
        )
    return builtin_profile(
        name, flops=flops, microbatch_size=sizes[0], other_sizes=sizes[1:], dtype=dtype
    )


def _is_model(source: str) -> bool:
    from polyrhythm.describe.bundled import is_name
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
        fix="give the cluster first and the profile second: polyrhythm plan CLUSTER PROFILE",
    )

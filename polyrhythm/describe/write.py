"""Write a description to a file that `read` reads: six digits, one line per matrix row.

Files are replaced atomically: a concurrent reader sees the old or the new file, complete.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import tomli_w

from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.model import AtSize, Layer, ModelProfile
from polyrhythm.errors import DescriptionError

_MILLISECOND, _MEGABIT = 1e-3, 125e3


def check_target(path: Path, endings: Sequence[str], *, flag: str = "-o") -> None:
    """Refuse a file that cannot be written, before anything is measured; `flag` is its option."""
    if path.suffix not in endings:
        raise DescriptionError(
            f"a file named {path.name!r}",
            expected=f"a name that ends in {' or '.join(endings)}",
            fix=f"{flag} {path.with_suffix(endings[0]) if path.stem else 'measured' + endings[0]}",
        )
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        problem = "is a folder" if path.is_dir() else f"cannot be made in {folder.absolute()}"
        raise DescriptionError(
            f"{path} {problem}",
            expected="a file in an existing, writable folder",
            fix=f"mkdir -p {folder}, or pass another file with {flag}",
        )


def write_cluster(cluster: Cluster, path: Path) -> None:
    """Write a cluster as TOML, with matrices."""
    origin = {
        "source": cluster.source,
        "measured_at": cluster.measured_at,
        "flops_dtype": cluster.flops_dtype,
    }
    known = {key: text for key, text in origin.items() if text}
    parts = [
        tomli_w.dumps({"name": cluster.name, **known}),
        tomli_w.dumps({"regions": list(cluster.regions)}),
        _matrix("latency_ms", cluster.latency, _MILLISECOND),
        _matrix("bandwidth_mbps", cluster.bandwidth, _MEGABIT),
        _matrix("latency_spread", cluster.latency_spread, 1.0, digits=3),
        _matrix("bandwidth_spread", cluster.bandwidth_spread, 1.0, digits=3),
        _matrix("nccl_latency_ms", cluster.nccl_latency, _MILLISECOND),
        _matrix("nccl_bandwidth_mbps", cluster.nccl_bandwidth, _MEGABIT),
        _prices(cluster),
        tomli_w.dumps({"devices": [_device(device) for device in cluster.devices]}),
    ]
    replace_file(path, "\n".join(part for part in parts if part))


def write_model(profile: ModelProfile, path: Path) -> None:
    """Write a model's profile as TOML or JSON, by the file's suffix."""
    origin: dict[str, object] = {
        "source": profile.source,
        "measured_at": profile.measured_at,
        "flops": profile.flops,
        "flops_dtype": profile.flops_dtype,
        "workspace_bytes": profile.workspace_bytes,
    }
    table = {
        "name": profile.name,
        **{key: _rounded(value) for key, value in origin.items() if value not in ("", None)},
        "microbatch_size": profile.microbatch_size,
        "layers": [_layer(layer) for layer in profile.layers],
    }
    if path.suffix == ".json":
        replace_file(path, json.dumps(table, indent=1, ensure_ascii=False) + "\n")
    else:
        replace_file(path, tomli_w.dumps(table))


def _matrix(key: str, rows: Sequence[Sequence[float]], unit: float, digits: int = 6) -> str:
    """Return one line per row; nothing for an empty matrix."""
    if not rows:
        return ""
    lines = ["  [" + ", ".join(str(_digits(v / unit, digits)) for v in row) + "]," for row in rows]
    return "\n".join([f"{key} = [", *lines, "]", ""])


def _prices(cluster: Cluster) -> str:
    prices = list(cluster.egress_price_per_gb)
    return tomli_w.dumps({"egress_price_per_gb": prices}) if prices else ""


def _device(device: Device) -> dict[str, object]:
    table: dict[str, object] = asdict(device)
    table["memory_bytes"] = table.pop("memory")
    del table["uplink"]
    table["uplink_mbps"] = None if device.uplink is None else device.uplink / _MEGABIT
    if device.region == device.name:
        del table["region"]
    return {key: _rounded(value) for key, value in table.items() if value is not None}


def _layer(layer: Layer) -> dict[str, object]:
    table = _taken(layer)
    table["sizes"] = [_taken(each) for each in layer.sizes]
    return {key: value for key, value in table.items() if value != []}


def _taken(layer: Layer | AtSize) -> dict[str, object]:
    """Return a layer's times in milliseconds and its bytes."""
    table: dict[str, object] = asdict(layer)
    for key in ("forward", "backward"):
        time = table.pop(key)
        assert isinstance(time, float | int), "a number of seconds"
        table[f"{key}_ms"] = _digits(time / _MILLISECOND)
    return {key: _rounded(value) for key, value in table.items() if value is not None}


def _rounded(value: object) -> object:
    return _digits(value) if isinstance(value, float) else value


def _digits(value: float, digits: int = 6) -> float:
    """Round to significant digits; six exceed the precision of any measurement here."""
    return float(f"{value:.{digits}g}")


def replace_file(path: Path, text: str) -> None:
    """Replace a file atomically: readers never see a partial file."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)

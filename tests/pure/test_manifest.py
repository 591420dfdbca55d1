"""The manifest and the folder of checkpoints: what is read, skipped and removed."""

import json
import shutil
import warnings
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from polyrhythm.run.checkpoint.folder import (
    complete,
    latest,
    list_steps,
    next_serial,
    partial_folder,
    remove_leftovers,
    remove_old,
    step_folder,
    would_replace_finite,
    write_synced,
)
from polyrhythm.run.checkpoint.manifest import (
    FORMAT,
    MANIFEST,
    CheckpointError,
    File,
    FormatError,
    Manifest,
    ModelTable,
    OptimizerTable,
    ParamGroup,
    TensorSpec,
    as_json,
    check_model,
    merge_optimizers,
    merge_tables,
    read_manifest,
    to_text,
)

MODEL = ModelTable(
    {"embed.weight": TensorSpec((4, 2), "float32"), "norm.weight": TensorSpec((2,), "float32")},
    {"head.weight": "embed.weight"},
)


def describe(path: Path) -> File:
    content = path.read_bytes()
    return File(len(content), blake2b(content, digest_size=20).hexdigest())


def save(folder: Path, step: int, **more: Any) -> Path:
    """Save a checkpoint of two files."""
    partial = partial_folder(folder, step)
    partial.mkdir(parents=True)
    for name in ("first", "second"):
        (partial / name).write_text(f"{name} of step {step}")
    values = {
        "torch": "2",
        "step": step,
        "serial": next_serial(folder),
        "saved_at": "now",
        "num_stages": 2,
        "model": MODEL,
        "optimizer": None,
        "extra": {},
        "run_info": {},
        "fingerprint": MODEL.fingerprint,
        "files": {path.name: describe(path) for path in partial.iterdir()},
    }
    write_synced(partial / MANIFEST, to_text(Manifest(**(values | more))))
    complete(partial, step_folder(folder, step))
    return step_folder(folder, step)


def test_manifest_round_trip(tmp_path: Path) -> None:
    extra = {"best": float("inf"), "seed": 2**63, "by_epoch": [[1, 2.5], None]}
    path = save(tmp_path, 7, extra=as_json(extra, "extra"), run_info={"plan": {"schema": 2}})
    found = read_manifest(path)
    assert (found.step, found.extra, found.run_info) == (7, extra, {"plan": {"schema": 2}})
    assert (found.model, found.fingerprint) == (MODEL, MODEL.fingerprint)
    assert latest(tmp_path) == path


def test_value_that_is_not_json_is_rejected_by_name() -> None:
    with pytest.raises(CheckpointError, match=r"extra: .*complex"):
        as_json({"phase": 1j}, "extra")


def truncate(path: Path) -> None:
    (path / "first").write_text("fir")


def flip_a_bit(path: Path) -> None:
    content = bytearray((path / "second").read_bytes())
    content[3] ^= 4
    (path / "second").write_bytes(content)


def lose_a_file(path: Path) -> None:
    (path / "first").unlink()


def lose_the_manifest(path: Path) -> None:
    (path / MANIFEST).unlink()


def cut_the_manifest(path: Path) -> None:
    (path / MANIFEST).write_bytes((path / MANIFEST).read_bytes()[:100])


def change_the_manifest(path: Path) -> None:
    text = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text(text.replace('"step": 20', '"step": 21'))


def replace_with_other_file(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()
    (path / MANIFEST).write_text('{"name": "an extension of a browser"}')


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "first has 3 bytes, not 16"),
        (flip_a_bit, "second has other contents"),
        (lose_a_file, "first: No such file"),
        (lose_the_manifest, f"no {MANIFEST}"),
        (cut_the_manifest, MANIFEST),
        (change_the_manifest, f"{MANIFEST} was changed"),
        (replace_with_other_file, f"{MANIFEST} is not"),
    ],
)
def test_latest_falls_back_to_previous_checkpoint_with_a_warning(
    tmp_path: Path, damage: Any, message: str
) -> None:
    before = save(tmp_path, 10)
    damage(save(tmp_path, 20))
    with pytest.warns(UserWarning, match=f"step-00000020: .*{message}"):
        assert latest(tmp_path) == before


def test_latest_is_none_without_a_complete_checkpoint(tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "nowhere") is None
    save(tmp_path, 10).rename(partial_folder(tmp_path, 10))  # as if killed before the rename
    (tmp_path / "notes").mkdir()
    assert latest(tmp_path) is None
    remove_leftovers(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["notes"]


@pytest.mark.parametrize(
    ("other", "fix"), [(FORMAT + 1, "polyrhythm 9.9"), (1, "polyrhythm export .* --from-legacy")]
)
def test_other_format_is_an_error_and_not_skipped(tmp_path: Path, other: int, fix: str) -> None:
    save(tmp_path, 10)
    path = save(tmp_path, 20)
    table = json.loads((path / MANIFEST).read_text()) | {"format": other, "polyrhythm": "9.9"}
    (path / MANIFEST).write_text(json.dumps(table))
    with pytest.raises(FormatError, match=f"format {other}(.|\n)*{fix}"):
        latest(tmp_path)


def test_latest_follows_save_order_and_not_step(tmp_path: Path) -> None:
    save(tmp_path, 10)
    save(tmp_path, 20)
    again = save(tmp_path, 15)  # after restoring step 10
    assert latest(tmp_path) == again


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 10, extra={"try": 1})
    path = save(tmp_path, 10, extra={"try": 2})
    assert read_manifest(path).extra == {"try": 2}
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_remove_old_keeps_newest_and_unreadable(tmp_path: Path) -> None:
    for step in (10, 20, 15, 30):
        save(tmp_path, step)
    lose_the_manifest(save(tmp_path, 40))
    remove_old(tmp_path, keep=2)
    assert list(list_steps(tmp_path)) == [15, 30, 40]


def test_non_finite_checkpoints_never_replace_finite_ones(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save(tmp_path, step, is_finite=True)
    for step in (40, 50, 60):
        save(tmp_path, step, is_finite=False)
        remove_old(tmp_path, keep=2)
        assert list(list_steps(tmp_path)) == [20, 30, step]
    with pytest.warns(UserWarning, match="step-00000060: its weights are not finite"):
        assert latest(tmp_path) == step_folder(tmp_path, 30)
    assert would_replace_finite(step_folder(tmp_path, 30))
    assert not would_replace_finite(step_folder(tmp_path, 60))
    assert not would_replace_finite(step_folder(tmp_path, 70))


def with_changes(**more: TensorSpec) -> ModelTable:
    return ModelTable(MODEL.tensors | {k.replace("_", "."): v for k, v in more.items()}, MODEL.tied)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (with_changes(norm_weight=TensorSpec((3,), "float32")), r"its norm.weight is float32\[2\]"),
        (
            with_changes(norm_weight=TensorSpec((2,), "bfloat16")),
            r"(?s)norm.weight.*expected: bfloat16\[2\]",
        ),
        (with_changes(new_weight=TensorSpec((2,), "float32")), "it has no new.weight"),
        (
            ModelTable({"embed.weight": TensorSpec((4, 2), "float32")}, MODEL.tied),
            "has norm.weight",
        ),
        (ModelTable(MODEL.tensors), "it has head.weight"),
        (
            with_changes(head_weight=TensorSpec((4, 2), "float32")),
            "head.weight is tied to embed.weight",
        ),
        (ModelTable(MODEL.tensors, {"norm.scale": "norm.weight"}), "its norm.scale is"),
    ],
)
def test_check_model_names_first_difference(
    tmp_path: Path, model: ModelTable, message: str
) -> None:
    manifest = read_manifest(save(tmp_path, 1))
    with pytest.raises(CheckpointError, match=message):
        check_model(manifest, model, whole=True)
    assert model.fingerprint != MODEL.fingerprint


def test_check_model_accepts_a_stage(tmp_path: Path) -> None:
    manifest = read_manifest(save(tmp_path, 1))
    part = ModelTable({"norm.weight": MODEL.tensors["norm.weight"]})
    check_model(manifest, part, whole=False)
    with pytest.raises(CheckpointError, match=r"embed\.weight"):
        check_model(manifest, part, whole=True)


def test_merged_stage_tables_equal_the_model() -> None:
    first = ModelTable({"embed.weight": MODEL.tensors["embed.weight"]})
    last = ModelTable(MODEL.tensors, MODEL.tied)
    assert merge_tables([first, last]).fingerprint == MODEL.fingerprint
    decay, plain = {"lr": 0.1, "decay": 0.1}, {"lr": 0.1, "decay": 0.0}
    stages = [
        OptimizerTable(("lr",), (ParamGroup(decay, ("a",)), ParamGroup(plain, ("b",))), {}),
        None,
        OptimizerTable(
            ("lr",), (ParamGroup(plain, ()), ParamGroup(decay, ("c", "a"))), {"c": {"n": 1}}
        ),
    ]
    assert merge_optimizers(stages) == OptimizerTable(
        ("lr",), (ParamGroup(decay, ("a", "c")), ParamGroup(plain, ("b",))), {"c": {"n": 1}}
    )


def test_latest_does_not_warn_without_damage(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert latest(str(tmp_path)) == path

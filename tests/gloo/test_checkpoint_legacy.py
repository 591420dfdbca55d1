"""Checkpoints of format 1, which were pickled: refused, and converted on request only.

`legacy_checkpoint.zip` was saved by a Trainer of two stages, with AdamW, MultiStepLR and a stream,
after 3 steps with 4 samples each.
"""

import base64
import os
import pickle
import shutil
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import MultiStepLR

from polyrhythm.run.checkpoint import legacy
from polyrhythm.run.checkpoint.checkpointer import Checkpointer
from polyrhythm.run.checkpoint.encoding import decode_state
from polyrhythm.run.checkpoint.folder import latest
from polyrhythm.run.checkpoint.legacy import convert
from polyrhythm.run.checkpoint.manifest import FormatError, read_manifest
from polyrhythm.run.checkpoint.state import restore
from polyrhythm.run.data.reader import StreamState
from tests.gloo.commands import run_export

ZIP = Path(__file__).with_name("legacy_checkpoint.zip")
STEP = "step-00000003"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    with zipfile.ZipFile(ZIP) as archive:
        archive.extractall(tmp_path / "run" / "checkpoints")
    return tmp_path / "run"


def test_old_checkpoint_is_refused_with_the_command_that_converts_it(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = f"polyrhythm export {run / 'checkpoints' / STEP} --from-legacy --out NEW_RUN"
    with pytest.raises(FormatError) as refused:
        restore(run / "checkpoints" / STEP, nn.Linear(2, 2))
    assert command in refused.value.fix
    with Checkpointer(run / "checkpoints") as checkpoints, pytest.raises(FormatError):
        checkpoints.latest()
    assert run_export(run) == 2
    assert command in capsys.readouterr().err


def test_converted_checkpoint_is_restored(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = run.with_name("new")
    assert run_export(run, "--from-legacy", "--out", out) == 0
    assert "stage-1.safetensors" in capsys.readouterr().out
    path = latest(out / "checkpoints")
    assert path == out / "checkpoints" / STEP
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    optimizer = AdamW(model.parameters())
    manifest = restore(path, model, optimizer)
    assert (manifest.step, manifest.run_info["plan"]["layers_per_stage"]) == (3, [2, 1])
    expected = legacy_tensors(run)
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[f"model.{name}"])
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        assert state["step"] == 3
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(state[key], expected[f"optimizer.{name}.{key}"])
    scheduler = MultiStepLR(optimizer, [2, 5])
    scheduler.load_state_dict(decode_state(base64.b64decode(manifest.extra["rates"])))
    assert (scheduler.last_epoch, scheduler.milestones) == (3, Counter([2, 5]))
    (stream,) = StreamState.from_json(manifest.extra["stream"]).shards
    assert (stream.position, stream.state["read"]) == (8, (8, "samples"))
    torch.Generator().set_state(stream.state["chance"])
    assert run_export(run, "--from-legacy", "--out", out) == 2
    assert f"{path} exists" in capsys.readouterr().err
    assert run_export(out, "--from-legacy", "--out", out) == 2
    assert "use it as it is" in capsys.readouterr().err


def legacy_tensors(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = run / "checkpoints" / STEP
    index = legacy.FileSystemReader(checkpoint).read_metadata()
    return legacy._read(checkpoint, index, list(index.state_dict_metadata))


def test_damaged_old_checkpoint_is_not_unpickled(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Code:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(run / "code was run"),)

    (run / "checkpoints" / STEP / ".metadata").write_bytes(pickle.dumps(Code()))
    assert run_export(run, "--from-legacy") == 2
    assert ".metadata has" in capsys.readouterr().err
    assert not (run / "code was run").exists()
    shutil.rmtree(run / "checkpoints" / STEP)
    assert run_export(run, "--from-legacy") == 2
    assert "no complete checkpoint" in capsys.readouterr().err


def test_state_that_cannot_be_converted_is_named_and_leaves_nothing(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(legacy.pickle, "loads", lambda _: {"code": object()})
    assert run_export(run, "--from-legacy", "--out", run / "new") == 2
    message = "the state of the learning rate scheduler['code'] is a object"
    assert message in capsys.readouterr().err
    assert list((run / "new" / "checkpoints").iterdir()) == []


def test_conversion_of_a_chosen_step(run: Path) -> None:
    shutil.copytree(run / "checkpoints" / STEP, run / "checkpoints" / "step-00000004")
    found = convert(run, run / "new", 3)
    assert read_manifest(found).step == 3

"""A kill at every file operation of a save: no complete checkpoint is lost."""

from pathlib import Path

import pytest

from benchmarks.parity.kill_windows import Save, measure_save
from polyrhythm.run.checkpoint.folder import complete, latest, list_steps, remove_leftovers


@pytest.mark.parametrize(
    "save",
    [
        Save((1,), 1, keep_last=1),
        pytest.param(Save((1, 2), 3, keep_last=1), marks=pytest.mark.long),
        pytest.param(Save((2, 3, 1), 2, keep_last=2, num_stages=2), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_no_kill_during_a_save_loses_a_checkpoint(save: Save, tmp_path: Path) -> None:
    for fact in measure_save(save, tmp_path / "saves"):
        assert fact.value == 0, fact


def test_checkpoint_being_replaced_is_found_and_gets_its_name_back(tmp_path: Path) -> None:
    hidden = tmp_path / ".step-00000007.replaced"
    hidden.mkdir()
    assert list_steps(tmp_path) == {7: hidden}
    remove_leftovers(tmp_path)
    assert list_steps(tmp_path) == {7: tmp_path / "step-00000007"}
    hidden.mkdir()
    remove_leftovers(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000007"]
    with pytest.warns(UserWarning, match=r"no manifest\.json"):
        assert latest(tmp_path) is None


def test_failed_rename_of_a_step_saved_again_keeps_its_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial, target = tmp_path / ".step-00000007.partial", tmp_path / "step-00000007"
    partial.mkdir()
    target.mkdir()
    rename = Path.rename

    def fail(self: Path, to: Path) -> Path:
        if self == partial:
            raise OSError("the disk has an error")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="the disk has an error"):
        complete(partial, target)
    assert list_steps(tmp_path) == {7: target}

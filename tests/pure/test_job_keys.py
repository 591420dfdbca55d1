"""The keys of a job: round trips as text and as a private file, and checks."""

import stat
from pathlib import Path

import pytest

from polyrhythm.errors import LaunchError
from polyrhythm.run.coordinator.keys import JobKeys


def test_keys_round_trip_as_text_and_file(tmp_path: Path) -> None:
    keys = JobKeys.new()
    assert JobKeys.parse(keys.text) == keys != JobKeys.new()
    keys.save(tmp_path / "job.keys")
    assert stat.S_IMODE((tmp_path / "job.keys").stat().st_mode) == 0o600
    assert JobKeys.load(tmp_path / "job.keys") == keys


def test_secret_keys_are_absent_from_repr_and_errors() -> None:
    keys = JobKeys.new()
    assert keys.server_secret not in repr(keys)
    assert keys.client_secret not in repr(keys)
    with pytest.raises(LaunchError) as error:
        JobKeys.parse(keys.text.replace(keys.client_public, JobKeys.new().client_public))
    assert keys.client_secret not in str(error.value)


def test_keys_in_use_are_not_overwritten(tmp_path: Path) -> None:
    keys = JobKeys.new()
    keys.save(tmp_path / "job.keys")
    with pytest.raises(LaunchError, match="exists"):
        JobKeys.new().save(tmp_path / "job.keys")
    assert JobKeys.load(tmp_path / "job.keys") == keys
    with pytest.raises(LaunchError, match="No such file"):
        keys.save(tmp_path / "nowhere" / "job.keys")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o644])
def test_key_file_readable_by_others_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "job.keys"
    JobKeys.new().save(path)
    path.chmod(mode)
    with pytest.raises(LaunchError, match=f"mode {mode:04o}"):
        JobKeys.load(path)
    path.chmod(0o400)
    JobKeys.load(path)


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"server_public": 1}', b"[1, 2]"])
def test_invalid_key_file_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "job.keys"
    path.touch(mode=0o600)
    path.write_bytes(content)
    with pytest.raises(LaunchError, match=r"job\.keys: the keys of a job"):
        JobKeys.load(path)


def test_public_key_must_match_secret() -> None:
    keys, other = JobKeys.new(), JobKeys.new()
    with pytest.raises(LaunchError, match="the server's keys"):
        JobKeys.parse(keys.text.replace(keys.server_secret, other.server_secret))
    with pytest.raises(LaunchError, match="the client's keys"):
        JobKeys.parse(keys.text.replace(keys.client_public, "x" * 40))
    with pytest.raises(LaunchError, match="No such file"):
        JobKeys.load(Path("/nowhere/job.keys"))

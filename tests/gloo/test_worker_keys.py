"""Keys of workers: no secret is in the job's store, and only keys of the job are accepted."""

import base64
import json
import logging
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store
from zmq.utils import z85

from polyrhythm.errors import LaunchError, PeerError
from polyrhythm.run.averaging.group_sync import GroupSync
from polyrhythm.run.comm import launch
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.coordinator.keys import KEYS_VARIABLE, JobKeys
from tests.gloo.replicas import run_replicas, train
from tests.gloo.trainer_jobs import plan_of, run_job, trainer

UNPROTECTED = "control messages are not protected"


def use_keys_of(source: str, ctx: DistContext, folder: Path) -> None:
    """Get this process's keys from its launcher, from a file, or from nowhere."""
    if source != "launcher":
        launch._contexts[:] = [replace(ctx, keys=None)]
    if source == "file":
        os.environ[KEYS_VARIABLE] = str(folder / "job.keys")


def record_log() -> list[str]:
    """Return the list that the warnings of this process are added to."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("polyrhythm").addHandler(handler)
    return lines


def secrets_of(sync: GroupSync) -> list[str]:
    keys = sync._rendezvous._keys
    return [keys.client.secret, keys.server.secret]


def stored_values() -> dict[str, bytes]:
    """Return all that the job's store holds."""
    store = _get_default_store()._underlying_non_prefix_store
    return {key: store.get(key) for key in store.list_keys()}


def encodings(secret: str) -> list[bytes]:
    raw = z85.decode(secret)
    encoded = [secret.encode(), raw, raw.hex().encode(), secret.encode().hex().encode()]
    return encoded + [base64.b64encode(data).rstrip(b"=")[:-1] for data in (raw, secret.encode())]


@pytest.mark.parametrize("source", ["launcher", "file", "nowhere"])
def test_store_holds_no_secret_key(source: str, tmp_path: Path) -> None:
    JobKeys.new().save(tmp_path / "job.keys")

    def work(ctx: DistContext) -> tuple[int, list[str], list[str]]:
        use_keys_of(source, ctx, tmp_path)
        with train(ctx, 4, "adaptive") as sync:
            sync.average_all()
            (tmp_path / f"secrets{ctx.rank}").write_text(json.dumps(secrets_of(sync)))
            dist.barrier()
            texts = [(tmp_path / f"secrets{rank}").read_text() for rank in range(3)]
            secrets = [secret for text in texts for secret in json.loads(text)]
            stored = stored_values() if ctx.rank == 0 else {}
            public = sync._rendezvous._keys.client.public.encode()
            dist.barrier()
        if ctx.rank == 0:
            assert any(public in value for value in stored.values()), "it reads the whole store"
        found = [
            name
            for name, value in stored.items()
            for secret in secrets
            if any(text in value or text in name.encode() for text in encodings(secret))
        ]
        return len(stored), found, secrets

    results = run_replicas(3, work, tmp_path)
    num_stored, found, secrets = results[0]
    assert num_stored > 10
    assert found == []
    assert len(set(secrets)) == {"launcher": 3, "file": 2, "nowhere": 3}[source]


@pytest.mark.parametrize("source", ["launcher", "file", "nowhere"])
def test_only_the_leader_of_a_job_without_keys_warns_once(source: str, tmp_path: Path) -> None:
    JobKeys.new().save(tmp_path / "job.keys")

    def work(ctx: DistContext) -> int:
        lines = record_log()
        use_keys_of(source, ctx, tmp_path)
        for name in ("first", "second"):
            train(ctx, 2, "age", name=name).close()
        return sum(UNPROTECTED in line for line in lines)

    assert run_replicas(2, work, tmp_path) == ([1, 0] if source == "nowhere" else [0, 0])


@pytest.mark.parametrize("stranger", [0, 1])
def test_key_of_another_job_is_refused(stranger: int, tmp_path: Path) -> None:
    """As if somebody else had written to the store, or one process had no keys."""
    JobKeys.new().save(tmp_path / "job.keys")

    def work(ctx: DistContext) -> str:
        use_keys_of("nowhere" if ctx.rank == stranger else "file", ctx, tmp_path)
        with pytest.raises((LaunchError, PeerError)) as caught:
            train(ctx, 1, "age")
        return str(caught.value)

    found = run_replicas(2, work, tmp_path)
    expected = f"the key of s0p{stranger} in the job's store is not a key of this job"
    assert expected in found[1 - stranger]
    assert f"it could not start: {expected}" in found[stranger]


def test_key_file_readable_by_others_is_refused(tmp_path: Path) -> None:
    JobKeys.new().save(tmp_path / "job.keys")
    (tmp_path / "job.keys").chmod(0o644)

    def work(ctx: DistContext) -> str:
        use_keys_of("file", ctx, tmp_path)
        with pytest.raises(LaunchError) as caught:
            train(ctx, 1, "age")
        return str(caught.value)

    assert "mode 0644" in run_replicas(1, work, tmp_path)[0]


def test_trainer_checks_keys_before_training_on_all_processes(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> list[str]:
        found = []
        for source in ("file", "nowhere"):  # there is no such file
            os.environ.pop(KEYS_VARIABLE, None)
            use_keys_of(source if ctx.rank else "launcher", ctx, tmp_path)
            with pytest.raises(LaunchError) as caught:
                trainer(plan_of(1, 2), sync="auto")  # decoupled at first, without coordinator
            found.append(caught.value.wrong)
        return found

    for missing, different in run_job(2, work, tmp_path):
        assert missing == f"{tmp_path / 'job.keys'}: No such file or directory"
        assert different.startswith("s0p1 has keys of the job=None, and s0p0 has keys of the job=")


def test_trainer_without_keys_says_so_at_the_start(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> int:
        lines = record_log()
        use_keys_of("nowhere", ctx, tmp_path)
        with trainer(plan_of(1, 2), sync="auto"):
            return sum(UNPROTECTED in line for line in lines)

    assert run_job(2, work, tmp_path) == [1, 0]

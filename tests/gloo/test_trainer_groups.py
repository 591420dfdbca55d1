"""The Trainer in groups: pipelines do not wait for all others, and fast ones compute more."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from polyrhythm.run.comm.launch import DistContext
from polyrhythm.sync.modes import SyncConfig
from tests.gloo.trainer_jobs import BATCH, NUM_SAMPLES, plan_of, run_job, samples, trainer
from tests.gloo.transport_peers import wait_until
from tests.grids import long_except

NUM_STEPS = 2 * NUM_SAMPLES // BATCH  # not quite two epochs


class RecordingDataset:
    """Records which samples are read; slow in one pipeline."""

    def __init__(self, slow: float) -> None:
        self._data, self._slow, self.ids = samples(), slow, list[int]()

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, i: int) -> Any:
        self.ids.append(i)
        time.sleep(self._slow)
        return self._data[i]


def train(
    folder: Path, shape: tuple[int, int], sync: str, **more: Any
) -> list[tuple[list[int], list[int], float, list[float]]]:
    """Return by rank: loaded samples, steps, the evaluation loss, weights."""
    plan = plan_of(*shape)

    def work(ctx: DistContext | None) -> Any:
        assert ctx is not None
        is_slow = ctx.rank // shape[0] == 1
        # Without these two, the first to start might use almost all samples.
        (folder / f"started{ctx.rank}").touch()
        wait_until(lambda: len([*folder.glob("started*")]) == plan.num_workers, "all start")
        data = RecordingDataset(0.02 if is_slow else 0.005)
        with trainer(plan, sync=sync, dataset=data, lr_schedule=None, **more) as made:
            fitted = made.fit(max_steps=NUM_STEPS)
            ids = list(data.ids)
            weights = [value.sum().item() for value in made.model.parameters()]
            loss = made.evaluate(samples())
        return ids, [end.step for end in fitted.steps], loss, weights

    return run_job(plan.num_workers, work, folder)


@pytest.mark.parametrize(
    "sync",
    long_except(["adaptive", "age", "smart", "partial_reduce", "pairwise", "local"], 0, 5),
)
def test_each_sample_is_used_once_per_epoch_and_fast_pipelines_use_more(
    tmp_path: Path, sync: str
) -> None:
    options = {"group_size": 2} if sync == "partial_reduce" else {}
    found = train(tmp_path, (1, 3), SyncConfig(sync, options=options))
    used = Counter(i for ids, _, _, _ in found for i in ids)
    assert sum(used.values()) == NUM_STEPS * BATCH
    num_epochs, rest = divmod(NUM_STEPS * BATCH, NUM_SAMPLES)
    assert len(used) == NUM_SAMPLES
    assert Counter(used.values()) == {num_epochs: NUM_SAMPLES - rest, num_epochs + 1: rest}
    counts = [len(ids) for ids, _, _, _ in found]
    if sync != "smart":  # it keeps fast pipelines from running ahead
        assert counts[1] < max(counts)
    for _, steps, loss, weights in found:
        assert steps == sorted(steps)
        assert loss < 0.8  # 1.4 at first
        assert weights == pytest.approx(found[0][3], rel=1e-4, abs=1e-4)


@pytest.mark.parametrize("sync", long_except(["adaptive", "static"], 0))
def test_stages_of_a_pipeline_use_the_same_samples(tmp_path: Path, sync: str) -> None:
    found = train(tmp_path, (2, 2), sync)
    for pipeline in range(2):
        first, last = found[2 * pipeline : 2 * pipeline + 2]
        assert not last[0]  # the first stage reads for it
        assert first[1] == last[1]
    used = Counter(i for ids, _, _, _ in found[::2] for i in ids)
    assert sum(used.values()) == NUM_STEPS * BATCH
    assert max(used.values()) - min(used.values()) <= 1

"""Checkpoints of a model in stages: any cut restores what any other one has saved."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from polyrhythm.errors import LaunchError, UserError
from polyrhythm.events import EventLog, LogReader
from polyrhythm.run.checkpoint.checkpoints import Checkpoints
from polyrhythm.run.checkpoint.files import read_index
from polyrhythm.run.checkpoint.folder import latest
from polyrhythm.run.checkpoint.manifest import CheckpointError, read_manifest
from polyrhythm.run.checkpoint.restore import restore
from polyrhythm.run.launch import Place
from tests.gloo.checkpointing import (
    OPTIMIZERS,
    Talker,
    chain,
    groups_of,
    part_of_chain,
    part_of_talker,
    state,
    train,
)
from tests.gloo.pipelines import assert_equal, merged, run_alone, run_stages

PARTS = {"chain": part_of_chain, "talker": part_of_talker}
WHOLE = {"chain": chain, "talker": Talker}


@pytest.mark.parametrize(
    ("model", "kind"), [("chain", "adamw"), ("chain", "momentum"), ("talker", "adamw")]
)
def test_a_run_goes_on_to_the_bit_after_every_change_of_cut(
    tmp_path: Path, model: str, kind: str
) -> None:
    """Saved by 2 stages at step 3; by 3 at step 5; by one process at 7; by 2 again."""
    folder = tmp_path / "checkpoints"

    def leg(first: int, last: int) -> Any:
        def work(place: Place) -> list[dict[str, Tensor]]:
            part = PARTS[model](place.rank, place.world_size)
            optimizer = OPTIMIZERS[kind](groups_of(part.module))
            with Checkpoints(folder, tied=part.tied) as checkpoints:
                if first:
                    path = checkpoints.latest()
                    assert path is not None
                    found = checkpoints.restore(path, part.module, optimizer)
                    assert (found.step, found.extra) == (first, {"position": 8 * first})
                restored = state(part.module, optimizer)
                train(part.module, optimizer, first, last)
                ended = state(part.module, optimizer)
                checkpoints.save(last, part.module, optimizer, extra={"position": 8 * last})
                train(part.module, optimizer, last, last + 1)  # must not reach the file
            return [restored, ended]

        return work

    def never_stopped() -> list[dict[str, Tensor]]:
        whole = WHOLE[model]()
        optimizer = OPTIMIZERS[kind](groups_of(whole))
        states = []
        for step in range(9):
            states.append(state(whole, optimizer))
            train(whole, optimizer, step, step + 1)
        return states

    expected = run_alone(never_stopped, tmp_path)
    for first, last, num_stages in ((0, 3, 2), (3, 5, 3), (5, 7, 1), (7, 8, 2)):
        found = run_stages(num_stages, leg(first, last), tmp_path)
        for at, states in zip((first, last), zip(*found, strict=True), strict=True):
            assert_equal(_first_names(merged(states)), _first_names(expected[at]))
    # The whole model in a process that belongs to no job.
    again = run_alone(lambda: _restored_whole(folder, model, kind), tmp_path)
    assert_equal(_first_names(again), _first_names(expected[8]))


def _first_names(states: dict[str, Tensor]) -> dict[str, Tensor]:
    """Without the copy that a stage has of what another one holds under another name."""
    return {k: v for k, v in states.items() if not k.startswith("head.weight")}


def _restored_whole(folder: Path, model: str, kind: str) -> dict[str, Tensor]:
    whole = WHOLE[model]()
    optimizer = OPTIMIZERS[kind](groups_of(whole))
    path = latest(folder)
    assert path is not None
    restore(path, whole, optimizer)
    return state(whole, optimizer)


def save_alone(folder: Path, module: nn.Module, step: int = 1, **more: Any) -> Path:
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(step, module, **more)
        outcome = checkpoints.wait()
    assert outcome is not None
    assert outcome.path is not None, outcome.why
    return outcome.path


def test_tied_weights_are_saved_once_and_restored_on_both_stages(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    def work(place: Place) -> dict[str, Tensor]:
        part = part_of_talker(place.rank, place.world_size)
        optimizer = AdamW(part.module.parameters())
        train(part.module, optimizer, 0, 2)
        with Checkpoints(folder, tied=part.tied) as checkpoints:
            checkpoints.save(2, part.module, optimizer)
            checkpoints.wait()
            train(part.module, optimizer, 2, 3)
            checkpoints.restore(folder / "step-00000002", part.module, optimizer)
        return state(part.module, optimizer)

    first, last = run_stages(2, work, tmp_path)
    assert_equal(last["head.weight"], first["embed.weight"])
    assert_equal(last["head.weight: exp_avg"], first["embed.weight: exp_avg"])
    manifest = read_manifest(folder / "step-00000002")
    assert manifest.model.tied == {"head.weight": "embed.weight"}
    index = read_index(folder / "step-00000002")
    assert not [name for name in index.state_dict_metadata if "head" in name]
    written = {at.fqn: stored.relative_path for at, stored in index.storage_data.items()}
    assert written["model.embed.weight"] == "__0_0.distcp"
    assert written["optimizer.embed.weight.exp_avg"] == "__0_0.distcp"
    assert written["model.norm.weight"] == "__1_0.distcp"


def test_saves_leave_the_newest_and_an_event_each(tmp_path: Path) -> None:
    def work() -> list[str]:
        with EventLog(tmp_path / "log.jsonl") as log, Checkpoints(tmp_path, keep=2, log=log) as it:
            for step in (10, 20, 30):
                assert it.save(step, chain(), patient=True)
        return sorted(path.name for path in tmp_path.glob("step-*"))

    assert run_alone(work, tmp_path) == ["step-00000020", "step-00000030"]
    events = list(LogReader(tmp_path / "log.jsonl").new())
    assert [(event.kind, event.name, event.step) for event in events] == [
        ("checkpoint", "saved", step) for step in (10, 20, 30)
    ]


def test_another_model_is_refused_on_all_stages_and_changes_nothing(tmp_path: Path) -> None:
    save_alone(tmp_path, Talker(width=4))

    def work(place: Place) -> str:
        part = part_of_talker(place.rank, place.world_size)
        before = {k: v.clone() for k, v in part.module.state_dict().items()}
        try:
            with Checkpoints(tmp_path, tied=part.tied) as checkpoints:
                checkpoints.restore(tmp_path / "step-00000001", part.module)
        except CheckpointError as error:
            assert_equal(dict(part.module.state_dict()), before)
            return str(error)
        return "accepted"

    for said in run_stages(2, work, tmp_path):
        assert "its embed.weight is float32[11, 4]" in said
        assert "float32[11, 8]" in said


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda model: model.append(nn.Linear(2, 2)), "it has no 6.weight"),
        (lambda model: model.double(), r"its 0.weight is float32\[5, 6\]"),
        (lambda model: model.__delitem__(5), "it has 5.weight"),
    ],
)
def test_the_first_difference_is_named(tmp_path: Path, change: Any, says: str) -> None:
    path = save_alone(tmp_path, chain())
    model = chain()
    change(model)
    with pytest.raises(CheckpointError, match=says):
        restore(path, model)


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    def said() -> list[str]:
        model = chain()
        path = save_alone(tmp_path, model, optimizer=AdamW(groups_of(model)))
        bare = save_alone(tmp_path, model, step=2)
        wide = [p for p in model.parameters() if p.dim() > 1]
        found = []
        for where, optimizer in (
            (path, SGD(model.parameters())),
            (path, AdamW(model.parameters())),
            (bare, AdamW(model.parameters())),
            (path, AdamW([torch.zeros(3, requires_grad=True)])),
        ):
            try:
                restore(where, model, optimizer)
                found.append("accepted")
            except UserError as error:
                found.append(str(error))
        restore(path, model, AdamW(wide))  # the others are frozen by now
        return found

    texts = run_alone(said, tmp_path)
    for text, says in zip(
        texts,
        ("option amsgrad", "different options", "without an optimizer", "the module has not"),
        strict=True,
    ):
        assert says in text


def test_stages_that_do_not_see_one_folder_say_so(tmp_path: Path) -> None:
    def work(place: Place) -> str:
        try:
            Checkpoints(tmp_path / f"of-rank-{place.rank}", deadline=20)
        except LaunchError as error:
            return str(error)
        return "accepted"

    for said in run_stages(2, work, tmp_path):
        assert "stage 1 does not see" in said


def test_a_folder_that_cannot_be_made_is_refused_by_all_stages(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def work(place: Place) -> list[str]:
        found = []
        for folder, ranks in ((tmp_path / "file", [0, 1]), (tmp_path, [1 - place.rank])):
            try:
                Checkpoints(folder, group=ranks)
            except LaunchError as error:
                found.append(error.wrong)
        return found

    for rank, (no_folder, no_member) in enumerate(run_stages(2, work, tmp_path)):
        assert "stage 0 cannot write there: File exists" in no_folder
        assert f"in the process of rank {rank}" in no_member


def test_a_file_that_is_damaged_is_seen_by_whichever_stage_reads_it(tmp_path: Path) -> None:
    """And all go back to the one before."""
    folder = tmp_path / "checkpoints"

    def work(place: Place) -> list[str]:
        part = part_of_chain(place.rank, place.world_size)
        with Checkpoints(folder) as checkpoints, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in (1, 2):
                assert checkpoints.save(step, part.module, patient=True)
            checkpoints.wait()
            torch.distributed.barrier()
            if place.rank == 0:
                file = folder / "step-00000002" / "__1_0.distcp"
                content = bytearray(file.read_bytes())
                content[len(content) // 2] ^= 1
                file.write_bytes(content)
            torch.distributed.barrier()
            found = checkpoints.latest()
            assert found is not None
            try:
                checkpoints.restore(folder / "step-00000002", part.module)
            except CheckpointError as error:
                return [found.name, str(error), *(str(each.message) for each in caught)]
        return []

    first, second = run_stages(2, work, tmp_path)
    for name, refused, *_ in (first, second):
        assert name == "step-00000001"
        assert "__1_0.distcp has other contents" in refused
    assert ["__1_0.distcp has other contents" in text for text in first[2:]] == [True]
    assert second[2:] == []

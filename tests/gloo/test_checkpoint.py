"""Checkpoints of a model in stages: any split restores what any other split has saved."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW

from polyrhythm.errors import LaunchError, UserError
from polyrhythm.events import LogReader
from polyrhythm.run.checkpoint.checkpointer import Checkpointer
from polyrhythm.run.checkpoint.folder import latest
from polyrhythm.run.checkpoint.manifest import CheckpointError, read_manifest
from polyrhythm.run.checkpoint.state import StageModel, restore
from polyrhythm.run.comm.launch import DistContext
from polyrhythm.sinks.jsonl import EventLog
from tests.gloo.checkpoint_models import (
    OPTIMIZERS,
    TiedLanguageModel,
    param_groups,
    sequential_model,
    sequential_stage,
    state,
    tied_model_stage,
    train,
)
from tests.gloo.pipelines import assert_equal, merged, run_single_process, run_stages
from tests.grids import long_except

PARTS = {"sequential": sequential_stage, "tied": tied_model_stage}
WHOLE = {"sequential": sequential_model, "tied": TiedLanguageModel}


@pytest.mark.parametrize(
    ("model", "kind"),
    long_except([("sequential", "adamw"), ("sequential", "momentum"), ("tied", "adamw")], 2),
)
def test_resume_with_another_split_is_bit_identical(tmp_path: Path, model: str, kind: str) -> None:
    """Save with 2 stages at step 3, 3 stages at step 5, one process at 7, 2 stages again."""
    folder = tmp_path / "checkpoints"

    def resume(first: int, last: int) -> Any:
        def work(ctx: DistContext) -> list[dict[str, Tensor]]:
            part = PARTS[model](ctx.rank, ctx.world_size)
            optimizer = OPTIMIZERS[kind](param_groups(part.module))
            with Checkpointer(folder, tied=part.tied) as checkpoints:
                if first:
                    path = checkpoints.latest()
                    assert path is not None
                    found = checkpoints.restore(path, part.module, optimizer)
                    assert (found.step, found.extra) == (first, {"position": 8 * first})
                restored = state(part.module, optimizer)
                train(part.module, optimizer, first, last)
                trained = state(part.module, optimizer)
                checkpoints.save(last, part.module, optimizer, extra={"position": 8 * last})
                train(part.module, optimizer, last, last + 1)  # must not change the file
            return [restored, trained]

        return work

    def train_without_stop() -> list[dict[str, Tensor]]:
        whole = WHOLE[model]()
        optimizer = OPTIMIZERS[kind](param_groups(whole))
        states = []
        for step in range(9):
            states.append(state(whole, optimizer))
            train(whole, optimizer, step, step + 1)
        return states

    expected = run_single_process(train_without_stop, tmp_path)
    for first, last, num_stages in ((0, 3, 2), (3, 5, 3), (5, 7, 1), (7, 8, 2)):
        found = run_stages(num_stages, resume(first, last), tmp_path)
        for step, states in zip((first, last), zip(*found, strict=True), strict=True):
            assert_equal(_first_names(merged(states)), _first_names(expected[step]))
    # The whole model in a process without a job.
    again = run_single_process(lambda: _restored_whole(folder, model, kind), tmp_path)
    assert_equal(_first_names(again), _first_names(expected[8]))


def _first_names(states: dict[str, Tensor]) -> dict[str, Tensor]:
    """Drop the copy of a tied weight that the last stage holds under its second name."""
    return {k: v for k, v in states.items() if not k.startswith("head.weight")}


def _restored_whole(folder: Path, model: str, kind: str) -> dict[str, Tensor]:
    whole = WHOLE[model]()
    optimizer = OPTIMIZERS[kind](param_groups(whole))
    path = latest(folder)
    assert path is not None
    restore(path, whole, optimizer)
    return state(whole, optimizer)


def save_single_process(folder: Path, module: nn.Module, step: int = 1, **more: Any) -> Path:
    with Checkpointer(folder) as checkpoints:
        checkpoints.save(step, module, **more)
        outcome = checkpoints.wait()
    assert outcome is not None
    assert outcome.path is not None, outcome.why
    return outcome.path


def test_tied_weights_are_saved_once_and_restored_on_both_stages(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"

    def work(ctx: DistContext) -> dict[str, Tensor]:
        part = tied_model_stage(ctx.rank, ctx.world_size)
        optimizer = AdamW(part.module.parameters())
        train(part.module, optimizer, 0, 2)
        with Checkpointer(folder, tied=part.tied) as checkpoints:
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
    files = {name: set(file.tensors) for name, file in manifest.files.items()}
    assert files.keys() == {"stage-0.safetensors", "stage-1.safetensors"}
    assert {"model.embed.weight", "optimizer.embed.weight.exp_avg"} <= files["stage-0.safetensors"]
    assert "model.norm.weight" in files["stage-1.safetensors"]
    assert not [name for names in files.values() for name in names if "head" in name]


@pytest.mark.parametrize("value", [3e38, float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64], ids=str)
def test_weights_are_finite_if_each_number_is(
    dtype: torch.dtype, value: float, tmp_path: Path
) -> None:
    """Even if their sum is not."""
    module = nn.Linear(2, 1, bias=False)
    module.weight = nn.Parameter(torch.full((1, 2), value, dtype=dtype))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Checkpointer(tmp_path) as checkpoints:
            checkpoints.save(1, module, SGD(module.parameters(), lr=0.1), blocking=True)
    assert read_manifest(tmp_path / "step-00000001").is_finite is (value == 3e38)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_weights_in_float8_are_checked(dtype: torch.dtype, value: float, tmp_path: Path) -> None:
    module = nn.Linear(2, 1, bias=False)
    module.weight = nn.Parameter(torch.full((1, 2), value).to(dtype))
    optimizer = SGD(module.parameters(), lr=0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Checkpointer(tmp_path) as checkpoints:
            checkpoints.save(1, module, optimizer, blocking=True)
    assert read_manifest(tmp_path / "step-00000001").is_finite is (value == 1.0)


def test_save_keeps_newest_and_logs_an_event(tmp_path: Path) -> None:
    def work() -> list[str]:
        with (
            EventLog(tmp_path / "log.jsonl") as log,
            Checkpointer(tmp_path, keep_last=2, log=log) as it,
        ):
            for step in (10, 20, 30):
                assert it.save(step, sequential_model(), blocking=True)
        return sorted(path.name for path in tmp_path.glob("step-*"))

    assert run_single_process(work, tmp_path) == ["step-00000020", "step-00000030"]
    events = list(LogReader(tmp_path / "log.jsonl").new())
    assert [(event.kind, event.name, event.step) for event in events] == [
        ("checkpoint", "saved", step) for step in (10, 20, 30)
    ]


def test_checkpoint_of_another_model_is_rejected_on_all_stages(tmp_path: Path) -> None:
    save_single_process(tmp_path, TiedLanguageModel(width=4))

    def work(ctx: DistContext) -> str:
        part = tied_model_stage(ctx.rank, ctx.world_size)
        before = {k: v.clone() for k, v in part.module.state_dict().items()}
        try:
            with Checkpointer(tmp_path, tied=part.tied) as checkpoints:
                checkpoints.restore(tmp_path / "step-00000001", part.module)
        except CheckpointError as error:
            assert_equal(dict(part.module.state_dict()), before)
            return str(error)
        return "accepted"

    for error_text in run_stages(2, work, tmp_path):
        assert "its embed.weight is float32[11, 4]" in error_text
        assert "float32[11, 8]" in error_text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.append(nn.Linear(2, 2)), "it has no 6.weight"),
        (lambda model: model.double(), r"its 0.weight is float32\[5, 6\]"),
        (lambda model: model.__delitem__(5), "it has 5.weight"),
    ],
)
def test_model_mismatch_error_names_first_difference(
    tmp_path: Path, change: Any, message: str
) -> None:
    path = save_single_process(tmp_path, sequential_model())
    model = sequential_model()
    change(model)
    with pytest.raises(CheckpointError, match=message):
        restore(path, model)


def test_checkpoint_of_another_optimizer_is_rejected(tmp_path: Path) -> None:
    def error_text() -> list[str]:
        model = sequential_model()
        path = save_single_process(tmp_path, model, optimizer=AdamW(param_groups(model)))
        bare = save_single_process(tmp_path, model, step=2)
        wide = [p for p in model.parameters() if p.dim() > 1]
        found = []
        for checkpoint, optimizer in (
            (path, SGD(model.parameters())),
            (path, AdamW(model.parameters())),
            (bare, AdamW(model.parameters())),
            (path, AdamW([torch.zeros(3, requires_grad=True)])),
        ):
            try:
                restore(checkpoint, model, optimizer)
                found.append("accepted")
            except UserError as error:
                found.append(str(error))
        restore(path, model, AdamW(wide))  # fewer parameters, as if the others were frozen
        return found

    errors = run_single_process(error_text, tmp_path)
    for text, message in zip(
        errors,
        ("option amsgrad", "different options", "without an optimizer", "the module has not"),
        strict=True,
    ):
        assert message in text


class Words(nn.Module):
    """Its forward shortens rows of both tables; the head has the weight of one."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 8)
        self.table, self.bag = nn.Embedding(8, 4, max_norm=0.1), nn.EmbeddingBag(8, 4, max_norm=0.1)
        self.plain, self.table.weight = nn.Embedding(8, 4), self.head.weight

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.table(ids) + self.bag(ids[:, None]) + self.plain(ids)
        logits: Tensor = self.head(hidden)
        return logits


def test_copies_that_overlap_the_next_forward_are_of_weights_that_it_does_not_change() -> None:
    module = Words()
    module.plain.weight.requires_grad_(False)
    before = {name: value.clone() for name, value in module.state_dict().items()}
    module(torch.arange(8))
    model = StageModel.of(module)
    changed = {name for name, value in module.state_dict().items() if not value.equal(before[name])}
    assert changed == {"head.weight", "table.weight", "bag.weight"}
    assert model.constant_in_forward == {"model.head.bias"}
    assert model.trained == {"model.head.bias", "model.head.weight", "model.bag.weight"}


def test_folder_not_shared_by_all_stages_is_rejected(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> str:
        try:
            Checkpointer(tmp_path / f"of-rank-{ctx.rank}", timeout=20)
        except LaunchError as error:
            return str(error)
        return "accepted"

    for error_text in run_stages(2, work, tmp_path):
        assert "stage 1 does not see" in error_text


def test_unwritable_folder_is_rejected_by_all_stages(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def work(ctx: DistContext) -> list[str]:
        found = []
        for folder, ranks in ((tmp_path / "file", [0, 1]), (tmp_path, [1 - ctx.rank])):
            try:
                Checkpointer(folder, process_group=ranks)
            except LaunchError as error:
                found.append(error.wrong)
        return found

    for rank, (no_folder, no_member) in enumerate(run_stages(2, work, tmp_path)):
        assert "stage 0 cannot write there: File exists" in no_folder
        assert f"in the process of rank {rank}" in no_member


def test_damaged_file_is_found_by_any_stage_and_reported_to_all(tmp_path: Path) -> None:
    """All stages then fall back to the previous checkpoint."""
    folder = tmp_path / "checkpoints"

    def work(ctx: DistContext) -> list[str]:
        part = sequential_stage(ctx.rank, ctx.world_size)
        with Checkpointer(folder) as checkpoints, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for step in (1, 2):
                assert checkpoints.save(step, part.module, blocking=True)
            checkpoints.wait()
            torch.distributed.barrier()
            if ctx.rank == 0:
                file = folder / "step-00000002" / "stage-1.safetensors"
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
        assert "stage-1.safetensors has other contents" in refused
    assert ["stage-1.safetensors has other contents" in text for text in first[2:]] == [True]
    assert second[2:] == []

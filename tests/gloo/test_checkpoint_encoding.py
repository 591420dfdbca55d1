"""Tensors and nested state in the safetensors format: what is written is read back exactly."""

import json
import pickle
import random
import threading
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import LBFGS, SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR, OneCycleLR, SequentialLR

from polyrhythm.run.checkpoint import state as checkpoint_state
from polyrhythm.run.checkpoint.checkpointer import Checkpointer
from polyrhythm.run.checkpoint.encoding import (
    TensorReader,
    decode_state,
    encode_state,
    in_file_order,
    joined,
    write_tensors,
)
from polyrhythm.run.checkpoint.manifest import MANIFEST, CheckpointError, read_manifest, to_text
from polyrhythm.run.checkpoint.state import Staging, restore
from polyrhythm.run.comm.launch import DistContext
from tests.gloo.checkpoint_models import sequential_model, sequential_stage, train
from tests.gloo.pipelines import assert_equal, run_stages

DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.complex64, torch.bool),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16, torch.uint32),
    *(torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2),
]

scalars = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.floats()
hashable = st.recursive(
    scalars.filter(lambda value: value == value),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=3,
)
states = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(hashable, inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$", "items", "name"]), inner, max_size=3)
        | st.dictionaries(st.text(), inner, max_size=3).map(OrderedDict)
    ),
    max_leaves=10,
)


@given(states)
def test_values_in_containers_survive_with_their_types(state: Any) -> None:
    assert repr(decode_state(encode_state(state))) == repr(state)


def tensors_of_all_dtypes() -> dict[str, Tensor]:
    tensors = {}
    for dtype in DTYPES:
        values = torch.arange(6).to(dtype)
        tensors |= {f"{dtype}": values.reshape(2, 3), f"{dtype} 0-dim": values[1]}
        tensors[f"{dtype} empty"] = values[:0].reshape(0, 4)
        tensors[f"{dtype} strided"] = values.reshape(2, 3).t()
    return tensors


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    raw = [value.contiguous().reshape(-1).view(torch.uint8) for value in (found, expected)]
    assert torch.equal(*raw)


def test_tensors_of_all_dtypes_survive_in_files_and_in_encoded_state(tmp_path: Path) -> None:
    tensors = tensors_of_all_dtypes()
    file = write_tensors(tmp_path / "file", tensors)
    reader, others = TensorReader(tmp_path, {"file": file}), load_file(tmp_path / "file")
    decoded = decode_state(encode_state(tensors))
    assert list(decoded) == list(tensors)
    for name, value in tensors.items():
        for found in (reader.read(name), others[name], decoded[name]):
            assert_same(found, value)


def test_staged_copies_follow_each_other_as_in_the_file() -> None:
    """So a few calls write them, and training seldom waits for the interpreter lock."""
    first, memory = tensors_of_all_dtypes(), Staging()
    for tensors in (
        first,
        first,
        {**first, "torch.bool": torch.ones(3, dtype=torch.bool)},
    ):  # the last has another shape
        copies = memory.copy_to_host(tensors).wait()
        assert list(copies) == [name for name, _ in in_file_order(tensors)]
        for name, value in tensors.items():
            assert_same(copies[name], value)
        assert len(list(joined(copies.values()))) == len(DTYPES)


@pytest.mark.parametrize("num_unread", [0, 1])
def test_tensors_are_joined_only_if_they_follow_each_other(num_unread: int) -> None:
    memory = torch.arange(12.0)
    gap, other = memory[num_unread:], torch.arange(2.0)
    sign = torch.imag(torch.tensor([1 + 2j]).conj())  # a view that negates when it is read
    tensors = [
        gap[:2],
        gap[2:2],
        gap[2:6].view(2, 2),
        gap[5:7],
        other,
        memory[2:4],
        gap[:4:2],
        sign,
    ]
    found = list(joined(tensors))
    assert torch.equal(torch.cat(found), torch.cat([each.flatten() for each in tensors]))
    assert [each.numel() for each in found] == [6, 2, 2, 2, 2, 1]
    assert list(joined([])) == list(joined([gap[:0]])) == []


def test_tensors_of_several_storages_in_the_same_memory_are_written() -> None:
    numbers = np.arange(10, dtype=np.float32)
    state = {"first": torch.from_numpy(numbers[:5]), "rest": torch.from_numpy(numbers)[5:]}
    for name, value in decode_state(encode_state(state)).items():
        assert_same(value, state[name])


def test_large_copies_have_blocks_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_state, "_BLOCK_SIZE", 64)
    tensors = {str(size): torch.rand(size) for size in (4, 12, 1, 40, 0, 15)}
    copies = Staging().copy_to_host(tensors).wait()
    assert [each.numel() for each in joined(copies.values())] == [16, 1, 40, 15]
    for name, value in tensors.items():
        assert torch.equal(copies[name], value)


def test_states_of_random_generators_survive() -> None:
    legacy = np.random.RandomState(3)
    state = {
        "python": random.Random(3).getstate(),
        "numpy": np.random.default_rng(3).bit_generator.state,  # integers of 128 bits
        "torch": torch.Generator().manual_seed(3).get_state(),
        "legacy": legacy.get_state(),
        "scalar": np.float32(0.1),
    }
    found = decode_state(encode_state(state))
    assert (found["python"], found["numpy"]) == (state["python"], state["numpy"])
    assert torch.equal(found["torch"], state["torch"])
    assert type(found["scalar"]) is np.float32
    expected = legacy.random_sample(4)
    legacy.set_state(found["legacy"])
    assert np.array_equal(legacy.random_sample(4), expected)


@pytest.mark.parametrize(
    "scheduler_fn",
    [
        lambda optimizer: MultiStepLR(optimizer, [2, 5]),
        lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=9),
        lambda optimizer: SequentialLR(
            optimizer, [LambdaLR(optimizer, lambda step: 0.5), MultiStepLR(optimizer, [3])], [2]
        ),
    ],
)
def test_scheduler_continues_from_encoded_state(scheduler_fn: Any) -> None:
    def make() -> Any:
        return scheduler_fn(SGD([nn.Parameter(torch.zeros(2))], lr=0.1, momentum=0.9))

    first, second = make(), make()
    for _ in range(4):
        first.optimizer.step()
        first.step()
    state = first.state_dict()
    found = decode_state(encode_state(state))
    assert repr(found) == repr(state)
    second.load_state_dict(found)
    second.optimizer.load_state_dict(first.optimizer.state_dict())  # the rates it starts from
    second.optimizer.step()
    second.step()
    first.step()
    assert second.get_last_lr() == first.get_last_lr()


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"a": [1, (2, threading.Lock())]}, r"the state\['a'\]\[1\]\[1\] is a lock"),
        ({"phase": 1j}, r"the state\['phase'\] is a complex"),
        ({7: {"x": Path("y")}}, r"the state\[7\]\['x'\] is a PosixPath"),
        (torch.zeros(2, device="meta"), "the state is a tensor without memory"),
        ([torch.eye(2).to_sparse()], r"the state\[0\] is a tensor of torch.float32, torch.sparse"),
        ({"names": np.array(["a"])}, r"the state\['names'\] is a numpy array of <U1"),
    ],
)
def test_refused_value_is_named_with_type_and_path(state: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        encode_state(state)


def test_endless_state_is_refused() -> None:
    state: list[Any] = []
    state.append({"whole": state})
    with pytest.raises(CheckpointError, match="contains itself"):
        encode_state(state)


@pytest.mark.parametrize("data", [b"", b"text", encode_state([1])[:-1], pickle.dumps([1])])
def test_bytes_that_are_no_state_are_an_error(data: bytes) -> None:
    with pytest.raises(CheckpointError, match="the rates: SafetensorError"):
        decode_state(data, "the rates")


class CountingAdamW(AdamW):
    """Adds values of all kinds to the state."""

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for state in self.state.values():
            count = state.get("count", 0) + 1
            state |= {"count": count, "best": float("inf"), "by_step": {count: (count, [0.5])}}
            state["history"] = [torch.full((2,), float(count)), (torch.tensor(count), None)]
            state["seen"] = Counter([count, count])
        return loss


def saved_and_restored(folder: Path, optimizer_fn: Any) -> tuple[Any, Any]:
    """Return the state_dict of an optimizer that loads another's, and of one that restores it."""
    model = sequential_model()
    optimizer = optimizer_fn(model)
    with Checkpointer(folder) as checkpoints:
        checkpoints.save(1, model, optimizer)
        assert checkpoints.wait().is_saved
    again = sequential_model()
    restored = optimizer_fn(again)
    restore(folder / "step-00000001", again, restored)
    loaded = optimizer_fn(sequential_model())
    loaded.load_state_dict(optimizer.state_dict())
    return loaded.state_dict(), restored.state_dict()


def test_optimizer_state_of_any_kind_is_restored_exactly(tmp_path: Path) -> None:
    def make(model: nn.Module) -> CountingAdamW:
        optimizer = CountingAdamW(model.parameters(), lr=0.1)
        train(model, optimizer, 0, 2)
        return optimizer

    loaded, found = saved_and_restored(tmp_path, make)
    assert repr(found) == repr(loaded)


def test_optimizer_with_lists_of_tensors_is_restored_exactly(tmp_path: Path) -> None:
    def make(model: nn.Sequential) -> LBFGS:
        optimizer = LBFGS(model[0].parameters(), max_iter=3)
        inputs = torch.ones(2, 6)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model[0](inputs).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        return optimizer

    loaded, found = saved_and_restored(tmp_path, make)
    assert loaded["state"][0]["old_dirs"]
    assert repr(found) == repr(loaded)


def saved_checkpoint(folder: Path) -> Path:
    model = sequential_model()
    optimizer = AdamW(model.parameters())
    train(model, optimizer, 0, 1)
    with Checkpointer(folder) as checkpoints:
        checkpoints.save(1, model, optimizer)
    return folder / "step-00000001"


def rewrite_manifest(path: Path, change: Any) -> None:
    """Change the manifest as its writer could have: with a valid hash."""
    manifest = read_manifest(path)
    table = {name: getattr(manifest, name) for name in manifest.__struct_fields__}
    change(table)
    (path / MANIFEST).write_text(to_text(type(manifest)(**table)))


def without_tensor(path: Path) -> None:
    """The manifest names a file for a tensor that is not in it."""
    file = path / "stage-0.safetensors"
    tensors = load_file(file)
    del tensors["optimizer.4.bias.exp_avg"]
    file.unlink()
    write_tensors(file, tensors)


def without_file_of_tensor(path: Path) -> None:
    rewrite_manifest(path, lambda table: table.update(files={}))


def with_other_shape(path: Path) -> None:
    file = path / "stage-0.safetensors"
    tensors = load_file(file)
    tensors["model.5.weight"] = torch.zeros(1)
    file.unlink()
    write_tensors(file, tensors)


def truncated(path: Path) -> None:
    file = path / "stage-0.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def other_contents(path: Path) -> None:
    (path / "stage-0.safetensors").write_text("text")


def removed(path: Path) -> None:
    (path / "stage-0.safetensors").unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_tensor, "stage-0.safetensors: .*exp_avg"),
        (without_file_of_tensor, "manifest.json names no file for model.0.weight"),
        (with_other_shape, r"model.5.weight is float32\[1\], and float32\[4\] in manifest.json"),
        (truncated, "stage-0.safetensors: .*(incomplete|not fully)"),
        (other_contents, "stage-0.safetensors: .*header"),
        (removed, "stage-0.safetensors: No such file"),
    ],
)
def test_damage_is_named_and_changes_nothing_without_verify(
    tmp_path: Path, damage: Any, message: str
) -> None:
    path = saved_checkpoint(tmp_path)
    damage(path)
    model = nn.Sequential(*sequential_model())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = AdamW(model.parameters())
    with pytest.raises(CheckpointError, match=message):
        restore(path, model, optimizer, verify=False)
    assert_equal(dict(model.state_dict()), before)
    assert not optimizer.state


def refuse(*_: Any, **__: Any) -> NoReturn:
    raise AssertionError("something is unpickled")


def test_nothing_is_unpickled_to_save_and_restore(tmp_path: Path) -> None:
    def work(ctx: DistContext) -> int:
        for name in ("load", "loads", "Unpickler", "_Unpickler"):
            setattr(pickle, name, refuse)
        torch.load = refuse
        part = sequential_stage(ctx.rank, ctx.world_size)
        optimizer = AdamW(part.module.parameters())
        train(part.module, optimizer, 0, 1)
        with Checkpointer(tmp_path / "checkpoints") as checkpoints:
            checkpoints.save(1, part.module, optimizer)
            assert checkpoints.wait().is_saved
            path = checkpoints.latest()
            assert path is not None
            return checkpoints.restore(path, part.module, optimizer).step

    assert run_stages(4, work, tmp_path) == [1] * 4
    files = (tmp_path / "checkpoints" / "step-00000001").iterdir()
    assert {path.suffix for path in files} == {".safetensors", ".json"}
    json.loads((tmp_path / "checkpoints" / "step-00000001" / MANIFEST).read_text())

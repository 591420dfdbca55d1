"""A profile as a user makes it: sizes are exact, times follow the work, bad models are rejected."""

import json
import weakref
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from polyrhythm.describe.model import Layer, ModelProfile
from polyrhythm.errors import DescriptionError
from polyrhythm.run.profile.profile import (
    ProfiledModel,
    Timed,
    measure_layers,
    time_microbatch,
    times_in_training,
)
from tests.gloo.commands import run_forked

pytestmark = pytest.mark.timeout(100)

CPU = torch.device("cpu")
MODULE = """
import dataclasses
import time
import torch
from torch import nn

class Slow(nn.Module):
    def forward(self, x):
        time.sleep(0.03)
        return x + 0

def build():
    layers = [nn.Linear(64, 128), nn.ReLU(inplace=True), Slow(), nn.Linear(128, 10)]
    return nn.Sequential(*layers), torch.randn(8, 64)

def listed():
    model, example = build()
    return list(model), (example,)

def nothing():
    pass

def alone():
    return nn.Linear(1, 1)

def function():
    return [torch.relu], torch.ones(3)

def empty():
    return nn.Sequential(), torch.ones(3)

def no_example():
    return nn.Sequential(nn.ReLU()), 5

def scalar():
    return nn.Sequential(nn.ReLU()), torch.tensor(5.0)

def misfit():
    return nn.Sequential(nn.ReLU(), nn.Linear(3, 4)), torch.ones(2, 7)

def raising():
    return 1 / 0

def leaving():
    raise SystemExit("no such file")

class Fixed(nn.Module):
    def forward(self, x):
        return x.view(4, 2)

@dataclasses.dataclass
class Output:
    x: torch.Tensor

class Wrapping(nn.Module):
    def forward(self, x):
        return Output(x * 2)

class Half(nn.Module):
    def forward(self, x):
        return x, Output(x)

class Nothing(nn.Module):
    def forward(self, x):
        return None

def wrapping():
    return [nn.Linear(2, 2), Wrapping()], torch.ones(4, 2)

def half():
    return [Half()], torch.ones(4, 2)

def returning_nothing():
    return [Nothing()], torch.ones(4, 2)

def meta():
    with torch.device("meta"):
        return [nn.Linear(2, 2)], torch.ones(4, 2)

def inferring():
    with torch.inference_mode():
        return [nn.Linear(2, 2)], torch.ones(4, 2)

def immovable():
    model, example = build()
    def fail(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")
    model[0].to = fail
    return model, example

def norm():
    return [nn.Linear(2, 2), nn.BatchNorm1d(2)], torch.ones(4, 2)

def ungraded():
    torch.set_grad_enabled(False)
    return [nn.Linear(64, 64)], torch.ones(4, 64)

def fixed():
    return [Fixed()], torch.ones(4, 2)

def with_loss():
    layers = [nn.Linear(64, 128), nn.Linear(128, 10)]
    return layers, torch.randn(8, 64), lambda output: output.float().square().mean()

number = 7
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "toy.py").write_text(MODULE)
    (tmp_path / "broken.py").write_text("import no_such_package\n")
    (tmp_path / "script.py").write_text("import sys\nsys.exit(3)\n")
    return tmp_path


@pytest.mark.parametrize(("factory", "ending"), [("build", "json"), ("listed", "toml")])
def test_profile_of_a_model_is_written_and_loads(folder: Path, factory: str, ending: str) -> None:
    out = f"p.{ending}"
    done = run_forked("profile", f"toy:{factory}", "-o", out, "--repeat", "5", cwd=folder)
    assert done.returncode == 0, done.stderr
    profile = ModelProfile.load(folder / out)
    assert profile.name == f"toy:{factory}"
    assert "torch" in profile.source
    assert profile.measured_at
    assert profile.flops is not None
    assert profile.flops > 1e6
    assert profile.flops_dtype == "float32"
    names = ["0.Linear", "1.ReLU", "2.Slow", "3.Linear"]
    assert [layer.name for layer in profile.layers] == names
    assert profile.microbatch_size == 8
    assert profile.microbatch_sizes == (1, 2, 4, 8)
    assert [layer.parameter_bytes for layer in profile.layers] == [4 * 65 * 128, 0, 0, 4 * 1290]
    for size in profile.microbatch_sizes:
        layers = profile.at(size).layers
        assert [x.activation_bytes for x in layers] == [4 * size * n for n in (128, 128, 128, 10)]
        # The ReLU stores its output; the last layer stores Slow's output, a copy of it.
        assert [x.stored_bytes for x in layers] == [4 * size * n for n in (64, 128, 0, 128)]
        assert layers[2].forward >= 0.03
        assert layers[2].forward > 2 * max(layers[i].forward for i in (1, 3))
    assert f"written to {out}" in done.stdout
    assert "2.Slow" in done.stdout
    assert "all layers, by micro-batch size" in done.stdout


def test_sizes_may_exceed_the_example(folder: Path) -> None:
    done = run_forked("profile", "toy:build", "--sizes", "3", "16", "--repeat", "1", cwd=folder)
    assert done.returncode == 0, done.stderr
    profile = ModelProfile.load(folder / "profile.json")
    assert (profile.microbatch_size, profile.microbatch_sizes) == (3, (3, 16))
    assert profile.at(16).layers[0].activation_bytes == 16 * 512


def test_weights_that_autocast_copies_are_not_stored_per_microbatch(folder: Path) -> None:
    options = ["--sizes", "8", "16", "--repeat", "1", "--autocast", "bfloat16"]
    done = run_forked("profile", "toy:build", *options, cwd=folder)
    assert done.returncode == 0, done.stderr
    profile = ModelProfile.load(folder / "profile.json")
    assert profile.flops_dtype == "bfloat16"
    # In two bytes; no backward needs a bias.
    copies = [2 * 64 * 128, None, None, 2 * 128 * 10]
    assert [layer.cast_bytes for layer in profile.layers] == copies
    small, large = (profile.at(size).layers for size in (8, 16))
    for one, other in zip(small, large, strict=True):
        assert other.stored_bytes == 2 * one.stored_bytes
        assert one.temporary_bytes is None  # only a GPU counts it


def test_loss_belongs_to_the_last_layer(folder: Path) -> None:
    done = run_forked("profile", "toy:with_loss", "--sizes", "8", "--repeat", "1", cwd=folder)
    assert done.returncode == 0, done.stderr
    *_, last = ModelProfile.load(folder / "profile.json").layers
    assert last.activation_bytes == 4  # the loss
    assert last.stored_bytes == 4 * 8 * (128 + 10)  # its square needs the output


def test_builtin_model_is_profiled_by_formulas(folder: Path) -> None:
    sizes = ["--sizes", "4", "2", "1"]
    done = run_forked("profile", "gpt-2x64x32", "--flops", "1e12", *sizes, cwd=folder)
    assert done.returncode == 0, done.stderr
    profile = ModelProfile.load(folder / "profile.json")
    assert profile.microbatch_size == 4
    assert profile.microbatch_sizes == (1, 2, 4)
    assert profile.at(1).layers[1].stored_bytes * 4 == profile.layers[1].stored_bytes
    assert profile.layers[1].forward == pytest.approx(4 * 32 * (24 * 64**2 + 4 * 32 * 64) / 1e12)
    assert json.loads((folder / "profile.json").read_text())["flops"] == 1e12


def test_size_1_is_skipped_for_batch_norm(folder: Path) -> None:
    done = run_forked("profile", "toy:norm", "--repeat", "1", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert "micro-batches of 1: layer '1.BatchNorm1d' fails" in done.stdout
    assert ModelProfile.load(folder / "profile.json").microbatch_sizes == (2, 4)


def test_profile_enables_gradients_that_a_module_disabled(folder: Path) -> None:
    done = run_forked("profile", "toy:ungraded", "--sizes", "4", "--repeat", "1", cwd=folder)
    assert done.returncode == 0, done.stderr
    profile = ModelProfile.load(folder / "profile.json")
    assert profile.layers[0].stored_bytes == 4 * 64 * 4
    assert profile.flops is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["toy:biuld"], "did you mean 'build'?"),
        (["toy:number"], "toy:number is a int"),
        (["toi:build"], "no module 'toi'"),
        (["toy:"], "expected: module:factory"),
        (["broken:build"], "No module named 'no_such_package' (broken.py:1)"),
        (["script:build"], "importing 'script' raises SystemExit: 3"),
        (["toy:raising"], "ZeroDivisionError: division by zero (toy.py:"),
        (["toy:leaving"], "SystemExit: no such file"),
        (["toy:nothing"], "toy:nothing() returned nothing"),
        (["toy:alone"], "returned a Linear"),
        (["toy:function"], "as layer 0"),
        (["toy:empty"], "a model without layers"),
        (["toy:no_example"], "a int as the example"),
        (["toy:scalar"], "a tensor of shape () as the example"),
        (["toy:misfit"], "layer '1.Linear' fails in its forward with micro-batches of 2"),
        (["toy:fixed"], "layer '0.Fixed' fails in its forward with micro-batches of 2"),
        (["toy:wrapping"], "layer '1.Wrapping' returns a Output, in which no tensor can be"),
        (["toy:half"], "register_dataclass(Output)"),
        (["toy:returning_nothing"], "layer '0.Nothing' returns a NoneType"),
        (["toy:meta"], "is on the device 'meta'"),
        (["toy:inferring"], "built in torch.inference_mode()"),
        (["toy:immovable"], "layer '0.Linear' cannot be moved to cpu: OutOfMemoryError"),
        (["toy:norm", "--sizes", "2", "1"], "layer '1.BatchNorm1d' fails in its forward"),
        (["toy:build", "--sizes", "9" * 400], "1 to 1000000000, each once"),
        (["bert-base", "--flops", "1e9", "--repeat", "3"], "--repeat 3 for bert-base"),
        (["bert-base", "--flops", "1e9", "--device", "cpu"], "--device for bert-base"),
        (["toy:build", "--repeat", "0"], "--repeat 0"),
        (["toy:build", "--sizes", "4", "4"], "--sizes 4 4"),
        (["toy:build", "--flops", "1e9"], "--flops 1e+09 for toy:build"),
        (["toy:build", "-o", "p.yaml"], "ends in .json or .toml"),
        (["bert-base"], "bert-base without --flops"),
        (["bert-bass", "--flops", "1e9"], "did you mean 'bert-base'?"),
        (["bert-base", "--flops", "0"], "flops is 0"),
    ],
)
def test_bad_input_is_rejected_without_traceback(
    folder: Path, arguments: list[str], message: str
) -> None:
    before = {path.name for path in folder.iterdir()}
    done = run_forked("profile", *arguments, cwd=folder)
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "expected:" in done.stderr
    assert "fix:" in done.stderr
    assert "Traceback" not in done.stderr
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == before


def saved_bytes(model: nn.Sequential, example: Tensor) -> int:
    """Return the bytes that autograd saves in a whole forward, each storage once."""
    storages: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(example)
    assert output.requires_grad
    return sum(storages.values())


@pytest.mark.parametrize("inplace", [False, True])
def test_stored_bytes_of_layers_sum_to_those_of_the_model(inplace: bool) -> None:
    layers: list[nn.Module] = [nn.Embedding(50, 32)]
    for _ in range(3):
        layers += [nn.Linear(32, 32), nn.ReLU(inplace=inplace), nn.LayerNorm(32), nn.Tanh()]
    model, example = nn.Sequential(*layers), torch.randint(50, (4, 8))
    profiled = ProfiledModel.of((model, example), source="test")
    found = measure_layers(profiled, size=4, other_sizes=[], repeat=1, device=CPU)
    assert sum(layer.stored_bytes for layer in found) == saved_bytes(model, example)


class Pair(nn.Module):
    def forward(self, x: Tensor, y: Tensor, scale: float) -> tuple[Tensor, dict[str, Tensor]]:
        return x * scale, {"y": y}


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, both: tuple[Tensor, dict[str, Tensor]]) -> Tensor:
        return both[0] * self.weight + both[1]["y"]


def test_layers_may_take_several_arguments_and_return_containers() -> None:
    example = (torch.ones(4, 6), torch.ones(4, 6), 2.0)
    profiled = ProfiledModel.of(([Pair(), Join()], example), source="test")
    pair, join = measure_layers(profiled, size=2, other_sizes=[4], repeat=1, device=CPU)
    assert pair.activation_bytes == 2 * 2 * 6 * 4
    assert join.sizes[0].activation_bytes == 4 * 6 * 4
    assert pair.stored_bytes == 0, "it has no gradients"
    assert join.stored_bytes == 2 * 6 * 4


def test_measuring_leaves_no_gradients() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    weights = [p.detach().clone() for p in model.parameters()]
    profiled = ProfiledModel.of((model, torch.ones(2, 3)), source="test")
    measure_layers(profiled, size=2, other_sizes=[], repeat=2, device=CPU)
    assert all(p.grad is None for p in model.parameters())
    assert all(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))


class Both(NamedTuple):
    x: Tensor
    y: Tensor


class Naming(nn.Module):
    def forward(self, x: Tensor) -> Both:
        return Both(x, 2 * x)


class Unnaming(nn.Module):
    def forward(self, both: Both) -> Tensor:
        return both.x + both.y


def measured(*layers: nn.Module, example: Tensor, repeat: int = 1) -> tuple[Layer, ...]:
    profiled = ProfiledModel.of((list(layers), example), source="test")
    return measure_layers(profiled, size=4, other_sizes=[], repeat=repeat, device=CPU)


def test_layer_may_return_a_named_tuple() -> None:
    naming, _ = measured(Naming(), Unnaming(), example=torch.ones(4, 6))
    assert naming.activation_bytes == 2 * 4 * 6 * 4


def test_lazy_layer_is_materialized_in_first_forward() -> None:
    (layer,) = measured(nn.LazyLinear(3), example=torch.ones(4, 6))
    assert (layer.parameter_bytes, layer.stored_bytes) == (4 * 3 * 7, 4 * 4 * 6)


class Wasteful(nn.Module):
    """Computes tensors that are freed before the end of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        (self.weight * (x + 1)).exp().sum()
        return x * self.weight


def test_tensors_freed_during_forward_are_not_stored() -> None:
    (layer,) = measured(Wasteful(), example=torch.ones(4, 6))
    assert layer.stored_bytes == 4 * 6 * 4, "the input alone"


class Adding(nn.Module):
    """Writes into its input, and records its contents."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x[0, 0].item())
        return x.add_(1) * self.weight


@pytest.mark.parametrize("requires_grad", [False, True])
def test_every_run_gets_an_unmodified_example(requires_grad: bool) -> None:
    layer = Adding()
    example = torch.ones(4, 6, requires_grad=requires_grad)
    measured(layer, example=example, repeat=3)
    assert layer.seen == [1.0] * 5, "once for memory, once to warm up, three times"
    assert example.grad is None


def test_eval_mode_model_is_profiled_in_train_mode_and_restored() -> None:
    model = [nn.Linear(6, 6), nn.Sequential(nn.Dropout(0.5)).eval(), nn.Linear(6, 6)]
    _, dropout, _ = measured(*model, example=torch.ones(4, 6))
    assert dropout.stored_bytes > 0, "the mask"
    assert [module.training for module in model] == [True, False, True]


def test_layer_that_disables_gradients_does_not_affect_others() -> None:
    class Frozen(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.set_grad_enabled(False)
            return x + 1

    with torch.enable_grad():  # so that a failure does not affect other tests
        _, linear = measured(Frozen(), nn.Linear(6, 6), example=torch.ones(4, 6))
        assert torch.is_grad_enabled()
    assert linear.stored_bytes == 4 * 6 * 4


class FailingBackward(nn.Module):
    """Fails in the backward of a single sample."""

    def forward(self, x: Tensor) -> Tensor:
        output = x * 2
        if len(x) == 1 and output.requires_grad:
            output.register_hook(self.fail)
        return output

    def fail(self, gradient: Tensor) -> None:
        raise RuntimeError("a single sample")


def test_optional_size_is_skipped_if_a_backward_fails() -> None:
    model = nn.Sequential(nn.Linear(6, 6), FailingBackward())
    profiled, warnings = ProfiledModel.of((model, torch.ones(4, 6)), source="test"), list[str]()
    found = measure_layers(
        profiled,
        size=4,
        other_sizes=[2, 1],
        optional=[1],
        repeat=1,
        device=CPU,
        warn=warnings.append,
    )
    assert [at.microbatch_size for at in found[0].sizes] == [2]
    assert len(warnings) == 1
    assert "its backward with micro-batches of 1" in warnings[0]
    assert all(p.grad is None for p in model.parameters())


class Log:
    """What the layers of a model did, in order, and their outputs."""

    def __init__(self) -> None:
        self.actions: list[str] = []
        self.inputs: list[float] = []
        self.gradients: dict[str, list[Tensor]] = {}
        self.outputs: list[weakref.ref[Tensor]] = []
        self.num_kept: list[int] = []  # outputs, in each backward

    def count_kept(self) -> int:
        return sum(output() is not None for output in self.outputs)


class Logged(nn.Module):
    """Writes into its input, and stores it for its backward."""

    def __init__(self, name: str, log: Log) -> None:
        super().__init__()
        self.name, self.log = name, log
        self.weight = nn.Parameter(torch.full((6,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        self.log.actions.append(f"F{self.name}")
        if self.name == "0":
            self.log.inputs.append(x[0, 0].item())
        output = x.add_(1) * self.weight
        output.register_hook(self.log_backward)
        self.log.outputs.append(weakref.ref(output))
        return output

    def log_backward(self, gradient: Tensor) -> None:
        self.log.actions.append(f"B{self.name}")
        self.log.gradients.setdefault(self.name, []).append(gradient.clone())
        self.log.num_kept.append(self.log.count_kept())


def test_microbatch_is_timed_as_forwards_and_backwards_of_all_layers() -> None:
    log = Log()
    example = torch.ones(4, 6)
    layers = [Logged(str(index), log) for index in range(3)]
    profiled = ProfiledModel.of((layers, example), source="test")
    assert time_microbatch(profiled, 4, CPU, num_runs=2) > 0
    assert log.actions == ["F0", "F1", "F2", "B2", "B1", "B0"] * 3, "one warm-up and two runs"
    assert log.inputs == [1.0] * 3
    assert torch.equal(example, torch.ones(4, 6))
    for first, *others in log.gradients.values():
        assert first.std() > 0
        assert all(torch.equal(first, other) for other in others), "drawn in the warm-up"
    assert log.num_kept == [2, 1, 0] * 3, "a stage has sent its own output"
    assert log.count_kept() == 0


class Exponential(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).exp()


def test_layers_that_cannot_train_one_after_another_are_named() -> None:
    layers = [Exponential(6, 6), nn.ReLU(inplace=True)]  # exp keeps its output, which changes
    profiled = ProfiledModel.of((layers, torch.ones(4, 6)), source="test")
    with pytest.raises(DescriptionError, match="the whole model fails with micro-batches of 4"):
        time_microbatch(profiled, 4, CPU)


def test_microbatch_of_containers_and_layers_without_gradients_is_timed() -> None:
    example = (torch.ones(4, 6), torch.ones(4, 6), 2.0)
    profiled = ProfiledModel.of(([Pair(), Join()], example), source="test")
    assert time_microbatch(profiled, 2, CPU) > 0


@pytest.mark.parametrize(
    ("times", "whole", "expected"),
    [
        ([(4.0, 1.0), (2.0, 1.0)], 12.0, [8.0, 4.0]),  # the device is the bottleneck
        ([(1.0, 3.0), (1.0, 6.0)], 6.0, [2.0, 4.0]),  # the host is
        ([(4.0, 1.0), (1.0, 3.0)], 14.0, [8.0, 6.0]),  # each one in one of them
        ([(0.0, 0.0), (0.0, 0.0)], 2.0, [1.0, 1.0]),
        ([(2.0, 2.0), (3.0, 3.0)], None, [2.0, 3.0]),  # on a CPU both are the same
    ],
)
def test_layers_share_the_time_of_the_model_by_their_bottlenecks(
    times: list[tuple[float, float]], whole: float | None, expected: list[float]
) -> None:
    found = times_in_training([Timed(*each) for each in times], whole)
    assert found == pytest.approx(expected)
    assert whole is None or sum(found) == pytest.approx(whole)

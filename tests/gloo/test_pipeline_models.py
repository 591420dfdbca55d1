"""Models with skips, of Hugging Face, and with tied embeddings train in stages as in one process.

Compared are losses, gradients, the norm for clipping, and the weights after an optimizer step.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from polyrhythm.run.comm.launch import DistContext
from polyrhythm.run.pipeline.pipeline import Pipeline
from tests.gloo.language_models import LANGUAGES, LLAMA, Language, next_token_loss, text
from tests.gloo.pipelines import (
    assert_close,
    assert_equal,
    gradients,
    merged,
    random_batch,
    run_single_process,
    run_stages,
    stack_of,
    step,
)
from tests.grids import long_except


class Training:
    """Trains one step, then two steps before an update; records the same values in both cases."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, Tensor]] = {}
        self.losses: list[float] = []

    def run(
        self,
        module: nn.Module,
        backward: Callable[[Tensor, Tensor], float],
        clip: Callable[[float, float], Tensor],
    ) -> None:
        # Not Adam: it makes full steps from gradients that are only rounding errors.
        optimizer = torch.optim.SGD(module.parameters(), lr=0.5, momentum=0.9, weight_decay=0.1)
        self.losses.append(backward(*text(0)))
        self.found["one batch"] = gradients(module)
        norms = {"inf": clip(1e9, float("inf")), "2": clip(0.25, 2.0)}
        self.found["norms"] = norms
        self.found["clipped"] = gradients(module)
        optimizer.step()
        self.found["updated"] = weights(module)
        optimizer.zero_grad()
        self.losses += [backward(*text(1)), backward(*text(2))]
        self.found["two batches"] = gradients(module)
        optimizer.step()
        self.found["updated again"] = weights(module)


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def whole(language: Language) -> dict[str, Any]:
    model = language.build()
    training = Training()

    def backward(inputs: Tensor, target: Tensor) -> float:
        loss = next_token_loss(model(inputs, use_cache=False).logits, target)
        loss.backward()
        return loss.item()

    def clip(max_norm: float, norm_type: float) -> Tensor:
        return nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)

    training.run(model, backward, clip)
    return {"losses": training.losses, "found": training.found}


def staged(language: Language, group: Any) -> dict[str, Any]:
    training = Training()
    names = {} if language.names is LLAMA else language.names  # without names they are found
    with Pipeline.from_layers(
        language.build(),
        **names,
        process_group=group,
        loss_fn=next_token_loss,
        n_microbatches=4,
        schedule="kfkb:2",
        timeout=20,
    ) as pipeline:

        def backward(inputs: Tensor, target: Tensor) -> float:
            losses: list[Tensor] = []
            step(pipeline, inputs, target, losses=losses)
            return torch.stack(losses).mean().item() if losses else 0.0

        training.run(pipeline.module, backward, pipeline.clip_grad_norm_)
    return {"losses": training.losses, "found": training.found}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    # Once, before the fork: every process would need seconds for it.
    import transformers.models.gpt2.modeling_gpt2
    import transformers.models.llama.modeling_llama  # noqa: F401

    folder = tmp_path_factory.mktemp("models")

    def single_process() -> dict[str, Any]:
        return {name: whole(language) for name, language in LANGUAGES.items()}

    def work(ctx: DistContext) -> dict[str, Any]:
        return {name: staged(language, None) for name, language in LANGUAGES.items()}

    return {
        "whole": run_single_process(single_process, folder),
        2: run_stages(2, work, folder),
        3: run_stages(3, work, folder),
    }


@pytest.mark.timeout(90)
@pytest.mark.parametrize("num_stages", long_except([2, 3], 1))
@pytest.mark.parametrize("name", LANGUAGES)
def test_language_model_stages_match_single_process(
    trained: dict[Any, Any], name: str, num_stages: int
) -> None:
    language = LANGUAGES[name]
    expected = trained["whole"][name]
    stages = [stage[name] for stage in trained[num_stages]]
    assert stages[-1]["losses"] == pytest.approx(expected["losses"], abs=1e-5)
    for key, values in expected["found"].items():
        actual = [dict(stage["found"][key]) for stage in stages]
        if name.endswith(" tied") and key != "norms":
            # Two stages hold this parameter: `merged` requires bit-identical copies.
            actual[-1][language.embedding] = actual[-1].pop("lm_head.weight")
        assert_close(merged(actual), values)


class Down(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, out, 3, stride, padding=1)
        self.norm = nn.GroupNorm(2, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x)).relu()


class Up(nn.Module):
    def __init__(self, channels: int, skip_channels: int, out: int) -> None:
        super().__init__()
        self.widen = nn.ConvTranspose2d(channels, channels, 2, 2)
        self.join = nn.Conv2d(channels + skip_channels, out, 3, padding=1)

    def forward(self, x: Tensor, skipped: Tensor) -> Tensor:
        return self.join(torch.cat([self.widen(x), skipped], dim=1)).relu()


class Last(nn.Module):
    def __init__(self, channels: int, skip_channels: int, out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels + skip_channels, out, 1)

    def forward(self, x: Tensor, skipped: Tensor) -> Tensor:
        return self.conv(torch.cat([x, skipped], dim=1))


class UNet(nn.Module):
    """A U-Net of three stages: the output of the first goes to both others."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        down = Down(3, 4, 1), Down(4, 6, 2), Down(6, 8, 2)
        self.layers = nn.Sequential(*down, Up(8, 6, 6), Up(6, 4, 4), Last(4, 4, 3))

    def forward(self, image: Tensor) -> Tensor:
        fine = self.layers[0](image)
        middle = self.layers[1](fine)
        x = self.layers[3](self.layers[2](middle), middle)
        return self.layers[5](self.layers[4](x, fine), fine)


UNET_SKIPS = {3: 1, 4: 0, 5: 0}
LAYERS_PER_STAGE = [2, 3, 1]


class Shared(nn.Module):
    """Every stage has one layer of its own and one layer that all stages share."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        own, (shared,) = stack_of(3), stack_of(1, seed=9)
        self.layers = nn.Sequential(own[0], shared, own[1], shared, own[2], shared)
        shared[0].bias.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


SEQUENTIAL: dict[str, tuple[Callable[[], Any], dict[int, int], tuple[int, ...]]] = {
    "U-Net": (UNet, UNET_SKIPS, (5, 3, 8, 8)),
    "shared by three": (partial(Shared, frozen=False), {}, (8, 8)),
    "shared by three, bias frozen": (partial(Shared, frozen=True), {}, (8, 8)),
}


def sequential_whole(name: str) -> dict[str, dict[str, Tensor]]:
    build, _, shape = SEQUENTIAL[name]
    model = build()
    for seed in range(2):
        inputs, target = random_batch(*shape, seed=seed)
        mse_loss(model(inputs), target).backward()
    found = {"before": gradients(model.layers)}
    found["norms"] = {
        str(kind): nn.utils.clip_grad_norm_(model.parameters(), max_norm, kind)
        for kind, max_norm in ((float("inf"), 1e9), (3.0, 1e9), (2.0, 0.01))
    }
    return {**found, "clipped": gradients(model.layers)}


def sequential_staged(name: str, schedule: str) -> dict[str, dict[str, Tensor]]:
    build, skips, shape = SEQUENTIAL[name]
    with Pipeline.from_sequential(
        build().layers,
        skips=skips,
        layers_per_stage=LAYERS_PER_STAGE,
        loss_fn=mse_loss,
        n_microbatches=4,
        schedule=schedule,
        timeout=20,
    ) as pipeline:
        for seed in range(2):
            step(pipeline, *random_batch(*shape, seed=seed))
        found = {"before": gradients(pipeline.module)}
        found["norms"] = {
            str(kind): pipeline.clip_grad_norm_(max_norm, kind)
            for kind, max_norm in ((float("inf"), 1e9), (3.0, 1e9), (2.0, 0.01))
        }
        return {**found, "clipped": gradients(pipeline.module)}


@pytest.mark.timeout(60)
def test_skips_and_shared_layers_match_single_process(tmp_path: Path) -> None:
    schedules = ("1f1b", "gpipe", "kfkb:2", "bounded:3,2,2")

    def single_process() -> dict[str, Any]:
        return {name: sequential_whole(name) for name in SEQUENTIAL}

    def work(ctx: DistContext) -> dict[str, Any]:
        return {
            name: [sequential_staged(name, schedule) for schedule in schedules]
            for name in SEQUENTIAL
        }

    expected = run_single_process(single_process, tmp_path)
    stages = run_stages(3, work, tmp_path)
    for name in SEQUENTIAL:
        by_stage = [stage[name] for stage in stages]
        for found in by_stage:
            for other in found[1:]:
                assert_equal(other, found[0])  # bit-identical under every schedule
        for key in ("before", "norms", "clipped"):
            actual = [renamed(found[0][key]) for found in by_stage]
            assert_close(merged(actual), expected[name][key])


def renamed(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Rename layers 3 and 5 of `Shared`, which are its layer 1."""
    is_shared = "1.0.weight" in values or "3.0.weight" in values or "5.0.weight" in values
    if not is_shared:
        return values
    return {f"1.{name[2:]}" if name[0] in "35" else name: value for name, value in values.items()}

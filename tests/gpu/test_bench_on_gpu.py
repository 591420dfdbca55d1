"""The cheap parts of `bench gpu`, and a profile whose memory is that of training on a GPU."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.gpu import averaging, predictions, replicas, single, syncs
from benchmarks.gpu.model import GPT_125M
from benchmarks.harness.child import in_child
from polyrhythm.cost.memory import needed
from polyrhythm.describe.cluster import Cluster, Device
from polyrhythm.describe.model import ModelProfile
from polyrhythm.plan.options import TrainingJob
from polyrhythm.plan.problem import Problem
from polyrhythm.run.profile.profile import measure_profile

pytestmark = [
    pytest.mark.skipif(not torch.cuda.device_count(), reason="this machine has no CUDA device"),
    pytest.mark.timeout(200),
]
ROWS, WIDTH, NUM_CLASSES = 4096, 1024, 8192


def test_quick_parts_have_their_figures() -> None:
    def measure() -> dict[str, float]:
        return {
            **single.measure_pipeline(GPT_125M, quick=True),
            **replicas.measure_gloo_loop(GPT_125M, quick=True),
            **averaging.measure_overlap(GPT_125M, quick=True),
            **averaging.measure_hooks(quick=True),
            **averaging.measure_first_step(GPT_125M, quick=True),
            **predictions.measure("125m", GPT_125M, quick=True),
            **syncs.measure(GPT_125M, quick=True),  # the last: it uses the GPU in this process
        }

    found = in_child("quick parts", measure, dict[str, float], 180.0)
    names = "pipeline_1stage", "gloo_decoupled_350m", "overlap", "hook_us", "step1_peak"
    assert {*names, "host_syncs", "memory_ratio_tiny_1f1b_stage1"} <= found.keys()
    assert 0.5 < found["step1_peak"] < 1.5
    assert found["host_syncs"] <= 1


def stack() -> tuple[nn.Module, Tensor, object]:
    """Return a model whose loss needs more memory than any of its layers stores."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(6):
        layers += [nn.Linear(WIDTH, WIDTH), nn.GELU()]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, NUM_CLASSES))
    return model, torch.randn(ROWS, WIDTH), cross_entropy


def cross_entropy(logits: Tensor) -> Tensor:
    target = torch.zeros(len(logits), dtype=torch.long, device=logits.device)
    return functional.cross_entropy(logits, target)


def profiled() -> ModelProfile:
    source = f"{__name__}:stack"
    return measure_profile(source, sizes=[ROWS], repeat=2, device="cuda", autocast="bfloat16")


def train() -> dict[str, float]:
    """Accumulate two micro-batches in each step; return the peak of allocated memory."""
    model, example, _ = stack()
    model, example = model.cuda(), example.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        with torch.autocast("cuda", torch.bfloat16):
            for _ in range(2):
                loss = cross_entropy(model(example))
                with torch.autocast("cuda", enabled=False):
                    loss.backward()
                del loss
        optimizer.step()
        optimizer.zero_grad()
    return {"peak": float(torch.cuda.max_memory_allocated())}


def test_profile_predicts_the_peak_of_training() -> None:
    profile = in_child("profile", profiled, ModelProfile, 90.0)
    assert profile.workspace_bytes is not None
    assert all(layer.temporary_bytes is not None for layer in profile.layers)
    assert profile.layers[0].cast_bytes == 2 * WIDTH * WIDTH
    measured = in_child("training", train, dict[str, float], 90.0)["peak"]
    cluster = Cluster(
        name="one GPU",
        devices=(Device(name="gpu", region="here"),),
        regions=("here",),
        latency=((1e-6,),),
        bandwidth=((1e11,),),
    )
    of = Problem(cluster=cluster, profile=profile, job=TrainingJob(batch_size=ROWS))
    memory = of.memory(range(len(profile.layers)), ROWS)
    assert needed(memory, in_flight=1, window=0) / measured == pytest.approx(1.0, abs=0.05)
